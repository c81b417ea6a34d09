"""Times verification and sampling on a CPU against what JAX offers for the same work.

python benchmarks/cpu_verify.py --out benchmarks/results/cpu_verify.json --check
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import shlex
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import specjax

B, K, TEMPERATURE = 16, 4, 0.8
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


class Inputs(NamedTuple):
    """One set of inputs of one vocabulary; `rows` are [B, V] logits to sample from."""

    draft: specjax.Draft
    target_logits: jax.Array
    rows: jax.Array
    keys: jax.Array
    key: jax.Array


def draw_inputs(seed: int, vocab_size: int) -> Inputs:
    """Draft 3 N(0, 1), target that plus N(0, 1), tokens and their statistics as drawn."""
    rng = np.random.default_rng(seed)
    shape = (B, K + 1, vocab_size)
    draft_logits = 3 * rng.standard_normal(shape, np.float32)
    target_logits = draft_logits + rng.standard_normal(shape, np.float32)
    keys = jax.random.split(jax.random.key(seed), B)
    samples = [
        specjax.gumbel_sample(
            jnp.asarray(draft_logits[:, i]),
            keys=keys,
            positions=i,
            stream=specjax.Stream.draft(i),
            temperature=TEMPERATURE,
        )
        for i in range(K)
    ]
    token_ids, logprobs, logsumexp = (jnp.stack(x, axis=1) for x in zip(*samples, strict=True))
    draft = specjax.Draft(
        token_ids=token_ids,
        logits=jnp.asarray(np.ascontiguousarray(draft_logits[:, :K])),
        temperature=jnp.full((B,), TEMPERATURE),
        logprobs=logprobs,
        logsumexp=logsumexp,
    )
    rows = jnp.asarray(np.ascontiguousarray(target_logits[:, seed % (K + 1)]))
    return Inputs(draft, jnp.asarray(target_logits), rows, keys, jax.random.key(seed))


@jax.jit
def acceptance(draft_logits: jax.Array, target_logits: jax.Array) -> jax.Array:
    """Mean of sum min(p, q) over the drafted rows."""
    p = jax.nn.softmax(target_logits[:, :-1] / TEMPERATURE)
    q = jax.nn.softmax(draft_logits / TEMPERATURE)
    return jnp.minimum(p, q).sum(-1).mean()


@jax.jit
def logsumexp(target_logits: jax.Array) -> jax.Array:
    return jax.nn.logsumexp(target_logits, axis=-1)


@jax.jit
def categorical(key: jax.Array, rows: jax.Array) -> jax.Array:
    return jax.random.categorical(key, rows / TEMPERATURE)


@jax.jit
def obvious(
    key: jax.Array, token_ids: jax.Array, draft_logits: jax.Array, target_logits: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Number of accepted drafts and the next token, as one writes it down first."""
    coin_key, token_key = jax.random.split(key)
    log_p = jax.nn.log_softmax(target_logits / TEMPERATURE)
    log_q = jax.nn.log_softmax(draft_logits / TEMPERATURE)
    drafted = token_ids[..., None]
    ratio = jnp.take_along_axis(log_p[:, :-1], drafted, -1) - jnp.take_along_axis(
        log_q, drafted, -1
    )
    coins = jax.random.uniform(coin_key, token_ids.shape)
    num_accepted = jnp.cumprod(jnp.log(coins) < ratio[..., 0], axis=1).sum(1)
    place = num_accepted[:, None, None]
    p = jnp.exp(jnp.take_along_axis(log_p, place, 1)[:, 0])
    q = jnp.exp(jnp.take_along_axis(log_q, jnp.minimum(place, log_q.shape[1] - 1), 1)[:, 0])
    all_accepted = num_accepted[:, None] == token_ids.shape[1]
    residual = jnp.log(jnp.where(all_accepted, p, jnp.maximum(p - q, 0)))
    return num_accepted, jax.random.categorical(token_key, residual)


def verify(inputs: Inputs) -> specjax.Verification:
    return specjax.rejection_sample(
        inputs.draft,
        inputs.target_logits,
        keys=inputs.keys,
        positions=0,
        temperature=TEMPERATURE,
    )


def sample(inputs: Inputs) -> specjax.Sample:
    return specjax.gumbel_sample(
        inputs.rows,
        keys=inputs.keys,
        positions=0,
        stream=specjax.Stream.TARGET,
        temperature=TEMPERATURE,
    )


CONTENDERS: dict[str, Callable[[Inputs], Any]] = {
    "logsumexp": lambda x: logsumexp(x.target_logits),
    "rejection_sample": verify,
    "obvious": lambda x: obvious(x.key, x.draft.token_ids, x.draft.logits, x.target_logits),
    "gumbel_sample": sample,
    "categorical": lambda x: categorical(x.key, x.rows),
}


def check_laws(num_requests: int = 40_000) -> dict[str, float]:
    """Chi-square per degree of freedom of both verifications against the exact law, V = 16.

    The event is (number accepted, next token), its law known exactly. Four standard deviations
    are allowed.
    """
    vocab_size, k = 16, 2
    rng = np.random.default_rng(7)
    d = rng.standard_normal((k + 1, vocab_size)).astype(np.float32)
    t = d + rng.standard_normal(d.shape).astype(np.float32)
    p, q = (np.asarray(jax.nn.softmax(jnp.asarray(x) / TEMPERATURE), np.float64) for x in (t, d))
    kept = np.minimum(p, q)[:k].sum(-1)
    law = np.zeros((k + 1, vocab_size))
    for i in range(k):
        law[i] = kept[:i].prod() * np.maximum(p[i] - q[i], 0)
    law[k] = kept.prod() * p[k]

    key = jax.random.key(0)
    logits = jnp.broadcast_to(jnp.asarray(d[:k]), (num_requests, k, vocab_size))
    target = jnp.broadcast_to(jnp.asarray(t), (num_requests, k + 1, vocab_size))
    ids = jax.random.categorical(jax.random.fold_in(key, 1), logits / TEMPERATURE)
    draft = specjax.Draft(ids.astype(jnp.int32), logits=logits)
    ours = specjax.rejection_sample(draft, target, keys=key, positions=0, temperature=TEMPERATURE)
    last = jnp.take_along_axis(ours.token_ids, ours.num_accepted[:, None], 1)[:, 0]
    outcomes = {"rejection_sample": (ours.num_accepted, last)}
    outcomes["obvious"] = obvious(jax.random.fold_in(key, 2), ids, logits, target)
    result = {}
    for name, (num_accepted, token) in outcomes.items():
        counts = np.zeros_like(law)
        np.add.at(counts, (np.asarray(num_accepted), np.asarray(token)), 1)
        possible = law > 0
        assert counts[~possible].sum() == 0, f"{name} emits what has probability 0"
        expected = num_requests * law[possible]
        freedom = possible.sum() - 1
        chi_square = ((counts[possible] - expected) ** 2 / expected).sum() / freedom
        assert chi_square < 1 + 4 * np.sqrt(2 / freedom), f"{name} has another law: {chi_square}"
        result[name] = float(chi_square)
    return result


def measure(sets: dict[int, list[Inputs]], rounds: int) -> dict[str, np.ndarray]:
    """Seconds of every call, [rounds], by contender.

    Every round times every contender once, in a new order, on inputs that the call before did
    not touch; every contender sees every set equally often.
    """
    calls = {(name, SIZES[0]): call for name, call in CONTENDERS.items()}
    calls |= {(name, SIZES[1]): CONTENDERS[name] for name in ("rejection_sample", "gumbel_sample")}
    for (_, size), call in calls.items():
        jax.block_until_ready(call(sets[size][0]))
    times: dict[tuple[str, int], list[float]] = {which: [] for which in calls}
    rng = np.random.default_rng(0)
    for number in range(rounds):
        shift = number % len(sets[SIZES[0]])
        for which in rng.permutation(len(calls)):
            name, size = list(calls)[which]
            inputs = sets[size][(shift + int(which)) % len(sets[size])]
            start = time.perf_counter()
            jax.block_until_ready(calls[name, size](inputs))
            times[name, size].append(time.perf_counter() - start)
    return {
        name if size == SIZES[0] else f"{name}@{size}": np.array(seconds)
        for (name, size), seconds in times.items()
    }


def cpu_name() -> str:
    """The processor's name, as the system gives it."""
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def environment() -> dict[str, Any]:
    """Where and with what a figure was measured."""
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "device": cpu_name(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jax.lib.__version__,
        "numpy": np.__version__,
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "benchmarks/cpu_verify.py", *sys.argv[1:]]),
    }


def summarise(times: dict[str, np.ndarray]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Milliseconds of each contender, and the ratios that are bounded."""
    timings = {}
    for name, seconds in times.items():
        low, middle, high = 1e3 * np.percentile(seconds, [25, 50, 75])
        timings[name] = {"median_ms": middle, "quartiles_ms": [low, high]}
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

    laws = check_laws()
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
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.check and not all(ratio["holds"] for ratio in ratios):
        sys.exit("A bound is missed.")


if __name__ == "__main__":
    main()
