"""Sweeps the tilings of a draft head's products that a decoder's layer has not, on an NVIDIA GPU.

python -m benchmarks.gpu.head_tiles --out benchmarks/results/h200_head_tiles.json

Microseconds are of an iteration of a loop: the product and the small kernels that chain it to the
next. Two matrices take turns, which together are beyond the L2.
"""

import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.gpu.inputs import BYTES_PER_US
from benchmarks.gpu.loop import Lowered, compile_all
from benchmarks.record import environment, gpu_parser, parse_on_gpu, save
from specjax.models.decoder.pallas.matmul import split_k_matmul
from specjax.models.decoder.pallas.tilings import MatmulTiling, matmul_tiling

ITERATIONS, RUNS = 200, 5


class Product(NamedTuple):
    """[rows, size] @ [size, width] in bfloat16."""

    name: str
    rows: int
    size: int
    width: int


# An EAGLE-3 head of Llama 3.1 8B: drafts of one and eight requests, and what a step of K = 5 reads.
PRODUCTS = [Product("qkv", rows, 8192, 6144) for rows in (1, 48)] + [
    Product("fc", rows, 12288, 4096) for rows in (6, 48)
]


def tilings(product: Product) -> Iterator[tuple[str, MatmulTiling | None]]:
    """The tiling that is chosen, others that differ in one thing, and XLA's own product."""
    chosen = matmul_tiling(product.rows, product.size, product.width, 2)
    assert chosen is not None
    yield "chosen", chosen
    for split_k in (chosen.split_k // 2, 2 * chosen.split_k):
        yield f"split_k {split_k}", chosen._replace(split_k=split_k)
    for num_stages in (3, 4, 5, 6):
        if num_stages != chosen.num_stages:
            yield f"num_stages {num_stages}", chosen._replace(num_stages=num_stages)
    yield "block_n 64", chosen._replace(block_n=64)
    yield "block_n 64, half the splits", chosen._replace(block_n=64, split_k=chosen.split_k // 2)
    yield "block_k 128", chosen._replace(block_k=128, num_stages=3)
    yield "8 warps", chosen._replace(num_warps=8)
    yield "XLA", None


def lower(product: Product, tiling: MatmulTiling | None, interpret: bool) -> Lowered:
    """A loop of products with two matrices, each of which waits for the one before."""

    def multiply(x: jax.Array, matrix: jax.Array) -> jax.Array:
        if tiling is None:
            return (x @ matrix)[None]
        return split_k_matmul(x[None], matrix, tiling=tiling, pdl=False, interpret=interpret)[:, 0]

    def loop(x: jax.Array, matrices: list[jax.Array]) -> jax.Array:
        def body(_: jax.Array, x: jax.Array) -> jax.Array:
            for matrix in matrices:
                # Always true, which XLA cannot know.
                largest = jnp.max(multiply(x, matrix), axis=(0, 2))
                x = jnp.where(largest[:, None] < 1e30, x, 0)
            return x

        return jax.lax.fori_loop(0, ITERATIONS if not interpret else 1, body, x)

    x, matrix = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((product.rows, product.size), (product.size, product.width))
    )
    return Lowered(jax.jit(loop).lower(x, [matrix] * 2), 2, ITERATIONS)


def measure(product: Product, smoke: bool) -> Iterator[dict[str, Any]]:
    """A record of each tiling."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(product.rows, product.size)] + [(product.size, product.width)] * 2
    x, *matrices = (
        0.02 * jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    )
    given = dict(tilings(product))
    given = {name: given[name] for name in ("chosen", "XLA")} if smoke else given
    lowered = ((name, lower(product, tiling, smoke)) for name, tiling in given.items())
    for name, loop in compile_all(lowered).items():
        jax.block_until_ready(loop.run(x, matrices))
        taken = []
        for _ in range(RUNS):
            start = time.perf_counter()
            jax.block_until_ready(loop.run(x, matrices))
            taken.append(1e6 * (time.perf_counter() - start) / loop.total)
        tiling = given[name]
        yield product._asdict() | {
            "case": name,
            "tiling": None if tiling is None else tiling._asdict(),
            "median_us": statistics.median(taken),
            "runs_us": [round(each, 2) for each in taken],
            "read_us": 2 * product.size * product.width / BYTES_PER_US,
        }


def main() -> None:
    parser = gpu_parser(__doc__)
    args = parse_on_gpu(parser)
    section: dict[str, Any] = {"environment": environment(), "cases": []}
    products = [Product("qkv", 1, 256, 128)] if args.smoke else PRODUCTS
    for product in products:
        for record in measure(product, args.smoke):
            section["cases"].append(record)
            name = f"{product.name} {product.rows}x{product.size}x{product.width}"
            line = f"{name:20} {record['case']:28} {record['median_us']:8.1f} us"
            print(f"{line}  bytes {record['read_us']:.1f}", flush=True)
        save(args.out, {"head products": section})


if __name__ == "__main__":
    main()
