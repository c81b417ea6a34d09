"""Triton kernels of sampling, verification and cutoffs, through Pallas.

`sample.sample_rows`, `verify.verify_rows` and `cutoff.cutoff_rows` launch them; `docs/kernels.md`
lists every kernel and draws the flow of data. All reduce a row of logits by tiles to pairs

    m = max x        l = sum exp((x - m) / τ)

of blocks (`blocks`) at temperature τ, which merge into log-probabilities; a token is then drawn by
two-level Gumbel-max (`gumbel_max`). The arithmetic is that of `specjax.core`. `launch` starts every
kernel of the library, `kernel_config` has their sizes. Open `sample` first, then `target_rows`,
`next_token` and `emit_tokens` in this order.

Letters: `B` requests, `K` drafted tokens, `V` vocabulary, `R` rows. Imported by `samplers` and
`processing`; the kernels of models import `launch` and `kernel_config`.
"""
