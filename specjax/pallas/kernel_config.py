"""Sizes of the kernels' tiles and warps, each with its reason."""

import dataclasses
from typing import Any, NamedTuple, Self

from specjax.checks import check_count
from specjax.core.noise import SAMPLING_BLOCK


class Tile(NamedTuple):
    """The elements of a row, logits or hidden states, that a program holds at once.

    They are its share of the row, or in a search one iteration of its loop.

    Attributes:
      size: elements reduced at once, a power of two; for logits a multiple of the block.
      num_warps: warps of the program.
    """

    size: int
    num_warps: int

    @property
    def num_blocks(self) -> int:
        """Blocks of 128 tokens in a tile of logits."""
        return self.size // SAMPLING_BLOCK

    def num_tiles(self, vocab_size: int) -> int:
        """Returns the number of tiles of a row: its programs in a launch that reduces it."""
        return -(-vocab_size // self.size)


_MAX_WARPS, _MAX_SEARCH_PROGRAMS = 32, 16
# Most programs of target rows that have 8 warps; more have 4.
_MAX_WIDE_PROGRAMS = 4608
_TILES = ("row", "target", "residual", "buffer_search", "row_search")
_WARPS = ("num_draw_warps", "num_search_warps", "num_judge_warps")
_POWERS_OF_2 = (
    *("num_pivots", "num_bound_groups", "num_noise_splits", "num_register_logits"),
    *("small_reread_chunk", "large_reread_chunk"),
)
# The minimum of each field that need not be a power of two.
_COUNTS = {
    "num_search_programs": 1,
    "num_judge_programs": 1,
    "max_small_programs": 0,
    "num_buffered_logits": 1,
    "max_reread": 0,
}


def next_power_of_2(n: int) -> int:
    """Returns the smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def _limit(size: int, vocab_size: int) -> int:
    """Returns a tile's size that is no larger than a row padded to a power of two."""
    return min(size, max(SAMPLING_BLOCK, next_power_of_2(vocab_size)))


def _check_tile(name: str, tile: Any) -> None:
    """Refuses a value that is not a tile of a row of logits."""
    if not isinstance(tile, Tile):
        raise ValueError(f"{name} is {tile!r}; it needs a Tile(size, num_warps), or None.")
    _check_power_of_2(f"{name}.size", tile.size, SAMPLING_BLOCK)
    _check_power_of_2(f"{name}.num_warps", tile.num_warps, 1, _MAX_WARPS)


def _check_power_of_2(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Refuses a number that is not a power of two, or is below or above a limit."""
    limits = f">= {least}" if most is None else f"from {least} to {most}"
    count = check_count(name, value, least, f"a power of two {limits}")
    if count != next_power_of_2(count) or (most is not None and count > most):
        raise ValueError(f"{name} is {value!r}; it needs a power of two {limits}.")


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """Sizes of the kernels of sampling, verification and cutoffs.

    A tile that is None is chosen by the shape of a call. Passed as
    `implementation=Implementation("triton", (KernelConfig(...),))`. A size that no kernel could
    have is refused here, in a `ValueError`.

    Attributes:
      row: tile of a row of `gumbel_sample` and `logit_cutoff`, and of draft rows without
        statistics.
      target: tile of a target row.
      residual: tile of a residual, which reads a target and a draft row together.
      buffer_search: tile of a cutoff that is searched among buffered logits.
      row_search: tile of a cutoff that is searched in the row itself.
      num_draw_warps: warps of the program that draws a token from about a thousand log-masses,
        four per thread.
      num_search_warps: warps of a program that searches a cutoff.
      num_search_programs: programs per row that may search its cutoff together, at most 16; None
        chooses.
      num_pivots: logits at which one pass over a row in memory compares, a power of two.
      num_judge_warps: warps of a program that judges a request of block verification; None chooses.
      num_judge_programs: programs that judge a request of block verification together, at least
        1; None chooses.
      num_bound_groups: groups into which the judging program deals a row's blocks, a power of two.
        It reads the heaviest block of each group.
      max_small_programs: tiles of all target rows, up to which they are all read at once; two
        fifths of it without log-probabilities of greedy requests.
      num_noise_splits: programs per row that make the noise of its blocks, in `gumbel_sample` and
        small batches of coupled sampling. A power of two, at most the padded number of blocks.
        0 leaves the noise to the draw; None chooses.
      normalizes_by_tiles: whether coupled sampling normalizes a row by its tiles, in the order of a
        request without drafts, instead of by its blocks.
      num_register_logits: candidates that a search holds in registers, a power of two: eight to a
        thread.
      num_buffered_logits: capacity of a row's buffer of candidates in memory, which is cut to
        V / 4. A row with more candidates than `num_register_logits` is searched there.
      small_reread_chunk: sub-blocks that the compaction reads per iteration in a row that has at
        most as many to read again, a power of two.
      large_reread_chunk: sub-blocks per iteration in a row that has more, a power of two.
      max_reread: most sub-blocks of a row that are read again; with more, the row itself is
        searched. None chooses.
    """

    row: Tile | None = None
    target: Tile | None = None
    residual: Tile | None = None
    buffer_search: Tile | None = None
    row_search: Tile | None = None
    num_draw_warps: int = 8
    num_search_warps: int = 8
    num_search_programs: int | None = None
    num_pivots: int = 8
    num_judge_warps: int | None = None
    num_judge_programs: int | None = None
    num_bound_groups: int = 32
    max_small_programs: int = 2560
    num_noise_splits: int | None = None
    normalizes_by_tiles: bool = False
    num_register_logits: int = 2048
    num_buffered_logits: int = 32768
    small_reread_chunk: int = 64
    large_reread_chunk: int = 256
    max_reread: int | None = None

    def __post_init__(self) -> None:
        """Refuses sizes that Triton or a kernel would refuse later, with less clear errors."""
        sizes = {name: x for name, x in vars(self).items() if x is not None}
        for name in sizes.keys() & _TILES:
            _check_tile(name, sizes[name])
        for name in sizes.keys() & _WARPS:
            _check_power_of_2(name, sizes[name], 1, _MAX_WARPS)
        for name in sizes.keys() & _POWERS_OF_2:
            # 0 stands for no programs that make noise.
            if (name, sizes[name]) != ("num_noise_splits", 0):
                _check_power_of_2(name, sizes[name], 1)
        for name in _COUNTS.keys() & sizes.keys():
            check_count(name, sizes[name], _COUNTS[name], "as KernelConfig describes it")
        if self.num_search_programs is not None and self.num_search_programs > _MAX_SEARCH_PROGRAMS:
            raise ValueError(
                f"num_search_programs is {self.num_search_programs}; it needs at most "
                f"{_MAX_SEARCH_PROGRAMS} programs a row."
            )

    def for_row_invariance(self) -> Self:
        """Returns the sizes with which a row's bits depend neither on a batch nor on its draft.

        A sum's order follows from its tile, the program's warps and the programs that share it.
        """
        tile = Tile(8192, 8)
        return dataclasses.replace(
            self,
            row=tile,
            target=tile,
            residual=tile,
            num_search_programs=1,
            num_judge_warps=8,
            num_judge_programs=1,
            max_small_programs=0,
            num_noise_splits=0,
            normalizes_by_tiles=True,
        )

    def reduce_tile(self, num_rows: int, vocab_size: int) -> Tile:
        """Returns the tile of `gumbel_sample`, `logit_cutoff` and draft rows without statistics.

        Few rows need many programs. With many rows, a program that has 64 logits to a thread in
        flight comes nearest to the memory's rate.
        """
        return self.row or Tile(_limit(4096 if num_rows <= 16 else 16384, vocab_size), 8)

    def target_tile(self, num_rows: int, vocab_size: int) -> Tile:
        """Returns the tile of target rows.

        Many programs have 4 warps, so that more of them fit a multiprocessor.
        """
        size = _limit(8192, vocab_size)
        num_warps = 8 if num_rows * -(-vocab_size // size) <= _MAX_WIDE_PROGRAMS else 4
        return self.target or Tile(size, num_warps)

    def residual_tile(self, num_requests: int, vocab_size: int, is_small_batch: bool) -> Tile:
        """Returns the tile of a residual.

        8 requests get about two programs per multiprocessor; larger batches get larger tiles.
        """
        if self.residual is not None:
            return self.residual
        if num_requests <= 8:
            return Tile(_limit(4096, vocab_size), 4)
        return Tile(_limit(8192 if is_small_batch else 16384, vocab_size), 8)

    def split_residual_tile(self, num_requests: int, width: int, is_small_batch: bool) -> Tile:
        """Returns the tile of a residual of which a device has `width` tokens.

        Each program that draws reads its request's judgement. The largest tiles that give each
        multiprocessor two programs read it least often: on two H200s 18.8 us instead of 21.5.
        """
        widest = Tile(32768, 8)
        if self.residual is None and num_requests * (width // widest.size) >= 256:
            return widest
        return self.residual_tile(num_requests, width, is_small_batch)

    def block_residual_tile(self, num_requests: int, vocab_size: int, is_small_batch: bool) -> Tile:
        """Returns the tile of a residual of block verification.

        In a large batch a program reads the residuals of a request one after the other. Smaller
        tiles share that work among more programs.
        """
        if self.residual is None and not is_small_batch:
            return Tile(_limit(8192, vocab_size), 8)
        return self.residual_tile(num_requests, vocab_size, is_small_batch)

    def buffer_search_tile(self) -> Tile:
        """Returns the tile of a cutoff that is searched among buffered logits."""
        return self.buffer_search or Tile(
            _limit(2048, self.num_buffered_logits), self.num_search_warps
        )

    def row_search_tile(self, vocab_size: int) -> Tile:
        """Returns the tile of a cutoff that is searched in the row itself.

        A pass adds up its tiles elementwise and reduces across threads once.
        """
        return self.row_search or Tile(_limit(8192, vocab_size), self.num_search_warps)

    def search_programs(self, num_rows: int) -> int:
        """Returns the number of programs that may search a row's cutoff together.

        A row has several if they run on multiprocessors that would idle: up to 128 programs for
        all rows together, on an H200's 132 multiprocessors.
        """
        if self.num_search_programs is not None:
            return self.num_search_programs
        return max(1, min(16, 128 // next_power_of_2(num_rows)))

    def reread_limit(self, num_programs: int | None) -> int:
        """Returns the maximum number of sub-blocks that one program reads again.

        With more sub-blocks it is faster to search the whole row, by all its programs together.
        Counts are equal among sub-blocks and in the row; masses differ by their rounding. So the
        limit of rows cut by top-p does not depend on the batch.

        Args:
          num_programs: of a row; None for a row cut by top-p.
        """
        if self.max_reread is not None:
            return self.max_reread
        if num_programs is None:
            return 1024
        return 512 if num_programs > 2 else 4096

    def noise_splits(self, num_rows: int, num_blocks: int) -> int:
        """Returns the number of programs per row that make the noise of its blocks before the draw.

        They shorten the draw while multiprocessors idle: one program for 256 blocks, sized for
        float64 noise. A larger batch has none, because they would only queue.
        """
        if self.num_noise_splits is not None:
            return self.num_noise_splits
        return max(1, num_blocks // 256) if num_rows <= 128 else 0

    def judge_warps(self, is_small_batch: bool) -> int:
        """Returns the warps of the program that judges a request of block verification.

        In a small batch it reads no logits.
        """
        return self.num_judge_warps or (1 if is_small_batch else 8)

    def judge_programs(self, num_requests: int, max_draft_tokens: int, is_small_batch: bool) -> int:
        """Returns the programs that judge a request together, of block verification.

        Each bounds some of the request's open prefixes. An H200 runs 264 of them at once.
        """
        if self.num_judge_programs is not None:
            return self.num_judge_programs
        if is_small_batch:
            return 1
        return max(1, min(max_draft_tokens, 256 // num_requests))

    def is_small_batch(self, num_programs: int, greedy_logprobs: bool) -> bool:
        """Returns whether a batch is small: all its target rows run at about the same time.

        Then no row can be skipped: all are read at once. Each program draws from its tile of a
        residual, and the last to arrive compares the tiles' winners, which saves a launch. Without
        log-probabilities of greedy requests, a large batch decides by maxima alone, which pays
        from fewer programs on.
        """
        most = self.max_small_programs
        return num_programs <= (most if greedy_logprobs else most * 2 // 5)
