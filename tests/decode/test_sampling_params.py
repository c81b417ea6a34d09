"""Decoding under sampling parameters, token by token: masks, penalties, log-probabilities."""

import functools

import bigrams
import jax
import jax.numpy as jnp
import numpy as np
import processed
import pytest
from jax.sharding import AxisType, PartitionSpec

import specjax
from specjax import Finish, Origin, SamplingParams, SpeculativeConfig
from specjax.decode.generate import loop_in_place

pytestmark = pytest.mark.once

V, NEW = 6, 12
TARGET, DRAFT = bigrams.pair(V, seed=3)
PROMPTS = [[1, 2, 3], [3], [0, 1], [2, 2, 2, 0, 1]]
DRAFTERS = {
    None: None,
    "model": specjax.model_drafter(bigrams.model(DRAFT)),
    "ngram": specjax.ngram_drafter(),
}
WORDS = [[[1, 2], [4]], [[0, 0]], [], [[3, 1, 2], [5, 0]]]
NUMBERS = {
    "top_k": np.array([3, 0, 5, 2]),
    "top_p": np.array([0.9, 1.0, 0.7, 0.95]),
    "min_p": np.array([0.0, 0.0, 0.1, 0.02]),
    "repetition_penalty": np.array([1.3, 1.0, 0.8, 1.6]),
    "frequency_penalty": np.array([0.2, 0.0, -0.1, 0.5]),
    "presence_penalty": np.array([0.0, 0.0, 0.4, -0.3]),
}
BIAS = np.random.default_rng(5).normal(size=(4, V)).astype(np.float32) * [[1], [0], [1], [0.5]]
ALLOWED = np.ones((4, V), bool)
ALLOWED[[0, 2, 3], [1, 3, 5]] = False
EACH = SamplingParams(
    **NUMBERS,
    bias=BIAS,
    allowed=processed.pack(ALLOWED),
    bad_words=specjax.bad_words_array([WORDS[0], WORDS[1], [[98]], WORDS[3]]),
)


# Every rule and threshold, all of them off: the program of EACH.
UNRESTRICTED = SamplingParams(
    top_k=np.zeros(4, int),
    top_p=np.ones(4),
    min_p=np.zeros(4),
    repetition_penalty=np.ones(4),
    frequency_penalty=np.zeros(4),
    presence_penalty=np.zeros(4),
    bias=np.zeros((4, V), np.float32),
    allowed=processed.pack(np.ones((4, V), bool)),
    bad_words=np.full_like(EACH.bad_words, 98),
)


def run(drafter, sampling=EACH, rows=PROMPTS, *, temperature=0.9, keys=None, **options):
    config = SpeculativeConfig(num_speculative_tokens=3)
    # Programs that take long to compile: the tests share them, which list log-probabilities.
    if drafter in ("model", "ngram"):
        options.setdefault("num_logprobs", 2)
    if drafter == "ngram":
        options.setdefault("logprobs_mode", "processed")
    # A number per request, which shares compilations; `init` and shard_map are given a scalar.
    temperature = np.asarray(temperature, np.float32)
    temperature = temperature if temperature.ndim else np.repeat(temperature, len(rows))
    return specjax.generate(
        bigrams.model(TARGET),
        DRAFTERS[drafter] if drafter is None or isinstance(drafter, str) else drafter,
        rows,
        keys=bigrams.keys(len(rows)) if keys is None else keys,
        config=config,
        max_new_tokens=NEW,
        temperature=temperature,
        sampling=sampling,
        options=specjax.LoopOptions(**options),
    )


def texts(output):
    ids, lengths = np.asarray(output.token_ids), np.asarray(output.lengths)
    return [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)]


def of_request(sampling, b):
    """The parameters of request b, as those of every request."""
    return jax.tree.map(lambda x: np.asarray(x)[[b] * 4], sampling)


def row_after(b, generated):
    """The processed row after what request b generated, from the definitions."""
    past = [0, *PROMPTS[b], *generated]
    numbers = {name: NUMBERS[name][b] for name in list(NUMBERS)[3:]}
    rules = numbers | {"bias": BIAS[b], "allowed": ALLOWED[b], "bad_words": WORDS[b]}
    raw = np.float32(TARGET[past[-2], past[-1]])
    return raw, processed.process(raw, PROMPTS[b], generated, **rules)


def thresholds(b):
    """As `processed.truncate` takes them, which knows no values that are off."""
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return {name: NUMBERS[name][b] for name in off if NUMBERS[name][b] != off[name]}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_speculation_is_greedy_decoding_of_the_processed_rows(drafter):
    output = run(drafter, temperature=0.0)
    for b, text in enumerate(texts(output)):
        generated = []
        while len(generated) < NEW:
            generated.append(int(np.argmax(row_after(b, generated)[1])))
        assert text == PROMPTS[b] + generated


def test_requests_with_different_parameters_share_a_program_and_nothing_else():
    keys = bigrams.keys(4)
    together = texts(run("model", keys=keys))
    for b, row in enumerate(PROMPTS):
        copies = run("model", of_request(EACH, b), [row] * 4, keys=keys[np.array([b] * 4)])
        assert texts(copies) == [together[b]] * 4
    # The second request has one bad word alone, which its text does not contain.
    free = texts(run("model", UNRESTRICTED, keys=keys))
    assert together[1] == free[1] or [0, 0] in zip(free[1], free[1][1:], strict=False)


@pytest.mark.slow
def test_values_never_recompile():
    run("model", temperature=np.ones(4))
    compiled = loop_in_place._cache_size()
    other = EACH._replace(
        **{name: value[::-1].copy() for name, value in NUMBERS.items()},
        bias=BIAS[::-1] * 2,
        allowed=np.asarray(EACH.allowed)[::-1].copy(),
        bad_words=EACH.bad_words[::-1].copy(),
    )
    run("model", other, temperature=np.array([0.0, 1.0, 2.0, 0.3]))
    assert loop_in_place._cache_size() == compiled


@pytest.mark.parametrize(
    ("drafter", "mode"), [("model", "raw"), ("ngram", "processed"), (None, None)]
)
def test_logprobs_are_those_of_the_rows_that_decided(drafter, mode):
    """Plain decoding lists none. A model's tokens without a listing are those inside shard_map."""
    output = jax.tree.map(np.asarray, run(drafter))
    top = output.top_logprobs
    assert (top is None) == (mode is None)
    for b, text in enumerate(texts(output)):
        start = len(PROMPTS[b])
        for i in range(start, len(text)):
            raw, processed_row = row_after(b, text[start:i])
            p = processed.truncate(processed_row, 0.9, **thresholds(b))
            np.testing.assert_allclose(output.logprobs[b, i], np.log(p[text[i]]), atol=2e-5)
            if mode is not None:
                check_top(top, b, i, processed.truncate(raw, 1.0) if mode == "raw" else p, text[i])
        if mode is None:
            continue
        for outside in (slice(None, start), slice(len(text), None)):
            assert np.all(top.token_ids[b, outside] == -1)
            assert not np.any(top.rank[b, outside])


def check_top(top, b, i, p, token):
    order = np.argsort(-p, kind="stable")[:2]
    want = [v if p[v] else -1 for v in order]
    np.testing.assert_array_equal(top.token_ids[b, i], want)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(top.logprobs[b, i], np.log(p[order]), atol=2e-5)
    np.testing.assert_allclose(top.logprob[b, i], np.log(p[token]), atol=2e-5)
    assert int(top.rank[b, i]) == 1 + (p > p[token]).sum()


def test_streaming_gives_what_generate_gives():
    whole = run("model")
    ids, lengths = bigrams.prompts(PROMPTS)
    config = SpeculativeConfig(num_speculative_tokens=3)
    target, drafter = bigrams.model(TARGET), DRAFTERS["model"]
    state = specjax.init(
        target,
        drafter,
        (ids, lengths),
        keys=bigrams.keys(4),
        config=config,
        max_new_tokens=NEW,
        temperature=0.9,
        sampling=EACH,
        options=specjax.LoopOptions(num_logprobs=2),
    )
    while np.any(state.finish == 0):
        state, _ = specjax.step(target, drafter, state, config=config)
    assert texts(state) == texts(whole)
    jax.tree.map(np.testing.assert_array_equal, state.top_logprobs, whole.top_logprobs)
    for b, text in enumerate(texts(state)):
        new = text[len(PROMPTS[b]) :]
        np.testing.assert_array_equal(state.counts.generated[b], [new.count(v) for v in range(V)])


@functools.partial(jax.jit, static_argnames="method")
def propose_from_table(table, sampling, history, method):
    return specjax.propose(
        lambda carry, token_ids, positions: (table[token_ids], carry),
        (),
        jnp.array([3, 3, 1, 1]),
        specjax.DraftInputs(
            bigrams.keys(4),
            history.lengths,
            temperature=0.5,
            sampling=sampling,
            history=history,
        ),
        num_tokens=3,
        draft_sample_method=method,
    )[0]


@pytest.mark.parametrize(
    ("vocab_size", "method"),
    [*((size, "probabilistic") for size in (V - 2, V, V + 3)), (V + 3, "greedy")],
)
def test_a_draft_holds_the_distribution_it_was_sampled_from(vocab_size, method):
    """Each row comes after the tokens drafted before it, in a vocabulary of the draft."""
    rng = np.random.default_rng(7)
    table = rng.normal(size=(V + 3, vocab_size)).astype(np.float32)
    ids, lengths = bigrams.prompts(PROMPTS)
    history = specjax.History(ids, lengths, specjax.count_tokens(ids, lengths, V))
    draft = propose_from_table(table, EACH, history, method)
    draft, table = jax.tree.map(np.asarray, (draft, table))
    fed = np.concatenate([[[3], [3], [1], [1]], draft.token_ids[:, :2]], axis=1)
    for b in range(4):
        numbers = {name: NUMBERS[name][b] for name in list(NUMBERS)[3:]}
        known = min(V, vocab_size)
        bias, allowed = np.zeros(vocab_size), np.zeros(vocab_size, bool)
        bias[:known], allowed[:known] = BIAS[b, :known], ALLOWED[b, :known]
        rules = numbers | {"bias": bias, "allowed": allowed, "bad_words": WORDS[b]}
        for i in range(3):
            before = np.asarray(draft.token_ids)[b, :i].tolist()
            row = processed.process(table[fed[b, i]], PROMPTS[b], before, **rules)
            if method == "greedy":
                assert int(draft.token_ids[b, i]) == np.argmax(row)
                continue
            np.testing.assert_allclose(draft.logits[b, i], row, atol=1e-5)
            p = processed.truncate(row, 0.5, **thresholds(b))
            kept = (draft.logits[b, i] >= draft.cutoff[b, i]) & (draft.logits[b, i] > -jnp.inf)
            np.testing.assert_array_equal(kept, p > 0)
            want = np.log(p[int(draft.token_ids[b, i])])
            np.testing.assert_allclose(draft.logprobs[b, i], want, atol=1e-5)
    if method == "greedy":
        assert draft.logits is draft.cutoff is None


def unaware(drafter):
    """A drafter that ignores the sampling parameters that it is given."""

    def propose(params, state, token_ids, hidden, inputs, **options):
        inputs = inputs._replace(sampling=None, history=None)
        return drafter.propose(params, state, token_ids, hidden, inputs, **options)

    return specjax.Drafter(drafter.params, drafter.init, drafter.extend, propose)


UNAWARE = unaware(DRAFTERS["model"])


def only(*tokens):
    return SamplingParams(allowed=np.isin(np.arange(V), tokens)[None].repeat(4, 0))


def test_a_masked_token_is_never_emitted_though_it_is_drafted():
    output = run(UNAWARE, only(0, 2))
    new = [text[len(row) :] for text, row in zip(texts(output), PROMPTS, strict=True)]
    assert all(len(tokens) == NEW and set(tokens) <= {0, 2} for tokens in new)
    # Two of six tokens are allowed: most drafts are rejected, and some are accepted.
    assert 0 < float(output.metrics.draft_acceptance_rate) < 0.7
    masked = UNRESTRICTED._replace(allowed=processed.pack(only(0, 2).allowed))
    aware = run("model", masked).metrics
    assert float(aware.draft_acceptance_rate) > float(output.metrics.draft_acceptance_rate) + 0.1


def test_a_drafted_token_that_the_target_masks_is_rejected():
    def always_five(params, state, token_ids, hidden, inputs, **options):
        drafted = jnp.full((4, 3), 5, jnp.int32)
        return specjax.Draft(drafted, num_tokens=inputs.num_tokens), state

    drafter = specjax.whole_prompt_drafter((), lambda *prompts: (), always_five)
    output = run(drafter, only(0, 2, 3))
    assert not np.any(np.asarray(output.origins) == Origin.ACCEPTED)
    assert not np.any(np.asarray(output.metrics.num_accepted))
    np.testing.assert_array_equal(output.finish, Finish.LENGTH)


def test_a_row_masked_to_one_token_emits_it_and_to_none_ends_invalid():
    allowed = np.asarray(only(4).allowed)
    allowed[2] = False
    output = run(UNAWARE, SamplingParams(allowed=allowed))
    assert texts(output) == [row if b == 2 else row + [4] * NEW for b, row in enumerate(PROMPTS)]
    want = [Finish.INVALID if b == 2 else Finish.LENGTH for b in range(4)]
    np.testing.assert_array_equal(output.finish, want)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [None, "model"])
def test_an_invalid_parameter_ends_its_request_and_no_other(drafter):
    usual = texts(run(drafter))
    for name, value in (
        ("top_p", np.nan),
        ("min_p", np.nan),
        ("frequency_penalty", np.inf),
        ("repetition_penalty", -1.0),
    ):
        numbers = NUMBERS[name].copy()
        numbers[2] = value
        output = run(drafter, EACH._replace(**{name: numbers}))
        assert texts(output) == [PROMPTS[2] if b == 2 else usual[b] for b in range(4)], name
        want = [Finish.INVALID if b == 2 else Finish.LENGTH for b in range(4)]
        np.testing.assert_array_equal(output.finish, want)


@pytest.mark.slow
def test_a_model_drafting_for_itself_is_accepted_under_every_rule():
    """Penalties and bad words see the same tokens on both sides, in every row."""
    itself = specjax.model_drafter(bigrams.model(TARGET))
    assert float(run(itself, num_logprobs=2).metrics.draft_acceptance_rate) > 0.999


def test_generate_inside_shard_map_gives_the_same_tokens():
    ids, lengths = bigrams.prompts(PROMPTS)
    sampling = jax.tree.map(jnp.asarray, EACH._replace(top_k=NUMBERS["top_k"].astype(np.int32)))

    def call(ids, lengths, keys, sampling):
        output = specjax.generate(
            bigrams.model(TARGET),
            DRAFTERS["model"],
            (ids, lengths),
            keys=keys,
            config=SpeculativeConfig(num_speculative_tokens=3),
            max_new_tokens=NEW,
            temperature=0.9,
            sampling=sampling,
        )
        return output.token_ids

    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
    spec = PartitionSpec("x")
    mapped = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec))
    keys = bigrams.keys(4)
    found = mapped(ids, lengths, keys, sampling)
    np.testing.assert_array_equal(found, run("model", keys=keys).token_ids)


def test_without_parameters_nothing_is_carried():
    init = functools.partial(specjax.init, bigrams.model(TARGET), None, PROMPTS)
    state = jax.eval_shape(functools.partial(init, max_new_tokens=1), keys=bigrams.keys(4))
    assert state.counts is state.top_logprobs is state.settings.sampling is None
    assert state.settings.token_info is None


def greedy_text(b, **rules):
    """The text of request b whose every token is the likeliest under the rules."""
    text, start = list(PROMPTS[b]), len(PROMPTS[b])
    while len(text) < start + NEW:
        row = np.float32(TARGET[([0, *text])[-2], text[-1]])
        text.append(int(np.argmax(processed.process(row, text[:start], text[start:], **rules))))
    return text


def test_a_drafter_is_told_of_sampling_and_of_a_named_implementation():
    told = []

    def propose(params, state, token_ids, hidden, inputs, *, config, implementation):
        told.append((inputs.sampling, inputs.history, implementation))
        ids = jnp.zeros((len(token_ids), config.num_speculative_tokens), jnp.int32)
        return specjax.Draft(ids, num_tokens=inputs.num_tokens), ()

    drafter = specjax.whole_prompt_drafter((), lambda *prompts: (), propose)
    few = SamplingParams(**{name: NUMBERS[name] for name in ("top_k", "repetition_penalty")})
    assert jax.eval_shape(lambda: run(drafter, few)).finish.shape == (4,)
    sampling, history, _ = told[-1]
    assert sampling.top_k.shape == history.counts.prompt.shape[:1]
    plain = [greedy_text(b) for b in range(4)]
    for nothing in (None, SamplingParams()):
        assert texts(run(drafter, nothing, temperature=0)) == plain
        assert told[-1] == (None, None, None)
    jax.eval_shape(lambda: run(drafter, None, implementation="xla"))
    assert told[-1][-1].name == "xla"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sampling": {"top_k": 3}}, "specjax.SamplingParams"),
        ({"sampling": SamplingParams(top_k=np.ones(3, int))}, "sampling.top_k has shape"),
        ({"sampling": SamplingParams(top_k=2.5)}, "sampling.top_k has dtype"),
        ({"sampling": SamplingParams(bias=np.zeros(V + 1))}, "bias has shape"),
        ({"sampling": SamplingParams(allowed=np.ones((4, 3, V), bool))}, "sampling.allowed"),
        ({"num_logprobs": -1}, "num_logprobs is -1"),
        ({"num_logprobs": V + 1}, "num_logprobs is 7 for a vocabulary of 6"),
        ({"logprobs_mode": "all"}, "logprobs_mode is 'all'"),
    ],
)
def test_a_wrong_call_is_refused_in_a_sentence(change, words):
    with pytest.raises(ValueError, match=words):
        run(None, **({"sampling": None} | change))
