"""How products and attention of a decode step are cut among programs, each size with its reason."""

import math
from typing import NamedTuple

from specjax.pallas.tiles import Tile, power_of_two

__all__ = [
    "ATTENTION_SLOTS",
    "Cut",
    "JOIN_TILE",
    "MIN_DOT",
    "at_least_dot",
    "attention_stages",
    "gate_cut",
    "is_alone",
    "is_light",
    "is_quickly_joined",
    "num_attention_warps",
    "num_parts_at_once",
    "num_parts_of_cache",
    "product_cut",
    "query_rows",
]

# Slots of a cache that a program looks at together.
ATTENTION_SLOTS = 64

# Of a Hopper GPU; the memory, in bytes, is each multiprocessor's.
_MULTIPROCESSORS = 132

_SHARED_MEMORY = 224 * 1024

# The smallest side of a product that the matrix units take.
MIN_DOT = 16


class Cut(NamedTuple):
    """How a product of few rows with a matrix is shared out.

    Attributes:
      columns: of a tile, a program's.
      depth: rows of the matrix that are multiplied at once.
      parts: programs to a tile, each with its share of the matrix's rows.
      turned: whether a tile stands on the left, where Hopper's matrix units take 64 columns at a
        time and as few as 8 rows.
      num_warps: of a program.
      num_stages: how many turns of the loop are loaded at a time.
    """

    columns: int
    depth: int
    parts: int
    turned: bool
    num_warps: int
    num_stages: int


# Of a sum of up to eight parts: thirty programs for one request's rows are few, so small ones.
JOIN_TILE = Tile(256, 2)


def at_least_dot(n: int) -> int:
    """The smallest power of two that is at least n, and a side of a product."""
    return max(MIN_DOT, power_of_two(n))


def is_light(num_rows: int, head_dim: int) -> bool:
    """Whether the queries of a key-value head, rows of a tile, are few for four warps."""
    return at_least_dot(num_rows) * at_least_dot(head_dim) <= 1024


def is_alone(num_requests: int) -> bool:
    """Whether so few requests are decoded that no launch of its own for their heads pays.

    Whoever looks at a part of the cache then sums, scales and turns the queries for itself: with
    many requests that takes longer than the part.
    """
    return num_requests < 4


def num_parts_of_cache(num_heads: int, num_slots: int) -> int:
    """Programs that share the cache of a request's key-value head: two to a multiprocessor."""
    most = max(1, min(32, 256 // num_heads))
    return min(1 << (most.bit_length() - 1), power_of_two(-(-num_slots // ATTENTION_SLOTS)))


def num_attention_warps(light: bool) -> int:
    """Warps that look at a part of a cache."""
    return 2 if light else 4


def query_rows(tokens: int, padded: int, shared: int, alone: bool) -> int:
    """Rows of a tile of queries, those of the `shared` query heads of a key-value head.

    Rows of padding see nothing: whoever puts parts together in `look` leaves zeros there.
    """
    return at_least_dot((tokens if alone else padded) * shared)


def attention_stages(num_rows: int, head_dim: int, itemsize: int, room: int) -> int:
    """Turns of a loop over slots that are loaded at a time; 0 if one alone has no room.

    A program may have `room` bytes of shared memory. Triton keeps there the keys and values of all
    turns but one, queries and weights; of 64 rows or more, which Hopper multiplies from there, keys
    and values of every turn and queries.
    """
    width = at_least_dot(head_dim) * itemsize
    tile, rest = ATTENTION_SLOTS * width, num_rows * width
    for stages in (3, 2, 1):
        tiles = 2 * stages if num_rows >= 64 else max(1, 2 * (stages - 1))
        weights = 0 if num_rows >= 64 else num_rows * ATTENTION_SLOTS * itemsize
        if tiles * tile + rest + weights <= room:
            return stages
    return 0


def num_parts_at_once(num_rows: int, head_dim: int) -> int:
    """Parts of a cache whose values its warps hold together, 128 numbers to a thread."""
    held = 4096 * num_attention_warps(is_light(num_rows, head_dim))
    return max(1, held // (at_least_dot(num_rows) * at_least_dot(head_dim)))


def is_quickly_joined(num_parts: int, num_rows: int, head_dim: int) -> bool:
    """Whether a key-value head's parts are put together by the last program that left one.

    That saves a launch. Of more than it holds twice over, one program by itself would read for
    longer than a launch takes.
    """
    return num_parts <= 2 * num_parts_at_once(num_rows, head_dim)


def product_cut(
    num_rows: int, size: int, width: int, itemsize: int, room: int = 227 * 1024
) -> Cut | None:
    """Of a product with a matrix [size, width] of numbers of so many bytes; None if it has none.

    A program may have `room` bytes of shared memory. About one program to a multiprocessor, however
    many rows of the matrix that leaves to each; the fewer there are, the more each has in flight.
    """
    columns, depth = math.gcd(128, width), 128 // itemsize
    if columns < 32 or size % depth:
        return None
    tiles = width // columns
    parts = max(1, min(_MULTIPROCESSORS // tiles, 8, size // depth))
    turned, few = num_rows <= MIN_DOT, parts * tiles < 112
    stage = (at_least_dot(num_rows) + columns) * depth * itemsize
    num_stages = min(6 if few else 4, room // stage)
    return Cut(columns, depth, parts, turned, num_warps=4, num_stages=num_stages)


def gate_cut(
    num_rows: int, size: int, width: int, itemsize: int, room: int = 227 * 1024
) -> Cut | None:
    """The same with two matrices at once, and no parts: a gate needs whole sums.

    All programs are to be on the GPU together: in a second turn of few most of it would idle.
    """
    depth = 128 // itemsize
    wide = width % 128 == 0 and 96 <= width // 128 <= _MULTIPROCESSORS and room > 200 * 1024
    columns = 128 if wide else math.gcd(64, width)
    if columns < 32 or size % depth:
        return None
    crowd = -(-width // columns // _MULTIPROCESSORS)
    stage = (at_least_dot(num_rows) + 2 * columns) * depth * itemsize
    num_stages = max(3, min(4 if wide else 6, _SHARED_MEMORY // (crowd * stage), room // stage))
    return Cut(columns, depth, 1, turned=True, num_warps=8 if wide else 4, num_stages=num_stages)
