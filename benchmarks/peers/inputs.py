"""Rows of logits, kinds of request, and the distribution that each asks for; NumPy alone."""

import itertools
import math
from typing import NamedTuple

import numpy as np

Array = np.ndarray
# A step's outcomes: the last index of an axis says that there is no such token.
Outcomes = np.ndarray


class Rows(NamedTuple):
    """Logits of one step: `target` f32[K + 1, V], `draft` f32[K, V]."""

    target: Array
    draft: Array

    @property
    def k(self) -> int:
        return len(self.draft)

    @property
    def vocab_size(self) -> int:
        return self.draft.shape[1]

    def first(self, num_tokens: int) -> "Rows":
        """The rows of a request that drafts fewer tokens."""
        return Rows(self.target[: num_tokens + 1], self.draft[:num_tokens])


class Kind(NamedTuple):
    """How a request samples; `num_tokens` None is K."""

    temperature: float = 1.0
    top_p: float = 1.0
    num_tokens: int | None = None


def usual_rows() -> Rows:
    """V = 8, K = 2: a draft whose sum min(p, q) is about 0.65."""
    rng = np.random.default_rng(41)
    target = 1.2 * rng.normal(size=(3, 8))
    draft = target[:2] + rng.normal(size=(2, 8))
    return Rows(target.astype(np.float32), draft.astype(np.float32))


def smallest_rows() -> Rows:
    """V = 2, K = 1: p = (1/2, 1/2), q = (3/4, 1/4); the bonus token is of (3/4, 1/4), too."""
    p, q = np.array([[0.5, 0.5], [0.75, 0.25]]), np.array([[0.75, 0.25]])
    return Rows(np.log(p).astype(np.float32), np.log(q).astype(np.float32))


def smallest_rows_of_top_p() -> Rows:
    """V = 2, K = 1: p = (3/4, 1/4); top-p 0.8 keeps one token at T = 0.7, and both at T = 1."""
    p, q = np.array([[0.75, 0.25], [0.75, 0.25]]), np.array([[0.75, 0.25]])
    return Rows(np.log(p).astype(np.float32), np.log(q).astype(np.float32))


ROWS = {"usual": usual_rows, "smallest": smallest_rows}
# The requests of a batch that mixes kinds. The last has a neighbour's rows next to its own.
MIXED = {
    "T = 1": Kind(),
    "T = 0.7": Kind(0.7),
    "greedy": Kind(0.0),
    "one drafted token": Kind(num_tokens=1),
    "no drafted token": Kind(num_tokens=0),
    "top-p 0.8": Kind(top_p=0.8),
}


def probs(logits: Array, kind: Kind) -> Array:
    """The distribution that a request asks for, in float64: temperature first, then top-p."""
    logits = np.asarray(logits, np.float64)
    if kind.temperature == 0:
        return np.eye(logits.size)[logits.argmax()]
    p = np.exp((logits - logits.max()) / kind.temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    is_cut = np.cumsum(p[order]) - p[order] >= kind.top_p
    p[order[is_cut]] = 0
    return p / p.sum()


def target_probs(rows: Rows, kind: Kind) -> Array:
    """[K + 1, V], or fewer rows for a request that drafts fewer tokens."""
    k = rows.k if kind.num_tokens is None else kind.num_tokens
    return np.stack([probs(row, kind) for row in rows.target[: k + 1]])


def drafts_of(q: Array) -> list[tuple[tuple[int, ...], float]]:
    """Every draft that rows q [K, V] may give, with its probability."""
    found = []
    for tokens in itertools.product(range(q.shape[1]), repeat=len(q)):
        mass = math.prod(q[i, token] for i, token in enumerate(tokens))
        if mass > 0:
            found.append((tokens, mass))
    return found


def empty_outcomes(rows: Rows) -> Outcomes:
    """No outcome yet, of a step of at most K + 1 tokens."""
    return np.zeros((rows.vocab_size + 1,) * (rows.k + 1))


def count_outcomes(tokens: Array, vocab_size: int) -> Outcomes:
    """Counts of steps [N, K + 1]; a negative token is none."""
    shape = (vocab_size + 1,) * tokens.shape[1]
    index = np.ravel_multi_index(tuple(np.where(tokens < 0, vocab_size, tokens).T), shape)
    return np.bincount(index, minlength=math.prod(shape)).reshape(shape).astype(np.float64)


def text_distribution(outcomes: Outcomes, p: Array, power: int = 1) -> Array:
    """The joint distribution of the next tokens, one for each row of p [n, V].

    A step emits some of them; those after it follow p, as the target alone would draw them. With
    `power` 2 the mean square of a step's share in each text, which says how much samples spread.
    """
    size = p.shape[1]
    joint = np.zeros((size,) * len(p))
    for step in np.argwhere(outcomes > 0):
        tokens = [int(token) for token in step if token < size][: len(p)]
        rows = [np.eye(size)[token] for token in tokens] + list(p[len(tokens) :])
        joint += outcomes[tuple(step)] * outer(rows) ** power
    return joint / outcomes.sum()


def outer(rows: list[Array]) -> Array:
    """The joint distribution of independent rows."""
    joint = np.ones(())
    for row in rows:
        joint = np.multiply.outer(joint, row)
    return joint


def total_variation(a: Array, b: Array) -> float:
    return 0.5 * float(np.abs(a - b).sum())


def variation_by_chance(p: Array, num_samples: int, mean_square: Array | None = None) -> float:
    """The mean total variation of `num_samples` draws: 1/2 sum sqrt(2 variance / pi N).

    A draw is one token of p, or has shares of p whose `mean_square` is given.
    """
    variance = (p if mean_square is None else mean_square) - p**2
    return 0.5 * float(np.sqrt(2 * np.maximum(variance, 0) / (math.pi * num_samples)).sum())
