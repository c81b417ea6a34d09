"""Drafts of a smaller vocabulary in an order of its own, verified through their map."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle_block
import pytest
from generic_rules import STANDARD_BY_FUNCTIONS
from verify_cases import (
    check_against_oracle,
    exact,
    make_draft,
    make_keys,
    make_ragged_draft,
    mixed_case,
    run,
    sample_tokens,
    sampled_case,
    with_statistics,
)

import specjax
from specjax import Draft, RaggedDraft, rules
from specjax.core.token_map import invert_token_map

BATCH, K, VOCAB, DRAFT_VOCAB = 64, 3, 300, 150


def make_map(seed=0):
    """Ids in no order, from every block of 128 tokens."""
    return np.random.default_rng(seed).permutation(VOCAB)[:DRAFT_VOCAB].astype(np.int32)


TOKEN_MAP = make_map()


def scattered_case(seed, make=mixed_case):
    """A case whose draft logits are -inf outside the map: by hand, what a map stands for."""
    case = make(seed, BATCH, K, VOCAB)
    rng = np.random.default_rng([seed, 2])
    inside = np.zeros(VOCAB, bool)
    inside[TOKEN_MAP] = True
    case["draft_logits"] = np.where(inside, case["draft_logits"], -np.inf).astype(np.float32)
    # Some tokens stay that the draft cannot have drawn, or that are no tokens.
    drawn = sample_tokens(rng, case["draft_logits"][case["rows"]], case["draft_temperature"])
    stays = rng.random((BATCH, K)) < 0.15
    case["token_ids"] = np.where(stays, case["token_ids"], drawn).astype(np.int32)
    return case


def mapped(draft, token_map=TOKEN_MAP):
    """The draft with the columns of the map alone, in its order."""
    return draft.replace(logits=draft.logits[..., token_map], token_map=token_map)


def mapped_call(verify, implementation):
    def call(draft, *arguments, **options):
        kernels = specjax.Options(implementation=implementation)
        return verify(mapped(draft), *arguments, options=kernels, **options)

    return call


@pytest.mark.once
@pytest.mark.parametrize("seed", range(2))
def test_a_mapped_draft_is_verified_as_the_oracle_verifies_a_scattered_one(seed, implementation):
    verify = mapped_call(specjax.rejection_sample, implementation)
    ours = check_against_oracle(verify, scattered_case(seed))
    assert set(np.asarray(ours.num_accepted).tolist()) == set(range(K + 1))


METHODS = {
    name: functools.partial(specjax.rejection_sample, rule=rule)
    for name, rule in (
        ("standard", rules.standard()),
        ("block", rules.block()),
        ("rule", STANDARD_BY_FUNCTIONS),
    )
}


def with_statistics_case():
    return with_statistics(scattered_case(5, sampled_case))


@functools.cache
def verified(method, implementation):
    """A batch of mapped drafts that carry their statistics."""
    return run(mapped_call(METHODS[method], implementation), with_statistics_case())


@pytest.mark.once
@pytest.mark.parametrize("method", METHODS)
def test_with_carried_statistics_tokens_are_those_of_the_scattered_draft_bit_for_bit(
    method, implementation
):
    """Kernels are held against plain JAX, a rule against none, and blocks against the oracle."""
    ours = verified(method, implementation)
    if method == "rule":
        chex.assert_trees_all_equal(ours[:3], verified("standard", "xla")[:3])
    elif method == "block" and implementation == "xla":
        theirs = exact(with_statistics_case(), one=oracle_block.verify_one)
        sure = theirs.certain
        assert np.mean(sure) > 0.9
        np.testing.assert_array_equal(ours.token_ids[sure], theirs.token_ids[sure])
        np.testing.assert_allclose(ours.logprobs[sure], theirs.logprobs[sure], atol=2e-4)
    elif getattr(implementation, "interpret", False):
        chex.assert_trees_all_equal(ours[:3], verified(method, "xla")[:3])
    else:
        verify = functools.partial(
            METHODS[method], options=specjax.Options(implementation=implementation)
        )
        chex.assert_trees_all_equal(ours, run(verify, with_statistics_case()))
    assert np.sum(ours.num_accepted < K) > 10


def flat(case):
    """A padded draft without `rows`, laid end to end; every request drafts K tokens."""
    names = ("token_ids", "draft_logprobs", "draft_logsumexp", "draft_cutoff")
    laid = {name: case[name].reshape(-1) for name in names}
    logits = case["draft_logits"][case["rows"]].reshape(-1, VOCAB)
    laid |= {name: case[name] for name in ("draft_temperature", "num_tokens")}
    ends = jnp.arange(0, BATCH * K + 1, K, dtype=jnp.int32)
    return make_ragged_draft(laid | {"draft_logits": logits}, ends, K)


@pytest.mark.once
def test_ragged_batches_read_the_map_as_padded_ones_do(implementation):
    """The interpreter runs the standard method, plain JAX block: both find ragged rows alike."""
    method = "standard" if getattr(implementation, "interpret", False) else "block"
    case = with_statistics(scattered_case(6))
    padded = run(mapped_call(METHODS[method], implementation), case)
    ours = METHODS[method](
        mapped(flat(case)),
        jnp.asarray(case["target_logits"].reshape(-1, VOCAB)),
        keys=make_keys(BATCH),
        positions=case["positions"],
        temperature=case["temperature"],
        cutoff=case["cutoff"].reshape(-1),
        bonus_token_ids=case["bonus_token_ids"],
        options=specjax.Options(implementation=implementation),
    )
    chex.assert_trees_all_equal(ours._replace(logprobs=None), padded._replace(logprobs=None))


@pytest.mark.interpret
def test_kernels_and_plain_jax_agree_on_mapped_drafts():
    """By the schedule of a small batch, without statistics; the oracle judges large batches."""
    case, keys = scattered_from(sampled_case(7, BATCH, K, VOCAB)), make_keys(BATCH)
    small = {name: value[:8] for name, value in case.items()}
    plain = run(mapped_call(specjax.rejection_sample, "xla"), case, keys)
    kernels = run(mapped_call(specjax.rejection_sample, "interpret"), small, keys[:8])
    for name in ("token_ids", "num_accepted", "num_emitted"):
        np.testing.assert_array_equal(getattr(kernels, name), getattr(plain, name)[:8], name)


def scattered_from(case):
    rng = np.random.default_rng(3)
    inside = np.zeros(VOCAB, bool)
    inside[TOKEN_MAP] = True
    logits = np.where(inside, case["draft_logits"], -np.inf).astype(np.float32)
    return case | dict(
        draft_logits=logits, token_ids=sample_tokens(rng, logits, case["draft_temperature"])
    )


def arguments(case):
    names = ("positions", "temperature", "cutoff", "bonus_token_ids")
    options = {name: jnp.asarray(case[name]) for name in names} | {"keys": make_keys(BATCH)}
    return mapped(make_draft(case)), jnp.asarray(case["target_logits"]), options


def on_device(draft):
    return jax.tree.map(jnp.asarray, draft)


@pytest.mark.once
def test_jit_vmap_and_export_read_the_map():
    """Maps that differ between calls, and one map that they share."""
    batches = [arguments(scattered_case(seed, sampled_case)) for seed in (8, 9)]
    draft = make_draft(scattered_case(9, sampled_case))
    batches[1] = (mapped(draft, make_map(1)), *batches[1][1:])

    def verify(draft, target_logits, options):
        return specjax.rejection_sample(
            draft, target_logits, options=specjax.Options(implementation="xla"), **options
        )

    plain = [verify(*batch) for batch in batches]
    assert not np.array_equal(
        plain[1].token_ids,
        verify(batches[1][0].replace(token_map=TOKEN_MAP), *batches[1][1:]).token_ids,
    )
    batches = [(on_device(draft), *rest) for draft, *rest in batches]
    first = jax.tree.map(lambda x: x[None], batches[0])
    axes = jax.tree.map(lambda _: 0, first[0]).replace(token_map=None)
    alone = jax.vmap(verify, in_axes=(axes, 0, 0))(
        first[0].replace(token_map=jnp.asarray(TOKEN_MAP)), *first[1:]
    )
    draft, target_logits, options = jax.tree.map(lambda *x: jnp.stack(x), *batches)
    data = jax.random.key_data(options.pop("keys"))

    def exported(draft, target_logits, options, data):
        keys = jax.random.wrap_key_data(data)
        return verify(draft, target_logits, options | {"keys": keys})

    operands = (draft, target_logits, options, data)
    blob = jax.export.export(jax.jit(jax.vmap(exported)))(*operands).serialize()
    again = jax.export.deserialize(blob).call(*operands)
    for i, ours in ((0, again), (1, again), (0, alone)):
        np.testing.assert_array_equal(ours.token_ids[i], plain[i].token_ids)


@pytest.mark.once
def test_gathered_drafts_keep_their_map(implementation):
    case = with_statistics(scattered_case(10))
    draft, target_logits, options = arguments(case)
    ids = jnp.arange(BATCH, dtype=jnp.int32)
    order = jnp.flip(ids)
    moved = specjax.gather_drafts(draft, ids, order, jnp.asarray(case["num_tokens"])[order])
    assert moved.token_map is draft.token_map
    in_order = {name: jnp.take(values, order, axis=0) for name, values in options.items()}
    again, plain = (
        specjax.rejection_sample(d, x, options=specjax.Options(implementation=implementation), **o)
        for d, x, o in (
            (moved, jnp.take(target_logits, order, axis=0), in_order),
            (draft, target_logits, options),
        )
    )
    np.testing.assert_array_equal(jnp.flip(again.token_ids, axis=0), plain.token_ids)


@pytest.mark.once
def test_ids_outside_the_vocabulary_that_only_a_device_knows_are_rejected_and_count(implementation):
    """As where V_d > V: the mass of q there is no token's."""
    case = sampled_case(11, BATCH, K, VOCAB, VOCAB + 6)
    # The last of the wide draft's tokens has no id at all. They are as many as those of the map.
    columns = np.append(TOKEN_MAP[2:], [VOCAB + 3, VOCAB + 5]).astype(np.int32)
    token_map = np.append(columns[:-1], -1).astype(np.int32)
    assert VOCAB - 1 not in columns
    wide = np.full_like(case["draft_logits"], -np.inf)
    wide[..., columns] = case["draft_logits"][..., columns]
    wide[..., [VOCAB + 3, VOCAB + 5]] += 4
    drawn = sample_tokens(np.random.default_rng(4), wide, case["draft_temperature"])
    case |= dict(draft_logits=wide, token_ids=drawn)
    # Where the map's -1 was counted from the end, this token would have its q.
    case["target_logits"][..., VOCAB - 1] += 6
    assert np.sum(drawn == VOCAB + 3) > 10

    def verify(draft, target_logits, **options):
        logits = draft.logits[..., columns]
        draft = draft.replace(logits=logits, token_map=jnp.asarray(token_map))
        return specjax.rejection_sample(
            draft, target_logits, options=specjax.Options(implementation=implementation), **options
        )

    check_against_oracle(verify, case)


@pytest.mark.once
def test_the_lowest_draft_id_of_a_repeated_token_counts():
    """A map on a device may repeat an id, and its inverse is the same on every processor."""
    token_map = jnp.array([4, 0, 4, 7, -1, 0], jnp.int32)
    assert invert_token_map(token_map, 6).tolist() == [1, 6, 6, 6, 0, 6]


SMALL_MAP = np.array([4, 0, 3], np.int32)
SMALL = Draft(np.zeros((1, 1), np.int32), np.zeros((1, 1, 3), np.float32))


@pytest.mark.once
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"token_map": np.array([4, 0, 4])}, "holds the id 4 2 times"),
        ({"token_map": [4, 0, 5]}, r"runs from 0 to 5; .* \[0, 5\)"),
        ({"token_map": np.array([-1, 0, 3])}, "runs from -1 to 3"),
        ({"token_map": np.array([4, 0])}, r"draft.token_map has shape \(2,\); it needs \(3,\)"),
        ({"token_map": np.array([4.0, 0, 3])}, "draft.token_map has dtype float"),
        ({"token_map": SMALL_MAP, "logits": None}, "draft.token_map is given without draft.logits"),
    ],
)
def test_maps_that_are_none_are_refused(change, sentence):
    options = dict(keys=jax.random.key(0), positions=0)
    rows = np.zeros((1, 2, 5), np.float32)
    right = SMALL.replace(token_map=SMALL_MAP)
    jax.eval_shape(lambda: specjax.rejection_sample(right, rows, **options))
    draft = SMALL.replace(**change)
    with pytest.raises(ValueError, match=sentence):
        specjax.rejection_sample(draft, rows, **options)
    ragged = RaggedDraft(
        draft.token_ids[0],
        np.array([0, 1]),
        max_draft_tokens=1,
        logits=None if draft.logits is None else draft.logits[0],
        token_map=draft.token_map,
    )
    with pytest.raises(ValueError, match=sentence):
        specjax.rejection_sample(ragged, np.zeros((2, 5), np.float32), **options)
