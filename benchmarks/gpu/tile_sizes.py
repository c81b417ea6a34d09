"""Sweeps tile sizes, warps and the path of small batches, by which `KernelConfig` chooses.

Batches of sampled drafts and of draws, then of greedy requests alone.
"""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.gpu.calls import Bench, Effort
from benchmarks.gpu.cases import CASES
from benchmarks.gpu.inputs import Shape
from benchmarks.gpu.loop import Lowered, compile_all
from specjax.implementation import Implementation
from specjax.pallas.kernel_config import KernelConfig, Tile

K, V = 5, 131072
ROW_TILES = [(4096, 8), (8192, 4), (8192, 8), (16384, 8), (32768, 16)]
GUMBEL_TILES = [(4096, 8), (8192, 8), (16384, 8)]
PAIR_TILES = [(4096, 8), (8192, 8), (16384, 8)]
GREEDY_TILES = [(4096, 4), (4096, 8), (8192, 4), (8192, 8), (8192, 16), (16384, 16)]
# B, K and V of batches of greedy requests alone.
GREEDY_SIZES = ((16, 7, 201088), (48, 4, 152064), (128, 3, 128256))
DRAW_WARPS = [4]
AT_ONCE = 6
ANY_BATCH = 2**31 - 1


class Choice(NamedTuple):
    """Sizes that replace the defaults of `KernelConfig`; None leaves one as it is.

    Attributes:
      row: logits and warps of a tile of one row.
      pair: the same of a pair of rows.
      draw: warps that draw a token.
      small: whether the batch is taken as small.
    """

    row: tuple[int, int] | None = None
    pair: tuple[int, int] | None = None
    draw: int | None = None
    small: bool | None = None

    def __str__(self) -> str:
        named = [f"{name}={value}" for name, value in self._asdict().items() if value is not None]
        return " ".join(named) or "as chosen"


def choices() -> Iterator[tuple[str, Choice]]:
    """Cases and choices to measure at each batch size: one thing is varied at a time."""
    yield "drawn_0.7", Choice()
    yield "gumbel_fp32", Choice()
    for row in ROW_TILES:
        yield "drawn_0.7", Choice(row=row)
    for row in GUMBEL_TILES:
        yield "gumbel_fp32", Choice(row=row)
    for pair in PAIR_TILES:
        yield "drawn_0.7", Choice(pair=pair)
    for small in (True, False):
        yield "drawn_0.7", Choice(small=small)
    for draw in DRAW_WARPS:
        yield "drawn_0.7", Choice(draw=draw)


def greedy_choices() -> Iterator[tuple[str, Choice]]:
    """Cases and choices of a batch of greedy requests."""
    for name in ("greedy", "greedy_onehot"):
        yield name, Choice()
        yield name, Choice(small=True)
        for row in GREEDY_TILES:
            yield name, Choice(row=row, small=False)


def config_of(choice: Choice) -> KernelConfig:
    """The sizes of the kernels that a choice stands for."""
    fields: dict[str, Any] = {}
    if choice.row is not None:
        fields |= {"row": Tile(*choice.row), "target": Tile(*choice.row)}
    if choice.pair is not None:
        fields["residual"] = Tile(*choice.pair)
    if choice.small is not None:
        fields["max_small_programs"] = ANY_BATCH if choice.small else 0
    if choice.draw is not None:
        fields["num_draw_warps"] = choice.draw
    return KernelConfig(**fields)


def sweep(effort: Effort, seconds: float, small: bool) -> Iterator[dict[str, Any]]:
    """Measures choices, one shape after the other, each until its share of the time is up."""
    start = time.perf_counter()
    queues = {Shape(size, K, V, "bfloat16"): list(choices()) for size in (64, 256, 8)}
    queues |= {Shape(*x, "bfloat16", "zipf"): list(greedy_choices()) for x in GREEDY_SIZES}
    if small:
        # Plain JAX, which rehearses the rest, has no tiles.
        effort, tiny = effort._replace(kernels="interpret"), Shape(1, 1, 130, "bfloat16")
        queues = {tiny: [("drawn_0.7", Choice((256, 4), (128, 2), 4, False))]}
        queues[tiny].append(("gumbel_fp32", Choice(row=(128, 1))))
    for number, (shape, queue) in enumerate(queues.items()):
        bench = Bench(shape, list({name for name, _ in queue}), effort)
        # Compiled side by side, a few at a time, so that little is lost when the time is up.
        for first in range(0, len(queue), AT_ONCE):
            if time.perf_counter() - start > seconds * (number + 1) / len(queues):
                print(f"The time is up; left out at {shape}: {queue[first:]}")
                break
            loops = compile_all(_lower(bench, queue[first : first + AT_ONCE]))
            for (name, choice), loop in loops.items():
                yield bench.measure(name, loop) | {"tiles": str(choice)}


def _lower(bench: Bench, queue: list[tuple[str, Choice]]) -> Iterator[tuple[Any, Lowered]]:
    for name, choice in queue:
        kernels = Implementation(bench.effort.kernels, (config_of(choice),))
        yield (name, choice), bench.lower(CASES[name], kernels)
