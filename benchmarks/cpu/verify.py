"""Times verification and sampling on a CPU against what JAX offers for the same work.

python -m benchmarks.cpu.verify --out benchmarks/results/cpu_verify.json --check
"""

import argparse
import pathlib
import sys
from typing import Any

import numpy as np

from benchmarks.cpu.contenders import (
    CONTENDERS,
    TEMPERATURE,
    B,
    Inputs,
    K,
    acceptance,
    check_distributions,
    draw_inputs,
    verify,
)
from benchmarks.cpu.rounds import milliseconds, time_in_turns
from benchmarks.record import environment, save

SIZES = (131072, 151936)

# What must hold: name, the ratio as (slow, fast) of contenders, and its bound.
BOUNDS = (
    ("rejection_sample over logsumexp", ("rejection_sample", "logsumexp"), "at most", 2.5),
    ("obvious JAX over rejection_sample", ("obvious", "rejection_sample"), "at least", 5.0),
    ("jax.random.categorical over gumbel_sample", ("categorical", "gumbel_sample"), "at least", 15),
    (
        "rejection_sample, per element",
        ("rejection_sample@151936", "rejection_sample"),
        "at most",
        1.5,
    ),
    ("gumbel_sample, per element", ("gumbel_sample@151936", "gumbel_sample"), "at most", 1.5),
)


def measure(sets: dict[int, list[Inputs]], rounds: int) -> dict[str, np.ndarray]:
    """Seconds of every call, [rounds], by contender."""
    calls = {name: (SIZES[0], call) for name, call in CONTENDERS.items()}
    for name in ("rejection_sample", "gumbel_sample"):
        calls[f"{name}@{SIZES[1]}"] = SIZES[1], CONTENDERS[name]
    return time_in_turns(calls, sets, rounds)


def summarise(times: dict[str, np.ndarray]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Milliseconds of each contender, and the ratios that are bounded."""
    timings = {name: milliseconds(seconds) for name, seconds in times.items()}
    ratios = []
    for label, (slow, fast), kind, bound in BOUNDS:
        ratio = timings[slow]["median_ms"] / timings[fast]["median_ms"]
        if "@" in slow:
            ratio *= SIZES[0] / SIZES[1]
        holds = ratio <= bound if kind == "at most" else ratio >= bound
        ratios.append(
            {"name": label, "ratio": ratio, "kind": kind, "bound": bound, "holds": bool(holds)}
        )
    return timings, ratios


def report(result: dict[str, Any]) -> None:
    """Prints what the JSON holds."""
    where = result["environment"]
    print(f"{where['device']}, {where['cores']} cores, jax {where['jax']}, {where['date']}")
    inputs = result["inputs"]
    print(f"B = {B}, K = {K}, V = {SIZES[0]}, f32, temperature {TEMPERATURE}")
    print(
        f"mean acceptance {inputs['mean_acceptance']:.3f}, "
        f"tokens per step {inputs['mean_tokens_per_step']:.2f}\n"
    )
    print(f"{'':32}{'median':>10}{'quartiles':>20}   ms")
    for name, timing in result["timings"].items():
        low, high = timing["quartiles_ms"]
        print(f"{name:32}{timing['median_ms']:10.2f}{f'{low:.2f} to {high:.2f}':>20}")
    print()
    for ratio in result["ratios"]:
        verdict = "holds" if ratio["holds"] else "MISSED"
        bound = f"{ratio['kind']} {ratio['bound']:g}"
        print(f"{ratio['name']:44}{ratio['ratio']:8.2f}   {bound}: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--sets", type=int, default=4, help="input sets rotated through")
    parser.add_argument("--out", type=pathlib.Path, help="write the JSON there")
    parser.add_argument("--check", action="store_true", help="fail if a bound is missed")
    args = parser.parse_args()

    laws = check_distributions()
    sets = {size: [draw_inputs(s, size) for s in range(args.sets)] for size in SIZES}
    overlaps = [float(acceptance(x.draft.logits, x.target_logits)) for x in sets[SIZES[0]]]
    emitted = [float(verify(x).num_emitted.mean()) for x in sets[SIZES[0]]]
    timings, ratios = summarise(measure(sets, args.rounds))
    result = {
        "environment": environment(),
        "inputs": {
            "B": B,
            "K": K,
            "V": list(SIZES),
            "dtype": "float32",
            "temperature": TEMPERATURE,
            "draft_logits": "d = 3 N(0, 1)",
            "target_logits": "d + N(0, 1), the bonus row from a d of its own",
            "statistics": "carried",
            "sets": args.sets,
            "rounds": args.rounds,
            "mean_acceptance": float(np.mean(overlaps)),
            "mean_tokens_per_step": float(np.mean(emitted)),
        },
        "chi_square_per_degree_of_freedom": laws,
        "timings": timings,
        "ratios": ratios,
    }
    report(result)
    save(args.out, result)
    if args.check and not all(ratio["holds"] for ratio in ratios):
        sys.exit("A bound is missed.")


if __name__ == "__main__":
    main()
