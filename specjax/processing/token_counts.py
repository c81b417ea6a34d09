"""`TokenCounts`: occurrences of each token in each request, which penalties read.

`count_tokens` reads the prompt once. `update_counts` adds the tokens of a step, so that no step
reads the whole text again.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp

from specjax.checks import as_array, check_count, check_type, parse_array
from specjax.devices.map_parts import map_parts
from specjax.devices.placement import pvary_like
from specjax.devices.rows import logit_rows
from specjax.devices.vocabulary_split import VocabularySplit, parse_split


class TokenCounts(NamedTuple):
    """How often each token occurs in each request: 5 bytes per request and token of V.

    A batch of 64 with V = 131072 takes 42 MB, and 34 MB without `prompt`. Frequency and presence
    penalties count generated tokens alone, as in vLLM and the OpenAI API. The repetition penalty
    reads the prompt too.

    Attributes:
      generated: i32[B, V], how often each token was generated.
      prompt: bool[B, V], whether the token occurs in the prompt. None without a repetition
        penalty.
    """

    generated: jax.Array
    prompt: jax.Array | None = None


def count_tokens(
    token_ids: jax.Array, lengths: jax.Array, vocab_size: int, *, prompt_lengths: Any = None
) -> TokenCounts:
    """Returns the counts of each request's committed tokens; `update_counts` goes on from there.

    Args:
      token_ids: i32[B, L], committed tokens. Ids outside [0, vocab_size) are not counted.
      lengths: i32[B], how many tokens of each row are committed.
      vocab_size: V of the logits, a Python int >= 1.
      prompt_lengths: i32[B], how many of the committed tokens are the prompt. None is all.

    Returns:
      `TokenCounts` of V tokens.

    Raises:
      ValueError: if the shapes do not fit together.

    Example:
      >>> counts = specjax.count_tokens(
      ...     jnp.array([[3, 0, 0, 1]]), jnp.array([4]), 5, prompt_lengths=jnp.array([1]))
      >>> counts.generated.tolist(), counts.prompt.tolist()
      ([[2, 1, 0, 0, 0]], [[False, False, False, True, False]])
    """
    vocab_size = check_count("vocab_size", vocab_size, 1, "the width of the counts")
    token_ids = as_array("token_ids", token_ids)
    if token_ids.ndim != 2:
        raise ValueError(f"token_ids has shape {token_ids.shape}; it needs [B, L].")
    token_ids = jnp.asarray(parse_array("token_ids", token_ids, jnp.int32, token_ids.shape))
    size = token_ids.shape[0]
    lengths = jnp.asarray(parse_array("lengths", lengths, jnp.int32, (size,)))
    if prompt_lengths is None:
        prompt_lengths = lengths
    prompt_lengths = jnp.asarray(parse_array("prompt_lengths", prompt_lengths, jnp.int32, (size,)))
    return count_committed(token_ids, lengths, prompt_lengths, vocab_size)


def count_committed(
    token_ids: jax.Array, lengths: jax.Array, prompt_lengths: jax.Array, vocab_size: int
) -> TokenCounts:
    """Returns the counts of `count_tokens`, of checked arrays."""

    def count(batch: Any) -> TokenCounts:
        token_ids, lengths, prompt_lengths = batch
        index = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None]
        inside = (index < lengths[:, None]) & (token_ids >= 0)
        in_prompt = inside & (index < prompt_lengths[:, None])
        rows = jnp.arange(token_ids.shape[0], dtype=jnp.int32)[:, None]

        def ids_where(counted: jax.Array) -> jax.Array:
            # An index past the end is dropped.
            return jnp.where(counted, token_ids, vocab_size)

        shape = (token_ids.shape[0], vocab_size)
        zeros = pvary_like((jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.bool_)), batch)
        return TokenCounts(
            zeros[0].at[rows, ids_where(inside & ~in_prompt)].add(1, mode="drop"),
            zeros[1].at[rows, ids_where(in_prompt)].set(True, mode="drop"),
        )

    return map_parts(count, token_ids)((token_ids, lengths, prompt_lengths))


def update_counts(counts: TokenCounts, token_ids: jax.Array, num_tokens: jax.Array) -> TokenCounts:
    """Returns the counts with the tokens of a step added: B * n additions.

    Args:
      counts: `TokenCounts` before the step. Where `generated` says that V lies over a mesh axis,
        each device adds to its own tokens.
      token_ids: i32[B, n], generated tokens. Ids outside [0, V) are not counted.
      num_tokens: i32[B] in [0, n], how many tokens of each row are counted.

    Returns:
      `TokenCounts` after the step.

    Raises:
      ValueError: if the shapes do not fit together.

    Example:
      >>> counts = specjax.count_tokens(jnp.array([[3]]), jnp.array([1]), 4)
      >>> counts = specjax.update_counts(counts, jnp.array([[2, 2, -1]]), jnp.array([2]))
      >>> counts.generated.tolist()
      [[0, 0, 2, 0]]
    """
    needed = "specjax.TokenCounts, as specjax.count_tokens makes them"
    check_type("counts", counts, TokenCounts, needed)
    size = counts.generated.shape[0]
    token_ids = as_array("token_ids", token_ids)
    if token_ids.ndim != 2 or token_ids.shape[0] != size:
        raise ValueError(f"token_ids has shape {token_ids.shape}; it needs [{size}, n].")
    num_tokens = jnp.asarray(parse_array("num_tokens", num_tokens, jnp.int32, (size,)))
    token_ids = jnp.asarray(parse_array("token_ids", token_ids, jnp.int32, token_ids.shape))
    split = parse_split(None, None, counts.generated)
    return _add_at_once(counts, token_ids, num_tokens, split=split)


def add_to_counts(
    counts: TokenCounts,
    token_ids: jax.Array,
    num_tokens: jax.Array,
    *,
    split: VocabularySplit | None = None,
) -> TokenCounts:
    """Returns the counts of `update_counts`, of checked arrays."""

    def add(batch: Any) -> jax.Array:
        generated, token_ids, num_tokens = batch
        vocab_size = generated.shape[1]
        token_ids = logit_rows(generated, split).offsets(token_ids)
        index = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None]
        counted = (index < num_tokens[:, None]) & (token_ids >= 0)
        rows = jnp.arange(token_ids.shape[0], dtype=jnp.int32)[:, None]
        ids = jnp.where(counted, token_ids, vocab_size)
        return generated.at[rows, ids].add(1, mode="drop")

    rows = counts.generated
    mapped = map_parts(add, rows, split, [rows], keeps_vocabulary=True)
    return counts._replace(generated=mapped((rows, token_ids, num_tokens)))


_add_at_once = functools.partial(jax.jit, static_argnames="split")(add_to_counts)

jax.export.register_namedtuple_serialization(TokenCounts, serialized_name="specjax.TokenCounts")
