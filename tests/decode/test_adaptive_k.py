"""K = "auto": each request drafts as many tokens as its own past makes worth their time."""

import collections
import functools
import itertools
from types import SimpleNamespace

import bigrams
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import specjax
from benchmarks.cpu import soak
from specjax import SpeculativeConfig
from specjax.decode.adaptive_k import (
    DraftHistory,
    KPolicy,
    constant_k,
    init_history,
    k_by_rate,
    throughput_by_rate,
)
from specjax.decode.draft_step import draft_budget
from specjax.decode.step import run_step

V, B, K = 4, 4, 3
TARGET, DRAFT = bigrams.pair(V, seed=1)
MODEL, DRAFT_MODEL = bigrams.model(TARGET), bigrams.model(DRAFT)
# Two are worth it at middling acceptance, three at high, none at low.
CONFIG = SpeculativeConfig("auto", step_costs=(1.0, 1.4, 1.5, 1.85))
# By batch size: for one request those of CONFIG, for more of them drafts cost more.
TABLE = specjax.StepCosts((1, 9), ((1.0, 1.4, 1.5, 1.85), (2.0, 3.0, 4.4, 5.5)))
BY_SIZE = SpeculativeConfig("auto", step_costs=TABLE)
PROMPTS = [[1, 2, 3], [3], [0, 1], [2, 2, 2, 0, 1]]
DRAFTERS = {
    "model": specjax.model_drafter(DRAFT_MODEL),
    "ngram": specjax.ngram_drafter(),
}


def generate(drafter, rows=PROMPTS, *, keys, config=CONFIG, function=specjax.generate, **options):
    options = {"max_new_tokens": 40, "temperature": np.ones(len(rows), np.float32)} | options
    return function(MODEL, drafter, rows, keys=keys, config=config, **options)


def texts(output):
    return specjax.unpad(output.token_ids)


def assert_same(output, other):
    """A sum of another shape may be rounded otherwise, which log-probabilities alone show."""
    np.testing.assert_allclose(output.logprobs, other.logprobs, rtol=1e-6, atol=1e-6)
    others = (each._replace(logprobs=None) for each in (output, other))
    jax.tree.map(np.testing.assert_array_equal, *others)


# The choice


def tokens_of(rate, drafted):
    """The expected tokens of a step in which each draft is accepted at the rate."""
    return sum(rate**i for i in range(drafted + 1))


def test_the_best_k_has_the_most_expected_tokens_for_its_cost():
    rng = np.random.default_rng(0)
    for size in (2, 3, 5, 33):
        costs = tuple(np.cumsum(rng.uniform(0.05, 1, size)))
        for num_slots, rate in [(1, None), (1, 0.9), (16, None), (16, 0.9), (16, 0.0)]:
            config = SpeculativeConfig("auto", step_costs=costs, usual_acceptance_rate=rate)
            best = k_by_rate(config, num_slots)
            usual = [tokens_of(0.55 if rate is None else rate, n) for n in range(size)]
            # A request takes the other slots to draft as is best for a usual rate.
            others = int(np.argmax(np.array(usual) / costs)) if num_slots > 1 else 0
            for number, k in enumerate(best):
                tokens = [tokens_of(number / 64, n) for n in range(others, size)]
                speeds = (np.array(tokens) + (num_slots - 1) * usual[others]) / costs[others:]
                assert k >= others
                assert speeds[k - others] >= max(speeds) * (1 - 1e-12)
    assert k_by_rate(SpeculativeConfig(3)) is None


def test_k_is_settled_if_no_rate_that_requests_come_to_changes_it():
    costs = {
        # At 39/64, the rate of what is not known, no draft is worth it: so it stays.
        (1.0, 9.0, 2.0): [0, 0, 0],
        (1.0, 9.0, 1.9): [None, 0, None],
        (1.0, 9.0, 1.55): [None, 2, None],
        (1.0, 1.3, 1.45, 1.6): [None, None, None],
    }
    for each, wanted in costs.items():
        config = SpeculativeConfig("auto", step_costs=each)
        tables = k_by_rate(config), k_by_rate(config, 3), throughput_by_rate(config)
        assert list(map(constant_k, tables)) == wanted, each
    # The default costs are of no machine, and drafts are tried with them.
    assert constant_k(k_by_rate(SpeculativeConfig("auto"), 64)) == 3


def test_a_batch_reads_the_costs_of_its_size_and_an_engine_those_of_its_slots():
    """Every choice is the best of an enumeration in float64, with costs from the line by hand."""
    found = set()
    for size in (1, 2, 3, 4, 5, 9, 20):
        share = min(size - 1, 8) / 8
        costs = [a + share * (b - a) for a, b in zip(*TABLE.milliseconds, strict=True)]
        config, usual = BY_SIZE.for_batch_size(size), max(speeds_of(0.55, 0, 0, 1, costs))[1]
        for num_slots in (1, size):
            least = usual if num_slots > 1 else 0
            for number, k in enumerate(k_by_rate(config, num_slots)):
                speeds = speeds_of(number / 64, least, 0.55, num_slots, costs)
                assert {n: x for x, n in speeds}[k] >= max(speeds)[0] * (1 - 1e-12)
            found.add((size, tuple(k_by_rate(config, num_slots))))
        by_load = throughput_by_rate(config)
        wanted = [[x for x, _ in speeds_of(n / 64, 0, 0, 1, costs)] for n in range(65)]
        np.testing.assert_allclose(by_load, wanted, rtol=1e-6)
    # The sizes do decide.
    assert len({ks for _, ks in found}) > 6


def speeds_of(rate, least, usual, num_slots, costs):
    """Tokens per cost of each k from `least` on, next to slots that draft `least`, and the k."""
    others = (num_slots - 1) * tokens_of(usual, least)
    return [((tokens_of(rate, k) + others) / costs[k], k) for k in range(least, len(costs))]


def chosen(outcomes, config=CONFIG):
    """The k before the first step, and after steps of given numbers of accepted drafts."""
    table, one = jnp.asarray(k_by_rate(config)), jnp.ones(1, jnp.int32)
    policy = KPolicy(table, init_history(table, one))
    numbers = [next_k(policy)]
    for accepted in outcomes:
        drafted = jnp.asarray(numbers[-1:], jnp.int32)
        accepted = jnp.minimum(jnp.int32(accepted), drafted)
        policy = KPolicy(table, policy.update(drafted, accepted, one))
        numbers.append(next_k(policy))
    return numbers


def next_k(policy):
    """The k of one active request whose text has room for any."""
    return int(policy.budget(jnp.full(1, 99, jnp.int32), jnp.ones(1, bool))[0])


@pytest.mark.once
def test_rejections_end_drafting_and_plain_steps_bring_it_back():
    config = SpeculativeConfig("auto")
    rejected = np.array(chosen([0] * 256, config))
    assert rejected[0] > 0
    assert np.all(rejected[3:20] == 0)
    assert np.any(rejected[20:] > 0)
    # Tries are so few that a text without accepted drafts takes hardly longer.
    for num_steps in (128, 256):
        assert np.mean(np.array(config.step_costs)[rejected[:num_steps]]) < 1.025


@pytest.mark.once
def test_acceptance_makes_drafts_longer():
    accepted = chosen([9] * 20)
    assert accepted[0] < K
    assert accepted[-1] == K


def test_the_default_costs_draft_where_half_is_accepted_and_not_where_a_fifth_is():
    best = k_by_rate(SpeculativeConfig("auto"))
    assert best[0] == best[12] == 0
    assert np.all(best[40:] > 0)
    assert best[64] == SpeculativeConfig("auto").num_speculative_tokens


def test_a_shared_k_gives_the_active_requests_the_most_tokens_for_its_cost():
    rng = np.random.default_rng(0)
    table = jnp.asarray(throughput_by_rate(CONFIG))
    found = set()
    for _ in range(200):
        tested = rng.integers(0, 2**16, 5)
        accepted = (tested * rng.uniform(0, 1, rng.choice([1, 5]))).astype(int)
        is_active = rng.uniform(size=5) < 0.6
        history = DraftHistory(*(jnp.asarray(x, jnp.int32) for x in (tested, accepted, tested)))
        most = jnp.full(5, K, jnp.int32)
        budget = KPolicy(table, history).budget(most, jnp.asarray(is_active))
        (shared,) = set(budget.tolist())
        # 2.48 of 4 tokens, in 1024ths; rates are looked up in 64ths.
        rates = (accepted + 2540) * 64 // (tested + 4096) / 64
        tokens = np.cumsum(rates[:, None] ** np.arange(K + 1), axis=1)
        speeds = (tokens[is_active] / CONFIG.step_costs).sum(axis=0)
        assert speeds[shared] >= speeds.max() * (1 - 1e-6)
        found.add(shared)
    assert found == {0, 2, 3}


# The text


@pytest.mark.once
def test_a_text_is_that_of_the_costs_of_its_batch_size():
    keys = bigrams.keys(B)
    found = [
        generate(DRAFTERS["model"], PROMPTS[:size], keys=keys[:size], config=config)
        for size in (2, 4)
        for config in (BY_SIZE, BY_SIZE.for_batch_size(size), CONFIG)
    ]
    for by_size, of_size, of_one in (found[:3], found[3:]):
        jax.tree.map(np.testing.assert_array_equal, by_size, of_size)
        assert np.any(by_size.metrics.num_drafted != of_one.metrics.num_drafted)
    state = specjax.init(
        MODEL, DRAFTERS["model"], PROMPTS, keys=keys, max_new_tokens=9, config=BY_SIZE
    )
    wanted = k_by_rate(BY_SIZE.for_batch_size(B))
    np.testing.assert_array_equal(state.settings.k_by_rate, wanted)
    specjax.step(MODEL, DRAFTERS["model"], state, config=BY_SIZE)


@pytest.mark.once
def test_a_request_drafts_alone_what_it_drafts_in_a_batch():
    """Tokens, and how many were drafted in each step; log-probabilities but for their last bits."""
    drafter, temperature = DRAFTERS["model"], np.array([0.0, 1.0, 0.7, 1.5], np.float32)
    keys = bigrams.keys(B)
    together = generate(drafter, keys=keys, temperature=temperature)
    assert len({tuple(row) for row in np.asarray(together.metrics.num_drafted)}) > 1
    for b in range(B):
        one = slice(b, b + 1)
        alone = generate(drafter, [PROMPTS[b]], keys=keys[one], temperature=temperature[one])
        assert_same(jax.tree.map(lambda x, b=b: x[b : b + 1], together), alone)
    plain = generate(None, keys=keys, temperature=0 * temperature)
    greedy = generate(drafter, keys=keys, temperature=0 * temperature)
    assert texts(greedy) == texts(plain)


@pytest.mark.once
def test_sampling_rules_and_log_probabilities_are_those_of_each_request_under_vmap():
    """With prompt lookup, which finds something to draft in some steps only."""
    ids, lengths = bigrams.prompts(PROMPTS)
    # An eighth: a penalty that no product rounds, whatever XLA fuses.
    sampling = specjax.SamplingParams(top_k=jnp.array([3, 4, 2, 3]), frequency_penalty=0.125)

    def call(ids, lengths, keys, top_k):
        return specjax.generate(
            MODEL,
            DRAFTERS["ngram"],
            (ids, lengths),
            keys=keys,
            config=CONFIG,
            max_new_tokens=40,
            sampling=sampling._replace(top_k=top_k),
            options=specjax.LoopOptions(num_logprobs=1),
        )

    arrays = (ids, lengths, bigrams.keys(B), sampling.top_k)
    together = call(*arrays)
    alone = jax.vmap(call)(*(array[:, None] for array in arrays))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[:, 0], y), alone, together)
    drafted = np.asarray(together.metrics.num_drafted)[:, 0]
    assert np.all((drafted > 0) & (drafted < np.asarray(together.metrics.num_steps)))


@pytest.mark.once
def test_streaming_with_auto_gives_the_tokens_of_generate():
    proposer, keys = DRAFTERS["model"], bigrams.keys(B)
    whole = generate(proposer, keys=keys)
    state = generate(proposer, keys=keys, function=specjax.init)
    drafted = []
    while np.any(state.finish == 0):
        state, info = specjax.step(MODEL, proposer, state, config=CONFIG)
        drafted.append(np.asarray(info.num_drafted))
    for name in ("token_ids", "lengths", "logprobs", "origins", "finish", "metrics"):
        jax.tree.map(np.testing.assert_array_equal, getattr(state, name), getattr(whole, name))
    # Steps without drafts and of several lengths are among them.
    assert {0, 2} <= set(np.max(drafted, axis=1).tolist())


@pytest.mark.once
def test_other_costs_are_other_values_of_the_same_program():
    keys = bigrams.keys(B)
    state = generate(DRAFTERS["model"], keys=keys, function=specjax.init)
    size = run_step._cache_size()
    dear = SpeculativeConfig("auto", step_costs=(1.0, 9.0, 9.0, 9.0))
    state = generate(DRAFTERS["model"], keys=keys, config=dear, function=specjax.init)
    assert run_step._cache_size() == size
    assert np.all(np.asarray(state.draft.num_tokens) == 0)


def with_k(state, k, last=None):
    """The state of requests that find k best at any acceptance, the last perhaps another."""
    table = jnp.full_like(state.settings.k_by_rate, k)
    if last is not None:
        table = table.at[32:].set(last)
        num_tested = jnp.full_like(state.lengths, 10**6)
        history = state.draft_history._replace(num_tested=num_tested)
        accepted = jnp.zeros_like(num_tested).at[-1].set(10**6)
        state = state._replace(draft_history=history._replace(num_accepted=accepted))
    return state._replace(settings=state.settings._replace(k_by_rate=table))


def test_a_step_of_another_k_is_refused():
    state = jax.eval_shape(
        lambda: generate(DRAFTERS["ngram"], keys=bigrams.keys(B), function=specjax.init)
    )
    for config in (SpeculativeConfig(K), SpeculativeConfig("auto"), None):
        with pytest.raises(ValueError, match="the state was begun with another"):
            specjax.step(MODEL, DRAFTERS["ngram"], state, config=config)


@pytest.mark.once
def test_a_model_that_drafts_again_has_read_what_it_missed():
    """Drafting for itself it is accepted always, unless its cache lacks a token."""
    target, _ = soak.make_models()  # of all tokens so far
    itself = specjax.model_drafter(target)
    options = dict(temperature=np.ones(B, np.float32), config=CONFIG, max_new_tokens=100)
    state = specjax.init(target, itself, PROMPTS, keys=bigrams.keys(B), **options)
    for num_plain in (1, 2, 0, 9, 17):
        for k in [0] * num_plain + [K, K]:
            before = state.drafter_state
            # The last request goes on drafting meanwhile.
            last = K if num_plain == 2 else k
            state, info = specjax.step(target, itself, with_k(state, k, last), config=CONFIG)
            np.testing.assert_array_equal(info.verification.num_accepted, info.num_drafted)
            np.testing.assert_array_equal(state.draft.num_tokens, [k, k, k, last])
            if last == 0:
                np.testing.assert_array_equal(before, state.drafter_state)


def test_a_drafter_has_read_no_token_that_was_rejected():
    history = DraftHistory(*np.array([[0, 0], [0, 0], [9, 9]], np.int32))
    history = KPolicy(None, history).update(np.array([4, 4]), np.array([1, 4]), np.array([8, 11]))
    assert history.num_read.tolist() == [7, 9]


@pytest.mark.once
def test_a_step_without_drafts_computes_one_row():
    """The target's cache is how many tokens it was given last."""

    def init_cache(batch_size, max_length):
        return jnp.zeros((), jnp.int32)

    def apply(params, token_ids, positions, cache):
        hidden = jnp.stack([token_ids, token_ids], axis=-1)
        return hidden, jnp.int32(token_ids.shape[1])

    target = specjax.Model(MODEL.params, init_cache, apply, MODEL.logits)
    drafter, config = DRAFTERS["model"], SpeculativeConfig("auto", step_costs=[1.0] * 6)
    options = dict(keys=bigrams.keys(B), config=config, max_new_tokens=40)
    state = specjax.init(target, drafter, PROMPTS, **options)
    for k, rows in ((0, None), (0, 1), (2, 1), (5, 6), (0, 6), (0, 1)):
        state, _ = specjax.step(target, drafter, with_k(state, k), config=config)
        assert rows in (None, int(state.target_cache))


# The distribution


@functools.cache
def k_after(steps, config):
    """The k of a request after steps (drafted, accepted), as the loop counts them."""
    table, one = jnp.asarray(k_by_rate(config)), jnp.ones(1, jnp.int32)
    policy = KPolicy(table, init_history(table, one))
    for drafted, accepted in steps:
        policy = KPolicy(table, policy.update(drafted * one, accepted * one, one))
    return next_k(policy)


def joint_of_steps(num_steps, choose):
    """Exact distribution of the first tokens of steps whose K is chosen by what came before."""
    p, q = bigrams.probs(TARGET), bigrams.probs(DRAFT)
    found = np.zeros((V,) * num_steps)

    def row(table, text):
        return table[text[-2], text[-1]]

    def descend(text, steps, mass):
        new = text[2:]
        if len(new) >= num_steps:
            found[tuple(new[:num_steps])] += mass
            return
        k = choose(steps)
        step = oracle.output_distribution(lambda x: row(p, text + x), lambda x: row(q, text + x), k)
        for tokens, share in step.items():
            descend(text + tokens, (*steps, (k, len(tokens) - 1)), mass * share)

    descend((1, 2), (), 1.0)
    return found


@pytest.mark.checks
@pytest.mark.once
@pytest.mark.parametrize("config", [CONFIG, BY_SIZE.for_batch_size(2)])
def test_three_steps_follow_the_target_jointly_whatever_k_the_past_chooses(config):
    """By enumeration in float64: the past holds which drafts were accepted, not the next ones."""
    ks = set()

    def choose(steps):
        # Less history than the loop has makes the choice follow the last step.
        ks.add(k_after(steps * 3, config))
        return k_after(steps * 3, config)

    wanted = bigrams.joint_probs(TARGET, [1, 2], 3)
    np.testing.assert_allclose(joint_of_steps(3, choose), wanted, rtol=1e-12)
    assert len(ks) > 1


# Two requests of two tokens that share a K, as in an engine that reads its load.
LOAD = SpeculativeConfig("auto", step_costs=(1.0, 1.45, 1.73))
LOAD_P, LOAD_Q = (bigrams.probs(table[:2, :2, :2]) for table in (TARGET, DRAFT))


@functools.cache
def most_of_two(histories, lengths, num_tokens):
    """How many tokens each of two requests drafts, as the loop says it; -1 if it has ended."""
    table, end = jnp.asarray(throughput_by_rate(LOAD)), jnp.full(2, num_tokens, jnp.int32)
    tested, accepted = jnp.asarray(histories, jnp.int32).T
    state = SimpleNamespace(
        settings=SimpleNamespace(max_lengths=end),
        lengths=jnp.asarray(lengths, jnp.int32),
        k_policy=KPolicy(table, DraftHistory(tested, accepted, tested)),
        finish=jnp.asarray(np.array(lengths) == num_tokens, jnp.int8),
    )
    return tuple(draft_budget(DRAFTERS["model"], state, LOAD).tolist())


def test_no_request_drafts_past_the_end_that_it_may_have():
    accepted_always = ((10**6, 10**6),) * 2
    assert most_of_two(accepted_always, (1, 3), 4) == (2, 0)
    assert most_of_two(accepted_always, (2, 4), 4) == (1, -1)


@functools.cache
def history_after(history, drafted, accepted):
    """The counts of tested and accepted tokens after a step."""
    one = jnp.ones(1, jnp.int32)
    before = DraftHistory(*(count * one for count in (*history, 0)))
    after = KPolicy(None, before).update(drafted * one, accepted * one, one)
    return int(after.num_tested[0]), int(after.num_accepted[0])


@functools.cache
def outcomes(context, k, cut):
    """What a step of k drafted tokens gives after two tokens: {(tokens, drafted): probability}."""
    found = collections.Counter()
    p, q = ((lambda x, t=t: t[(*context, *x)[-2:]]) for t in (LOAD_P, LOAD_Q))
    for tokens in itertools.product(range(2), repeat=k):
        chances = [q(tokens[:i])[token] for i, token in enumerate(tokens)]
        drafted = cut(chances)
        step = oracle.output_distribution(p, q, drafted, token_ids=tokens)
        for emitted, share in step.items():
            found[emitted, drafted] += share * np.prod(chances)
    return found


def joint_of_two(num_tokens, cut=len):
    """Exact distribution of the texts of two requests whose K is chosen for both; and the Ks."""
    begin = ((1, 0), (0, 0)), ((0, 1), (0, 0))
    states, found, ks = {begin: 1.0}, np.zeros((2,) * 2 * num_tokens), set()
    while states:
        after = collections.Counter()
        for state, mass in states.items():
            texts, histories = zip(*state, strict=True)
            lengths = tuple(len(text) - 2 for text in texts)
            if lengths == (num_tokens, num_tokens):
                found[texts[0][2:] + texts[1][2:]] += mass
                continue
            most = most_of_two(histories, lengths, num_tokens)
            ks.add(most)
            each = []
            for (text, history), k in zip(state, most, strict=True):
                step = {((), 0): 1.0} if k < 0 else outcomes(text[-2:], k, cut)
                each.append(
                    [
                        ((text + new, history_after(history, n, max(len(new) - 1, 0))), share)
                        for (new, n), share in step.items()
                    ]
                )
            for (first, a), (second, b) in itertools.product(*each):
                after[first, second] += mass * a * b
        states = after
    return found, ks


@pytest.mark.checks
@pytest.mark.once
def test_two_requests_that_share_a_k_follow_the_target_jointly_unless_a_cut_token_decides():
    """By enumeration in float64, of both texts together: what one drafts follows the other, too."""
    one, other = (bigrams.joint_probs(TARGET[:2, :2, :2], last, 3) for last in ([1, 0], [0, 1]))
    wanted = np.multiply.outer(one, other)
    found, ks = joint_of_two(3)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    assert {(2, 2), (1, 1), (0, 0), (-1, 1), (1, -1)} <= ks

    def before_an_unlikely_token(chances):
        return next((i for i, chance in enumerate(chances) if chance < 0.4), len(chances))

    biased, _ = joint_of_two(3, before_an_unlikely_token)
    assert np.abs(biased - wanted).max() > 0.01


NUM_SAMPLED, NUM_JOINT, PROMPT = 8_000, 4, [1, 2]
SMALL_TARGET, SMALL_DRAFT = TARGET[:3, :3, :3], DRAFT[:3, :3, :3]
SMALL_DRAFTER = specjax.model_drafter(bigrams.model(SMALL_DRAFT))


def init_looking(params, *sizes):
    return SMALL_DRAFTER.init(params[0], *sizes)


def extend_looking(params, *chunk):
    return SMALL_DRAFTER.extend(params[0], *chunk)


def propose_looking(params, state, token_ids, hidden, inputs, **options):
    """Cuts drafts off before their first token of a probability below 0.3, where it looks."""
    inner, looks = params
    draft, state = SMALL_DRAFTER.propose(inner, state, token_ids, hidden, inputs, **options)
    stays = (draft.logprobs >= jnp.log(0.3)) | ~looks[:, None]
    num_likely = jnp.cumprod(stays.astype(jnp.int32), axis=1).sum(1)
    return draft.replace(num_tokens=jnp.minimum(inputs.num_tokens, num_likely)), state


@functools.cache
def z_of_texts():
    """Standardised chi-squares of texts of four tokens, and of those whose drafter looks."""
    functions = (init_looking, extend_looking, propose_looking)
    looks = jnp.arange(NUM_SAMPLED) % 2 == 1
    drafter = specjax.Drafter((SMALL_DRAFTER.params, looks), *functions)
    ids, lengths = bigrams.prompts([PROMPT] * NUM_SAMPLED)
    output = specjax.generate(
        bigrams.model(SMALL_TARGET),
        drafter,
        (ids, lengths),
        keys=bigrams.keys(NUM_SAMPLED),
        config=SpeculativeConfig("auto", step_costs=(1.0, 1.45, 1.7, 9.0)),
        max_new_tokens=NUM_JOINT + 2,
        options=specjax.LoopOptions(max_length=len(PROMPT) + NUM_JOINT + 2),
    )
    drafted = np.asarray(output.metrics.num_drafted)
    assert len({tuple(row) for row in drafted}) > 2
    new = np.asarray(output.token_ids)[:, len(PROMPT) :][:, :NUM_JOINT]
    expected = bigrams.joint_probs(SMALL_TARGET, PROMPT, NUM_JOINT) * (NUM_SAMPLED / 2)
    degrees = expected.size - 1

    def z(texts):
        counts = np.zeros(expected.shape)
        np.add.at(counts, tuple(texts.T), 1)
        return (((counts - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees)

    return z(new[::2]), z(new[1::2])


@pytest.mark.checks
@pytest.mark.once
@pytest.mark.optimised
def test_several_steps_with_auto_follow_the_target_jointly():
    assert abs(z_of_texts()[0]) < 5


@pytest.mark.once
@pytest.mark.optimised
def test_a_draft_that_is_cut_after_looking_at_the_token_is_seen():
    assert z_of_texts()[1] > 10
