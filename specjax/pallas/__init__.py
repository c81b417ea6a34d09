"""Triton kernels of sampling, verification and cutoffs, through Pallas.

`sample.sample_rows`, `verify.verify_rows` and `cutoff.cutoff_rows` launch them; `launch` is the
ground of all kernels and `tiles` their sizes. Small batches reduce every row at once and draw in a
second launch (`resample`), large ones leave out rows after a rejection (`accept`, `draw`). The
arithmetic is that of `specjax.core`. Open `sample` first.

Letters: `B` requests, `K` drafted tokens, `V` vocabulary, `R` rows. Imported by `samplers` and
`processing`; the kernels of models import `launch` and `tiles`.
"""
