"""Bias, penalties and masks: raw logits to processed logits.

Top-k, top-p, min-p and the temperature are not applied here. The samplers apply them where they
reduce a row.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.checks import as_array, check_logits, read_array
from specjax.processing.logit_rules import LogitRules, RowContext, apply_rules
from specjax.processing.rule_checks import check_drafted, check_history, check_rules, check_widths
from specjax.processing.token_counts import History

__all__ = ["process_logits"]


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
    size, vocab_size = logits.shape[0], logits.shape[-1]
    num_rows = 1 if logits.ndim == 2 else logits.shape[1]
    rules = LogitRules(
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        bias=bias,
        allowed=allowed,
        bad_words=bad_words,
    )
    rules = check_rules(rules, size, num_rows)
    check_widths(rules, vocab_size)
    first_row = read_array("first_row", first_row, jnp.int32, ())
    history = check_history(rules, History() if history is None else history, size, vocab_size)
    drafted = check_drafted(rules, drafted_token_ids, size, num_rows, first_row)
    return apply_rules(logits, rules, RowContext(history, drafted, first_row))
