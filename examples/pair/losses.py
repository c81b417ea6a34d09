"""What the two models minimise: the data's surprise, and the distance to the target."""

from typing import Any

import jax
import jax.numpy as jnp

from pair.training import Loss, Recipe, logits_of
from specjax.models import TransformerConfig


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
        divergence = jnp.mean(jnp.sum(jnp.exp(p) * (p - q), axis=-1))
        variation = 0.5 * jnp.mean(jnp.sum(jnp.abs(jnp.exp(p) - jnp.exp(q)), axis=-1))
        weight = jnp.clip((progress - turn) / (0.8 - turn), 0.0, 0.9)
        return (1 - weight) * divergence + weight * 4.0 * variation

    return loss
