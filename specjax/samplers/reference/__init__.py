"""The reference: every rule of verification in plain JAX, one request at a time under `vmap`.

Open `verify` first: the accept loop of the standard rule and the dispatch to `block`, `coupled` and
`rule`. `request` is one request of a batch, and `next_token` draws the recovered or bonus token.

The kernels of `specjax.pallas` compute the same tokens and never import this room.
"""
