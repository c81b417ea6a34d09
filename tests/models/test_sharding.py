"""A model over the devices of a mesh gives the tokens of one device, and its weights stay put."""

import collections
import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from decoder_features import FEATURES
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from over_devices import collectives

import specjax
from specjax.call_arrays import VerifyInputs
from specjax.call_options import CallOptions
from specjax.decode.drafters import Models
from specjax.decode.prefill import run_prefill
from specjax.decode.request_batch import RequestArguments, check_arguments
from specjax.decode.step import run_step
from specjax.devices.placement import parse_mesh
from specjax.devices.vocabulary_split import VocabularySplit
from specjax.implementation import DeviceFacts, Implementation
from specjax.models import (
    DFlashConfig,
    Eagle3Config,
    TransformerConfig,
    build,
    build_dflash,
    build_eagle3,
    dflash_drafter,
    eagle3_drafter,
    load,
    save,
    split_model,
)
from specjax.models.decoder.transformer import param_shapes
from specjax.models.sharding import sharded_model, share_ranges, share_shapes
from specjax.samplers.batch import verify_over_mesh

pytestmark = pytest.mark.once

# Of 300 tokens, the shares have 256 and 44 of them.
CONFIG = TransformerConfig(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    tie_word_embeddings=False,
    qkv_bias=True,
)
# One key-value head for two devices.
FULL = dataclasses.replace(
    CONFIG,
    **FEATURES,
    num_hidden_layers=2,
    num_key_value_heads=1,
    tie_word_embeddings=True,
    embedding_scale=8.0,
)
K, PROMPT, LENGTHS = 3, np.arange(24).reshape(3, 8) * 7, np.array([8, 5, 2])


def mesh_of(data, model):
    return jax.make_mesh((data, model), ("data", "model"), devices=jax.devices()[: data * model])


def tokenizer():
    return tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))


def random_params(config, seed=0):
    """Weights of flat distributions, and biases that are no zeros."""
    rng = np.random.default_rng(seed)
    shapes = param_shapes(config)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) / 8, shapes)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, and a draft of slightly other weights and with ten tokens more."""
    params, config = random_params(CONFIG), dataclasses.replace(CONFIG, vocab_size=310)
    draft = random_params(config, seed=1)

    def add(whole, noise):
        return np.concatenate([whole + noise[: len(whole)] / 4, noise[len(whole) :]])

    draft = jax.tree.map(add, params, draft)
    paths = []
    for own, arrays in ((CONFIG, params), (config, draft)):
        paths.append(tmp_path_factory.mktemp("model"))
        save(paths[-1], arrays, own, tokenizer(), dtype="float32")
    return tuple(paths)


def decode(target, drafter, keys):
    return specjax.generate(
        target,
        drafter,
        (PROMPT, LENGTHS),
        keys=keys,
        config=specjax.SpeculativeConfig(K),
        max_new_tokens=12,
        options=specjax.LoopOptions(max_length=32, prefill_chunk_size=K + 1),
        temperature=np.array([0, 1.0, 0.7], np.float32),
    )


def keys_of(batch_size):
    return jax.vmap(jax.random.key)(jnp.arange(batch_size))


@functools.cache
def compiled(folders, shape, replicate):
    """The program of whole texts, and what it returns; without a shape on one device."""
    options = {} if shape is None else {"mesh": mesh_of(*shape)}
    target = load(folders[0], **options)[0]
    draft = load(folders[1], replicate=replicate, **options)[0]
    arguments = target, specjax.model_drafter(draft), keys_of(3)
    program = jax.jit(decode).lower(*arguments).compile()
    return program, jax.device_get(program(*arguments))


# One axis of two devices with a draft on each; three requests over two rows of four devices, where
# two share a key-value head and the last has no token.
@pytest.mark.parametrize(("shape", "replicate"), [((1, 2), True), ((2, 4), False)])
def test_tokens_greedy_and_sampled_are_those_of_one_device(folders, shape, replicate):
    _, one = compiled(folders, None, False)
    _, split = compiled(folders, shape, replicate)
    assert 0 < one.metrics.num_accepted.sum() < one.metrics.num_drafted.sum()
    np.testing.assert_array_equal(split.token_ids, one.token_ids)
    np.testing.assert_array_equal(split.metrics.num_accepted, one.metrics.num_accepted)
    np.testing.assert_allclose(split.logprobs, one.logprobs, atol=1e-4)


@pytest.mark.parametrize("drafts", [False, True])
def test_no_row_of_logits_travels_where_devices_do_not_divide_the_requests(drafts):
    target = split_model(TransformerConfig(2000, 16, 32, 1, 4, 2, 8), seed=3, mesh=mesh_of(2, 2))
    drafter = specjax.ngram_drafter()
    if drafts:
        config = TransformerConfig(2000, 8, 16, 1, 2, 1, 4)
        draft = split_model(config, seed=4, mesh=mesh_of(2, 2), replicate=True)
        drafter = specjax.model_drafter(draft)

    config = specjax.SpeculativeConfig(num_speculative_tokens=2)

    def decode(target, drafter, keys):
        prompts = np.ones((5, 8), np.int32), np.full(5, 8)
        options = {"keys": keys, "max_new_tokens": 8, "config": config}
        options["options"] = specjax.LoopOptions(max_length=24)
        options["temperature"] = np.ones(5, np.float32)
        if drafts:
            return specjax.generate(target, drafter, prompts, **options)
        state = specjax.init(target, drafter, prompts, **options)
        return specjax.step(target, drafter, state, config=config)

    keys = jax.random.split(jax.random.key(0), 5)
    program = jax.jit(decode).lower(target, drafter, keys).compile()
    # Blocks of rows, buffers of text, hidden states: less than a row of six requests' logits.
    assert max(size for _, size in collectives(program)) < 2000


def test_requests_that_devices_do_not_divide_keep_their_own_options():
    config, rng = TransformerConfig(64, 16, 32, 1, 4, 2, 8), np.random.default_rng(0)
    allowed, grammar_state = rng.random((3, 64)) < 0.7, np.array([-1, 0, 1], np.int32)
    # An even token after an odd one, and the other way round.
    parity = np.arange(64, dtype=np.int32) % 2
    words = np.array([[0x55555555] * 2, [0xAAAAAAAA] * 2], np.uint32)
    grammar = specjax.Grammar(np.array([[1, 0], [1, 0]], np.int32), parity, words)
    sampling = specjax.SamplingParams(
        top_k=np.array([0, 9, 5], np.int32),
        top_p=0.9,
        bias=rng.normal(size=(3, 64)).astype(np.float32),
        allowed=allowed,
        bad_words=rng.integers(0, 64, (3, 2, 1)).astype(np.int32),
        grammar=grammar,
        grammar_state=grammar_state,
    )
    arguments = {
        "keys": jax.random.key(1),
        "max_new_tokens": np.array([9, 4, 12], np.int32),
        "temperature": np.array([1.0, 0.0, 0.7], np.float32),
        "sampling": sampling,
    }
    options = specjax.LoopOptions(max_length=20, num_logprobs=2, max_kept_tokens=64)
    static = {"config": specjax.SpeculativeConfig(num_speculative_tokens=2), "options": options}

    prompts = np.full((3, 4), 5), np.array([2, 4, 3])
    given = split_model(config, seed=3, mesh=mesh_of(2, 1)), specjax.ngram_drafter()
    compiled = specjax.compile_generate(*given, batch_size=3, sampling=sampling, **static)
    found = [
        specjax.generate(*given, prompts, **arguments, **static),
        compiled(*given, prompts, **arguments),
    ]
    # The same masks, given for every row.
    others = arguments | {"sampling": sampling._replace(allowed=allowed[:, None])}
    state = specjax.init(*given, prompts, **others, **static)
    while not state.finish.all():
        rows = np.repeat(allowed[[0, 1, 2, 2], None], 3, axis=1)
        state, _ = specjax.step(*given, state, config=static["config"], allowed=rows)
    fields = [getattr(state, name) for name in specjax.Generation._fields]
    found.append(jax.tree.map(lambda x: x[:3], specjax.Generation(*fields)))

    one = split_model(config, seed=3, mesh=mesh_of(1, 1))
    expected = specjax.generate(one, given[1], prompts, **arguments, **static)
    for output in found:
        chex.assert_trees_all_close(output, expected, atol=1e-4)


def share_sizes(model):
    """How many numbers a device has of each array that is split."""
    arrays = jax.tree.leaves(model.params)
    return [x.size // 2 for x in arrays if not x.sharding.is_fully_replicated]


def test_what_travels_is_smaller_than_a_device_has_of_any_matrix(folders):
    program, _ = compiled(folders, (1, 2), True)
    sizes = share_sizes(load(folders[0], mesh=mesh_of(1, 2))[0])
    smallest = min(size for size in sizes if size > CONFIG.vocab_size)
    assert smallest == CONFIG.hidden_size * CONFIG.head_dim * 2
    assert max(size for _, size in collectives(program)) < smallest


@pytest.mark.parametrize(("data", "is_wrong"), [(1, False), (2, False), (1, True)])
def test_a_step_of_one_token_sums_rows_and_nothing_else(data, is_wrong):
    """A product that gathers a weight, as GSPMD has it for few rows, is seen."""
    model = split_model(FULL, random_params(FULL), mesh=mesh_of(data, 2))

    def step(params, ids, cache):
        if is_wrong:
            whole = model.placement.sharding(jax.P())
            params = params | {
                "embedding": jax.lax.with_sharding_constraint(params["embedding"], whole)
            }
        return model.apply(params, ids, ids, cache)

    ids = jnp.zeros((data, 1), jnp.int32)
    cache = jax.eval_shape(lambda: model.init_cache(data, 16))
    program = jax.jit(step).lower(model.params, ids, cache).compile()
    rows = [("all-reduce", FULL.hidden_size)] * (2 * FULL.num_hidden_layers + 1)
    assert (collectives(program) == rows) != is_wrong


def test_every_family_has_the_states_and_logits_of_one_device():
    params, ids = random_params(FULL), jnp.asarray(PROMPT[:, :3] % 300, jnp.int32)
    positions = jnp.asarray([[0, 1, 2], [0, 1, -1], [0, 1, 2]], jnp.int32)

    @jax.jit
    def run(model):
        cache = model.init_cache(3, 16)
        hidden, features, cache = model.apply_with_taps(model.params, ids, positions, cache, (0, 2))
        return model.logits(model.params, hidden), features

    one = run(build(FULL, params))
    split = run(split_model(FULL, params, mesh=mesh_of(1, 2)))
    real = np.asarray(positions) >= 0
    for ours, theirs in zip(split, one, strict=True):
        np.testing.assert_allclose(ours[real], theirs[real], atol=2e-5)


def text_of(model, noise):
    """Tokens of every request that score best by logits and noise, and by how much."""

    def step(carry, noise):
        t, ids, cache = carry
        places = jnp.broadcast_to(t, ids.shape)
        hidden, cache = model.apply(model.params, ids, places, cache)
        scores = model.logits(model.params, hidden[:, 0]).astype(jnp.float32) + noise
        two = jax.lax.top_k(scores, 2)[0]
        ids = jnp.argmax(scores, axis=-1, keepdims=True)
        return (t + 1, ids, cache), (ids[:, 0], two[:, 0] - two[:, 1])

    size = noise.shape[1]
    start = (0, jnp.arange(size)[:, None], model.init_cache(size, len(noise)))
    return jax.lax.scan(step, start, noise)[1]


def test_in_bfloat16_texts_part_at_near_ties_alone():
    """Half of the requests are greedy, half sampled. A wrong share parts them at any gap."""
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(CONFIG))
    noise = np.random.default_rng(0).gumbel(size=(24, 8, 300)).astype(np.float32)
    noise[:, ::2] = 0
    models = build(config, params), split_model(config, params, mesh=mesh_of(1, 2))
    (one, gaps), (split, _) = jax.device_get([jax.jit(text_of)(x, noise) for x in models])
    first, parts = (one != split).argmax(axis=0), (one != split).any(axis=0)
    assert (gaps[first, np.arange(8)] < 0.05)[parts].all()
    assert parts.sum() < 4


def test_an_engine_gives_the_tokens_of_one_device(folders):
    """Plain decoding of three requests in two slots, whose caches lie over two devices."""
    key = jax.random.key(0)

    def texts(**options):
        target = load(folders[0], **options)[0]
        options = specjax.LoopOptions(max_length=16, prefill_chunk_size=4)
        engine = specjax.Engine(target, None, num_slots=2, options=options)
        asked = [engine.submit(PROMPT[i, :5], key=key, max_new_tokens=6) for i in range(3)]
        engine.run()
        return engine, [request.token_ids for request in asked]

    split, ours = texts(mesh=mesh_of(1, 2))
    assert ours == texts()[1]
    # One that was made before is refused where it would compute.
    with jax.set_mesh(mesh_of(1, 2)):
        split.submit([1, 2], key=key)
        for run in (split.run, lambda: texts(mesh=mesh_of(1, 2))):
            with pytest.raises(ValueError, match="Make and run an Engine outside"):
                run()
    split.run()
    with pytest.raises(ValueError, match="mesh has 2 devices on its axis 'data'; an engine moves"):
        texts(mesh=mesh_of(2, 2))


def test_scores_and_listed_prompts_are_those_of_one_device(folders):
    """Three texts on two rows of devices, also inside explicit axes."""
    options = specjax.LoopOptions(num_logprobs=2, prompt_logprobs=True, prefill_chunk_size=4)
    target, mesh = load(folders[0])[0], mesh_of(2, 2)
    split = load(folders[0], mesh=mesh)[0]
    expected = specjax.score(target, (PROMPT, LENGTHS), options=options)
    found = [specjax.score(split, (PROMPT, LENGTHS), options=options)]
    with jax.set_mesh(mesh):
        found.append(specjax.score(split, (PROMPT, LENGTHS), options=options))
    output = specjax.generate(
        split, None, (PROMPT, LENGTHS), keys=keys_of(3), max_new_tokens=1, options=options
    )
    rows = jax.device_get(output.top_logprobs)
    for i, one in enumerate(expected):
        for scores in found:
            np.testing.assert_allclose(scores[i].logprobs, one.logprobs, atol=1e-4)
            np.testing.assert_array_equal(scores[i].is_argmax, one.is_argmax)
        listed = rows.logprob[i, 1 : LENGTHS[i]]
        np.testing.assert_allclose(listed, one.logprobs[1:], atol=1e-4)


def test_calls_inside_explicit_axes_give_arrays_of_these_axes(folders, tmp_path):
    """The prompts, too, say over which axis they lie; and so do those of compiled programs."""
    mesh, rows = mesh_of(2, 2), jax.P("data")
    assert set(mesh.axis_types) == {AxisType.Explicit}
    target, options = load(folders[0], mesh=mesh)[0], dict(max_new_tokens=2)
    room = specjax.LoopOptions(max_length=32)
    programs = specjax.compile_generate(target, None, batch_size=2, options=room)
    options |= dict(keys=keys_of(2), temperature=np.zeros(2, np.float32))
    with jax.set_mesh(mesh):
        given = jax.device_put((PROMPT[:2], LENGTHS[:2]), NamedSharding(mesh, rows))
        state = specjax.init(target, None, given, **options, options=room)
        state = specjax.step(target, None, state)[0]
        outputs = [specjax.generate(target, None, given, **options, options=room)]
        outputs += [programs(target, None, given, **options), state]
        # They may be read with the caller's own.
        for output in outputs:
            assert (output.lengths == given[1] + 2).all()
        step = functools.partial(specjax.step, target, None)
        with pytest.raises(ValueError, match="call this outside jit, or inside jax"):
            jax.eval_shape(step, state)
        on_auto = jax.sharding.auto_axes(step, axes=mesh.axis_names, out_sharding=jax.P())
        assert jax.eval_shape(on_auto, state)[0].lengths.shape == (2,)
    assert outputs[0].token_ids.sharding == NamedSharding(mesh, rows)
    texts = [np.asarray(output.token_ids) for output in outputs]
    for text in texts[1:]:
        np.testing.assert_array_equal(text, texts[0])
    _, one = compiled(folders, None, False)
    np.testing.assert_array_equal(texts[0][0, :10], one.token_ids[0, :10])
    with pytest.raises(ValueError, match="Programs of a model over devices are not saved"):
        programs.save(tmp_path / "programs")


def test_what_reads_whole_rows_gets_them_gathered():
    """The draft has a vocabulary of its own, and devices do not divide the batch."""
    logits = np.random.default_rng(0).normal(size=(3, 2, 300)).astype(np.float32)
    best = np.argmax(logits, axis=-1)
    drafted = best[:, :1] + np.array([[0], [1], [0]])
    given = dict(logits=jnp.zeros((3, 1, 200)), token_map=jnp.arange(200) + 100)
    draft = specjax.Draft(jnp.asarray(drafted), **given)
    rows = jnp.pad(logits, ((0, 0), (0, 0), (0, 212)), constant_values=jnp.nan)
    options = CallOptions(jnp.float32, Implementation("xla"), 1)
    placement, split = parse_mesh(mesh_of(2, 2)), VocabularySplit("model", 300)

    @jax.jit
    def run(rows):
        given = dict(keys=keys_of(3), positions=4, temperature=jnp.zeros(3))
        inputs = VerifyInputs(draft, rows, None, **given)
        return verify_over_mesh(inputs, placement, split, options=options)

    ours = run(rows)
    wanted = np.where(drafted == best[:, :1], best, [[-1, -1]])
    wanted[:, 0] = best[:, 0]
    np.testing.assert_array_equal(ours.token_ids, wanted)


@pytest.mark.parametrize("replicate", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_is_read_as_its_arrays_are_split(tmp_path, tied, replicate):
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied, num_key_value_heads=1)
    params = random_params(config)
    save(tmp_path, params, config, tokenizer(), dtype="float32")
    options = dict(mesh=mesh_of(2, 2), replicate=replicate)
    read, ours = load(tmp_path, **options)[0], split_model(config, params, **options)
    like = share_shapes(config, ours.placement)
    jax.tree.map(np.testing.assert_array_equal, read.params, ours.params)
    for x, y, z in zip(*map(jax.tree.leaves, (read.params, ours.params, like)), strict=True):
        assert x.sharding == y.sharding == z.sharding
        assert x.shape == y.shape == z.shape
    assert bool(share_sizes(read)) != replicate


def test_a_key_value_head_lies_on_the_devices_of_its_queries():
    """Four devices split 8 query heads; two and two of them have the same key-value head."""
    config = dataclasses.replace(CONFIG, num_attention_heads=8)
    ranges = [share_ranges(config, 4, ("qkv",), share) for share in range(4)]
    heads = [[(each.start // 16, each.stop // 16) for each in own] for own in ranges]
    assert heads == [[(2 * d, 2 * d + 2), *[(d // 2, d // 2 + 1)] * 2] for d in range(4)]


@pytest.mark.parametrize(
    ("fields", "devices", "message"),
    [
        (dict(num_attention_heads=3, num_key_value_heads=3), 2, "num_attention_heads is 3, and"),
        (dict(num_attention_heads=6, num_key_value_heads=3), 2, "num_key_value_heads is 3, and"),
        (dict(num_attention_heads=6, num_key_value_heads=3), 4, "num_attention_heads is 6, and"),
        (dict(intermediate_size=95), 2, "intermediate_size is 95, and"),
    ],
)
def test_heads_that_the_devices_do_not_divide_are_refused(fields, devices, message):
    config = dataclasses.replace(CONFIG, **fields)
    with pytest.raises(ValueError, match=message):
        split_model(config, mesh=mesh_of(1, devices))
    # Of shapes alone: to draw weights would take longer than all else here.
    shapes = jax.tree.leaves(share_shapes(config, parse_mesh(mesh_of(1, devices), replicate=True)))
    assert all(x.sharding.is_fully_replicated for x in shapes)


def test_another_mesh_is_refused():
    for mesh in ((2,), jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])):
        with pytest.raises(ValueError, match="or one of them"):
            split_model(CONFIG, mesh=mesh)


def test_arrays_over_devices_are_not_saved(tmp_path):
    model = split_model(CONFIG, random_params(CONFIG), mesh=mesh_of(1, 2))
    with pytest.raises(ValueError, match="Parameters of split_model have other shapes"):
        save(tmp_path, model.params, CONFIG, tokenizer())


# Heads of CONFIG that have no tables of their own.
LAYER = dataclasses.replace(CONFIG, qkv_bias=False, qk_norm=True)
HEADS = {
    "EAGLE-3": Eagle3Config(LAYER, 64, 300, taps=(0, 1), has_lm_head=False),
    "DFlash": DFlashConfig(LAYER, 300, taps=(0, 1), block_size=K + 1, mask_token_id=299),
}


def head_params(kind):
    """Random weights of a head."""
    build = {"EAGLE-3": build_eagle3, "DFlash": build_dflash}[kind]
    return build(HEADS[kind])


def head_of(target, kind, params, implementation=None):
    """The drafter of a head."""
    drafters = {"EAGLE-3": eagle3_drafter, "DFlash": dflash_drafter}
    return drafters[kind](target, HEADS[kind], params, implementation=implementation)


def draft_by(drafter, features, implementation=None):
    """Reads prompts and drafts, as a step does."""
    size, width = features.shape[:2]
    ids = jnp.asarray(PROMPT[:size, :width] % 300, jnp.int32)
    place, lengths = jnp.arange(width)[None], jnp.asarray(LENGTHS[:size] // 2, jnp.int32)
    positions = jnp.where(place < lengths[:, None] - 1, place, -1)
    state = drafter.init(drafter.params, size, 16)
    state = drafter.extend(drafter.params, state, ids, positions, features)
    draft, _ = drafter.propose(
        drafter.params,
        state,
        ids,
        features[:, 0, : CONFIG.hidden_size],
        specjax.DraftInputs(keys_of(size), lengths, jnp.full(size, K), jnp.ones(size)),
        config=specjax.SpeculativeConfig(K),
        implementation=implementation,
    )
    return draft.token_ids, draft.logits


def test_heads_draft_on_a_split_target_as_on_one_device():
    """By its tables, of which every device has a share; two of them have three requests."""
    params = random_params(CONFIG)
    targets = build(CONFIG, params), split_model(CONFIG, params, mesh=mesh_of(2, 2))
    features = np.random.default_rng(0).normal(size=(3, 4, 128)).astype(np.float32)

    @jax.jit
    def run(drafters):
        return [draft_by(drafter, features) for drafter in drafters]

    heads = {kind: head_params(kind) for kind in HEADS}
    one, split = (run([head_of(x, *head) for head in heads.items()]) for x in targets)
    for ours, theirs in zip(split, one, strict=True):
        np.testing.assert_array_equal(ours[0], theirs[0])
        np.testing.assert_allclose(ours[1], theirs[1], atol=1e-5)


# Wide enough for products in parts on a share.
WIDE = TransformerConfig(256, 128, 128, 1, 4, 2, 32, qk_norm=True)


@pytest.mark.interpret
def test_the_kernels_of_a_step_run_on_each_share():
    params, ids = random_params(WIDE), jnp.asarray([[3, 4]], jnp.int32)
    positions = jnp.asarray([[0, 1]], jnp.int32)

    @jax.jit
    def run(model):
        return model.apply(model.params, ids, positions, model.init_cache(1, 64))[0]

    one = run(build(WIDE, params, implementation="xla"))
    split = run(split_model(WIDE, params, mesh=mesh_of(1, 2), implementation="interpret"))
    np.testing.assert_allclose(split, one, atol=5e-5)


# Shares of 32 columns, which no kernel multiplies in bfloat16.
NARROW = TransformerConfig(256, 64, 64, 1, 4, 4, 16, dtype="bfloat16")


@pytest.mark.interpret
def test_no_part_is_rounded_before_the_devices_add_theirs():
    """Both sums of a layer are 1: of 257, which bfloat16 rounds to 256, and -256."""
    params = jax.tree.map(np.ones_like, random_params(NARROW))
    attention, mlp = (params["layers"][0][name] for name in ("attention", "mlp"))
    parts = np.repeat([8, -8], 32)
    parts[0] += 1
    # Values of attention and MLP are 1: the activation of 32, times a 32nd.
    attention["qkv"] /= 64
    attention["out"] *= parts[:, None]
    mlp["gate_up"] *= np.repeat([1 / 2, 1 / 2048], 64)
    mlp["down"] *= parts[:, None]
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    model = split_model(NARROW, params, mesh=mesh_of(1, 2), implementation="interpret")

    @jax.jit
    def run(model):
        ids = jnp.zeros((1, 1), jnp.int32)
        return model.apply_with_taps(model.params, ids, ids, model.init_cache(1, 16), (1,))[1]

    np.testing.assert_array_equal(run(model).astype(jnp.float32), 3)


HOPPER = Implementation("triton", device=DeviceFacts((9.0,)))


def on_h200s(replicate=False, config=WIDE):
    """A model on H200s that are not there, two for the requests and two for the weights."""
    config = dataclasses.replace(config, dtype="bfloat16")
    device = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=None)
    kinds = (AxisType.Auto,) * 2
    mesh = AbstractMesh((2, 2), ("data", "model"), kinds, abstract_device=device)
    placement = parse_mesh(mesh, replicate)
    return sharded_model(config, share_shapes(config, placement), placement, implementation=HOPPER)


def lowered_step(model, tokens):
    """The step of four requests, as StableHLO for a GPU."""
    ids = jax.ShapeDtypeStruct((4, tokens), jnp.int32)

    def step(params, ids):
        return model.apply(params, ids, ids, model.init_cache(4, 300))

    with jax.sharding.use_abstract_mesh(model.placement.mesh):
        traced = jax.jit(step).trace(model.params, ids)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("tokens", "num_kernels"), [(1, 9), (100, 6)])
def test_a_step_lowers_to_kernels_of_a_share_and_sums_between_them(tokens, num_kernels):
    text = lowered_step(on_h200s(), tokens)
    assert text.count("xla.gpu.triton") == num_kernels
    assert text.count("stablehlo.all_reduce") == 3
    # Of the product before a sum none begins the next launch early: the sum is XLA's.
    assert text.count("griddepcontrol.launch_dependents") == (2 if tokens == 1 else 0)


# A share's products before a sum have two parts.
DEEP = dataclasses.replace(WIDE, hidden_size=8192, intermediate_size=512, num_attention_heads=8)


@pytest.mark.parametrize(
    ("config", "tokens", "message"),
    [
        pytest.param(DEEP, 1, "2x2x1x8192xf32", id="few rows travel as parts, and no padding"),
        pytest.param(DEEP, 16, "1x2x16x8192xf32", id="parts of many rows are added before"),
        pytest.param(
            dataclasses.replace(WIDE, out_bias=True), 1, "1x2x4x128xf32", id="XLA has eight rows"
        ),
    ],
)
def test_what_the_sums_of_a_step_send(config, tokens, message):
    sent = re.findall(
        r'"stablehlo.all_reduce".*?\}\) : \(tensor<(\S*)>',
        lowered_step(on_h200s(config=config), tokens),
        re.S,
    )
    # The embedding, attention and the MLP.
    assert len(sent) == 3
    assert sent[2] == message


def primitives(jaxpr, is_inside=False):
    """Names of a program's operations, each with whether it is inside `shard_map`."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        yield name, is_inside
        parts = jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "jaxpr"))
        for part in parts:
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                yield from primitives(inner, is_inside or name == "shard_map")


def test_no_kernel_of_a_step_of_decoding_is_left_to_gspmd():
    """GSPMD brings a kernel the rows of all devices."""
    target, drafter = on_h200s(), specjax.model_drafter(on_h200s(replicate=True))
    options = specjax.LoopOptions(implementation=HOPPER)
    given = RequestArguments([[0] * 8] * 4, keys_of(4), 9, np.float32(0.7))
    with jax.sharding.use_abstract_mesh(target.placement.mesh):
        requests, static = check_arguments(
            target, drafter, given, specjax.SpeculativeConfig(2), options
        )
        state = run_prefill.eval_shape(Models(target, drafter), requests, options=static)
        traced = run_step.trace(Models(target, drafter), state, options=static.step)
    found = collections.Counter(primitives(traced.jaxpr.jaxpr))
    assert found["pallas_call", True] > 20
    assert found["pallas_call", False] == 0


@pytest.mark.parametrize("kind", HEADS)
def test_no_kernel_of_a_draft_head_is_left_to_gspmd(kind):
    target = on_h200s(config=CONFIG)

    def draft(params, head, features):
        placed = dataclasses.replace(target, params=params)
        return draft_by(head_of(placed, kind, head, HOPPER), features, HOPPER)

    head, features = head_params(kind), jnp.zeros((2, 4, 128), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(target.placement.mesh):
        traced = jax.jit(draft).trace(target.params, head, features)
    found = collections.Counter(primitives(traced.jaxpr.jaxpr))
    assert found["pallas_call", True] > 4
    assert found["pallas_call", False] == 0
