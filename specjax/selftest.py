"""Compares specjax on this machine with what it promises: `python -m specjax.selftest`.

Each kind of request has the same two target rows and a bonus row, and a draft of two tokens. All
outcomes of a step are enumerated in float64: which tokens are emitted, and how many. Then a batch
that mixes all kinds is verified once by each exact rule, and the outcomes are counted. z is the
chi-square statistic of the counts as a normal deviate; above 5 it is a fault. 40,000 steps of a
kind show an acceptance ratio that is 5 % too large at z = 8; the 4,000 of `--quick` show a residual
that is the target's own row.

After that the implementations and the devices verify one batch, and have to agree token by token.
jax and numpy are all that it needs.
"""

import argparse
import importlib.metadata
import itertools
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

import specjax

_Array: TypeAlias = np.ndarray
_NUM_TOKENS, _VOCAB_SIZE = 2, 5
_MAX_Z = 5.0
_NUM_SAMPLES, _NUM_QUICK_SAMPLES = 40_000, 4_000
_RULES = {
    "standard": specjax.rules.standard(),
    "block": specjax.rules.block(),
    "coupled": specjax.rules.coupled(),
}


class _Kind(NamedTuple):
    """How the requests of a kind draft and sample."""

    temperature: float = 1.0
    draft_temperature: float = 1.0
    top_p: float = 1.0
    num_tokens: int = _NUM_TOKENS


_KINDS = {
    "sampled": _Kind(),
    "sampled, T = 0.7, of drafts 1.3": _Kind(0.7, 1.3),
    "sampled, top-p 0.8": _Kind(top_p=0.8),
    "one-hot (argmax)": _Kind(draft_temperature=0.0),
    "greedy target, sampled drafts": _Kind(temperature=0.0),
    "one drafted token of two": _Kind(num_tokens=1),
    "inactive": _Kind(num_tokens=-1),
}


class _Batch(NamedTuple):
    """Arguments of a verification."""

    draft: specjax.Draft
    target_logits: jax.Array
    keys: jax.Array
    positions: jax.Array
    temperature: jax.Array
    cutoff: jax.Array


class _Finding(NamedTuple):
    """A line of the table: what was compared, in how many samples, and by how much it differs."""

    name: str
    num_samples: int
    difference: str
    is_fault: bool


# Enumeration, in float64 -------------------------------------------------------------------------


def _probs(logits: _Array, temperature: float, top_p: float) -> _Array:
    """Returns the distribution that a request samples from; the argmax at temperature 0."""
    logits = logits.astype(np.float64)
    if temperature == 0:
        return np.eye(logits.size)[logits.argmax()]
    p = np.exp((logits - logits.max()) / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    is_cut = np.cumsum(p[order]) - p[order] >= top_p
    p[order[is_cut]] = 0
    return p / p.sum()


def _stops(rule: str, x: Sequence[int], p: _Array, q: _Array) -> Iterator[tuple[float, _Array]]:
    """Yields, for each number of accepted tokens, its probability and the next token's weights."""
    n = len(x)
    if rule == "block":
        yield from _block_stops(x, p, q)
        return
    rest = 1.0
    for i, token in enumerate(x):
        accept = p[i, token] if rule == "coupled" else min(1.0, p[i, token] / q[i, token])
        other = np.where(np.arange(p.shape[1]) == token, 0.0, p[i])
        yield rest * (1 - accept), other if rule == "coupled" else np.maximum(p[i] - q[i], 0)
        rest *= accept
    yield rest, p[n]


def _block_stops(x: Sequence[int], p: _Array, q: _Array) -> Iterator[tuple[float, _Array]]:
    r"""Yields the stops of block verification (Sun et al., 2024, arXiv:2403.10444).

    .. math:: \rho_0 = 1, \quad \rho_i = \min(\rho_{i-1} p_i(x_i) / q_i(x_i), 1), \quad
      m_i = \sum_v \max(\rho_i p_{i+1}(v) - q_{i+1}(v), 0), \quad
      h_i = m_i / (m_i + 1 - \rho_i), \quad h_n = \rho_n

    The largest i whose uniform is at most :math:`h_i` is the number of accepted tokens.
    """
    n, rho = len(x), [1.0]
    for i, token in enumerate(x):
        rho.append(min(rho[-1] * p[i, token] / q[i, token], 1.0))
    weights = [np.maximum(rho[i] * p[i] - q[i], 0) for i in range(n)] + [p[n]]
    mass = [w.sum() for w in weights]
    h = [1.0] + [mass[i] / (mass[i] + 1 - rho[i]) if rho[i] else 0.0 for i in range(1, n)]
    h = [*h, rho[n]] if n else [1.0]
    for i in range(n + 1):
        yield h[i] * math.prod(1 - later for later in h[i + 1 :]), weights[i]


def _outcomes(rule: str, kind: _Kind, target: _Array, draft: _Array) -> _Array:
    """Returns the probability of each step, by its tokens; the last index of an axis is padding."""
    size = target.shape[1]
    outcomes = np.zeros((size + 1,) * len(target))
    n = kind.num_tokens
    if n < 0:
        outcomes[(size,) * len(target)] = 1
        return outcomes
    p = np.stack([_probs(row, kind.temperature, kind.top_p) for row in target[: n + 1]])
    q = np.stack([_probs(row, kind.draft_temperature, kind.top_p) for row in draft[:n]])
    for x in itertools.product(range(size), repeat=n):
        drawn = math.prod(q[range(n), x])
        if drawn == 0:
            continue
        for num_accepted, (mass, weights) in enumerate(_stops(rule, x, p, q)):
            if mass > 0:
                padding = (size,) * (len(target) - num_accepted - 1)
                at = (*x[:num_accepted], slice(size), *padding)
                outcomes[at] += drawn * mass * weights / weights.sum()
    return outcomes


def _difference(counts: _Array, probs: _Array) -> tuple[float, float]:
    """Returns the total variation of counts from probabilities, and z; inf for an impossible one.

    z is the chi-square statistic by Wilson and Hilferty's cube root. Outcomes that fewer than five
    samples are expected of count as one.
    """
    counts, probs = counts.ravel(), probs.ravel()
    expected = counts.sum() * probs
    variation = 0.5 * float(np.abs(counts / counts.sum() - probs).sum())
    if counts[probs == 0].any():
        return variation, math.inf
    is_rare = expected < 5
    cells = [(c, e) for c, e in zip(counts[~is_rare], expected[~is_rare], strict=True)]
    if expected[is_rare].sum() >= 5:
        cells.append((counts[is_rare].sum(), expected[is_rare].sum()))
    if len(cells) < 2:
        return variation, 0.0
    spread = 2 / (9 * (len(cells) - 1))
    chi_square = sum((c - e) ** 2 / e for c, e in cells)
    return variation, ((chi_square / (len(cells) - 1)) ** (1 / 3) - 1 + spread) / spread**0.5


# Samples -----------------------------------------------------------------------------------------


def _make_rows(seed: int, vocab_size: int, num_tokens: int) -> tuple[_Array, _Array]:
    """Returns target rows [K + 1, V] and draft rows [K, V] that are near them."""
    rng = np.random.default_rng(seed)
    target = rng.normal(size=(num_tokens + 1, vocab_size))
    draft = target[:num_tokens] + rng.normal(size=(num_tokens, vocab_size))
    return target.astype(np.float32), draft.astype(np.float32)


def _make_batch(target: _Array, draft: _Array, each: int, options: specjax.Options) -> _Batch:
    """Returns `each` requests of every kind, the kinds in turn, with drafts of the rows."""
    kinds = list(_KINDS.values())
    kind, k = np.tile(np.arange(len(kinds)), each), len(draft)
    size = len(kind)
    temperature, draft_temperature, top_p = (
        jnp.array([one[field] for one in kinds], jnp.float32) for field in range(3)
    )
    # A key for a hundred places of a text each: neither keys nor positions may repeat a draw.
    keys = jax.vmap(lambda i: jax.random.key(i, impl="threefry2x32"))(jnp.arange(size) // 100)
    positions = jnp.arange(size, dtype=jnp.int32) % 100 * (k + 1)

    def cutoffs(rows: _Array, temperature: jax.Array) -> jax.Array:
        shape = (len(kinds), *rows.shape)
        found = specjax.logit_cutoff(
            jnp.broadcast_to(rows, shape),
            temperature=temperature,
            top_p=top_p,
            implementation=options.implementation,
        )
        return found[kind]

    cutoff, draft_cutoff = cutoffs(target, temperature), cutoffs(draft, draft_temperature)
    logits = jnp.broadcast_to(draft, (size, *draft.shape))
    samples = [
        specjax.gumbel_sample(
            logits[:, i],
            keys=keys,
            positions=positions + i,
            stream=specjax.Stream.draft(i),
            temperature=draft_temperature[kind],
            cutoff=draft_cutoff[:, i],
            options=options,
        )
        for i in range(k)
    ]
    token_ids, logprobs, logsumexp = (jnp.stack(one, axis=1) for one in zip(*samples, strict=True))
    num_tokens = jnp.array([min(one.num_tokens, k) for one in kinds], jnp.int32)[kind]
    drafts = specjax.Draft(
        token_ids,
        logits,
        temperature=draft_temperature[kind],
        logprobs=logprobs,
        logsumexp=logsumexp,
        cutoff=draft_cutoff,
        num_tokens=num_tokens,
    )
    rows = jnp.broadcast_to(target, (size, *target.shape))
    return _Batch(drafts, rows, keys, positions, temperature[kind], cutoff)


def _verify(batch: _Batch, rule: str, options: specjax.Options) -> specjax.Verification:
    """Returns a step of the batch by a rule of this name."""
    return specjax.rejection_sample(
        batch.draft,
        batch.target_logits,
        keys=batch.keys,
        positions=batch.positions,
        temperature=batch.temperature,
        cutoff=batch.cutoff,
        rule=_RULES[rule],
        options=options,
    )


def _count(token_ids: jax.Array, vocab_size: int) -> _Array:
    """Returns how often each row of tokens [N, n] came, an axis per token; padding is the last."""
    tokens = np.asarray(token_ids)
    shape = (vocab_size + 1,) * tokens.shape[1]
    index = np.ravel_multi_index(tuple(np.where(tokens < 0, vocab_size, tokens).T), shape)
    return np.bincount(index, minlength=math.prod(shape)).reshape(shape)


def _compare_distributions(each: int, rules: Sequence[str], seed: int) -> Iterator[_Finding]:
    """Yields a finding for each kind of request: of drafted tokens, then of steps by each rule."""
    target, draft = _make_rows(seed, _VOCAB_SIZE, _NUM_TOKENS)
    options = specjax.Options()
    batch = _make_batch(target, draft, each, options)

    def finding(name: str, tokens: jax.Array, probs: _Array) -> _Finding:
        variation, z = _difference(_count(tokens, _VOCAB_SIZE), probs)
        return _Finding(name, len(tokens), f"TV {variation:.5f}  z {z:+6.2f}", not z <= _MAX_Z)

    for number, (name, kind) in enumerate(_KINDS.items()):
        if kind.num_tokens == _NUM_TOKENS:
            q = [_probs(row, kind.draft_temperature, kind.top_p) for row in draft]
            drawn = np.pad(np.multiply.outer(*q), (0, 1))
            tokens = batch.draft.token_ids[number :: len(_KINDS)]
            yield finding(f"gumbel_sample: {name}", tokens, drawn)
    for rule in rules:
        tokens = _verify(batch, rule, options).token_ids
        for number, (name, kind) in enumerate(_KINDS.items()):
            probs = _outcomes(rule, kind, target, draft)
            yield finding(f"{rule}: {name}", tokens[number :: len(_KINDS)], probs)


# Implementations and devices ---------------------------------------------------------------------


def _compare_steps(
    name: str, first: specjax.Verification, second: specjax.Verification
) -> _Finding:
    """Returns whether the tokens of two runs are equal, and their log-probabilities to 1e-3.

    One request in a hundred may differ: in a near-tie the last bits of a float decide.
    """
    a, b = jax.device_get((first, second))
    is_same = (a.token_ids == b.token_ids).all(axis=1)
    error = float(np.abs(a.logprobs - b.logprobs)[is_same].max(initial=0.0))
    num_different = int((~is_same).sum())
    is_fault = num_different > len(is_same) // 100 or not error <= 1e-3
    difference = f"{num_different} differ, log-probabilities by {error:.0e}"
    return _Finding(name, len(is_same), difference, is_fault)


def _compare_implementations(seed: int) -> Iterator[_Finding]:
    """Yields a finding for each implementation and device: the steps of plain JAX and of others."""
    target, draft = _make_rows(seed, 300, 3)
    plain = specjax.Options(implementation="xla")
    batch = _make_batch(target, draft, 6, plain)
    has_gpu = jax.default_backend() == "gpu"
    for rule in _RULES:
        first = _verify(batch, rule, plain)
        for implementation in ("triton", "interpret") if has_gpu else ("interpret",):
            options = specjax.Options(implementation=implementation)
            name = f"{rule}: xla and {implementation}"
            yield _compare_steps(name, first, _verify(batch, rule, options))
    first = _verify(batch, "standard", specjax.Options())
    for device in jax.local_devices()[1:]:
        moved = _verify(jax.device_put(batch, device), "standard", specjax.Options())
        yield _compare_steps(f"standard: the first device and {device}", first, moved)


# The command -------------------------------------------------------------------------------------


def _describe() -> str:
    """Returns versions and devices, as lines."""
    devices = ", ".join(f"{one.id}: {one.device_kind}" for one in jax.local_devices())
    jaxlib = importlib.metadata.version("jaxlib")
    versions = (
        f"specjax {specjax.__version__}, jax {jax.__version__}, jaxlib {jaxlib}, "
        f"numpy {np.__version__}, Python {platform.python_version()}"
    )
    return f"{versions}\n{jax.default_backend()} ({devices}), {platform.platform()}"


def _report(checks: Callable[[], Iterator[_Finding]]) -> Iterator[bool]:
    """Prints findings as they come, and yields whether each is a fault; an exception is one."""
    try:
        for one in checks():
            verdict = "FAULT" if one.is_fault else "ok"
            line = f"{verdict:6}{one.name:52}{one.num_samples:>8}  {one.difference}"
            print(line.rstrip(), flush=True)
            yield one.is_fault
    except Exception as error:
        print(f"FAULT  {type(error).__name__}: {error}", flush=True)
        yield True


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparisons and prints a table.

    Args:
      argv: arguments of the command; None takes those of the process.

    Returns:
      1 if anything differs, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m specjax.selftest",
        description="Compares samples with enumerated distributions, and implementations.",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a tenth of the samples, by the standard rule; compares no implementations",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the rows of logits; default 0")
    args = parser.parse_args(argv)
    if args.seed < 0:
        parser.error(f"--seed is {args.seed}; it needs to be at least 0.")
    each = _NUM_QUICK_SAMPLES if args.quick else _NUM_SAMPLES
    rules = ["standard"] if args.quick else list(_RULES)
    start = time.perf_counter()
    print(_describe())
    print(f"\n{'':6}{'comparison':52}{'samples':>8}  difference (z: at most {_MAX_Z:g})")
    faults = list(_report(lambda: _compare_distributions(each, rules, args.seed)))
    if not args.quick:
        faults += _report(lambda: _compare_implementations(args.seed))
    seconds = time.perf_counter() - start
    print(f"\n{len(faults)} comparisons, {sum(faults)} faults, {seconds:.0f} s")
    return int(any(faults))


if __name__ == "__main__":
    sys.exit(main())
