"""`bias_array`: a bias of some tokens as an array over the vocabulary."""

from collections.abc import Mapping, Sequence
from typing import SupportsIndex

import numpy as np

from specjax.checks import check_count


def bias_array(
    biases: Mapping[int, float] | Sequence[Mapping[int, float]], vocab_size: int
) -> np.ndarray:
    """Returns a dense bias of {token id: bias} on the host: 4 bytes per request and token of V.

    Args:
      biases: a mapping for all requests, or a sequence of B mappings, one per request.
      vocab_size: V of the logits, a Python int >= 1.

    Returns:
      f32[V] of a mapping, f32[B, V] of a sequence; 0 for tokens that are not named.

    Raises:
      ValueError: for a token id outside [0, V).

    Example:
      >>> specjax.bias_array({2: -1.5}, 4).tolist()
      [0.0, 0.0, -1.5, 0.0]
    """
    vocab_size = check_count("vocab_size", vocab_size, 1, "the width of the bias")
    if not isinstance(biases, Mapping):
        rows = [bias_array(one, vocab_size) for one in biases]
        return np.stack(rows) if rows else np.zeros((0, vocab_size), np.float32)
    row = np.zeros((vocab_size,), np.float32)
    for token_id, value in biases.items():
        if not isinstance(token_id, SupportsIndex) or not 0 <= token_id < vocab_size:
            raise ValueError(
                f"biases has token {token_id!r}; it needs ids in [0, {vocab_size}), the vocabulary."
            )
        row[token_id] = value
    return row
