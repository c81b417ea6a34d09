"""`History`: the committed tokens of each request, which penalties, bad words and grammars read."""

from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp

from specjax.processing.token_counts import TokenCounts


class History(NamedTuple):
    """The committed tokens of a batch, which penalties, bad words and a grammar read.

    Attributes:
      token_ids: i32[B, L], the prompt and the generated tokens. Bad words of more than one token
        read the last of them.
      lengths: i32[B], how many tokens of each row are committed.
      counts: `TokenCounts` of these tokens, which penalties read.
      grammar_state: i32[B], the state of the grammar after these tokens; None is the first one of
        `SamplingParams`, where nothing was generated yet.
    """

    token_ids: jax.Array | None = None
    lengths: jax.Array | None = None
    counts: TokenCounts | None = None
    grammar_state: jax.Array | None = None


def recent_tokens(token_ids: jax.Array, lengths: jax.Array, num: int) -> jax.Array:
    """Returns the last `num` committed tokens i32[B, num] of each request, -1 before its first."""
    index = lengths[:, None] - num + jnp.arange(num, dtype=jnp.int32)[None]
    recent = jnp.take_along_axis(token_ids, jnp.clip(index, 0, token_ids.shape[1] - 1), axis=1)
    return jnp.where(index >= 0, recent, jnp.int32(-1))


jax.export.register_namedtuple_serialization(History, serialized_name="specjax.History")
