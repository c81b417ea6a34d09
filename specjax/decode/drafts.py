"""Drafts: made from probabilities, made by K steps of a draft model, realigned."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checks import as_array, check_count, check_logits, check_shape, read_array
from specjax.core.acceptance import num_valid_drafts
from specjax.core.truncation import Filters
from specjax.implementation import read_implementation
from specjax.mesh import pvary_like, shard_map_batch
from specjax.processing.apply_sampling import apply_sampling_to_draft
from specjax.processing.logit_rules import LogitRules, RowContext
from specjax.processing.rule_checks import check_history
from specjax.processing.sampling_params import SamplingParams, read_sampling, split_sampling
from specjax.processing.token_counts import History
from specjax.samplers.api import gumbel_sample
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
    token_ids = read_array("token_ids", token_ids, jnp.int32, np.shape(token_ids))
    probs = jnp.asarray(as_array("probs", probs))
    if probs.ndim != 3 or probs.shape[:2] != token_ids.shape:
        raise ValueError(
            f"probs has shape {probs.shape} for token_ids {token_ids.shape}; it needs [B, K, V], "
            "one law per drafted token."
        )
    temperature = jnp.ones(token_ids.shape[:1], jnp.float32)
    return Draft(
        jnp.asarray(token_ids), logits=jnp.log(probs.astype(jnp.float32)), temperature=temperature
    )


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
    sampling: SamplingParams | None = None,
    history: History | None = None,
    noise_dtype: Any = jnp.float32,
    implementation: str | None = None,
) -> tuple[Draft, Any]:
    """Drafts K tokens with a model, for a loop of one's own; call it under `jax.jit`.

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
      sampling: `SamplingParams` to draft by, as a rule those of the target, whose tokens it
        resembles most then; a bias or mask is cut or filled up to V_d. The draft keeps what
        was drawn from: processed logits, cutoffs.
      history: what is committed, for penalties and bad words, as in `process_logits`; the
        tokens drafted so far count too.
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
    num_tokens = check_count("num_tokens", num_tokens, 1, "the draft tokens of a proposal")
    token_ids, positions, temperature = _check_batch(token_ids, positions, temperature)
    size = token_ids.shape[0]
    greedy = draft_sample_method == "greedy"
    draft_temperature = jnp.zeros_like(temperature) if greedy else temperature
    rules, filters = _draft_sampling(sampling, size, greedy)
    history = check_history(rules, History() if history is None else history, size)
    resolved = read_implementation(implementation)

    def draw(i: Any, carry: Any, token_ids: jax.Array, drafted: Any) -> tuple[Any, Any, Any]:
        logits, carry = step_fn(carry, token_ids, positions + (i - 1))
        logits = as_array("logits", logits)
        check_logits("logits", logits, "[B, V_d]", size)
        logits, cutoff = apply_sampling_to_draft(
            logits,
            rules,
            filters,
            RowContext(history, drafted, jnp.asarray(i, jnp.int32)),
            temperature=draft_temperature,
            implementation=resolved,
        )
        sample = gumbel_sample(
            logits,
            keys=keys,
            positions=positions + i,
            stream=Stream.draft(i),
            temperature=draft_temperature,
            cutoff=cutoff,
            noise_dtype=noise_dtype,
            implementation=implementation,
        )
        outputs = [] if greedy else [logits, sample.logprobs, sample.logsumexp]
        outputs += [] if cutoff is None else [cutoff]
        # An invalid row gives -1, which ends the drafts; the model is fed a token.
        return carry, jnp.maximum(sample.token_ids, 0), (sample.token_ids, *outputs)

    rows, carry = _draw_tokens(draw, carry, token_ids, num_tokens, keys)
    if greedy:
        return Draft(rows[0]), carry
    ids, logits, logprobs, logsumexp, *cutoff = rows
    return Draft(ids, logits, temperature, logprobs, logsumexp, *cutoff), carry


def _draw_tokens(
    draw: Callable[..., Any], carry: Any, token_ids: jax.Array, num_tokens: int, keys: jax.Array
) -> tuple[list[jax.Array], Any]:
    """What K draws keep, each array [B, K, ...], the token ids first; and the carry."""
    carry, last, first = draw(0, carry, token_ids, None)
    # Every place holds the first draw until its own comes.
    rows = [jnp.repeat(x[:, None], num_tokens, axis=1) for x in first]

    def body(i: jax.Array, state: Any) -> Any:
        carry, last, rows = state
        carry, last, drawn = draw(i, carry, last, rows[0])
        put = jax.lax.dynamic_update_index_in_dim
        rows = [put(row, x, i, 1) for row, x in zip(rows, drawn, strict=True)]
        return pvary_like((carry, last, rows), state)

    start = (carry, last, rows)
    carry, _, rows = jax.lax.fori_loop(1, num_tokens, body, pvary_like(start, start, keys))
    return rows, carry


def _draft_sampling(sampling: Any, size: int, greedy: bool) -> tuple[LogitRules, Filters]:
    """Returns checked rules and filters; an argmax needs no filters."""
    sampling = SamplingParams() if sampling is None else read_sampling(sampling, size)
    rules, filters = split_sampling(sampling)
    return rules, Filters(None, None, None) if greedy else filters


def _check_batch(
    token_ids: Any, positions: Any, temperature: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Last tokens, positions and temperatures, each [B]."""
    token_ids = jnp.asarray(as_array("token_ids", token_ids))
    if token_ids.ndim != 1:
        raise ValueError(
            f"token_ids has shape {token_ids.shape}; it needs [B], each request's last token."
        )
    each = ((), token_ids.shape)
    # Sums rather than broadcasts: they keep the sharding of the batch.
    none = jnp.zeros_like(token_ids, jnp.int32)
    positions = none + read_array("positions", positions, jnp.int32, *each)
    temperature = read_array("temperature", temperature, jnp.float32, *each)
    return token_ids, positions, none.astype(jnp.float32) + temperature


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
    cached_request_ids = jnp.asarray(as_array("cached_request_ids", cached_request_ids))
    request_ids = jnp.asarray(as_array("request_ids", request_ids))
    if request_ids.ndim != 1:
        raise ValueError(f"request_ids has shape {request_ids.shape}; it needs [B].")
    num_tokens = jnp.asarray(read_array("num_tokens", num_tokens, jnp.int32, request_ids.shape))
    check_shape("cached_request_ids", cached_request_ids, (slots,))
    small = cache._replace(logits=None)

    def align(batch: Any, shared: Any) -> Draft:
        request_ids, num_tokens = batch
        cache, cached_request_ids = shared
        same = request_ids[:, None] == cached_request_ids[None]
        same &= (cached_request_ids >= 0)[None]
        slot = jnp.argmax(same, axis=1).astype(jnp.int32)
        held = num_valid_drafts(cache.token_ids, cache.num_tokens)[slot]
        usable = jnp.clip(num_tokens, 0, jnp.maximum(held, 0))
        usable = jnp.where(jnp.any(same, axis=1), usable, 0)
        taken: Draft = jax.tree.map(lambda values: values[slot], cache)
        rows = slot if taken.rows is None else taken.rows
        return taken._replace(num_tokens=jnp.where(num_tokens < 0, -1, usable), rows=rows)

    shared = (small, cached_request_ids)
    draft: Draft = shard_map_batch(align, request_ids, (request_ids, num_tokens), shared)
    if cache.logits is None:
        return draft._replace(rows=None)
    return draft._replace(logits=cache.logits)
