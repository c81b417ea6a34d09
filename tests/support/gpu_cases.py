"""Large verification cases made on the device, and the rows in which two implementations differ."""

import contextlib
import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from machine import has_gpu
from margins import closest_call

import specjax
from specjax import Draft, RaggedDraft, rules

F32, I32 = jnp.float32, jnp.int32
FULL = has_gpu()
KERNELS = "triton" if FULL else "interpret"


class Size(NamedTuple):
    """A shape and a kind of case, one compilation of each implementation.

    `kind` is "drawn" with statistics, "recomputed", "one-hot", "synthetic", or "everything":
    cutoffs, reordered rows, given bonus tokens, unusable ids and fewer drafts than K.
    """

    batch_size: int
    k: int
    vocab_size: int
    dtype: Any
    kind: str
    num_seeds: int
    noise_dtype: Any = F32

    def __str__(self):
        names = (self.batch_size, self.k, self.vocab_size, jnp.dtype(self.dtype).name, self.kind)
        return "-".join(map(str, (*names, jnp.dtype(self.noise_dtype).name)))


class Case(NamedTuple):
    """The arguments of a call: `options` are arrays by keyword."""

    draft: Draft
    target_logits: jax.Array
    options: dict


@functools.partial(jax.jit, static_argnames=("size",))
def make_rows(seed, temperature, cutoff, size):
    """Draft rows 3 N(0, 1), target rows those plus N(0, 1), and drafts with their statistics.

    The drafts are drawn by flat noise of `jax.random`: any draws from q will do here.
    """
    shape = (size.batch_size, size.k + 1, size.vocab_size)
    one, two, three = jax.random.split(jax.random.key(seed), 3)
    draft = 3 * jax.random.normal(one, shape, F32)
    target = (draft + jax.random.normal(two, shape, F32)).astype(size.dtype)
    draft = draft[:, : size.k].astype(size.dtype)
    x = draft.astype(F32)
    x = x if cutoff is None else jnp.where(x < cutoff[..., None], -jnp.inf, x)
    random = temperature[:, None, None] > 0
    w = x / jnp.where(random, temperature[:, None, None], 1)
    noise = jnp.where(random, jax.random.gumbel(three, w.shape, F32), 0)
    ids = jnp.argmax(w + noise, axis=-1).astype(I32)
    logsumexp = jax.nn.logsumexp(w, axis=-1)
    logprobs = jnp.take_along_axis(w, ids[..., None], axis=-1)[..., 0] - logsumexp
    return draft, target, ids, logprobs, logsumexp


def make_case(size, seed):
    """One batch, its drafts drawn where that is their kind."""
    rng = np.random.default_rng(seed)
    b, k = size.batch_size, size.k
    keys = jax.vmap(jax.random.key)(np.arange(b, dtype=np.uint32) + np.uint32(seed * 10_000))
    positions = rng.integers(0, 100_000, b).astype(np.int32)
    temperature = rng.choice([0.0, 0.4, 0.7, 1.0, 1.0, 1.6], b).astype(np.float32)
    options = dict(keys=keys, positions=positions, temperature=temperature)
    everything = size.kind == "everything"
    cutoff = rng.choice([-np.inf, 1.0], (b, k)).astype(np.float32) if everything else None
    made = make_rows(seed, temperature, cutoff, size)
    draft_logits, target_logits, ids, logprobs, logsumexp = made
    if size.kind == "one-hot":
        return Case(Draft(ids), target_logits, options)
    if size.kind == "synthetic":
        options["conditional_rates"] = rng.choice([0.5, 0.7, 0.9], (b, k)).astype(np.float32)
    if size.kind == "recomputed":
        return Case(Draft(ids, draft_logits), target_logits, options)
    if not everything:
        draft = Draft(ids, draft_logits, logprobs=logprobs, logsumexp=logsumexp)
        return Case(draft, target_logits, options)
    strange = rng.random((b, k)) < 0.05
    unusable = rng.choice([-1, -7, size.vocab_size, 2**31 - 1], (b, k))
    rows = rng.permutation(b).astype(np.int32)
    options["cutoff"] = rng.choice([-np.inf, 1.0], (b, k + 1)).astype(np.float32)
    given = rng.integers(0, size.vocab_size + 5, b)
    options["bonus_token_ids"] = np.where(rng.random(b) < 0.2, given, -1).astype(np.int32)
    draft = Draft(
        jnp.asarray(np.where(strange, unusable, np.asarray(ids)), I32),
        draft_logits[np.argsort(rows)],
        temperature=jnp.asarray(np.where(rng.random(b) < 0.2, 0.0, temperature), F32),
        cutoff=jnp.asarray(cutoff),
        num_tokens=jnp.asarray(rng.choice([-1, 0, 1, k, k, k, k + 3], b), I32),
        rows=jnp.asarray(rows),
    )
    return Case(draft, target_logits, options)


def verify(case, implementation, noise_dtype=F32):
    """The padded call, at the rates of the case's options if it has some."""
    rates = case.options.get("conditional_rates")
    rule = rules.standard() if rates is None else rules.synthetic(rates)
    return specjax.rejection_sample(
        case.draft,
        case.target_logits,
        options=specjax.Options(noise_dtype=noise_dtype, implementation=implementation),
        **{name: x for name, x in case.options.items() if name != "conditional_rates"},
        rule=rule,
    )


def padding(rows, wanted, num_rows):
    """Rows [R, V] at the wanted places, and NaN from there to `num_rows`."""
    places = np.full(num_rows, rows.shape[0], np.int32)
    places[: len(wanted)] = wanted
    return jnp.take(rows, places, axis=0, mode="fill", fill_value=jnp.nan)


def make_ragged(case):
    """The arguments of the ragged form: the same requests end to end, NaN in the padding."""
    draft, k = case.draft, case.draft.token_ids.shape[1]
    b = len(draft.token_ids)
    wanted = np.full(b, k) if draft.num_tokens is None else np.asarray(draft.num_tokens)
    counts = np.clip(wanted, 0, k)
    drafted = np.array([r * k + i for r in range(b) for i in range(counts[r])], np.int32)
    judged = np.array([r * (k + 1) + i for r in range(b) for i in range(counts[r] + 1)], np.int32)

    def tokens(values, fill):
        out = np.full(b * k, fill, np.asarray(values).dtype)
        out[: len(drafted)] = np.asarray(values).reshape(-1)[drafted]
        return jnp.asarray(out)

    ragged = RaggedDraft(
        tokens(draft.token_ids, 2**31 - 1),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        max_draft_tokens=k,
        logits=padding(draft.logits.reshape(b * k, -1), drafted, b * k),
        temperature=draft.temperature,
        logprobs=tokens(draft.logprobs, np.nan),
        logsumexp=tokens(draft.logsumexp, np.nan),
        num_tokens=draft.num_tokens,
    )
    target = padding(case.target_logits.reshape(b * (k + 1), -1), judged, b * (k + 1))
    return ragged, target


def oracle_request(case, b, noise):
    """Request b of a case, as the oracle takes it."""
    draft, options = case.draft, case.options
    k = draft.token_ids.shape[1]
    row = b if draft.rows is None else int(draft.rows[b])
    own = options["temperature"] if draft.temperature is None else draft.temperature

    def each(name, absent):
        return absent if options.get(name) is None else np.asarray(options[name])[b]

    def drafted(values, absent):
        return np.full(k, absent) if values is None else np.asarray(values[b])

    return oracle.Request(
        token_ids=np.asarray(draft.token_ids[b]),
        target_logits=np.asarray(case.target_logits[b].astype(F32)),
        key=np.asarray(jax.random.key_data(options["keys"][b])),
        position=int(options["positions"][b]),
        temperature=float(options["temperature"][b]),
        cutoff=each("cutoff", np.full(k + 1, -np.inf)),
        num_tokens=k if draft.num_tokens is None else int(draft.num_tokens[b]),
        draft_logits=None if draft.logits is None else np.asarray(draft.logits[row].astype(F32)),
        draft_temperature=float(own[b]),
        draft_cutoff=drafted(draft.cutoff, -np.inf),
        draft_logsumexp=drafted(draft.logsumexp, 0.0),
        rates=each("conditional_rates", None),
        bonus=each("bonus_token_ids", -1),
        noise=np.float64 if noise == jnp.float64 else np.float32,
    )


def differing(ours, theirs):
    """Which requests differ in any token or count."""
    same = np.all(np.asarray(ours.token_ids) == np.asarray(theirs.token_ids), axis=1)
    for name in ("num_accepted", "num_emitted"):
        same &= np.asarray(getattr(ours, name)) == np.asarray(getattr(theirs, name))
    return np.flatnonzero(~same)


def explain(case, who, ours, theirs, noise):
    """(margin in ulps, what happened) of each request that differs."""
    out = []
    for b in who:
        tokens, margin = closest_call(oracle_request(case, b, noise))
        kernel, plain = np.asarray(ours.token_ids[b]), np.asarray(theirs.token_ids[b])
        out.append((margin, f"request {b}: kernels {kernel}, xla {plain}, exactly {tokens}"))
    return out


def pick(full, small):
    """A number as on the GPU, or as in a rehearsal."""
    return full if FULL else small


def precision(noise_dtype):
    return jax.enable_x64(True) if noise_dtype == jnp.float64 else contextlib.nullcontext()


def same(ours, theirs, who=slice(None)):
    """Every number the same, bit for bit."""
    chex.assert_trees_all_equal(
        *(jax.tree.map(lambda x: np.asarray(x)[who], v) for v in (ours, theirs))
    )


def reduced(size):
    """The size itself on a GPU, something alike elsewhere."""
    if FULL:
        return size
    least = {151936: 5001, 131072: 1025, 32000: 300}
    return size._replace(
        batch_size=min(size.batch_size, 24),
        vocab_size=least.get(size.vocab_size, size.vocab_size),
        num_seeds=1,
    )
