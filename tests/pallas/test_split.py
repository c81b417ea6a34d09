"""Kernels of rows over devices, interpreted, give the tokens of whole rows by a gather or two."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from over_devices import WHOLE, most_numbers, num_messages, over_devices
from verify_cases import make_draft, make_keys, mixed_case, sampled_case, with_statistics

import specjax
from specjax import Draft, RaggedDraft, rules
from specjax.call_arrays import VerifyInputs
from specjax.call_options import CallOptions
from specjax.implementation import Implementation
from specjax.pallas.kernel_config import KernelConfig, Tile
from specjax.pallas.split.sample import compare_draws

pytestmark = [pytest.mark.interpret, pytest.mark.once]

# Over 4 devices the last has 232 tokens and NaN after them.
BATCH, K, VOCAB = 24, 2, 1000
REST = ("positions", "temperature", "cutoff", "bonus_token_ids", "conditional_rates")


def mixed():
    """Every kind of request; rows with NaN and +inf on one device; ties on several."""
    case = mixed_case(11, BATCH, K, VOCAB)
    case["target_logits"] = np.round(2 * case["target_logits"]) / 2
    case["target_logits"][2, 0, 700], case["target_logits"][5, 1, 3] = np.nan, np.inf
    return with_statistics(case)


def empty_residuals():
    """Rejections at given rates, where no token is left on one device, or on none.

    Of an odd request p is q. An even one has a one-hot draft, which holds all mass of its row.
    """
    case = sampled_case(12, 8, K, VOCAB)
    del case["bonus_token_ids"]
    case["conditional_rates"] = np.tile(np.float32([1, 0]), (8, 1))
    odd = np.arange(8) % 2 == 1
    case["target_logits"][odd, :K] = case["draft_logits"][odd]
    case["draft_temperature"] = np.where(odd, 1, 0).astype(np.float32)
    for b in (0, 2):
        case["target_logits"][b, 1] = -np.inf
        case["target_logits"][b, 1, case["token_ids"][b, 1]] = 0
    # All other mass is on the last device.
    case["target_logits"][4, 1, :800] = -np.inf
    case["token_ids"][4, 1] = 9
    return with_statistics(case)


def pad_blocks(rows, devices):
    """Rows that end with NaN where a device's tokens are no whole blocks."""
    width = [(0, 0)] * (rows.ndim - 1) + [(0, -rows.shape[-1] % (128 * devices))]
    return jnp.pad(jnp.asarray(rows), width, constant_values=jnp.nan)


def by_rule(rest):
    """The arguments of a call, its rates as a rule."""
    rest = dict(rest)
    rates = rest.pop("conditional_rates", None)
    return rest if rates is None else rest | {"rule": rules.synthetic(rates)}


def split_call(inputs, devices, tile, kernels, **options):
    """The program of a case over devices, and its arguments."""
    sizes = KernelConfig(target=Tile(tile, 4), residual=Tile(tile, 4))
    verify = functools.partial(
        specjax.rejection_sample,
        options=specjax.Options(
            axis_name="model", vocab_size=VOCAB, implementation=Implementation(kernels, (sizes,))
        ),
        **options,
    )

    def call(draft, logits, keys, rest):
        return verify(draft, logits, keys=keys, **by_rule(rest))

    draft, logits = make_draft(inputs), pad_blocks(inputs["target_logits"], devices)
    rest = {name: jnp.asarray(inputs[name]) for name in REST if name in inputs}
    rows = PartitionSpec(None, None, "model")
    specs = jax.tree.map(lambda _: WHOLE, draft)
    if draft.logits is not None:
        specs = specs.replace(logits=rows)
        draft = draft.replace(logits=pad_blocks(draft.logits, devices))
    # Pallas' interpreter does not pass the check of what varies.
    specs, arrays = (specs, rows, WHOLE, WHOLE), (draft, logits, make_keys(len(logits)), rest)
    return over_devices(call, arrays, specs, devices, check_vma=False), arrays


def without_draft_logits():
    case = mixed_case(13, BATCH, K, VOCAB)
    for name in ("draft_logits", "draft_cutoff", "draft_temperature", "rows"):
        del case[name]
    return case


CASES = {
    "sampled": (mixed, 4, {}),
    "one-hot": (without_draft_logits, 2, dict(greedy_logprobs=False)),
    "empty residuals": (empty_residuals, 4, {}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_two_gpus_give_the_tokens_of_whole_rows(name):
    if jax.device_count() < 2 or jax.default_backend() != "gpu":
        pytest.skip("needs two GPUs")
    make, _, options = CASES[name]
    compare_with_whole_rows(make(), 2, "triton", options)


@pytest.mark.parametrize("name", CASES)
def test_two_gathers_of_numbers_suffice_for_the_tokens_of_whole_rows(name):
    make, devices, options = CASES[name]
    compare_with_whole_rows(make(), devices, "interpret", options)


def compare_with_whole_rows(inputs, devices, kernels, options):
    program, arrays = split_call(inputs, devices, 128, kernels, **options)
    assert num_messages(program) == 2
    kinds, most = most_numbers(program)
    assert kinds == {"all-gather"}
    logits, keys, rest = jnp.asarray(inputs["target_logits"]), *arrays[2:]
    assert most <= logits.shape[0] * (K + 1) * (1024 / 128 * 3 + 2 * devices)
    whole = specjax.rejection_sample(
        make_draft(inputs), logits, keys=keys, **by_rule(rest), **options
    )
    ours = program(*arrays)
    for field in ("token_ids", "num_accepted", "num_emitted"):
        np.testing.assert_array_equal(getattr(ours, field), getattr(whole, field))
    np.testing.assert_allclose(ours.logprobs, whole.logprobs, atol=2e-6, rtol=2e-6)


def interpreted(function, vocab_size, **options):
    """A function of rows over devices, on the interpreted kernels."""
    split = specjax.Options(axis_name="model", vocab_size=vocab_size, implementation="interpret")
    return functools.partial(function, options=split, **options)


def test_one_gather_suffices_for_the_samples_of_whole_rows():
    devices, size = 4, 8
    rng = np.random.default_rng(3)
    rows = np.round(2 * rng.normal(size=(size, 500))).astype(np.float32)
    rows[1, 400], rows[2] = np.nan, -np.inf
    # All mass of a row is on the last device, of another on the first two.
    rows[3, :384], rows[4, 256:] = -np.inf, -np.inf
    # Two devices have a greedy row's largest logit.
    rows[0, [200, 300]] = 9
    options = dict(
        keys=make_keys(size),
        positions=jnp.arange(size),
        stream=specjax.Stream.TARGET,
        temperature=jnp.array([0, 1, 1, 0.7, 1, 0.5, 2, 0]),
        cutoff=jnp.full(size, -3.0),
    )
    rows, specs = jnp.asarray(rows), (PartitionSpec(None, "model"),)
    sample, padded = interpreted(specjax.gumbel_sample, 500, **options), pad_blocks(rows, devices)
    program = over_devices(sample, (padded,), specs, devices, check_vma=False)
    assert (num_messages(program), *most_numbers(program)) == (
        1,
        {"all-gather"},
        5 * size * devices,
    )
    ours, whole = program(padded), specjax.gumbel_sample(rows, **options)
    np.testing.assert_array_equal(ours.token_ids, whole.token_ids)
    np.testing.assert_allclose(ours.logprobs, whole.logprobs, atol=2e-6)
    np.testing.assert_allclose(ours.logsumexp, whole.logsumexp, atol=2e-6)


@pytest.mark.parametrize("is_ragged", [False, True])
def test_one_gather_suffices_for_coupled_sampling(is_ragged):
    case = mixed_case(17, BATCH, K, VOCAB)
    keys, logits = make_keys(BATCH), jnp.asarray(case["target_logits"]).at[3, 1, 5].set(jnp.nan)
    rest = dict(positions=jnp.asarray(case["positions"]), cutoff=jnp.asarray(case["cutoff"]))
    rest["temperature"] = jnp.asarray(case["temperature"])
    # What the target draws first, whatever is drafted, is drafted by two requests of three.
    tokens, counts = np.array(case["token_ids"]), jnp.asarray(case["num_tokens"])
    rest |= dict(keys=keys, rule=rules.coupled())
    draft = Draft(jnp.asarray(tokens), num_tokens=counts)
    first = specjax.rejection_sample(draft, logits, **rest)
    agrees = np.arange(BATCH) % 3 > 0
    tokens[agrees, 0] = np.asarray(first.token_ids)[agrees, 0]
    draft = draft.replace(token_ids=jnp.asarray(tokens))
    rows = PartitionSpec(None, None, "model")
    if is_ragged:
        counts = np.clip(case["num_tokens"], 0, K)
        cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        drafted = np.arange(K) < counts[:, None]
        verified = np.arange(K + 1) <= counts[:, None]
        logits, rest["cutoff"] = logits[verified], rest["cutoff"][verified]
        draft = RaggedDraft(
            jnp.asarray(tokens[drafted]),
            jnp.asarray(cu),
            max_draft_tokens=K,
            num_tokens=jnp.asarray(np.minimum(case["num_tokens"], counts)),
        )
        rows = PartitionSpec(None, "model")
    call = interpreted(functools.partial(specjax.rejection_sample, draft), VOCAB, **rest)
    padded = pad_blocks(logits, 2)
    program = over_devices(call, (padded,), (rows,), 2, check_vma=False)
    assert (num_messages(program), most_numbers(program)[0]) == (1, {"all-gather"})
    ours, whole = program(padded), specjax.rejection_sample(draft, logits, **rest)
    assert {0, 1} <= set(np.asarray(ours.num_accepted).tolist())
    for field in ("token_ids", "num_accepted", "num_emitted"):
        np.testing.assert_array_equal(getattr(ours, field), getattr(whole, field))
    np.testing.assert_allclose(ours.logprobs, whole.logprobs, atol=2e-6, rtol=2e-6)


def test_what_rows_have_drawn_counts_for_active_requests_up_to_an_invalid_row():
    """Requests end to end: one that says more drafts than it has, and one of an invalid row.

    The last two are inactive, of -1 drafts and of no temperature.
    """
    cu = np.array([0, 1, 3, 4, 5], np.int32)
    # After the first request's draft its target draws what the second one drafts first.
    drafted, drawn = np.array([7, 8, 9, 5, 6]), np.array([7, 8, 8, -1, 3, 5, 4, -1, -1])
    inputs = VerifyInputs(
        RaggedDraft(
            jnp.asarray(drafted),
            jnp.asarray(cu),
            max_draft_tokens=2,
            num_tokens=jnp.array([5, 5, -1, 5]),
        ),
        jnp.zeros((9, 1)),
        None,
        keys=None,
        positions=None,
        temperature=jnp.array([1, 1, 1, jnp.nan]),
    )
    sample = specjax.Sample(jnp.asarray(drawn), -jnp.ones(9), None)
    ours = compare_draws(inputs, sample, CallOptions(jnp.float32, None, 2, rules.coupled()))
    assert ours.token_ids.tolist() == [[7, 8, -1], [8, -1, -1], [-1] * 3, [-1] * 3]
    assert (ours.num_accepted.tolist(), ours.num_emitted.tolist()) == ([1, 1, 0, 0], [2, 1, 0, 0])
    np.testing.assert_array_equal(ours.logprobs, -(np.asarray(ours.token_ids) >= 0).astype(float))


@pytest.mark.parametrize(
    ("width", "fields", "message"),
    [
        (192, {}, "in multiples of 128"),
        (256, dict(logprobs=None), "need draft.logprobs"),
    ],
)
def test_kernels_by_name_refuse_what_they_do_not_read(width, fields, message):
    logits = jnp.zeros((1, 2, 2 * width))
    ones = jnp.zeros((1, 1))
    draft = specjax.Draft(jnp.zeros((1, 1), jnp.int32), logprobs=ones, logsumexp=ones)

    def call(logits):
        return specjax.rejection_sample(
            draft.replace(logits=logits[:, :1], **fields),
            logits,
            keys=make_keys(1),
            positions=0,
            options=specjax.Options(axis_name="model", implementation="interpret"),
        )

    with pytest.raises(ValueError, match=message):
        over_devices(call, (logits,), (PartitionSpec(None, None, "model"),), 2)
