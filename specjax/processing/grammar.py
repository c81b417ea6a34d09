"""`Grammar`: a finite automaton of tokens, on the device, that says which tokens may follow.

    next = next_states[state, token_classes[token]]     a state allows the bits of allowed[state]

The state after each number of tokens is computed at once. So a rejection rewinds nothing: the
state after a step is the one after as many tokens as were committed.
"""

from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp

_BITS_PER_WORD = 32


class Grammar(NamedTuple):
    """A finite automaton of tokens: Q states, and C classes of tokens that act alike.

    All requests share it. Several grammars are one automaton with a first state for each.
    `specjax.contrib.grammars` makes one of a JSON schema.

    Attributes:
      next_states: i32[Q, C], the state after a token of each class. After a token that is not
        allowed any state will do. The state itself lets synthetic acceptance go on.
      token_classes: i32[V], the class of each token.
      allowed: u32[Q, ceil(V / 32)], the tokens allowed in each state: bit ``v % 32`` of word
        ``v // 32``. An end-of-sequence token is one of them where a text may end.

    Example:
      >>> grammar = specjax.Grammar(  # token 1 once, then only token 0
      ...     next_states=jnp.array([[0, 1], [1, 1]]), token_classes=jnp.array([0, 1, 1]),
      ...     allowed=jnp.array([[0b011], [0b001]]))
      >>> from specjax.markov_chain import markov_chain
      >>> output = specjax.generate(
      ...     markov_chain([[0.1, 0.2, 0.7]] * 3), None, [[2]], keys=jax.random.key(0),
      ...     max_new_tokens=4, temperature=0, sampling=specjax.SamplingParams(grammar=grammar))
      >>> specjax.unpad(output.token_ids)
      [[2, 1, 0, 0, 0]]
    """

    next_states: Any
    token_classes: Any
    allowed: Any


def start_states(sampling: Any, size: int) -> jax.Array | None:
    """Returns the state i32[B] before the first generated token; None without a grammar."""
    if sampling is None or sampling.grammar is None:
        return None
    return jnp.broadcast_to(sampling.grammar_state, (size,))


def _next(grammar: Grammar, states: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Returns the states i32[B] after one token each; an id outside [0, V) changes nothing."""
    num_states, num_classes = grammar.next_states.shape
    num_tokens = grammar.token_classes.shape[0]
    classes = grammar.token_classes[jnp.clip(token_ids, 0, num_tokens - 1)]
    cells = jnp.clip(states, 0, num_states - 1) * num_classes + classes
    after = grammar.next_states.reshape(-1)[cells]
    known = (token_ids >= 0) & (token_ids < num_tokens) & (states >= 0) & (states < num_states)
    return jnp.where(known, after, states)


def _states_after(grammar: Grammar, states: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Returns the states after 0, 1, ..., L tokens: [B] and [B, L] -> i32[B, L + 1]."""
    after = [states]
    for i in range(token_ids.shape[1]):
        after.append(_next(grammar, after[-1], token_ids[:, i]))
    return jnp.stack(after, axis=1)


def advance(
    grammar: Grammar, states: jax.Array, token_ids: jax.Array, num_tokens: jax.Array
) -> jax.Array:
    """Returns the states i32[B] after the first `num_tokens` i32[B] of the tokens i32[B, L]."""
    after = _states_after(grammar, states, token_ids)
    return jnp.take_along_axis(after, num_tokens[:, None], axis=1)[:, 0]


def row_states(
    grammar: Grammar,
    states: jax.Array,
    drafted_token_ids: jax.Array | None,
    first_row: jax.Array,
    num_rows: int,
) -> jax.Array:
    """Returns the state before each row: row r follows the first `first_row + r` drafted tokens.

    Args:
      grammar: of all requests.
      states: i32[B], after the committed tokens.
      drafted_token_ids: i32[B, D], D >= first_row + R - 1; None where the one row is the first.
      first_row: i32[].
      num_rows: R.

    Returns:
      i32[B, R].
    """
    if drafted_token_ids is None:
        return jnp.broadcast_to(states[:, None], (states.shape[0], num_rows))
    after = _states_after(grammar, states, drafted_token_ids)
    return jax.lax.dynamic_slice_in_dim(after, first_row, num_rows, axis=1)


def allowed_columns(
    grammar: Grammar, states: jax.Array, vocab_size: int, token_map: jax.Array | None = None
) -> jax.Array:
    """Returns which columns of rows [..., V] or [..., V_d] are allowed, as bool.

    A negative state is that of a request without a grammar, and allows every column. A state that
    the grammar does not have allows none.

    Args:
      grammar: of all requests.
      states: i32[...], before each row.
      vocab_size: columns of the rows.
      token_map: i32[V_d], the target's id of every column; None is the column's own.
    """
    columns = jnp.arange(vocab_size, dtype=jnp.int32) if token_map is None else token_map
    words = jnp.take(grammar.allowed, jnp.maximum(states, 0), axis=0, mode="fill", fill_value=0)
    words = jnp.take(words, columns // _BITS_PER_WORD, axis=-1, mode="fill", fill_value=0)
    shift = (columns % _BITS_PER_WORD).astype(jnp.uint32)
    bits = words >> jnp.broadcast_to(shift, words.shape)
    inside = (columns >= 0) & (columns < grammar.token_classes.shape[0])
    allowed = ((bits & jnp.uint32(1)) != 0) & jnp.broadcast_to(inside, words.shape)
    return allowed | (states < 0)[..., None]


jax.export.register_namedtuple_serialization(Grammar, serialized_name="specjax.Grammar")
