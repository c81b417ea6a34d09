"""Models on a tiny vocabulary whose distribution of any continuation can be enumerated.

The next token depends on the last two; the one before the last is read from a cache by
position, so that a stale or missing cache entry changes the distribution.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

import specjax


def init_cache(batch_size, max_length):
    return jnp.full((batch_size, max_length), -7, jnp.int32)


def apply(params, token_ids, positions, cache):
    place = jnp.where(positions < 0, cache.shape[1], positions)
    rows = jnp.arange(cache.shape[0], dtype=jnp.int32)[:, None]
    cache = cache.at[rows, place].set(token_ids, mode="drop")
    before = jnp.take_along_axis(cache, jnp.clip(positions - 1, 0, cache.shape[1] - 1), axis=1)
    return jnp.stack([jnp.where(positions > 0, before, 0), token_ids], axis=-1), cache


def logits(params, hidden):
    return params[hidden[..., 0], hidden[..., 1]]


def apply_with_taps(params, token_ids, positions, cache, taps):
    """Tap k is the hidden state plus 10 k."""
    hidden, cache = apply(params, token_ids, positions, cache)
    return hidden, jnp.concatenate([hidden + 10 * tap for tap in taps], axis=-1), cache


def model(table):
    """A model of logits `table` [V, V, V]: [token before the last, last token]."""
    functions = (init_cache, apply, logits)
    table = jnp.asarray(table, jnp.float32)
    return specjax.Model(table, *functions, apply_with_taps=apply_with_taps)


def pair(vocab_size, seed, difference=0.7):
    """Tables of a target and of a draft that resembles it."""
    rng = np.random.default_rng(seed)
    target = rng.normal(size=(vocab_size,) * 3)
    return target, target + difference * rng.normal(size=target.shape)


def probs(table, temperature=1.0):
    """softmax(table / temperature) in float64."""
    weights = np.exp((table - table.max(-1, keepdims=True)) / temperature)
    return weights / weights.sum(-1, keepdims=True)


def joint_probs(table, prompt, num_tokens, temperature=1.0):
    """Probability of every continuation: f64[V, ..., V], one axis per token."""
    p = probs(np.asarray(table, np.float64), temperature)
    vocab_size = p.shape[-1]
    result = np.zeros((vocab_size,) * num_tokens)
    for tokens in itertools.product(range(vocab_size), repeat=num_tokens):
        past = [0, *prompt]
        chance = 1.0
        for token in tokens:
            chance *= p[past[-2], past[-1], token]
            past.append(token)
        result[tokens] = chance
    return result


def prompts(rows, width=5):
    """Ragged prompts as padded ids and lengths; the padding is no token."""
    ids = np.full((len(rows), width), 99, np.int32)
    for b, row in enumerate(rows):
        ids[b, : len(row)] = row
    return jnp.asarray(ids), jnp.asarray([len(row) for row in rows], jnp.int32)


def keys(batch_size, seed=0):
    return jax.random.split(jax.random.key(seed), batch_size)
