"""`Verification` and `TreeVerification`: the tokens that a speculative step emits.

Axes: `B` requests, `K` most drafted tokens per request and step, `D` most nodes on a path.
"""

from typing import NamedTuple

import jax
import jax.export

__all__ = ["TreeVerification", "Verification"]


class Verification(NamedTuple):
    """The tokens that one speculative step emits.

    Attributes:
      token_ids: i32[B, K + 1], the emitted tokens, padded with -1.
      num_accepted: i32[B], accepted drafted tokens.
      num_emitted: i32[B], `num_accepted` and the recovered or bonus token; without that token
        where the target row that decides it is invalid.
      logprobs: f32[B, K + 1], log p of each emitted token (greedy requests at temperature 1, or 0
        with `greedy_logprobs=False`), 0 at padding.
    """

    token_ids: jax.Array
    num_accepted: jax.Array
    num_emitted: jax.Array
    logprobs: jax.Array


jax.export.register_namedtuple_serialization(Verification, serialized_name="specjax.Verification")


class TreeVerification(NamedTuple):
    """The tokens that one speculative step of drafted trees emits, and the path that gave them.

    Attributes:
      token_ids: i32[B, D + 1], the emitted tokens, padded with -1.
      num_accepted: i32[B], accepted nodes.
      num_emitted: i32[B], `num_accepted` and the token after them; without that token where the
        target row that decides it is invalid.
      logprobs: f32[B, D + 1], log p of each emitted token (greedy requests at temperature 1), 0 at
        padding.
      nodes: i32[B, D], the accepted nodes from the root's child on, padded with -1: the rows of a
        cache that stay.
    """

    token_ids: jax.Array
    num_accepted: jax.Array
    num_emitted: jax.Array
    logprobs: jax.Array
    nodes: jax.Array


jax.export.register_namedtuple_serialization(
    TreeVerification, serialized_name="specjax.TreeVerification"
)
