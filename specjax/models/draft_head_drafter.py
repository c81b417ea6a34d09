"""`head_drafter`: a drafter that runs a draft head on the target's hidden states."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.config import SpeculativeConfig
from specjax.decode.drafters import Drafter
from specjax.decode.propose import propose_step
from specjax.devices.placement import put_whole
from specjax.implementation import Implementation
from specjax.models.draft_head import HeadConfig, check_head, draft_head_functions
from specjax.models.heads.head_target import HeadTarget, head_target
from specjax.types import Draft, Model

__all__ = ["head_drafter"]


def head_drafter(
    target: Model,
    config: HeadConfig,
    params: Any,
    *,
    implementation: str | Implementation | None = None,
) -> Drafter:
    """Returns a drafter that runs a draft head of one layer on top of the target.

    The first drafted token of a step is proposed from the target's hidden state that decided the
    last committed token. Each other one is proposed from the head's own state. The head attends to
    the tokens within its window. Embeddings and logits are the target's; they are held in memory
    once.

    Args:
      target: from `load` or `build`; the target that the head was trained for.
      config: of the head.
      params: of the head, from `load_head` or `build_head`.
      implementation: of the head's layer, as in `build`.

    Returns:
      A `Drafter` whose state holds the head's cache.

    Raises:
      ValueError: if the target's hidden states have another size.

    Example:
      >>> from specjax.models import load, load_head, pretrained_folder
      >>> target, _ = load(pretrained_folder("target"))
      >>> params, config = load_head(pretrained_folder("head"))
      >>> output = specjax.generate(
      ...     target, head_drafter(target, config, params), [[7, 8, 9]], [3],
      ...     keys=jax.random.key(0), max_new_tokens=16)
      >>> int(output.lengths[0])
      19

    References:
      Li et al., 2024, arXiv:2401.15077: EAGLE.
      DeepSeek-AI, 2024, arXiv:2412.19437: multi-token prediction.
    """
    check_head(config, target.params["embedding"].shape[-1])
    shared = head_target(target)
    functions = _drafter_functions(config, shared, implementation)
    params = put_whole(target.placement, params)
    return Drafter({"target": target.params, "head": params}, *functions)


class _State(NamedTuple):
    """The head's cache, and the last token i32[B] of the chunk that was read last."""

    cache: Any
    last: jax.Array


@functools.lru_cache(maxsize=64)
def _drafter_functions(
    head: HeadConfig, target: HeadTarget, implementation: str | Implementation | None
) -> tuple[Any, Any, Any]:
    init_cache, apply = draft_head_functions(head, implementation)
    feed = functools.partial(_feed_tokens, target, target.on_each_device(apply))

    def init(params: Any, batch_size: int, max_length: int) -> _State:
        return _State(init_cache(batch_size, max_length), jnp.zeros((batch_size,), jnp.int32))

    def extend(
        params: Any, state: _State, token_ids: jax.Array, positions: jax.Array, features: Any
    ) -> _State:
        first = jnp.where(positions[:, 0] == 0, token_ids[:, 0], state.last)
        ids = jnp.concatenate([first[:, None], token_ids], axis=1)
        unknown_hidden = jnp.zeros((token_ids.shape[0], head.hidden_size), head.dtype)
        return _State(feed(params, ids, unknown_hidden, positions, state.cache)[1], ids[:, -1])

    def draft(
        params: Any,
        state: _State,
        token_ids: jax.Array,
        hidden: jax.Array,
        *,
        positions: jax.Array,
        num_tokens: jax.Array,
        config: SpeculativeConfig,
        **options: Any,
    ) -> tuple[Draft, Any]:
        # The tokens that the last step may have committed are in the cache as drafted tokens, with
        # the head's own states. They are given again as context, with zeros.
        num_refed = config.num_speculative_tokens + 3
        refed_positions = positions[:, None] - jnp.arange(num_refed, 0, -1, dtype=jnp.int32)[None]
        ids = jnp.take_along_axis(token_ids, jnp.maximum(refed_positions, 0), axis=1)
        # In the target's dtype: a wider one would cast the target's embedding table.
        dtype = hidden.dtype

        def step(carry: Any, token: jax.Array, position: jax.Array) -> tuple[jax.Array, Any]:
            cache, hidden, previous = carry
            offsets = jnp.arange(previous.shape[1] - 1, -1, -1, dtype=jnp.int32)[None]
            fed_positions = position[:, None] - offsets
            fed_positions = jnp.where(num_tokens[:, None] >= 0, jnp.maximum(fed_positions, -1), -1)
            ids = jnp.concatenate([previous, token[:, None]], axis=1)
            states, cache = feed(params, ids, hidden, fed_positions, cache)
            last = states[:, -1].astype(dtype)
            return target.logits(params["target"], last), (cache, last, token[:, None])

        drafts, (cache, _, _) = propose_step(
            step,
            (state.cache, hidden, ids[:, :-1]),
            ids[:, -1],
            positions=positions,
            num_tokens=num_tokens,
            config=config,
            placement=target.placement,
            **options,
        )
        return drafts, state._replace(cache=cache)

    return init, extend, draft


def _feed_tokens(
    target: HeadTarget,
    apply: Any,
    params: Any,
    ids: jax.Array,
    hidden: jax.Array,
    positions: jax.Array,
    cache: Any,
) -> Any:
    """Feeds `ids[:, 1:]`, with `hidden` for the last token and zeros for the others."""
    embedded = target.embed(params["target"]["embedding"], ids)
    hidden = jnp.pad(hidden[:, None], ((0, 0), (ids.shape[1] - 2, 0), (0, 0)))
    return apply(params["head"], embedded[:, 1:], embedded[:, :-1], hidden, positions, cache)
