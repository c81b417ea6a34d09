"""Verification with top-k, top-p and min-p on an NVIDIA GPU: its time, kernels and memory.

python -m benchmarks.gpu.filtered --out benchmarks/results/h200_cutoff.json
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import specjax
from benchmarks.gpu.cutoff import CASES, asked, kernels
from benchmarks.gpu.inputs import Inputs, Shape, draw_keys, draw_sets, draw_tokens, num_sets
from benchmarks.gpu.loop import Lowered, compile_all, lower_loop, time_loop
from benchmarks.record import environment, gpu_parser, parse_on_gpu, save

SHAPE, TEMPERATURE = Shape(64, 5, 131072, "bfloat16"), 0.7
CALLS, RUNS = 288, 5
PLAIN, ALL = "nothing asked", "all three"


def cutoffs(logits: jax.Array, options: dict[str, jax.Array]) -> jax.Array:
    """Cutoffs of logits [B, R, V] by parameters [B]."""
    rows = logits.shape[:2]
    each = {name: jnp.broadcast_to(x[:, None], rows) for name, x in options.items()}
    return specjax.logit_cutoff(logits, **each, implementation=kernels())


def verify(inputs: Inputs, keys: Any, positions: Any, options: dict[str, jax.Array]) -> Any:
    """Verification, and where anything is asked the cutoffs of its target rows before it."""
    # Behind the call before.
    temperature, _ = jax.lax.optimization_barrier((options["temperature"], positions))
    asks = len(options) > 1
    step = specjax.rejection_sample(
        inputs.draft,
        inputs.target_logits,
        keys=keys,
        positions=positions,
        temperature=temperature,
        cutoff=cutoffs(inputs.target_logits, options | {"temperature": temperature})
        if asks
        else None,
        options=specjax.Options(implementation=kernels()),
    )
    return step, step.num_emitted


def draw_inputs(shape: Shape, count: int, options: dict[str, jax.Array]) -> list[Inputs]:
    """Input sets whose tokens were sampled from what the filters leave of the draft."""
    sets = []
    for seed, (draft_logits, target_logits) in enumerate(draw_sets(shape, count)):
        kept, cutoff = draft_logits, None
        if len(options) > 1:
            cutoff = cutoffs(draft_logits, options)
            kept = jnp.where(draft_logits >= cutoff[..., None], draft_logits, -jnp.inf)
        draft = draw_tokens(1000 + seed, kept, jnp.float32(TEMPERATURE))
        sets.append(Inputs(draft.replace(logits=draft_logits, cutoff=cutoff), target_logits))
    return jax.block_until_ready(sets)


def measure(shape: Shape, calls: int, runs: int) -> Iterator[dict[str, Any]]:
    """A record of verification with nothing asked, and with all three filters."""
    temperature = {"temperature": jnp.full((shape.B,), TEMPERATURE, jnp.float32)}
    for name, options in ((PLAIN, {}), (ALL, asked(CASES[ALL], shape.B))):
        options |= temperature
        sets = draw_inputs(shape, num_sets(shape, 3, 4), options)
        each, nowhere = min(12, calls), jnp.zeros((shape.B,), jnp.int32)
        arguments = [(sets, draw_keys(run, each, shape.B), nowhere, options) for run in range(runs)]
        times = calls // each
        loop = Lowered(lower_loop(verify, arguments[0], times), each, times)
        figures, results = time_loop(compile_all([(name, loop)])[name], arguments)
        one = jax.jit(verify).lower(sets[0], arguments[0][1][0], nowhere, options).compile()
        accepted = [step.num_accepted.mean() for run in results for step in run]
        yield {
            "case": name,
            **shape._asdict(),
            "temperature": TEMPERATURE,
            "mean_accepted": float(jnp.stack(accepted).mean()),
            "temporary_mb": one.memory_analysis().temp_size_in_bytes / 1e6,
            "float32_rows_mb": shape.B * (shape.K + 1) * shape.V * 4 / 1e6,
            **figures,
        }


def main() -> None:
    parser = gpu_parser(__doc__)
    args = parse_on_gpu(parser)
    shape = Shape(2, 1, 300, "bfloat16") if args.smoke else SHAPE
    calls, runs = (1, 1) if args.smoke else (CALLS, RUNS)
    section: dict[str, Any] = {"environment": environment(), "cases": []}
    for case in measure(shape, calls, runs):
        section["cases"].append(case)
        print(
            f"{case['case']:14}{case['median_us']:9.2f} us, {case['temporary_mb']:.1f} MB next to "
            f"{case['float32_rows_mb']:.0f} of rows in float32",
            {name: round(kernel["us"], 2) for name, kernel in case["kernels"].items()},
            flush=True,
        )
    save(args.out, {"verification": section})


if __name__ == "__main__":
    main()
