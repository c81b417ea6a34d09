"""Public samplers: argument checks and the plain-JAX reference.

A drafted token x is accepted with probability min(1, p(x) / q(x)). After the first rejection one
token is drawn from norm(max(p - q, 0)), and a bonus token from p if all were accepted.

The way of the data, for `rejection_sample`:

1. `rejection_sample` checks its arguments once, and makes `VerifyInputs` and `CallOptions` of them.
   A `RaggedDraft` goes its own way, in `batch.verify_ragged`.
2. `run_verification`, compiled, makes the inputs one per request (`batch.once_per_request`).
3. `batch.verify_shard`, once per shard of the batch, calls one of:
4. the reference (`reference.verify`, `reference.next_token`): `verify_request` for each `Request`;
5. the kernels: `specjax.pallas.verify.verify_rows`, which makes a `FlatBatch` of the inputs.

`rules.coupled` goes the same way without draft logits. The reference is `couple_request`, which
draws a target row's token and compares. On the kernels the last program of a row draws.

One public call is one file: `rejection_sample`, `gumbel_sample`, `tree_rejection_sample`. Code that
is inside a program already calls functions that do not check: `verify_draft` and `sample_batch`.
`gather_drafts` brings drafts to another batch, for a loop of your own. Open `rejection_sample`
first.

`reference/` holds all rules in plain JAX, and `trees/` verifies drafted trees.

Letters: `B` requests, `K` drafted tokens, `V` vocabulary, `N` drafted tokens of a ragged batch.
"""
