"""A decoder over the devices of a mesh: each runs the ordinary decoder of its share.

This is Megatron's tensor parallelism: a device has a share of the heads, of each MLP, and of the
vocabulary. Open `share` first, which gives a share's part of each array. `split_model` runs all
shares as one `Model`; `specjax.models.hf.checkpoint` reads each from a folder.

Per layer devices exchange two sums of [B, T, E], after attention and after the MLP, and per step
one after the embedding. A device has the logits [B, T, W], W = ceil(V / num_shares) rounded up to
whole blocks of 128. Axes: `B` requests, `T` new tokens, `E` hidden, `V` vocabulary.

References:
  Shoeybi et al., 2019, arXiv:1909.08053.
"""
