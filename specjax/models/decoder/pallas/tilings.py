"""Tile sizes, splits, warps and stages of a decode step's kernels, each with its reason.

`matmul_tiling`, `glu_tiling` and `attention_tiling` return the kernels' static arguments. They
depend on shapes, the shared memory of a program, and a `DecodeConfig`.
"""

import dataclasses
import math
from typing import Any, NamedTuple, Self

from specjax.pallas.kernel_config import Tile, next_power_of_2

# Slots of a cache that a program attends to in one iteration.
BLOCK_KV = 64

# Multiprocessors of a Hopper GPU.
NUM_MULTIPROCESSORS = 132

# Programs of a product of more than 64 rows are at least as many, if 8 parts suffice for that.
_MIN_TALL_PROGRAMS = 128

# Bytes of a multiprocessor's shared memory, 228 KiB on Hopper, for one program, and for all of its
# programs: CUDA takes 1 KiB of each, and four are allowed for.
_PROGRAM_BYTES = 227 * 1024
_MULTIPROCESSOR_BYTES = 224 * 1024

# The smallest side of a product that Triton multiplies.
MIN_MMA = 16

# The smallest side of a matrix's tile. A line of memory has 64 numbers of bfloat16, 32 of float32.
_MIN_BLOCK = 32

# Most tokens of a tile whose queries, keys and values are prepared.
TOKEN_TILE = 16

# Rows of a tile of queries for more than 16 tokens, and most queries of a key-value head. Two tiles
# of 64 rows are resident at once, so that one multiplies while the other exponentiates.
_LONG_ROWS, _MAX_LONG_ROWS = 64, 128

# Where a row's bits depend on no other row: the fewest rows of a tile of queries, and the blocks of
# a segment. 32 rows are the heads of 8 tokens of an 8B model's key-value head.
_INVARIANT_ROWS, _SEGMENT = 32, 3

# Segments whose states are loaded at a time there.
_INVARIANT_LOADS = 8

# Rows of a product's tile, where a row's bits depend on no other row.
INVARIANT_BLOCK_M = 128

# Most splits that a long request has, beyond an even share of the GPU, and most programs for them.
# Programs without slots to read end at once, but each takes a microsecond to begin.
_MAX_LONG_SPLITS, _MAX_LONG_PROGRAMS = 16, 4096

# Elements of a row that one program adds and squares, if there are few rows, so that one request's
# row of 4096 elements, in up to eight parts, still gives four programs.
ADD_NORM_TILE = Tile(1024, 8)

# Most rows in such tiles: with more, a program per row takes less time.
_MAX_TILED_ROWS = 64

# Elements of a row that a warp holds, where a program holds the whole row.
_WARP_NORM_SIZE, _MAX_WARPS = 128, 32

# Columns of a gate that one program activates.
GLU_TILE = Tile(1024, 4)


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Choices of a step's products and attention; None takes the result of the function so named.

    Attributes:
      prepares_in_attention: whether attention prepares queries, keys and values itself.
      num_kv_splits: programs that share the cache of a key-value head of up to so many times
        `blocks_per_split` blocks.
      blocks_per_split: blocks of slots from which on a program shares a long request's cache.
      num_register_splits: splits that the combining program loads at a time.
      combines_in_attention: whether the last program of a key-value head combines its splits.
      max_matmul_rows: rows up to which the kernels multiply; XLA multiplies more.
      adds_biases: whether the kernels add the biases of attention's projections, instead of XLA.
      row_invariant: whether a row's bits depend on no other row. Then sums have one order for any
        number of rows, the kernels multiply all of them, and the sizes above are not read.
      min_whole_programs: with `row_invariant`, programs of attention from which on each reads a
        whole text, segment after segment; fewer share its segments.
    """

    prepares_in_attention: bool | None = None
    num_kv_splits: int | None = None
    blocks_per_split: int = 32
    num_register_splits: int | None = None
    combines_in_attention: bool | None = None
    max_matmul_rows: int = 128
    adds_biases: bool = False
    row_invariant: bool = False
    min_whole_programs: int = 256

    def for_row_invariance(self) -> Self:
        """Returns the choices with which a row's bits depend on no other row."""
        return dataclasses.replace(self, row_invariant=True, adds_biases=True)


class MatmulTiling(NamedTuple):
    """Tile sizes, splits, warps and stages of a product of few rows with a matrix.

    Attributes:
      block_m: rows of a program's tile, with padding.
      block_n: columns of the matrix in a program's tile.
      block_k: rows of the matrix that are multiplied at once.
      split_k: programs per tile, each with its range of the matrix's rows.
      swap_ab: whether the matrix is the left operand (swap-AB). Hopper's tensor cores take 64 rows
        of the left operand at a time, and as few as 8 columns of the right one.
      num_warps: of a program.
      num_stages: iterations of the loop whose loads are in flight at once.
    """

    block_m: int
    block_n: int
    block_k: int
    split_k: int
    swap_ab: bool
    num_warps: int
    num_stages: int


class AttentionTiling(NamedTuple):
    """Tile sizes, splits, warps and stages of the attention of new tokens to a cache.

    Attributes:
      prepares_in_attention: whether each program of attention prepares the queries that it reads.
      num_rows: M, rows of a program's tile of queries, with padding.
      tokens_per_tile: tokens of a tile, each with the query heads of a key-value head.
      num_tiles: C, tiles of a request's key-value head.
      num_splits: P, most programs that share a tile's cache.
      even_splits: programs that share it at least: an even share of the GPU.
      blocks_per_split: blocks of slots from which on a program shares them with another one.
      num_warps: of a program.
      num_stages: iterations of the loop over slots whose loads are in flight at once.
      num_register_splits: splits that the combining program loads at a time.
      combines_in_attention: whether the last program combines, or one program reads all segments;
        not read if `prepares_in_attention`.
      segment: blocks of a segment. If not None, sums are those of the segments of a text, added in
        their order, whichever program has them.
      prepared_tokens: tokens of a tile of the launch that prepares queries, keys and values, with
        padding.
    """

    prepares_in_attention: bool
    num_rows: int
    tokens_per_tile: int
    num_tiles: int
    num_splits: int
    even_splits: int
    blocks_per_split: int
    num_warps: int
    num_stages: int
    num_register_splits: int
    combines_in_attention: bool
    prepared_tokens: int
    segment: int | None = None


def pad_to_mma(n: int) -> int:
    """Returns the smallest power of two that is at least n and a side of a product."""
    return max(MIN_MMA, next_power_of_2(n))


def two_warps_suffice(num_rows: int, head_dim: int) -> bool:
    """Returns whether a key-value head's tile of queries is small enough for two warps."""
    return pad_to_mma(num_rows) * pad_to_mma(head_dim) <= 1024


def prepares_in_attention(num_requests: int) -> bool:
    """Returns whether the programs of attention prepare queries, keys and values themselves.

    This saves the launch of `prepare_qkv_kernel`, but every split of the cache sums, scales and
    rotates the queries again. With four requests or more this takes longer than the split itself.
    """
    return num_requests < 4


def num_kv_splits(num_request_kv_heads: int, num_slots: int) -> int:
    """Returns the number of programs per key-value head's cache: at most 32, 2 per multiprocessor.

    Args:
      num_request_kv_heads: key-value heads of all requests, B * G.
      num_slots: S.
    """
    max_splits = max(1, min(32, 256 // num_request_kv_heads))
    return min(1 << (max_splits.bit_length() - 1), next_power_of_2(-(-num_slots // BLOCK_KV)))


def num_attention_warps(num_rows: int, head_dim: int) -> int:
    """Returns the warps of a program that attends to a split."""
    if num_rows >= 128:
        return 8
    return 2 if two_warps_suffice(num_rows, head_dim) else 4


def num_query_rows(
    num_tokens: int, num_padded_tokens: int, queries_per_kv: int, is_fused: bool
) -> int:
    """Returns M: the query heads of one key-value head, for every token.

    Padding tokens attend to nothing. Unless `is_fused`, they have rows too, for their zeros.
    """
    return pad_to_mma((num_tokens if is_fused else num_padded_tokens) * queries_per_kv)


def num_attention_stages(
    num_rows: int, head_dim: int, itemsize: int, shared_memory_bytes: int, max_stages: int = 3
) -> int:
    """Returns the number of blocks of slots in flight; 0 if not even one fits shared memory.

    Triton keeps in shared memory the keys and values of all those blocks but one, the queries and
    the softmax weights. From 64 rows on it uses `wgmma`, which reads its operands from shared
    memory. It then keeps the keys and values of every block, and the queries.
    """
    row_bytes = pad_to_mma(head_dim) * itemsize
    block_bytes, query_bytes = BLOCK_KV * row_bytes, num_rows * row_bytes
    for num_stages in range(max_stages, 0, -1):
        num_blocks = 2 * num_stages if num_rows >= 64 else max(1, 2 * (num_stages - 1))
        weight_bytes = 0 if num_rows >= 64 else num_rows * BLOCK_KV * itemsize
        if num_blocks * block_bytes + query_bytes + weight_bytes <= shared_memory_bytes:
            return num_stages
    return 0


def num_register_splits(num_rows: int, head_dim: int) -> int:
    """Returns the number of splits that a program's warps hold, at 128 numbers per thread."""
    size = 4096 * num_attention_warps(num_rows, head_dim)
    return max(1, size // (pad_to_mma(num_rows) * pad_to_mma(head_dim)))


def combines_in_attention(num_splits: int, num_rows: int, head_dim: int) -> bool:
    """Returns whether the last program of a key-value head combines its splits.

    This saves a launch. With more splits than it loads in two steps, that program would read for
    longer than a launch takes.
    """
    return num_splits <= 2 * num_register_splits(num_rows, head_dim)


def attention_tiling(
    positions: tuple[int, ...],
    cache: tuple[int, ...],
    *,
    num_padded_tokens: int,
    queries_per_kv: int,
    itemsize: int,
    shared_memory_bytes: int,
    config: DecodeConfig = DecodeConfig(),
) -> AttentionTiling | None:
    """Returns the tiling of attention to a cache; None if a program's shared memory is too small.

    At most 16 tokens with at most 64 queries of a key-value head are one tile. More are tiles of
    64 rows, or 128 where a head has more queries; none may have more than those. For them `config`
    sets at most the number of splits, and the last program combines.

    Args:
      positions: (B, T).
      cache: (B, G, S, D).
      num_padded_tokens: T', the tokens and padding.
      queries_per_kv: H / G.
      itemsize: bytes of a number of the cache.
      shared_memory_bytes: of a program.
      config: sizes other than the defaults.
    """
    (batch, num_tokens), (_, num_kv_heads, num_slots, head_dim) = positions, cache
    if config.row_invariant:
        more = num_padded_tokens, queries_per_kv, itemsize, shared_memory_bytes
        return _segment_tiling(positions, cache, *more, config.min_whole_programs)
    is_one_tile = num_tokens <= 16 and num_tokens * queries_per_kv <= 64
    if is_one_tile:
        is_fused = _default(config.prepares_in_attention, prepares_in_attention(batch))
        num_rows = num_query_rows(num_tokens, num_padded_tokens, queries_per_kv, is_fused)
        tokens_per_tile = num_padded_tokens
    else:
        is_fused, num_rows = False, max(_LONG_ROWS, next_power_of_2(queries_per_kv))
        if num_rows > _MAX_LONG_ROWS:
            return None
        tokens_per_tile = num_rows // queries_per_kv
    num_tiles = -(-num_padded_tokens // tokens_per_tile)
    wanted = num_kv_splits(batch * num_kv_heads * num_tiles, num_slots)
    even_splits = num_splits = _default(config.num_kv_splits, wanted)
    # A program that reads a whole cache has the blocks to fill a fourth stage. With 64 rows two
    # programs are faster than a stage: three stages leave a multiprocessor room for both.
    max_stages = 4 if num_rows < _LONG_ROWS and even_splits == 1 else 3
    num_stages = num_attention_stages(num_rows, head_dim, itemsize, shared_memory_bytes, max_stages)
    if num_stages == 0:
        return None
    at_once = _default(config.num_register_splits, num_register_splits(num_rows, head_dim))
    combines = combines_in_attention(num_splits, num_rows, head_dim)
    combines = _default(config.combines_in_attention, combines) or not is_one_tile
    if not is_one_tile:
        even_splits = num_splits = min(num_splits, 2 * at_once)
    elif combines:
        long_splits = -(-num_slots // (BLOCK_KV * config.blocks_per_split))
        most = min(_MAX_LONG_SPLITS, _MAX_LONG_PROGRAMS // (batch * num_kv_heads))
        num_splits = max(num_splits, min(most, long_splits))
    # A fused program loads its first block before it knows the tokens. If it has only that block,
    # further stages would take shared memory for nothing.
    has_loop = not is_fused or even_splits * BLOCK_KV < num_slots
    return AttentionTiling(
        prepares_in_attention=is_fused,
        num_rows=num_rows,
        tokens_per_tile=tokens_per_tile,
        num_tiles=num_tiles,
        num_splits=even_splits if is_fused else num_splits,
        even_splits=even_splits,
        blocks_per_split=config.blocks_per_split,
        num_warps=num_attention_warps(num_rows, head_dim),
        num_stages=num_stages if has_loop else 1,
        num_register_splits=at_once,
        combines_in_attention=combines,
        prepared_tokens=min(TOKEN_TILE, next_power_of_2(num_tokens)),
    )


def _segment_tiling(
    positions: tuple[int, ...],
    cache: tuple[int, ...],
    num_padded_tokens: int,
    queries_per_kv: int,
    itemsize: int,
    shared_memory_bytes: int,
    min_whole_programs: int,
) -> AttentionTiling | None:
    """Returns the tiling for `row_invariant`; None of more than 128 queries of a key-value head.

    None, too, if a program's shared memory is too small. `min_whole_programs` is as in
    `DecodeConfig`, the other arguments as in `attention_tiling`.
    """
    batch, num_kv_heads, num_slots, head_dim = positions[0], *cache[1:]
    num_rows = max(_INVARIANT_ROWS, pad_to_mma(queries_per_kv))
    tokens_per_tile = num_rows // queries_per_kv
    num_tiles = -(-num_padded_tokens // tokens_per_tile)
    is_whole = batch * num_kv_heads * num_tiles >= min_whole_programs
    num_splits = 1 if is_whole else -(-num_slots // (BLOCK_KV * _SEGMENT))
    # With few tiles all blocks of a segment are in flight, if shared memory has room.
    most = 3 if is_whole else 4
    num_stages = num_attention_stages(num_rows, head_dim, itemsize, shared_memory_bytes, most)
    if num_rows > _MAX_LONG_ROWS or num_stages == 0:
        return None
    return AttentionTiling(
        prepares_in_attention=False,
        num_rows=num_rows,
        tokens_per_tile=tokens_per_tile,
        num_tiles=num_tiles,
        num_splits=num_splits,
        even_splits=num_splits,
        blocks_per_split=_SEGMENT,
        num_warps=num_attention_warps(num_rows, head_dim),
        num_stages=num_stages,
        num_register_splits=_INVARIANT_LOADS,
        combines_in_attention=num_splits == 1,
        prepared_tokens=TOKEN_TILE,
        segment=_SEGMENT,
    )


def norm_tile(num_rows: int, size: int, is_normed: bool, config: DecodeConfig) -> Tile:
    """Returns the tile of rows [E] that one program adds and squares.

    More rows than 64 fill the GPU with one program each. Fewer take tiles of a row. On an H100,
    256 rows in a step of 8B shapes took 10.61 ms so, and 10.66 ms in tiles.

    Args:
      num_rows: R.
      size: E.
      is_normed: whether the product that is added has a norm of its own, of the whole row.
      config: with `row_invariant` any number of rows has the same tiles.
    """
    if not is_normed and (num_rows <= _MAX_TILED_ROWS or config.row_invariant):
        return ADD_NORM_TILE
    whole = next_power_of_2(size)
    return Tile(whole, max(1, min(_MAX_WARPS, whole // _WARP_NORM_SIZE)))


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value


def matmul_tiling(
    num_rows: int,
    size: int,
    width: int,
    itemsize: int,
    shared_memory_bytes: int = _PROGRAM_BYTES,
    *,
    is_table: bool = False,
) -> MatmulTiling | None:
    """Returns the tiling of [rows, size] @ [size, width]; None if none divides the matrix.

    There is about one program per multiprocessor, however few rows of the matrix each then has. The
    fewer programs there are, the more stages each has in flight.

    Args:
      num_rows: R.
      size: E, the axis that is summed.
      width: N.
      itemsize: bytes of a number.
      shared_memory_bytes: of a program.
      is_table: whether the matrix is stored as [width, size]. Tiles then are two lines of memory
        deep, of which three are in flight. On an H100 one row takes 353 us instead of 375 with a
        table of 128256 x 4096.
    """
    # More than 64 rows are narrow tiles in few parts: parts of many rows take time to add.
    is_tall = num_rows > 64
    block_n = math.gcd(64 if is_tall else 128, width)
    block_k = math.gcd((256 if is_table else 128) // itemsize, size)
    if min(block_n, block_k) < _MIN_BLOCK:
        return None
    num_tiles = width // block_n
    wanted = -(-_MIN_TALL_PROGRAMS // num_tiles) if is_tall else NUM_MULTIPROCESSORS // num_tiles
    split_k = max(1, min(wanted, 8, size // block_k))
    most_of_six_stages = NUM_MULTIPROCESSORS if is_tall else 111
    max_stages = 6 if split_k * num_tiles <= most_of_six_stages else 4
    swap_ab = is_tall or num_rows <= MIN_MMA
    block_m = pad_to_mma(num_rows)
    stage_bytes = (block_m + block_n) * block_k * itemsize
    num_stages = min(3 if is_table else max_stages, shared_memory_bytes // stage_bytes)
    return MatmulTiling(block_m, block_n, block_k, split_k, swap_ab, 4, num_stages)


def glu_tiling(
    num_rows: int, size: int, width: int, itemsize: int, shared_memory_bytes: int = _PROGRAM_BYTES
) -> MatmulTiling | None:
    """Returns the tiling of the fused gate and up product; None if none divides the matrix.

    No split-K: the activation needs whole sums. All programs should be resident at once; a second,
    partial wave would leave most multiprocessors idle.

    Args:
      num_rows: R.
      size: E, the axis that is summed.
      width: I, columns of the gate alone.
      itemsize: bytes of a number.
      shared_memory_bytes: of a program.
    """
    block_k = math.gcd(128 // itemsize, size)
    # Tiles of 128 columns, where that gives nearly every multiprocessor one program, which fits.
    is_wide = width % 128 == 0 and 96 <= width // 128 <= NUM_MULTIPROCESSORS
    is_wide = is_wide and shared_memory_bytes > 200 * 1024 and num_rows <= 64
    block_n = 128 if is_wide else math.gcd(64, width)
    if min(block_n, block_k) < _MIN_BLOCK:
        return None
    programs_per_multiprocessor = -(-width // block_n // NUM_MULTIPROCESSORS)
    program_bytes = min(_MULTIPROCESSOR_BYTES // programs_per_multiprocessor, shared_memory_bytes)
    block_m = pad_to_mma(num_rows)
    stage_bytes = (block_m + 2 * block_n) * block_k * itemsize
    num_stages = max(3, min(4 if is_wide else 6, program_bytes // stage_bytes))
    num_warps, swap_ab = 8 if is_wide else 4, num_rows <= 64
    return MatmulTiling(block_m, block_n, block_k, 1, swap_ab, num_warps, num_stages)
