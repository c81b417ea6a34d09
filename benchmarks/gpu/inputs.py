"""The inputs of the GPU benchmarks, beyond the L2: rows of normal logits, and Zipf's.

    normal    draft d = 3 N(0, 1)                           target d + N(0, 1)
    zipf      draft d = -1.3 log(1 + rank), permuted        target d + 0.7 N(0, 1)

The second fall off like a language model's. Each set draws one permutation, and each of its rows
rotates it: sorting every row would take longer than the measured calls.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import specjax

# What the calls of one iteration read lies beyond twice the L2 cache of an H200 (60 MB).
ROTATING_BYTES = 120e6
BYTES_PER_US = 4.3e6


class Shape(NamedTuple):
    """The size of a call, and the distribution of its rows: "normal" or "zipf"."""

    B: int
    K: int
    V: int
    dtype: str
    rows: str = "normal"

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of logits per request."""
        return self.B * self.V * jnp.dtype(self.dtype).itemsize


class Inputs(NamedTuple):
    """One set of a call's arrays: logits [B, K, V] and [B, K + 1, V]."""

    draft: specjax.Draft
    target_logits: jax.Array


def num_sets(shape: Shape, rows: float, most: int) -> int:
    """Input sets that put `rows` rows per request and call beyond the L2, between 2 and `most`."""
    return int(min(most, max(2, -(-ROTATING_BYTES // (rows * shape.row_bytes)))))


@functools.partial(jax.jit, static_argnames="shape")
def draw_logits(seed: Any, shape: Shape) -> tuple[jax.Array, jax.Array]:
    """Draft [B, K, V] and target logits [B, K + 1, V], the bonus row from a d of its own."""
    key_d, key_t = jax.random.split(jax.random.key(seed))
    size = (shape.B, shape.K + 1, shape.V)
    d = _draw_draft(key_d, size, shape.rows)
    noise = 0.7 if shape.rows == "zipf" else 1.0
    target = d + noise * jax.random.normal(key_t, size, jnp.float32)
    return d[:, :-1].astype(shape.dtype), target.astype(shape.dtype)


def _draw_draft(key: jax.Array, size: tuple[int, ...], rows: str) -> jax.Array:
    if rows == "normal":
        return 3 * jax.random.normal(key, size, jnp.float32)
    vocab_size = size[-1]
    key_rank, key_start = jax.random.split(key)
    rank = jax.random.permutation(key_rank, vocab_size)
    start = jax.random.randint(key_start, size[:-1], 0, vocab_size)
    token = (start[..., None] + jnp.arange(vocab_size)) % vocab_size
    return -1.3 * jnp.log1p(jnp.take(rank, token).astype(jnp.float32))


@jax.jit
def draw_tokens(seed: Any, draft_logits: jax.Array, temperature: Any) -> specjax.Draft:
    """Tokens sampled from softmax(d / T), the argmax of d at T = 0, and their statistics."""
    greedy = temperature == 0
    x = draft_logits.astype(jnp.float32) / jnp.where(greedy, 1, temperature)
    noise = jax.random.gumbel(jax.random.key(seed), x.shape, jnp.float32)
    token_ids = jnp.argmax(x + jnp.where(greedy, 0, noise), axis=-1).astype(jnp.int32)
    logsumexp = jax.nn.logsumexp(x, axis=-1)
    drawn = jnp.take_along_axis(x, token_ids[..., None], axis=-1)[..., 0]
    return specjax.Draft(token_ids, logprobs=drawn - logsumexp, logsumexp=logsumexp)


def draw_sets(shape: Shape, count: int) -> list[tuple[jax.Array, jax.Array]]:
    """Logits of `count` input sets."""
    return jax.block_until_ready([draw_logits(seed, shape) for seed in range(count)])


def with_tokens(
    logits: list[tuple[jax.Array, jax.Array]], temperature: float, one_hot: bool
) -> list[Inputs]:
    """Input sets whose tokens were sampled at a temperature; the logits are shared, not copied."""
    sets = []
    for seed, (draft_logits, target_logits) in enumerate(logits):
        draft = draw_tokens(1000 + seed, draft_logits, jnp.float32(temperature))
        if one_hot:
            draft = specjax.Draft(draft.token_ids)
        else:
            draft = draft.replace(logits=draft_logits)
        sets.append(Inputs(draft, target_logits))
    return jax.block_until_ready(sets)


@functools.partial(jax.jit, static_argnames="implementation")
def draw_coupled_tokens(
    keys: jax.Array, draft_logits: jax.Array, temperature: Any, implementation: Any
) -> jax.Array:
    """Tokens i32[B, K] drawn on the target's stream, for these keys and positions 0, 1, ..."""
    columns = [
        specjax.gumbel_sample(
            draft_logits[:, i],
            keys=keys,
            positions=i,
            stream=specjax.Stream.TARGET,
            temperature=temperature,
            options=specjax.Options(implementation=implementation),
        ).token_ids
        for i in range(draft_logits.shape[1])
    ]
    return jnp.stack(columns, axis=1)


def with_coupled_tokens(
    logits: list[tuple[jax.Array, jax.Array]],
    keys: list[jax.Array],
    temperature: float,
    implementation: Any,
) -> list[Inputs]:
    """Input sets whose tokens were drawn with the target's noise, each under keys of its own."""
    sets = []
    for (draft_logits, target_logits), own in zip(logits, keys, strict=True):
        drawn = draw_coupled_tokens(own, draft_logits, jnp.float32(temperature), implementation)
        sets.append(Inputs(specjax.Draft(drawn), target_logits))
    return jax.block_until_ready(sets)


@functools.partial(jax.jit, static_argnames=("calls", "size"))
def draw_keys(seed: Any, calls: int, size: int) -> list[jax.Array]:
    """Keys of the requests of each call: none is used twice, so that luck averages out."""
    seeds = seed * calls * size + jnp.arange(calls * size)
    return list(jax.vmap(jax.random.key)(seeds).reshape(calls, size))


@functools.partial(jax.jit, static_argnames="shape")
def draw_rows(seed: Any, shape: Shape) -> jax.Array:
    """Rows [B, V] to draw tokens from, as a draft's."""
    return _draw_draft(jax.random.key(seed), (shape.B, shape.V), shape.rows).astype(shape.dtype)


@functools.partial(jax.jit, static_argnames="shape")
def draw_ranked_rows(seed: Any, shape: Shape) -> jax.Array:
    """Rows [B, V] like a language model's: -1.3 log(1 + rank), each in an order of its own."""
    keys = jax.random.split(jax.random.key(seed), shape.B)
    rank = jax.vmap(lambda key: jax.random.permutation(key, shape.V))(keys)
    return (-1.3 * jnp.log1p(rank.astype(jnp.float32))).astype(shape.dtype)
