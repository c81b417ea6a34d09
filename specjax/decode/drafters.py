"""Drafters: a smaller model, or the request's own past."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.config import SpeculativeConfig
from specjax.decode.drafts import propose
from specjax.processing.sampling_params import SamplingParams
from specjax.processing.token_counts import History
from specjax.typing import Draft, Drafter, Model

__all__ = ["model_drafter", "ngram_drafter"]


def model_drafter(model: Model) -> Drafter:
    """Drafts with a smaller model of the target's vocabulary.

    Every proposal first feeds the last two committed tokens: when all drafts of the step
    before were kept, the last of them has not been seen by the draft model yet.

    Args:
      model: the draft model.

    Returns:
      A `Drafter` whose state is the model's cache.

    Example:
      >>> model = specjax.Model(  # a Markov chain on two tokens
      ...     jnp.log(jnp.array([[0.1, 0.9], [0.8, 0.2]])),
      ...     init_cache=lambda batch_size, max_length: (),
      ...     apply=lambda params, token_ids, positions, cache: (token_ids[..., None], cache),
      ...     logits=lambda params, hidden: params[hidden[..., 0]])
      >>> output = specjax.generate(
      ...     model, specjax.model_drafter(model), [[0]], [1], keys=jax.random.key(0),
      ...     max_new_tokens=9)
      >>> float(output.metrics.draft_acceptance_rate)  # a model accepts itself
      1.0
    """
    functions = _model_functions(model.init_cache, model.apply, model.logits)
    return Drafter(model.params, *functions)


@functools.lru_cache(maxsize=64)
def _model_functions(init_cache: Any, apply: Any, logits: Any) -> tuple[Any, Any]:
    def init(params: Any, token_ids: jax.Array, lengths: jax.Array, max_length: int) -> Any:
        place = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None]
        positions = jnp.where(place < lengths[:, None], place, -1)
        cache = init_cache(token_ids.shape[0], max_length)
        return apply(params, jnp.maximum(token_ids, 0), positions, cache)[1]

    def draft(
        params: Any,
        cache: Any,
        token_ids: jax.Array,
        hidden: jax.Array,
        *,
        keys: jax.Array,
        positions: jax.Array,
        num_tokens: jax.Array,
        temperature: jax.Array,
        config: SpeculativeConfig,
        sampling: SamplingParams | None = None,
        history: History | None = None,
    ) -> tuple[Draft, Any]:
        def step(carry: Any, fed: jax.Array, at: jax.Array) -> tuple[jax.Array, Any]:
            cache, *before = carry
            fed, at = fed[:, None], at[:, None]
            if before:
                fed = jnp.concatenate([before[0][:, None], fed], axis=1)
                at = jnp.concatenate([at - 1, at], axis=1)
            at = jnp.where(num_tokens[:, None] > 0, at, -1)
            seen, cache = apply(params, fed, at, cache)
            return logits(params, seen[:, -1]), (cache,)

        last, before = _token_at(token_ids, positions - 1), _token_at(token_ids, positions - 2)
        drafts, (cache,) = propose(
            step,
            (cache, before),
            last,
            num_tokens=config.num_speculative_tokens,
            keys=keys,
            positions=positions,
            temperature=temperature,
            draft_sample_method=config.draft_sample_method,
            sampling=sampling,
            history=history,
            noise_dtype=config.noise_dtype,
        )
        return drafts._replace(num_tokens=num_tokens), cache

    return init, draft


def _token_at(token_ids: jax.Array, index: jax.Array) -> jax.Array:
    index = jnp.clip(index, 0, token_ids.shape[1] - 1)
    return jnp.take_along_axis(token_ids, index[:, None], axis=1)[:, 0]


@functools.lru_cache(maxsize=64)
def ngram_drafter(max_ngram: int = 3, min_ngram: int = 1) -> Drafter:
    """Drafts what followed when the request's last tokens stood there before.

    Prompt lookup: the last n tokens are searched in the request's own prompt and output,
    n from `max_ngram` down to `min_ngram`; of the places where they occur, the one with the
    most tokens behind it wins, up to K, and of those the latest. Drafts are one-hot.

    Args:
      max_ngram: longest suffix searched, >= min_ngram.
      min_ngram: shortest, >= 1.

    Returns:
      A `Drafter` without parameters or state.

    Raises:
      ValueError: if the range is empty or begins below 1.

    Example:
      >>> draft, _ = specjax.ngram_drafter().propose(
      ...     (), (), jnp.array([[5, 6, 7, 5, 6, -1]]), None, keys=None,
      ...     positions=jnp.array([5]), num_tokens=jnp.array([2]), temperature=None,
      ...     config=specjax.SpeculativeConfig(num_speculative_tokens=2))
      >>> draft.token_ids.tolist(), draft.num_tokens.tolist()
      ([[7, 5]], [2])

    References:
      Saxena, 2023, "Prompt lookup decoding".
    """
    if not 1 <= min_ngram <= max_ngram:
        raise ValueError(
            f"min_ngram is {min_ngram} and max_ngram {max_ngram}; 1 <= min_ngram <= max_ngram is "
            "needed."
        )

    def init(params: Any, token_ids: jax.Array, lengths: jax.Array, max_length: int) -> Any:
        return ()

    def draft(
        params: Any,
        state: Any,
        token_ids: jax.Array,
        hidden: jax.Array,
        *,
        keys: jax.Array,
        positions: jax.Array,
        num_tokens: jax.Array,
        temperature: jax.Array,
        config: SpeculativeConfig,
        sampling: SamplingParams | None = None,
        history: History | None = None,
    ) -> tuple[Draft, Any]:
        k = config.num_speculative_tokens
        follow = jax.vmap(lambda row, length: _lookup(row, length, k, max_ngram, min_ngram))
        ids, count = follow(token_ids, positions)
        return Draft(ids, num_tokens=jnp.minimum(num_tokens, count)), state

    return Drafter((), init, draft)


def _lookup(
    row: jax.Array, length: jax.Array, k: int, max_ngram: int, min_ngram: int
) -> tuple[jax.Array, jax.Array]:
    """What followed the row's last tokens before: ids i32[k], and how many of them count."""
    place = jnp.arange(row.shape[0], dtype=jnp.int32)
    follows = jnp.int32(0)
    for n in range(min_ngram, max_ngram + 1):
        same = place < length - n
        for t in range(n):
            wanted = row[jnp.maximum(length - n + t, 0)]
            same &= jnp.take(row, place + t, mode="clip") == wanted
        same &= length > n
        behind = jnp.minimum(length - place - n, k)
        best = jnp.max(jnp.where(same, behind * row.shape[0] + place, -1))
        follows = jnp.where(best >= 0, best % row.shape[0] + n, follows)
    count = jnp.where(follows > 0, jnp.minimum(length - follows, k), 0)
    ids = jnp.take(row, follows + jnp.arange(k, dtype=jnp.int32), mode="clip")
    return jnp.where(jnp.arange(k, dtype=jnp.int32) < count, ids, -1), count
