"""Tile sizes, splits and warps of a decode step's kernels, each with its reason.

`matmul_tiling`, `glu_tiling` and `attention_tiling` return values that the kernels are given. They
depend on shapes, the shared memory of a program, and a `DecodeConfig`.
"""

import dataclasses
import math
from typing import Any, NamedTuple

from specjax.pallas.kernel_config import Tile, power_of_two

__all__ = [
    "ADD_NORM_TILE",
    "AttentionTiling",
    "BLOCK_KV",
    "DecodeConfig",
    "MIN_MMA",
    "MatmulTiling",
    "attention_stages",
    "attention_tiling",
    "combines_in_kernel",
    "fuses_qkv",
    "glu_tiling",
    "matmul_tiling",
    "num_attention_warps",
    "num_kv_splits",
    "num_query_rows",
    "pad_to_mma",
    "splits_in_registers",
    "two_warps_suffice",
]

# Slots of a cache that a program attends to in one iteration.
BLOCK_KV = 64

# Multiprocessors of a Hopper GPU, and the shared memory of each in bytes.
_MULTIPROCESSORS = 132

_SHARED_MEMORY_BYTES = 224 * 1024

# The smallest side of a product that Triton multiplies.
MIN_MMA = 16

# Elements of a row that one program adds and squares. Small: one request's row of 4096 elements,
# which comes as up to eight parts, then still gives 16 programs.
ADD_NORM_TILE = Tile(256, 2)


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Choices of a decode step's attention; None is what the function of that name returns.

    Attributes:
      fuses_qkv: whether attention prepares queries, keys and values itself.
      num_kv_splits: programs that share the cache of a key-value head.
      splits_in_registers: splits that the combining program loads at a time.
      combines_in_kernel: whether the last program of a key-value head combines its splits.
    """

    fuses_qkv: bool | None = None
    num_kv_splits: int | None = None
    splits_in_registers: int | None = None
    combines_in_kernel: bool | None = None


class MatmulTiling(NamedTuple):
    """How a product of few rows with a matrix is shared among programs.

    Attributes:
      block_n: columns of a tile, a program's.
      block_k: rows of the matrix that are multiplied at once.
      split_k: programs to a tile, each with its range of the matrix's rows.
      swap_ab: whether the matrix is the left operand (swap-AB). Hopper's matrix units take 64 rows
        of the left operand at a time, and as few as 8 columns of the right one.
      num_warps: of a program.
      num_stages: iterations of the loop that are loaded at a time.
    """

    block_n: int
    block_k: int
    split_k: int
    swap_ab: bool
    num_warps: int
    num_stages: int


class AttentionTiling(NamedTuple):
    """How the attention of few tokens to a cache is shared among programs.

    Attributes:
      fuses_qkv: whether each program prepares the queries that it reads, as `fuses_qkv` says.
      num_rows: M, rows of a program's tile of queries, with padding.
      num_splits: P, programs that share the cache of a request's key-value head.
      num_warps: of a program.
      num_stages: iterations of the loop over slots that are loaded at a time.
      splits_in_registers: splits that the combining program loads at a time.
      combines_in_kernel: whether the last program of a key-value head combines its splits.
    """

    fuses_qkv: bool
    num_rows: int
    num_splits: int
    num_warps: int
    num_stages: int
    splits_in_registers: int
    combines_in_kernel: bool


def pad_to_mma(n: int) -> int:
    """Returns the smallest power of two that is at least n and a side of a product."""
    return max(MIN_MMA, power_of_two(n))


def two_warps_suffice(num_rows: int, head_dim: int) -> bool:
    """Returns whether a key-value head's tile of queries is small enough for two warps."""
    return pad_to_mma(num_rows) * pad_to_mma(head_dim) <= 1024


def fuses_qkv(num_requests: int) -> bool:
    """Returns whether the programs of attention prepare queries, keys and values themselves.

    That saves the launch of `qkv_kernel`, and every split of the cache sums, scales and rotates the
    queries again. With four requests or more that takes longer than the split itself.
    """
    return num_requests < 4


def num_kv_splits(num_heads: int, num_slots: int) -> int:
    """Returns how many programs share the cache of one key-value head: two to a multiprocessor.

    Args:
      num_heads: key-value heads of all requests, B * G.
      num_slots: S.
    """
    max_splits = max(1, min(32, 256 // num_heads))
    return min(1 << (max_splits.bit_length() - 1), power_of_two(-(-num_slots // BLOCK_KV)))


def num_attention_warps(is_small: bool) -> int:
    """Returns the warps of a program that attends to a split; see `two_warps_suffice`."""
    return 2 if is_small else 4


def num_query_rows(tokens: int, padded: int, queries_per_kv: int, is_fused: bool) -> int:
    """Returns M: the query heads of one key-value head, for every token.

    Rows of padding attend to nothing. Unless preparation is fused, they are among the rows, because
    the program that combines writes zeros there.
    """
    return pad_to_mma((tokens if is_fused else padded) * queries_per_kv)


def attention_stages(num_rows: int, head_dim: int, itemsize: int, shared_memory_bytes: int) -> int:
    """Returns how many iterations over slots are loaded at a time; 0 if not even one fits.

    Triton keeps in shared memory the keys and values of all iterations but one, the queries and the
    weights. From 64 rows on it uses Hopper's instructions, which read shared memory: it then keeps
    the keys and values of every iteration, and the queries.
    """
    width = pad_to_mma(head_dim) * itemsize
    tile, queries = BLOCK_KV * width, num_rows * width
    for stages in (3, 2, 1):
        tiles = 2 * stages if num_rows >= 64 else max(1, 2 * (stages - 1))
        weights = 0 if num_rows >= 64 else num_rows * BLOCK_KV * itemsize
        if tiles * tile + queries + weights <= shared_memory_bytes:
            return stages
    return 0


def splits_in_registers(num_rows: int, head_dim: int) -> int:
    """Returns how many splits a program's warps hold together, at 128 numbers to a thread."""
    held = 4096 * num_attention_warps(two_warps_suffice(num_rows, head_dim))
    return max(1, held // (pad_to_mma(num_rows) * pad_to_mma(head_dim)))


def combines_in_kernel(num_splits: int, num_rows: int, head_dim: int) -> bool:
    """Returns whether the last program of a key-value head combines its splits.

    That saves a launch. With more splits than it loads in two goes, one program by itself would
    read for longer than a launch takes.
    """
    return num_splits <= 2 * splits_in_registers(num_rows, head_dim)


def attention_tiling(
    positions: tuple[int, ...],
    cache: tuple[int, ...],
    *,
    padded: int,
    queries_per_kv: int,
    itemsize: int,
    shared_memory_bytes: int,
    config: DecodeConfig = DecodeConfig(),
) -> AttentionTiling | None:
    """Returns how attention to a cache is shared among programs; None if XLA should attend.

    XLA attends for more than 16 tokens, or more than 64 queries of a key-value head. For a prompt,
    a product over all pairs of tokens is faster. XLA also attends where a program's shared memory
    is too small.

    Args:
      positions: (B, T).
      cache: (B, G, S, D).
      padded: T', the tokens and padding.
      queries_per_kv: H / G.
      itemsize: bytes of a number of the cache.
      shared_memory_bytes: of a program.
      config: sizes that are not the default ones.
    """
    (batch, tokens), (_, groups, slots, head_dim) = positions, cache
    is_fused = _default(config.fuses_qkv, fuses_qkv(batch))
    num_splits = _default(config.num_kv_splits, num_kv_splits(batch * groups, slots))
    if tokens > 16 or tokens * queries_per_kv > 64:
        return None
    rows = num_query_rows(tokens, padded, queries_per_kv, is_fused)
    stages = attention_stages(rows, head_dim, itemsize, shared_memory_bytes)
    if stages == 0:
        return None
    # A fused program loads its first block before it knows the tokens. If that is its only one,
    # further stages would take shared memory for nothing.
    has_loop = not is_fused or num_splits * BLOCK_KV < slots
    return AttentionTiling(
        is_fused,
        rows,
        num_splits,
        num_attention_warps(two_warps_suffice(rows, head_dim)),
        stages if has_loop else 1,
        _default(config.splits_in_registers, splits_in_registers(rows, head_dim)),
        _default(config.combines_in_kernel, combines_in_kernel(num_splits, rows, head_dim)),
    )


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value


def matmul_tiling(
    num_rows: int, size: int, width: int, itemsize: int, shared_memory_bytes: int = 227 * 1024
) -> MatmulTiling | None:
    """Returns the tiling of [rows, size] @ [size, width]; None if none divides the matrix.

    About one program to a multiprocessor, however few rows of the matrix that leaves to each. The
    fewer programs there are, the more stages each has in flight.

    Args:
      num_rows: R.
      size: E, the axis that is summed.
      width: N.
      itemsize: bytes of a number.
      shared_memory_bytes: of a program.
    """
    columns, depth = math.gcd(128, width), 128 // itemsize
    if columns < 32 or size % depth:
        return None
    tiles = width // columns
    split_k = max(1, min(_MULTIPROCESSORS // tiles, 8, size // depth))
    swap_ab, are_few = num_rows <= MIN_MMA, split_k * tiles < 112
    stage = (pad_to_mma(num_rows) + columns) * depth * itemsize
    num_stages = min(6 if are_few else 4, shared_memory_bytes // stage)
    return MatmulTiling(columns, depth, split_k, swap_ab, num_warps=4, num_stages=num_stages)


def glu_tiling(
    num_rows: int, size: int, width: int, itemsize: int, shared_memory_bytes: int = 227 * 1024
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
    depth = 128 // itemsize
    wide = width % 128 == 0 and 96 <= width // 128 <= _MULTIPROCESSORS
    wide = wide and shared_memory_bytes > 200 * 1024
    columns = 128 if wide else math.gcd(64, width)
    if columns < 32 or size % depth:
        return None
    num_waves = -(-width // columns // _MULTIPROCESSORS)
    stage = (pad_to_mma(num_rows) + 2 * columns) * depth * itemsize
    fitting = min(_SHARED_MEMORY_BYTES // (num_waves * stage), shared_memory_bytes // stage)
    num_stages = max(3, min(4 if wide else 6, fitting))
    warps = 8 if wide else 4
    return MatmulTiling(columns, depth, 1, swap_ab=True, num_warps=warps, num_stages=num_stages)
