"""Drafts: made from probabilities, made by K steps of a draft model, realigned."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.acceptance import num_usable
from specjax.api import gumbel_sample
from specjax.checks import check_shape, read_array
from specjax.typing import Draft, Stream

__all__ = ["draft_from_probs", "gather_drafts", "propose"]

_StepFn = Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]]


def draft_from_probs(token_ids: jax.Array, probs: jax.Array) -> Draft:
    """A draft of which the probabilities are known rather than the logits.

    Args:
      token_ids: i32[B, K], drawn from `probs`.
      probs: [B, K, V], bf16, f16 or f32, >= 0; rows need not sum to 1 exactly.

    Returns:
      `Draft` with logits log(probs) and temperature 1.

    Raises:
      ValueError: if the shapes do not fit together.

    Example:
      >>> draft = specjax.draft_from_probs(jnp.array([[1]]), jnp.array([[[0.25, 0.75]]]))
      >>> draft.temperature
      Array([1.], dtype=float32)
    """
    if probs.ndim != 3 or probs.shape[:2] != token_ids.shape:
        raise ValueError(
            f"probs has shape {probs.shape} for token_ids {token_ids.shape}; it needs [B, K, V], "
            "one law per drafted token."
        )
    temperature = jnp.ones(token_ids.shape[:1], jnp.float32)
    return Draft(token_ids, logits=jnp.log(probs.astype(jnp.float32)), temperature=temperature)


def propose(
    step_fn: _StepFn,
    carry: Any,
    token_ids: jax.Array,
    *,
    num_tokens: int,
    keys: jax.Array,
    positions: Any,
    temperature: Any = 1.0,
    draft_sample_method: str = "probabilistic",
    noise_dtype: Any = jnp.float32,
    implementation: str | None = None,
) -> tuple[Draft, Any]:
    """Drafts K tokens with a model, for a loop of one's own.

    Token i is drawn on ``Stream.draft(i)`` at position ``positions + i``; give
    `rejection_sample` the same keys and positions. The logits and statistics of every draw
    are kept in the draft, so that verification reduces no draft row again.

    Args:
      step_fn: ``(carry, token_ids[B], positions[B]) -> (logits[B, V_d], carry)``: feeds one
        token per request, which stands at that absolute position, and gives the logits of
        the next. The first call is traced apart from the others, so that it may be given a
        carry of another structure than it returns.
      carry: pytree, for instance the draft model's cache.
      token_ids: i32[B], the last committed tokens, at ``positions - 1``.
      num_tokens: K, a Python int >= 1.
      keys: typed threefry keys, [B] or ().
      positions: i32, [B] or scalar, absolute position of the first drafted token.
      temperature: f32, [B] or scalar, >= 0; below 1e-5 the draft is its argmax.
      draft_sample_method: "probabilistic", or "greedy": argmax drafts, verified as one-hot,
        of which no logits are kept.
      noise_dtype: float32 or float64, as in `gumbel_sample`.
      implementation: as in `gumbel_sample`.

    Returns:
      `Draft` with token arrays [B, K], and the carry.

    Raises:
      ValueError: for an unknown method, K < 1, or what `gumbel_sample` refuses.

    Example:
      >>> table = jnp.log(jnp.array([[0.5, 0.5], [0.9, 0.1]]))
      >>> draft, _ = specjax.propose(
      ...     lambda carry, token_ids, positions: (table[token_ids], carry), (),
      ...     jnp.array([0, 1]), num_tokens=3, keys=jax.random.key(0), positions=1)
      >>> draft.logits.shape
      (2, 3, 2)
    """
    if draft_sample_method not in ("probabilistic", "greedy"):
        raise ValueError(
            f"draft_sample_method is {draft_sample_method!r}; it is 'probabilistic' or 'greedy'."
        )
    if num_tokens < 1:
        raise ValueError(f"num_tokens is {num_tokens}; a proposal needs at least 1 draft token.")
    (size,) = token_ids.shape
    each = ((), (size,))
    positions = jnp.broadcast_to(read_array("positions", positions, jnp.int32, *each), (size,))
    temperature = read_array("temperature", temperature, jnp.float32, *each)
    temperature = jnp.broadcast_to(temperature, (size,))
    greedy = draft_sample_method == "greedy"

    def draw(i: Any, carry: Any, token_ids: jax.Array) -> tuple[Any, jax.Array, Any]:
        logits, carry = step_fn(carry, token_ids, positions + (i - 1))
        sample = gumbel_sample(
            logits,
            keys=keys,
            positions=positions + i,
            stream=Stream.draft(i),
            temperature=jnp.zeros_like(temperature) if greedy else temperature,
            noise_dtype=noise_dtype,
            implementation=implementation,
        )
        kept = () if greedy else (logits, sample.logprobs, sample.logsumexp)
        # A row that is no law gives -1, which ends the drafts; the model is fed a token.
        return carry, jnp.maximum(sample.token_ids, 0), (sample.token_ids, *kept)

    carry, last, first = draw(0, carry, token_ids)
    rows = [jnp.zeros((size, num_tokens, *x.shape[1:]), x.dtype).at[:, 0].set(x) for x in first]

    def body(i: jax.Array, state: Any) -> Any:
        carry, last, rows = state
        carry, last, drawn = draw(i, carry, last)
        return carry, last, [row.at[:, i].set(x) for row, x in zip(rows, drawn, strict=True)]

    carry, _, rows = jax.lax.fori_loop(1, num_tokens, body, (carry, last, rows))
    if greedy:
        return Draft(rows[0]), carry
    ids, logits, logprobs, logsumexp = rows
    return Draft(ids, logits, temperature, logprobs, logsumexp), carry


def gather_drafts(
    cache: Draft, cached_request_ids: jax.Array, request_ids: jax.Array, num_tokens: jax.Array
) -> Draft:
    """Aligns cached drafts with a batch that was reordered, grown or shrunk.

    The logits stay where they are: `Draft.rows` points at them. A request that is not in
    the cache gets no drafts. A draft is used once: the caller forgets it afterwards.

    Args:
      cache: `Draft` with token arrays [S, K].
      cached_request_ids: i32[S], whose draft each slot holds; negative is an empty slot.
      request_ids: i32[B].
      num_tokens: i32[B], drafts wanted of each request; 0 none, -1 inactive.

    Returns:
      `Draft` with token arrays [B, K], logits those of the cache.

    Raises:
      ValueError: if the shapes do not fit together.

    Example:
      >>> cache = specjax.Draft(jnp.array([[5, 6], [7, 8], [9, 4]]))
      >>> draft = specjax.gather_drafts(
      ...     cache, jnp.array([10, 11, 12]), jnp.array([12, 10]), jnp.array([1, 2]))
      >>> draft.token_ids.tolist(), draft.num_tokens.tolist()
      ([[9, 4], [5, 6]], [1, 2])
    """
    slots = cache.token_ids.shape[0]
    check_shape("cached_request_ids", cached_request_ids, (slots,))
    check_shape("num_tokens", num_tokens, request_ids.shape)
    same = (request_ids[:, None] == cached_request_ids[None]) & (cached_request_ids >= 0)[None]
    found = jnp.any(same, axis=1)
    slot = jnp.argmax(same, axis=1).astype(jnp.int32)

    def take(values: jax.Array | None) -> jax.Array | None:
        return None if values is None else values[slot]

    held = num_usable(cache.token_ids, cache.num_tokens)[slot]
    usable = jnp.where(found, jnp.clip(num_tokens, 0, jnp.maximum(held, 0)), 0)
    rows = slot if cache.rows is None else cache.rows[slot]
    return Draft(
        token_ids=cache.token_ids[slot],
        logits=cache.logits,
        temperature=take(cache.temperature),
        logprobs=take(cache.logprobs),
        logsumexp=take(cache.logsumexp),
        cutoff=take(cache.cutoff),
        num_tokens=jnp.where(num_tokens < 0, -1, usable).astype(jnp.int32),
        rows=None if cache.logits is None else rows,
    )
