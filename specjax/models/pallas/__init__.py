"""Triton kernels of a decode step: a few rows through a layer's products, attention and norms.

`attention` launches those of attention. `matmul` multiplies in split-K partial sums, `qkv` sums,
scales and rotates queries, keys and values, `attention_kernels` attends to splits of the cache
(flash-decoding), `online_softmax` is the running softmax of one split and `combine` puts splits
together, `add_rms_norm` adds a product to the residual stream and begins the next norm. Imports
`specjax.pallas.launch` and `specjax.pallas.tiles`; imported by `models.ops` and `models.attention`.

Letters: `B` requests, `T` tokens of each, `H` query heads, `G` key-value heads, `S` cache slots,
`D` head dimension, `E` hidden.
"""
