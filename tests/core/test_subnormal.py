"""Subnormal numbers count as zero, on a machine that flushes them and on one that does not.

XLA on a CPU flushes them wherever they stand. There the library is told that numbers below 2^-20
are the subnormal ones, which nothing flushes: a GPU sees real ones like that.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from machine import has_gpu
from over_devices import over_devices, pad, split
from verify_cases import with_sizes

import specjax
from specjax import rules
from specjax.core import subnormal
from specjax.core.subnormal import flush_subnormals, largest_equal, smallest_equal
from specjax.pallas.kernel_config import Tile

pytestmark = pytest.mark.once

VOCAB = 300
TINY = np.finfo(np.float32).tiny
LARGEST = np.nextafter(TINY, np.float32(0))
# The factor of subnormal numbers where they are flushed.
UNIT = np.float32(1 if has_gpu() else 2.0**106)
NUMBERS = np.float32([0, 1e-45, 4e-42, LARGEST, TINY, 1.5 * TINY, 1, 3e38, np.inf])
NUMBERS = np.concatenate([-NUMBERS[::-1], NUMBERS])


@pytest.fixture(scope="module")
def move_threshold():
    """A function that moves the threshold to numbers which no comparison flushes, or back.

    Programs are forgotten where it moves, and shared by tests of one threshold.
    """
    patch, moved = pytest.MonkeyPatch(), False

    def move(wanted):
        nonlocal moved
        if moved == wanted or has_gpu():
            return
        jax.clear_caches()
        moved = wanted
        if not wanted:
            patch.undo()
            return
        tiny = float(TINY * UNIT)
        patch.setattr(subnormal, "_TINY", tiny)
        patch.setattr(subnormal, "_LARGEST_SUBNORMAL", float(np.nextafter(np.float32(tiny), 0)))

    yield move
    move(False)


@pytest.fixture
def unflushed():
    """Numbers that count as zero though no comparison takes them for it."""


@pytest.fixture(autouse=True)
def _threshold(request, move_threshold):
    move_threshold("unflushed" in request.fixturenames)


def flushed(x, unit=1):
    """Float32 numbers with subnormal ones as zeros, on the host, which flushes nothing itself."""
    return np.where(np.abs(x) < TINY * np.float32(unit), np.float32(0), x)


def test_a_moved_cutoff_decides_alike_whether_comparisons_flush_or_not():
    assert np.float32(-4e-42) < 0, "the host must not flush"
    x, c = NUMBERS[:, None], NUMBERS[None]
    for ends in [(smallest_equal, largest_equal), map(jax.jit, (smallest_equal, largest_equal))]:
        at_least, above = [np.asarray(end(c)) for end in ends]
        for seen in (np.asarray, flushed):
            np.testing.assert_array_equal(seen(x) >= seen(at_least), flushed(x) >= flushed(c))
            np.testing.assert_array_equal(seen(x) > seen(above), flushed(x) > flushed(c))
    zeros = np.asarray(flush_subnormals(NUMBERS)).view(np.uint32)
    np.testing.assert_array_equal(zeros[np.abs(NUMBERS) < TINY], 0)
    np.testing.assert_array_equal(flush_subnormals(NUMBERS), flushed(NUMBERS))
    assert np.isnan(smallest_equal(np.float32(np.nan)))


def row(**tokens):
    """Logits of -1, but for those given by id; tiny ones in units."""
    logits = np.full(VOCAB, -1, np.float32)
    for name, logit in tokens.items():
        logits[int(name[1:])] = np.float32(logit) * (UNIT if abs(logit) < 1e-30 else 1)
    return logits


# Each row's greedy token and what a cutoff of zero keeps: equal numbers, the lowest id first.
ROWS = [
    np.where(np.arange(VOCAB) == 5, np.float32(-1), np.float32(-4e-42) * UNIT),
    row(_3=-0.0, _130=0.0, _270=3e-42),
    row(_9=-3e-42, _10=2e-42, _140=4e-42),
    row(_200=-4e-42, _201=LARGEST),
    row(_20=0.0, _270=TINY),
]
GREEDY = [0, 3, 9, 200, 270]
NUM_KEPT = [VOCAB - 1, 3, 3, 2, 2]


def draw(logits, temperature, cutoff, implementation, **split):
    return specjax.gumbel_sample(
        jnp.asarray(logits),
        keys=jax.random.key(0),
        positions=0,
        stream=specjax.Stream.TARGET,
        temperature=jnp.asarray(temperature, jnp.float32),
        cutoff=jnp.asarray(cutoff, jnp.float32),
        options=specjax.Options(implementation=implementation, **split),
    )


@pytest.mark.interpret
@pytest.mark.usefixtures("unflushed")
def test_devices_compare_the_subnormal_maxima_of_greedy_rows_as_zeros():
    """The last block lies on a device of its own."""
    rows = pad(np.stack(ROWS), 512)
    greedy = dict(axis_name="model", vocab_size=VOCAB)

    def call(rows):
        zeros = jnp.zeros(len(ROWS))
        return draw(rows, zeros, zeros, "interpret", **greedy)

    program = over_devices(call, (rows,), (split(rows),), 2, check_vma=False)
    np.testing.assert_array_equal(program(rows).token_ids, GREEDY)


@pytest.mark.usefixtures("unflushed")
def test_a_cutoff_of_zero_keeps_subnormal_logits_and_a_greedy_request_the_first(implementation):
    logits = np.repeat(ROWS, 2, axis=0)
    for cutoff in (0.0, -0.0, 4e-42, -4e-42):
        cutoffs = np.full(len(logits), np.float32(cutoff) * UNIT)
        sample = draw(logits, np.tile([0.0, 1.0], len(ROWS)), cutoffs, implementation)
        np.testing.assert_array_equal(sample.token_ids[::2], GREEDY)
        np.testing.assert_allclose(sample.logprobs, -np.log(np.repeat(NUM_KEPT, 2)), rtol=1e-5)
        drawn = logits[np.arange(len(logits)), sample.token_ids]
        assert np.all(drawn > -TINY * UNIT)


def verify(drafted, draft_rows, target_rows, temperature, implementation, rates=None):
    """Drafts of one token, what stands below a cutoff of zero left out."""
    size = len(drafted)
    return specjax.rejection_sample(
        specjax.Draft(
            jnp.asarray(drafted, jnp.int32)[:, None],
            logits=jnp.asarray(draft_rows[:, None]),
            cutoff=jnp.zeros((size, 1), jnp.float32),
        ),
        jnp.asarray(np.stack([target_rows, target_rows], axis=1)),
        keys=jax.random.key(0),
        positions=0,
        temperature=jnp.full((size,), temperature, jnp.float32),
        cutoff=jnp.zeros((size, 2), jnp.float32),
        rule=rules.standard() if rates is None else rules.synthetic(rates),
        options=specjax.Options(implementation=implementation),
    )


COPIES = 4


@pytest.mark.parametrize(("copies", "synthetic"), [(1, True), (COPIES, False)])
@pytest.mark.usefixtures("unflushed")
def test_verification_takes_subnormal_logits_for_zero(copies, synthetic, implementation):
    """In a small batch, and in a large one, by the maxima of several tiles."""
    rows, drafted = np.tile(ROWS, (copies, 1)), np.tile(GREEDY, copies)
    rates = jnp.array([0.5], jnp.float32) if synthetic else None
    kernels = with_sizes(implementation, target=Tile(128, 4))
    step = verify(drafted, rows, rows, 0.0, kernels, rates)
    if not synthetic:
        np.testing.assert_array_equal(step.num_accepted, 1)
    tokens = np.asarray(step.token_ids)
    accepted = np.asarray(step.num_accepted) == 1
    np.testing.assert_array_equal(tokens[:, 0], drafted)
    np.testing.assert_array_equal(tokens[:, 1], np.where(accepted, drafted, -1))


@pytest.mark.usefixtures("unflushed")
def test_a_sampled_draft_of_subnormal_logits_has_the_probability_of_zeros(implementation):
    """The drafted token's own check, the draft's cutoff and the residual."""
    draft_row, target_row = row(_7=-4e-42, _150=4e-42), row(_150=-4e-42, _260=0.0)
    # As many requests as there are above, in one program.
    size = COPIES * len(ROWS)
    draft_rows, target_rows = np.tile(draft_row, (size, 1)), np.tile(target_row, (size, 1))
    step = verify(np.resize([7, 150], size), draft_rows, target_rows, 1.0, implementation)
    # p and q are a half at two tokens each, of which they share 150.
    np.testing.assert_array_equal(step.num_accepted, np.resize([0, 1], size))
    tokens, logprobs = np.asarray(step.token_ids), np.asarray(step.logprobs)
    np.testing.assert_array_equal(tokens[::2], np.tile([260, -1], (size // 2, 1)))
    np.testing.assert_array_equal(tokens[1::2, 0], 150)
    assert set(tokens[1::2, 1].tolist()) == {150, 260}
    np.testing.assert_allclose(logprobs[1::2], np.log(0.5), rtol=1e-5)


@pytest.mark.usefixtures("unflushed")
def test_what_top_k_keeps_of_subnormal_logits_ties_and_weighs(implementation):
    zeros = {f"_{30 * i + 4}": value for i, value in enumerate([4e-42, -4e-42, 0, 1e-42, -0.0] * 2)}
    rows = np.stack([row(**zeros), row(_299=3.0, **zeros), row(_299=3.0, **zeros)])
    # The rows again, as many as are drawn from above, in one program.
    again = np.resize(np.arange(3), 2 * len(ROWS))
    cutoff = specjax.logit_cutoff(
        jnp.asarray(rows),
        temperature=1.0,
        top_k=jnp.array([1, 2, 2], jnp.int32),
        # Of a 1 and ten weights of exp(-3), 0.69 is more than the 1, and a half is not. Of eight
        # such weights, those that are not negative, 0.69 would not be.
        top_p=jnp.array([1.0, 0.69, 0.5], jnp.float32),
        implementation=implementation,
    )
    np.testing.assert_array_equal(flushed(np.asarray(cutoff), UNIT), [0, 0, 3])
    sample = draw(rows[again], np.ones(len(again)), np.asarray(cutoff)[again], implementation)
    masses = np.array([10, 10 + np.exp(3), np.exp(3)])
    np.testing.assert_allclose(sample.logsumexp, np.log(masses[again]), rtol=1e-5)


@pytest.mark.usefixtures("unflushed")
def test_what_ties_with_a_bound_of_the_cutoff_is_searched_with_it(implementation):
    """In more blocks than are gathered; what lies below the bound would not be weighed."""
    logits = np.full((1, 40_000), -1, np.float32)
    logits[0, : 200 * 128 : 128] = np.float32(-1e-42) * UNIT
    logits[0, [30_000, 39_999]] = np.float32(4e-42) * UNIT, 3
    # A 1 and 201 weights of exp(-3) make 11; of 128 gathered ones there are 7.4.
    cutoff = specjax.logit_cutoff(
        logits, temperature=1.0, top_k=2, top_p=0.11, implementation=implementation
    )
    np.testing.assert_array_equal(flushed(np.asarray(cutoff), UNIT), 0)


@pytest.mark.usefixtures("unflushed")
def test_listed_tokens_and_ranks_take_subnormal_logits_for_ties():
    logits = jnp.asarray(np.stack(ROWS))
    ids = jnp.array([0, 3, 9, 200, 20], jnp.int32)
    top = specjax.top_logprobs(logits, ids, 3, cutoff=jnp.zeros(len(ROWS), jnp.float32))
    listed = [[0, 1, 2], [3, 130, 270], [9, 10, 140], [200, 201, -1], [270, 20, -1]]
    np.testing.assert_array_equal(top.token_ids, listed)
    np.testing.assert_array_equal(top.rank, [1, 1, 1, 1, 2])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_compared_as_float32(dtype, implementation):
    """Float16's subnormal numbers are ordinary ones there, and bfloat16's are subnormal."""
    smallest = 6e-8 if dtype == "float16" else 1e-40
    logits = np.full((2, VOCAB), -1, np.float32)
    logits[:, [3, 9, 140, 270]] = -smallest, -0.0, smallest, 0
    sample = draw(jnp.asarray(logits).astype(dtype), [0.0, 1.0], np.zeros(2), implementation)
    token, kept = (140, 3) if dtype == "float16" else (3, 4)
    assert sample.token_ids[0] == token
    np.testing.assert_allclose(sample.logprobs, -np.log(kept), rtol=1e-5)
