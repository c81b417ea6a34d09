"""The kernels on an NVIDIA GPU: the distributions they follow, and what must change nothing.

`make gpu-test` runs these and what else is marked `gpu`; without a GPU they are skipped.
SPECJAX_GPU_REHEARSAL=1 runs them at a reduced size in Pallas' interpreter.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from gpu_cases import (
    F32,
    FULL,
    I32,
    KERNELS,
    Case,
    Size,
    differing,
    make_case,
    pick,
    precision,
    reduced,
    same,
    verify,
)
from scipy import stats

import specjax
from specjax import Draft, Stream

pytestmark = pytest.mark.gpu

f64 = jnp.float64
bf16 = jnp.bfloat16
ALPHA = 1e-6


# Coins -------------------------------------------------------------------------------------------


def coin_rows(synthetic):
    """Rows whose ratio p / q of token 0 lies within 1e-4 of the request's own coin."""
    n, vocab_size = pick(4096, 128), 1025
    rng = np.random.default_rng(11)
    keys = jax.vmap(jax.random.key)(np.arange(n, dtype=np.uint32))
    at = oracle.address(np.asarray(jax.random.key_data(keys)), 3, oracle.accept_stream(0))
    u = oracle.coin(at)
    side = np.where(rng.random(n) < 0.5, 1e-4, -1e-4)
    draft = rng.normal(size=(n, vocab_size)).astype(np.float32)
    draft[:, 0] = 3.0
    logq = oracle_log_softmax(draft)[:, 0]
    one_hot = np.arange(n) % 2 == 0
    # The coin is the ratio times (1 +- 1e-4), and p of the token is that ratio times q.
    logp = np.log(u) - np.log1p(side) + np.where(one_hot, 0.0, logq)
    target = draft.copy()
    rest = np.log(np.exp(target[:, 1:].astype(np.float64)).sum(axis=1))
    target[:, 0] = rest + logp - np.log1p(-np.exp(logp))
    rates = (u / (1 + side)).astype(np.float32)
    exact = np.log(u) < oracle_log_softmax(target)[:, 0] - np.where(one_hot, 0.0, logq)
    if synthetic:
        exact = u < rates
    ids = np.zeros((n, 1), np.int32)
    temperature = np.where(one_hot, 0.0, 1.0).astype(np.float32)
    options = dict(keys=keys, positions=3)
    if synthetic:
        options["conditional_rates"] = rates[:, None]
    target = np.repeat(target[:, None], 2, axis=1)
    drafted = Draft(ids, jnp.asarray(draft[:, None]), temperature=jnp.asarray(temperature))
    # Coins within 1e-4 of 1 have no ratio on the other side of them.
    return Case(drafted, jnp.asarray(target), options), exact, np.log(u) < -3e-4, side


def oracle_log_softmax(rows):
    rows = rows.astype(np.float64)
    shifted = rows - rows.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("synthetic", [False, True])
def test_coins_at_the_ratio_decide_as_enumeration_does(synthetic):
    case, exact, usable, side = coin_rows(synthetic)
    ours = verify(case, KERNELS)
    kept = np.asarray(ours.num_accepted) > 0
    np.testing.assert_array_equal(kept[usable], exact[usable])
    np.testing.assert_array_equal(exact[usable], side[usable] < 0)
    assert 0.3 < np.mean(kept) < 0.7


# Distributions ---------------------------------------------------------------------------------


def counted(step, num_steps, size):
    """Sums `step(i)`, i32[size] counts, over the steps, on the device."""

    @jax.jit
    def run():
        zero = jnp.zeros((size,), I32)
        return jax.lax.fori_loop(0, num_steps, lambda i, sums: sums + step(i), zero)

    return np.asarray(run()).astype(np.int64)


def count(tokens, vocab_size):
    """How often each id occurs, i32[V + 1]; the last counts what is none."""
    ids = jnp.where((tokens >= 0) & (tokens < vocab_size), tokens, vocab_size).reshape(-1)
    return jnp.zeros((vocab_size + 1,), I32).at[ids].add(1)


def check_counts(counts, probs):
    """Chi-square, cells that expect less than 5 pooled; what has no mass was never drawn."""
    n = counts.sum()
    assert counts[probs == 0].sum() == 0
    common = n * probs >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(n * probs[common], n * probs[~common].sum())
    used = expected > 0
    statistic = np.sum((observed[used] - expected[used]) ** 2 / expected[used])
    assert stats.chi2.sf(statistic, used.sum() - 1) > ALPHA, "the distribution is another"


def row_keys(n):
    return jax.vmap(jax.random.key)(jnp.arange(n, dtype=jnp.uint32))


@pytest.mark.parametrize("noise_dtype", [F32, f64])
def test_masked_tokens_are_never_drawn_and_the_others_follow_their_distribution(noise_dtype):
    """5 million draws of each noise; with those below, more than 10 million."""
    n, num_steps, vocab_size = pick(65_536, 256), pick(80, 4), 300
    rng = np.random.default_rng(3)
    row = (1.5 * rng.normal(size=vocab_size)).astype(np.float32)
    row[::2] = -np.inf
    row[7] = -60.0
    with precision(noise_dtype):
        logits, keys = jnp.broadcast_to(jnp.asarray(row), (n, vocab_size)), row_keys(n)

        def step(i):
            draws = specjax.gumbel_sample(
                logits,
                keys=keys,
                positions=i,
                stream=Stream.TARGET,
                temperature=1.3,
                options=specjax.Options(noise_dtype=noise_dtype, implementation=KERNELS),
            )
            return count(draws.token_ids, vocab_size)

        counts = counted(step, num_steps, vocab_size + 1)
    assert counts.sum() == n * num_steps
    check_counts(counts, np.append(oracle.target_probs(row, 1.3), 0.0))


@pytest.mark.parametrize("noise_dtype", [F32, f64])
def test_masked_tokens_are_never_emitted_and_each_position_follows_its_distribution(noise_dtype):
    """V = 16 and a draft opposed to its target: residuals wherever one looks."""
    n, num_steps, k, vocab_size = pick(250_000, 500), pick(4, 1), 3, 16
    rng = np.random.default_rng(2)
    target = (0.8 * rng.normal(size=(k + 1, vocab_size))).astype(np.float32)
    draft = -target[:k].copy()
    target[:, 5] = target[1, 2] = -np.inf
    with precision(noise_dtype):
        keys = row_keys(n)
        draft_rows = jnp.asarray(draft)
        target_rows = jnp.broadcast_to(jnp.asarray(target), (n, k + 1, vocab_size))
        kernels = specjax.Options(noise_dtype=noise_dtype, implementation=KERNELS)
        options = dict(keys=keys, options=kernels)

        def step(i):
            position = i * (k + 1)
            draws = [
                specjax.gumbel_sample(
                    jnp.broadcast_to(draft_rows[j], (n, vocab_size)),
                    positions=position + j,
                    stream=Stream.draft(j),
                    **options,
                )
                for j in range(k)
            ]
            drafted = Draft(
                jnp.stack([draw.token_ids for draw in draws], 1),
                draft_rows[None],
                logprobs=jnp.stack([draw.logprobs for draw in draws], 1),
                logsumexp=jnp.stack([draw.logsumexp for draw in draws], 1),
                rows=jnp.zeros((n,), I32),
            )
            done = specjax.rejection_sample(drafted, target_rows, positions=position, **options)
            return jnp.concatenate([count(done.token_ids[:, j], vocab_size) for j in range(k + 1)])

        counts = counted(step, num_steps, (k + 1) * (vocab_size + 1))
    for j, seen in enumerate(counts.reshape(k + 1, vocab_size + 1)):
        assert seen.sum() == n * num_steps
        if seen[:-1].sum() > 1000:
            check_counts(seen[:-1], oracle.target_probs(target[j]))
    reached = counts.reshape(k + 1, -1)[:, :-1].sum(axis=1) / (n * num_steps)
    kept = [
        np.minimum(oracle.target_probs(target[j]), oracle.target_probs(draft[j])).sum()
        for j in range(k)
    ]
    tolerance = stats.norm.isf(ALPHA) / np.sqrt(n * num_steps)
    np.testing.assert_allclose(reached, np.append(1.0, np.cumprod(kept)), atol=tolerance)


def test_the_tail_of_a_large_vocabulary_keeps_its_mass():
    """5 % over 131,000 tokens; a loss of 0.3 % of that, one word in 2^24 of each, is seen."""
    vocab_size, num_tail = pick((131_072, 131_000), (2048, 2000))
    n, num_steps, fault = pick((1024, 50_000, 0.003), (256, 40, 0.3))
    logits = np.full(vocab_size, np.log(0.95 / (vocab_size - num_tail)), np.float32)
    tail = np.arange(vocab_size) % (vocab_size // (vocab_size - num_tail)) != 0
    tail[np.flatnonzero(tail)[num_tail:]] = False
    logits[tail] = np.log(0.05 / num_tail)
    logits = np.asarray(jnp.asarray(logits).astype(bf16).astype(F32))
    probs = oracle.target_probs(logits)
    mass = probs[tail].sum()
    tolerance = stats.norm.isf(ALPHA / 2) * np.sqrt(mass * (1 - mass) / (n * num_steps))
    assert tolerance <= fault * mass, "too few draws to see it"
    rows = jnp.broadcast_to(jnp.asarray(logits, bf16), (n, vocab_size))
    in_tail, keys = jnp.asarray(tail), row_keys(n)

    def step(i):
        draws = specjax.gumbel_sample(
            rows,
            keys=keys,
            positions=i,
            stream=Stream.TARGET,
            options=specjax.Options(implementation=KERNELS),
        )
        hits = jnp.sum(in_tail[draws.token_ids].astype(I32))
        return jnp.stack([hits, jnp.sum((draws.token_ids < 0).astype(I32))])

    hits, missing = counted(step, num_steps, 2)
    assert missing == 0
    assert abs(hits / (n * num_steps) - mass) < tolerance


# Company, garbage, races --------------------------------------------------------------------------


def take(case, who):
    """Some requests of a case."""
    draft = jax.tree.map(lambda x: x[who], case.draft)
    return Case(draft, case.target_logits[who], {k: v[who] for k, v in case.options.items()})


@functools.cache
def company(batch_size, vocab_size=32000):
    size = reduced(Size(batch_size, 3, vocab_size, bf16, "drawn", 1))
    return make_case(size._replace(batch_size=pick(batch_size, min(batch_size, 40))), 5)


def test_a_request_alone_emits_what_it_does_in_a_batch_of_256():
    case = company(256)
    whole = jax.device_get(verify(case, KERNELS))
    for b in range(0, 256, 8)[: pick(32, 4)]:
        alone = verify(take(case, np.array([b])), KERNELS)
        for name in ("token_ids", "num_accepted", "num_emitted"):
            np.testing.assert_array_equal(
                np.asarray(getattr(alone, name))[0], getattr(whole, name)[b]
            )
        np.testing.assert_allclose(
            np.asarray(alone.logprobs)[0], whole.logprobs[b], atol=1e-5, rtol=2e-6
        )


@pytest.mark.parametrize("batch_size", [8, 256])
def test_rows_behind_a_rejection_change_nothing_whatever_they_hold(batch_size):
    case = company(batch_size)
    ours = jax.device_get(verify(case, KERNELS))
    k = case.draft.token_ids.shape[1]
    end = ours.num_accepted[:, None]
    assert np.any(end < k)
    behind, unread = np.arange(k + 1) > end, np.arange(k) > end
    nan = np.float32(np.nan)
    dirty = case._replace(
        draft=case.draft.replace(
            logits=jnp.where(unread[..., None], jnp.asarray(nan, bf16), case.draft.logits),
            logprobs=jnp.where(unread, nan, case.draft.logprobs),
            logsumexp=jnp.where(unread, nan, case.draft.logsumexp),
        ),
        target_logits=jnp.where(behind[..., None], jnp.asarray(nan, bf16), case.target_logits),
    )
    same(jax.device_get(verify(dirty, KERNELS)), ours)


def test_invalid_rows_emit_nothing_from_there_on_and_change_no_other_request():
    """NaN, +inf and -inf rows, and rows of huge numbers, at each place of a request."""
    case = company(256)
    b, k = case.draft.token_ids.shape
    clean = jax.device_get(verify(case, KERNELS))
    target = np.array(case.target_logits.astype(F32))
    vocab_size = target.shape[2]
    where = np.arange(b) % (k + 1)
    kind = np.arange(b) // (k + 1) % 5
    for r in range(b):
        columns = slice(None) if kind[r] in (2, 3) else (r * 7919) % vocab_size
        bad = {0: np.nan, 1: np.inf, 2: -np.inf, 3: -3e38, 4: None}[int(kind[r])]
        if bad is not None:
            target[r, where[r], columns] = bad
    dirty = case._replace(target_logits=jnp.asarray(target, bf16))
    ours = jax.device_get(verify(dirty, KERNELS))
    theirs = jax.device_get(verify(dirty, "xla"))
    untouched = kind == 4
    same(ours, clean, untouched)
    invalid = kind <= 2
    reached = clean.num_accepted >= where
    assert np.any(invalid & reached)
    np.testing.assert_array_equal(ours.num_emitted[invalid & reached], where[invalid & reached])
    np.testing.assert_array_equal(ours.num_emitted[~reached], clean.num_emitted[~reached])
    assert len(differing(ours, theirs)) == 0
    assert np.all(np.isfinite(ours.logprobs))


@pytest.mark.parametrize("batch_size", [8, 64, 256])
def test_twenty_runs_of_a_mixed_batch_are_the_same_bit_for_bit(batch_size):
    """A race between the programs of a row would move a token sooner or later."""
    case = company(batch_size, 131072)
    greedy = np.asarray(case.options["temperature"]) == 0
    assert 0 < np.sum(greedy) < len(greedy)
    run = jax.jit(functools.partial(verify, implementation=KERNELS))
    other = case._replace(options=case.options | dict(positions=case.options["positions"] + 1))
    first, second = jax.device_get((run(case), run(other)))
    # All of them in flight at once, in turn, so that each finds the memory of the other.
    runs = [run(other if i % 2 else case) for i in range(pick(40, 2))]
    for i, again in enumerate(jax.device_get(runs)):
        same(again, second if i % 2 else first)


def poison():
    """Leaves memory full of NaN behind, which is -1 as an integer."""
    junk = jax.lax.bitcast_convert_type(
        jnp.full((pick(2**29, 2**10),), 2**32 - 1, jnp.uint32), jnp.float32
    )
    jax.block_until_ready(junk)


@pytest.mark.parametrize(("batch_size", "vocab_size"), [(7, 5001), (64, 32000)])
def test_guards_of_nan_around_every_operand_change_nothing(batch_size, vocab_size):
    """Each request between two inactive ones made of NaN alone, in memory left full of NaN."""
    size = reduced(Size(batch_size, 3, vocab_size, bf16, "drawn", 1))
    case = make_case(size, 9)
    b = size.batch_size
    plain = jax.device_get(verify(case, KERNELS))
    inside = 2 * np.arange(b) + 1

    def guard(values, fill):
        values = jnp.asarray(values)
        out = jnp.full((2 * b + 1, *values.shape[1:]), fill, values.dtype)
        return out.at[inside].set(values)

    draft = case.draft
    guarded = Draft(
        guard(draft.token_ids, 2**31 - 1),
        guard(draft.logits, np.nan),
        temperature=guard(case.options["temperature"], np.nan),
        logprobs=guard(draft.logprobs, np.nan),
        logsumexp=guard(draft.logsumexp, np.nan),
        cutoff=guard(jnp.full(draft.token_ids.shape, -jnp.inf, F32), np.nan),
        num_tokens=guard(jnp.full((b,), size.k, I32), -1),
    )
    keys = jax.random.key_data(case.options["keys"])
    options = dict(
        keys=jax.random.wrap_key_data(guard(keys, 2**32 - 1)),
        positions=guard(case.options["positions"], 2**31 - 1),
        temperature=guard(case.options["temperature"], np.nan),
        cutoff=guard(jnp.full((b, size.k + 1), -jnp.inf, F32), np.nan),
        bonus_token_ids=guard(jnp.full((b,), -1, I32), 2**31 - 1),
    )
    poison()
    around = Case(guarded, guard(case.target_logits, np.nan), options)
    ours = jax.device_get(verify(around, KERNELS))
    assert len(differing(jax.tree.map(lambda x: x[inside], ours), plain)) == 0
    np.testing.assert_allclose(ours.logprobs[inside], plain.logprobs, atol=1e-5, rtol=2e-6)
    outside = 2 * np.arange(b + 1)
    np.testing.assert_array_equal(ours.token_ids[outside], -1)
    np.testing.assert_array_equal(ours.logprobs[outside], 0.0)
    np.testing.assert_array_equal(ours.num_emitted[outside], 0)
    np.testing.assert_array_equal(ours.num_accepted[outside], 0)


def test_guards_of_nan_around_sampled_rows_change_nothing():
    case = company(64)
    logits, options = case.target_logits[:, 0], case.options | dict(stream=0)
    plain = jax.device_get(
        specjax.gumbel_sample(logits, options=specjax.Options(implementation=KERNELS), **options)
    )
    b = len(logits)
    inside = 2 * np.arange(b) + 1
    rows = jnp.full((2 * b + 1, logits.shape[1]), np.nan, logits.dtype).at[inside].set(logits)
    each = np.clip(np.arange(2 * b + 1) // 2, 0, b - 1)
    spread = {name: value[each] for name, value in options.items() if name != "stream"}
    poison()
    ours = jax.device_get(
        specjax.gumbel_sample(
            rows, stream=0, options=specjax.Options(implementation=KERNELS), **spread
        )
    )
    same(jax.tree.map(lambda x: x[inside], ours), plain)
    np.testing.assert_array_equal(ours.token_ids[2 * np.arange(b + 1)], -1)


# Which implementation ----------------------------------------------------------------------------


@pytest.mark.skipif(not FULL, reason="None chooses the kernels on a GPU alone")
def test_none_is_triton_on_this_machine():
    case = company(8)
    for name, kernels in [(None, True), ("triton", True), ("xla", False)]:
        text = jax.jit(functools.partial(verify, implementation=name)).lower(case).as_text()
        assert ("xla.gpu.triton" in text) == kernels
    same(jax.device_get(verify(case, None)), jax.device_get(verify(case, "triton")))
