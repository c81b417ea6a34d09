"""`gumbel_sample`, `rejection_sample` and its ragged form: check, compile, choose, and plain JAX.

`api` holds the public functions; `dispatch` compiles and hands arrays to `verify`, the reference,
or to `specjax.pallas`. A drafted token x is accepted with probability min(1, p(x) / q(x)); after
the first rejection `next_token` draws from norm(max(p - q, 0)), and a bonus token from p if all
were accepted. Open `api` first.

Letters: `B` requests, `K` drafted tokens, `V` vocabulary, `N` rows of a ragged batch. Imported by
`processing`'s users, that is `decode`; imports `core` and, where kernels are chosen, `pallas`.
"""
