"""keras-hub's `SpeculativeSampler`, by enumeration: calls with functions that return fixed logits.

The sampler drafts by argmax, accepts a token where `uniform * q < p`, and draws the last token by
the argmax of log-weights and Gumbel noise. The uniforms of acceptance are given, so that each
pattern of accepted tokens occurs once. The noise is constant, so that the argument of the argmax
gives the weights. All rows of a batch advance by the fewest accepted tokens among them.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import keras
import keras_hub
import numpy as np
from keras_hub.src.samplers import speculative_sampler

from benchmarks.peers.inputs import ROWS, Array, Kind, Outcomes, Rows, empty_outcomes
from benchmarks.peers.measure import measure

NAME = "keras-hub"
CALL = "samplers.SpeculativeSampler"


def version() -> str:
    backend = keras.backend.backend()
    return f"keras-hub {keras_hub.__version__}, keras {keras.__version__} on {backend}"


class _Found(NamedTuple):
    """A call: tokens of each row, how many are the rows' own drafts, and the last one's weights."""

    tokens: Array
    num_accepted: int
    weights: Array


class _Random:
    """Stands in for `keras.random`: uniforms that accept as told, then constant noise."""

    SeedGenerator = keras.random.SeedGenerator

    def __init__(self, accepts: Array) -> None:
        # Of a uniform u a token is accepted where u q < p: always below 0, never at infinity.
        self.left = [np.where(accepts, -1.0, np.inf)]

    def uniform(self, shape: Any, **_: Any) -> Any:
        value = self.left.pop() if self.left else np.full(shape, 0.5)
        return keras.ops.convert_to_tensor(value, "float32")


class _Ops:
    """`keras.ops`, but for what `argmax` is given with the noise: that is kept."""

    def __init__(self) -> None:
        self.noisy: list[Array] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(keras.ops, name)

    def argmax(self, x: Any, axis: int) -> Any:
        self.noisy.append(np.asarray(keras.ops.convert_to_numpy(x), np.float64))
        return keras.ops.argmax(x, axis=axis)


def call(all_rows: list[Rows], accepts: Array, base: Any, temperature: float) -> _Found:
    """One cycle of the sampler for a batch of rows, in which `accepts` [B, K] are accepted."""
    k, size = all_rows[0].k, all_rows[0].vocab_size
    target, draft = (np.stack([rows[i] for rows in all_rows]) for i in range(2))
    calls = iter(range(k))

    def draft_next(prompt: Any, cache: Any, index: Any) -> Any:
        return keras.ops.convert_to_tensor(draft[:, next(calls)]), None, cache

    def verify_next(prompt: Any, cache: Any, index: Any, num: int) -> Any:
        return keras.ops.convert_to_tensor(target), cache

    sampler = speculative_sampler.SpeculativeSampler(
        num_speculative_tokens=k, base_sampler=base, temperature=temperature
    )
    ops, index = _Ops(), {}

    def run_once(cond: Any, body: Any, loop_vars: Any, **_: Any) -> Any:
        out = body(*loop_vars)
        index["new"] = int(out[3])
        return out

    with (
        mock.patch.object(speculative_sampler, "random", _Random(accepts)),
        mock.patch.object(speculative_sampler, "ops", ops),
        mock.patch.object(sampler, "run_loop", run_once),
    ):
        prompt = keras.ops.full((len(all_rows), k + 2), size, dtype="int32")
        tokens = sampler(None, prompt, index=1, draft_next=draft_next, verify_next=verify_next)
    weights = np.exp(ops.noisy[-1] - ops.noisy[-1].max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return _Found(keras.ops.convert_to_numpy(tokens)[:, 1:], index["new"] - 2, weights)


def acceptances(rows: Rows, temperature: float) -> Array:
    """min(1, p / q) of the argmax drafts [K], as float32 compares them."""
    p, q = (np.exp(x / temperature - _logsumexp(x / temperature)) for x in rows)
    drafted = rows.draft.argmax(axis=1)
    place = np.arange(rows.k)
    return np.minimum(1, p[place, drafted] / q[place, drafted])


def _logsumexp(x: Array) -> Array:
    x = x.astype(np.float64)
    return np.log(np.exp(x).sum(axis=-1, keepdims=True))


def outcomes_of_first(all_rows: list[Rows], base: Any, temperature: float) -> Outcomes:
    """Outcomes of the first row of a batch, over all patterns of acceptance in it."""
    rows, k = all_rows[0], all_rows[0].k
    chances = np.stack([acceptances(each, temperature) for each in all_rows])
    outcomes = empty_outcomes(rows)
    for pattern in itertools.product((False, True), repeat=chances.size):
        accepts = np.array(pattern).reshape(chances.shape)
        mass = math.prod(np.where(accepts, chances, 1 - chances).ravel())
        if mass == 0:
            continue
        found = call(all_rows, accepts, base, temperature)
        kept = tuple(int(token) for token in found.tokens[0, : found.num_accepted])
        padding = (rows.vocab_size,) * (k - found.num_accepted)
        outcomes[(*kept, slice(rows.vocab_size), *padding)] += mass * found.weights[0]
    return outcomes


def greedy_outcomes(rows: Rows) -> Outcomes:
    """The one outcome without a base sampler."""
    found = call([rows], np.ones((1, rows.k), bool), None, 1.0)
    tokens = found.tokens[0, : found.num_accepted + 1]
    outcomes = empty_outcomes(rows)
    outcomes[(*tokens, *(rows.vocab_size,) * (rows.k + 1 - len(tokens)))] = 1
    return outcomes


def other_rows(rows: Rows) -> Rows:
    """A neighbour in the batch: the same draft, and a target that likes its tokens less."""
    target = rows.target.copy()
    for i, token in enumerate(rows.draft.argmax(axis=1)):
        target[i, token] -= 1
    return Rows(target, rows.draft)


def cases() -> Iterator[dict[str, Any]]:
    samplers = keras_hub.samplers
    for size, make in ROWS.items():
        rows = make()
        for case, kind, base, batch in (
            ("argmax", Kind(), samplers.RandomSampler(), [rows]),
            ("argmax, T = 0.7", Kind(0.7), samplers.RandomSampler(), [rows]),
            ("argmax, top-p 0.8", Kind(top_p=0.8), samplers.TopPSampler(p=0.8), [rows]),
            (
                "argmax, batch of two: the first",
                Kind(),
                samplers.RandomSampler(),
                [rows, other_rows(rows)],
            ),
        ):
            name = type(base).__name__
            outcomes = outcomes_of_first(batch, base, kind.temperature)
            call_of = f"{CALL}(base_sampler={name})"
            yield measure(case, call_of, outcomes, rows, kind, size=size)
        yield measure("greedy", CALL, greedy_outcomes(rows), rows, Kind(0.0), size=size)
