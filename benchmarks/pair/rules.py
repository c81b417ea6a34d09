"""What each rule of acceptance accepts and distorts on the pair, after the words of held-out files.

python -m benchmarks.pair.rules --out benchmarks/results/pair_rules.json

With a(x) the probability that a drafted token x is accepted, a draft's token is accepted with
probability sum q a, and the emitted token follows q a + (1 - sum q a) norm(residual). Its total
variation from p is 0 for an exact rule.
"""

import argparse
import functools
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from benchmarks.pair.acceptance import contexts
from benchmarks.pair.heldout import HELDOUT, batches, logits_of, read_pair
from benchmarks.record import environment, save
from specjax.models import pretrained_folder
from specjax.theory.coupling import match_probability

Rows = jax.Array
Rule = Callable[[Rows, Rows], tuple[Rows, Rows]]
COUPLED = "coupled"


def lenience(p: Rows, q: Rows, factor: float) -> tuple[Rows, Rows]:
    """q a and the residual's weights of u < p / (l q)."""
    return jnp.minimum(p / factor, q), jnp.maximum(p - q, 0)


def typical(p: Rows, q: Rows, epsilon: float, delta: float) -> tuple[Rows, Rows]:
    """q a and the residual's weights of p > min(epsilon, delta e^-H)."""
    entropy = -jnp.sum(jax.scipy.special.xlogy(p, p), axis=-1, keepdims=True)
    return jnp.where(p > jnp.minimum(epsilon, delta * jnp.exp(-entropy)), q, 0), p


def relaxed(p: Rows, q: Rows, top_n: int, delta: float) -> tuple[Rows, Rows]:
    """q a and the residual's weights of the N likeliest within delta of the likeliest."""
    best = jax.lax.top_k(p, top_n)[0]
    near = (p >= best[..., -1:]) & (p >= best[..., :1] - delta)
    return jnp.where(near, q, 0), p


def ensemble(p: Rows, q: Rows, weight: float) -> tuple[Rows, Rows]:
    """q a and the residual's weights of u < (a p + (1 - a) q) / q."""
    mixture = jnp.where(p > 0, weight * p + (1 - weight) * q, 0)
    return jnp.minimum(q, mixture), jnp.maximum(p - q, 0)


# As specjax.rules has them, with the parameters that papers and libraries begin with.
RULES: dict[str, Rule] = {
    "standard()": functools.partial(lenience, factor=1.0),
    "lenience(0.5)": functools.partial(lenience, factor=0.5),
    "typical_acceptance(0.09, 0.3)": functools.partial(typical, epsilon=0.09, delta=0.3),
    "relaxed(10, 0.6)": functools.partial(relaxed, top_n=10, delta=0.6),
    "ensemble(0.5)": functools.partial(ensemble, weight=0.5),
}


def acceptance_and_distance(p: Rows, q: Rows, rule: Rule) -> Rows:
    """Returns f32[..., 2]: P(accepted), and the emitted token's total variation from p.

    Args:
      p: f32[..., V], the target's rows.
      q: f32[..., V], the draft's.
      rule: of (p, q), gives q a and the residual's weights.
    """
    accepted, residual = rule(p, q)
    mass = accepted.sum(-1, keepdims=True)
    weight = residual.sum(-1, keepdims=True)
    residual = jnp.where(weight > 0, residual / jnp.where(weight > 0, weight, 1), p)
    emitted = accepted + (1 - mass) * residual
    return jnp.stack([mass[..., 0], 0.5 * jnp.abs(emitted - p).sum(-1)], axis=-1)


@functools.partial(jax.jit, static_argnames=("first", "stride"))
def rows_of(
    models: tuple[specjax.Model, specjax.Model],
    token_ids: jax.Array,
    temperature: jax.Array,
    *,
    first: int,
    stride: int,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """f32[R, B, L, 2] of every rule at tokens `first` to L - 1, and each stride-th p and q."""
    p, q = (
        jax.nn.softmax(logits_of(model, token_ids[:, :-1])[:, first - 1 :] / temperature)
        for model in models
    )
    found = [acceptance_and_distance(p, q, rule) for rule in RULES.values()]
    return jnp.stack(found), (p[:, ::stride], q[:, ::stride])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--target", type=pathlib.Path, default=pretrained_folder("target"))
    add("--draft", type=pathlib.Path, default=pretrained_folder("draft"))
    add("--heldout", type=pathlib.Path, default=HELDOUT, help="archive of held-out files")
    add("--temperature", type=float, default=0.7)
    add("--files", type=int, help="default: all that are long enough")
    add("--context", type=int, default=128, help="tokens before the first position")
    add("--positions", type=int, default=128, help="of each file")
    add("--coupled-stride", type=int, default=8, help="coupled matches: of each n-th position")
    add("--batch", type=int, default=16)
    add("--out", type=pathlib.Path, help="write the JSON there")
    args = parser.parse_args()

    pair = read_pair(args)
    ids = contexts(pair, args)
    values, matches = [], []
    for piece, count in batches(ids, args.batch, "rules"):
        found, (p, q) = rows_of(
            (pair.target, pair.draft),
            piece,
            jnp.float32(args.temperature),
            first=args.context,
            stride=args.coupled_stride,
        )
        values.append(np.asarray(found, np.float64).mean(2)[:, :count])
        for rows in zip(np.asarray(p)[:count], np.asarray(q)[:count], strict=True):
            matches.append(np.mean([match_probability(*x) for x in zip(*rows, strict=True)]))
    per_file = np.concatenate(values, axis=1)
    # Coupled texts are the target's.
    coupled = np.stack([np.array(matches), np.zeros(len(matches))], axis=-1)
    cases: list[dict[str, Any]] = []
    for name, of_file in zip((*RULES, COUPLED), (*per_file, coupled), strict=True):
        record: dict[str, Any] = {"rule": name}
        for column, what in enumerate(("acceptance", "total_variation")):
            error = of_file[:, column].std(ddof=1) / math.sqrt(len(of_file))
            record |= {what: float(of_file[:, column].mean()), f"{what}_error": float(error)}
        cases.append(record)
        print(json.dumps(record), flush=True)
    inputs = {"temperature": args.temperature, "files": len(ids), "context": args.context}
    inputs |= {"positions": args.positions, "coupled_stride": args.coupled_stride}
    result = {
        "environment": environment(),
        "inputs": inputs,
        "cases": cases,
    }
    save(args.out, result)


if __name__ == "__main__":
    main()
