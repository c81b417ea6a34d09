"""Log-probabilities of a prompt's tokens, listed by the programs that read the prompt.

    positions of a chunk -> `next_ids` -> `Programs.list_chunk` -> `TopLogprobs` of the chunk's rows

A chunk of which no prompt is listed is read by a program without logits. The arrays stay on the
device until the request's first token is delivered: by then they are computed.
"""

from collections.abc import Iterable

import jax
import numpy as np

from specjax.decode.logprobs import TopLogprobs
from specjax.engine.programs import Programs
from specjax.engine.slots import PromptCaches


class PromptListing:
    """`TopLogprobs` of each token of a prompt, chunk by chunk.

    Args:
      token_ids: the prompt, i32[L].
    """

    def __init__(self, token_ids: np.ndarray) -> None:
        self._token_ids = token_ids
        # Of each chunk [R, C, ...] on the device, the prompt's rows, and bool[rows, C]: no padding.
        self._chunks: list[tuple[TopLogprobs, slice, np.ndarray]] = []

    def next_ids(self, positions: np.ndarray) -> np.ndarray:
        """Returns the token after each of some positions; -1 after a position of -1.

        Example:
          >>> PromptListing(np.array([7, 8, 9])).next_ids(np.array([[0, 1, -1]])).tolist()
          [[8, 9, -1]]
        """
        return np.where(positions < 0, -1, self._token_ids[positions + 1]).astype(np.int32)

    def add(self, top: TopLogprobs, rows: slice, positions: np.ndarray) -> None:
        """Adds a chunk, of which `rows` are this prompt's next tokens."""
        self._chunks.append((top, rows, positions[rows] >= 0))

    def by_token(self) -> list[TopLogprobs | None]:
        """Returns a `TopLogprobs` of NumPy arrays for each token; None for the first."""
        listed: list[TopLogprobs | None] = [None]
        for top, rows, is_token in jax.device_get(self._chunks):
            values = [leaf[rows][is_token] for leaf in top]
            listed += [TopLogprobs(*row) for row in zip(*values, strict=True)]
        return listed


def run_chunk(
    programs: Programs,
    caches: PromptCaches | None,
    chunk: tuple[np.ndarray, ...],
    owners: Iterable[tuple[PromptListing | None, slice]],
) -> PromptCaches:
    """Returns caches after a chunk, and adds its log-probabilities to the prompts that list them.

    Args:
      programs: of the engine.
      caches: before the chunk, of a prompt or of a batch.
      chunk: token ids and positions, i32[R, C] each, and for pieces their places.
      owners: the listing of each prompt in the chunk, or None, and the prompt's rows.
    """
    listings = [(listing, rows) for listing, rows in owners if listing is not None]
    if programs.list_chunk is None or not listings:
        return programs.prefill_chunk(caches, *chunk)
    token_ids, positions, *places = chunk
    next_ids = np.full_like(positions, -1)
    for listing, rows in listings:
        next_ids[rows] = listing.next_ids(positions[rows])
    caches, top = programs.list_chunk(caches, token_ids, positions, next_ids, *places)
    for listing, rows in listings:
        listing.add(top, rows, positions)
    return caches
