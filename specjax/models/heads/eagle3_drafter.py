"""`eagle3_drafter`: a drafter that runs an EAGLE-3 head on the target's taps.

Slot t of the head's cache is of the pair of token t + 1 and the state of token t: the first token
of a text has none. Slots of committed pairs are written by `extend`, from the target's taps, over
what drafting has left there.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.decode.drafters import Drafter
from specjax.decode.propose import DraftInputs, propose_step
from specjax.devices.placement import put_whole
from specjax.implementation import Implementation
from specjax.models.heads.check_target import check_target
from specjax.models.heads.eagle3 import Eagle3Config, Eagle3Functions, eagle3_functions
from specjax.models.heads.head_target import HeadTarget, head_target
from specjax.types import Draft, Model

__all__ = ["check_eagle3", "eagle3_drafter"]


class _State(NamedTuple):
    """The head's cache, and the state [B, H] of the last token whose taps were read."""

    cache: Any
    last: jax.Array


def check_eagle3(
    config: Eagle3Config, *, hidden_size: int, vocab_size: int, num_layers: int
) -> None:
    """Refuses a head that was trained for another target.

    Args:
      config: of the head.
      hidden_size: of the target.
      vocab_size: of the target.
      num_layers: of the target.

    Raises:
      ValueError: if the head reads states of another size, tokens of another vocabulary, or after
        layers that the target has not.

    Example:
      >>> from specjax.models import TransformerConfig
      >>> layer = TransformerConfig(64, 16, 32, 1, 4, 2, 4)
      >>> config = Eagle3Config(layer, 16, 64, taps=(1, 9))
      >>> check_eagle3(config, hidden_size=16, vocab_size=64, num_layers=8)
      Traceback (most recent call last):
        ...
      ValueError: the EAGLE-3 head reads states after layers [1, 9] and the target has 8 layers; \
use a head that was trained for this target.
    """
    check_target(
        "EAGLE-3",
        trained=(config.target_hidden_size, config.layer.vocab_size),
        target=(hidden_size, vocab_size),
        taps=config.taps,
        num_layers=num_layers,
    )


def eagle3_drafter(
    target: Model,
    config: Eagle3Config,
    params: Any,
    *,
    implementation: str | Implementation | None = None,
) -> Drafter:
    """Returns a drafter that runs an EAGLE-3 head on top of the target.

    A step runs the head once over the tokens that the last step committed, with the target's
    states, and once for every drafted token, with the head's own. Embeddings and an lm_head that
    the head has not are the target's; they are held in memory once.

    Args:
      target: from `load` or `build`; the target that the head was trained for.
      config: of the head.
      params: of the head, from `load_eagle3` or `build_eagle3`. `token_map` i32[V_d] among them
        holds the target's id of each draft token; without it they are the same.
      implementation: of the head's layer, as in `build`.

    Returns:
      A `Drafter` whose state holds the head's cache.

    Raises:
      ValueError: if the head is for another target.

    Example:
      >>> from specjax.models import TransformerConfig, build
      >>> from specjax.models.heads.eagle3 import build_eagle3
      >>> target = build(TransformerConfig(64, 16, 32, 4, 4, 2, 4))
      >>> config = Eagle3Config(TransformerConfig(64, 16, 32, 1, 4, 2, 4), 16, 64, taps=(1, 2, 4))
      >>> drafter = eagle3_drafter(target, config, build_eagle3(config))
      >>> output = specjax.generate(
      ...     target, drafter, [[7, 8, 9]], [3], keys=jax.random.key(0), max_new_tokens=4)
      >>> int(output.lengths[0])
      7

    References:
      Li et al., 2025, arXiv:2503.01840: EAGLE-3.
    """
    shared = head_target(target)
    check_eagle3(
        config,
        hidden_size=target.params["embedding"].shape[1],
        vocab_size=shared.vocab_size,
        num_layers=len(target.params["layers"]),
    )
    functions = _drafter_functions(config, shared, implementation)
    params = put_whole(target.placement, params)
    head = {name: params[name] for name in params if name != "token_map"}
    shares = not (config.has_embedding and config.has_lm_head)
    parts = {"head": head} | ({"target": target.params} if shares else {})
    if "token_map" in params:
        parts["token_map"] = params["token_map"]
    return Drafter(parts, *functions, reads_features=True, taps=config.taps)


@functools.lru_cache(maxsize=64)
def _drafter_functions(
    head: Eagle3Config, target: HeadTarget, implementation: str | Implementation | None
) -> tuple[Any, Any, Any]:
    """Returns the functions of a drafter; equal ones for equal heads, to share programs."""
    functions = eagle3_functions(head, implementation)
    functions = functions._replace(
        fuse=target.on_each_device(functions.fuse), apply=target.on_each_device(functions.apply)
    )

    def init(params: Any, batch_size: int, max_length: int) -> _State:
        last = jnp.zeros((batch_size, head.layer.hidden_size), head.layer.dtype)
        return _State(functions.init_cache(batch_size, max_length), last)

    def extend(
        params: Any, state: _State, token_ids: jax.Array, positions: jax.Array, features: Any
    ) -> _State:
        states = functions.fuse(params["head"], features)
        before = jnp.concatenate([state.last[:, None], states[:, :-1]], axis=1)
        # The pair of a token at position 0 would be at -1, which is none.
        pairs = jnp.maximum(positions - 1, -1)
        tokens = _embed(head, target, params, token_ids)
        _, cache = functions.apply(params["head"], tokens, before, pairs, state.cache)
        # Of every request the tokens come first, and padding after them.
        num_read = jnp.sum(positions >= 0, axis=1, dtype=jnp.int32)
        last = jnp.take_along_axis(states, jnp.maximum(num_read - 1, 0)[:, None, None], axis=1)
        return _State(cache, jnp.where(num_read[:, None] > 0, last[:, 0], state.last))

    return init, extend, functools.partial(_draft, head, functions, target)


def _draft(
    head: Eagle3Config,
    functions: Eagle3Functions,
    target: HeadTarget,
    params: Any,
    state: _State,
    token_ids: jax.Array,
    hidden: jax.Array,
    inputs: DraftInputs,
    **options: Any,
) -> tuple[Draft, Any]:
    """Implements `Drafter.propose`: runs the head over its own outputs."""
    positions, num_tokens = inputs.positions, inputs.num_tokens
    assert num_tokens is not None

    def step(carry: Any, token: jax.Array, position: jax.Array) -> tuple[jax.Array, Any]:
        cache, last = carry
        pairs = jnp.where(num_tokens >= 0, position - 1, -1)[:, None]
        tokens = _embed(head, target, params, token[:, None])
        outputs, cache = functions.apply(params["head"], tokens, last[:, None], pairs, cache)
        last = outputs[:, 0]
        rows = functions.decode(params["head"], last)
        return _logits(head, target, params, rows, hidden.dtype), (cache, last)

    index = jnp.clip(positions - 1, 0, token_ids.shape[1] - 1)
    last_token = jnp.take_along_axis(token_ids, index[:, None], axis=1)[:, 0]
    if "token_map" in params:
        options |= {"token_map": params["token_map"], "vocab_size": target.vocab_size}
    options |= {"placement": target.placement}
    carry = state.cache, state.last
    drafts, (cache, _) = propose_step(step, carry, last_token, inputs, **options)
    return drafts, state._replace(cache=cache)


def _logits(
    head: Eagle3Config, target: HeadTarget, params: Any, rows: jax.Array, dtype: Any
) -> jax.Array:
    """Returns draft logits [B, V_d] of rows [B, H], by the target's lm_head if there is no own."""
    if head.has_lm_head:
        # The table on the left, as in the target's product.
        logits: jax.Array = (params["head"]["head"] @ rows.T).T
    else:
        # In the target's dtype: a wider one would cast its table.
        logits = target.logits(params["target"], rows.astype(dtype))
    return logits if head.logit_scale == 1.0 else logits * head.logit_scale


def _embed(head: Eagle3Config, target: HeadTarget, params: Any, token_ids: jax.Array) -> jax.Array:
    """Returns the embeddings [B, T, H] of tokens, by the target's table if the head has none."""
    if head.has_embedding:
        table: jax.Array = params["head"]["embedding"]
        return table[token_ids]
    return target.embed(params["target"]["embedding"], token_ids)
