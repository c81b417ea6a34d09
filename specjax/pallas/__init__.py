"""Triton kernels of sampling, verification and cutoffs, through Pallas.

`sample.sample_rows`, `verify.verify_rows` and `cutoff.rows.cutoff_rows` launch them;
`docs/kernels.md` lists every kernel and draws the flow of data. Each call first reduces rows of
logits by tiles, at temperature τ, to pairs

    m = max x        l = sum exp((x - m) / τ)

of blocks (`blocks`; sub-blocks of 32 in cutoffs). In sampling and verification the pairs merge into
log-probabilities, and a token is drawn by two-level Gumbel-max (`gumbel_max`). The arithmetic is in
`specjax.core`. Open `sample` first, then `verify`, `target_rows`, `next_token` and `emit_tokens` in
this order.

| module | contents |
|---|---|
| `sample` | `gumbel_sample` |
| `verify` | the launches of a call of the verifiers; a rule in the kernels |
| `draft_statistics` | the first launch of drafts without statistics |
| `reduce_rows`, `target_rows` | the launch that reduces target rows: all, or those up to the stop |
| `next_token`, `emit_tokens` | the row that decides the next token; the launches that draw it |
| `residual` | masses of max(p - q, 0), and the draw from them |
| `coupled`, `block`, `cutoff` | coupled sampling, block verification, `logit_cutoff` |
| `split` | sampling and verification of rows split over devices |
| `blocks`, `gumbel_max`, `load_request`, `threefry` | loads, stores and draws that kernels share |
| `launch`, `kernel_config` | the launch of every kernel of the library; sizes |

Letters: `B` requests, `K` drafted tokens, `V` vocabulary, `R` rows. Imported by `samplers` and
`processing`; the kernels of models import `launch` and `kernel_config`.
"""
