"""Every kernel is lowered for CUDA without a GPU, and the door says who runs where."""

import contextlib
import dataclasses
import functools
import inspect
import math
import re
import subprocess
import sys
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from generic_rules import STANDARD_BY_FUNCTIONS
from jax.extend.mlir import ir
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

import specjax
from specjax import Draft, RaggedDraft, rules
from specjax.implementation import (
    NEWEST_TESTED_JAX,
    DeviceFacts,
    Implementation,
    resolve_implementation,
    visible_devices,
)
from specjax.models import (
    DFlashConfig,
    Eagle3Config,
    TransformerConfig,
    build,
    build_dflash,
    build_eagle3,
    eagle3_drafter,
)
from specjax.models.decoder.dispatch import run_layer
from specjax.models.decoder.layers import Layer
from specjax.models.heads.dflash import init_dflash_cache, merge_dflash
from specjax.pallas.kernel_config import KernelConfig, Tile

pytestmark = pytest.mark.lowering

BATCH, K, VOCAB = 4, 3, 5000
F32, I32 = jnp.float32, jnp.int32


def once(*values, **options):
    """A case that the first Python alone lowers: another lowers its kernels for both."""
    return pytest.param(*values, marks=pytest.mark.once, **options)


# Kernels widen what they load: which dtype it is does not depend on JAX's version.
DTYPES = [
    jnp.bfloat16,
    once(jnp.float16),
    once(jnp.float32),
]

HOPPER = Implementation(device=DeviceFacts((9.0,)))


def shape(*dimensions, dtype=F32):
    return jax.ShapeDtypeStruct(dimensions, dtype)


def key_shapes(batch_size=BATCH):
    return jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch_size))


def h200_mesh(*axis_types):
    """H200s that are not there, four along an axis of each type."""
    device = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=None)
    names = ("batch", "model")[: len(axis_types)]
    return AbstractMesh((4,) * len(names), names, axis_types or None, abstract_device=device)


def on_gpu():
    """A context in which JAX compiles for a GPU that is not there."""
    return jax.sharding.use_abstract_mesh(h200_mesh())


def lower(function, *shapes, platform="cuda"):
    """The module's text, or with no platform what is traced, which takes half as long.

    Every deprecation on the way is an error, as everywhere in the tests.
    """
    traced = jax.jit(function).trace(*shapes)
    if platform is None:
        return str(traced.jaxpr)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def build_shapes(config, **options):
    """A model of which nothing is drawn: its parameters are shapes."""
    params = jax.eval_shape(lambda: build(config).params)
    return build(config, params, **options)


def num_kernels(text):
    return text.count("xla.gpu.triton")


def noise_context(noise_dtype):
    return jax.enable_x64(True) if noise_dtype == jnp.float64 else contextlib.nullcontext()


def draft_shapes(kind, dtype, lead, *, vocab_size=VOCAB, batch_size=BATCH):
    """A draft's shapes; `lead` is (B, K), or (N,) for the ragged form."""
    statistics = shape(*lead) if kind in ("drawn", "everything") else None
    every = kind == "everything"
    # Only through `rows` may there be more rows of logits than drafts.
    rows = lead[0] + 2 * every
    return Draft(
        token_ids=shape(*lead, dtype=I32),
        logits=None if kind == "one-hot" else shape(rows, *lead[1:], vocab_size, dtype=dtype),
        temperature=shape(batch_size) if every else None,
        logprobs=statistics,
        logsumexp=statistics,
        cutoff=shape(*lead) if every else None,
        num_tokens=shape(batch_size, dtype=I32) if every else None,
        rows=shape(lead[0], dtype=I32) if every else None,
    )


def verify_at(options, draft, target_logits, arguments):
    """Verifies at the rates among the arguments, if they are there."""
    rates = arguments.pop("rates")
    rule = rules.standard() if rates is None else rules.synthetic(rates)
    return specjax.rejection_sample(draft, target_logits, rule=rule, options=options, **arguments)


def verify_text(
    kind,
    dtype=jnp.bfloat16,
    *,
    k=K,
    vocab_size=VOCAB,
    batch_size=BATCH,
    synthetic=False,
    noise_dtype=F32,
    implementation="triton",
    platform="cuda",
):
    """The text of a padded verification of drafts of a kind."""
    every = kind == "everything"
    options = dict(
        keys=key_shapes(batch_size),
        positions=shape(batch_size, dtype=I32),
        temperature=shape(batch_size),
        cutoff=shape(batch_size, k + 1) if every else None,
        rates=shape(k) if synthetic else None,
        bonus_token_ids=shape(batch_size, dtype=I32) if every else None,
    )

    options_of_call = specjax.Options(noise_dtype=noise_dtype, implementation=implementation)
    verify = functools.partial(verify_at, options_of_call)
    draft = draft_shapes(kind, dtype, (batch_size, k), vocab_size=vocab_size, batch_size=batch_size)
    target = shape(batch_size, k + 1, vocab_size, dtype=dtype)
    return lower(verify, draft, target, options, platform=platform)


def ragged_shapes(draft):
    """The draft, of flat token arrays, as one of requests laid end to end."""
    ends = shape(BATCH + 1, dtype=I32)
    return RaggedDraft(cu_num_draft_tokens=ends, max_draft_tokens=K, **vars(draft))


def ragged_text(kind, *, noise_dtype=F32, synthetic=False):
    size = BATCH * K
    options = dict(
        keys=key_shapes(),
        positions=shape(BATCH, dtype=I32),
        temperature=shape(BATCH),
        cutoff=shape(size + BATCH) if kind == "everything" else None,
        rates=shape(BATCH, K) if synthetic else None,
    )

    kernels = specjax.Options(noise_dtype=noise_dtype, implementation="triton")
    draft = ragged_shapes(draft_shapes(kind, jnp.bfloat16, (size,)))
    target = shape(size + BATCH, VOCAB, dtype=jnp.bfloat16)
    return lower(functools.partial(verify_at, kernels), draft, target, options)


def sample_text(
    dtype=jnp.bfloat16,
    *,
    cutoff=False,
    noise_dtype=F32,
    vocab_size=VOCAB,
    implementation="triton",
    platform="cuda",
):
    def sample(logits, keys, positions, temperature, cutoff):
        return specjax.gumbel_sample(
            logits,
            keys=keys,
            positions=positions,
            stream=0,
            temperature=temperature,
            cutoff=cutoff,
            options=specjax.Options(noise_dtype=noise_dtype, implementation=implementation),
        )

    shapes = [
        shape(BATCH, vocab_size, dtype=dtype),
        key_shapes(),
        shape(BATCH, dtype=I32),
        shape(BATCH),
        shape(BATCH) if cutoff else None,
    ]
    return lower(sample, *shapes, platform=platform)


@pytest.fixture(params=[once(True, id="small"), pytest.param(False, id="large")])
def schedule(request):
    """The kernels by both schedules, in tiles that a row does not divide into."""
    tile = Tile(1024, 4) if request.param else Tile(512, 8)
    small = 10**6 if request.param else 0
    config = KernelConfig(row=tile, target=tile, residual=tile, max_small_programs=small)
    return Implementation("triton", (config,))


# Logits are float32 before they meet a cutoff or the noise: each of all three is met once or twice.
@pytest.mark.parametrize(
    ("dtype", "noise_dtype", "cutoff"),
    [
        (jnp.bfloat16, jnp.float32, False),
        (jnp.bfloat16, jnp.float64, True),
        once(jnp.float16, jnp.float32, True),
        once(jnp.float32, jnp.float64, False),
    ],
)
def test_sampling_lowers_for_cuda(dtype, noise_dtype, cutoff):
    with on_gpu(), noise_context(noise_dtype):
        assert num_kernels(sample_text(dtype, cutoff=cutoff, noise_dtype=noise_dtype)) == 2


@pytest.mark.parametrize(
    ("dtype", "noise_dtype"), [(jnp.bfloat16, jnp.float32), once(jnp.float32, jnp.float64)]
)
def test_block_verification_lowers_for_cuda(dtype, noise_dtype):
    kernels = specjax.Options(noise_dtype=noise_dtype, implementation="triton")

    def verify(ids, logits, rows, data, more):
        draft = specjax.Draft(ids, logits, num_tokens=more.pop("num_tokens"))
        return specjax.rejection_sample(
            draft, rows, rule=rules.block(), **data, **more, options=kernels
        )

    def verify_ragged(draft, rows, data):
        return specjax.rejection_sample(draft, rows, rule=rules.block(), **data, options=kernels)

    batch = shape(BATCH, dtype=I32)
    data = dict(keys=key_shapes(), positions=batch, temperature=shape(BATCH))
    size = BATCH * K
    ids, logits = shape(BATCH, K, dtype=I32), shape(BATCH, K, VOCAB, dtype=dtype)
    rows = shape(BATCH, K + 1, VOCAB, dtype=dtype)
    flat = Draft(shape(size, dtype=I32), shape(size, VOCAB, dtype=dtype))
    more = dict(cutoff=shape(BATCH, K + 1), bonus_token_ids=batch, num_tokens=batch)
    with on_gpu(), noise_context(noise_dtype):
        assert num_kernels(lower(verify, ids, logits, rows, data, more)) == 5
        ragged_rows = shape(size + BATCH, VOCAB, dtype=dtype)
        assert num_kernels(lower(verify_ragged, ragged_shapes(flat), ragged_rows, data)) == 5


# Logits are float32 before they meet the noise: each dtype of either is met once.
@pytest.mark.parametrize(
    ("dtype", "noise_dtype"),
    [
        (jnp.bfloat16, jnp.float32),
        once(jnp.float16, jnp.float64),
        once(jnp.float32, jnp.float64),
    ],
)
def test_coupled_sampling_lowers_for_cuda(dtype, noise_dtype):
    hopper, ampere = (Implementation("triton", device=DeviceFacts((x,))) for x in (9.0, 8.0))

    def couple(kernels, draft, rows, data):
        options = specjax.Options(noise_dtype=noise_dtype, implementation=kernels)
        return specjax.rejection_sample(draft, rows, rule=rules.coupled(), **data, options=options)

    batch = shape(BATCH, dtype=I32)
    data = dict(keys=key_shapes(), positions=batch, temperature=shape(BATCH))
    draft = Draft(shape(BATCH, K, dtype=I32), num_tokens=batch)
    size = BATCH * K
    ragged = ragged_shapes(Draft(shape(size, dtype=I32), num_tokens=batch))
    more = dict(cutoff=shape(BATCH, K + 1), bonus_token_ids=batch)
    with on_gpu(), noise_context(noise_dtype):
        rows = shape(BATCH, K + 1, VOCAB, dtype=dtype)
        early = lower(functools.partial(couple, hopper), draft, rows, data | more)
        rows = shape(size + BATCH, VOCAB, dtype=dtype)
        late = lower(functools.partial(couple, ampere), ragged, rows, data)
    for text, triggers in (early, 1), (late, 0):
        assert num_kernels(text) == 2
        # Before Hopper there is no such instruction.
        assert text.count("griddepcontrol.launch_dependents") == triggers


# With code of its own the standard rule is no `Rule`.
RULES = {
    "standard": STANDARD_BY_FUNCTIONS,
    "lenience": rules.lenience(0.5),
    "typical": rules.typical_acceptance(0.3, 0.6),
    "relaxed": dataclasses.replace(rules.relaxed(3, 0.2), greedy=True),
    "ensemble": rules.ensemble(0.5),
}


# Of a one-hot draft the rules differ in which rows they read: of a set of tokens, or of one.
@pytest.mark.parametrize(
    ("rule", "kind"),
    [*((rule, "drawn") for rule in RULES), once("relaxed", "one-hot"), once("lenience", "one-hot")],
)
def test_every_rule_lowers_for_cuda(rule, kind):
    def verify(draft, target_logits, options):
        return specjax.rejection_sample(
            draft,
            target_logits,
            rule=RULES[rule],
            options=specjax.Options(implementation="triton"),
            **options,
        )

    batch = shape(BATCH, dtype=I32)
    options = dict(keys=key_shapes(), positions=batch, temperature=shape(BATCH))
    draft = draft_shapes(kind, jnp.bfloat16, (BATCH, K))
    target = shape(BATCH, K + 1, VOCAB, dtype=jnp.bfloat16)
    with on_gpu():
        assert num_kernels(lower(verify, draft, target, options)) == 3


@pytest.mark.parametrize(
    ("dtype", "batch_size"),
    [
        (jnp.bfloat16, 2),
        (jnp.bfloat16, 8),
        once(jnp.float16, 8),
        once(jnp.float32, 2),
    ],
)
def test_a_step_of_decoding_lowers_for_cuda(dtype, batch_size):
    config = TransformerConfig(64, 512, 512, 1, 4, 2, 64, dtype=jnp.dtype(dtype).name)
    config = dataclasses.replace(config, layer_windows=(9,), attention_softcap=5.0)
    model = build_shapes(config)
    cache = jax.eval_shape(lambda: model.init_cache(batch_size, 300))
    ids = shape(batch_size, 3, dtype=I32)
    # Four products, one of them with a gate; attention in two; where norms may wait, a sum that
    # begins one before, behind and between the layer's halves.
    number = 6 if dtype == jnp.float16 else 9
    with on_gpu():
        assert num_kernels(lower(model.apply, model.params, ids, ids, cache)) == number
        if (dtype, batch_size) != (jnp.bfloat16, 2):
            return
        assert num_kernels(lower(model.apply, model.params, ids, ids, cache, platform="cpu")) == 0
        # XLA multiplies more than 128 rows, and one kernel more activates the gate.
        for tokens, number in ((40, 9), (80, 6)):
            prompt = shape(batch_size, tokens, dtype=I32)
            assert num_kernels(lower(model.apply, model.params, prompt, prompt, cache)) == number


# Sizes of the embedded target and draft, and what else XLA computes by default.
INVARIANT = {
    "target": TransformerConfig(4096, 256, 736, 1, 4, 2, 64, dtype="bfloat16"),
    "draft": TransformerConfig(
        *(4096, 160, 448, 1, 5, 1, 32),
        dtype="bfloat16",
        qkv_bias=True,
        out_bias=True,
        qk_norm=True,
        sandwich_norms=True,
    ),
}


@pytest.mark.lenient
@pytest.mark.parametrize("kind", INVARIANT)
@pytest.mark.parametrize(("batch_size", "tokens"), [(1, 1), once(8, 40)])
def test_rows_that_depend_on_no_other_row_lower_to_kernels_alone(kind, batch_size, tokens):
    model = build_shapes(INVARIANT[kind], row_invariant=True)
    cache = jax.eval_shape(lambda: model.init_cache(batch_size, 300))
    ids = shape(batch_size, tokens, dtype=I32)

    def step(params, ids, positions, cache):
        hidden, cache = model.apply(params, ids, positions, cache)
        return model.logits(params, hidden), cache

    with on_gpu():
        text = lower(step, model.params, ids, ids, cache)
    # Nine of a layer, the norm that begins before it, and the head.
    assert num_kernels(text) == 11
    assert "stablehlo.dot_general" not in text
    # XLA's sums are of one number each, whose division or addition was deferred.
    reduced = re.findall(r"stablehlo\.reduce\(.*: \(tensor<(\S+)x.*-> tensor<(\S+)x", text)
    assert reduced
    for before, after in reduced:
        assert math.prod(map(int, before.split("x"))) == math.prod(map(int, after.split("x")))


@pytest.mark.once
@pytest.mark.lenient
def test_a_block_of_a_dflash_head_lowers_for_cuda():
    batch_size = 4
    layer = TransformerConfig(64, 512, 512, 1, 4, 2, 64, qk_norm=True, dtype="bfloat16")
    config = DFlashConfig(layer, 64, taps=(0, 1), block_size=7, mask_token_id=63)
    params = jax.eval_shape(lambda: build_dflash(config))
    weights = jax.eval_shape(lambda params: merge_dflash(config, params).context(), params)
    cache = jax.eval_shape(lambda: init_dflash_cache(config, batch_size, 300))
    ids = shape(batch_size, 7, dtype=I32)
    features = shape(batch_size, 7, 1024, dtype=jnp.bfloat16)
    table = shape(64, 512, dtype=jnp.bfloat16)

    def append(params, *operands):
        return merge_dflash(config, params).append(*operands)

    def apply(params, table, *operands):
        return merge_dflash(config, params, table).decoder(*operands)

    with on_gpu():
        # Committed tokens are two products; the block is a decoder's step.
        assert num_kernels(lower(append, params, weights, features, ids, cache)) == 2
        assert num_kernels(lower(apply, params, table, ids, ids, cache)) == 9


@pytest.mark.once
def test_a_step_with_an_eagle3_head_lowers_to_kernels_and_copies_no_weights():
    """Every product but that with the lm_head; no gather or scatter gives V floats of a row."""
    config = TransformerConfig(5000, 512, 512, 1, 4, 2, 64, tie_word_embeddings=False)
    config = dataclasses.replace(config, dtype="bfloat16")
    head = Eagle3Config(config, 512, 1000, taps=(0, 1))

    def make():
        params = build_eagle3(head) | {"token_map": jnp.arange(1000, dtype=I32)}
        target = build(config)
        return params, target, eagle3_drafter(target, head, params)

    params, target, drafter = jax.eval_shape(make)
    settings = specjax.SpeculativeConfig(num_speculative_tokens=K)

    def init(target, drafter):
        options = {"keys": jax.random.key(0), "config": settings, "max_new_tokens": 20}
        return specjax.init(target, drafter, [[1] * 9] * 2, **options)

    def step(*state):
        return specjax.step(*state, config=settings)[0]

    state = jax.eval_shape(init, target, drafter)
    with on_gpu():
        text = lower(step, target, drafter, state)
    names = re.findall(r'name = "(\w+)_kernel"', text)
    # The target's layer; the head's over what was committed, and in the one loop of its drafts.
    assert names.count("fused_attention") == 3
    # Of committed tokens the head's cache alone is read: from 0.12 on JAX drops what follows it.
    num_layers = names.count("fused_glu")
    assert num_layers in (2, 3)
    # `fc`; one product before attention, two after it.
    assert names.count("split_k_matmul") == 1 + 3 + 2 * num_layers
    shapes = {x.shape for x in jax.tree.leaves((target.params, params)) if x.ndim == 2}
    for rows, columns in shapes:
        assert f"tensor<{rows}x{columns}xbf16>" in text
        assert f"tensor<{rows}x{columns}xf32>" not in text
    # The types of a scatter stand after its body.
    moves = re.findall(r"(?:stablehlo\.gather.*|\}\) : \(.*)-> (tensor<.*>)", text)
    assert "tensor<5000xi32>" in moves  # the inverse of the token map
    assert not [kind for kind in moves if re.search(r"5000x(bf16|f32)", kind)]


@pytest.mark.parametrize(("slots", "number"), [once(1000, 9), (3000, 10)])
def test_parts_of_a_long_cache_are_put_together_by_a_launch_of_its_own(slots, number):
    model = build_shapes(TransformerConfig(64, 512, 512, 1, 4, 1, 128, dtype="bfloat16"))
    cache = jax.eval_shape(lambda: model.init_cache(4, slots))
    ids = shape(4, 1, dtype=I32)
    with on_gpu():
        assert num_kernels(lower(model.apply, model.params, ids, ids, cache)) == number


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ({}, 4),
        once({"sandwich_norms": True}, 4),
        # Only kernels of ours wait with all they read: not XLA's biases and roundings.
        once({"dtype": "float16"}, 2),
        once({"qkv_bias": True}, 3),
        once({"qk_norm": True}, 4),
        once({"qk_norm": True, "qkv_bias": True}, 3),
        once({"intermediate_size": 520}, 2),
        # Before Hopper there is no such instruction.
        once({"hidden_size": 256}, 0),
    ],
    ids=str,
)
def test_a_kernel_starts_early_only_where_one_of_ours_reads(kind, number):
    config = TransformerConfig(64, 512, 512, 1, 4, 2, 64, dtype="bfloat16")
    gpu = HOPPER if number else Implementation(device=DeviceFacts((8.0,)))
    model = build_shapes(dataclasses.replace(config, **kind), implementation=gpu)
    cache = jax.eval_shape(lambda: model.init_cache(8, 300))
    ids = shape(8, 1, dtype=I32)

    with on_gpu():
        text = lower(model.apply, model.params, ids, ids, cache)
    assert text.count("griddepcontrol.launch_dependents") == number


def test_the_product_of_a_layer_by_itself_is_read_by_xla():
    config = TransformerConfig(64, 512, 512, 1, 4, 2, 64, dtype="bfloat16")
    layer = Layer(config, 0, nnx.Rngs(0))
    cos_sin = (shape(8, 1, 1, 32), shape(8, 1, 1, 32))
    cache = (shape(8, 2, 300, 64, dtype=jnp.bfloat16), shape(8, 2, 300, 64, dtype=jnp.bfloat16))
    x = shape(8, 1, 512, dtype=jnp.bfloat16)
    with on_gpu():
        step = functools.partial(run_layer, layer, implementation=HOPPER)
        text = lower(step, x, cos_sin, shape(8, 1, dtype=I32), cache)
    assert text.count("griddepcontrol.launch_dependents") == 3


def read_early(function, *shapes):
    """What reads each result that a kernel lets the next one start before: names of operations."""
    module = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).compiler_ir()
    early = []

    def readers(result):
        for use in result.uses:
            reader = use.owner.operation
            if reader.name == "stablehlo.reshape":
                yield from readers(reader.results[0])
            elif reader.name == "stablehlo.return":
                yield from readers(reader.parent.results[use.operand_number])
            else:
                yield "kernel" if "xla.gpu.triton" in str(reader) else reader.name

    def note(operation):
        if operation.name == "stablehlo.custom_call" and "griddepcontrol" in str(operation):
            early.append(sorted(readers(operation.results[0])))
        return ir.WalkResult.ADVANCE

    module.operation.walk(note)
    return early


def test_a_derivative_by_some_weights_is_of_the_step_without_kernels():
    config = TransformerConfig(64, 512, 512, 1, 4, 2, 64, dtype="bfloat16")
    model = build_shapes(config, implementation=HOPPER)
    cache = jax.eval_shape(lambda: model.init_cache(8, 300))
    ids = shape(8, 1, dtype=I32)

    def loss(weight, params, ids, cache):
        layer = params["layers"][0] | {"mlp_norm": {"weight": weight}}
        hidden, _ = model.apply(params | {"layers": {0: layer}}, ids, ids, cache)
        return jnp.sum(hidden.astype(jnp.float32))

    with on_gpu():
        plain = read_early(model.apply, model.params, ids, ids, cache)
        weight = shape(512, dtype=jnp.bfloat16)
        slope = lower(jax.grad(loss), weight, model.params, ids, cache)
    assert plain == [["kernel"]] * 4
    assert num_kernels(slope) == 0


@pytest.mark.lenient
@pytest.mark.parametrize("dtype", ["float32", once("bfloat16")])
def test_parameters_of_another_dtype_than_the_caches_lower_for_cuda(dtype):
    other = {"float32": jnp.bfloat16, "bfloat16": jnp.float32}[dtype]
    model = build_shapes(TransformerConfig(64, 512, 512, 1, 4, 2, 64, dtype=dtype))
    params = jax.tree.map(lambda x: shape(*x.shape, dtype=other), model.params)
    cache, ids = jax.eval_shape(lambda: model.init_cache(8, 300)), shape(8, 1, dtype=I32)
    with on_gpu():
        assert num_kernels(lower(model.apply, params, ids, ids, cache)) > 0


def test_a_step_of_decoding_lowers_for_cuda_inside_shard_map():
    # Inside shard_map no abstract mesh says that a GPU is compiled for.
    config = TransformerConfig(64, 32, 32, 1, 2, 1, 16)
    model = build_shapes(config, implementation=on_devices(None, (8.0,)))
    mesh = h200_mesh(AxisType.Auto)

    def begin(params, ids):
        # The cache is empty on all devices alike, and the tokens are each one's own.
        return model.apply(params, ids, ids, model.init_cache(2, 30))

    split = PartitionSpec("batch")
    with jax.sharding.use_abstract_mesh(mesh):
        mapped = jax.shard_map(begin, mesh=mesh, in_specs=(PartitionSpec(), split), out_specs=split)
        assert num_kernels(lower(mapped, model.params, shape(8, 3, dtype=I32))) == 9


# `test_no_row_of_logits_is_copied_to_float32` lowers those of float16.
@pytest.mark.parametrize("dtype", [jnp.bfloat16, once(jnp.float32)])
def test_cutoffs_lower_for_cuda(dtype):
    filters = {"top_k": I32, "top_p": F32, "min_p": F32}

    def cut(logits, temperature, filters):
        return specjax.logit_cutoff(
            logits, temperature=temperature, implementation="triton", **filters
        )

    # One filter or all, and of each dtype, a row is read alike: a long one by all at once.
    asked = [(list(filters), VOCAB)]
    if dtype == jnp.bfloat16:
        asked = [(["top_k"], VOCAB), (["top_p"], VOCAB), (["min_p"], VOCAB)]
        asked += [(list(filters), 300_000)]
    with on_gpu():
        for names, vocab_size in asked:
            given = {name: shape(BATCH, dtype=filters[name]) for name in names}
            logits = shape(BATCH, vocab_size, dtype=dtype)
            assert num_kernels(lower(cut, logits, shape(BATCH), given)) == 2


def test_a_named_implementation_is_that_of_everything_a_proposal_does():
    def propose(table, token_ids, keys, positions, top_k):
        def step(carry, fed, at):
            return table[fed], carry

        return specjax.propose(
            step,
            (),
            token_ids,
            specjax.DraftInputs(keys, positions, sampling=specjax.SamplingParams(top_k=top_k)),
            num_tokens=1,
            options=specjax.Options(implementation="triton"),
        )[0]

    batch = shape(BATCH, dtype=I32)
    with on_gpu():
        text = lower(propose, shape(VOCAB, VOCAB), batch, key_shapes(), batch, batch)
    # A cutoff in two launches, and a draw in two.
    assert num_kernels(text) == 4


@pytest.mark.once
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_no_row_of_logits_is_copied_to_float32(dtype):
    filters = {"top_k": I32, "top_p": F32, "min_p": F32}
    asked = {name: shape(BATCH, dtype=kind) for name, kind in filters.items()}

    def emit(draft, target_logits, temperature, asked, keys):
        def cut(logits):
            rows = logits.shape[1]
            each = {name: jnp.repeat(x[:, None], rows, axis=1) for name, x in asked.items()}
            heat = jnp.repeat(temperature[:, None], rows, axis=1)
            return specjax.logit_cutoff(logits, temperature=heat, implementation="triton", **each)

        return specjax.rejection_sample(
            draft.replace(cutoff=cut(draft.logits)),
            target_logits,
            keys=keys,
            positions=jnp.zeros((BATCH,), I32),
            temperature=temperature,
            cutoff=cut(target_logits),
            options=specjax.Options(implementation="triton"),
        )

    draft = draft_shapes("without statistics", dtype, (BATCH, K))
    target = shape(BATCH, K + 1, VOCAB, dtype=dtype)
    with on_gpu():
        text = lower(emit, draft, target, shape(BATCH), asked, key_shapes())
        in_float32 = sample_text(jnp.float32)
    assert num_kernels(text) == 2 * 2 + 3
    assert f"x{VOCAB}x{'bf16' if dtype == jnp.bfloat16 else 'f16'}>" in text
    # The pattern finds them where they are.
    assert f"x{VOCAB}xf32>" in in_float32
    assert f"x{VOCAB}xf32>" not in text


# Rows of other dtypes are read by the same loads: those of drafts with their statistics or without.
@pytest.mark.parametrize(
    ("dtype", "kind", "synthetic"),
    [
        (jnp.bfloat16, "drawn", False),
        (jnp.bfloat16, "drawn", True),
        (jnp.bfloat16, "one-hot", True),
        (jnp.bfloat16, "without statistics", True),
        (jnp.bfloat16, "everything", False),
        once(jnp.float16, "without statistics", False),
        once(jnp.float16, "everything", False),
        once(jnp.float32, "without statistics", False),
        once(jnp.float32, "everything", True),
    ],
)
def test_verification_lowers_for_cuda(dtype, kind, synthetic):
    with on_gpu():
        text = verify_text(kind, dtype, synthetic=synthetic)
    # Without statistics one more launch reads the draft.
    assert num_kernels(text) == 2 + (kind == "without statistics")


def test_every_kernel_that_reads_drafts_lowers_for_cuda_with_a_token_map(schedule):
    def verify(rule, draft, rows, keys):
        options = specjax.Options(implementation=schedule)
        return specjax.rejection_sample(
            draft, rows, keys=keys, positions=0, rule=rule, options=options
        )

    rows, keys = shape(BATCH, K + 1, VOCAB, dtype=jnp.bfloat16), key_shapes()
    draft = draft_shapes("without statistics", jnp.bfloat16, (BATCH, K), vocab_size=200)
    draft = draft.replace(token_map=shape(200, dtype=I32))
    flat = draft.replace(
        token_ids=shape(BATCH * K, dtype=I32), logits=shape(BATCH * K, 200, dtype=jnp.bfloat16)
    )
    with on_gpu():
        calls = [
            (rules.standard(), 3),
            (rules.block(), 5),
            (RULES["ensemble"], 4),
        ]
        # Small batches and large ones find a draft's rows alike.
        [sizes] = schedule.configs
        for rule, number in calls[: 1 if sizes.max_small_programs else None]:
            text = lower(functools.partial(verify, rule), draft, rows, keys)
            assert num_kernels(text) >= number
        if sizes.max_small_programs:
            return
        rows = shape(BATCH * (K + 1), VOCAB, dtype=jnp.bfloat16)
        by_standard = functools.partial(verify, rules.standard())
        text = lower(by_standard, ragged_shapes(flat), rows, keys)
        assert num_kernels(text) >= 3


@pytest.mark.parametrize("noise_dtype", [jnp.float32, once(jnp.float64)])
def test_both_schedules_lower_for_cuda(noise_dtype, schedule):
    with on_gpu(), noise_context(noise_dtype):
        options = dict(noise_dtype=noise_dtype, implementation=schedule)
        assert num_kernels(verify_text("everything", synthetic=True, **options)) >= 2
        assert num_kernels(verify_text("without statistics", **options)) >= 3
        if noise_dtype == jnp.float64:
            return
        assert num_kernels(verify_text("drawn", **options)) >= 2
        assert num_kernels(verify_text("one-hot", **options)) >= 2
        assert num_kernels(sample_text(**options)) == 2


def cutoff_text(*, implementation, platform="cuda"):
    def cut(logits, top_k):
        options = dict(temperature=1.0, top_k=top_k, implementation=implementation)
        return specjax.logit_cutoff(logits, **options)

    return lower(cut, shape(BATCH, VOCAB), shape(BATCH, dtype=I32), platform=platform)


@pytest.mark.once
@pytest.mark.parametrize(
    ("text", "changes"),
    [
        (sample_text, [{"row": Tile(512, 4)}, {"num_draw_warps": 4}, {"num_noise_splits": 0}]),
        (lambda **options: verify_text("drawn", **options), [{"max_small_programs": 0}]),
        (cutoff_text, [{"num_register_logits": 64}, {"num_search_warps": 4}]),
    ],
    ids=["gumbel_sample", "rejection_sample", "logit_cutoff"],
)
def test_sizes_of_kernels_that_are_passed_reach_the_kernels(text, changes):
    configs = [KernelConfig(), *(KernelConfig(**change) for change in changes)]
    with on_gpu():
        default = text(implementation="triton", platform=None)
        passed = [Implementation("triton", (each,)) for each in configs]
        texts = [text(implementation=each, platform=None) for each in passed]
    assert texts[0] == default
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize(
    ("kind", "synthetic"), [("drawn", False), ("one-hot", True), once("everything", True)]
)
def test_ragged_verification_lowers_for_cuda(kind, synthetic):
    with on_gpu():
        assert num_kernels(ragged_text(kind, synthetic=synthetic)) == 2


def test_ragged_verification_with_float64_noise_lowers_for_cuda():
    with on_gpu(), noise_context(jnp.float64):
        assert num_kernels(ragged_text("everything", noise_dtype=jnp.float64)) == 2


@pytest.mark.parametrize("vocab_size", [once(1), once(129), 300_000])
def test_any_vocabulary_lowers_for_cuda(vocab_size):
    with on_gpu():
        assert num_kernels(verify_text("drawn", vocab_size=vocab_size)) == 2
        assert num_kernels(sample_text(vocab_size=vocab_size)) == 2


@pytest.mark.once
@pytest.mark.parametrize(("batch_size", "kind"), [(1, "one-hot"), (17, "drawn"), (1024, "one-hot")])
def test_any_batch_lowers_for_cuda(batch_size, kind):
    with on_gpu():
        assert num_kernels(verify_text(kind, batch_size=batch_size)) >= 2


@pytest.mark.once
@pytest.mark.parametrize("k", [0, 32])
def test_any_number_of_drafts_lowers_for_cuda(k):
    with on_gpu():
        assert num_kernels(verify_text("drawn", k=k)) == 2


def test_x64_does_not_move_float32_noise_off_the_kernels():
    with on_gpu(), jax.enable_x64(True):
        assert num_kernels(verify_text("everything", noise_dtype=F32)) == 2
        assert num_kernels(ragged_text("everything")) == 2
        assert num_kernels(sample_text()) == 2


def on_mesh(mesh, tree):
    """The same shapes with their leading axes on the mesh's."""

    def put(x):
        spec = PartitionSpec(mesh.axis_names[0], *[None] * (len(x.shape) - 1))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(put, tree)


def mesh_call(implementation):
    """A function of a drawn draft, its target rows and keys, and their shapes."""

    def verify(draft, target_logits, keys):
        return specjax.rejection_sample(
            draft,
            target_logits,
            keys=keys,
            positions=0,
            options=specjax.Options(implementation=implementation),
        )

    shapes = (
        draft_shapes("drawn", jnp.bfloat16, (BATCH, K)),
        shape(BATCH, K + 1, VOCAB, dtype=jnp.bfloat16),
        key_shapes(),
    )
    return verify, shapes


@pytest.mark.parametrize("name", [None, once("triton")])
def test_verification_lowers_inside_shard_map_which_checks_what_varies(name):
    mesh = h200_mesh(AxisType.Auto)
    verify, shapes = mesh_call(name)
    spec = PartitionSpec("batch")
    with jax.sharding.use_abstract_mesh(mesh):
        mapped = jax.shard_map(verify, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True)
        assert num_kernels(lower(mapped, *on_mesh(mesh, shapes))) == 2


@pytest.mark.parametrize(
    ("kind", "num_gathers"), [("drawn", 2), ("one-hot", 2), ("coupled", 1), ("sample", 1)]
)
def test_a_split_vocabulary_lowers_to_two_kernels_and_a_gather_or_two(kind, num_gathers):
    mesh, rows = h200_mesh(AxisType.Auto, AxisType.Auto), PartitionSpec("batch", None, "model")

    def call(draft, logits, keys):
        # One without padding.
        size = None if kind == "one-hot" else 2000
        kernels = specjax.Options(axis_name="model", vocab_size=size, implementation="triton")
        options = dict(keys=keys, positions=0, options=kernels)
        if kind == "sample":
            return specjax.gumbel_sample(logits[:, 0], stream=specjax.Stream.TARGET, **options)
        if kind == "coupled":
            return specjax.rejection_sample(draft, logits, rule=rules.coupled(), **options)
        return specjax.rejection_sample(draft, logits, **options)

    kinds = kind if kind == "drawn" else "one-hot"
    draft = draft_shapes(kinds, jnp.bfloat16, (BATCH, K), vocab_size=2048)
    requests = PartitionSpec("batch")
    specs = jax.tree.map(lambda _: requests, draft)
    specs = specs.replace(logits=None if draft.logits is None else rows)
    shapes = draft, shape(BATCH, K + 1, 2048, dtype=jnp.bfloat16), key_shapes()
    with jax.sharding.use_abstract_mesh(mesh):
        mapped = jax.shard_map(
            call, mesh=mesh, in_specs=(specs, rows, requests), out_specs=requests
        )
        text = lower(mapped, *shapes)
    assert num_kernels(text) == 2
    assert text.count('"stablehlo.all_gather"') == num_gathers


def test_verification_lowers_on_a_mesh_of_explicit_axes():
    """`implementation=None` finds the kernels; `test_frozen.py` has the call that names them."""
    mesh = h200_mesh(AxisType.Explicit)
    verify, shapes = mesh_call(None)
    with jax.sharding.use_abstract_mesh(mesh):
        text = lower(verify, *on_mesh(mesh, shapes))
    assert num_kernels(text) == 2
    assert f"tensor<1x{K + 1}x{VOCAB}xbf16>" in text, "no shard of one request"


def test_none_chooses_the_kernels_for_an_nvidia_gpu_alone():
    with on_gpu():
        assert num_kernels(verify_text("drawn", implementation=None)) == 2
        assert num_kernels(sample_text(implementation=None)) == 2
        assert num_kernels(sample_text(implementation=None, platform="cpu")) == 0


def on_devices(name, capabilities=(), **facts):
    """An implementation by name, for GPUs that are not those of this machine."""
    return Implementation(name, device=DeviceFacts(capabilities, **facts))


@pytest.mark.once
def test_none_is_plain_jax_where_there_is_no_gpu():
    options = dict(implementation=on_devices(None), platform=None)
    assert "pallas_call" not in sample_text(**options)
    assert "pallas_call" not in verify_text("drawn", **options)


def test_what_a_cpu_alone_runs_is_traced_for_no_other_device():
    """Plain JAX maps over requests on a CPU, and verifies them side by side elsewhere."""

    def num_choices(implementation):
        def verify(logits):
            keys = jax.random.split(jax.random.key(0), 2)
            draft, options = (
                Draft(jnp.zeros((2, 0), I32)),
                specjax.Options(implementation=implementation),
            )
            return specjax.rejection_sample(
                draft, logits, keys=keys, positions=0, temperature=1.0, options=options
            )

        return str(jax.make_jaxpr(verify)(jnp.zeros((2, 1, 5)))).count("platform_index[")

    assert num_choices(on_devices("xla")) == (jax.default_backend() != "cpu")
    assert num_choices(on_devices("xla", (8.0,))) == 1
    with on_gpu():
        assert num_choices(on_devices("xla")) == 1
        # The kernels, or what is left for a CPU.
        assert num_choices(on_devices(None)) == 1


def call(implementation):
    return specjax.gumbel_sample(
        jnp.zeros((2, 5), jnp.float32),
        keys=jax.random.key(0),
        positions=0,
        stream=0,
        options=specjax.Options(implementation=implementation),
    )


def test_triton_without_a_gpu_is_refused_with_what_to_do():
    sentence = (
        "needs an NVIDIA GPU of compute capability 8.0 or newer, and JAX sees none here; None"
    )
    with pytest.raises(ValueError, match=sentence):
        call(on_devices("triton"))


def test_triton_on_an_old_gpu_is_refused_by_its_capability():
    """A mesh of visible devices names one, too, and not what it can do."""
    for context in (contextlib.nullcontext(), on_gpu()):
        with context:
            assert resolve_implementation(on_devices(None, (7.5, 9.0))).name == "xla"
            with pytest.raises(ValueError, match=r"JAX sees one of 7\.5"):
                call(on_devices("triton", (7.5, 9.0)))


def test_kernels_start_before_the_previous_one_has_ended_if_every_gpu_can():
    assert not DeviceFacts((7.5, 9.0)).supports_pdl
    assert not DeviceFacts().supports_pdl
    assert DeviceFacts((9.0, 10.0)).supports_pdl


@pytest.mark.parametrize(
    ("capabilities", "kilobytes"),
    [
        ((9.0, 10.0), 227),
        ((8.0,), 99),
        ((8.9,), 99),
        # Consumers' GPUs have as little after Hopper as before.
        ((12.0,), 99),
        ((9.0, 12.1), 99),
        ((), 99),
    ],
    ids=str,
)
def test_a_program_fits_on_the_least_of_the_gpus(capabilities, kilobytes):
    assert DeviceFacts(capabilities).shared_memory_bytes == kilobytes * 1024


def test_facts_are_those_of_the_gpus_that_jax_sees():
    """A GPU that can be seen says its capability; elsewhere there is none."""
    seen = [device for device in jax.devices() if hasattr(device, "compute_capability")]
    assert visible_devices().capabilities == tuple(float(gpu.compute_capability) for gpu in seen)
    assert visible_devices().has_pallas_triton


def test_an_unknown_implementation_is_refused_with_those_there_are():
    for name in ("cuda", "auto", Implementation("cuda")):
        with pytest.raises(ValueError, match="it is None, 'xla', 'triton' or 'interpret'"):
            call(name)


def visible(monkeypatch, capabilities):
    """An implementation for what this JAX says of itself, and of GPUs that are not there."""
    gpus = [SimpleNamespace(compute_capability=str(each)) for each in capabilities]
    monkeypatch.setattr(jax, "devices", lambda platform: gpus)
    return Implementation(device=inspect.unwrap(visible_devices)())


def test_a_gpu_without_pallas_triton_is_said_to_run_plain_jax_once(monkeypatch):
    """The import of JAX's backend fails; a machine without a GPU has lost nothing."""
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    warn_once = specjax.implementation._warn_of_plain_jax
    warn_once.cache_clear()
    assert resolve_implementation(visible(monkeypatch, [])).name == "xla"
    assert resolve_implementation(visible(monkeypatch, [7.5])).name == "xla"
    hopper = visible(monkeypatch, [9.0])
    words = f"JAX {jax.__version__} has no Pallas Triton.* tested with is {NEWEST_TESTED_JAX}"
    with pytest.warns(UserWarning, match=words):
        assert resolve_implementation(hopper).name == "xla"
    # Every warning is an error here.
    assert resolve_implementation(hopper).name == "xla"
    warn_once.cache_clear()


@pytest.mark.once
@pytest.mark.filterwarnings("ignore:specjax runs plain JAX on this GPU")
def test_a_jax_without_pallas_triton_leaves_a_working_library_and_a_sentence():
    without = on_devices(None, (9.0,), has_pallas_triton=False)
    with on_gpu():
        for text in (sample_text, functools.partial(verify_text, "drawn")):
            assert "pallas_call" not in text(implementation=without, platform=None)
    assert call(without).token_ids.shape == (2,)
    for named in ("triton", "interpret"):
        with pytest.raises(ValueError, match=f"'{named}' names .* and JAX .* has no Pallas Triton"):
            call(dataclasses.replace(without, name=named))


def test_the_library_does_not_need_pallas_to_be_imported():
    """A JAX that has no Pallas at all: `import specjax` and a draw of plain JAX."""
    program = """
import sys
sys.modules["jax.experimental.pallas"] = None
import jax, jax.numpy as jnp, specjax
options = dict(keys=jax.random.key(0), positions=0, stream=0)
assert specjax.gumbel_sample(jnp.zeros((2, 5)), **options).token_ids.shape == (2,)
kernels = specjax.Options(implementation="triton")
try:
    specjax.gumbel_sample(jnp.zeros((2, 5)), **options, options=kernels)
except ValueError as error:
    assert "has no Pallas Triton" in str(error)
else:
    raise SystemExit("not refused")
"""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.checks
def test_the_deprecation_of_pallas_triton_is_the_library_s_own_business():
    """A user with warnings as errors can lower the kernels, in a process of his own."""
    program = """
import warnings
warnings.simplefilter("error")
import jax, jax.numpy as jnp, specjax
from jax.sharding import AbstractDevice, AbstractMesh
kernels = specjax.Options(implementation="triton")
options = dict(keys=jax.random.key(0), positions=0, stream=0, options=kernels)
sample = jax.jit(lambda logits: specjax.gumbel_sample(logits, **options))
gpu = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=None)
with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("batch",), abstract_device=gpu)):
    traced = sample.trace(jax.ShapeDtypeStruct((2, 500), jnp.float32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
assert text.count("xla.gpu.triton") == 2
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_an_older_trace_is_lowered_without_a_warning_too():
    """JAX warns as it lowers, and pytest puts the filters back after every test."""
    shapes = shape(BATCH, 500), key_shapes()
    for scale in (1.0, 2.0):

        def sample(logits, keys, scale=scale):
            one = specjax.gumbel_sample(
                logits,
                keys=keys,
                positions=0,
                stream=0,
                options=specjax.Options(implementation="triton"),
            )
            return one.logprobs * jnp.float32(scale)

        with on_gpu(), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert num_kernels(lower(sample, *shapes)) == 2
