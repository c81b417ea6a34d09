"""How a row is cut among programs: sizes of tiles and warps, each with its reason."""

from typing import NamedTuple

from specjax.core.noise import SAMPLING_BLOCK

__all__ = [
    "DRAW_WARPS",
    "SEARCH_HELD",
    "SEARCH_NOTED",
    "SEARCH_WARPS",
    "Tile",
    "is_small",
    "num_parts_of_noise",
    "pair_tile",
    "power_of_two",
    "row_tile",
    "search_tile",
    "target_tile",
    "whole_search_tile",
]

# A token is drawn by one program from about a thousand block weights: four to a thread.
DRAW_WARPS = 8

# A cutoff is searched by one program, among logits that it holds, eight to a thread, or has noted:
# no copy of a row, but what lies above a bound where hundreds or thousands of tokens are kept.
SEARCH_WARPS = 8

SEARCH_HELD = 2048

SEARCH_NOTED = 32768


class Tile(NamedTuple):
    """One program's share of a row.

    Attributes:
      size: logits reduced at once, a power of two and whole blocks.
      num_warps: warps that share them.
    """

    size: int
    num_warps: int

    @property
    def blocks(self) -> int:
        """Sampling blocks of a tile."""
        return self.size // SAMPLING_BLOCK

    def count(self, vocab_size: int) -> int:
        """Tiles, and so programs, to a row."""
        return -(-vocab_size // self.size)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def _at_most(size: int, vocab_size: int) -> int:
    return min(size, max(SAMPLING_BLOCK, power_of_two(vocab_size)))


def row_tile(num_rows: int, vocab_size: int) -> Tile:
    """For `gumbel_sample` and for draft rows that carry no statistics.

    Few rows want many programs; with many, a program that has 64 logits to a thread in flight
    comes nearest to the memory's rate.
    """
    return Tile(_at_most(4096 if num_rows <= 16 else 16384, vocab_size), 8)


def target_tile(num_requests: int, vocab_size: int) -> Tile:
    """For target rows: smaller programs leave sooner where a request has ended."""
    return Tile(_at_most(8192, vocab_size), 8 if is_small(num_requests) else 4)


def pair_tile(num_requests: int, vocab_size: int) -> Tile:
    """For the residual, which reads a target and a draft row side by side.

    In the smallest batches about two programs to a multiprocessor, in a large one fewer and longer
    ones.
    """
    if num_requests <= 8:
        return Tile(_at_most(4096, vocab_size), 4)
    return Tile(_at_most(8192 if is_small(num_requests) else 16384, vocab_size), 8)


def search_tile(num_noted: int) -> Tile:
    """For a cutoff that is searched among noted logits: those of a turn are few, too."""
    return Tile(_at_most(2048, num_noted), SEARCH_WARPS)


def whole_search_tile(vocab_size: int) -> Tile:
    """For one that is searched in the row itself: every turn waits for its logits once."""
    return Tile(_at_most(16384, vocab_size), SEARCH_WARPS)


def num_parts_of_noise(num_rows: int, num_blocks: int) -> int:
    """Programs of their own that make the noise of `gumbel_sample`'s blocks, for each row.

    They shorten the draw while multiprocessors idle, and with float64 a thousand blocks are work
    enough for four. In a larger batch they would only stand in line: none.
    """
    return max(1, num_blocks // 256) if num_rows <= 128 else 0


def is_small(num_requests: int) -> bool:
    """Whether a batch leaves most of the GPU idle, so that latency decides and not work.

    All its target rows are read at once, and residuals are drawn by the last program to arrive,
    which saves a launch.
    """
    return num_requests <= 16
