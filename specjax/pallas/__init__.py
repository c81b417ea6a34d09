"""Triton kernels of sampling, verification and cutoffs, through Pallas.

`sample.sample_rows`, `verify.verify_rows` and `cutoff.rows.cutoff_rows` launch them;
`docs/kernels.md` lists every kernel and draws the flow of data. Each call first reduces rows of
logits by tiles, at temperature τ, to pairs

    m = max x        l = sum exp((x - m) / τ)

of blocks (`blocks`; sub-blocks of 32 in cutoffs). In sampling and verification the pairs merge into
log-probabilities, and a token is drawn by two-level Gumbel-max (`gumbel_max`). The arithmetic is
that of `specjax.core`. `launch` starts every kernel of the library, `kernel_config` has their
sizes. Open `sample` first, then `verify`, `target_rows`, `next_token` and `emit_tokens` in this
order.

Letters: `B` requests, `K` drafted tokens, `V` vocabulary, `R` rows. Imported by `samplers` and
`processing`; the kernels of models import `launch` and `kernel_config`.
"""
