"""Functions to freeze: public calls by dtype, schedule and platform, and decode steps of models.

A case is a function of positional arrays and their shapes. Cases of "cuda" are traced for a GPU
that is not there, those of "cpu" as plain JAX.
"""

import contextlib
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

import specjax
from specjax import Draft, Options, RaggedDraft, SamplingParams, SpeculativeConfig
from specjax.core import rules
from specjax.implementation import DeviceFacts, Implementation
from specjax.models import RopeScaling, TransformerConfig, build, causal_hidden
from specjax.pallas.kernel_config import KernelConfig

F32, I32, BF16 = jnp.float32, jnp.int32, jnp.bfloat16
TRITON = Options(implementation="triton")
K, VOCAB, DRAFT_VOCAB = 3, 5000, 2000
SMALL, LARGE = 4, 40  # Below and above the batch at which the kernels' schedule changes here.
CPU, CUDA = "cpu", "cuda"


class Case(NamedTuple):
    """A function, shapes of its arguments, where it is to run, and whether in 64 bits."""

    function: object
    shapes: tuple
    platform: str = CPU
    x64: bool = False


def shape(*dimensions, dtype=F32):
    return jax.ShapeDtypeStruct(dimensions, dtype)


def ints(*dimensions):
    return shape(*dimensions, dtype=I32)


def key_shapes(batch_size):
    return jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch_size))


def gpu_mesh(*axis_types):
    device = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=None)
    return AbstractMesh((4,), ("batch",), axis_types or None, abstract_device=device)


@contextlib.contextmanager
def context(case):
    """What a case is traced in."""
    with contextlib.ExitStack() as stack:
        if case.platform == CUDA:
            stack.enter_context(jax.sharding.use_abstract_mesh(gpu_mesh()))
        if case.x64:
            stack.enter_context(jax.enable_x64(True))
        yield


def implementation(platform):
    """The kernels, or plain JAX with what it would run on the GPU of a machine that has one."""
    if platform == CUDA:
        return Implementation("triton", (KernelConfig(max_small_programs=SMALL * (K + 1)),))
    return Implementation("xla", device=DeviceFacts((8.0,)))


def in_float64(options):
    return dataclasses.replace(options, noise_dtype=jnp.float64)


def _sample(logits, keys, positions, temperature, cutoff=None, *, options):
    return specjax.gumbel_sample(
        logits,
        keys=keys,
        positions=positions,
        stream=0,
        temperature=temperature,
        cutoff=cutoff,
        options=options,
    )


def sampling():
    """`gumbel_sample`."""
    for platform in (CPU, CUDA):
        options = Options(implementation=implementation(platform))
        sample = functools.partial(_sample, options=options)
        for dtype in (BF16, F32):
            b = SMALL
            shapes = (shape(b, VOCAB, dtype=dtype), key_shapes(b), ints(b), shape(b))
            yield f"{jnp.dtype(dtype)}", Case(sample, shapes, platform)
        yield "cutoff", Case(sample, (*shapes, shape(b)), platform)
        double = functools.partial(_sample, options=in_float64(options))
        yield "float64 noise", Case(double, shapes, platform, True)
    b = LARGE
    shapes = (shape(b, VOCAB, dtype=BF16), key_shapes(b), ints(b), shape(b))
    yield "large batch", Case(sample, shapes, CUDA)


def draft_shapes(kind, lead, batch_size, dtype):
    """Fields of a draft; `lead` is (B, K), or (N,) where requests are laid end to end."""
    every = kind == "everything"
    statistics = shape(*lead) if kind == "carried" or every else None
    return Draft(
        token_ids=ints(*lead),
        logits=None if kind == "one-hot" else shape(*lead, VOCAB, dtype=dtype),
        temperature=shape(batch_size) if every else None,
        logprobs=statistics,
        logsumexp=statistics,
        cutoff=shape(*lead) if every else None,
        num_tokens=ints(batch_size) if every else None,
        rows=ints(lead[0]) if every else None,
    )


def mapped_shapes(batch_size, dtype=BF16):
    """Fields of a draft of fewer tokens, without statistics."""
    draft = draft_shapes("drawn", (batch_size, K), batch_size, dtype)
    logits = shape(batch_size, K, DRAFT_VOCAB, dtype=dtype)
    return draft.replace(logits=logits, token_map=ints(DRAFT_VOCAB))


STANDARD = rules.standard()


def _verify(
    draft, target, keys, positions, temperature, cutoff, rates, bonus, rule=STANDARD, **options
):
    return specjax.rejection_sample(
        draft,
        target,
        keys=keys,
        positions=positions,
        temperature=temperature,
        cutoff=cutoff,
        bonus_token_ids=bonus,
        rule=rule if rates is None else rules.synthetic(rates),
        **options,
    )


def _verify_shapes(kind, b, dtype, synthetic):
    every = kind == "everything"
    return (
        draft_shapes(kind, (b, K), b, dtype),
        shape(b, K + 1, VOCAB, dtype=dtype),
        key_shapes(b),
        ints(b),
        shape(b),
        shape(b, K + 1) if every else None,
        shape(K) if synthetic else None,
        ints(b) if every else None,
    )


def verification():
    """`rejection_sample`, of small batches and, for kernels' other schedule, of large ones."""
    kinds = ["one-hot", "drawn", "carried", "everything"]
    for platform in (CPU, CUDA):
        options = Options(implementation=implementation(platform))
        verify = functools.partial(_verify, options=options)
        sizes = (SMALL, LARGE) if platform == CUDA else (SMALL,)
        for b in sizes:
            # What a small batch shows of a field alone, the other schedule shows of them together.
            for kind in kinds if b == SMALL else ("one-hot", "everything"):
                yield f"{kind}, {b}", Case(verify, _verify_shapes(kind, b, BF16, False), platform)
            shapes = _verify_shapes("carried", b, BF16, True)
            yield f"synthetic, {b}", Case(verify, shapes, platform)
        double = functools.partial(_verify, options=in_float64(options))
        shapes = _verify_shapes("carried", sizes[-1], F32, False)
        yield f"float64 noise, {sizes[-1]}", Case(double, shapes, platform, True)
        for b in sizes:
            _, *rest = _verify_shapes("drawn", b, BF16, False)
            yield f"a token map, {b}", Case(verify, (mapped_shapes(b), *rest), platform)
        if platform == CUDA:
            by_rule = functools.partial(verify, rule=rules.relaxed(3, 0.1))
            yield (
                f"a rule, {SMALL}",
                Case(by_rule, _verify_shapes("carried", SMALL, BF16, False), platform),
            )
        yield "float32", Case(verify, _verify_shapes("drawn", SMALL, F32, False), platform)
    few = functools.partial(_verify, options=TRITON, greedy_logprobs=False)
    yield "few log-probabilities", Case(few, _verify_shapes("carried", LARGE, BF16, False), CUDA)
    chosen = functools.partial(_verify, options=Options())
    yield "chosen at lowering", Case(chosen, _verify_shapes("carried", SMALL, BF16, False), CUDA)
    yield from meshes()


def meshes():
    """Batches that are split over devices, by the caller and by the library."""
    verify = functools.partial(_verify, options=TRITON)
    shapes = _verify_shapes("carried", SMALL, BF16, False)
    spec = PartitionSpec("batch")
    mesh = gpu_mesh(AxisType.Auto)
    mapped = jax.shard_map(verify, mesh=mesh, in_specs=spec, out_specs=spec)
    yield "inside shard_map", Case(mapped, shapes, CUDA)

    def explicit(*arrays):
        mesh = gpu_mesh(AxisType.Explicit)
        with jax.sharding.use_abstract_mesh(mesh):
            sharding = NamedSharding(mesh, spec)
            return verify(*jax.tree.map(lambda x: jax.sharding.reshard(x, sharding), arrays))

    yield "explicit axes", Case(explicit, shapes, CUDA)


def split():
    """Calls of rows whose vocabulary lies over four devices."""
    mesh, whole = gpu_mesh(AxisType.Auto), PartitionSpec()
    options = Options(implementation="triton", axis_name="batch")

    def over(call, shapes):
        """A function of arrays that are split where their last axis is the vocabulary."""

        def spec(leaf):
            is_row = leaf.ndim > 1 and leaf.shape[-1] == 4 * 1280
            return PartitionSpec(*(None,) * (leaf.ndim - 1), "batch") if is_row else whole

        specs = jax.tree.map(spec, shapes)
        return Case(jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=whole), shapes, CUDA)

    def couple(token_ids, target, keys, positions):
        return specjax.rejection_sample(
            Draft(token_ids),
            target,
            keys=keys,
            positions=positions,
            rule=rules.coupled(),
            options=options,
        )

    b, width = SMALL, 4 * 1280
    draft = draft_shapes("carried", (b, K), b, BF16)
    draft = draft.replace(logits=shape(b, K, width, dtype=BF16))
    target = shape(b, K + 1, width, dtype=BF16)
    others = (key_shapes(b), ints(b), shape(b), None, None, None)
    yield "standard", over(functools.partial(_verify, options=options), (draft, target, *others))
    yield "coupled", over(couple, (ints(b, K), target, key_shapes(b), ints(b)))


def ragged():
    def verify(draft, target, starts, *arguments, **options):
        fields = {**vars(draft), "cu_num_draft_tokens": starts}
        ragged = RaggedDraft(**fields, max_draft_tokens=K)
        return _verify(ragged, target, *arguments, None, **options)

    for platform in (CPU, CUDA):
        call = functools.partial(verify, options=Options(implementation=implementation(platform)))
        for kind in ("one-hot", "everything", "synthetic"):
            b, every = SMALL, kind == "everything"
            shapes = (
                draft_shapes("carried" if kind == "synthetic" else kind, (b * K,), b, BF16),
                shape(b * (K + 1), VOCAB, dtype=BF16),
                ints(b + 1),
                key_shapes(b),
                ints(b),
                shape(b),
                shape(b * (K + 1)) if every else None,
                shape(b, K) if kind == "synthetic" else None,
            )
            yield kind, Case(call, shapes, platform)


def block():
    for platform in (CPU, CUDA):
        call = functools.partial(
            verify_block, options=Options(implementation=implementation(platform))
        )
        for b in (SMALL, LARGE) if platform == CUDA else (SMALL,):
            draft, target = shape(b, K, VOCAB, dtype=BF16), shape(b, K + 1, VOCAB, dtype=BF16)
            shapes = (ints(b, K), draft, target, key_shapes(b), ints(b), shape(b), ints(b))
            yield f"{b}", Case(call, shapes, platform)


def verify_block(token_ids, logits, target, keys, positions, temperature, num_tokens, **options):
    draft = specjax.Draft(token_ids, logits, num_tokens=num_tokens)
    return _verify(
        draft, target, keys, positions, temperature, *(None,) * 3, rules.block(), **options
    )


def coupled():
    def couple(token_ids, target, keys, positions, temperature, num_tokens, **options):
        draft = Draft(token_ids, num_tokens=num_tokens)
        return _verify(
            draft,
            target,
            keys,
            positions,
            temperature,
            None,
            None,
            None,
            rules.coupled(),
            **options,
        )

    for platform in (CPU, CUDA):
        options = Options(implementation=implementation(platform))
        call = functools.partial(couple, options=options)
        for b in (SMALL, LARGE) if platform == CUDA else (SMALL,):
            shapes = (ints(b, K), shape(b, K + 1, VOCAB, dtype=BF16), key_shapes(b), ints(b))
            yield f"{b}", Case(call, (*shapes, shape(b), ints(b)), platform)
        end_to_end = functools.partial(couple_ragged, options=options)
        b = SMALL
        shapes = (ints(b * K), shape(b * (K + 1), VOCAB, dtype=BF16), ints(b + 1), key_shapes(b))
        yield "ragged", Case(end_to_end, (*shapes, ints(b)), platform)


def couple_ragged(token_ids, target, starts, keys, positions, **options):
    return specjax.rejection_sample(
        RaggedDraft(token_ids, starts, max_draft_tokens=K),
        target,
        keys=keys,
        positions=positions,
        rule=rules.coupled(),
        **options,
    )


def trees():
    """`tree_rejection_sample`, of one-hot and of sampled nodes."""

    def verify(token_ids, parents, target, keys, positions, temperature, logits):
        return specjax.tree_rejection_sample(
            specjax.TreeDraft(token_ids, parents, K, logits),
            target,
            keys=keys,
            positions=positions,
            temperature=temperature,
        )

    b, nodes = SMALL, 5
    rows = shape(b, nodes + 1, VOCAB, dtype=BF16)
    shapes = (ints(b, nodes), ints(b, nodes), rows, key_shapes(b), ints(b), shape(b))
    for kind, logits in (("one-hot", None), ("drawn", rows)):
        yield kind, Case(verify, (*shapes, logits))


def cutoffs():
    def cutoff(names, logits, temperature, *filters, **options):
        named = dict(zip(names, filters, strict=True))
        return specjax.logit_cutoff(logits, temperature=temperature, **named, **options)

    every = {"top_k": ints(SMALL), "top_p": shape(SMALL), "min_p": shape(SMALL)}
    for platform in (CPU, CUDA):
        for names in (("top_k",), ("top_p",), ("min_p",), tuple(every)):
            call = functools.partial(cutoff, names, implementation=implementation(platform))
            for dtype in (BF16, F32) if len(names) == 3 else (BF16,):
                logits = shape(SMALL, 20000, dtype=dtype)
                shapes = (logits, shape(SMALL), *(every[name] for name in names))
                yield f"{', '.join(names)}, {jnp.dtype(dtype)}", Case(call, shapes, platform)


PARAMS = SamplingParams(
    top_k=ints(SMALL),
    top_p=shape(SMALL),
    min_p=shape(SMALL),
    repetition_penalty=shape(SMALL),
    frequency_penalty=shape(SMALL),
    presence_penalty=shape(SMALL),
    bias=shape(VOCAB),
    allowed=shape(VOCAB, dtype=bool),
    bad_words=ints(2, 3),
)


def processing():
    def counted(token_ids, lengths, prompt_lengths, new, number):
        counts = specjax.count_tokens(token_ids, lengths, VOCAB, prompt_lengths=prompt_lengths)
        return counts, specjax.update_counts(counts, new, number)

    b, ids = SMALL, (ints(SMALL, 9), ints(SMALL))
    yield "counts", Case(counted, (*ids, ints(b), ints(b, K), ints(b)))

    def apply(logits, sampling, temperature, token_ids, lengths, drafted):
        history = specjax.History(
            token_ids, lengths, specjax.count_tokens(token_ids, lengths, VOCAB)
        )
        return specjax.apply_sampling(
            logits,
            sampling,
            temperature=temperature,
            history=history,
            drafted_token_ids=drafted,
        )

    for platform in (CPU, CUDA):
        logits = shape(b, K + 1, VOCAB, dtype=BF16)
        shapes = (logits, PARAMS, shape(b), *ids, ints(b, K))
        yield "everything", Case(apply, shapes, platform)

    def top(logits, token_ids, temperature, cutoff):
        return specjax.top_logprobs(logits, token_ids, 5, temperature=temperature, cutoff=cutoff)

    yield "top_logprobs", Case(top, (shape(b, VOCAB, dtype=BF16), ints(b), shape(b), shape(b)))


def propose_mapped(
    table, last, keys, positions, temperature, sampling, token_map, token_ids, **options
):
    counts = specjax.count_tokens(token_ids, positions, VOCAB)
    return specjax.propose(
        lambda carry, fed, at: (table[fed], carry),
        (),
        last,
        specjax.DraftInputs(
            keys,
            positions,
            temperature=temperature,
            sampling=sampling,
            history=specjax.History(token_ids, positions, counts),
        ),
        num_tokens=K,
        token_map=token_map,
        vocab_size=VOCAB,
        options=Options(implementation="xla"),
        **options,
    )[0]


def drafts():
    def propose(table, token_ids, keys, positions, temperature, sampling, method="probabilistic"):
        def step(carry, fed, at):
            return table[fed], carry

        return specjax.propose(
            step,
            (),
            token_ids,
            specjax.DraftInputs(keys, positions, temperature=temperature, sampling=sampling),
            num_tokens=K,
            draft_sample_method=method,
            options=Options(implementation="xla"),
        )[0]

    b = SMALL
    shapes = (shape(VOCAB, VOCAB, dtype=BF16), ints(b), key_shapes(b), ints(b), shape(b))
    few = SamplingParams(top_k=ints(b), top_p=shape(b))
    yield "propose", Case(propose, (*shapes, None))
    yield "propose, sampling", Case(propose, (*shapes, few))
    greedy = functools.partial(propose, method="greedy")
    yield "propose, greedy", Case(greedy, (*shapes, None))
    narrow = (shape(VOCAB, DRAFT_VOCAB, dtype=BF16), *shapes[1:], PARAMS)
    for rule in (rules.standard(), rules.coupled()):
        call = functools.partial(propose_mapped, rule=rule)
        history = (ints(DRAFT_VOCAB), ints(b, 9))
        yield f"propose, a token map, {rule.name}", Case(call, (*narrow, *history))
    draft = draft_shapes("everything", (b, K), b, BF16)
    yield "gather_drafts", Case(specjax.gather_drafts, (draft, ints(b), ints(6), ints(6)))
    yield "draft_from_probs", Case(specjax.draft_from_probs, (ints(b, K), shape(b, K, VOCAB)))
    verification = specjax.Verification(ints(b, K + 1), ints(b), ints(b), shape(b, K + 1))

    def commit(token_ids, lengths, verification, max_lengths):
        return specjax.commit(
            token_ids, lengths, verification, eos_token_ids=(3, 4), max_lengths=max_lengths
        )

    yield "commit", Case(commit, (ints(b, 20), ints(b), verification, ints(b)))


LLAMA = TransformerConfig(
    vocab_size=256,
    hidden_size=512,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    tie_word_embeddings=False,
    rope_scaling=RopeScaling("llama3", 4.0, 1.0, 4.0, 8),
    dtype="bfloat16",
)
FAMILIES = {
    "llama 3.1": LLAMA,
    "mistral": dataclasses.replace(LLAMA, rope_scaling=None, layer_windows=(40, 40)),
    "qwen 2.5": dataclasses.replace(LLAMA, rope_scaling=None, qkv_bias=True),
    "qwen 3": dataclasses.replace(LLAMA, rope_scaling=None, qk_norm=True),
    "gemma 2": dataclasses.replace(
        LLAMA,
        tie_word_embeddings=True,
        rope_scaling=None,
        sandwich_norms=True,
        norm_offset=1.0,
        embedding_scale=512**0.5,
        layer_windows=(40, None),
        attention_softcap=50.0,
        logit_softcap=30.0,
        query_scale=0.1,
        hidden_act="gelu_pytorch_tanh",
    ),
    "gemma 3": dataclasses.replace(
        LLAMA,
        tie_word_embeddings=True,
        qk_norm=True,
        sandwich_norms=True,
        norm_offset=1.0,
        layer_windows=(40, None),
        local_rope_theta=100.0,
        hidden_act="gelu_pytorch_tanh",
    ),
}


def models():
    for name, config in FAMILIES.items():
        params = jax.eval_shape(lambda config=config: build(config).params)
        model = build(config, params)

        def step(params, ids, positions, cache, model=model):
            hidden, cache = model.apply(params, ids, positions, cache)
            return model.logits(params, hidden), cache

        # A batch chooses the kernels' tiles in every family alike.
        of_kernels = (2, 8) if name in ("llama 3.1", "gemma 2") else (2,)
        for platform, batches in ((CPU, (2,)), (CUDA, of_kernels)):
            for b in batches:
                cache = jax.eval_shape(lambda model=model, b=b: model.init_cache(b, 600))
                shapes = (params, ints(b, K), ints(b, K), cache)
                yield f"{name}, step, {b}", Case(step, shapes, platform)
    b, params = 2, jax.eval_shape(lambda: build(LLAMA).params)
    model = build(LLAMA, params)
    cache = jax.eval_shape(lambda: model.init_cache(b, 600))

    def prefill(params, ids, positions, cache):
        return model.apply(params, ids, positions, cache)

    yield "prefill", Case(prefill, (params, ints(b, 90), ints(b, 90), cache), CUDA)

    def slopes(params, ids, cache):
        return jax.grad(lambda params: jnp.sum(model.apply(params, ids, ids, cache)[0] ** 2))(
            params
        )

    yield "derivative of a step", Case(slopes, (params, ints(b, K), cache), CUDA)
    whole = functools.partial(causal_hidden, LLAMA)
    yield "whole sequences", Case(whole, (params, ints(b, 30)))


TINY = TransformerConfig(
    vocab_size=160,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    dtype="float32",
)


def whole_decode(kind, weights, prompts, lengths, keys, temperature, sampling=None):
    """A decode of a tiny model with drafts of a kind; weights are the target's and the draft's."""
    target, draft = (dataclasses.replace(build_tiny(), params=params) for params in weights)
    drafter = None
    if kind == "model":
        drafter = specjax.model_drafter(draft)
    elif kind == "ngram":
        drafter = specjax.ngram_drafter()
    return specjax.generate(
        target,
        drafter,
        (prompts, lengths),
        keys=keys,
        config=SpeculativeConfig(num_speculative_tokens=K),
        max_new_tokens=12,
        options=specjax.LoopOptions(max_length=19, num_logprobs=None if sampling is None else 2),
        temperature=temperature,
        eos_token_ids=(3,),
        sampling=sampling,
    )


@functools.cache
def build_tiny():
    with jax.ensure_compile_time_eval():
        return build(TINY)


DECODES = ("plain", "model", "ngram")


def loops():
    b, weights = 2, jax.eval_shape(lambda: [build_tiny().params] * 2)
    shapes = (weights, ints(b, 7), ints(b), key_shapes(b), shape(b))
    for kind in DECODES:
        yield f"{kind}", Case(functools.partial(whole_decode, kind), shapes)
    few = SamplingParams(top_k=ints(b), repetition_penalty=shape(b))
    yield "model, sampling", Case(functools.partial(whole_decode, "model"), (*shapes, few))
    yield "model", Case(functools.partial(whole_decode, "model"), shapes, CUDA)


ROOMS = {
    "gumbel_sample": sampling,
    "rejection_sample": verification,
    "rejection_sample_ragged": ragged,
    "block_rejection_sample": block,
    "coupled_sample": coupled,
    "tree_rejection_sample": trees,
    "split vocabulary": split,
    "logit_cutoff": cutoffs,
    "processing": processing,
    "drafts": drafts,
    "models": models,
    "generate": loops,
}


def cases(*rooms):
    """Every case by its name, or those of some rooms."""
    for room in rooms or ROOMS:
        for name, case in ROOMS[room]():
            yield f"{room}: {name}, {case.platform}", case
