"""The engine: a request gets the tokens it would get alone, whatever else is decoded."""

import asyncio
import contextlib
import dataclasses
import functools
import queue
import signal
import threading

import automata
import bigrams
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import compilations
from scipy import stats

import specjax
from specjax import Engine, SamplingParams, SpeculativeConfig
from specjax.decode.memory import MemoryNeeds, devices_of
from specjax.decode.metrics import Metrics
from specjax.decode.token_info import TokenInfo
from specjax.engine import slots
from specjax.engine.engine import resolve_speculation
from specjax.engine.prefill_batch import PrefillBatch
from specjax.engine.programs import _choose_batch as choose_batch
from specjax.engine.programs import explain_slots_out_of_memory, warm_up
from specjax.engine.request import Request
from specjax.engine.slots import StepOutput
from specjax.engine.stop_strings import StoppedText
from specjax.engine.submission import Submission, check_request

V, S, K = 4, 48, 3
TARGET, DRAFT = bigrams.pair(V, seed=1)
# Parameters that were put on a device: what programs return lies there, too.
MODEL = bigrams.model(jax.device_put(jnp.asarray(TARGET, jnp.float32), jax.devices()[0]))
BY_MODEL = specjax.model_drafter(bigrams.model(DRAFT))
CONFIG = SpeculativeConfig(num_speculative_tokens=K)
KEYS = [jax.random.key(seed) for seed in range(16)]
GRAMMAR = specjax.Grammar(*automata.tables(V))
DEFAULTS = SamplingParams(
    top_k=0, top_p=1.0, repetition_penalty=1.0, grammar=GRAMMAR, grammar_state=-1
)


class Letters:
    """Token i is the letter i of the alphabet."""

    def decode(self, ids, skip_special_tokens):
        return "".join("abcd"[i] for i in ids)


SIZES = specjax.LoopOptions(max_length=S, prefill_chunk_size=4)


def make_engine(drafter=BY_MODEL, *, target=MODEL, config=CONFIG, options=SIZES, **values):
    return Engine(target, drafter, options=options, config=config, **{"num_slots": 3} | values)


def plain_engine(**options):
    """Without a drafter a step is a token."""
    return make_engine(None, num_slots=2, sampling=SamplingParams(bias=np.zeros(V)), **options)


def full_engine():
    options = dataclasses.replace(SIZES, num_logprobs=2)
    return make_engine(options=options, sampling=DEFAULTS, tokenizer=Letters())


def give_programs(engine, **programs):
    """Other programs for an engine that has done nothing."""
    scheduler = engine._scheduler
    scheduler._programs = scheduler._programs._replace(**programs)
    scheduler._batch = PrefillBatch(scheduler._programs)
    any_request = check_request(Submission([0, 0], KEYS[0]), engine._limits)
    scheduler._slots = warm_up(scheduler._programs, MODEL, any_request.settings, None)


@dataclasses.dataclass
class Asked:
    prompt: list
    values: dict

    def submit(self, engine):
        return engine.submit(self.prompt, **self.values)


def ask(index, **values):
    """A request of any length with any values, fixed by its index."""
    rng = np.random.default_rng(index)
    sampling = SamplingParams(
        top_k=int(rng.integers(0, V + 1)),
        top_p=float(rng.uniform(0.5, 1)),
        repetition_penalty=float(rng.uniform(0.8, 1.3)),
        grammar_state=index % 4 - 1,
    )
    prompt = rng.integers(0, V, rng.integers(1, 25)).tolist()
    most = int(rng.integers(1, 20))
    temperature = float(rng.choice([0.0, 0.7, 1.3]))
    return Asked(
        prompt,
        dict(
            key=KEYS[index],
            max_new_tokens=most,
            temperature=temperature,
            sampling=sampling,
            eos_token_ids=[V - 1] if index % 3 == 0 else [],
        )
        | values,
    )


def what_came(request):
    """All that a request got."""
    top = [tuple(map(np.ndarray.tolist, map(np.asarray, row))) for row in request.top_logprobs]
    return (
        request.token_ids,
        request.logprobs,
        request.origins,
        top,
        request.finish_reason,
        request.text,
        [count.tolist() for count in request.metrics],
    )


ASKED = [ask(index) for index in range(12)]


@functools.cache
def alone():
    """What each request gets when nothing else is decoded."""
    engine = full_engine()
    return [what_came(request.submit(engine).result()) for request in ASKED]


@pytest.mark.once
def test_a_request_gets_the_same_alone_and_in_a_full_engine():
    engine = full_engine()
    requests = [request.submit(engine) for request in ASKED]
    engine.run()
    assert list(map(what_came, requests)) == alone()
    # In another order they have other slots and other company.
    requests = [request.submit(engine) for request in ASKED[::-1]]
    engine.run()
    assert list(map(what_came, requests))[::-1] == alone()
    assert engine.num_running == engine.num_waiting == 0


def features_drafter():
    """Drafts by all that it was given of a request: a trace of another would change its drafts.

    A greedy request's drafts are right if it was given every committed token but the last.
    """
    best = jnp.argmax(jnp.asarray(TARGET), axis=-1).astype(jnp.int32)

    def init(params, batch_size, max_length):
        return jnp.full((max_length, batch_size), -1, jnp.int32)

    def extend(params, state, token_ids, positions, features):
        rows = jnp.arange(token_ids.shape[0], dtype=jnp.int32)[:, None]
        positions = jnp.where(positions < 0, S, positions)
        return state.at[positions, rows].set(jnp.sum(features, axis=-1), mode="drop")

    def propose(params, state, token_ids, hidden, inputs, *, config, implementation):
        positions = inputs.positions
        index = jnp.arange(S, dtype=jnp.int32)[:, None]
        is_read = index < positions[None] - 1
        total = jnp.sum(jnp.where(is_read, state * (index + 1), 0), axis=0)
        misses = jnp.any(is_read & (state < 0), axis=0).astype(jnp.int32)
        at = jnp.maximum(positions[:, None] - jnp.array([[2, 1]], jnp.int32), 0)
        before, last = jnp.take_along_axis(token_ids, at, axis=1).T
        before, tokens = jnp.where(positions > 1, before, 0), []
        for step in range(config.num_speculative_tokens):
            before, last = last, best[before, last]
            greedy = (last + misses) % V
            tokens.append(jnp.where(inputs.temperature == 0, greedy, (total + step) % V))
        return specjax.Draft(jnp.stack(tokens, axis=1), num_tokens=inputs.num_tokens), state

    return specjax.Drafter((), init, extend, propose, reads_features=True, taps=(0, 1))


@pytest.mark.once
def test_a_drafter_that_reads_features_and_chooses_k_is_told_of_one_request_at_a_time():
    # Two tokens are drafted, three at high rates.
    config = SpeculativeConfig("auto", step_costs=(1.0, 1.3, 1.45, 1.6))
    engine = make_engine(features_drafter(), config=config)
    values = [ASKED[i].values | {"sampling": None, "temperature": i % 2} for i in range(12)]

    def submit(i):
        return engine.submit(ASKED[i].prompt, **values[i])

    found = [what_came(submit(i).result()) for i in range(12)]
    requests = list(map(submit, range(12)))
    while engine.step():
        engine.preempt(requests[engine.num_steps % 12])
    assert list(map(what_came, requests)) == found
    # Of greedy requests every draft is accepted.
    drafted, accepted = np.sum([[row[-1][2], row[-1][3]] for row in found[::2]], axis=0)
    assert drafted.tolist() == accepted.tolist()
    assert drafted[0] > 5
    assert 0 < sum(row[-1][3][0] for row in found[1::2]) < sum(row[-1][2][0] for row in found[1::2])


def logging_model():
    """Its cache says of each position in how many columns the call was that fed it."""

    def init_cache(batch_size, max_length):
        return bigrams.init_cache(batch_size, max_length), jnp.zeros((batch_size, S), jnp.int32)

    def apply(params, token_ids, positions, cache):
        inner, columns = cache
        hidden, inner = bigrams.apply(params, token_ids, positions, inner)
        place = jnp.where(positions < 0, S, positions)
        rows = jnp.arange(place.shape[0], dtype=jnp.int32)[:, None]
        return hidden, (inner, columns.at[rows, place].set(place.shape[1], mode="drop"))

    return specjax.Model(MODEL.params, init_cache, apply, MODEL.logits)


COSTS = (1.0, 1.2, 1.25, 1.3, 1.35)


@pytest.mark.once
def test_a_step_has_the_rows_that_its_longest_draft_needs_and_compiles_nothing():
    """And a request gets the same from it alone and in company."""
    # Of the default costs three tokens are drafted, four at high rates.
    engine = make_engine(target=logging_model(), config=SpeculativeConfig("auto"))
    scheduler = engine._scheduler
    own_table = np.array(scheduler._slots.settings.k_by_rate)
    values = [request.values | {"sampling": None} for request in ASKED]

    def submit(i):
        return engine.submit(ASKED[i].prompt, **values[i])

    def set_table(table):
        settings = scheduler._slots.settings._replace(
            k_by_rate=jax.device_put(table, jax.devices()[0])
        )
        scheduler._slots = scheduler._slots._replace(settings=settings)

    with compilations() as found:
        for k, columns in ((0, 1), (1, 3), (2, 3), (3, 5), (4, 5)):
            set_table(np.full_like(own_table, k))
            request = engine.submit([1], key=KEYS[0], max_new_tokens=40).result()
            slot = np.argmax(np.asarray(scheduler._slots.lengths))
            logged = np.asarray(scheduler._slots.target_cache[1])[slot]
            # The prompt's last token is fed by a step without drafts, and so may the last one be.
            assert set(logged[1:36].tolist()) == {columns}
            assert (request.metrics.num_drafted[:k] > 0).all() or not k
        set_table(own_table)
        alone = [what_came(submit(i).result()) for i in range(12)]
        together = [submit(i) for i in range(12)]
        engine.run()
    assert found == []
    assert list(map(what_came, together)) == alone
    drafted = np.sum([row[-1][2] for row in alone], axis=0)
    assert np.all(drafted > 0)
    assert drafted[0] > drafted[-1]


@pytest.mark.once
@pytest.mark.parametrize("method", ["standard", "coupled"])
def test_k_by_load_changes_what_is_drafted_and_no_greedy_or_coupled_text(method):
    config = SpeculativeConfig("auto", rejection_sample_method=method, step_costs=COSTS)
    values = [request.values | {"sampling": None} for request in ASKED]
    if method == "standard":
        values = [value | {"temperature": 0} for value in values]

    def decode(together, drafter=BY_MODEL, **options):
        engine = make_engine(drafter, config=config, **options)
        requests = []
        for asked, value in zip(ASKED, values, strict=True):
            requests.append(engine.submit(asked.prompt, **value))
            if not together:
                engine.run()
        engine.run()
        return [r.token_ids for r in requests], [r.metrics.num_drafted.tolist() for r in requests]

    plain, _ = decode(True, None)
    in_company, drafted = decode(True, k_by_load=True)
    alone, drafted_alone = decode(False, k_by_load=True)
    assert in_company == alone == plain
    assert drafted != drafted_alone


@pytest.mark.once
@pytest.mark.parametrize(
    ("costs", "drafter", "k"), [((1.0, 1.9, 1.9), None, 4), ((1.0, 1.9, 1.2, 1.4), BY_MODEL, 2)]
)
def test_an_engine_whose_requests_all_draft_one_number_is_that_of_a_fixed_k(costs, drafter, k):
    engine = make_engine(config=SpeculativeConfig("auto", step_costs=costs))
    fixed = make_engine(drafter, config=SpeculativeConfig(k))
    assert engine.slot_bytes == fixed.slot_bytes
    for given in (engine, fixed):
        assert given._scheduler._slots.draft_history is None
    values = ASKED[3].values | {"sampling": None}
    found, wanted = (e.submit(ASKED[3].prompt, **values).result() for e in (engine, fixed))
    assert what_came(found) == what_came(wanted)


@pytest.mark.checks
@pytest.mark.once
def test_a_k_by_load_that_goes_up_and_down_follows_the_target():
    # Each next K depends on which drafts of the request and of the others were accepted.
    config = SpeculativeConfig("auto", rejection_sample_method="standard", step_costs=COSTS)
    engine = make_engine(config=config, k_by_load=True)
    num_requests, requests = 1200, []
    for index in range(num_requests):
        key = jax.random.fold_in(KEYS[0], index)
        requests.append(engine.submit([0, 1], key=key, max_new_tokens=4))
        if index % 7 in (0, 6):
            engine.run()
    engine.run()
    assert len({tuple(r.metrics.num_drafted.tolist()) for r in requests}) > 1
    wanted = bigrams.joint_probs(TARGET, [0, 1], 3).ravel()
    index = [np.ravel_multi_index(tuple(r.token_ids[:3]), (V,) * 3) for r in requests]
    found = np.bincount(index, minlength=V**3)
    assert stats.chisquare(found, num_requests * wanted).pvalue > 1e-3


def test_an_engine_of_one_usual_k_is_that_of_this_k():
    costs = SpeculativeConfig("auto", step_costs=(1.0, 1.6, 2.0, 2.3))
    # At 0.55 no draft pays, at 0.9 the longest does.
    for rate, k in [(None, None), (0.9, 3)]:
        config = dataclasses.replace(costs, usual_acceptance_rate=rate)
        drafter, chosen, table = resolve_speculation(BY_MODEL, config, 16, False)
        assert table is None
        assert (drafter and chosen.num_speculative_tokens) == k
    assert chosen == SpeculativeConfig(3)


@pytest.mark.parametrize("by_load", [False, True])
def test_an_engine_reads_the_step_costs_of_as_many_requests_as_it_has_slots(by_load):
    # Of 16 slots drafts are dear, of 2 cheap, of 9 in between.
    costs = specjax.StepCosts((2, 16), ((1.0, 1.1, 1.2), (1.0, 1.9, 1.96)))
    config, found = SpeculativeConfig("auto", step_costs=costs), []
    for num_slots in (1, 2, 9, 16, 99):
        drafter, chosen, table = resolve_speculation(BY_MODEL, config, num_slots, by_load)
        row = SpeculativeConfig("auto", step_costs=costs.interpolate(num_slots))
        wanted = resolve_speculation(BY_MODEL, row, num_slots, by_load)
        assert (drafter, chosen) == wanted[:2]
        np.testing.assert_array_equal(table, wanted[2])
        found.append((drafter is None, str(table)))
    assert len(set(found)) > 1


def test_k_by_load_needs_a_k_that_is_chosen():
    for drafter, config in ((BY_MODEL, CONFIG), (None, SpeculativeConfig("auto"))):
        with pytest.raises(ValueError, match=r"k_by_load is True, .* needs a drafter"):
            make_engine(drafter, config=config, k_by_load=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config": "auto"}, "config is str; it needs a specjax.SpeculativeConfig"),
        ({"drafter": MODEL}, "drafter is Model; it needs"),
        ({"target": None}, "target is NoneType; it needs"),
        ({"options": specjax.LoopOptions()}, "max_length is None; it needs a Python int >= 2"),
        ({"options": {"max_length": S}}, "options is dict; it needs specjax.LoopOptions"),
        ({"num_slots": 0}, "num_slots is 0; it needs a Python int >= 1"),
    ],
)
def test_an_engine_of_a_wrong_argument_is_refused(change, words):
    # None of these requests would ever draft.
    costs = SpeculativeConfig("auto", step_costs=(1.0, 2.0, 3.0))
    with pytest.raises(ValueError, match=words):
        make_engine(**({"config": costs} | change))


@pytest.mark.once
def test_a_request_gets_what_generate_gives():
    rows = [request.prompt for request in ASKED]
    values = [request.values for request in ASKED]
    sampling = SamplingParams(
        **{
            name: np.array([getattr(value["sampling"], name) for value in values])
            for name in ("top_k", "top_p", "repetition_penalty", "grammar_state")
        },
        grammar=GRAMMAR,
    )
    for eos in ((), (V - 1,)):
        output = specjax.generate(
            MODEL,
            BY_MODEL,
            rows,
            keys=jnp.stack(KEYS[: len(rows)]),
            config=CONFIG,
            options=specjax.LoopOptions(max_length=S),
            sampling=sampling,
            max_new_tokens=np.array([value["max_new_tokens"] for value in values]),
            temperature=np.array([value["temperature"] for value in values], np.float32),
            eos_token_ids=eos,
        )
        for b, row in enumerate(rows):
            if tuple(values[b]["eos_token_ids"]) == eos:
                end = int(output.lengths[b])
                assert output.token_ids[b, len(row) : end].tolist() == alone()[b][0]
                assert output.logprobs[b, len(row) : end].tolist() == alone()[b][1]
                assert output.origins[b, len(row) : end].tolist() == alone()[b][2]


def test_no_request_compiles_anything():
    engine = full_engine()
    with compilations() as found:
        requests = [request.submit(engine) for request in ASKED]
        requests += engine.submit_samples(3, [1, 2], key=KEYS[0], max_new_tokens=9, stop="ca")
        for _ in range(4):
            engine.step()
        assert engine.preempt(requests[0]) or requests[0].finish_reason
        engine.preempt(requests[1], drops_cache=True)
        engine.abort(requests[5])
        engine.run()
    assert found == []


def test_first_come_first_served_and_a_slot_is_empty_for_at_most_a_step():
    engine = plain_engine()
    greedy = {"key": KEYS[0], "temperature": 0}

    def check_ends(num_tokens, requests, num_empty):
        # A request of n tokens has its slot for n steps, and the host reads the last in one more.
        slots, ends = [0, 0], []
        for n in num_tokens:
            slot = slots.index(min(slots))
            ends.append(slots[slot] + n + 1)
            slots[slot] += n + num_empty
        first, at_end = engine.num_steps, {}
        while engine.step():
            for i, request in enumerate(requests):
                if request.finish_reason:
                    at_end.setdefault(i, engine.num_steps - first)
        last = engine.num_steps - first
        assert [len(request.token_ids) for request in requests] == list(num_tokens)
        assert [at_end.get(i, last) for i in range(len(requests))] == [min(x, last) for x in ends]

    # The host knows the step in which a request has all its tokens, and not where a stop token is.
    num_tokens = [3, 1, 5, 2, 2, 7, 1, 4]
    requests = [engine.submit([1], **greedy, max_new_tokens=n) for n in num_tokens]
    check_ends(num_tokens, requests, num_empty=0)
    text = requests[5].token_ids
    stops = [text[i] for i in (0, 2, 1, 1, 0, 2)]
    requests = [engine.submit([1], **greedy, eos_token_ids=token) for token in stops]
    check_ends([1 + text.index(token) for token in stops], requests, num_empty=1)


def test_a_long_prompt_is_read_between_the_steps_of_others():
    engine = plain_engine()
    short = engine.submit([1], key=KEYS[0], max_new_tokens=40)
    for _ in range(3):
        engine.step()

    def tokens_until_the_first_of(num_waiting):
        prompts = [[1, 2] * 10, [3]][:num_waiting]
        first, *_ = [engine.submit(x, key=KEYS[1], max_new_tokens=2) for x in prompts]
        num_tokens = []
        while not first.token_ids:
            engine.step()
            num_tokens.append(len(short.token_ids))
        while engine.num_waiting or engine.num_running > 1:
            engine.step()
        return num_tokens

    # Five chunks of four tokens, and a step and its reading; the other gains a token in each.
    alone, together = tokens_until_the_first_of(1), tokens_until_the_first_of(2)
    assert len(alone) == 6
    assert np.diff(alone).tolist() == [1] * 5
    # With two prompts waiting, two chunks at once.
    assert len(together) == 4


def test_the_next_prompt_is_read_before_a_slot_is_empty():
    engine = plain_engine()
    others = [engine.submit([1], key=KEYS[0], max_new_tokens=n) for n in (12, 12)]
    engine.step()
    waiting = [engine.submit([1, 2] * 13, key=KEYS[i], max_new_tokens=2) for i in range(3)]
    while engine.num_waiting == 3:
        engine.step()
    # Both that were read have slots at once; the third is read meanwhile.
    assert (engine.num_waiting, engine.occupancy) == (1, 1)
    engine.step()
    engine.step()
    assert [len(request.token_ids) for request in others] == [12, 12]
    assert [len(request.token_ids) for request in waiting] == [2, 2, 0]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "the prompt is empty"),
        (
            [1] * 47,
            "the prompt has 47 tokens and may get 2 new ones; the engine's max_length is 48",
        ),
        ([1, 4], "the prompt has token 4; the target's vocabulary has 4 tokens"),
        ([-1], "the prompt has token -1"),
    ],
)
def test_a_prompt_that_cannot_be_read_ends_its_request_alone(prompt, words):
    engine = full_engine()
    other = ASKED[1].submit(engine)
    request = engine.submit(prompt, key=KEYS[0], max_new_tokens=2)
    assert request.finish_reason == "refused"
    assert words in request.error
    assert list(request) == request.token_ids == []
    assert what_came(other.result()) == alone()[1]


def test_nan_in_the_logits_of_one_request_ends_it_alone():
    def decode(target, *first):
        engine = plain_engine(target=bigrams.model(target))
        requests = [engine.submit([t], key=KEYS[2], max_new_tokens=9) for t in first]
        engine.run()
        return [(request.token_ids, request.finish_reason) for request in requests]

    good, bad = TARGET.copy(), TARGET.copy()
    for table in (good, bad):
        table[..., 3] = -np.inf
        table[..., 3, :] = 0
    bad[:, 3] = np.nan
    assert decode(bad, 3, 1) == [([], "invalid_logits"), *decode(good, 1)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"key": 3}, "key has int"),
        ({"key": bigrams.keys(2)}, "key has shape"),
        ({"key": bigrams.keys(1)}, "key has shape"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"eos_token_ids": range(17)}, "eos_token_ids has 17 ids; it takes at most 16"),
        ({"stop": ""}, "not empty"),
        ({"stop": "b"}, "no tokenizer"),
        ({"stop": ["ab"] * 8193}, "stop has 16386 characters in 8193 strings"),
        ({"key": None}, "neither key nor seed is given"),
        ({"sampling": SamplingParams(min_p=0.1)}, "sampling=SamplingParams\\(min_p=...\\)"),
        ({"sampling": SamplingParams(grammar=GRAMMAR)}, "sampling.grammar is given"),
        ({"sampling": SamplingParams(grammar_state=0)}, "grammar_state is given without"),
        ({"sampling": SamplingParams(bias=np.zeros(2))}, r"made with float32\[4\]"),
        ({"prompt": [[1]]}, "one prompt"),
        ({"prompt": [0.5]}, "needs integers"),
    ],
)
def test_a_wrong_argument_is_refused(change, words):
    engine = plain_engine()
    with pytest.raises(ValueError, match=words):
        engine.submit(**({"prompt": [1], "key": KEYS[0]} | change))
    assert engine.num_waiting == 0


def test_samples_name_an_option_that_is_wrong():
    engine = plain_engine()
    with pytest.raises(TypeError, match=r"^Engine.submit_samples\(\) got an .* argument 'stops'$"):
        engine.submit_samples(2, [1], key=KEYS[0], stops="a")
    with pytest.raises(ValueError, match="neither key nor seed is given"):
        engine.submit_samples(2, [1])
    with pytest.raises(ValueError, match="num_samples is None; it needs"):
        engine.submit_samples(None, [1], seed=1)


def test_the_queue_is_bounded():
    engine = plain_engine(max_waiting=3)
    requests = engine.submit_samples(3, [1], key=KEYS[0], max_new_tokens=2)
    with pytest.raises(queue.Full, match="3 requests wait, and 1 more"):
        engine.submit([1], key=KEYS[0])
    engine.step()
    engine.submit([1], key=KEYS[0], max_new_tokens=1)
    engine.run()
    assert [len(request.token_ids) for request in requests] == [2] * 3
    # Those that were aborted wait no more, wherever they stand.
    requests = [engine.submit([1], key=KEYS[0], max_new_tokens=2) for _ in range(3)]
    engine.abort(requests[1])
    assert engine.num_waiting == 2
    last = engine.submit([1], key=KEYS[0], max_new_tokens=2)
    engine.run()
    assert [len(request.token_ids) for request in (*requests, last)] == [2, 0, 2, 2]


def run_meanwhile(function):
    """Runs a function in another thread, which goes on if it has to wait for this one."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(0.1)
    return thread


def test_the_queue_is_bounded_for_several_threads(monkeypatch):
    engine = plain_engine(max_waiting=1)
    waiting, found, threads, calls = engine._scheduler.queue, [], [], []
    check_room = waiting.check_room

    def submit():
        try:
            found.append(engine.submit([1], key=KEYS[0], max_new_tokens=1))
        except queue.Full:
            found.append(None)

    def check_slowly(count):
        check_room(count)
        # A submission looks for room before it makes its requests, and when it puts them in.
        calls.append(None)
        if len(calls) == 2:
            threads.append(run_meanwhile(submit))

    monkeypatch.setattr(waiting, "check_room", check_slowly)
    submit()
    threads[0].join()
    assert sorted(request is None for request in found) == [False, True]
    engine.run()


def test_threads_that_run_an_engine_take_turns():
    engine, found = full_engine(), [None] * 12
    requests = [request.submit(engine) for request in ASKED]

    def run(first):
        for index in range(first, 12, 3):
            found[index] = what_came(requests[index].result())
            engine.preempt(requests[(index + 5) % 12])

    threads = [threading.Thread(target=run, args=(first,)) for first in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone()


@pytest.mark.parametrize("is_added_first", [True, False])
def test_a_text_ends_once_if_another_thread_aborts_it_meanwhile(is_added_first):
    meanwhile, threads = [], []

    class Slow(Letters):
        def decode(self, ids, skip_special_tokens):
            if meanwhile and (len(ids) > 1 or not is_added_first):
                threads.append(run_meanwhile(meanwhile.pop()))
            return super().decode(ids, skip_special_tokens)

    request = Request([0], 9, StoppedText(Slow(), [0], ("da",)), None)
    ones, metrics = np.ones((1, 2), np.int8), Metrics(*np.zeros((len(Metrics._fields), 1)))
    output = StepOutput(np.array([[1, 3]]), [2], ones, ones, [0], metrics, TokenInfo(), None)
    calls = [lambda: request.end("aborted"), lambda: request.add(output, 0)]
    if not is_added_first:
        calls.reverse()
        request.add(output, 0)
    # The second call of them begins while the first decodes a token.
    meanwhile.append(calls[0])
    calls[1]()
    threads[0].join()
    assert (request.finish_reason, request.token_ids, request.text) == ("aborted", [1, 3], "bd")


def test_nothing_is_kept_of_prompts_that_were_aborted():
    engine = plain_engine()
    first = [engine.submit([1], key=KEYS[0], max_new_tokens=40) for _ in range(2)]
    engine.step()
    waiting = engine.submit([1, 2] * 6, key=KEYS[1], max_new_tokens=2)
    for _ in range(3):
        aborted = engine.submit([1, 2] * 6, key=KEYS[2])
        for _ in range(4):
            engine.step()
        engine.abort(aborted)
    engine.step()
    assert engine._scheduler.queue.num_entries() == engine.num_waiting == 1
    engine.run()
    assert [len(request.token_ids) for request in (*first, waiting)] == [40, 40, 2]


def test_a_tokenizer_that_raises_ends_one_request_and_no_other():
    class Partial(Letters):
        is_ended = False

        def decode(self, ids, skip_special_tokens):
            if 3 in ids or self.is_ended:
                raise KeyError(3)
            return super().decode(ids, skip_special_tokens)

    engine = plain_engine(tokenizer=(tokenizer := Partial()))
    only = np.zeros(V, np.float32)
    only[3] = -np.inf
    values = {"max_new_tokens": 20, "sampling": SamplingParams(bias=only)}
    expected = engine.submit([1], key=KEYS[1], **values).result().token_ids
    first = engine.submit([1], key=KEYS[0], max_new_tokens=20)
    second = engine.submit([1], key=KEYS[1], **values)
    engine.run()
    assert (first.finish_reason, first.error) == (
        "tokenizer_error",
        "its tokenizer raised KeyError: 3",
    )
    assert first.token_ids.index(3) == len(first.token_ids) - 1
    assert (second.token_ids, second.finish_reason) == (expected, "length")
    # Also by the rest of a text, which is decoded at its end.
    last = Request([1], 9, StoppedText(tokenizer, [1], ()), None)
    tokenizer.is_ended = True
    last.end("aborted")
    assert (last.finish_reason, last.error) == ("tokenizer_error", first.error)
    # And by the prompt, before it waits.
    request = engine.submit([1], key=KEYS[0])
    assert (request.finish_reason, request.token_ids) == ("tokenizer_error", [])
    assert engine._scheduler.queue.num_entries() == 0


def test_a_request_that_ended_keeps_nothing_of_other_slots():
    request = ASKED[1].submit(full_engine()).result()
    assert what_came(request) == alone()[1]
    for kept in (*request.metrics, *(values for top in request.top_logprobs for values in top)):
        whole = kept
        while isinstance(getattr(whole, "base", None), np.ndarray):
            whole = whole.base
        assert whole.size == kept.size


def test_a_drafter_of_whole_prompts_is_told_of_the_prompt_alone():
    def init(params, token_ids, lengths, max_length):
        index = jnp.arange(max_length, dtype=jnp.int32)[None]
        # From the last place on: the state of a short row is no beginning of a longer one's.
        return jnp.flip(jnp.where(index < lengths[:, None], token_ids, -1), axis=1)

    def propose(params, state, token_ids, hidden, inputs, **options):
        drafted = (state[:, -512] + jnp.sum(state >= 0, axis=1)) % V
        return specjax.Draft(
            jnp.tile(drafted[:, None], (1, K)), num_tokens=inputs.num_tokens
        ), state

    drafter = specjax.whole_prompt_drafter((), init, propose)
    prompt = np.random.default_rng(0).integers(1, V, (1, 513))
    options = specjax.LoopOptions(max_length=1026, prefill_chunk_size=300)
    engine = make_engine(drafter, num_slots=1, options=options)
    request = engine.submit(prompt[0], key=KEYS[3], max_new_tokens=12).result()
    output = specjax.generate(
        MODEL,
        drafter,
        [prompt[0]],
        keys=KEYS[3][None],
        max_new_tokens=12,
        config=CONFIG,
        options=options,
    )
    assert request.token_ids == output.token_ids[0, 513:525].tolist()
    state = np.flip(engine._scheduler._slots.drafter_state.state, axis=1)
    # The last token is no part of what was read before the first step.
    assert state[0, :512].tolist() == prompt[0, :512].tolist()
    assert (state[0, 512:] == -1).all()


def test_too_many_slots_are_refused_with_the_bytes_of_one():
    def init_cache(batch_size, max_length):
        return jnp.zeros((batch_size, max_length, 2**20, 2**20), jnp.int8)

    def apply(params, token_ids, positions, cache):
        return jnp.stack([token_ids, token_ids], axis=-1), cache

    huge = specjax.Model(MODEL.params, init_cache, apply, MODEL.logits)
    words = (
        r"no room for 3 slots: each takes 49152.00 GiB \(52776558\d+ bytes\) at max_length 48, and "
    )
    words += r"prompts that are read 2\.5 more; .* 270336.00 GiB \(\d+ bytes\) together"
    with pytest.raises(MemoryError, match=words):
        make_engine(None, target=huge)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_slots_have_the_room_of_all_devices_that_the_target_is_on(num_devices):
    devices = jax.devices()[:num_devices]
    mesh = jax.sharding.Mesh(np.array(devices), "model")
    split = jax.NamedSharding(mesh, jax.P("model"))
    params = [np.zeros(2), jax.device_put(np.zeros(2, np.float32), split)]
    assert devices_of(dataclasses.replace(MODEL, params=params)) == set(devices)
    assert devices_of(dataclasses.replace(MODEL, params=params[:1])) == {jax.devices()[0]}

    class Device:
        process_index = 0

        def __init__(self, num_free):
            self._facts = {"bytes_limit": 50 + num_free, "bytes_in_use": 50}

        def memory_stats(self):
            return self._facts

    # Three slots of 20 bytes, rows of two and a half, and a chunk of 10.
    programs = make_engine(None)._scheduler._programs._replace(needs=MemoryNeeds(20, 4, 10))
    with explain_slots_out_of_memory([Device(120 // num_devices)] * num_devices, programs):
        pass
    words = r"no room for 3 slots: .* a step takes 4 bytes .*, and 119 bytes are free"
    with (
        pytest.raises(MemoryError, match=words),
        explain_slots_out_of_memory([Device(119), *[Device(0)] * (num_devices - 1)], programs),
    ):
        pass


def test_a_cache_that_requests_share_is_refused():
    def init_cache(batch_size, max_length):
        return jnp.zeros((max_length,), jnp.int32)

    shared = specjax.Model(MODEL.params, init_cache, MODEL.apply, MODEL.logits)
    with pytest.raises(ValueError, match="the target's cache has a leaf of shape"):
        make_engine(None, target=shared)


# Cancelled, stopped, preempted, shared ------------------------------------------------------------


def test_an_aborted_request_leaves_its_slot_to_the_next():
    engine = full_engine()
    requests = [request.submit(engine) for request in ASKED]
    engine.abort(requests[7])
    for _ in range(3):
        engine.step()
    running = next(i for i in (2, 1, 0) if requests[i].finish_reason is None)
    engine.abort(requests[running])
    engine.run()
    for i, request in enumerate(requests):
        if i in (7, running):
            assert request.finish_reason == "aborted"
            assert request.token_ids == alone()[i][0][: len(request.token_ids)]
        else:
            assert what_came(request) == alone()[i]


@pytest.mark.parametrize("drops_cache", [False, True])
def test_a_preempted_request_gets_the_same_tokens(drops_cache):
    engine = full_engine()
    requests = [request.submit(engine) for request in ASKED]
    num_preempted = num_rounds = 0
    while engine.step():
        num_rounds += 1
        if num_rounds % 2 == 0:
            num_preempted += any(engine.preempt(r, drops_cache=drops_cache) for r in requests)
            # Each counts once, also the one with an unread step.
            going = sum(request.finish_reason is None for request in requests)
            assert engine.num_running + engine.num_waiting == going
    assert num_preempted > 6
    assert list(map(what_came, requests)) == alone()


def test_a_preempted_request_goes_on_before_those_that_wait():
    engine = plain_engine()
    requests = [engine.submit([1], key=KEYS[i], max_new_tokens=20) for i in range(4)]
    for _ in range(4):
        engine.step()
    assert engine.preempt(requests[0])
    for _ in range(4):
        engine.step()
    assert [len(request.token_ids) for request in requests] == [7, 7, 0, 0]


def test_a_preempted_request_that_ends_by_a_step_in_flight_leaves_nothing_on_the_device():
    engine = full_engine()
    key = jax.block_until_ready(KEYS[0])
    engine.submit([1] * 30, key=key, max_new_tokens=1).result()
    before = len(jax.live_arrays())
    request = engine.submit([1] * 30, key=key, max_new_tokens=1)
    # Its only step is not read yet, and the text is too long to be read again before.
    while not engine.preempt(request, drops_cache=True):
        engine.step()
    assert not request.token_ids
    engine.run()
    assert request.finish_reason == "length"
    assert len(jax.live_arrays()) == before


def test_samples_of_a_prompt_are_those_of_its_keys_and_read_it_once(monkeypatch):
    engine = full_engine()
    num_chunks = []
    run_chunk = engine._scheduler._programs.prefill_chunk

    def count(*operands):
        num_chunks.append(1)
        return run_chunk(*operands)

    programs = engine._scheduler._programs._replace(prefill_chunk=count)
    monkeypatch.setattr(engine._scheduler, "_programs", programs)
    prompt, values = [1, 2, 3, 0, 1, 2, 1, 3, 0, 2], {"max_new_tokens": 12}
    samples = engine.submit_samples(5, prompt, key=KEYS[3], **values)
    engine.run()
    assert len(num_chunks) == 3
    for i, sample in enumerate(samples):
        same = engine.submit(prompt, key=jax.random.fold_in(KEYS[3], i), **values).result()
        assert what_came(same) == what_came(sample)
    assert len({tuple(sample.token_ids) for sample in samples}) > 1


@pytest.fixture
def read_together(monkeypatch):
    """Prompts are read together from few tokens on; gives a list of the chunks that were read."""
    monkeypatch.setattr("specjax.engine.programs._MIN_CHUNK", 1)
    shapes, read = [], slots.prefill_chunk

    def note(models, row, token_ids, positions):
        shapes.append(token_ids.shape)
        return read(models, row, token_ids, positions)

    monkeypatch.setattr(slots, "prefill_chunk", note)
    return shapes


@pytest.mark.once
def test_prompts_that_are_read_together_give_what_each_gives_alone(read_together):
    drafter, prompts = features_drafter(), [request.prompt for request in ASKED] * 2
    # The longest is read alone until the others come.
    longest = max(map(len, prompts))
    prompts.sort(key=lambda prompt: len(prompt) < longest)
    values = [ASKED[i % 12].values | {"sampling": None, "temperature": i % 2} for i in range(24)]
    engine = make_engine(drafter, num_slots=12)
    read_together.clear()
    with compilations() as found:
        expected = [
            what_came(engine.submit(prompt, **given).result())
            for prompt, given in zip(prompts, values, strict=True)
        ]
        assert set(read_together) == {(1, 4)}
        num_alone = len(read_together)
        read_together.clear()
        requests = []
        for prompt, given in zip(prompts, values, strict=True):
            requests.append(engine.submit(prompt, **given))
            if len(requests) == 1:
                engine.step()
        while engine.step():
            if engine.num_steps % 3 == 0:
                engine.preempt(requests[engine.num_steps % 24], drops_cache=True)
    assert found == []
    assert list(map(what_came, requests)) == expected
    # Three prompts at once, three tokens of each; the rest alone.
    assert read_together.count((3, 3)) > 10
    assert 0 < read_together.count((1, 4)) < num_alone // 2


def test_an_aborted_prompt_leaves_its_place_in_a_batch(read_together):
    engine = make_engine(None, num_slots=8, options=dataclasses.replace(SIZES, max_length=400))
    values = {"max_new_tokens": 2, "temperature": 0}
    expected = engine.submit([1, 2] * 90, key=KEYS[0], **values).result().token_ids
    busy = [engine.submit([1], key=KEYS[1], max_new_tokens=390) for _ in range(8)]
    while engine.num_running < 8:
        engine.step()
    requests = [engine.submit([1, 2] * 90, key=KEYS[0], **values) for _ in range(3)]
    read_together.clear()
    engine.step()
    assert read_together == [(2, 4)]
    engine.abort(requests[0])
    engine.step()
    assert all(entry.waiting for entry in engine._scheduler._batch._entries.values())
    engine.abort(requests[1])
    engine.abort(busy[0])
    engine.run()
    assert requests[2].token_ids == expected
    # Two prompts of 179 tokens, the first 4 and 8 of which were read with others.
    assert read_together.count((2, 4)) == 2


@pytest.mark.parametrize(
    ("num_slots", "chunk_size", "dtype", "expected"),
    [
        (7, 128, np.float32, None),
        (8, 128, np.float32, (2, 128)),
        (16, 64, np.float32, (4, 32)),
        (16, 63, np.float32, None),
        (99, 128, np.float32, (16, 32)),
        (99, 128, jnp.bfloat16, None),
    ],
)
def test_prompts_are_read_together_where_that_changes_no_bit(
    num_slots, chunk_size, dtype, expected
):
    def new_caches(max_length, size=1):
        return jnp.zeros((size, max_length), dtype)

    batch = choose_batch(new_caches, num_slots, 300, chunk_size)
    assert batch == (expected and (*expected, 0))


def test_a_short_prompt_that_is_read_first_waits_for_one_before_it(read_together):
    engine = make_engine(None, num_slots=8)
    for most in (*[40] * 7, 9):
        engine.submit([1], key=KEYS[0], max_new_tokens=most)
    engine.step()
    read_together.clear()
    late = [engine.submit([1] * size, key=KEYS[1], max_new_tokens=5) for size in (30, 3, 3)]
    began = []
    while engine.step():
        began += [request for request in late if request.token_ids and request not in began]
    assert (2, 4) in read_together
    assert began == late
    alone = [engine.submit([1] * size, key=KEYS[1], max_new_tokens=5) for size in (30, 3, 3)]
    engine.run()
    assert [request.token_ids for request in late] == [request.token_ids for request in alone]
    # Where slots are empty, the first is not kept waiting for others to be read.
    late = [engine.submit([1] * 42, key=KEYS[1], max_new_tokens=2) for _ in range(5)]
    num_rounds = 0
    while not late[0].token_ids:
        num_rounds += 1
        engine.step()
    # Eleven chunks, at most five a round, then a step that is read in the next round.
    assert num_rounds == 4
    engine.run()
    # One of a single token is read at once.
    for size in (1, 30, 30):
        engine.submit([1] * size, key=KEYS[1], max_new_tokens=9)
    engine.step()
    assert engine.num_running == 1


def test_prompts_are_read_into_caches_that_grow_and_give_the_same_without_compiling():
    engine = full_engine()
    give_programs(engine, cache_lengths=(4, 7, S))
    with compilations() as found:
        requests = [request.submit(engine) for request in ASKED]
        samples = engine.submit_samples(2, [1, 2, 3] * 3, key=KEYS[0], max_new_tokens=3)
        engine.run()
    assert found == []
    assert list(map(what_came, requests)) == alone()
    prompts = {len(request.prompt) for request in ASKED}
    # Two chunks of four need a row of eight: the first row grows past the second.
    assert min(prompts) < 4 < 8 < max(prompts)
    assert prompts & {6, 7, 8}
    for i, sample in enumerate(samples):
        key = jax.random.fold_in(KEYS[0], i)
        same = full_engine().submit([1, 2, 3] * 3, key=key, max_new_tokens=3).result()
        assert what_came(same) == what_came(sample)


def test_a_stop_string_ends_a_request_within_a_step_and_across_tokens():
    engine = full_engine()
    requests, expected = [], []
    for i, (*_, text, _) in enumerate(alone()):
        stop = text[len(text) // 2 :][:2]
        if len(stop) < 2:
            continue
        requests.append(ask(i, stop=[stop, "no such"]).submit(engine))
        expected.append((text[: text.index(stop)], text.index(stop) + 2))
    engine.run()
    assert len(requests) > 5
    for request, (text, num_tokens) in zip(requests, expected, strict=True):
        assert request.finish_reason == "stop_string"
        assert (request.text, len(request.token_ids)) == (text, num_tokens)
    # The device does not know that the last one has ended, and no step is left to take.
    request = ask(i, stop=stop).submit(engine)
    while engine.step():
        assert request.finish_reason is None
    assert (request.text, engine.num_running) == (text, 0)


def test_pieces_add_up_and_coroutines_share_the_steps():
    engine = full_engine()
    order, requests = [], []

    async def read(index):
        request = ASKED[index].submit(engine)
        requests.append(request)
        pieces = []
        async for piece in request:
            pieces.append(piece)
            order.append(index)
        assert [token for piece in pieces for token in piece.token_ids] == alone()[index][0]
        assert "".join(piece.text for piece in pieces) == alone()[index][5]
        assert what_came(request) == alone()[index]

    async def count():
        going = len(requests)
        while going:
            # Also while the step with a request's last token is read.
            assert engine.num_running + engine.num_waiting == going
            await asyncio.sleep(0)
            going = sum(request.finish_reason is None for request in requests)

    async def read_all():
        await asyncio.gather(*map(read, range(6)), count())

    asyncio.run(read_all())
    assert order != sorted(order)


class Turns:
    """A matcher that allows a token or two, by how many were read and which was the last."""

    def __init__(self):
        self.tokens = []

    def compute_bitmask(self):
        first = (len(self.tokens) + sum(self.tokens[-1:])) % V
        return np.uint32(1 << first | 1 << (2 * first + 1) % V).tobytes()

    def try_consume_tokens(self, tokens):
        is_allowed = np.frombuffer(self.compute_bitmask(), np.uint32)[0] >> tokens[0] & 1
        self.tokens += tokens if is_allowed else []
        return int(is_allowed)

    def rollback(self, num_tokens):
        del self.tokens[len(self.tokens) - num_tokens :]
        return True


@pytest.mark.parametrize("is_preempted", [False, True])
def test_an_interrupted_step_is_read_before_the_next_masks(monkeypatch, is_preempted):
    engine = plain_engine(takes_matchers=True)

    def submit():
        return engine.submit([1], key=KEYS[0], max_new_tokens=20, matcher=Turns())

    def interrupt(tree):
        raise KeyboardInterrupt

    first = submit()
    engine.step()
    assert len(first.token_ids) == 1
    expected, request, num_interrupts = first.result().token_ids, submit(), 0
    while request.finish_reason is None:
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(jax, "device_get", interrupt)
            engine.step()
        num_interrupts += len(engine._scheduler._in_flight)
        if is_preempted:
            engine.preempt(request)
        engine.step()
    assert (request.token_ids, request.error) == (expected, None)
    assert num_interrupts > 3


def test_an_interrupt_waits_until_slots_and_requests_are_whole(monkeypatch):
    engine, expected = full_engine(), alone()
    step = engine._scheduler._programs.step

    def interrupted(function):
        def run(*operands):
            signal.raise_signal(signal.SIGINT)
            return function(*operands)

        return run

    programs = engine._scheduler._programs._replace(step=interrupted(step))
    monkeypatch.setattr(engine._scheduler, "_programs", programs)
    monkeypatch.setattr(Request, "add", interrupted(Request.add))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    requests, num_interrupts = [request.submit(engine) for request in ASKED], 0
    try:
        while num_interrupts < 300 and any(x.finish_reason is None for x in requests):
            try:
                engine.run()
            except KeyboardInterrupt:
                num_interrupts += 1
    finally:
        signal.signal(signal.SIGINT, before)
    assert list(map(what_came, requests)) == expected
    assert num_interrupts > 10


def test_a_step_is_refused_while_coroutines_wait_for_one():
    engine = plain_engine()
    request = engine.submit([1], key=KEYS[0], max_new_tokens=9)

    async def read_all():
        reading = asyncio.ensure_future(anext(aiter(request)))
        while not engine._scheduler._is_step_shared():
            await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="Coroutines wait for a step"):
            engine.step()
        await reading

    asyncio.run(read_all())
    assert len(request.result().token_ids) == 9
