"""Times the kept sets of a step on an NVIDIA GPU, next to its cutoffs and its verification.

python -m benchmarks.gpu.kept_tokens --out benchmarks/results/h100_kept_tokens.json

A step of 64 requests of an 8B model takes about 15 ms; the bound of kept sets is 5 % of that. The
host's part is not measured here: the ids of a step are copied while the next step runs.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import specjax
from benchmarks.gpu.inputs import Shape, draw_logits, num_sets
from benchmarks.record import environment, gpu_parser, parse_on_gpu, save
from specjax.processing.kept_tokens import list_kept

STEP_US, TEMPERATURE = 15_000, 0.9
FULL, SMALL = Shape(64, 3, 128256, "bfloat16", "zipf"), Shape(2, 2, 300, "bfloat16", "zipf")
FILTERS = {"top_k 50": {"top_k": 50}, "top_p 0.95": {"top_p": 0.95}}

Step = Callable[[jax.Array, jax.Array], Any]


def make_steps(shape: Shape, max_kept: int, filters: dict[str, Any]) -> dict[str, Step]:
    """Functions of one step's draft and target logits, by what they compute."""
    keys = jax.random.split(jax.random.key(0), shape.B)

    def verify(draft: jax.Array, target: jax.Array) -> tuple[Any, jax.Array]:
        cutoff = specjax.logit_cutoff(target, temperature=TEMPERATURE, **filters)
        drafted = jnp.argmax(draft, axis=-1).astype(jnp.int32)
        positions = jnp.zeros((shape.B,), jnp.int32)
        verified = specjax.rejection_sample(
            specjax.Draft(drafted),
            target,
            keys=keys,
            positions=positions,
            temperature=TEMPERATURE,
            cutoff=cutoff,
        )
        return verified, cutoff

    def with_kept(draft: jax.Array, target: jax.Array, with_mask: bool) -> Any:
        verified, cutoff = verify(draft, target)
        temperature = jnp.float32(TEMPERATURE)
        sizes = {"max_kept": max_kept, "with_mask": with_mask}
        return verified, list_kept(target, temperature, cutoff, **sizes)

    return {
        "without": lambda draft, target: verify(draft, target)[0],
        "with ids": lambda draft, target: with_kept(draft, target, False),
        "with ids and masks": lambda draft, target: with_kept(draft, target, True),
    }


def time_steps(
    step: Step, sets: tuple[jax.Array, jax.Array], num_runs: int
) -> tuple[float, list[float]]:
    """Microseconds of a step on the device: the median and the quartiles of some runs.

    Args:
      step: of draft logits [B, K, V] and target logits [B, K + 1, V].
      sets: such arrays with a leading axis; a run takes a step of each, so that no step finds its
        logits in the cache.
      num_runs: runs that are timed.
    """
    run = jax.jit(lambda sets: jax.lax.map(lambda one: step(*one), sets))
    jax.block_until_ready(run(sets))
    times = []
    for _ in range(num_runs):
        start = time.perf_counter()
        jax.block_until_ready(run(sets))
        times.append(1e6 * (time.perf_counter() - start) / sets[0].shape[0])
    low, median, high = statistics.quantiles(times, n=4)
    return round(median, 1), [round(low, 1), round(high, 1)]


def measure(shape: Shape, max_kept: int, num_runs: int) -> list[dict[str, Any]]:
    """A record of each filter: microseconds of a step by what it computes."""
    count = max(16, num_sets(shape, 2 * shape.K + 1, 16)) if shape == FULL else 2
    sets = jax.lax.map(lambda seed: draw_logits(seed, shape), jnp.arange(count))
    records = []
    for name, filters in FILTERS.items():
        times = {
            case: time_steps(step, sets, num_runs)
            for case, step in make_steps(shape, max_kept, filters).items()
        }
        base = times["without"][0]
        records.append(
            {
                "filter": name,
                "us": {case: median for case, (median, _) in times.items()},
                "quartiles_us": {case: quartiles for case, (_, quartiles) in times.items()},
                "share_of_step": {
                    case: round((median - base) / STEP_US, 4) for case, (median, _) in times.items()
                },
            }
        )
    return records


def main() -> None:
    parser = gpu_parser(__doc__)
    parser.add_argument("--max-kept", type=int, default=256, help="ids of a set")
    parser.add_argument("--num-runs", type=int, default=20)
    args = parse_on_gpu(parser)
    shape = SMALL if args.smoke else FULL
    max_kept = min(args.max_kept, shape.V)
    result = {
        **environment(),
        **shape._asdict(),
        "max_kept": max_kept,
        "step_us": STEP_US,
        "cases": measure(shape, max_kept, 2 if args.smoke else args.num_runs),
    }
    print(json.dumps(result))
    save(args.out, result)


if __name__ == "__main__":
    main()
