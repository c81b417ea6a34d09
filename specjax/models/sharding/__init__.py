"""A decoder over the devices of a mesh: each runs the ordinary decoder of its share.

A share is what Megatron gives a device: heads, a part of each MLP, a part of the vocabulary. Open
`share` first, which says what a share has of each array. `split_model` runs all shares as one
`Model`; `specjax.models.hf.read_shares` reads each from a folder.

Per layer two sums of [B, T, E] travel, after attention and after the MLP, and one per step after
the embedding. A device has the logits [B, T, W], W = ceil(V / num_shares) rounded up to whole
blocks of 128. Axes: `B` requests, `T` new tokens, `E` hidden, `V` vocabulary.

References:
  Shoeybi et al., 2019, arXiv:1909.08053.
"""
