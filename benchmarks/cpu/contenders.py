"""The timed functions: verification and sampling, JAX's own functions, and their distributions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import specjax

B, K, TEMPERATURE = 16, 4, 0.8


class Inputs(NamedTuple):
    """One set of inputs of one vocabulary; `rows` are [B, V] logits to sample from."""

    draft: specjax.Draft
    target_logits: jax.Array
    rows: jax.Array
    keys: jax.Array
    key: jax.Array


def draw_inputs(seed: int, vocab_size: int) -> Inputs:
    """Draft 3 N(0, 1), target that plus N(0, 1), tokens and their statistics as drawn."""
    rng = np.random.default_rng(seed)
    shape = (B, K + 1, vocab_size)
    draft_logits = 3 * rng.standard_normal(shape, np.float32)
    target_logits = draft_logits + rng.standard_normal(shape, np.float32)
    keys = jax.random.split(jax.random.key(seed), B)
    samples = [
        specjax.gumbel_sample(
            jnp.asarray(draft_logits[:, i]),
            keys=keys,
            positions=i,
            stream=specjax.Stream.draft(i),
            temperature=TEMPERATURE,
        )
        for i in range(K)
    ]
    token_ids, logprobs, logsumexp = (jnp.stack(x, axis=1) for x in zip(*samples, strict=True))
    draft = specjax.Draft(
        token_ids=token_ids,
        logits=jnp.asarray(np.ascontiguousarray(draft_logits[:, :K])),
        temperature=jnp.full((B,), TEMPERATURE),
        logprobs=logprobs,
        logsumexp=logsumexp,
    )
    rows = jnp.asarray(np.ascontiguousarray(target_logits[:, seed % (K + 1)]))
    return Inputs(draft, jnp.asarray(target_logits), rows, keys, jax.random.key(seed))


@jax.jit
def acceptance(draft_logits: jax.Array, target_logits: jax.Array) -> jax.Array:
    """Mean of sum min(p, q) over the drafted rows."""
    p = jax.nn.softmax(target_logits[:, :-1] / TEMPERATURE)
    q = jax.nn.softmax(draft_logits / TEMPERATURE)
    return jnp.minimum(p, q).sum(-1).mean()


@jax.jit
def logsumexp(target_logits: jax.Array) -> jax.Array:
    return jax.nn.logsumexp(target_logits, axis=-1)


@jax.jit
def categorical(key: jax.Array, rows: jax.Array) -> jax.Array:
    return jax.random.categorical(key, rows / TEMPERATURE)


@jax.jit
def obvious(
    key: jax.Array, token_ids: jax.Array, draft_logits: jax.Array, target_logits: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Number of accepted drafts and the next token, as one writes it down first."""
    coin_key, token_key = jax.random.split(key)
    log_p = jax.nn.log_softmax(target_logits / TEMPERATURE)
    log_q = jax.nn.log_softmax(draft_logits / TEMPERATURE)
    drafted = token_ids[..., None]
    ratio = jnp.take_along_axis(log_p[:, :-1], drafted, -1) - jnp.take_along_axis(
        log_q, drafted, -1
    )
    coins = jax.random.uniform(coin_key, token_ids.shape)
    num_accepted = jnp.cumprod(jnp.log(coins) < ratio[..., 0], axis=1).sum(1)
    place = num_accepted[:, None, None]
    p = jnp.exp(jnp.take_along_axis(log_p, place, 1)[:, 0])
    q = jnp.exp(jnp.take_along_axis(log_q, jnp.minimum(place, log_q.shape[1] - 1), 1)[:, 0])
    all_accepted = num_accepted[:, None] == token_ids.shape[1]
    residual = jnp.log(jnp.where(all_accepted, p, jnp.maximum(p - q, 0)))
    return num_accepted, jax.random.categorical(token_key, residual)


def verify(inputs: Inputs) -> specjax.Verification:
    return specjax.rejection_sample(
        inputs.draft,
        inputs.target_logits,
        keys=inputs.keys,
        positions=0,
        temperature=TEMPERATURE,
    )


def sample(inputs: Inputs) -> specjax.Sample:
    return specjax.gumbel_sample(
        inputs.rows,
        keys=inputs.keys,
        positions=0,
        stream=specjax.Stream.TARGET,
        temperature=TEMPERATURE,
    )


CONTENDERS: dict[str, Callable[[Inputs], Any]] = {
    "logsumexp": lambda x: logsumexp(x.target_logits),
    "rejection_sample": verify,
    "obvious": lambda x: obvious(x.key, x.draft.token_ids, x.draft.logits, x.target_logits),
    "gumbel_sample": sample,
    "categorical": lambda x: categorical(x.key, x.rows),
}


def check_distributions(num_requests: int = 40_000) -> dict[str, float]:
    """Chi-square per degree of freedom of both verifications, from enumeration at V = 16.

    The event is (number accepted, next token). Four standard deviations are allowed.
    """
    vocab_size, k = 16, 2
    rng = np.random.default_rng(7)
    d = rng.standard_normal((k + 1, vocab_size)).astype(np.float32)
    t = d + rng.standard_normal(d.shape).astype(np.float32)
    p, q = (np.asarray(jax.nn.softmax(jnp.asarray(x) / TEMPERATURE), np.float64) for x in (t, d))
    accepted = np.minimum(p, q)[:k].sum(-1)
    probs = np.zeros((k + 1, vocab_size))
    for i in range(k):
        probs[i] = accepted[:i].prod() * np.maximum(p[i] - q[i], 0)
    probs[k] = accepted.prod() * p[k]

    key = jax.random.key(0)
    logits = jnp.broadcast_to(jnp.asarray(d[:k]), (num_requests, k, vocab_size))
    target = jnp.broadcast_to(jnp.asarray(t), (num_requests, k + 1, vocab_size))
    ids = jax.random.categorical(jax.random.fold_in(key, 1), logits / TEMPERATURE)
    draft = specjax.Draft(ids.astype(jnp.int32), logits=logits)
    ours = specjax.rejection_sample(draft, target, keys=key, positions=0, temperature=TEMPERATURE)
    last = jnp.take_along_axis(ours.token_ids, ours.num_accepted[:, None], 1)[:, 0]
    outcomes = {"rejection_sample": (ours.num_accepted, last)}
    outcomes["obvious"] = obvious(jax.random.fold_in(key, 2), ids, logits, target)
    result = {}
    for name, (num_accepted, token) in outcomes.items():
        counts = np.zeros_like(probs)
        np.add.at(counts, (np.asarray(num_accepted), np.asarray(token)), 1)
        possible = probs > 0
        assert counts[~possible].sum() == 0, f"{name} emits what has probability 0"
        expected = num_requests * probs[possible]
        freedom = possible.sum() - 1
        chi_square = ((counts[possible] - expected) ** 2 / expected).sum() / freedom
        assert chi_square < 1 + 4 * np.sqrt(2 / freedom), (
            f"{name} has another distribution: {chi_square}"
        )
        result[name] = float(chi_square)
    return result
