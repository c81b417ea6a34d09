"""Without log-probabilities of greedy requests: the same tokens, and no logit exponentiated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_block
import pytest
from verify_cases import K, make_draft, make_keys, mixed_case, with_sizes

import specjax
from specjax import rules
from specjax.core.logsumexp import block_partials

pytestmark = pytest.mark.once

BATCH, VOCAB = 48, 300
# By the launches of one batch size or the other, so that each kernel is met once.
# Rules, and the programs up to which the schedule is that of a small batch.
CALLS = {"rejection": 0, "block": 0, "coupled": 10**6}
RULES = {"rejection": rules.standard(), "block": rules.block(), "coupled": rules.coupled()}


@functools.cache
def shared_case():
    """Requests of every kind, half of them greedy; rows that hold NaN, +inf or -inf alone; ties."""
    case = mixed_case(3, BATCH, K, VOCAB)
    target, rng = case["target_logits"], np.random.default_rng(3)
    greedy = rng.random(BATCH) < 0.5
    case["temperature"][greedy] = 0
    best = np.argmax(target[:, :K], axis=-1)
    kept = greedy[:, None] & (rng.random((BATCH, K)) < 0.8) & (case["token_ids"] >= 0)
    case["token_ids"] = np.where(kept, best, case["token_ids"]).astype(np.int32)
    for b in range(0, BATCH, 5):
        row, column = b % (K + 1), b * 37 % VOCAB
        target[b, row, slice(None) if b % 3 == 2 else column] = (np.nan, np.inf, -np.inf)[b % 3]
    # The drafted token's logit once more, in another tile: before it and after it.
    for b in range(1, BATCH, 5):
        row = b % K
        token = case["token_ids"][b, row]
        if 0 <= token < VOCAB:
            target[b, row, (token + 150) % VOCAB] = target[b, row, token]
    return case


def verify(kind, case, implementation, greedy_logprobs):
    options = dict(
        keys=make_keys(BATCH),
        positions=case["positions"],
        temperature=case["temperature"],
        cutoff=case["cutoff"],
        bonus_token_ids=case["bonus_token_ids"],
        greedy_logprobs=greedy_logprobs,
        options=specjax.Options(implementation=implementation),
    )
    rows = jnp.asarray(case["target_logits"])
    step = specjax.rejection_sample(make_draft(case), rows, rule=RULES[kind], **options)
    return jax.device_get(step)


def exact(kind):
    """The oracle's, which knows nothing of the option."""
    case = shared_case()
    one = {"block": oracle_block.verify_one, "coupled": oracle.couple_one}
    return oracle.verify(
        keys=np.asarray(jax.random.key_data(make_keys(BATCH))),
        one=one.get(kind, oracle.verify_one),
        **case,
    )


@pytest.mark.parametrize("kind", CALLS)
def test_tokens_are_the_same_and_greedy_requests_have_no_logprobs(kind, implementation):
    case, theirs = shared_case(), exact(kind)
    kernels = with_sizes(implementation, max_small_programs=CALLS[kind])
    ours = verify(kind, case, kernels, False)
    greedy, sure = case["temperature"] < 1e-5, theirs.certain
    assert np.mean(sure) > 0.9
    assert set(theirs.num_accepted[greedy].tolist()) == set(range(K + 1))
    assert np.any(theirs.num_emitted[greedy] == theirs.num_accepted[greedy])
    for name in ("token_ids", "num_accepted", "num_emitted"):
        np.testing.assert_array_equal(getattr(ours, name)[sure], getattr(theirs, name)[sure], name)
    np.testing.assert_array_equal(ours.logprobs[greedy], 0)
    random = sure & ~greedy
    np.testing.assert_allclose(ours.logprobs[random], theirs.logprobs[random], atol=2e-4)


def test_the_branch_of_a_greedy_request_exponentiates_nothing():
    """`lax.cond` runs one of the two where requests are verified one by one, as on a CPU."""

    def reduce(row, is_greedy):
        return block_partials(row, jnp.ones(()), None, is_greedy)

    jaxpr = jax.make_jaxpr(reduce)(jnp.zeros(VOCAB), True)
    branches = [
        str(x) for e in jaxpr.eqns if e.primitive.name == "cond" for x in e.params["branches"]
    ]
    # Of whole blocks, and of the rest of the row.
    assert ["exp2" in branch for branch in branches] == [True, False, True, False]
