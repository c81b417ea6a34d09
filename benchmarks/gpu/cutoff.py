"""Times `logit_cutoff` on an NVIDIA GPU, next to one read of the logits and what JAX offers.

python -m benchmarks.gpu.cutoff --out benchmarks/results/h200_cutoff.json
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import specjax
from benchmarks.gpu.inputs import BYTES_PER_US, Shape, draw_ranked_rows, draw_rows, num_sets
from benchmarks.gpu.loop import Lowered, compile_all, lower_loop, time_loop
from benchmarks.record import environment, gpu_parser, parse_on_gpu, save


class Case(NamedTuple):
    """What is asked of every row; rows are 3 N(0, 1), or else ranked like a language model's."""

    temperature: float
    filters: dict[str, float]
    ranked: bool = False


CASES = {
    "top-k 50": Case(1.0, {"top_k": 50}),
    "top-p 0.9": Case(0.7, {"top_p": 0.9}),
    "top-k 50, top-p 0.9": Case(1.0, {"top_k": 50, "top_p": 0.9}),
    "min-p 0.05": Case(1.0, {"min_p": 0.05}),
    "all three": Case(1.0, {"top_k": 50, "top_p": 0.9, "min_p": 0.05}),
    "top-p 0.9, spread": Case(1.0, {"top_p": 0.9}),
    "top-k 2000": Case(1.0, {"top_k": 2000}),
    "top-p 0.9, flat": Case(30.0, {"top_p": 0.9}),
}
# The same of rows like a language model's.
RANKED = ["top-k 50", "top-p 0.9", "top-k 50, top-p 0.9", "top-p 0.9, spread", "top-k 2000"]
CASES |= {f"ranked: {name}": CASES[name]._replace(ranked=True) for name in RANKED}
SHAPES = [Shape(64, 1, 131072, "bfloat16"), Shape(8, 1, 131072, "bfloat16")]
MORE = [Shape(384, 1, 131072, "bfloat16"), Shape(64, 1, 131072, "float32")]
FEW = ["top-k 50", "top-p 0.9", "top-k 50, top-p 0.9"]
CALLS, PER_ITERATION, RUNS = 288, 12, 5


def asked(case: Case, size: int) -> dict[str, jax.Array]:
    """Parameters [B]: data, as in a batch of many users."""
    kinds = {"top_k": jnp.int32}
    return {
        name: jnp.full((size,), value, kinds.get(name, jnp.float32))
        for name, value in case.filters.items()
    } | {"temperature": jnp.full((size,), case.temperature, jnp.float32)}


def chained(cutoff: jax.Array) -> jax.Array:
    """Positions of the next call: 0, which XLA does not know."""
    return (cutoff > jnp.float32(1e38)).astype(jnp.int32)


def kernels() -> str:
    """What "the kernels" are here: a CPU rehearses with plain JAX, which compiles fastest."""
    return "triton" if jax.default_backend() == "gpu" else "xla"


def ours(rows: Any, _: Any, positions: Any, options: Any) -> Any:
    """`logit_cutoff` as `lower_loop` wants it."""
    # Behind the call before, and no arithmetic for it, which would be a launch.
    temperature, _ = jax.lax.optimization_barrier((options["temperature"], positions))
    asked = options | {"temperature": temperature}
    cutoff = specjax.logit_cutoff(rows, **asked, implementation=kernels())
    return cutoff, jax.lax.bitcast_convert_type(cutoff, jnp.int32)


def one_read(rows: Any, _: Any, positions: Any, options: Any) -> Any:
    """The largest logit of every row, by XLA: the least that reading them costs."""
    # Each read depends on the one before: else it leaves the loop.
    x = rows.astype(jnp.float32) + positions.astype(jnp.float32)[:, None]
    largest = jnp.max(x, axis=1)
    return largest, chained(largest)


def sampled(rows: Any, keys: Any, positions: Any, options: Any) -> Any:
    """`gumbel_sample` of the same rows: one read, and a token."""
    drawn = specjax.gumbel_sample(
        rows,
        keys=keys,
        positions=positions,
        stream=options["stream"],
        temperature=options["temperature"],
        options=specjax.Options(implementation=kernels()),
    )
    return drawn, jnp.minimum(drawn.token_ids, 0)


def sort(rows: Any, _: Any, positions: Any, options: Any) -> Any:
    """What one writes: sort, softmax, cumsum; the smallest logit of top-p."""
    x = rows.astype(jnp.float32) + positions.astype(jnp.float32)[:, None]
    ranked = -jnp.sort(-x, axis=-1)
    p = jax.nn.softmax(ranked / options["temperature"][:, None], axis=-1)
    before = jnp.cumsum(p, axis=-1) - p
    kept = before < options["top_p"][:, None]
    cutoff = jnp.min(jnp.where(kept, ranked, jnp.inf), axis=-1)
    return cutoff, chained(cutoff)


def best_k(rows: Any, _: Any, positions: Any, options: Any) -> Any:
    """`jax.lax.top_k` with a static k of 50."""
    x = rows + positions.astype(rows.dtype)[:, None]
    cutoff = jax.lax.top_k(x, 50)[0][:, -1].astype(jnp.float32)
    return cutoff, chained(cutoff)


def programs(shape: Shape, names: list[str]) -> dict[str, tuple[Any, dict[str, Any], int]]:
    """By name: the call, its options, and calls per run."""
    made: dict[str, tuple[Any, dict[str, Any], int]] = {
        name: (ours, asked(CASES[name], shape.B), CALLS) for name in names
    }
    plain = asked(CASES["top-p 0.9"], shape.B)
    made["one read (XLA max)"] = one_read, plain, CALLS
    nowhere = {"stream": jnp.zeros((shape.B,), jnp.int32)}
    made["gumbel_sample"] = sampled, plain | nowhere, CALLS
    if shape == SHAPES[0]:
        made["sort (XLA)"] = sort, plain, 12
        made["jax.lax.top_k 50"] = best_k, plain, 12
    return made


def measure(shape: Shape, names: list[str], calls: int, runs: int) -> Iterator[dict[str, Any]]:
    """A record of each program at one shape; a run has at most `calls` calls."""
    made = programs(shape, names)
    # No rows twice in an iteration: XLA would take the second call's result from the first.
    each = min(PER_ITERATION, calls, num_sets(shape, 1, 48))
    rows = {False: [draw_rows(seed, shape) for seed in range(each)]}
    if any(CASES[name].ranked for name in names):
        rows[True] = [draw_ranked_rows(seed, shape) for seed in range(each)]
    nowhere = jnp.zeros((shape.B,), jnp.int32)
    keys = list(jax.vmap(jax.random.key)(jnp.arange(each * shape.B)).reshape(each, shape.B))
    arguments = {
        name: (rows[name in CASES and CASES[name].ranked], keys, nowhere, options)
        for name, (_, options, _) in made.items()
    }

    def lower() -> Iterator[tuple[str, Lowered]]:
        for name, (call, _, wanted) in made.items():
            times = max(1, min(wanted, calls) // each)
            yield name, Lowered(lower_loop(call, arguments[name], times), each, times)

    loops = compile_all(lower())
    for name, loop in loops.items():
        figures, _ = time_loop(loop, [arguments[name]] * runs)
        floor = shape.row_bytes / BYTES_PER_US
        yield {"case": name, **shape._asdict(), "floor_us": floor, **figures}


def describe(case: dict[str, Any]) -> str:
    """One line of the printed table, with the longest kernels."""
    low, high = case["quartiles_us"]
    longest = [
        f"{name.split('_kernel')[0][:16]} {kernel['us']:.2f}"
        for name, kernel in list(case["kernels"].items())[:3]
    ]
    return (
        f"{case['case']:28} B={case['B']:<4} V={case['V']:<7}{case['median_us']:9.2f} "
        f"({low:.2f} to {high:.2f})  kernels {case['kernels_us']:.2f}: {', '.join(longest)}"
    )


def main() -> None:
    parser = gpu_parser(__doc__)
    args = parse_on_gpu(parser)
    record: dict[str, Any] = {"environment": environment(), "cases": []}
    sizes = [(shape, list(CASES)) for shape in SHAPES] + [(shape, FEW) for shape in MORE]
    calls, runs = CALLS, RUNS
    if args.smoke:
        sizes, calls, runs = [(Shape(2, 1, 300, "bfloat16"), FEW[-1:])], 1, 1
    for shape, names in sizes:
        for case in measure(shape, names, calls, runs):
            record["cases"].append(case)
            print(describe(case), flush=True)
        save(args.out, record)


if __name__ == "__main__":
    main()
