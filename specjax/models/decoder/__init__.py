"""The Flax decoder: layers, a whole transformer, and its step in plain JAX or in the kernels.

Open `transformer` first. It stacks the layers of `layers`, in plain JAX with `attention` and
`rope`; `causal` runs whole sequences without a cache. `config` holds the differences of families.
`dispatch` runs a step in plain JAX or, by `decode_step_kernels` and `decode_ops`, in the kernels of
`pallas/`; both use `shared_math`. `row_groups` is a plain step whose rows depend on no other row.

Axes: `B` requests, `T` new tokens, `E` hidden, `D` head dimension, `V` vocabulary.
"""
