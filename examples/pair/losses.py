"""What the models minimise: the data's surprise, and the distance to the target."""

from typing import Any

import jax
import jax.numpy as jnp

from pair.training import Loss, Recipe, cast, logits_of
from specjax.models import (
    Eagle3Config,
    TransformerConfig,
    causal_taps,
    functions,
    unrolled_eagle3,
)


def next_token(config: TransformerConfig, recipe: Recipe) -> Loss:
    """Mean negative log-probability of the next token."""

    def loss(params: Any, ids: jax.Array, progress: jax.Array, extra: Any) -> jax.Array:
        del progress, extra
        logits = logits_of(config, params, ids[:, :-1], recipe)
        chosen = jnp.take_along_axis(logits, ids[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)

    return loss


def distillation(
    config: TransformerConfig, target: TransformerConfig, recipe: Recipe, turn: float = 0.6
) -> Loss:
    r"""Divergence of the draft q from the target p, then their total variation as well.

    Acceptance is :math:`\sum \min(p, q) = 1 - TV(p, q)`. The total variation alone learns
    nothing from a bad draft, whose gradients vanish; the divergence :math:`KL(p \| q)`
    brings it near, and from `turn` of the steps on the weight moves to what counts.
    """

    def loss(params: Any, ids: jax.Array, progress: jax.Array, extra: Any) -> jax.Array:
        ids = ids[:, :-1]
        p = jax.nn.log_softmax(jax.lax.stop_gradient(logits_of(target, extra, ids, recipe)))
        q = jax.nn.log_softmax(logits_of(config, params, ids, recipe))
        return _distance(p, q, progress, turn)

    return loss


def _distance(p: jax.Array, q: jax.Array, progress: jax.Array, turn: float) -> jax.Array:
    """Of log-probabilities q from p, in the weights of this share of the training."""
    divergence = jnp.mean(jnp.sum(jnp.exp(p) * (p - q), axis=-1))
    variation = 0.5 * jnp.mean(jnp.sum(jnp.abs(jnp.exp(p) - jnp.exp(q)), axis=-1))
    weight = jnp.clip((progress - turn) / (0.8 - turn), 0.0, 0.9)
    return (1 - weight) * divergence + weight * 4.0 * variation


def unrolled_distillation(
    head: Eagle3Config,
    recipe: Recipe,
    target: TransformerConfig,
    num_steps: int = 4,
    decay: float = 0.8,
    turn: float = 0.5,
) -> Loss:
    """The same distance for a head, mean over the steps of proposals that begin everywhere.

    Step i counts `decay**i`: it is reached where those before it were accepted. The tokens fed
    are the text's, the states the head's own, as when it drafts.
    """

    def loss(params: Any, ids: jax.Array, progress: jax.Array, extra: Any) -> jax.Array:
        ids = ids[:, :-1]
        target_params = cast(extra, recipe.dtype)
        hidden, taps = causal_taps(target, target_params, ids, head.taps, recipe.attention)
        p = jax.nn.log_softmax(functions(target)[2](extra, hidden.astype(jnp.float32)))
        tokens = extra["embedding"][ids].astype(recipe.dtype)
        states = unrolled_eagle3(head, cast(params, recipe.dtype), tokens, taps, num_steps)
        total = jnp.float32(0.0)
        for step, state in enumerate(states.astype(jnp.float32)):
            # Without the first, which no state precedes, and those whose text has ended.
            q = jax.nn.log_softmax(state[:, 1 : ids.shape[1] - step] @ params["head"].T)
            total += decay**step * _distance(p[:, 1 + step :], q, progress, turn)
        return total / sum(decay**step for step in range(num_steps))

    return loss
