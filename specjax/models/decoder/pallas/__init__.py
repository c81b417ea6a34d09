"""Triton kernels of a step or a chunk of a prompt: a layer's products, attention and norms.

A layer of B >= 4 requests is eight launches, or nine where `combine_kernel` follows, in this order:

    add_rms_norm_kernel    x + MLP of the layer before, deferred norm     (add_rms_norm.py)
    split_k_matmul_kernel  queries, keys, values as split-K parts         (matmul.py)
    prepare_qkv_kernel     sums, norms, RoPE, writes the cache            (qkv.py, request_qkv.py)
    attention_kernel       flash-decoding over splits of the cache        (attention_kernels.py)
    split_k_matmul_kernel  output projection as split-K parts             (matmul.py)
    add_rms_norm_kernel    x + attention, deferred norm                   (add_rms_norm.py)
    fused_glu_kernel       activation(gate) * up                          (matmul.py)
    split_k_matmul_kernel  down projection as split-K parts               (matmul.py)

With B < 4 and few tokens, `fused_attention_kernel` and `combine_kernel` (combine.py) replace
`prepare_qkv_kernel` and `attention_kernel`. XLA multiplies more than 128 rows, and
`glu_activation_kernel` (matmul.py) follows its product with gate and up.
Open `attention.py` first for the order of launches, then `online_softmax.py` for the formula.
`kv_split.py` has the slots that a program of attention reads, `tilings.py` the sizes.

Letters: `B` requests, `T` tokens of each, `H` query heads, `G` key-value heads, `S` cache slots,
`D` head dimension, `E` hidden.
"""
