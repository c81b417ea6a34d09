"""Measures a pair on held-out text: bits per byte, sum min(p, q), acceptance of `generate`.

python benchmarks/acceptance.py bits
python benchmarks/acceptance.py overlap
python benchmarks/acceptance.py generate
"""

import argparse
import functools
import json
import lzma
import math
import pathlib
import tarfile
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

import specjax
from specjax.models import load, load_tokenizer, pretrained_folder

HELDOUT = pretrained_folder("target").parent / "data" / "heldout.tar.xz"


class Heldout(NamedTuple):
    """The files and their tokens; `start` is the token a text begins with, if there is one."""

    texts: list[bytes]
    rows: list[np.ndarray]


def read_heldout(archive: pathlib.Path, folder: pathlib.Path, start: int | None) -> Heldout:
    """The held-out files of an archive, in the order of its record, and their tokens."""
    with tarfile.open(archive) as files:
        contents = {entry.name: files.extractfile(entry).read() for entry in files}
    record = json.loads(contents.pop("record.json"))
    names = [file["path"] for file in record["files"] if file["split"] == "heldout"]
    texts = [contents[name] for name in names]
    tokenizer = load_tokenizer(folder)
    edge = [] if start is None else [start]
    encodings = tokenizer.encode_batch([text.decode() for text in texts])
    rows = [np.array([*edge, *encoding.ids, *edge], np.int32) for encoding in encodings]
    return Heldout(texts, rows)


def batches(items: Any, size: int, what: str) -> Iterable[tuple[np.ndarray, int]]:
    """Pieces of `size` along the leading axis, the last filled up, and how many of each count."""
    starts = range(0, len(items), size)
    for start in track(starts, what, console=Console(stderr=True), transient=True):
        piece = items[start : start + size]
        missing = size - len(piece)
        yield np.concatenate([piece, np.repeat(piece[:1], missing, axis=0)]), size - missing


def logits_of(model: specjax.Model, token_ids: jax.Array) -> jax.Array:
    """[B, L, V]: the logits behind each token of whole sequences."""
    size, length = token_ids.shape
    places = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (size, length))
    hidden, _ = model.apply(model.params, token_ids, places, model.init_cache(size, length))
    return model.logits(model.params, hidden).astype(jnp.float32)


# Bits per byte -----------------------------------------------------------------------------------


def windows(rows: Sequence[np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Windows that overlap by a quarter, i32[N, length + 1], and which of ids[:, 1:] each judges.

    Every token but a text's first is judged once, with at least a quarter of a window of
    context or all there is.
    """
    overlap = length // 4
    ids, judged = [], []
    for row in rows:
        for start in range(0, max(1, len(row) - 1 - overlap), length - overlap):
            piece = row[start : start + length + 1]
            mask = np.arange(length) < len(piece) - 1
            if start:
                mask &= np.arange(length) >= overlap
            ids.append(np.pad(piece, (0, length + 1 - len(piece))))
            judged.append(mask)
    return np.stack(ids), np.stack(judged)


@jax.jit
def _surprise(model: specjax.Model, ids: jax.Array, judged: jax.Array) -> jax.Array:
    logits = logits_of(model, ids[:, :-1])
    chosen = jnp.take_along_axis(logits, ids[:, 1:, None], axis=-1)[..., 0]
    surprise = jax.nn.logsumexp(logits, axis=-1) - chosen
    return jnp.sum(jnp.where(judged, surprise, 0.0), axis=1)


def bits_per_byte(
    model: specjax.Model, heldout: Heldout, length: int, batch: int, what: str
) -> float:
    """Bits the model needs for the tokens of the files, over their bytes."""
    ids, judged = windows(heldout.rows, length)
    both = np.concatenate([ids, judged], axis=1)
    nats = 0.0
    for piece, count in batches(both, batch, what):
        surprise = _surprise(model, piece[:, : length + 1], piece[:, length + 1 :] > 0)
        nats += float(np.asarray(surprise, np.float64)[:count].sum())
    return nats / math.log(2) / sum(map(len, heldout.texts))


def report_bits(pair: "Pair", args: argparse.Namespace) -> None:
    """Held-out bits per byte of both models, and of `xz -9` on the concatenated files."""
    length = min(args.length, *pair.longest)
    size = sum(map(len, pair.heldout.texts))
    packed = len(lzma.compress(b"".join(pair.heldout.texts), preset=9))
    measured = {
        name: bits_per_byte(model, pair.heldout, length, args.batch, name)
        for name, model in (("target", pair.target), ("draft", pair.draft))
    }
    excess = 100 * (measured["draft"] / measured["target"] - 1)
    print(f"{len(pair.heldout.texts)} held-out files, {size} bytes:\n")
    print("| | bits per byte |\n|---|---|")
    print(f"| target | {measured['target']:.3f} |")
    print(f"| draft | {measured['draft']:.3f} ({excess:+.0f} %) |")
    print(f"| `xz -9` on their concatenation | {8 * packed / size:.3f} |")


# Acceptance --------------------------------------------------------------------------------------


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


def contexts(pair: "Pair", args: argparse.Namespace) -> np.ndarray:
    """i32[F, context + positions]: the beginnings of the files that are long enough."""
    length = args.context + args.positions
    rows = [row[:length] for row in pair.heldout.rows if len(row) >= length]
    return np.stack(rows if args.files is None else rows[: args.files])


def report_overlap(pair: "Pair", args: argparse.Namespace) -> None:
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

    A step begins behind the token that ended the one before, recovered or bonus; where a single
    place is left nothing is drafted.
    """
    origins, lengths = np.asarray(generation.origins), np.asarray(generation.lengths)
    ends = (origins == specjax.Origin.RECOVERED) | (origins == specjax.Origin.BONUS)
    starts = np.pad(ends[:, :-1], ((0, 0), (1, 0)))
    place = np.arange(origins.shape[1])[None]
    return starts & (place < np.minimum(lengths, limit - 1)[:, None])


def count(
    pair: "Pair", prompts: np.ndarray, keys: jax.Array, temperature: float, args: argparse.Namespace
) -> Counted:
    """What `generate` counts on a batch of prompts, and what it should count."""
    size, context = prompts.shape
    generation = specjax.generate(
        pair.target,
        specjax.model_drafter(pair.draft),
        prompts,
        np.full(size, context, np.int32),
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


def report_generate(pair: "Pair", args: argparse.Namespace) -> None:
    """Acceptance as counted by `generate` beside sum min(p, q) at the same places."""
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


# The command line --------------------------------------------------------------------------------


class Pair(NamedTuple):
    """The models, the most tokens each was trained for, and the text."""

    target: specjax.Model
    draft: specjax.Model
    longest: tuple[int, int]
    heldout: Heldout


def read_pair(args: argparse.Namespace) -> Pair:
    """What the folders and the archive hold."""
    target, config = load(args.target)
    draft, draft_config = load(args.draft)
    start = config.bos_token_id
    heldout = read_heldout(args.heldout, args.target, start)
    longest = (config.max_position_embeddings, draft_config.max_position_embeddings)
    return Pair(target, draft, longest, heldout)


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
        add("--temperatures", type=float, nargs="+", default=[0.25, 0.5, 0.7, 1.0, 1.5])
        add("--files", type=int, help="default: all that are long enough")
        add("--context", type=int, default=128, help="tokens before the first position")
        add("--positions", type=int, default=128, help="of each file")
        if name == "generate":
            add("--num-speculative-tokens", type=int, default=4)
            add("--seed", type=int, default=0)
    args = parser.parse_args()
    args.function(read_pair(args), args)


if __name__ == "__main__":
    main()
