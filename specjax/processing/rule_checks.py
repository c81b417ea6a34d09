"""Checks of logits rules and of the tokens they read, where a call enters."""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.checks import as_array, check_shape, check_type, parse_array
from specjax.devices.vocabulary_split import VocabularySplit, keep_split
from specjax.processing.grammar import start_states
from specjax.processing.history import History
from specjax.processing.sampling_params import FIELDS, SamplingParams, mask_width
from specjax.processing.token_counts import TokenCounts

_BITS_PER_WORD = 32


def check_widths(rules: SamplingParams, vocab_size: int) -> None:
    """Refuses a bias or a mask made for another vocabulary than the logits have."""
    bias, allowed = rules.bias, rules.allowed
    if rules.grammar is not None:
        check_shape("grammar.token_classes", rules.grammar.token_classes, (vocab_size,))
    if bias is not None:
        check_shape("bias", bias, (*bias.shape[:-1], vocab_size))
    if allowed is not None:
        width = mask_width(allowed, vocab_size)
        if width < allowed.shape[-1] == vocab_size:
            raise ValueError(
                f"allowed has dtype {allowed.dtype} and shape {allowed.shape}; a mask with one "
                f"entry per token is bool, and words of 32 tokens are {width} wide."
            )
        check_shape("allowed", allowed, (*allowed.shape[:-1], width))


def check_rules_split(
    rules: SamplingParams, width: int, split: VocabularySplit | None
) -> VocabularySplit | None:
    """Returns the split of the rows for these rules, None where they need whole rows.

    Args:
      rules: checked.
      width: of the logits.
      split: of the logits.

    Raises:
      ValueError: with `axis_name` for a grammar, and for a mask in words one of which would lie on
        two devices.
    """

    def why_whole(width: int) -> str | None:
        allowed = rules.allowed
        if rules.grammar is not None:
            return "grammar is given with axis_name; grammars read whole rows of logits."
        if allowed is None or allowed.dtype == jnp.bool_ or not width % _BITS_PER_WORD:
            return None
        return (
            f"allowed is in words of {_BITS_PER_WORD} tokens and each device has {width} tokens; "
            f"with axis_name that needs a multiple of {_BITS_PER_WORD}, or a mask of bool."
        )

    return keep_split(split, width, why_whole)


def check_history(
    rules: SamplingParams, history: History, size: int, vocab_size: int | None = None
) -> History:
    """Returns the part of the history that the rules read, or refuses it.

    Args:
      rules: checked.
      history: as given by the caller.
      size: B.
      vocab_size: V of the counts; None where they are fitted to the logits later.

    Returns:
      `History` with None for what no rule reads.
    """
    check_type("history", history, History, "a specjax.History")
    counts = _check_counts(rules, history.counts, size, vocab_size)
    state = start_states(rules, size)
    if state is not None and history.grammar_state is not None:
        state = parse_array("history.grammar_state", history.grammar_state, jnp.int32, (size,))
    if rules.bad_words is None or rules.bad_words.shape[-1] < 2:
        return History(counts=counts, grammar_state=state)
    token_ids, lengths = history.token_ids, history.lengths
    if token_ids is None or lengths is None:
        raise ValueError(
            "bad_words has sequences of several tokens and history no token_ids and lengths; "
            "the sequences are compared with the committed tokens."
        )
    token_ids = as_array("history.token_ids", token_ids)
    shape = (size, *token_ids.shape[1:2])
    token_ids = parse_array("history.token_ids", token_ids, jnp.int32, shape)
    lengths = parse_array("history.lengths", lengths, jnp.int32, (size,))
    return History(token_ids, lengths, counts, state)


def _check_counts(rules: SamplingParams, counts: Any, size: int, vocab_size: int | None) -> Any:
    """Returns the counts that the penalties read, or None."""
    if not rules.penalties:
        return None
    if counts is None:
        raise ValueError(
            "a penalty is given without history.counts; specjax.count_tokens makes them once."
        )
    needed = "specjax.TokenCounts, as specjax.count_tokens makes them"
    check_type("history.counts", counts, TokenCounts, needed)
    if not rules.reads_prompt:
        counts = counts._replace(prompt=None)
    elif counts.prompt is None:
        penalty = next(name for name in rules.penalties if FIELDS[name].reads_prompt)
        raise ValueError(
            f"{penalty} is given and history.counts.prompt is None; the penalty reads the "
            "tokens of the prompt too."
        )
    for name, array in zip(TokenCounts._fields, counts, strict=True):
        if array is not None:
            width = (0, *array.shape)[-1] if vocab_size is None else vocab_size
            check_shape(f"history.counts.{name}", array, (size, width))
    return counts


def check_drafted(
    rules: SamplingParams, drafted: Any, size: int, num_rows: int, first_row: jax.Array
) -> Any:
    """Returns drafted tokens i32[B, D], None where no rule reads them, or refuses."""
    reads_tokens = rules.reads_drafted
    if drafted is None:
        is_later = isinstance(first_row, jax.core.Tracer) or int(first_row) > 0
        if reads_tokens and (num_rows > 1 or is_later):
            raise ValueError(
                f"drafted_token_ids is None for {num_rows} rows{' past the first' * is_later}; "
                "penalties, bad words and a grammar read the tokens drafted before a row."
            )
        return None
    drafted = as_array("drafted_token_ids", drafted)
    if drafted.ndim != 2 or drafted.shape[0] != size or drafted.shape[1] < num_rows - 1:
        raise ValueError(
            f"drafted_token_ids has shape {drafted.shape}; it needs [{size}, D] with "
            f"D >= {num_rows - 1}, the tokens before the last of {num_rows} rows."
        )
    drafted = parse_array("drafted_token_ids", drafted, jnp.int32, drafted.shape)
    return drafted if reads_tokens and drafted.shape[1] else None
