"""Bias, penalties and masks: raw logits to processed logits.

Top-k, top-p, min-p and the temperature are not applied here. The samplers apply them where they
reduce a row.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.checks import as_array, check_logits, parse_array
from specjax.devices.vocabulary_split import parse_split
from specjax.processing.history import History
from specjax.processing.logit_rules import RowContext, apply_rules
from specjax.processing.rule_checks import (
    check_drafted,
    check_history,
    check_rules_split,
    check_widths,
)
from specjax.processing.sampling_params import SamplingParams, parse_sampling, split_sampling


def process_logits(
    logits: jax.Array,
    sampling: SamplingParams,
    *,
    history: History | None = None,
    drafted_token_ids: Any = None,
    first_row: Any = 0,
    axis_name: str | None = None,
) -> jax.Array:
    r"""Applies a bias, then penalties, then masks, and returns the processed logits.

    A token with logit x that occurs c times among the generated tokens before its row gets

    .. math:: x' = x + \text{bias}, \quad
      x'' = x' / r \text{ if } x' > 0 \text{ else } x' r
      \text{ (if it occurs, in the prompt too)}, \quad x''' = x'' - f c - s [c > 0]

    with r, f, s the repetition, frequency and presence penalty, and -inf if it is forbidden. The
    order is vLLM's. The result is computed in float32 and rounded once to the dtype of the logits.
    bfloat16 logits near 20 lie 0.125 apart, so cast them to float32 where a small penalty matters.
    Row r of a request also counts its drafted tokens before that row, so verification stays exact.

    Args:
      logits: [B, R, V], or [B, V] for R = 1; bf16, f16 or f32, raw. R = K + 1 target rows of a
        verification, or one row of a draft step.
      sampling: `SamplingParams` without `top_k`, `top_p` and `min_p`, which `logit_cutoff` takes.
        A bias of -inf forbids a token. A mask may have one row for each of R, [B, R, V] or words.
        The last token of a bad word is forbidden in a row if the tokens before the row end with the
        other ones. The prompt and drafted tokens count. Ids outside [0, V) match nothing. With a
        grammar row r is in the state after the drafted tokens before it.
      history: the committed tokens: `counts` for penalties, `token_ids` and `lengths` for bad
        words of more than one token, `grammar_state` for a grammar.
      drafted_token_ids: i32, [B, D], D >= R - 1, the tokens drafted after the history, padded
        with -1.
      first_row: i32 scalar. Row r comes after the first ``first_row + r`` drafted tokens: 0 for a
        verification, i for step i of a draft.
      axis_name: as in `Options`. `bias`, `allowed` and `history.counts` are then of the
        tokens that this device has, as `logits` are; ids stay those of the whole vocabulary. A mask
        in words needs a multiple of 32 tokens on each device. Without `grammar`. None asks the
        sharding of `logits`, and all of these are whole arrays.

    Returns:
      Logits of the shape and dtype of `logits`. One array of that size is made, none in float32.
      A request whose penalty is NaN or infinite, or whose repetition penalty is <= 0, becomes NaN.
      A row without allowed tokens becomes -inf. Verification ends both as invalid, and so logits
      that overflow the dtype.

    Raises:
      ValueError: for wrong shapes or dtypes, or a rule without the history that it reads.

    Example:
      >>> counts = specjax.count_tokens(
      ...     jnp.array([[1, 2]]), jnp.array([2]), 4, prompt_lengths=jnp.array([1]))
      >>> specjax.process_logits(
      ...     jnp.array([[4.0, 2.0, -1.0, 1.0]]),
      ...     specjax.SamplingParams(
      ...         repetition_penalty=2.0, frequency_penalty=0.5,
      ...         allowed=jnp.array([False, True, True, True])),
      ...     history=specjax.History(counts=counts))
      Array([[-inf,  1. , -2.5,  1. ]], dtype=float32)

    References:
      Keskar et al., 2019, arXiv:1909.05858, for the repetition penalty.
    """
    logits = as_array("logits", logits)
    check_logits("logits", logits, "[B, V]" if logits.ndim == 2 else "[B, R, V]")
    size, vocab_size = logits.shape[0], logits.shape[-1]
    num_rows = 1 if logits.ndim == 2 else logits.shape[1]
    rules, filters = split_sampling(sampling)
    for name, value in filters._asdict().items():
        if value is not None:
            raise ValueError(
                f"sampling has {name}, which changes no logit; give it to logit_cutoff, or call "
                "apply_sampling, which does both."
            )
    rules = parse_sampling(rules, size, num_rows)
    split = parse_split(axis_name, None, logits)
    split = check_rules_split(rules, vocab_size, split)
    check_widths(rules, vocab_size)
    first_row = parse_array("first_row", first_row, jnp.int32, ())
    history = check_history(rules, History() if history is None else history, size, vocab_size)
    drafted = check_drafted(rules, drafted_token_ids, size, num_rows, first_row)
    return apply_rules(logits, rules, RowContext(history, drafted, first_row, split=split))
