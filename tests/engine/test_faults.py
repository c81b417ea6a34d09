"""Faults of an engine: what is raised in it, what it lost, and what is kept when it is over."""

import asyncio
import gc
import queue
import signal
import sys
import threading
import weakref

import bigrams
import jax
import numpy as np
import pytest

import specjax
from benchmarks.cpu import soak
from specjax.engine import scheduler
from specjax.engine.request import Request
from specjax.engine.scheduler import delayed_interrupts

V = 4
MODEL = bigrams.model(bigrams.pair(V, seed=1)[0])
KEYS = [jax.random.key(seed) for seed in range(4)]
CLOSED = "the engine is closed; make another one"
LOST = "the engine lost what the device held for its requests, when it raised "


def make_engine(**options):
    sizes = specjax.LoopOptions(max_length=32, prefill_chunk_size=4)
    return specjax.Engine(MODEL, None, num_slots=3, options=sizes, **options)


def submit(engine, index=0, **values):
    return engine.submit([1, 2, index], key=KEYS[index], **{"max_new_tokens": 9} | values)


class Mute(Exception):
    """An error that does not even say what it is."""

    def __str__(self):
        raise ValueError


class Raises:
    """A tokenizer that raises an error when it decodes token 3."""

    def __init__(self, error):
        self.error = error

    def decode(self, ids, skip_special_tokens):
        if 3 in ids:
            raise self.error
        return "x" * len(ids)


class Calls:
    """A tokenizer that calls `call`, once it is set, when it next decodes."""

    call = None

    def decode(self, ids, skip_special_tokens):
        call, self.call = self.call, None
        if call is not None:
            call()
        return "x" * len(ids)


@pytest.fixture
def handled():
    """Sets handlers of signals until the test ends."""
    before = {}

    def handle(number, handler):
        before.setdefault(number, signal.signal(number, handler))

    yield handle
    for number, handler in before.items():
        signal.signal(number, handler)


def three_requests(error):
    """An engine, a request whose tokenizer raises, two around it that it spares, and their text."""
    bias = np.zeros(V, np.float32)
    engine = make_engine(sampling=specjax.SamplingParams(bias=bias), tokenizer=Raises(error))
    never, always = bias.copy(), bias.copy()
    never[3], always[3] = -np.inf, 100
    values = {"sampling": specjax.SamplingParams(bias=never)}
    alone = submit(engine, **values).result().token_ids
    before = submit(engine, **values)
    wrong = submit(engine, sampling=specjax.SamplingParams(bias=always))
    return engine, wrong, [before, submit(engine, **values)], alone


def check_alone(wrong, others, alone):
    assert (wrong.finish_reason, wrong.token_ids) == ("tokenizer_error", [3])
    assert [request.finish_reason for request in others] == ["length"] * 2
    assert [request.token_ids for request in others] == [alone] * 2


@pytest.mark.parametrize(
    ("error", "said"), [(soak.Panic("out of bounds"), "Panic: out of bounds"), (Mute(), "Mute")]
)
def test_whatever_a_tokenizer_raises_ends_its_request_alone(error, said):
    engine, wrong, *others = three_requests(error)
    engine.run()
    check_alone(wrong, *others)
    assert wrong.error == f"its tokenizer raised {said}"


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError]
)
def test_what_stops_a_program_leaves_a_step_and_takes_nothing_from_other_slots(error):
    engine, wrong, *others = three_requests(error())
    with pytest.raises(error):
        engine.run()
    engine.run()
    check_alone(wrong, *others)


@pytest.mark.parametrize("method", ["compute_bitmask", "try_consume_tokens"])
def test_a_matcher_that_panics_ends_its_request_alone(method):
    def panic(*operands):
        raise soak.Panic(method)

    engine = make_engine(takes_matchers=True)
    matchers = [soak.Turns(soak.Faults(0), V) for _ in range(4)]
    expected = [submit(engine, i, matcher=matchers[i]).result().token_ids for i in range(2)]
    requests = [submit(engine, i, matcher=matchers[i + 2]) for i in range(2)]
    engine.step()
    setattr(matchers[2], method, panic)
    engine.run()
    assert (requests[0].finish_reason, requests[0].error) == (
        "matcher_error",
        f"its matcher raised Panic: {method}",
    )
    assert requests[0].token_ids == expected[0][: len(requests[0].token_ids)]
    assert (requests[1].finish_reason, requests[1].token_ids) == ("length", expected[1])


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_step_that_could_not_be_read_is_read_again_unless_it_is_lost(monkeypatch, is_lost):
    engine = make_engine()
    expected = submit(engine).result().token_ids
    request, get = submit(engine), jax.device_get

    def fail(output):
        monkeypatch.setattr(jax, "device_get", get)
        if is_lost:
            output.token_ids.delete()
        raise jax.errors.JaxRuntimeError("INTERNAL: no answer")

    engine.step()
    monkeypatch.setattr(jax, "device_get", fail)
    with pytest.raises(RuntimeError, match=LOST if is_lost else "^INTERNAL: no answer"):
        engine.run()
    request.result()
    assert request.finish_reason == ("engine_error" if is_lost else "length")
    assert request.token_ids == ([] if is_lost else expected)
    if is_lost:
        assert request.error == f"{LOST}JaxRuntimeError: INTERNAL: no answer; make another one."


def test_a_closed_engine_says_so_and_its_requests_have_ended():
    with make_engine() as engine:
        requests = [submit(engine, i, max_new_tokens=29) for i in range(4)]
        ended = submit(engine, max_new_tokens=1)
        engine.abort(ended)
        for _ in range(4):
            engine.step()
    assert [request.finish_reason for request in requests] == ["aborted"] * 4
    assert len(requests[0].result().token_ids) == len(list(requests[0])) + 2 == 3
    assert (engine.num_waiting, engine.num_running, ended.error) == (0, 0, None)
    engine.close()
    engine.abort(requests[1])
    for call in (
        engine.step,
        engine.run,
        lambda: submit(engine),
        lambda: engine.submit_samples(2, [9], key=KEYS[0]),
        lambda: engine.preempt(requests[0]),
    ):
        with pytest.raises(RuntimeError, match=f"^{CLOSED}"):
            call()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(engine._scheduler._slots))


def test_a_queue_that_is_closed_meanwhile_takes_no_request(monkeypatch):
    engine = make_engine()
    check = engine._scheduler.queue.check_room

    def close_then(count):
        check(count)
        engine.close()

    monkeypatch.setattr(engine._scheduler.queue, "check_room", close_then)
    with pytest.raises(RuntimeError, match=CLOSED):
        submit(engine)


def test_coroutines_end_with_an_engine_that_another_thread_closes(monkeypatch):
    engine, get = make_engine(), jax.device_get

    def close_then(output):
        if engine.num_steps == 3:
            engine.close()
        return get(output)

    async def read(request):
        return [token async for piece in request for token in piece.token_ids]

    async def read_all():
        requests = [submit(engine, i) for i in range(4)]
        texts = await asyncio.gather(*map(read, requests))
        assert texts == [request.token_ids for request in requests]
        return requests

    monkeypatch.setattr(jax, "device_get", close_then)
    requests = asyncio.run(read_all())
    assert [request.finish_reason for request in requests] == ["aborted"] * 4
    assert [len(request.token_ids) for request in requests] == [1, 1, 1, 0]


def test_coroutines_are_told_of_an_engine_that_lost_what_it_held():
    engine = make_engine()

    def fail(name, operands):
        if name == "step" and engine.num_steps == 2:
            jax.tree.leaves(operands)[0].delete()
            raise jax.errors.JaxRuntimeError("INTERNAL: a fault")

    soak.before_programs(engine, fail)

    async def read_all():
        requests = [submit(engine, i) for i in range(4)]
        told = await asyncio.gather(anext(aiter(requests[3])), return_exceptions=True)
        return requests, told

    requests, told = asyncio.run(read_all())
    assert [str(error) for error in told] == [requests[0].error]
    assert [request.finish_reason for request in requests] == ["engine_error"] * 4


@pytest.mark.parametrize("read", [lambda one: one.result(), list])
def test_a_request_does_not_wait_for_an_engine_that_has_nothing_to_do(read):
    engine = make_engine()
    request = submit(engine)
    engine._scheduler.queue._entries.clear()
    with pytest.raises(RuntimeError, match="nothing to do, and this request has not ended"):
        read(request)


def test_a_request_that_ended_keeps_no_engine():
    engine = make_engine()
    request, aborted = submit(engine), submit(engine, 1)
    refused = engine.submit([], key=KEYS[0])
    engine.abort(aborted)
    request.result()
    scheduler = weakref.ref(engine._scheduler)
    gc.disable()
    try:
        del engine
        assert scheduler() is None
    finally:
        gc.enable()
    assert len(request.token_ids) == 9
    assert list(aborted) == list(refused) == []


def test_no_request_is_made_before_the_queue_has_room_for_all(monkeypatch):
    engine = make_engine(max_waiting=3)

    def make(*operands):
        raise AssertionError

    monkeypatch.setattr("specjax.engine.engine.make_request", make)
    for prompt in ([1], []):
        with pytest.raises(queue.Full, match="0 requests wait, and 1000000000 more"):
            engine.submit_samples(10**9, prompt, key=KEYS[0])


def test_a_thread_that_waits_for_its_turn_returns_when_the_engine_is_closed():
    engine = make_engine()
    request = submit(engine)
    with engine._scheduler._step_lock:
        thread = threading.Thread(target=request.result)
        thread.start()
        engine.close()
    thread.join(10)
    assert not thread.is_alive()
    assert request.finish_reason == "aborted"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGALRM])
@pytest.mark.parametrize(("owner", "name"), [(scheduler, "DispatchedStep"), (Request, "_add")])
def test_a_signal_whose_handler_raises_takes_no_token(monkeypatch, handled, number, owner, name):
    engine = make_engine()
    expected = [submit(engine, i).result().token_ids for i in range(4)]
    handled(number, lambda *_: sys.exit(1))
    requests, function, calls = [submit(engine, i) for i in range(4)], getattr(owner, name), []

    def interrupted(*operands):
        calls.append(name)
        if len(calls) % 4 == 0:
            signal.raise_signal(number)
        return function(*operands)

    monkeypatch.setattr(owner, name, interrupted)
    num_exits = 0
    while any(request.finish_reason is None for request in requests):
        try:
            engine.run()
        except SystemExit:
            num_exits += 1
    assert [request.token_ids for request in requests] == expected
    assert num_exits > 1


def test_every_signal_is_handled_after_a_block_whatever_another_handler_raises(handled):
    numbers, called = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM), []

    def handle(number, frame):
        called.append(number)
        raise InterruptedError(number)

    for number in numbers:
        handled(number, handle)

    @delayed_interrupts()
    def block():
        with delayed_interrupts():
            for number in numbers:
                signal.raise_signal(number)
        assert called == []

    with pytest.raises(InterruptedError):
        block()
    assert sorted(called) == sorted(numbers)
    assert [signal.getsignal(number) for number in numbers] == [handle] * 3


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError]
)
def test_what_stops_a_program_leaves_an_engine_that_it_closes(error):
    engine = make_engine()
    request = submit(engine)

    def fail(name, operands):
        if name == "step":
            jax.tree.leaves(operands)[0].delete()
            raise error("now")

    soak.before_programs(engine, fail)
    with pytest.raises(error, match="now"):
        engine.run()
    assert (request.finish_reason, request.error) == (
        "engine_error",
        f"{LOST}{error.__name__}: now; make another one.",
    )
    with pytest.raises(RuntimeError, match=LOST):
        engine.step()


def test_a_tokenizer_may_close_the_engine_that_calls_it():
    engine = make_engine(tokenizer=(tokenizer := Calls()))
    requests = [submit(engine, i) for i in range(4)]
    engine.step()
    tokenizer.call = engine.close
    assert not engine.step()
    assert [request.finish_reason for request in requests] == ["aborted"] * 4


@pytest.mark.parametrize("method", ["compute_bitmask", "try_consume_tokens"])
def test_a_matcher_may_close_the_engine_that_calls_it(method):
    engine = make_engine(takes_matchers=True)
    matchers = [soak.Turns(soak.Faults(0), V) for _ in range(2)]
    requests = [submit(engine, i, matcher=matchers[i]) for i in range(2)]
    engine.step()
    function = getattr(matchers[0], method)

    def close_then(*operands):
        engine.close()
        return function(*operands)

    setattr(matchers[0], method, close_then)
    assert not engine.step()
    assert [request.finish_reason for request in requests] == ["aborted"] * 2


@pytest.mark.parametrize("end", ["run", "close"])
def test_a_tokenizer_that_runs_the_engine_that_calls_it_ends_its_request_alone(end):
    """A request would read its later tokens before the earlier ones."""
    expected = submit(make_engine(), 1).result().token_ids
    engine = make_engine(tokenizer=(tokenizer := Calls()))
    request, other = submit(engine), submit(engine, 1)
    engine.step()
    tokenizer.call = other.result
    getattr(engine, end)()
    if end == "run":
        assert (other.finish_reason, other.token_ids) == ("length", expected)
    assert request.finish_reason == "tokenizer_error"
    assert request.error == (
        "its tokenizer raised RuntimeError: A tokenizer or a matcher cannot run the engine that "
        "calls it."
    )


@pytest.mark.parametrize("closes", [False, True])
def test_a_handler_may_close_or_run_the_engine_that_it_interrupts(monkeypatch, handled, closes):
    engine, get = make_engine(), jax.device_get
    expected = [submit(engine, i).result().token_ids for i in range(4)]
    requests = [submit(engine, i) for i in range(4)]
    handled(signal.SIGTERM, lambda *_: engine.close() if closes else requests[1].result())

    def interrupted(output):
        monkeypatch.setattr(jax, "device_get", get)
        signal.raise_signal(signal.SIGTERM)
        return get(output)

    engine.step()
    monkeypatch.setattr(jax, "device_get", interrupted)
    assert engine.step() is not closes
    if closes:
        assert [request.finish_reason for request in requests] == ["aborted"] * 4
    else:
        assert requests[1].finish_reason == "length"
        engine.run()
        assert [request.token_ids for request in requests] == expected
