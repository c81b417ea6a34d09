"""A draft that knows some of the target's tokens: rules, counts and rows taken through its map.

Everything that a request says is by target ids; a row of draft logits is [V_d]. What is per
token is gathered into [V_d] once per proposal, so that a draft step is as cheap as V_d is small.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.checks import as_array, check_count, parse_array
from specjax.core.token_map import check_token_map, invert_token_map, map_draft_ids, take_mapped
from specjax.processing.bad_words import word_lengths
from specjax.processing.history import History
from specjax.processing.sampling_params import SamplingParams

_BITS_PER_WORD = 32


class DraftVocabulary(NamedTuple):
    """The ids of a draft vocabulary.

    Attributes:
      token_map: i32[V_d], the target's id of every draft id.
      draft_ids: i32[V], the draft id of every token of the target; V_d where there is none.
    """

    token_map: jax.Array
    draft_ids: jax.Array

    def token_ids(self, draft_ids: jax.Array) -> jax.Array:
        """Returns target ids of drawn draft ids; -1 stays."""
        return map_draft_ids(self.token_map, draft_ids)

    def columns(self, token_ids: jax.Array) -> jax.Array:
        """Returns draft ids of target ids, V_d where there is none."""
        return take_mapped(self.draft_ids, token_ids, self.token_map.shape[0])

    def spread(self, logits: jax.Array) -> jax.Array:
        """Returns logits [B, V] by target ids of logits [B, V_d]; -inf where the draft has none."""
        return take_mapped(logits, self.draft_ids, -jnp.inf)

    def take(self, rules: SamplingParams, history: History) -> tuple[SamplingParams, History]:
        """Returns checked rules and a history for rows [V_d].

        A token that a rule of another width does not have counts 0, has no bias, and is not allowed
        where there is a mask.
        """
        bias, allowed, words, counts = rules.bias, rules.allowed, rules.bad_words, history.counts
        if bias is not None:
            bias = take_mapped(bias, self.token_map, 0)
        if allowed is not None:
            allowed = self._take_mask(allowed)
        if words is not None and words.size:
            # Only the last token of a word is a column; the others are compared with the text.
            index = jax.lax.broadcasted_iota(jnp.int32, words.shape, words.ndim - 1)
            is_last = index == word_lengths(words)[..., None] - 1
            words = jnp.where(is_last, self.columns(words), words)
        if counts is not None:
            counts = jax.tree.map(lambda table: take_mapped(table, self.token_map, 0), counts)
        rules = rules._replace(bias=bias, allowed=allowed, bad_words=words)
        return rules, history._replace(counts=counts)

    def _take_mask(self, allowed: jax.Array) -> jax.Array:
        """Returns a mask as bool [..., V_d], of one in bool or in words of 32 tokens."""
        if allowed.dtype == jnp.bool_:
            return take_mapped(allowed, self.token_map, False)
        words = take_mapped(allowed, self.token_map // _BITS_PER_WORD, 0)
        shift = (self.token_map % _BITS_PER_WORD).astype(jnp.uint32)
        bits = words >> jnp.broadcast_to(shift, words.shape)
        return (bits & jnp.uint32(1)) != 0


def read_vocabulary(token_map: Any, vocab_size: Any) -> DraftVocabulary | None:
    """Returns the vocabulary of a proposal, None without a map, or refuses its arguments."""
    if token_map is None:
        if vocab_size is not None:
            raise ValueError(
                f"vocab_size is {vocab_size!r} without a token_map; drafts without a map have the "
                "ids of their logits."
            )
        return None
    token_map = as_array("token_map", token_map)
    if token_map.ndim != 1 or not token_map.shape[0]:
        raise ValueError(f"token_map has shape {token_map.shape}; it needs [V_d], V_d >= 1.")
    why = "V of the target, to whose ids token_map leads"
    vocab_size = check_count("vocab_size", vocab_size, 1, why)
    token_map = parse_array("token_map", token_map, jnp.int32, token_map.shape)
    check_token_map("token_map", token_map, vocab_size)
    token_map = jnp.asarray(token_map)
    return DraftVocabulary(token_map, invert_token_map(token_map, vocab_size))
