"""Measures a pair on held-out text: bits per byte, sum min(p, q), acceptance of `generate`.

python -m benchmarks.pair.acceptance bits
python -m benchmarks.pair.acceptance overlap
python -m benchmarks.pair.acceptance generate
python -m benchmarks.pair.acceptance generate --head specjax/models/pretrained/eagle3
"""

import argparse
import functools
import math
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from benchmarks.pair.bits import report_bits
from benchmarks.pair.heldout import HELDOUT, Pair, batches, logits_of, read_pair
from specjax.models import load_drafter, load_eagle3, pretrained_folder, unrolled_eagle3


@functools.partial(jax.jit, static_argnames="first")
def overlaps(
    pair: tuple[specjax.Model, specjax.Model],
    token_ids: jax.Array,
    temperatures: jax.Array,
    *,
    first: int,
) -> jax.Array:
    """sum min(p, q), f32[T, B, L - first], of the laws of tokens `first` to L - 1."""
    logits = [logits_of(model, token_ids[:, :-1])[:, first - 1 :] for model in pair]

    def at(temperature: jax.Array) -> jax.Array:
        p, q = (jax.nn.softmax(x / temperature, axis=-1) for x in logits)
        return jnp.minimum(p, q).sum(-1)

    return jax.lax.map(at, temperatures)


def first_drafts(target: specjax.Model, folder: pathlib.Path) -> specjax.Model:
    """The distributions of a head's first drafts, as a model of whole sequences without a cache."""
    params, config = load_eagle3(folder, num_target_layers=len(target.params["layers"]))

    def apply(
        params: Any, token_ids: jax.Array, places: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        empty = target.init_cache(*token_ids.shape)
        _, states, _ = target.apply_with_taps(
            params["target"], token_ids, places, empty, config.taps
        )
        tokens = params["target"]["embedding"][token_ids]
        return unrolled_eagle3(config, params["head"], tokens, states, 1)[0], cache

    def logits(params: Any, hidden: jax.Array) -> jax.Array:
        if "head" in params["head"]:
            return hidden @ params["head"]["head"].T
        return target.logits(params["target"], hidden)

    both = {"target": target.params, "head": params}
    return specjax.Model(both, lambda batch_size, max_length: (), apply, logits)


def drafter_of(pair: Pair, head: pathlib.Path | None) -> specjax.Drafter:
    """What drafts: the pair's draft, or a head."""
    if head is None:
        return specjax.model_drafter(pair.draft)
    return load_drafter(head, pair.target)


def contexts(pair: Pair, args: argparse.Namespace) -> np.ndarray:
    """i32[F, context + positions]: the beginnings of the files that are long enough."""
    length = args.context + args.positions
    rows = [row[:length] for row in pair.heldout.rows if len(row) >= length]
    return np.stack(rows if args.files is None else rows[: args.files])


def report_overlap(pair: Pair, args: argparse.Namespace) -> None:
    """Mean of sum min(p, q) on held-out text, teacher-forced, by temperature."""
    ids = contexts(pair, args)
    temperatures = jnp.asarray(args.temperatures, jnp.float32)
    models = (pair.target, pair.draft)
    found = [
        np.asarray(overlaps(models, piece, temperatures, first=args.context))[:, :count]
        for piece, count in batches(ids, args.batch, "overlap")
    ]
    per_file = np.concatenate(found, axis=1).mean(-1, dtype=np.float64)
    print(f"{len(ids)} held-out files x {args.positions} positions, teacher-forced:\n")
    print("| temperature | mean of sum min(p, q) | standard error |\n|---|---|---|")
    for temperature, values in zip(args.temperatures, per_file, strict=True):
        error = values.std(ddof=1) / math.sqrt(len(values))
        print(f"| {temperature:g} | {values.mean():.3f} | {error:.3f} |")


class Counted(NamedTuple):
    """Per request: first drafted tokens judged, accepted, and the sum of their sum min(p, q)."""

    drafted: np.ndarray
    accepted: np.ndarray
    expected: np.ndarray
    num_steps: np.ndarray
    num_emitted: np.ndarray


def step_starts(generation: specjax.Generation, limit: int) -> np.ndarray:
    """bool[B, L]: places at which the first token of a draft stood.

    A step begins after the token that ended the one before, recovered or bonus; where a single
    place is left nothing is drafted.
    """
    origins, lengths = np.asarray(generation.origins), np.asarray(generation.lengths)
    ends = (origins == specjax.Origin.RECOVERED) | (origins == specjax.Origin.BONUS)
    starts = np.pad(ends[:, :-1], ((0, 0), (1, 0)))
    place = np.arange(origins.shape[1])[None]
    return starts & (place < np.minimum(lengths, limit - 1)[:, None])


def count(
    pair: Pair, prompts: np.ndarray, keys: jax.Array, temperature: float, args: argparse.Namespace
) -> Counted:
    """What `generate` counts on a batch of prompts, and what it should count."""
    size, context = prompts.shape
    generation = specjax.generate(
        pair.target,
        drafter_of(pair, args.head),
        (prompts, np.full(size, context, np.int32)),
        keys=keys,
        config=specjax.SpeculativeConfig(num_speculative_tokens=args.num_speculative_tokens),
        max_new_tokens=args.positions,
        temperature=temperature,
    )
    starts = step_starts(generation, context + args.positions)
    overlap = overlaps(
        (pair.target, pair.draft),
        generation.token_ids,
        jnp.asarray([temperature], jnp.float32),
        first=context,
    )
    expected = np.where(starts[:, context:], np.asarray(overlap[0], np.float64), 0.0).sum(1)
    metrics = jax.tree.map(np.asarray, generation.metrics)
    drafted, accepted = metrics.num_drafted[:, 0], metrics.num_accepted[:, 0]
    if not np.array_equal(starts.sum(1), drafted):
        raise RuntimeError("The origins of the tokens and the loop's counters disagree.")
    return Counted(drafted, accepted, expected, metrics.num_steps, metrics.num_emitted)


def report_generate(pair: Pair, args: argparse.Namespace) -> None:
    """Acceptance as counted by `generate` next to sum min(p, q) at the same places."""
    prompts = contexts(pair, args)[:, : args.context]
    numbers = np.arange(len(prompts))[:, None]
    numbered = np.concatenate([prompts, numbers], axis=1)
    k = args.num_speculative_tokens
    print(f"{len(prompts)} prompts x {args.positions} new tokens, K = {k}, seed {args.seed}:\n")
    print(
        "| temperature | first drafts | accepted | mean of sum min(p, q) there | difference | "
        "standard error | tokens per step |\n|---|---|---|---|---|---|---|"
    )
    worst = 0.0
    for temperature in args.temperatures:
        key = jax.random.fold_in(jax.random.key(args.seed), round(1e6 * temperature))
        pieces = []
        for piece, size in batches(numbered, args.batch, f"temperature {temperature:g}"):
            keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.asarray(piece[:, -1]))
            counted = count(pair, piece[:, :-1], keys, temperature, args)
            pieces.append(Counted(*(values[:size] for values in counted)))
        all_of = Counted(*(np.concatenate(values) for values in zip(*pieces, strict=True)))
        total = all_of.drafted.sum()
        # A fair game: the differences per file are uncorrelated and have mean zero.
        differences = all_of.accepted - all_of.expected
        error = math.sqrt((differences**2).sum()) / total
        difference = differences.sum() / total
        if difference:
            worst = max(worst, abs(difference) / error)
        print(
            f"| {temperature:g} | {total} | {all_of.accepted.sum() / total:.3f} | "
            f"{all_of.expected.sum() / total:.3f} | {difference:+.4f} | {error:.4f} | "
            f"{all_of.num_emitted.sum() / all_of.num_steps.sum():.2f} |",
            flush=True,
        )
    print(f"\nThe largest difference is {worst:.1f} standard errors.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="{bits,overlap,generate}")
    for name, function in (
        ("bits", report_bits),
        ("overlap", report_overlap),
        ("generate", report_generate),
    ):
        command = commands.add_parser(name, help=function.__doc__)
        command.set_defaults(function=function)
        add = command.add_argument
        add("--target", type=pathlib.Path, default=pretrained_folder("target"))
        add("--draft", type=pathlib.Path, default=pretrained_folder("draft"))
        add("--heldout", type=pathlib.Path, default=HELDOUT, help="archive of held-out files")
        add("--batch", type=int, default=4 if name == "bits" else 32)
        if name == "bits":
            add("--length", type=int, default=1024, help="tokens per window")
            continue
        add("--head", type=pathlib.Path, help="folder of a head that drafts in the draft's place")
        add("--temperatures", type=float, nargs="+", default=[0.25, 0.5, 0.7, 1.0, 1.5])
        add("--files", type=int, help="default: all that are long enough")
        add("--context", type=int, default=128, help="tokens before the first position")
        add("--positions", type=int, default=128, help="of each file")
        if name == "generate":
            add("--num-speculative-tokens", type=int, default=4)
            add("--seed", type=int, default=0)
    args = parser.parse_args()
    pair = read_pair(args)
    if getattr(args, "head", None):
        pair = pair._replace(draft=first_drafts(pair.target, args.head))
    args.function(pair, args)


if __name__ == "__main__":
    main()
