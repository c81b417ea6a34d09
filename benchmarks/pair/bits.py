"""Bits per byte: what each model needs for the held-out text, next to `xz -9`."""

import argparse
import lzma
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from benchmarks.pair.heldout import Heldout, Pair, batches, logits_of


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


def report_bits(pair: Pair, args: argparse.Namespace) -> None:
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
