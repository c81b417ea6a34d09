"""Logits a request did not ask for become those it did: bias, penalties, masks.

What is a threshold (top-k, top-p, min-p) is none of this, and neither is the temperature:
both are applied once, where a row is reduced.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.checks import as_array, check_logits, check_shape, read_array, read_optional
from specjax.mesh import shard_map_batch
from specjax.processing.bad_words import forbid_words
from specjax.processing.sampling_params import (
    allowed_width,
    read_allowed,
    read_bad_words,
    read_bias,
)
from specjax.processing.token_counts import History, TokenCounts

__all__ = ["process_logits"]


class _Rules(NamedTuple):
    """What is asked, checked: numbers f32 [] or [B], the others as in `process_logits`."""

    bias: Any
    repetition: Any
    frequency: Any
    presence: Any
    allowed: Any
    bad_words: Any

    @property
    def penalties(self) -> list[jax.Array]:
        """Those that are given."""
        given = (self.repetition, self.frequency, self.presence)
        return [penalty for penalty in given if penalty is not None]


def process_logits(
    logits: jax.Array,
    *,
    bias: Any = None,
    repetition_penalty: Any = None,
    frequency_penalty: Any = None,
    presence_penalty: Any = None,
    allowed: Any = None,
    bad_words: Any = None,
    history: History | None = None,
    drafted_token_ids: Any = None,
    first_row: Any = 0,
) -> jax.Array:
    r"""Applies a bias, then penalties, then masks; what is forbidden becomes -inf.

    Of a token with logit x, seen c times among the generated tokens before its row:

    .. math:: x' = x + \text{bias}, \quad
      x'' = x' / r \text{ if } x' > 0 \text{ else } x' r \text{ (once seen, prompt included)},
      \quad x''' = x'' - f c - s [c > 0]

    with r, f, s the repetition, frequency and presence penalty. The order is vLLM's. It is
    computed in float32 and rounded once to the dtype of the logits: bfloat16 ones near 20 lie
    0.125 apart, and where a small penalty matters they are cast to float32 before. Row r of a
    request also counts its drafted tokens before that row, and those alone: verification stays
    exact.

    Args:
      logits: [B, R, V], or [B, V] for R = 1; bf16, f16 or f32, raw: R = K + 1 target rows of
        a verification, or one row of a draft step.
      bias: f32, [V] or [B, V]. -inf forbids a token.
      repetition_penalty: f32, [B] or scalar, > 0; 1 changes nothing.
      frequency_penalty: f32, [B] or scalar; 0 changes nothing.
      presence_penalty: f32, [B] or scalar; 0 changes nothing.
      allowed: bool, [V], [B, V] or [B, R, V], or 32-bit words of it, i32 or u32
        [..., ceil(V / 32)]: bit ``v % 32`` of word ``v // 32``, 1 for allowed.
      bad_words: i32, [N, M] or [B, N, M], token sequences padded behind with -1. The last
        token of one is forbidden where the tokens before the row end with the others,
        prompt and drafted tokens included. Ids outside [0, V) are no token's.
      history: what is committed: `counts` for penalties, `token_ids` and `lengths` for bad
        words of more than one token.
      drafted_token_ids: i32, [B, D], D >= R - 1, the tokens drafted behind it; -1 is none.
      first_row: i32 scalar: row r sees the first ``first_row + r`` drafted tokens. 0 for a
        verification, i for step i of a draft.

    Returns:
      Logits of the same shape and dtype, one array of that size and none of float32. A
      request with a penalty that is NaN, infinite, or a repetition penalty <= 0 becomes NaN,
      and one with nothing allowed -inf: verification ends both as invalid. So does what
      overflows the dtype.

    Raises:
      ValueError: for wrong shapes or dtypes, or a rule whose history is missing.

    Example:
      >>> counts = specjax.count_tokens(
      ...     jnp.array([[1, 2]]), jnp.array([2]), 4, prompt_lengths=jnp.array([1]))
      >>> specjax.process_logits(
      ...     jnp.array([[4.0, 2.0, -1.0, 1.0]]), repetition_penalty=2.0, frequency_penalty=0.5,
      ...     history=specjax.History(counts=counts),
      ...     allowed=jnp.array([False, True, True, True]))
      Array([[-inf,  1. , -2.5,  1. ]], dtype=float32)

    References:
      Keskar et al., 2019, arXiv:1909.05858, for the repetition penalty.
    """
    logits = as_array("logits", logits)
    check_logits("logits", logits, "[B, V]" if logits.ndim == 2 else "[B, R, V]")
    rows = logits[:, None] if logits.ndim == 2 else logits
    size, num_rows, vocab_size = rows.shape
    each = ((), (size,))

    def number(name: str, value: Any) -> Any:
        return read_optional(name, value, jnp.float32, *each)

    rules = _Rules(
        read_bias("bias", bias, size),
        number("repetition_penalty", repetition_penalty),
        number("frequency_penalty", frequency_penalty),
        number("presence_penalty", presence_penalty),
        read_allowed("allowed", allowed, size, num_rows),
        read_bad_words("bad_words", bad_words, size),
    )
    _check_widths(rules, vocab_size)
    first_row = read_array("first_row", first_row, jnp.int32, ())
    history = _check_history(rules, History() if history is None else history, rows.shape)
    drafted = _read_drafted(rules, drafted_token_ids, size, num_rows, first_row)
    return _run(rows, rules, history, drafted, first_row).reshape(logits.shape)


def _check_widths(rules: _Rules, vocab_size: int) -> None:
    for name, array in (("bias", rules.bias), ("allowed", rules.allowed)):
        if array is not None:
            width = allowed_width(array, vocab_size) if name == "allowed" else vocab_size
            if name == "allowed" and width < array.shape[-1] == vocab_size:
                raise ValueError(
                    f"allowed has dtype {array.dtype} and shape {array.shape}; a mask of a number "
                    f"per token is bool, and words of 32 tokens are {width} wide."
                )
            check_shape(name, array, (*array.shape[:-1], width))


def _check_history(rules: _Rules, history: History, shape: tuple[int, ...]) -> History:
    """The part of the history that the rules read."""
    size, _, vocab_size = shape
    if not isinstance(history, History):
        raise ValueError(f"history is {type(history).__name__}; it needs a specjax.History.")
    token_ids, lengths, counts = history
    if not rules.penalties:
        counts = None
    elif counts is None:
        raise ValueError(
            "a penalty is given without history.counts; specjax.count_tokens makes them once."
        )
    elif not isinstance(counts, TokenCounts):
        raise ValueError(
            f"history.counts is {type(counts).__name__}; it needs specjax.TokenCounts, as "
            "specjax.count_tokens makes them."
        )
    elif rules.repetition is None:
        counts = counts._replace(prompt=None)
    elif counts.prompt is None:
        raise ValueError(
            "repetition_penalty is given and history.counts.prompt is None; it is of the "
            "prompt's tokens too."
        )
    for name, array in zip(("generated", "prompt"), counts or (), strict=False):
        if array is not None:
            check_shape(f"history.counts.{name}", array, (size, vocab_size))
    if rules.bad_words is None or rules.bad_words.shape[-1] < 2:
        return History(counts=counts)
    if token_ids is None or lengths is None:
        raise ValueError(
            "bad_words has sequences of several tokens and history no token_ids and lengths; "
            "they are compared with what is committed."
        )
    token_ids = as_array("history.token_ids", token_ids)
    form = (size, *token_ids.shape[1:2])
    token_ids = read_array("history.token_ids", token_ids, jnp.int32, form)
    return History(token_ids, read_array("history.lengths", lengths, jnp.int32, (size,)), counts)


def _read_drafted(
    rules: _Rules, drafted: Any, size: int, num_rows: int, first_row: jax.Array
) -> Any:
    """Drafted tokens i32[B, D], or None where no rule reads them."""
    looks_back = rules.penalties or rules.bad_words is not None
    if drafted is None:
        behind = isinstance(first_row, jax.core.Tracer) or int(first_row) > 0
        if looks_back and (num_rows > 1 or behind):
            raise ValueError(
                f"drafted_token_ids is None for {num_rows} rows{' past the first' * behind}; "
                "penalties and bad words of a row depend on the tokens drafted before it."
            )
        return None
    drafted = as_array("drafted_token_ids", drafted)
    if drafted.ndim != 2 or drafted.shape[0] != size or drafted.shape[1] < num_rows - 1:
        raise ValueError(
            f"drafted_token_ids has shape {drafted.shape}; it needs [{size}, D] with "
            f"D >= {num_rows - 1}, the tokens before the last of {num_rows} rows."
        )
    drafted = read_array("drafted_token_ids", drafted, jnp.int32, drafted.shape)
    return drafted if looks_back and drafted.shape[1] else None


@jax.jit
def _run(
    logits: jax.Array, rules: _Rules, history: History, drafted: Any, first_row: jax.Array
) -> jax.Array:
    """`process_logits` on checked arguments, on each shard of the batch."""
    # What serves all requests, having no axis of them: numbers, [V], [N, M].
    ranks = zip(rules, (1, 0, 0, 0, 1, 2), strict=True)
    for_all = [rule if rule is not None and rule.ndim == rank else None for rule, rank in ranks]
    own = [rule if x is None else None for rule, x in zip(rules, for_all, strict=True)]

    def process(batch: Any, shared: Any) -> jax.Array:
        logits, own, history, drafted = batch
        for_all, first_row = shared
        rules = _Rules(*(y if x is None else x for x, y in zip(own, for_all, strict=True)))
        return _process(logits, rules, history, drafted, first_row)

    batch = (logits, own, history, drafted)
    return shard_map_batch(process, logits, batch, (for_all, first_row))


def _process(
    logits: jax.Array, rules: _Rules, history: History, drafted: Any, first_row: jax.Array
) -> jax.Array:
    """One elementwise pass, and a scatter of bad words."""
    x = logits.astype(jnp.float32)
    if rules.bias is not None:
        x = x + rules.bias.reshape(-1, 1, logits.shape[-1])
    if rules.penalties:
        x = _penalise(x, rules, history, drafted, first_row)
    if rules.allowed is not None:
        x = jnp.where(_read_mask(rules.allowed, logits.shape[-1]), x, -jnp.inf)
    if rules.penalties:
        valid = jnp.bool_(True)
        for penalty in rules.penalties:
            valid &= jnp.isfinite(penalty)
        if rules.repetition is not None:
            valid &= rules.repetition > 0
        x = jnp.where(_per_request(valid), x, jnp.nan)
    x = x.astype(logits.dtype)
    if rules.bad_words is not None:
        x = forbid_words(x, rules.bad_words, history, drafted, first_row)
    return x


def _per_request(number: jax.Array) -> jax.Array:
    """[] or [B] against [B, R, V]."""
    return number.reshape(-1, 1, 1)


def _penalise(
    x: jax.Array, rules: _Rules, history: History, drafted: Any, first_row: jax.Array
) -> jax.Array:
    counts = history.counts
    assert counts is not None
    generated = counts.generated[:, None]
    if drafted is not None:
        # Compared rather than counted: a table per row would be larger than the logits.
        token = jax.lax.broadcasted_iota(jnp.int32, (1, 1, x.shape[2]), 2)
        row = first_row + jax.lax.broadcasted_iota(jnp.int32, (1, x.shape[1], 1), 1)
        for i in range(drafted.shape[1]):
            here = (drafted[:, i, None, None] == token) & (row > i)
            generated = generated + here.astype(jnp.int32)
    if rules.repetition is not None:
        assert counts.prompt is not None
        r = _per_request(rules.repetition)
        seen = (generated > 0) | counts.prompt[:, None]
        x = jnp.where(seen, jnp.where(x > 0, x / r, x * r), x)
    if rules.frequency is not None:
        x = x - _per_request(rules.frequency) * generated.astype(jnp.float32)
    if rules.presence is not None:
        x = x - jnp.where(generated > 0, _per_request(rules.presence), jnp.float32(0))
    return x


def _read_mask(allowed: jax.Array, vocab_size: int) -> jax.Array:
    """Bool that broadcasts against [B, R, V]."""
    if allowed.dtype != jnp.bool_:
        shift = jnp.arange(32, dtype=jnp.uint32).reshape(*(1,) * allowed.ndim, 32)
        bits = allowed[..., None] >> shift
        bits = (bits & jnp.uint32(1)) != 0
        allowed = bits.reshape(*allowed.shape[:-1], -1)[..., :vocab_size]
    return allowed if allowed.ndim == 3 else allowed.reshape(-1, 1, vocab_size)
