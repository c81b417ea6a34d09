"""Logits whose vocabulary lies over devices give the tokens of whole rows, and stay where they are.

Whatever stands past the vocabulary's end is NaN, so that every number that reads it shows it.
"""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from over_devices import DEVICES, mesh_of, most_numbers, over_devices, pad, split
from verify_cases import make_draft, make_keys, mixed_case

import specjax
from specjax import Options, RaggedDraft, rules
from specjax.devices.vocabulary_split import parse_split
from specjax.samplers.gumbel_sample import sample_batch

pytestmark = pytest.mark.once

BATCH, K = 8, 2
# The vocabularies of GPT-2 and Qwen: blocks of 128 lie on two devices. Of GPT-2's, on 4 devices,
# three columns are padding.
GPT2, QWEN = 50257, 151936


by_block = functools.partial(specjax.rejection_sample, rule=rules.block())


def coupled(draft, *arguments, **options):
    draft = specjax.Draft(draft.token_ids)
    return specjax.rejection_sample(draft, *arguments, rule=rules.coupled(), **options)


def by_axis_name(verify, draft, logits, keys, rest, *, vocab_size, devices, data):
    """What a verification inside `shard_map` returns, and its program."""
    specs = jax.tree.map(lambda _: REQUESTS, draft).replace(logits=ROWS)
    arrays = (draft, logits, keys, rest)

    def call(draft, logits, keys, rest):
        options = Options(axis_name="model", vocab_size=vocab_size)
        return verify(draft, logits, keys=keys, options=options, **rest)

    program = over_devices(call, arrays, (specs, ROWS, REQUESTS, REQUESTS), devices, REQUESTS, data)
    return program(*arrays), program


def lay(logits, devices, data=1, kind=AxisType.Auto):
    """Rows of logits that lie over a mesh, of the requests over its axis "data"."""
    between = (None,) * (logits.ndim - 2)
    requests = "data" if data > 1 else None
    spec = PartitionSpec(requests, *between, "model")
    return jax.device_put(logits, NamedSharding(mesh_of(devices, data, kind), spec))


def by_sharding(verify, draft, logits, keys, rest, *, vocab_size, devices, data):
    """What a verification of arrays over Auto axes returns, and its program."""
    # The package shows the function of this name, not its module.
    module = importlib.import_module("specjax.samplers.rejection_sample")
    jitted, programs = module.run_verification, []

    def compile_and_run(arrays, *, options):
        programs.append(jitted.lower(arrays, options=options).compile())
        return programs[0](arrays)

    draft = draft.replace(logits=lay(draft.logits, devices, data))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "run_verification", compile_and_run)
        logits = lay(logits, devices, data)
        ours = verify(draft, logits, keys=keys, options=Options(vocab_size=vocab_size), **rest)
    return ours, programs[0]


def by_type(verify, draft, logits, keys, rest, *, vocab_size, devices, data):
    """What a verification inside `jit` of arrays over Explicit axes returns, and its program."""
    draft = draft.replace(logits=lay(draft.logits, devices, data, AxisType.Explicit))
    arrays = (draft, lay(logits, devices, data, AxisType.Explicit), keys, rest)

    def call(draft, logits, keys, rest):
        return verify(draft, logits, keys=keys, options=Options(vocab_size=vocab_size), **rest)

    program = jax.jit(call).lower(*arrays).compile()
    return program(*arrays), program


def flat(x):
    """Rows of requests laid end to end."""
    return x.reshape(-1, *x.shape[2:])


# By method: how a call is told of the split, the vocabulary, the devices that it lies over, and
# those that the requests lie over.
METHODS = {
    "token": (specjax.rejection_sample, by_axis_name, GPT2, 4, 1),
    "ragged": (specjax.rejection_sample, by_sharding, GPT2, 8, 1),
    "block": (by_block, by_sharding, GPT2, 2, 2),
    "coupled": (coupled, by_type, QWEN, 8, 1),
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
    # The target draws what the request of an invalid temperature has drafted.
    case["target_logits"][0, :K, 9] = 60
    case["draft_logits"] = case["draft_logits"][case.pop("rows")]
    case["draft_logits"][:3] = case["target_logits"][:3, :K]
    case["token_ids"][:3] = np.argmax(case["target_logits"][:3, :K], axis=-1)
    return case


def arguments(case):
    names = ("positions", "temperature", "cutoff", "bonus_token_ids")
    return {name: jnp.asarray(case[name]) for name in names}


@functools.cache
def whole_rows(method):
    """What a method makes of whole rows, of requests laid end to end as of padded ones."""
    verify, _, vocab_size, *_ = METHODS["token" if method == "ragged" else method]
    inputs = case(vocab_size)
    logits, keys = jnp.asarray(inputs["target_logits"]), make_keys(BATCH)
    return verify(make_draft(inputs), logits, keys=keys, **arguments(inputs))


@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_whole_rows_and_no_row_travels(method):
    verify, run, vocab_size, devices, data = METHODS[method]
    inputs = case(vocab_size)
    draft, rest = make_draft(inputs), arguments(inputs)
    logits = pad(jnp.asarray(inputs["target_logits"]), devices)
    draft = draft.replace(logits=pad(draft.logits, devices))
    if method == "ragged":
        fields = vars(jax.tree.map(lambda x: flat(x) if x.ndim > 1 else x, draft))
        ends = K * jnp.arange(BATCH + 1)
        draft = RaggedDraft(cu_num_draft_tokens=ends, max_draft_tokens=K, **fields)
        rest["cutoff"], logits = flat(rest["cutoff"]), flat(logits)
    ours, program = run(
        verify,
        draft,
        logits,
        make_keys(BATCH),
        rest,
        vocab_size=vocab_size,
        devices=devices,
        data=data,
    )
    kinds, most = most_numbers(program)
    assert kinds == {"all-gather", "all-reduce", "collective-permute"}
    num_rows = BATCH * (K + 1) / data
    assert most <= num_rows * (vocab_size / 128 + 4096) < num_rows * vocab_size / devices
    whole = whole_rows(method)
    assert {0, K} <= set(np.asarray(ours.num_accepted).tolist())
    for name in ("token_ids", "num_accepted", "num_emitted"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(whole, name))
    np.testing.assert_allclose(ours.logprobs, whole.logprobs, atol=2e-6, rtol=1e-6)


# A row whose largest logit is the last of 500 tokens, on a device with room for 512.
UP_TO_499 = np.where(np.arange(512) < 500, np.arange(512), np.nan).astype(np.float32)


@pytest.mark.parametrize("ends", [False, True], ids=["padded", "end to end"])
@pytest.mark.parametrize("rule", [rules.standard(), rules.block(), rules.coupled()], ids=str)
def test_every_verification_asks_for_the_axis_and_for_the_size(rule, ends):
    ids, logits = jnp.zeros((2, 1), jnp.int32), jnp.zeros((2, 2, 512))
    draft = specjax.Draft(ids)
    if ends:
        draft, logits = RaggedDraft(flat(ids), np.arange(3), max_draft_tokens=1), flat(logits)
    verify = functools.partial(
        specjax.rejection_sample,
        draft,
        keys=make_keys(2),
        positions=0,
        temperature=0.0,
        rule=rule,
    )
    with pytest.raises(ValueError, match="it needs the name of one mesh axis"):
        verify(logits, options=Options(axis_name="other"))
    with pytest.raises(ValueError, match="vocab_size is 500 without axis_name"):
        verify(logits, options=Options(vocab_size=500))
    # An axis of one device counts. NaN after the vocabulary would end every request.
    parts = lay(jnp.broadcast_to(UP_TO_499, logits.shape), 1, data=2)
    assert verify(parts, options=Options(vocab_size=500)).token_ids.tolist() == [[499, -1]] * 2


def test_an_axis_of_one_device_leaves_padding_out_of_what_is_cut_listed_and_drawn():
    parts = lay(UP_TO_499[None], 1)
    ids, cut = jnp.array([498]), dict(temperature=1.0, top_k=1)
    assert specjax.logit_cutoff(parts, vocab_size=500, **cut).tolist() == [499]
    listed = specjax.top_logprobs(parts, ids, 1, vocab_size=500)
    assert (listed.token_ids.tolist(), listed.rank.tolist()) == ([[499]], [2])
    greedy = dict(keys=make_keys(1), positions=0, stream=0, temperature=0.0)
    sample = functools.partial(
        specjax.gumbel_sample, options=Options(axis_name="model", vocab_size=500), **greedy
    )
    assert over_devices(sample, (parts,), (split(parts),), 1)(parts).token_ids.tolist() == [499]


@pytest.mark.parametrize(("devices", "kind"), [(2, AxisType.Auto), (4, AxisType.Explicit)])
def test_samples_of_rows_whose_sharding_splits_them_are_those_of_whole_rows(devices, kind):
    """Parts of Qwen's vocabulary over two and four devices begin within a block."""
    rows = jax.random.normal(jax.random.key(1), (4, QWEN))
    sample = functools.partial(
        specjax.gumbel_sample, keys=make_keys(4), positions=3, stream=specjax.Stream.TARGET
    )
    whole = sample(rows)
    parts = lay(rows, devices, kind=kind)
    if kind == AxisType.Explicit:
        program = jax.jit(sample).lower(parts).compile()
        assert most_numbers(program)[1] <= 4 * (QWEN / 128 + 4096)
        ours = program(parts)
    else:
        ours = sample(parts)
        compiled = sample_batch._cache_size()
        sample(parts + 1)
        assert sample_batch._cache_size() == compiled
    np.testing.assert_array_equal(ours.token_ids, whole.token_ids)
    np.testing.assert_allclose(ours.logprobs, whole.logprobs, atol=2e-6)


SHAPES = [(4, 2), (2, 4), (8, 1), (1, 8), (1, 1)]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(("data", "devices"), SHAPES)
def test_vocab_size_is_of_the_axis_that_a_sharding_names_on_a_mesh_of_any_shape(
    data, devices, kind
):
    """What `jit` returns of Auto axes does not name those of one device."""
    mesh = mesh_of(devices, data, kind)
    rows = jax.device_put(jnp.zeros((8, 1024)), NamedSharding(mesh, PartitionSpec("data", "model")))
    # Without a size the kernels of whole rows read what one device has.
    is_split = devices > 1
    assert (parse_split(None, None, rows) is not None) == is_split
    split = parse_split(None, 1000, rows)
    assert (split.axis_name, split.vocab_size, split.requests) == ("model", 1000, "data")
    whole = jax.device_put(rows, NamedSharding(mesh, PartitionSpec("data")))
    if is_split or kind == AxisType.Explicit:
        with pytest.raises(ValueError, match="vocab_size is 1000 without axis_name"):
            parse_split(None, 1000, whole)
    if kind == AxisType.Auto:
        product = jax.jit(jnp.dot)(jnp.ones((8, 8)), rows)
        assert parse_split(None, 1000, product).vocab_size == 1000
        call = functools.partial(parse_split, None, 1000)
        with jax.set_mesh(mesh), pytest.raises(ValueError, match="vocab_size is 1000 without"):
            jax.eval_shape(call, rows)


@pytest.mark.parametrize(
    ("width", "fields", "rule"),
    [
        (127, {}, None),
        (128, dict(logits=np.zeros((1, 1, 99), np.float32)), None),
        (128, dict(token_map=np.arange(128 * DEVICES)), None),
        (128, {}, rules.lenience(0.5)),
    ],
)
def test_what_reads_whole_rows_gathers_those_of_a_sharding_unless_it_names_their_size(
    width, fields, rule
):
    logits = lay(jnp.zeros((1, 2, width * DEVICES)), DEVICES)
    draft = specjax.Draft(jnp.zeros((1, 1), jnp.int32), logits=logits[:, :1])
    draft = draft.replace(**fields)
    assert parse_split(None, None, logits, draft=draft, rule=rule) is None
    with pytest.raises(ValueError, match="axis 'model'"):
        parse_split(None, width, logits, draft=draft, rule=rule)


@pytest.mark.parametrize("width", [64, 128], ids=["gathered", "split"])
def test_requests_stay_on_their_devices_outside_a_context_of_their_mesh(width):
    rows = lay(jnp.zeros((2, 2 * width)), 2, data=2, kind=AxisType.Explicit)
    sample = functools.partial(specjax.gumbel_sample, keys=make_keys(2), positions=0, stream=0)
    assert jax.eval_shape(jax.jit(sample), rows).token_ids.sharding.spec == REQUESTS


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
    by_device = functools.partial(sample, options=Options(axis_name="model", vocab_size=vocab_size))
    ours = over_devices(by_device, (parts,), (split(parts),), devices)(parts)
    whole = sample(rows)
    np.testing.assert_array_equal(ours.token_ids, whole.token_ids)
    np.testing.assert_allclose(ours.logprobs, whole.logprobs, atol=2e-6)
    np.testing.assert_allclose(ours.logsumexp, whole.logsumexp, atol=2e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(axis_name="other"), "it needs the name of one mesh axis"),
        (Options(axis_name=1), "axis_name is 1; it needs the name of one mesh axis"),
        (Options(axis_name="model", vocab_size=513), "Python int from 1 to 512"),
        (Options(axis_name="model", implementation="interpret"), "need draft.logprobs"),
        (Options(vocab_size=500), "without axis_name"),
    ],
)
def test_what_a_split_does_not_go_with_is_refused(options, message):
    logits = jnp.zeros((1, 2, 512))

    def call(logits):
        draft = specjax.Draft(jnp.zeros((1, 1), jnp.int32), logits=logits[:, :1])
        return specjax.rejection_sample(
            draft, logits, keys=make_keys(1), positions=0, options=options
        )

    with pytest.raises(ValueError, match=message):
        over_devices(call, (logits,), (split(logits),))


def test_an_axis_of_vmap_is_none_of_a_mesh():
    logits = jnp.zeros((2, 1, 256))
    sample = functools.partial(
        specjax.gumbel_sample,
        keys=make_keys(1),
        positions=0,
        stream=0,
        options=Options(axis_name="model"),
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
            draft.replace(**fields),
            logits,
            keys=make_keys(1),
            positions=0,
            options=Options(axis_name="model"),
        )

    with pytest.raises(ValueError, match=message):
        over_devices(call, (logits,), (split(logits),))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_ranks_of_split_rows_need_no_list(kind):
    logits = jax.random.normal(jax.random.key(0), (2, 512))
    ids = jnp.array([3, 500])
    split_rows = lay(logits, 2, kind=kind)
    ours, whole = (specjax.top_logprobs(rows, ids, 0) for rows in (split_rows, logits))
    assert ours.token_ids.shape == (2, 0)
    np.testing.assert_array_equal(ours.rank, whole.rank)


def test_a_draft_over_explicit_axes_needs_its_target_there():
    draft = specjax.Draft(
        jnp.zeros((1, 1), jnp.int32), lay(jnp.zeros((1, 1, 512)), 2, kind=AxisType.Explicit)
    )
    with pytest.raises(ValueError, match=r"draft\.logits lie over mesh axis 'model'"):
        specjax.rejection_sample(draft, jnp.zeros((1, 2, 512)), keys=make_keys(1), positions=0)
