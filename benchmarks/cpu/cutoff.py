"""Times `logit_cutoff` on a CPU against the sort that one writes down first.

python -m benchmarks.cpu.cutoff --out benchmarks/results/cpu_cutoff.json --check
"""

import argparse
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from benchmarks.cpu.rounds import milliseconds, time_in_turns
from benchmarks.record import environment, save

B, V, TOP_K, TOP_P, MIN_P = 16, 131072, 50, 0.9, 0.05
# The least by which a sort has to be slower, on the rows that a model might give.
BOUND = 5.0


class Case(NamedTuple):
    """Rows of one kind, a temperature, and what is asked of them."""

    rows: str
    temperature: float
    filters: dict[str, Any]
    bounded: bool

    @property
    def name(self) -> str:
        asked = ", ".join(f"{name} = {value}" for name, value in self.filters.items())
        return f"{self.rows}, T = {self.temperature}: {asked}"


ROWS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "3 N(0, 1)": lambda rng: 3 * rng.standard_normal((B, V), np.float32),
    "0.01 N(0, 1)": lambda rng: np.float32(0.01) * rng.standard_normal((B, V), np.float32),
    "all equal": lambda rng: np.full((B, V), rng.standard_normal(), np.float32),
    "ranks": lambda rng: np.stack(
        [-1.2 * np.log1p(rng.permutation(V)).astype(np.float32) for _ in range(B)]
    ),
}
FILTERS = (dict(top_k=TOP_K), dict(top_p=TOP_P), dict(top_k=TOP_K, top_p=TOP_P))
CASES = (
    *(Case("3 N(0, 1)", t, f, True) for t in (1.0, 0.7) for f in FILTERS),
    Case("3 N(0, 1)", 1.0, dict(min_p=MIN_P), False),
    Case("3 N(0, 1)", 1.0, dict(top_k=2000), False),
    *(Case("ranks", 1.0, f, False) for f in FILTERS[1:]),
    *(Case(rows, 1.0, f, False) for rows in ("0.01 N(0, 1)", "all equal") for f in FILTERS),
)


@jax.jit
def sort_and_mask(
    logits: jax.Array, temperature: jax.Array, top_k: Any, top_p: Any, min_p: Any
) -> jax.Array:
    """Masked logits, as one writes it down first; numbers are data and None is off."""
    x = logits / temperature[:, None]
    ranked = -jnp.sort(-x, axis=-1)
    if top_k is not None:
        edge = jnp.take_along_axis(ranked, top_k[:, None] - 1, axis=-1)
        ranked = jnp.where(ranked < edge, -jnp.inf, ranked)
        x = jnp.where(x < edge, -jnp.inf, x)
    if top_p is not None:
        p = jax.nn.softmax(ranked, axis=-1)
        kept = jnp.cumsum(p, axis=-1) - p < top_p[:, None]
        edge = jnp.min(jnp.where(kept, ranked, jnp.inf), axis=-1, keepdims=True)
        x = jnp.where(x < edge, -jnp.inf, x)
    if min_p is not None:
        x = jnp.where(x < ranked[:, :1] + jnp.log(min_p)[:, None], -jnp.inf, x)
    return x


def static_top_k(logits: jax.Array, k: int) -> jax.Array:
    """The cutoff of a `top_k` that is the same number for all requests and never changes."""
    return jax.lax.optimization_barrier(jax.lax.top_k(logits, k)[0])[:, -1]


_static_top_k = jax.jit(static_top_k, static_argnames="k")


@jax.jit
def logsumexp(logits: jax.Array) -> jax.Array:
    return jax.nn.logsumexp(logits, axis=-1)


def arguments(case: Case) -> dict[str, jax.Array]:
    """One number per request."""
    dtypes = {"top_k": jnp.int32}
    asked = {"temperature": case.temperature, **case.filters}
    return {n: jnp.full((B,), value, dtypes.get(n, jnp.float32)) for n, value in asked.items()}


def contenders(case: Case) -> dict[str, Callable[[jax.Array], Any]]:
    given = arguments(case)
    plain = {"top_k": None, "top_p": None, "min_p": None, **given}
    calls = {
        "logit_cutoff": lambda x: specjax.logit_cutoff(x, **given),
        "sort": lambda x: sort_and_mask(x, **plain),
    }
    if list(case.filters) == ["top_k"]:
        calls["lax.top_k"] = lambda x: _static_top_k(x, k=case.filters["top_k"])
    return calls


def check_kept(case: Case, logits: jax.Array) -> int:
    """Holds both to a float64 sort of each row; the most kept tokens of any row."""
    calls = contenders(case)
    cutoff = np.asarray(calls["logit_cutoff"](logits))
    masked = np.asarray(calls["sort"](logits))
    most = 0
    for row, low, left in zip(np.asarray(logits, np.float64), cutoff, masked, strict=True):
        ranked = np.sort(row)[::-1]
        bounds = []
        for slack in (1e-5, -1e-5):
            kept = ranked
            if "top_k" in case.filters:
                kept = kept[kept >= kept[case.filters["top_k"] - 1]]
            if "top_p" in case.filters:
                mass = np.cumsum(np.exp((kept - kept[0]) / case.temperature))
                wanted = case.filters["top_p"] * mass[-1] * (1 + slack)
                kept = kept[kept >= kept[np.searchsorted(mass, wanted)]]
            if "min_p" in case.filters:
                edge = np.log(case.filters["min_p"]) * (1 + slack)
                kept = kept[(kept - kept[0]) / case.temperature >= edge]
            bounds.append(kept[-1])
        assert bounds[0] <= low <= bounds[1], f"{case.name}: {low} is not {bounds}"
        most = max(most, int(np.sum(row >= low)))
        # The sort's own cumsum is of float32 too, and of a longer chain.
        assert abs(np.isfinite(left).sum() - np.sum(row >= low)) <= 1e-3 * len(row), case.name
    return most


def measure(sets: dict[str, list[jax.Array]], rounds: int) -> dict[tuple[str, str], np.ndarray]:
    """Seconds of every call, [rounds], by case and contender."""
    calls = {
        (case.name, name): (case.rows, call)
        for case in CASES
        for name, call in contenders(case).items()
    }
    calls |= {("3 N(0, 1)", "logsumexp"): ("3 N(0, 1)", logsumexp)}
    return time_in_turns(calls, sets, rounds)


def report(result: dict[str, Any]) -> None:
    """Prints what the JSON holds, as markdown."""

    def cell(timing: dict[str, Any] | None) -> str:
        if timing is None:
            return ""
        low, high = timing["quartiles_ms"]
        return f"{timing['median_ms']:.1f} ({low:.1f} to {high:.1f})"

    print(
        "| rows, T: filters | most kept | `logit_cutoff` | sort | ratio | `lax.top_k`, static k |"
    )
    print("|---|---|---|---|---|---|")
    for entry in result["cases"]:
        t = entry["timings"]
        print(
            f"| {entry['name']} | {entry['most_kept']} | {cell(t['logit_cutoff'])} "
            f"| {cell(t['sort'])} | {entry['ratio']:.1f} | {cell(t.get('lax.top_k'))} |"
        )
    where = result["environment"]
    print(
        f"\nMilliseconds, median (quartiles). B = {B}, V = {V}, float32; "
        f"`jax.nn.logsumexp` of the same rows takes {cell(result['logsumexp'])}. "
        f"{where['device']}, {where['cores']} cores, JAX {where['jax']}, {where['date']}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sets", type=int, default=4, help="input sets rotated through")
    parser.add_argument("--out", type=pathlib.Path, help="write the JSON there")
    parser.add_argument("--check", action="store_true", help="fail if a bound is missed")
    args = parser.parse_args()

    sets = {
        rows: [jnp.asarray(draw(np.random.default_rng(s))) for s in range(args.sets)]
        for rows, draw in ROWS.items()
    }
    most_kept = {case.name: check_kept(case, sets[case.rows][0]) for case in CASES}
    times = measure(sets, args.rounds)
    cases = []
    for case in CASES:
        timings = {name: milliseconds(times[case.name, name]) for name in contenders(case)}
        ratio = timings["sort"]["median_ms"] / timings["logit_cutoff"]["median_ms"]
        cases.append(
            {
                "name": case.name,
                "rows": case.rows,
                "temperature": case.temperature,
                "filters": case.filters,
                "most_kept": most_kept[case.name],
                "timings": timings,
                "ratio": ratio,
                **({"bound": BOUND, "holds": bool(ratio >= BOUND)} if case.bounded else {}),
            }
        )
    result = {
        "environment": environment(),
        "inputs": {
            "B": B,
            "V": V,
            "dtype": "float32",
            "sets": args.sets,
            "rounds": args.rounds,
            "ranks": "-1.2 log(1 + rank), permuted",
        },
        "logsumexp": milliseconds(times["3 N(0, 1)", "logsumexp"]),
        "cases": cases,
    }
    report(result)
    save(args.out, result)
    if args.check and not all(entry.get("holds", True) for entry in cases):
        sys.exit("A bound is missed.")


if __name__ == "__main__":
    main()
