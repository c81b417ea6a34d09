"""`rejection_sample` against the oracle, token for token, over mixed batches."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specjax
from specjax import Draft

BATCH, K, VOCAB = 64, 3, 300
DRAFT_FIELDS = {
    "draft_logits": "logits",
    "draft_temperature": "temperature",
    "draft_logprobs": "logprobs",
    "draft_logsumexp": "logsumexp",
    "draft_cutoff": "cutoff",
    "num_tokens": "num_tokens",
    "rows": "rows",
}


def make_keys(n, seed=0):
    return jax.random.split(jax.random.key(seed), n)


def draw_tokens(rng, logits, temperature):
    noise = rng.gumbel(size=logits.shape)
    scaled = logits / np.where(temperature > 0, temperature, 1.0)[:, None, None]
    return np.argmax(scaled + noise * (temperature > 0)[:, None, None], axis=-1).astype(np.int32)


def calm_case(seed=0, batch_size=BATCH, k=K, vocab_size=VOCAB, draft_vocab=None):
    """Drawn drafts everywhere at temperature 1, nothing masked, absent or cut."""
    rng = np.random.default_rng(seed)
    draft_vocab = draft_vocab or vocab_size
    wide = max(vocab_size, draft_vocab)
    base = 2 * rng.normal(size=(batch_size, k + 1, wide))
    other = base + 0.7 * rng.normal(size=base.shape)
    draft_logits = base[:, :k, :draft_vocab].astype(np.float32)
    return dict(
        token_ids=draw_tokens(rng, draft_logits, np.ones(batch_size)),
        target_logits=other[:, :, :vocab_size].astype(np.float32),
        positions=rng.integers(0, 10_000, batch_size).astype(np.int32),
        temperature=np.ones(batch_size, np.float32),
        cutoff=np.full((batch_size, k + 1), -np.inf, np.float32),
        bonus_token_ids=np.full(batch_size, -1, np.int32),
        draft_logits=draft_logits,
        draft_temperature=np.ones(batch_size, np.float32),
        draft_cutoff=np.full((batch_size, k), -np.inf, np.float32),
        num_tokens=np.full(batch_size, k, np.int32),
        rows=np.arange(batch_size, dtype=np.int32),
    )


def mixed_case(seed, *shape, **options):
    """Greedy and random, drawn and one-hot, cut, masked, ragged, reordered and unusable."""
    case = calm_case(seed, *shape, **options)
    rng = np.random.default_rng([seed, 1])
    batch_size, k = case["token_ids"].shape
    vocab_size = case["target_logits"].shape[2]
    case["temperature"] = rng.choice([0.0, 1e-7, 0.6, 1.0, 1.0, 1.7], batch_size).astype(np.float32)
    same = rng.random(batch_size) < 0.6
    drawn_at = rng.choice([0.0, 0.8, 1.2], batch_size)
    case["draft_temperature"] = np.where(same, case["temperature"], drawn_at).astype(np.float32)
    case["token_ids"] = draw_tokens(rng, case["draft_logits"], case["draft_temperature"])
    strange = rng.random((batch_size, k)) < 0.06
    unusable = rng.choice([-1, -7, vocab_size, vocab_size + 9, 2**31 - 1, 0], (batch_size, k))
    case["token_ids"] = np.where(strange, unusable, case["token_ids"]).astype(np.int32)
    greedy = (case["temperature"] < 1e-5) & (rng.random(batch_size) < 0.7)
    argmax = np.argmax(case["target_logits"][:, :k], axis=-1)
    case["token_ids"] = np.where(greedy[:, None], argmax, case["token_ids"]).astype(np.int32)
    case["num_tokens"] = rng.choice([-1, 0, 1, k, k, k, k, k + 5], batch_size).astype(np.int32)
    case["cutoff"] = rng.choice([-np.inf, -1.5], (batch_size, k + 1)).astype(np.float32)
    case["draft_cutoff"] = rng.choice([-np.inf, -1.0], (batch_size, k)).astype(np.float32)
    rows = rng.permutation(batch_size).astype(np.int32)
    case["draft_logits"] = case["draft_logits"][np.argsort(rows)]
    case["rows"] = rows
    some = rng.random(batch_size) < 0.2
    case["bonus_token_ids"] = np.where(
        some, rng.integers(0, vocab_size + 5, batch_size), -1
    ).astype(np.int32)
    masked = rng.random(case["target_logits"].shape) < 0.1
    masked[case["bonus_token_ids"] >= 0] = False
    case["target_logits"] = np.where(masked, -np.inf, case["target_logits"]).astype(np.float32)
    return case


def with_statistics(case):
    """The same case carrying what `gumbel_sample` would have stated about its drafts."""
    batch_size, k = case["token_ids"].shape
    logprobs = np.zeros((batch_size, k), np.float32)
    totals = np.zeros((batch_size, k), np.float32)
    for b in range(batch_size):
        scale = case["draft_temperature"][b]
        scale = np.float64(scale) if scale >= 1e-5 else 1.0
        for i in range(k):
            row = case["draft_logits"][case["rows"][b], i]
            w = oracle.kept(row, case["draft_cutoff"][b, i]) / scale
            totals[b, i] = total = oracle.logsumexp(w)
            x = case["token_ids"][b, i]
            logprobs[b, i] = w[x] - total if 0 <= x < len(w) else -np.inf
    return case | dict(draft_logprobs=logprobs, draft_logsumexp=totals)


def library(implementation):
    return functools.partial(specjax.rejection_sample, implementation=implementation)


def make_draft(case):
    fields = {DRAFT_FIELDS[k]: jnp.asarray(v) for k, v in case.items() if k in DRAFT_FIELDS}
    return Draft(jnp.asarray(case["token_ids"]), **fields)


def run(verify, case, keys=None, **options):
    keys = make_keys(len(case["token_ids"])) if keys is None else keys
    rest = {
        name: jnp.asarray(value)
        for name, value in case.items()
        if name not in DRAFT_FIELDS and name not in ("token_ids", "target_logits")
    }
    target_logits = jnp.asarray(case["target_logits"])
    return verify(make_draft(case), target_logits, keys=keys, **rest, **options)


def exact(case, keys=None, **options):
    keys = make_keys(len(case["token_ids"])) if keys is None else keys
    arguments = {k: v for k, v in case.items() if k != "draft_logprobs"}
    return oracle.verify(keys=np.asarray(jax.random.key_data(keys)), **arguments, **options)


def check_against_oracle(verify, case, keys=None, *, max_unclear=0.1, noise=np.float32):
    """Tokens, counts and log-probabilities are the oracle's wherever rounding cannot decide."""
    options = {} if noise == np.float32 else {"noise_dtype": jnp.float64}
    ours = run(verify, case, keys, **options)
    theirs = exact(case, keys, noise=noise)
    chex.assert_type([ours.token_ids, ours.num_accepted, ours.num_emitted], jnp.int32)
    chex.assert_type(ours.logprobs, jnp.float32)
    chex.assert_shape(ours.token_ids, theirs.token_ids.shape)
    sure = theirs.certain
    assert np.mean(~sure) <= max_unclear
    for name in ("num_accepted", "num_emitted", "token_ids"):
        np.testing.assert_array_equal(
            np.asarray(getattr(ours, name))[sure], getattr(theirs, name)[sure], err_msg=name
        )
    np.testing.assert_allclose(
        np.asarray(ours.logprobs)[sure], theirs.logprobs[sure], atol=2e-4, rtol=1e-5
    )
    return ours


def check_every_length_is_accepted(verification, k):
    assert set(np.asarray(verification.num_accepted).tolist()) == set(range(k + 1))


# As its users run it, who have no use for the interpreter; two more below.
@pytest.mark.optimised(interpreter=False)
def test_drawn_drafts_are_verified_as_the_oracle_does(implementation):
    ours = check_against_oracle(library(implementation), calm_case(1))
    check_every_length_is_accepted(ours, K)


@pytest.mark.optimised(interpreter=False)
@pytest.mark.parametrize("seed", range(4))
def test_mixed_batches_are_verified_as_the_oracle_does(seed, implementation):
    ours = check_against_oracle(library(implementation), mixed_case(seed))
    check_every_length_is_accepted(ours, K)


def test_any_mixed_batch_is_verified_as_the_oracle_does(implementation):
    @settings(max_examples=8, deadline=None, database=None)
    @given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
    def holds(seed, key_seed):
        check_against_oracle(library(implementation), mixed_case(seed), make_keys(BATCH, key_seed))

    holds()


def test_carried_statistics_change_nothing(implementation):
    case = mixed_case(5)
    plain = run(library(implementation), case)
    carried = check_against_oracle(library(implementation), with_statistics(case))
    same = np.mean(np.asarray(plain.token_ids) == np.asarray(carried.token_ids))
    assert same > 0.98


def test_one_hot_batches_carry_no_logits(implementation):
    case = mixed_case(6)
    for name in ("draft_logits", "draft_cutoff", "draft_temperature", "rows"):
        del case[name]
    ours = check_against_oracle(library(implementation), case)
    check_every_length_is_accepted(ours, K)


def test_absent_fields_mean_their_defaults_and_scalars_serve_every_request(implementation):
    single = jax.random.key(5)
    case = calm_case(7)
    case["temperature"][:] = case["draft_temperature"][:] = 0.8
    case["positions"][:] = 17
    each = jax.vmap(jax.random.fold_in, (None, 0))(single, jnp.arange(BATCH, dtype=jnp.uint32))
    full = check_against_oracle(library(implementation), case, each)
    names = ("token_ids", "draft_logits", "target_logits")
    bare = {name: case[name] for name in names}
    bare |= dict(temperature=np.float32(0.8), positions=np.int32(17))
    bare = check_against_oracle(library(implementation), bare, single)
    for name in ("token_ids", "num_accepted", "num_emitted"):
        chex.assert_trees_all_equal(getattr(bare, name), getattr(full, name))
    # Two compilations of one formula may differ in the last bit.
    chex.assert_trees_all_close(bare.logprobs, full.logprobs, rtol=1e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_synthetic_batches_follow_their_rates_and_the_ordinary_residual(shared, implementation):
    case = mixed_case(8)
    rng = np.random.default_rng(8)
    rates = rng.choice([0.0, 0.3, 0.7, 1.0], (BATCH, K)).astype(np.float32)
    case["conditional_rates"] = np.array([0.9, 0.6, 0.5], np.float32) if shared else rates
    ours = check_against_oracle(library(implementation), case)
    check_every_length_is_accepted(ours, K)


@pytest.mark.parametrize(
    ("vocab_size", "draft_vocab", "k"), [(300, 200, 3), (5, 420, 2), (1, 1, 2), (1025, 1024, 1)]
)
def test_any_vocabularies_and_any_number_of_drafts(vocab_size, draft_vocab, k, implementation):
    case = mixed_case(9, 32, k, vocab_size, draft_vocab=draft_vocab)
    check_against_oracle(library(implementation), case, max_unclear=0.2)


@pytest.mark.optimised(interpreter=False)
def test_narrow_logits_are_read_exactly(implementation):
    case = mixed_case(11)
    for name, dtype in [("target_logits", jnp.bfloat16), ("draft_logits", jnp.float16)]:
        case[name] = np.asarray(jnp.asarray(case[name]).astype(dtype))
    check_against_oracle(library(implementation), case)


def test_float64_noise_is_the_oracle_s(implementation):
    with jax.enable_x64(True):
        check_against_oracle(library(implementation), mixed_case(12), noise=np.float64)


def test_logits_are_found_through_rows(implementation):
    case = mixed_case(15)
    gathered = case | dict(
        draft_logits=case["draft_logits"][case["rows"]], rows=np.arange(BATCH, dtype=np.int32)
    )
    chex.assert_trees_all_equal(
        run(library(implementation), case), run(library(implementation), gathered)
    )


def test_several_requests_may_share_draft_rows(implementation):
    case = calm_case(16)
    case["rows"] = (np.arange(BATCH, dtype=np.int32) // 8) * 8
    gathered = case | dict(
        draft_logits=case["draft_logits"][case["rows"]], rows=np.arange(BATCH, dtype=np.int32)
    )
    chex.assert_trees_all_equal(
        run(library(implementation), case), run(library(implementation), gathered)
    )


def test_tokens_do_not_depend_on_batch_order(implementation):
    case = mixed_case(17)
    keys = make_keys(BATCH)
    whole = run(library(implementation), case, keys)
    order = np.random.default_rng(0).permutation(BATCH)
    moved = {k: v if k == "draft_logits" else v[order] for k, v in case.items()}
    shuffled = run(library(implementation), moved, keys[order])
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x[order], whole), shuffled)


def test_tokens_do_not_depend_on_batch_company(implementation):
    case = mixed_case(18)
    keys = make_keys(BATCH)
    whole = run(library(implementation), case, keys)
    others = mixed_case(19)
    mine = np.arange(BATCH) % 4 == 1
    company = {
        k: np.where(mine.reshape(-1, *[1] * (v.ndim - 1)), v, others[k]) for k, v in case.items()
    }
    company["rows"] = case["rows"]
    slots = case["rows"][mine]
    company["draft_logits"] = others["draft_logits"].copy()
    company["draft_logits"][slots] = case["draft_logits"][slots]
    again = run(library(implementation), company, keys)
    chex.assert_trees_all_equal(*(jax.tree.map(lambda x: x[mine], v) for v in (whole, again)))


def test_tokens_do_not_depend_on_the_most_drafts_of_the_batch(implementation):
    case = calm_case(20)
    case["num_tokens"][:] = 1
    long = run(library(implementation), case)
    names = ("token_ids", "draft_logits", "draft_cutoff")
    short = case | {name: case[name][:, :1] for name in names}
    short |= {name: case[name][:, :2] for name in ("target_logits", "cutoff")}
    short = run(library(implementation), short)
    np.testing.assert_array_equal(np.asarray(long.token_ids)[:, :2], np.asarray(short.token_ids))


@pytest.mark.parametrize(
    ("named", "change"),
    [
        ("target_logits has 3 rows", {"target_logits": np.zeros((BATCH, 3, VOCAB), np.float32)}),
        ("target_logits", {"target_logits": np.zeros((BATCH, VOCAB), np.float32)}),
        ("target_logits", {"target_logits": np.zeros((BATCH, 4, VOCAB), np.int32)}),
        ("target_logits", {"target_logits": np.zeros((BATCH - 1, 4, VOCAB), np.float32)}),
        ("token_ids", {"token_ids": np.zeros(K, np.int32)}),
        ("token_ids", {"token_ids": np.zeros((BATCH, K), np.float32)}),
        ("draft.logits", {"draft_logits": np.zeros((BATCH, 2, VOCAB), np.float32)}),
        ("draft.temperature", {"draft_temperature": np.ones((BATCH, K), np.float32)}),
        ("draft.num_tokens", {"num_tokens": np.ones((BATCH, K), np.int32)}),
        ("draft.rows", {"rows": np.zeros(3, np.int32)}),
        ("draft.cutoff", {"draft_cutoff": np.zeros(BATCH, np.float32)}),
        ("draft.logprobs", {"draft_logprobs": np.zeros(BATCH, np.float32)}),
        ("draft.logsumexp", {"draft_logsumexp": np.zeros(BATCH, np.float32)}),
        ("conditional_rates", {"conditional_rates": np.ones(K + 1, np.float32)}),
        ("conditional_rates", {"conditional_rates": np.ones(BATCH, np.float32)}),
        ("bonus_token_ids", {"bonus_token_ids": np.zeros((BATCH, 1), np.int32)}),
        ("cutoff", {"cutoff": np.zeros((BATCH, K), np.float32)}),
        ("positions", {"positions": np.zeros(3, np.int32)}),
        ("positions", {"positions": np.zeros(BATCH, np.float32)}),
        ("temperature", {"temperature": np.ones((BATCH, 1), np.float32)}),
    ],
)
def test_wrong_arguments_are_refused_by_name(named, change, implementation):
    with pytest.raises(ValueError, match=named.replace(".", r"\.")):
        run(library(implementation), calm_case() | change)


def test_draft_logits_for_other_than_the_batch_need_rows(implementation):
    case = calm_case()
    del case["rows"]
    case["draft_logits"] = case["draft_logits"][:-1]
    with pytest.raises(ValueError, match=r"draft\.logits"):
        run(library(implementation), case)


@pytest.mark.parametrize(
    "keys",
    [
        lambda: jnp.zeros((BATCH, 2), jnp.uint32),
        lambda: jax.random.split(jax.random.key(0, impl="rbg"), BATCH),
        lambda: make_keys(BATCH + 1),
        lambda: make_keys(BATCH).reshape(8, 8),
    ],
)
def test_wrong_keys_are_refused(keys, implementation):
    with pytest.raises(ValueError, match="keys"):
        run(library(implementation), calm_case(), keys())


def test_refusals_come_at_trace_time(implementation):
    case = calm_case() | dict(conditional_rates=np.ones(K + 1, np.float32))
    with pytest.raises(ValueError, match="conditional_rates"):
        jax.eval_shape(lambda: run(library(implementation), case))


def test_float64_noise_without_x64_is_refused_with_the_cure(implementation):
    with pytest.raises(ValueError, match="jax_enable_x64"):
        run(library(implementation), calm_case(), noise_dtype=jnp.float64)
