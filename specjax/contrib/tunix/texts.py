"""Prompts and texts of a rollout: strings to padded tokens, and tokens as tunix returns them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.decode.commit import Finish
from specjax.decode.generate import Generation

__all__ = ["Prompts", "cut_texts", "read_prompts"]


class Prompts(NamedTuple):
    """Tokens of prompts, padded to one width.

    Attributes:
      token_ids: i32[B, P], padded at the end.
      lengths: i32[B].
      left_padded: i32[B, P], padded at the beginning, as in tunix.
    """

    token_ids: np.ndarray
    lengths: np.ndarray
    left_padded: np.ndarray


def read_prompts(tokenizer: Any, prompts: Sequence[str], width: int | None) -> Prompts:
    """Returns the tokens of prompts as tunix's sampler reads them.

    Each begins with one beginning-of-sequence token, if the tokenizer has it.

    Args:
      tokenizer: tunix's `TokenizerAdapter`.
      prompts: strings.
      width: P. None, or one that a prompt exceeds, is the next power of two that holds all.
    """
    bos = tokenizer.bos_id()
    begin = [bos] if bos else []
    ids = [tokenizer.dedup_bos_ids(begin + list(tokenizer.encode(text))) for text in prompts]
    lengths = np.array([len(row) for row in ids], np.int32)
    longest = int(lengths.max())
    if width is None or width < longest:
        width = 1 << (longest - 1).bit_length()
    token_ids = np.full((len(ids), width), tokenizer.pad_id(), np.int32)
    left_padded = token_ids.copy()
    for number, row in enumerate(ids):
        token_ids[number, : len(row)] = row
        left_padded[number, width - len(row) :] = row
    return Prompts(token_ids, lengths, left_padded)


def cut_texts(
    output: Generation, lengths: np.ndarray, eos: Sequence[int]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns tokens and log-probabilities of texts, without the token that ended each.

    Args:
      output: of `generate`, on the host.
      lengths: i32[B], of the prompts.
      eos: tokens that end a text.

    Raises:
      ValueError: if a text ended at logits that are not a distribution.
    """
    invalid = np.flatnonzero(output.finish == Finish.INVALID)
    if invalid.size:
        raise ValueError(
            f"the policy's logits of prompt {invalid[0]} have NaN, +inf or nothing finite; its "
            "parameters may have diverged."
        )
    tokens, logprobs = [], []
    for row, start in enumerate(lengths):
        text = np.asarray(output.token_ids)[row, start : output.lengths[row]]
        text = text[: int(np.argmax([*np.isin(text, eos), True]))]
        tokens.append(text)
        logprobs.append(np.asarray(output.logprobs)[row, start : start + text.size])
    return tokens, logprobs
