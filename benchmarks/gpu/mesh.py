"""Times decoding at real size over several GPUs, next to one, and the sums that travel.

python -m benchmarks.gpu.mesh --out benchmarks/results/h200_mesh.json
"""

import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import specjax
from benchmarks.gpu.decode import DRAFT, SMALL, TARGET, Effort, Timed, clock, forward, speculate
from benchmarks.gpu.inputs import BYTES_PER_US
from benchmarks.gpu.loop import Loop, kernel_times, trace
from benchmarks.record import environment, gpu_parser, parse_on_gpu, save
from specjax.devices.placement import Placement, parse_mesh
from specjax.models import TransformerConfig, build
from specjax.models.sharding import sharded_model, share_shapes

# The sizes of Llama 3.1 70B; 141 GB.
LARGE = dataclasses.replace(
    TARGET,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
)
# XLA names its own kernels of sums after the operation.
COLLECTIVES = ("nccl", "psum", "allreduce", "all_reduce", "all-reduce", "allgather", "all_gather")


class Sizes(NamedTuple):
    """A target, a draft, and a target that one GPU does not hold."""

    target: TransformerConfig = TARGET
    draft: TransformerConfig = DRAFT
    large: TransformerConfig = LARGE


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _draw(key: jax.Array, shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.Array:
    x = (0.02 * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
    return jax.lax.with_sharding_constraint(x, sharding)


def random_model(config: TransformerConfig, placement: Placement, seed: int) -> specjax.Model:
    """A model whose weights are drawn where they lie: no device holds a whole one."""
    leaves, tree = jax.tree.flatten(share_shapes(config, placement))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [_draw(key, x.shape, x.dtype, x.sharding) for key, x in zip(keys, leaves, strict=True)]
    return sharded_model(config, jax.tree.unflatten(tree, drawn), placement)


def sums(config: TransformerConfig, placement: Placement, batch: int, effort: Effort) -> Timed:
    """The sums of a step's rows alone, one after the other: their floor on this machine."""
    axis, number = placement.model, 2 * config.num_hidden_layers + 1

    def add(x: jax.Array) -> jax.Array:
        # Nothing stands between two sums, as in a loop; of zeros they stay what they are.
        for _ in range(number):
            x = jax.lax.psum(x, axis)
        return x

    whole = jax.P()
    mapped = placement.map(add, whole, whole, check_vma=False)

    def loop(caches: Any, x: jax.Array) -> Any:
        return jax.lax.fori_loop(0, effort.iterations, lambda _, x: mapped(x), x), caches

    # XLA's products have eight rows; the kernels' parts of one are half as many numbers.
    rows = jnp.zeros((batch, -(-8 // batch), config.hidden_size), jnp.float32)
    rows = jax.device_put(rows, placement.sharding(whole))
    return Timed(loop, (), (rows,), effort.iterations)


def pair_cases(
    target: specjax.Model, drafts: dict[str, specjax.Model], batches: list[int], effort: Effort
) -> Iterator[tuple[str, int, Timed]]:
    """A plain step and speculative ones, by what the draft is."""
    for batch in batches:
        yield "plain step", batch, speculate(target, None, batch, effort)
        for name, draft in drafts.items():
            drafter = specjax.model_drafter(draft)
            yield f"speculative step{name}", batch, speculate(target, drafter, batch, effort)


def cases(
    sizes: Sizes, devices: int, batches: list[int], names: list[str], effort: Effort
) -> Iterator[tuple[int, str, int, Timed]]:
    """Number of GPUs, name, batch size and what is timed; weights go before the next are made."""
    mesh = jax.make_mesh((devices,), ("model",), devices=jax.devices()[:devices])
    placement, whole = parse_mesh(mesh), parse_mesh(mesh, replicate=True)
    if "sums" in names:
        for batch in batches:
            yield devices, "sums", batch, sums(sizes.target, placement, batch, effort)
    if "one" in names:
        target, draft = (build(x, seed=n) for n, x in enumerate((sizes.target, sizes.draft)))
        for case in pair_cases(target, {"": draft}, batches, effort):
            yield 1, *case
        del target, draft, case
    if "pair" in names:
        target = random_model(sizes.target, placement, 0)
        drafts = {
            ", draft split": random_model(sizes.draft, placement, 1),
            ", draft whole": random_model(sizes.draft, whole, 1),
        }
        for case in pair_cases(target, drafts, batches, effort):
            yield devices, *case
        del target, drafts, case
    if "large" in names:
        target = random_model(sizes.large, placement, 0)
        yield devices, "large, 1 token", batches[0], forward(target, 1, batches[0], effort)
        yield devices, "large, plain step", batches[0], speculate(target, None, batches[0], effort)


def profile(timed: Timed, devices: int) -> dict[str, Any]:
    """Kernels of an iteration of one GPU on average, and the share of those that communicate."""
    loop = Loop(timed.run, 1, timed.iterations, False)
    _, events, launches = trace(loop, [()])
    busy = kernel_times(events, timed.iterations * devices, most=100)
    talking = [
        each["us"]
        for name, each in busy["kernels"].items()
        if any(word in name.lower() for word in COLLECTIVES)
    ]
    per = {name: count / timed.iterations for name, count in launches.items()}
    return busy | {"collectives_us": sum(talking), "launches": per}


def describe(record: dict[str, Any]) -> str:
    """One line of the printed table."""
    line = f"{record['case']:30} GPUs={record['devices']} B={record['B']:<3}"
    line += f"{record['median_ms']:9.3f} ms"
    if "profile" in record:
        found = record["profile"]
        line += f"  kernels {found['kernels_us'] / 1e3:.3f}"
        line += f"  collectives {found['collectives_us'] / 1e3:.3f}"
    return line


def main() -> None:
    parser = gpu_parser(__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="batch sizes")
    parser.add_argument("--devices", type=int, default=2, help="GPUs of the mesh")
    names = ["sums", "one", "pair", "large"]
    parser.add_argument("--cases", nargs="+", default=names, choices=names)
    args = parse_on_gpu(parser)
    sizes, effort = Sizes(), Effort()
    if args.smoke:
        sizes = Sizes(*(dataclasses.replace(config, **SMALL) for config in sizes))
        effort = Effort(context=16, room=64, iterations=3, runs=2)
    section: dict[str, Any] = {
        "environment": environment() | {"xla_flags": os.environ.get("XLA_FLAGS", "")},
        "bytes_per_us": BYTES_PER_US,
        "cases": [],
    }
    kept: list[Any] = []
    for devices, name, batch, timed in cases(sizes, args.devices, args.batch, args.cases, effort):
        # A process that decodes keeps its programs; `benchmarks.gpu.decode` says why it matters.
        kept.append(timed.compiled)
        record: dict[str, Any] = {"case": name, "devices": devices, "B": batch}
        record |= {"context": effort.context} | clock(timed, effort)[0]
        if jax.default_backend() == "gpu":
            record["profile"] = profile(timed, devices)
        section["cases"].append(record)
        save(args.out, {" ".join(args.cases): section})
        print(describe(record), flush=True)
        # It holds the weights, which go before the next are made.
        del timed


if __name__ == "__main__":
    main()
