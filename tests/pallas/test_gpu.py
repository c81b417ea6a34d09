"""The kernels on an NVIDIA GPU: many rows, every mode, and the distributions they follow.

`make gpu-test` runs these and what else is marked `gpu`; without a GPU they are skipped.
SPECJAX_GPU_REHEARSAL=1 runs them at a reduced size in Pallas' interpreter.
"""

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
    Size,
    differing,
    explain,
    make_case,
    make_ragged,
    oracle_request,
    pick,
    precision,
    reduced,
    verify,
)
from margins import closest_call, draw

import specjax
from specjax import Draft, Stream, rules

pytestmark = pytest.mark.gpu

# Of 10,000 rows one may differ, and then by a margin below this many float32 ulps.
MAX_RATE, MAX_ULPS = 1e-4, 8.0


# The reference's tokens --------------------------------------------------------------------------

bf16, f16, f64 = jnp.bfloat16, jnp.float16, jnp.float64
SIZES = [
    Size(8, 32, 32000, bf16, "drawn", 4),
    Size(1024, 3, 32000, bf16, "drawn", 6),
    Size(256, 7, 151936, bf16, "drawn", 4),
    Size(8, 3, 151936, F32, "drawn", 16),
    Size(1, 7, 151936, bf16, "drawn", 16),
    Size(1024, 1, 5001, F32, "everything", 4),
    Size(16, 3, 32000, f16, "everything", 16),
    Size(1024, 3, 32000, f16, "one-hot", 4),
    Size(512, 3, 32000, bf16, "synthetic", 4),
    Size(64, 3, 131072, bf16, "recomputed", 4),
    Size(512, 3, 32000, bf16, "drawn", 2, f64),
]
NUM_ROWS = sum(size.batch_size * size.num_seeds for size in SIZES)
OUTCOMES = {"rows": 0, "differ": []}


def compare(case, ours, theirs, noise):
    """Counts rows that differ; each must be a close call, and the rest must agree in all."""
    who = differing(ours, theirs)
    OUTCOMES["rows"] += len(ours.token_ids)
    assert len(who) <= 3, (
        f"{len(who)} requests differ: {explain(case, who[:5], ours, theirs, noise)}"
    )
    for margin, what in explain(case, who, ours, theirs, noise):
        print(f"{what}, margin {margin:.2f} ulps")
        OUTCOMES["differ"].append(what)
        assert margin < MAX_ULPS, f"{what}, margin {margin:.2f} ulps"
    agree = np.setdiff1d(np.arange(len(ours.token_ids)), who)
    np.testing.assert_allclose(
        np.asarray(ours.logprobs)[agree], np.asarray(theirs.logprobs)[agree], atol=3e-5, rtol=3e-6
    )


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tokens_are_the_reference_s(size):
    size = reduced(size)
    accepted = 0.0
    with precision(size.noise_dtype):
        for seed in range(size.num_seeds):
            case = make_case(size, seed)
            ours, theirs = (
                jax.device_get(verify(case, name, noise_dtype=size.noise_dtype))
                for name in (KERNELS, "xla")
            )
            compare(case, ours, theirs, size.noise_dtype)
            accepted += float(np.mean(ours.num_accepted)) / size.num_seeds
    if size.batch_size > 1:
        assert 0.1 < accepted < 0.95 * size.k, "a case that tells nothing"


def test_ragged_rows_are_verified_as_the_padded_reference_does():
    size = reduced(Size(1024, 3, 32000, bf16, "drawn", 1))
    case = make_case(size, 100)
    counts = np.random.default_rng(0).choice([-1, 0, 1, 2, 3, 3, 3], size.batch_size)
    case = case._replace(draft=case.draft.replace(num_tokens=jnp.asarray(counts, I32)))
    theirs = jax.device_get(verify(case, "xla"))
    ours = specjax.rejection_sample(
        *make_ragged(case), options=specjax.Options(implementation=KERNELS), **case.options
    )
    compare(case, jax.device_get(ours), theirs, F32)


@pytest.mark.parametrize(
    ("batch_size", "vocab_size", "noise_dtype"),
    [(1024, 151936, F32), (8, 131072, F32), (512, 32000, f64)],
)
def test_samples_are_the_reference_s(batch_size, vocab_size, noise_dtype):
    size = reduced(Size(batch_size, 1, vocab_size, bf16, "drawn", 4, noise_dtype))
    with precision(noise_dtype):
        for seed in range(size.num_seeds):
            case = make_case(size, seed)
            ours, theirs = (
                jax.device_get(
                    specjax.gumbel_sample(
                        case.target_logits[:, 0],
                        stream=Stream.draft(1),
                        options=specjax.Options(noise_dtype=noise_dtype, implementation=name),
                        **case.options,
                    )
                )
                for name in (KERNELS, "xla")
            )
            who = np.flatnonzero(ours.token_ids != theirs.token_ids)
            OUTCOMES["rows"] += size.batch_size
            for b in who:
                margin = sample_margin(case, b, noise_dtype)
                OUTCOMES["differ"].append(f"sample {b}, margin {margin:.2f} ulps")
                assert margin < MAX_ULPS, OUTCOMES["differ"][-1]
            agree = ours.token_ids == theirs.token_ids
            for one, other in zip(ours[1:], theirs[1:], strict=True):
                np.testing.assert_allclose(one[agree], other[agree], atol=3e-5, rtol=3e-6)


@pytest.mark.parametrize("batch_size", [8, 64, 256])
def test_block_verification_is_the_reference_s(batch_size):
    size = reduced(Size(batch_size, 5, 131072, bf16, "drawn", 2))
    accepted = {"block": 0.0, "token": 0.0}
    for seed in range(size.num_seeds):
        case = make_case(size, 20 + seed)
        data = (case.draft, case.target_logits)
        ours, theirs = (
            jax.device_get(
                specjax.rejection_sample(
                    *data,
                    rule=rules.block(),
                    options=specjax.Options(implementation=name),
                    **case.options,
                )
            )
            for name in (KERNELS, "xla")
        )
        # Rounding moves rho and h by some millionths: so rarely a uniform lies between.
        who = np.flatnonzero(np.any(ours.token_ids != theirs.token_ids, axis=1))
        assert len(who) <= 1 + batch_size // 128
        agree = np.delete(np.arange(len(ours.token_ids)), who)
        np.testing.assert_allclose(ours.logprobs[agree], theirs.logprobs[agree], atol=1e-4)
        accepted["block"] += ours.num_accepted.mean()
        accepted["token"] += float(np.mean(verify(case, KERNELS).num_accepted))
    if batch_size > 8:
        assert accepted["block"] > accepted["token"] > 0.1


@pytest.mark.parametrize("batch_size", [8, 256])
def test_coupled_tokens_are_what_the_target_s_rows_draw(batch_size):
    size = reduced(Size(batch_size, 5, 131072, bf16, "drawn", 1))
    case = make_case(size, 7)
    rows, positions = case.target_logits, case.options["positions"]
    options = case.options | dict(options=specjax.Options(implementation=KERNELS))

    def drawn(logits, i):
        place = dict(positions=positions + i, stream=Stream.TARGET)
        return np.asarray(specjax.gumbel_sample(logits, **options | place).token_ids)

    target = np.stack([drawn(rows[:, i], i) for i in range(size.k + 1)], axis=1)
    nudged = rows[:, :-1].astype(F32) + 0.7 * jax.random.normal(
        jax.random.key(1), rows[:, 1:].shape
    )
    draft = np.stack([drawn(nudged[:, i].astype(bf16), i) for i in range(size.k)], axis=1)
    step = jax.device_get(
        specjax.rejection_sample(Draft(draft), rows, rule=rules.coupled(), **options)
    )
    matches = np.cumprod(draft == target[:, :-1], axis=1).sum(axis=1)
    emitted = np.where(np.arange(size.k + 1) <= matches[:, None], target, -1)
    who = np.flatnonzero(np.any(step.token_ids != emitted, axis=1))
    # Both reduce a row in other tiles, so that a near-tie may fall otherwise.
    assert len(who) <= 1
    np.testing.assert_array_equal(np.delete(step.num_accepted, who), np.delete(matches, who))
    assert 0.1 < matches.mean() < 0.95 * size.k, "a case that tells nothing"


def sample_margin(case, b, noise_dtype):
    """The margin of request b's draw from its first target row."""
    key = np.asarray(jax.random.key_data(case.options["keys"][b]))
    at = oracle.address(key, case.options["positions"][b], oracle.draft_stream(1))
    logits = np.asarray(case.target_logits[b, 0].astype(F32))
    p = np.exp(oracle.log_softmax(logits, float(case.options["temperature"][b])))
    return draw(p, at, np.float64 if noise_dtype == f64 else np.float32)[1]


def test_the_margins_are_of_the_decisions_taken():
    """What is judged here tells the reference's own tokens, wherever it claims to be sure."""
    size = reduced(Size(16, 3, 32000, f16, "everything", 1))
    case = make_case(size, 7)
    theirs = jax.device_get(verify(case, "xla"))
    margins = []
    for b in range(size.batch_size):
        tokens, margin = closest_call(oracle_request(case, b, F32))
        margins.append(margin)
        if margin >= MAX_ULPS:
            assert tokens == theirs.token_ids[b, : theirs.num_emitted[b]].tolist()
    assert np.mean(np.array(margins) < MAX_ULPS) < 0.01 + 1 / size.batch_size


def test_at_most_one_row_in_ten_thousand_differs():
    """Over all that ran before this, which is why it stands here."""
    if OUTCOMES["rows"] < NUM_ROWS and FULL:
        pytest.skip("runs with the comparisons above it")
    assert OUTCOMES["rows"] >= pick(20_000, 50)
    # One more for a run that is short.
    assert len(OUTCOMES["differ"]) <= MAX_RATE * OUTCOMES["rows"] + pick(0, 1), OUTCOMES["differ"]
