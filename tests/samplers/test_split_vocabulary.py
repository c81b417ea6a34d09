"""Logits whose vocabulary lies over devices give the tokens of whole rows, and stay where they are.

Whatever stands past the vocabulary's end is NaN, so that every number that reads it shows it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from over_devices import DEVICES, most_numbers, over_devices, pad, split
from verify_cases import make_draft, make_keys, mixed_case

import specjax
from specjax.core.rules import standard

pytestmark = pytest.mark.once

BATCH, K = 8, 2
# The vocabularies of GPT-2 and Qwen: blocks of 128 lie on two devices. Of GPT-2's, on 4 devices,
# three columns are padding.
GPT2, QWEN = 50257, 151936


def coupled(draft, *arguments, **options):
    return specjax.coupled_sample(draft.token_ids, *arguments, **options)


# By method: the vocabulary, the devices that it lies over, and those that the requests lie over.
METHODS = {
    "token": (specjax.rejection_sample, GPT2, 4, 1),
    "block": (specjax.block_rejection_sample, GPT2, 2, 2),
    "coupled": (coupled, QWEN, 8, 1),
}
ROWS, REQUESTS = PartitionSpec("data", None, "model"), PartitionSpec("data")


@functools.cache
def case(vocab_size):
    """Greedy, random and inactive requests, and ties of the largest logit on several devices."""
    case = mixed_case(5, BATCH, K, vocab_size)
    case["target_logits"] = np.round(2 * case["target_logits"]) / 2
    # Where p is q all drafts would be accepted: of an invalid request, and past the end of drafts.
    case["temperature"][:3], case["num_tokens"][:3] = (np.nan, 0, 1), (K, K, 1)
    case["cutoff"][:3] = case["draft_cutoff"][:3] = -np.inf
    case["draft_temperature"][:3] = 1
    case["draft_logits"] = case["draft_logits"][case.pop("rows")]
    case["draft_logits"][:3] = case["target_logits"][:3, :K]
    case["token_ids"][:3] = np.argmax(case["target_logits"][:3, :K], axis=-1)
    return case


def arguments(case):
    names = ("positions", "temperature", "cutoff", "bonus_token_ids")
    return {name: jnp.asarray(case[name]) for name in names}


@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_whole_rows_and_no_row_travels(method):
    verify, vocab_size, devices, data = METHODS[method]
    inputs, keys = case(vocab_size), make_keys(BATCH)
    draft, logits = make_draft(inputs), jnp.asarray(inputs["target_logits"])
    whole = verify(draft, logits, keys=keys, **arguments(inputs))
    draft = draft._replace(logits=pad(draft.logits, devices))
    arrays = (draft, pad(logits, devices), keys, arguments(inputs))
    draft_specs = jax.tree.map(lambda _: REQUESTS, draft)._replace(logits=ROWS)

    def call(draft, logits, keys, rest):
        return verify(draft, logits, keys=keys, axis_name="model", vocab_size=vocab_size, **rest)

    specs = (draft_specs, ROWS, REQUESTS, REQUESTS)
    program = over_devices(call, arrays, specs, devices, REQUESTS, data)
    kinds, most = most_numbers(program)
    assert kinds == {"all-gather", "all-reduce", "collective-permute"}
    num_rows = BATCH * (K + 1) / data
    assert most <= num_rows * (vocab_size / 128 + 4096) < num_rows * vocab_size / devices
    ours = program(*arrays)
    assert {0, K} <= set(np.asarray(ours.num_accepted).tolist())
    for name in ("token_ids", "num_accepted", "num_emitted"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(whole, name))
    np.testing.assert_allclose(ours.logprobs, whole.logprobs, atol=2e-6, rtol=1e-6)


def test_a_program_that_gathers_rows_is_seen():
    logits = jnp.zeros((2, 4096))
    gather = functools.partial(jax.lax.all_gather, axis_name="model", axis=1, to="invarying")
    program = over_devices(gather, (logits,), (split(logits),))
    assert most_numbers(program) == ({"all-gather"}, logits.size)


def test_a_device_without_tokens_changes_no_sample():
    """Of 300 tokens, 128 to a device, the fourth has none."""
    devices, vocab_size = 4, 300
    rng = np.random.default_rng(vocab_size)
    rows = jnp.asarray(np.round(2 * rng.normal(size=(8, vocab_size))), jnp.float32)
    rows = rows.at[7].set(-jnp.inf).at[0, -1].set(20.0)
    parts = jnp.pad(rows, ((0, 0), (0, 128 * devices - vocab_size)), constant_values=jnp.nan)
    sample = functools.partial(
        specjax.gumbel_sample,
        keys=make_keys(8),
        positions=3,
        stream=specjax.Stream.TARGET,
        temperature=jnp.array([0, 0, 0, 1, 1, 0.5, 2, 1]),
        cutoff=jnp.full(8, -3.0),
    )
    by_device = functools.partial(sample, axis_name="model", vocab_size=vocab_size)
    ours = over_devices(by_device, (parts,), (split(parts),), devices)(parts)
    whole = sample(rows)
    np.testing.assert_array_equal(ours.token_ids, whole.token_ids)
    np.testing.assert_allclose(ours.logprobs, whole.logprobs, atol=2e-6)
    np.testing.assert_allclose(ours.logsumexp, whole.logsumexp, atol=2e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(axis_name="other"), "it needs the name of one mesh axis"),
        (dict(axis_name=1), "axis_name is 1; it needs the name of one mesh axis"),
        (dict(axis_name="model", vocab_size=513), "Python int from 1 to 512"),
        (dict(axis_name="model", implementation="interpret"), "need draft.logprobs"),
        (dict(axis_name="model", rule=standard()), "rules read whole"),
        (dict(vocab_size=500), "without axis_name"),
    ],
)
def test_what_a_split_does_not_go_with_is_refused(options, message):
    logits = jnp.zeros((1, 2, 512))

    def call(logits):
        draft = specjax.Draft(jnp.zeros((1, 1), jnp.int32), logits=logits[:, :1])
        return specjax.rejection_sample(draft, logits, keys=make_keys(1), positions=0, **options)

    with pytest.raises(ValueError, match=message):
        over_devices(call, (logits,), (split(logits),))


def test_an_axis_of_vmap_is_none_of_a_mesh():
    logits = jnp.zeros((2, 1, 256))
    sample = functools.partial(
        specjax.gumbel_sample, keys=make_keys(1), positions=0, stream=0, axis_name="model"
    )
    with pytest.raises(ValueError, match="'model'; it needs the name of one mesh axis"):
        jax.vmap(sample, axis_name="model")(logits)


@pytest.mark.parametrize(
    ("width", "fields", "message"),
    [
        (127, {}, "at least 128 there"),
        (128, dict(logits=np.zeros((1, 1, 99), np.float32)), "need the same tokens there"),
        (128, dict(token_map=np.arange(128)), "at the target's ids"),
    ],
)
def test_drafts_of_other_tokens_and_narrow_parts_are_refused(width, fields, message):
    logits = jnp.zeros((1, 2, width * DEVICES))

    def call(logits):
        draft = specjax.Draft(jnp.zeros((1, 1), jnp.int32), logits=logits[:, :1])
        specjax.rejection_sample(
            draft._replace(**fields), logits, keys=make_keys(1), positions=0, axis_name="model"
        )

    with pytest.raises(ValueError, match=message):
        over_devices(call, (logits,), (split(logits),))
