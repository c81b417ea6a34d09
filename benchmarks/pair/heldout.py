"""The pair that is measured, the text held out from its training, and its logits there."""

import argparse
import json
import pathlib
import tarfile
from collections.abc import Iterable
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
    """[B, L, V]: the logits after each token of whole sequences."""
    size, length = token_ids.shape
    places = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (size, length))
    hidden, _ = model.apply(model.params, token_ids, places, model.init_cache(size, length))
    return model.logits(model.params, hidden).astype(jnp.float32)


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
