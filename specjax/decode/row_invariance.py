"""`check_row_invariance`: whether a model's rows depend on other rows of a batch or a chunk.

    one text, alone, a token at a time        -> reference rows, bit by bit
    the same text at a place in a batch of B,
    in chunks of C, among other texts         -> the rows that differ, and the first of them

A row is the model's output for one token: the states of its taps, its hidden state, its logits.
"""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checks import check_count, check_model_logits, check_type
from specjax.decode.capacity import DEFAULT_CAPACITY
from specjax.decode.request_batch import check_text_ids, parse_texts
from specjax.decode.score import new_cache
from specjax.decode.target_step import apply_model, vocabulary_size
from specjax.types import Model

# Tokens of the text that is read if none is given.
_NUM_TOKENS = 64
_SEED = 0


class RowCase(NamedTuple):
    """Compares the rows of a text in a batch with those of the text alone, read token by token.

    Attributes:
      batch_size: B, texts that were read together.
      chunk_size: C, tokens of each that were read at once.
      place: index of the text among the B.
      group: number of the case's bits: cases with equal bits in all rows share it, and 0 is the
        reference's.
      num_rows: number of rows that differ in a bit.
      position: the first token whose row differs; None if no row does.
      stage: first output that differs at that position, "tap 8", "hidden" or "logits"; "" if none.
      max_difference: largest difference of a logit.
      num_argmax: number of rows with another likeliest token.
    """

    batch_size: int
    chunk_size: int
    place: int
    group: int
    num_rows: int
    position: int | None
    stage: str
    max_difference: float
    num_argmax: int


class RowInvariance(NamedTuple):
    """The cases that `check_row_invariance` compared; as text, a table of them.

    Attributes:
      num_tokens: L, rows of the text.
      cases: a `RowCase` for each batch size, chunk size and place, in this order.
    """

    num_tokens: int
    cases: tuple[RowCase, ...]

    @property
    def is_invariant(self) -> bool:
        """Whether no bit of a row differs in any case."""
        return self.first is None

    @property
    def first(self) -> RowCase | None:
        """The first case with a row that differs, None if there is none."""
        return next((case for case in self.cases if case.num_rows), None)

    def __str__(self) -> str:
        """Returns a table: a line for each case."""
        lines = ["batch  chunk  place  group  rows differ  first at  in          largest  argmax"]
        for case in self.cases:
            where = "-" if case.position is None else case.position
            sizes = "  ".join(f"{number:5}" for number in case[:4])
            rows = f"{case.num_rows} of {self.num_tokens}"
            lines.append(
                f"{sizes}  {rows:>11}  {where:>8}  {case.stage or '-':<8}  "
                f"{case.max_difference:9.2g}  {case.num_argmax:6}"
            )
        return "\n".join(lines)


def check_row_invariance(
    model: Model,
    text: Any = None,
    *,
    batch_sizes: Sequence[int] = (1, 2, 8, 32),
    chunk_sizes: Sequence[int] = (1, 4, 16, 64),
    taps: Sequence[int] = (),
) -> RowInvariance:
    """Compares the rows of a text, bit by bit, in batches and chunks of several sizes.

    The reference is the text alone, read a token at a time like in plain decoding. A speculative
    step reads chunks of K + 1 tokens, a prefill longer ones. If rows are equal in all cases, the
    model gives the same greedy and coupled texts with any drafter or none, next to any other
    requests. Texts of other models part at near-ties.

    Each pair of a batch size and a chunk size is a program to compile. The rows are of these
    programs: elsewhere XLA may fuse a model's operations with others, and round otherwise.

    Args:
      model: a `Model`.
      text: a list of L ids. None is 64 random ones, or as many as the model's positions take.
      batch_sizes: numbers of texts that are read together, each B >= 1. The text is read at the
        first, the middle and the last place, among random texts of 1 to L tokens.
      chunk_sizes: tokens that are read at once, each C >= 1.
      taps: layers whose states are compared, too, for a model with `apply_with_taps`. They show
        the layer after which a row first differs.

    Returns:
      `RowInvariance`. `print` shows it as a table.

    Raises:
      ValueError: for an empty text, ids outside [0, V), a text that the model's positions do not
        hold, sizes below 1 and taps of a model without them.

    Example:
      >>> from specjax.markov_chain import markov_chain
      >>> found = specjax.check_row_invariance(
      ...     markov_chain([[0.1, 0.9], [0.8, 0.2]]), batch_sizes=(1, 2), chunk_sizes=(4,))
      >>> found.is_invariant, len(found.cases)
      (True, 3)
      >>> print(found)
      batch  chunk  place  group  rows differ  first at  in          largest  argmax
          1      4      0      0      0 of 64         -  -                 0       0
          2      4      0      0      0 of 64         -  -                 0       0
          2      4      1      0      0 of 64         -  -                 0       0

    References:
      He et al., Defeating nondeterminism in LLM inference, 2025.
    """
    check_type("model", model, Model, "a specjax.Model")
    sizes = {
        name: [check_count(name, size, 1, "a size that is compared") for size in given]
        for name, given in (("batch_sizes", batch_sizes), ("chunk_sizes", chunk_sizes))
    }
    if taps and model.apply_with_taps is None:
        raise ValueError(f"taps is {list(taps)}, and the model has no apply_with_taps.")
    stages = (*(f"tap {tap}" for tap in taps), "hidden", "logits")
    ids = _check_text(model, text)
    run = functools.partial(_read_text, model, taps=tuple(taps))
    reference = run(ids[None], np.array([[ids.size]]), 1, 0)
    groups, cases = {_digest(reference): 0}, []
    for batch_size in sizes["batch_sizes"]:
        for chunk_size in sizes["chunk_sizes"]:
            for place in sorted({0, batch_size // 2, batch_size - 1}):
                texts = _fill_batch(ids, batch_size, reference[-1].shape[-1], place)
                rows = run(*texts, chunk_size, place)
                group = groups.setdefault(_digest(rows), len(groups))
                differences = _compare(reference, rows, stages)
                cases.append(RowCase(batch_size, chunk_size, place, group, *differences))
    return RowInvariance(ids.size, tuple(cases))


def _check_text(model: Model, text: Any) -> np.ndarray:
    """Returns the text i32[L], random if it is None, or refuses it."""
    limit = model.max_length
    vocab_size = vocabulary_size(model, 1, 1, DEFAULT_CAPACITY if limit is None else limit)
    if text is None:
        num_tokens = _NUM_TOKENS if limit is None else min(_NUM_TOKENS, limit)
        return np.random.default_rng(_SEED).integers(0, vocab_size, num_tokens).astype(np.int32)
    (ids,) = parse_texts("text", [text])
    if limit is not None and ids.size > limit:
        raise ValueError(f"text has {ids.size} tokens, and the model takes {limit}.")
    check_text_ids("text", ids, vocab_size)
    return ids


def _fill_batch(
    ids: np.ndarray, batch_size: int, vocab_size: int, place: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns texts i32[B, L], `ids` among random ones, and their lengths i32[B, 1] in [1, L]."""
    random = np.random.default_rng(_SEED + 1)
    texts = random.integers(0, vocab_size, (batch_size, ids.size)).astype(np.int32)
    lengths = random.integers(1, ids.size + 1, (batch_size, 1))
    texts[place], lengths[place] = ids, ids.size
    return texts, lengths


def _read_text(
    model: Model,
    texts: np.ndarray,
    lengths: np.ndarray,
    chunk_size: int,
    place: int,
    taps: tuple[int, ...],
) -> list[np.ndarray]:
    """Returns the rows [L, ...] of the text in one place: of each tap, the hidden states, logits.

    Args:
      model: as in `check_row_invariance`.
      texts: i32[B, L].
      lengths: i32[B, 1].
      chunk_size: C.
      place: of the text.
      taps: as in `check_row_invariance`.
    """
    size, num_tokens = texts.shape
    padded = np.pad(texts, ((0, 0), (0, -num_tokens % chunk_size)))
    cache = new_cache(model, size=size, max_length=num_tokens)
    chunks = []
    for start in range(0, padded.shape[1], chunk_size):
        index = np.arange(start, start + chunk_size, dtype=np.int32)[None]
        positions = np.where(index < lengths, index, np.int32(-1))
        chunk = padded[:, start : start + chunk_size]
        cache, rows = _read_chunk(model, cache, chunk, positions, np.int32(place), taps=taps)
        chunks.append(jax.device_get(rows))
    return [np.concatenate(rows)[:num_tokens] for rows in zip(*chunks, strict=True)]


@functools.partial(jax.jit, static_argnames="taps", donate_argnames="cache")
def _read_chunk(
    model: Model,
    cache: Any,
    token_ids: jax.Array,
    positions: jax.Array,
    place: jax.Array,
    *,
    taps: tuple[int, ...],
) -> tuple[Any, list[jax.Array]]:
    """Returns the cache after a chunk i32[B, C], and the rows of one text, [C, ...] of each."""
    hidden, features, cache = apply_model(model, token_ids, positions, cache, taps)
    logits = model.logits(model.params, hidden)
    check_model_logits("model.logits", logits, hidden)
    stages = [] if features is None else jnp.split(features, len(taps), axis=-1)
    # XLA could compute the rows of this text alone if it saw that no other is returned.
    rows = jax.lax.optimization_barrier([*stages, hidden, logits])
    return cache, [jax.lax.dynamic_index_in_dim(x, place, keepdims=False) for x in rows]


def _compare(
    reference: list[np.ndarray], rows: list[np.ndarray], stages: tuple[str, ...]
) -> tuple[int, int | None, str, float, int]:
    """Returns the fields of `RowCase` from `num_rows` on."""
    differs = np.array(
        [(_bits(one) != _bits(two)).any(-1) for one, two in zip(reference, rows, strict=True)]
    )
    is_other = differs.any(axis=0)
    if not is_other.any():
        return 0, None, "", 0.0, 0
    position = int(is_other.argmax())
    one, two = (np.asarray(x[-1], np.float32) for x in (reference, rows))
    # Equal infinities, which are masks, differ by NaN.
    gap = np.where(one == two, np.float32(0), np.abs(one - two))
    num_argmax = int((one.argmax(-1) != two.argmax(-1)).sum())
    stage = stages[int(differs[:, position].argmax())]
    return int(is_other.sum()), position, stage, float(gap.max()), num_argmax


def _digest(rows: list[np.ndarray]) -> str:
    """Returns a digest of all bits of some rows."""
    return hashlib.sha256(b"".join(values.tobytes() for values in rows)).hexdigest()


def _bits(values: np.ndarray) -> np.ndarray:
    """Returns numbers as integers of the same bits."""
    return values.view(f"u{values.dtype.itemsize}")
