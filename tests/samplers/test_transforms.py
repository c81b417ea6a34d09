"""The samplers inside JAX's transformations, on meshes, and compiled once."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from verify_cases import (
    library,
    make_draft,
    make_keys,
    mixed_case,
    sampled_case,
    with_statistics,
)

import specjax
from specjax import Draft, RaggedDraft, Stream, Verification, rules

BATCH, K, VOCAB = 16, 2, 140
NAMES = ("positions", "temperature", "cutoff", "bonus_token_ids")


def small_case(seed=0, make=mixed_case):
    return make(seed, BATCH, K, VOCAB)


def gathered(case):
    """A case whose logits are in the requests' order, as they are split over a mesh."""
    case["draft_logits"] = case["draft_logits"][case.pop("rows")]
    return case


def arguments(case, seed=0):
    """(draft, target_logits, options) of arrays alone."""
    options = {name: jnp.asarray(case[name]) for name in NAMES}
    return (
        make_draft(case),
        jnp.asarray(case["target_logits"]),
        options | {"keys": make_keys(BATCH, seed)},
    )


def apply(verify, draft, target_logits, options):
    return verify(draft, target_logits, **options)


def test_scan_and_while_loop_change_nothing(implementation):
    """Steps at positions 0, 10, 20, 30: scans of two steps inside a while loop of two.

    A Draft is in both carries, and positions come from both counters.
    """
    draft, target_logits, options = arguments(gathered(small_case(1)))
    verify = library(implementation)

    def at(draft, step):
        positions = jnp.full((BATCH,), 10, jnp.int32) * step
        return verify(draft, target_logits, **options | {"positions": positions})

    def scanned(draft, step):
        return draft, at(draft, step).token_ids

    def looped(state):
        turn, draft, steps = state
        draft, both = jax.lax.scan(scanned, draft, 2 * turn + jnp.arange(2, dtype=jnp.int32))
        return turn + 1, draft, steps.at[turn].set(both)

    plain = np.stack([at(draft, jnp.int32(step)).token_ids for step in range(4)])
    start = (jnp.int32(0), draft, jnp.zeros((2, 2, BATCH, K + 1), jnp.int32))
    _, _, steps = jax.lax.while_loop(lambda state: state[0] < 2, looped, start)
    np.testing.assert_array_equal(np.reshape(steps, plain.shape), plain)


def exported(function, *arguments):
    """JAX promises no stability to Triton's custom call; nothing here outlives its JAX."""
    triton = jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
    return jax.export.export(jax.jit(function), disabled_checks=[triton])(*arguments).serialize()


def test_jit_and_vmap_change_nothing(implementation):
    """Neither does the export of both, and what comes back is a `Verification`."""

    def verify(draft, target_logits, options):
        keys = jax.random.wrap_key_data(options["keys"])
        return library(implementation)(draft, target_logits, **options | {"keys": keys})

    batches = [arguments(gathered(small_case(seed)), seed) for seed in range(2)]
    for *_, options in batches:
        options["keys"] = jax.random.key_data(options["keys"])
    draft, target_logits, options = jax.tree.map(lambda *x: jnp.stack(x), *batches)
    blob = exported(jax.vmap(verify), draft, target_logits, options)
    again = jax.export.deserialize(blob).call
    # One program takes greedy requests, random ones, and both.
    mixed = jnp.full((2, BATCH), 0.7, jnp.float32).at[:, 0].set(0.0)
    for temperature in (options["temperature"], 0 * mixed, mixed, 0 * mixed + 1):
        changed = options | {"temperature": temperature}
        ours = again(draft, target_logits, changed)
        assert isinstance(ours, Verification)
        for i in range(2):
            one = jax.tree.map(lambda x, i=i: x[i], (draft, target_logits, changed))
            plain, mine = verify(*one), jax.tree.map(lambda x, i=i: x[i], ours)
            chex.assert_trees_all_equal(mine._replace(logprobs=None), plain._replace(logprobs=None))
            chex.assert_trees_all_close(mine.logprobs, plain.logprobs, atol=1e-5)


@pytest.mark.interpreted_elsewhere
def test_an_exported_draft_comes_back(implementation):
    logits = jnp.asarray(sampled_case(3, BATCH, K, VOCAB)["draft_logits"][:, 0])

    def propose(key_data):
        draft, _ = specjax.propose(
            lambda carry, token_ids, positions: (logits, carry),
            (),
            jnp.zeros((BATCH,), jnp.int32),
            specjax.DraftInputs(jax.random.wrap_key_data(key_data), positions=0),
            num_tokens=K,
            options=specjax.Options(implementation=implementation),
        )
        return draft

    data = jax.random.key_data(make_keys(BATCH))
    blob = exported(propose, data)
    again = jax.export.deserialize(blob).call(data)
    assert isinstance(again, Draft)
    chex.assert_trees_all_equal(again.token_ids, propose(data).token_ids)
    chex.assert_trees_all_close(again, propose(data), atol=1e-5)


def test_static_fields_of_an_exported_draft_come_back():
    ids = jnp.zeros((4,), jnp.int32)
    padded = Draft(ids[None], on_target_stream=True)
    ragged = RaggedDraft(ids, jnp.array([0, 4]), max_draft_tokens=4, logits=jnp.zeros((4, 5)))
    for draft in (padded, ragged):
        blob = exported(lambda draft: draft, draft)
        again = jax.export.deserialize(blob).call(draft)
        assert jax.tree.structure(again) == jax.tree.structure(draft)
        chex.assert_trees_all_equal(again, draft)


def finite_case(kind):
    case = sampled_case(4, BATCH, K, VOCAB)
    case["cutoff"][:] = case["draft_cutoff"][:] = -30.0
    case["temperature"][::3] = 0
    case["num_tokens"] = (np.arange(BATCH) % (K + 2) - 1).astype(np.int32)
    if kind == "equal":
        case["draft_logits"] = case["target_logits"][:, :K].copy()
    if kind == "cut":
        case["cutoff"][:] = case["draft_cutoff"][:] = 3.0
    return case


@pytest.mark.once
@pytest.mark.parametrize("kind", ["mixed", "equal", "cut"])
def test_finite_inputs_make_no_nan(kind, implementation):
    draft, target_logits, options = arguments(gathered(finite_case(kind)))
    rates = jnp.full((K,), 0.5, jnp.float32)
    with jax.debug_nans(True):
        for extra in ({}, {"rule": rules.synthetic(rates)}):
            step = library(implementation)(draft, target_logits, **options, **extra)
            assert not np.any(np.isnan(np.asarray(step.logprobs)))


@pytest.mark.interpreted_elsewhere
def test_tokens_do_not_depend_on_device_count(implementation):
    """Batch-sharded inputs on a mesh of explicit axes."""
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    draft, target_logits, options = arguments(gathered(small_case(5)))
    plain = apply(library(implementation), draft, target_logits, options)
    mesh = jax.make_mesh((4,), ("batch",), (AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, PartitionSpec("batch"))
        moved = jax.device_put((draft, target_logits, options), sharding)
        steps = [jax.jit(functools.partial(apply, library(implementation)))(*moved)]
        # Without `jit` arguments are checked and broadcast on the mesh, by no kernel.
        if implementation == "xla":
            steps.append(apply(library(implementation), *moved))
        sample = specjax.gumbel_sample(
            moved[1][:, 0],
            keys=moved[2]["keys"],
            positions=moved[2]["positions"],
            stream=Stream.TARGET,
            options=specjax.Options(implementation=implementation),
        )
    for one in steps:
        assert one.token_ids.sharding.spec[0] == "batch"
        chex.assert_trees_all_equal(jax.device_get(one), jax.device_get(plain))
    alone = specjax.gumbel_sample(
        target_logits[:, 0],
        keys=options["keys"],
        positions=options["positions"],
        stream=Stream.TARGET,
        options=specjax.Options(implementation=implementation),
    )
    np.testing.assert_array_equal(np.asarray(sample.token_ids), np.asarray(alone.token_ids))


COMPILATIONS = []


def count(event, seconds, **_):
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILATIONS.append(seconds)


jax.monitoring.register_event_duration_secs_listener(count)


def compilations(function):
    before = len(COMPILATIONS)
    jax.block_until_ready(function())
    return len(COMPILATIONS) - before


def test_compilations_are_counted():
    assert compilations(lambda: jax.jit(lambda x: x * 3 + 5)(jnp.zeros(7, jnp.float32))) > 0


SCALARS = [0.7, 1.3, 1, 0, np.float32(0.9), np.float64(1.1), np.int64(2)]


def check_changes(kind, implementation):
    draft, target_logits, options = arguments(gathered(small_case(6)))
    values = [jnp.asarray(x, jnp.float32) for x in SCALARS]
    positions = [jnp.int32(3), jnp.int32(9)]
    if kind == "batch":
        values = [jnp.full((BATCH,), x, jnp.float32) for x in SCALARS]
        values.append(np.linspace(0, 2, BATCH).astype(np.float32))
        positions = [jnp.arange(BATCH, dtype=jnp.int32), np.arange(BATCH, dtype=np.int32)]
    else:
        values += SCALARS
        positions += [5, np.int32(2), np.int64(8)]
    rates = [rules.synthetic(jnp.full((K,), x, jnp.float32)) for x in (0.1, 0.9)]
    keys = [make_keys(BATCH, seed) for seed in (1, 2)]
    drafts = [
        draft.replace(
            num_tokens=jnp.full((BATCH,), n, jnp.int32),
            temperature=jnp.full((BATCH,), 0.5 * n, jnp.float32),
            cutoff=jnp.full((BATCH, K), -n, jnp.float32),
        )
        for n in range(3)
    ]
    calm = options | dict(temperature=values[0], positions=positions[0], rule=rates[0])

    def call(draft=drafts[0], **change):
        return lambda: library(implementation)(draft, target_logits, **calm | change)

    jax.block_until_ready(call()())
    for name, choices in [
        ("temperature", values),
        ("positions", positions),
        ("rule", rates),
        ("keys", keys),
        ("draft", drafts),
        ("cutoff", [options["cutoff"], options["cutoff"] - jnp.float32(1)]),
        ("bonus_token_ids", [options["bonus_token_ids"], jnp.full((BATCH,), 3, jnp.int32)]),
    ]:
        for choice in choices:
            assert compilations(call(**{name: choice})) == 0, (name, choice)


def test_a_change_of_values_compiles_nothing(implementation):
    check_changes("batch", implementation)


@pytest.mark.interpreted_elsewhere
def test_a_change_of_scalars_compiles_nothing(implementation):
    """Python or NumPy numbers, ints or floats, host or device arrays: one program."""
    check_changes("scalar", implementation)


def test_a_change_of_values_compiles_nothing_when_sampling(implementation):
    logits = jnp.asarray(small_case(7)["draft_logits"][:, 0])
    keys = make_keys(BATCH)

    def call(temperature=1.0, positions=0, stream=0):
        return lambda: specjax.gumbel_sample(
            logits,
            keys=keys,
            positions=positions,
            stream=stream,
            temperature=temperature,
            options=specjax.Options(implementation=implementation),
        )

    call()()
    values = [*SCALARS, *(jnp.asarray(x, jnp.float32) for x in SCALARS)]
    for change in (
        *({"temperature": x} for x in values),
        *({"positions": x} for x in (1, np.int64(4), jnp.int32(7))),
        *({"stream": x} for x in (1, Stream.draft(3), jnp.int32(5))),
    ):
        assert compilations(call(**change)) == 0, change


VIEWS = {"reshape", "squeeze", "expand_dims", "bitcast_convert_type"}


def inner_jaxprs(equation, tainted):
    """(jaxpr, which of its inputs are tainted) for every jaxpr inside an equation."""
    params, name = equation.params, equation.primitive.name
    if name == "cond":
        return [(branch.jaxpr, tainted[1:]) for branch in params["branches"]]
    if name == "while":
        a, b = params["cond_nconsts"], params["body_nconsts"]
        carry = tainted[a + b :]
        return [
            (params["cond_jaxpr"].jaxpr, tainted[:a] + carry),
            (params["body_jaxpr"].jaxpr, tainted[a : a + b] + carry),
        ]
    if name == "pallas_call":  # a kernel makes its outputs and nothing else
        return []
    inner = params.get("jaxpr", params.get("call_jaxpr"))
    return [] if inner is None else [(getattr(inner, "jaxpr", inner), tainted)]


def large_copies(jaxpr, tainted, size):
    """Float arrays of at least `size` elements made from the tainted inputs of a jaxpr."""
    dirty = {v for v, bad in zip(jaxpr.invars, tainted, strict=True) if bad}
    found = []
    for equation in jaxpr.eqns:
        bad = [not hasattr(v, "val") and v in dirty for v in equation.invars]
        if not any(bad):
            continue
        dirty.update(equation.outvars)
        inner = inner_jaxprs(equation, bad)
        for body, inputs in inner:
            found += large_copies(body, inputs, size)
        for v in equation.outvars:
            made = not inner and equation.primitive.name not in VIEWS
            if made and jnp.issubdtype(v.aval.dtype, jnp.floating) and v.aval.size >= size:
                found.append(f"{equation.primitive.name} {v.aval}")
    return found


def copies_of_the_draft(case, dtype, implementation):
    draft, target_logits, options = arguments(case)
    draft = draft.replace(logits=draft.logits.astype(dtype))

    def verify(logits):
        return library(implementation)(draft.replace(logits=logits), target_logits, **options)

    jaxpr = jax.make_jaxpr(verify)(draft.logits).jaxpr
    return large_copies(jaxpr, [True] * len(jaxpr.invars), draft.logits.size)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_carried_statistics_make_no_copy_of_the_draft(dtype, implementation):
    """No float array of [B, K, V] elements, on any platform, through rows as well."""
    case = with_statistics(small_case(9))
    assert copies_of_the_draft(case, dtype, implementation) == []


def test_a_copy_of_the_draft_would_be_seen():
    logits = jnp.zeros((BATCH, K, VOCAB), jnp.float32)

    def copying(logits):
        return jax.jit(lambda x: jax.nn.log_softmax(x).sum())(logits)

    jaxpr = jax.make_jaxpr(copying)(logits).jaxpr
    assert large_copies(jaxpr, [True], logits.size)
