"""`whole_prompt_drafter`: a drafter of functions that read a prompt at once, not in chunks."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.decode.drafters import Drafter

__all__ = ["whole_prompt_drafter"]


class _Prompts(NamedTuple):
    """What was read of each prompt, and the state that the drafter's own `init` made of it."""

    token_ids: jax.Array
    lengths: jax.Array
    state: Any


def whole_prompt_drafter(
    params: Any,
    init: Callable[[Any, jax.Array, jax.Array, int], Any],
    propose: Callable[..., Any],
) -> Drafter:
    """Returns a drafter whose `init` is given the prompts read so far, after every chunk.

    Args:
      params: a pytree of arrays, possibly empty.
      init: `(params, token_ids[B, S], lengths[B], max_length) -> state`, where S is `max_length`.
      propose: as in `Drafter`. Options that are None are not passed to it.

    Returns:
      `Drafter`.

    Example:
      >>> from specjax.markov_chain import markov_chain
      >>> def propose(params, state, token_ids, hidden, *, num_tokens, **options):
      ...     return specjax.Draft(jnp.ones((1, 4), jnp.int32), num_tokens=num_tokens), state
      >>> drafter = specjax.whole_prompt_drafter((), lambda *prompts: (), propose)
      >>> output = specjax.generate(
      ...     markov_chain([[0.0, 1.0], [0.0, 1.0]]), drafter, [[0]], [1],
      ...     keys=jax.random.key(0), max_new_tokens=7)
      >>> int(output.metrics.num_accepted.sum())
      4
    """
    return Drafter(params, *_functions(init, propose))


@functools.lru_cache(maxsize=64)
def _functions(init: Any, propose: Any) -> tuple[Any, Any, Any]:
    """Returns the functions of a drafter; equal ones for equal functions, to share programs."""

    def empty(params: Any, batch_size: int, max_length: int) -> _Prompts:
        token_ids = jnp.zeros((batch_size, max_length), jnp.int32)
        lengths = jnp.zeros((batch_size,), jnp.int32)
        shapes = jax.eval_shape(
            lambda *prompts: init(*prompts, max_length), params, token_ids, lengths
        )
        state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return _Prompts(token_ids, lengths, state)

    def extend(
        params: Any, prompts: _Prompts, token_ids: jax.Array, positions: jax.Array, features: Any
    ) -> _Prompts:
        max_length = prompts.token_ids.shape[1]
        rows = jnp.arange(token_ids.shape[0], dtype=jnp.int32)[:, None]
        # One past the end, which is dropped: an index of -1 would write the last token.
        index = jnp.where(positions < 0, max_length, positions)
        token_ids = prompts.token_ids.at[rows, index].set(token_ids, mode="drop")
        lengths = jnp.maximum(prompts.lengths, jnp.max(positions, axis=1) + 1)
        return _Prompts(token_ids, lengths, init(params, token_ids, lengths, max_length))

    def draft(
        params: Any, prompts: _Prompts, token_ids: jax.Array, hidden: jax.Array, **options: Any
    ) -> tuple[Any, _Prompts]:
        given = {name: value for name, value in options.items() if value is not None}
        draft, state = propose(params, prompts.state, token_ids, hidden, **given)
        return draft, prompts._replace(state=state)

    return empty, extend, draft
