"""`unpad`: token ids as lists of ints on the host, without padding."""

from typing import Any

import numpy as np

__all__ = ["unpad"]


def unpad(token_ids: Any, vocab_size: int | None = None) -> list[list[int]]:
    """Returns rows of token ids as lists of ints on the host, without padding.

    Args:
      token_ids: i32[B, L]; negative ids are padding.
      vocab_size: int; ids at or above it are dropped too. None drops none.

    Returns:
      One list of ints per row.

    Example:
      >>> specjax.unpad(jnp.array([[3, 9, -1], [1, -1, -1]]), vocab_size=8)
      [[3], [1]]
    """
    rows = np.asarray(token_ids)
    limit = np.inf if vocab_size is None else vocab_size
    return [[int(token) for token in row if 0 <= token < limit] for row in rows]
