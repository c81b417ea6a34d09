"""Times verification of a vocabulary that lies over two GPUs, next to one GPU with whole rows.

python -m benchmarks.gpu.split --out benchmarks/results/h200_split.json
"""

import argparse
import functools
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import specjax
from benchmarks.gpu.inputs import Shape, draw_keys, draw_rows, draw_sets, num_sets, with_tokens
from benchmarks.gpu.loop import Lowered, compile_all, lower_loop, time_loop
from benchmarks.gpu.messages import AXIS, EXCHANGES, exchange
from benchmarks.record import environment, save
from specjax import rules
from specjax.implementation import Implementation
from specjax.pallas.kernel_config import KernelConfig, Tile

WHOLE = PartitionSpec()
SHAPES = [Shape(b, 5, v, "bfloat16") for v in (262144, 131072) for b in (64, 8)]
SMALL = [Shape(2, 1, 512, "bfloat16")]


class Case(NamedTuple):
    """A call: `verify`, `block`, `couple`, `sample`, `messages` or `sums`; its temperature, drafts.

    A `rate` is that at which each drafted token is accepted, whatever it is.
    """

    call: str
    temperature: float = 0.7
    one_hot: bool = False
    rate: float | None = None


CASES = {
    "drawn_0.7": Case("verify"),
    "synthetic_0.9": Case("verify", rate=0.9),
    "onehot_0.7": Case("verify", one_hot=True),
    "greedy": Case("verify", temperature=0.0),
    "gumbel_fp32": Case("sample"),
    "block_0.7": Case("block"),
    "coupled_0.7": Case("couple", one_hot=True),
    "messages": Case("messages"),
    "messages_as_sums": Case("sums"),
}
# Plain JAX takes long to compile.
PLAIN = ("drawn_0.7", "gumbel_fp32")
NO_KERNELS = ("block_0.7",)


class Effort(NamedTuple):
    """Runs of a case, calls of a run, calls of an iteration, and what "the kernels" are here.

    `split_kernels` are those of split rows, if they have a tile of their own.
    """

    runs: int = 7
    calls: int = 480
    each: int = 6
    kernels: str = "triton"
    split_kernels: Implementation | None = None


REHEARSAL = Effort(runs=1, calls=1, each=1, kernels="interpret")


def run_call(
    case: Case, inputs: Any, keys: jax.Array, positions: jax.Array, temperature: Any, **more: Any
) -> tuple[Any, jax.Array]:
    """What a case calls, and the positions of the next call."""
    common = {"keys": keys, "positions": positions, "temperature": temperature, **more}
    if case.call == "sample":
        step = specjax.gumbel_sample(inputs, stream=specjax.Stream.TARGET, **common)
        return step, step.token_ids
    named = {"verify": rules.standard(), "block": rules.block(), "couple": rules.coupled()}
    rule: Any = named[case.call]
    if case.rate is not None:
        shape = inputs.draft.token_ids.shape
        rule = rules.synthetic(jnp.full(shape, case.rate, jnp.float32))
    step = specjax.rejection_sample(inputs.draft, inputs.target_logits, rule=rule, **common)
    return step, step.num_emitted


def specs_of(inputs: Any, vocab_size: int) -> Any:
    """The specifications of a call's inputs: arrays with an axis V lie over the devices."""

    def spec(x: jax.Array) -> PartitionSpec:
        if x.shape[-1:] != (vocab_size,):
            return WHOLE
        return PartitionSpec(*(None,) * (x.ndim - 1), AXIS)

    return jax.tree.map(spec, inputs)


def over_devices(function: Callable[..., Any], mesh: Mesh, vocab_size: int, check: bool) -> Any:
    """The function, of arrays whose vocabulary lies over the mesh."""

    def call(inputs: Any, *rest: Any) -> Any:
        specs = (specs_of(inputs, vocab_size), *(WHOLE for _ in rest))
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=specs, out_specs=WHOLE, check_vma=check
        )
        return mapped(inputs, *rest)

    return call


class Contender(NamedTuple):
    """A case on one device with whole rows, or split; its call, arguments and loop."""

    name: str
    how: str
    call: Callable[..., Any]
    arguments: list[tuple[Any, ...]]
    loop: Lowered


class Bench:
    """The contenders at one shape."""

    def __init__(self, shape: Shape, mesh: Mesh, effort: Effort, options: dict[str, Any]) -> None:
        self.shape, self.mesh, self.effort, self.options = shape, mesh, effort, options
        self._logits = draw_sets(shape, num_sets(shape, 3, 4))
        self._rows = [draw_rows(seed, shape) for seed in range(num_sets(shape, 1, 8))]

    def contenders(self, names: list[str]) -> Iterator[Contender]:
        """Every way to run each case, lowered."""
        kernels = self.effort.kernels
        whole = specjax.Options(implementation=kernels)
        for name in names:
            case = CASES[name]
            if case.call in EXCHANGES:
                call = functools.partial(exchange, EXCHANGES[case.call])
                yield self._lower(name, "split", call, is_split=True, calls=self.effort.each)
                continue
            one = functools.partial(run_call, case)
            yield self._lower(name, "whole", functools.partial(one, options=whole), False)
            ways = {"split": self.effort.split_kernels or kernels, "split, plain JAX": "xla"}
            if name in NO_KERNELS:
                del ways["split"]
            if name not in (*PLAIN, *NO_KERNELS):
                del ways["split, plain JAX"]
            for how, implementation in ways.items():
                split = specjax.Options(implementation=implementation, axis_name=AXIS)
                call = functools.partial(one, options=split)
                yield self._lower(name, how, call, is_split=True)

    def _lower(
        self, name: str, how: str, function: Any, is_split: bool, calls: int | None = None
    ) -> Contender:
        case, size, effort = CASES[name], self.shape.B, self.effort
        sets: list[Any] = self._rows
        if case.call != "sample":
            sets = with_tokens(self._logits, case.temperature, case.one_hot)
        plain = how.endswith("JAX")
        calls = calls or (1 if plain else effort.each)
        call = function
        if is_split:
            check = effort.kernels != "interpret"
            call = over_devices(function, self.mesh, self.shape.V, check)
            sets = [self._place(each) for each in sets]
        temperature = jnp.full((size,), case.temperature, jnp.float32)
        rest = (jnp.zeros((size,), jnp.int32), temperature)
        arguments = []
        for run in range(effort.runs):
            keys = draw_keys(run, calls, size)
            more = (keys, *rest)
            if is_split:
                more = jax.device_put(more, NamedSharding(self.mesh, WHOLE))
            arguments.append((sets, *more))
        iterations = max(1, effort.calls // (24 if plain else 1) // calls)
        program = lower_loop(call, arguments[0], iterations)
        loop = Lowered(program, calls, iterations, self.options if is_split else None)
        return Contender(name, how, call, arguments, loop)

    def _place(self, inputs: Any) -> Any:
        specs = specs_of(inputs, self.shape.V)
        return jax.device_put(inputs, jax.tree.map(lambda s: NamedSharding(self.mesh, s), specs))


def tokens_of(results: list[Any]) -> np.ndarray:
    """The tokens of all runs' last calls."""
    return np.stack([np.asarray(step.token_ids) for run in results for step in run])


def measure(
    shape: Shape, names: list[str], mesh: Mesh, effort: Effort, options: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """A record of each contender at a shape; what fails leaves its sentence there."""
    contenders = {(x.name, x.how): x for x in Bench(shape, mesh, effort, options).contenders(names)}
    loops = compile_all((key, each.loop) for key, each in contenders.items())
    whole: dict[str, Any] = {}
    for (name, how), each in contenders.items():
        num_devices = 1 if how == "whole" else mesh.size
        record = {"case": name, "how": how, **shape._asdict(), "devices": num_devices}
        try:
            figures, results = time_loop(loops[name, how], each.arguments)
        except RuntimeError as error:
            yield record | {"error": str(error)}
            continue
        figures["kernels_us"] /= num_devices
        for kernel in figures["kernels"].values():
            kernel["us"] /= num_devices
            kernel["launches"] /= num_devices
        if how == "whole":
            whole[name] = figures["median_us"], tokens_of(results)
        elif name in whole:
            median, tokens = whole[name]
            record["times_as_fast"] = median / figures["median_us"]
            # Loops of as many calls end with the same tokens, if all before were the same.
            if each.loop[1:3] == contenders[name, "whole"].loop[1:3]:
                record["equal_tokens"] = float((tokens == tokens_of(results)).mean())
        yield record | figures


def describe(record: dict[str, Any]) -> str:
    """One line of the printed table."""
    line = f"{record['case']} B={record['B']} K={record['K']} V={record['V']} {record['how']}"
    if "error" in record:
        return f"{line}: FAILED: {record['error'][:300]}"
    low, high = record["quartiles_us"]
    line += f": {record['median_us']:.2f} us ({low:.2f} to {high:.2f})"
    line += f", kernels {record['kernels_us']:.2f}, host {record['host_clock_us']:.2f}"
    if "times_as_fast" in record:
        line += f", {record['times_as_fast']:.2f} times as fast as whole rows on one device"
    if "equal_tokens" in record:
        line += f", {record['equal_tokens']:.4f} of tokens equal"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="the JSON")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="the first of the shapes")
    parser.add_argument(
        "--xla", nargs="+", default=[], metavar="NAME=VALUE", help="compiler options, split alone"
    )
    parser.add_argument(
        "--residual", nargs=2, type=int, metavar=("SIZE", "WARPS"), help="its tile, split alone"
    )
    parser.add_argument("--smoke", action="store_true", help="rehearse: tiny, interpreted, no file")
    args = parser.parse_args()
    if args.smoke and jax.config.jax_num_cpu_devices < 2:
        jax.config.update("jax_num_cpu_devices", 2)
    if not args.smoke and (jax.default_backend() != "gpu" or jax.device_count() < 2):
        sys.exit("JAX does not see two GPUs here; --smoke rehearses on a CPU.")
    mesh = jax.make_mesh((2,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    effort, shapes = (REHEARSAL, SMALL) if args.smoke else (Effort(), SHAPES[: args.shapes])
    if args.residual:
        sizes = KernelConfig(residual=Tile(*args.residual))
        effort = effort._replace(split_kernels=Implementation(effort.kernels, (sizes,)))
    options = dict(each.split("=", 1) for each in args.xla)
    start, flags = time.perf_counter(), os.environ.get("XLA_FLAGS", "")
    section: dict[str, Any] = {
        "environment": environment() | {"devices": mesh.size, "xla_flags": flags},
        "cases": [],
    }
    for shape in shapes:
        for record in measure(shape, args.cases, mesh, effort, options):
            section["cases"].append(record)
            section["seconds"] = round(time.perf_counter() - start, 1)
            print(describe(record), flush=True)
            save(None if args.smoke else args.out, section)
    if any("error" in record for record in section["cases"]):
        sys.exit("A case failed.")


if __name__ == "__main__":
    main()
