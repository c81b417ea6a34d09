"""An engine that a thread steps: what its readers get, and what is left when they leave."""

import asyncio
import concurrent.futures
import contextlib
import functools
import gc
import queue
import subprocess
import sys
import threading
import types
import weakref

import bigrams
import jax
import numpy as np
import pytest

import specjax
from benchmarks.cpu import soak
from specjax.engine import async_engine
from specjax.engine.usage import Usage

# The thread that steps is in no context of JAX that this one is in, such as strict promotion.
pytestmark = [pytest.mark.once, pytest.mark.lenient]

V = 4
TABLE, DRAFT = bigrams.pair(V, seed=1)
MODEL, DRAFTER = bigrams.model(TABLE), specjax.model_drafter(bigrams.model(DRAFT))
CONFIG = specjax.SpeculativeConfig(num_speculative_tokens=2)
PROMPT = [1, 2]
ENDS = ("length", "end_of_sequence", "stop_string")


class Letters:
    """Token i is the letter i of the alphabet."""

    def decode(self, ids, skip_special_tokens):
        return "".join("abcd"[i] for i in ids)


def make_engine(num_slots=3, drafter=None, **options):
    sizes = specjax.LoopOptions(max_length=32, prefill_chunk_size=4, num_logprobs=1)
    config = None if drafter is None else CONFIG
    return specjax.Engine(
        MODEL, drafter, num_slots=num_slots, options=sizes, config=config, **options
    )


@contextlib.contextmanager
def serving(engine):
    """An `AsyncEngine` that leaves no thread, slot or request."""
    server = specjax.AsyncEngine(engine)
    thread = server._thread
    try:
        yield server
    finally:
        server.close(drain=False)
    assert not thread.is_alive()
    assert (thread._followed, thread.commands.empty()) == (set(), True)
    assert (engine.num_waiting, engine.num_running) == (0, 0)
    assert engine._scheduler.queue.num_entries() == 0


def submit_all(server, *asked):
    """Streams of requests that are all there before a step."""
    with server.engine._scheduler._step_lock:
        return [server.submit(PROMPT, **values) for values in asked]


def before_step(engine, call):
    """Has an engine call `call(number)` before it dispatches a step."""

    def before(name, operands):
        if name == "step":
            call(engine.num_steps)

    soak.before_programs(engine, before)


@pytest.fixture
def clock(monkeypatch):
    """The time of the thread, in seconds, which a test sets."""
    now = types.SimpleNamespace(seconds=0.0)
    fake = types.SimpleNamespace(monotonic=lambda: now.seconds)
    monkeypatch.setattr(async_engine, "time", fake)
    return now


def kinds(number):
    """Arguments of requests of all lengths, temperatures and ends."""
    rng = np.random.default_rng(0)
    return [
        {
            "prompt": rng.integers(0, V, rng.integers(1, 8)).tolist(),
            "seed": int(rng.integers(-(2**62), 2**62)),
            "max_new_tokens": int(rng.integers(1, 20)),
            "temperature": float(rng.choice([0.0, 0.8, 1.3])),
            "stop": "abc" if i % 3 == 0 else None,
            "eos_token_ids": [3] if i % 5 == 0 else None,
        }
        for i in range(number)
    ]


def of_chunks(chunks):
    """What a reader got; only its last chunk has a finish reason."""
    assert [chunk.finish_reason is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    for chunk in chunks:
        lists = chunk.token_ids, chunk.logprobs, chunk.top_logprobs, chunk.origins
        assert len(set(map(len, lists))) == 1
    token_ids = [token for chunk in chunks for token in chunk.token_ids]
    logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
    text = "".join(chunk.text for chunk in chunks)
    return token_ids, logprobs, text, chunks[-1].finish_reason, chunks[-1].usage


def of_request(request):
    """What a request got."""
    lists = request.token_ids, request.logprobs
    return *lists, request.text, request.finish_reason, request.usage


def test_fifty_clients_in_threads_and_two_event_loops_get_the_texts_of_an_engine_that_is_run():
    asked = kinds(50)
    engine = make_engine(drafter=DRAFTER, tokenizer=Letters())
    expected = [of_request(engine.submit(**kind).result()) for kind in asked]
    assert {reason for *_, reason, _ in expected} == set(ENDS)

    async def read(kind):
        async with server.submit(**kind) as stream:
            return of_chunks([chunk async for chunk in stream])

    async def read_all(part):
        return await asyncio.gather(*map(read, part))

    with serving(engine) as server:
        with concurrent.futures.ThreadPoolExecutor(20) as pool:
            loops = [pool.submit(asyncio.run, read_all(asked[i : i + 16])) for i in (0, 16)]
            threads = pool.map(lambda kind: of_chunks(list(server.submit(**kind))), asked[32:])
            got = [*loops[0].result(), *loops[1].result(), *threads]
        assert got == expected
        totals = server.totals
    usage = [usage for *_, usage in expected]
    assert sum(totals.num_requests.values()) == 50
    assert totals.num_prompt_tokens == sum(one.prompt_tokens for one in usage)
    assert totals.num_completion_tokens == sum(one.completion_tokens for one in usage)
    num_accepted = sum(one.accepted_prediction_tokens for one in usage)
    num_rejected = sum(one.rejected_prediction_tokens for one in usage)
    assert totals.num_accepted.sum() == num_accepted > 0
    assert (totals.num_drafted - totals.num_accepted).sum() == num_rejected > 0


def test_samples_of_a_prompt_are_those_of_the_engine():
    values = {"prompt": PROMPT, "seed": 5, "max_new_tokens": 8}
    engine = make_engine()
    samples = engine.submit_samples(4, **values)
    engine.run()
    with serving(make_engine()) as server:
        streams = server.submit_samples(4, **values)
        assert [one.result().token_ids for one in streams] == [one.token_ids for one in samples]
        assert Usage.sum([one.request.usage for one in streams]) == Usage(2, 32)


def test_what_a_slow_reader_did_not_take_is_one_chunk():
    with serving(make_engine(num_slots=1)) as server:
        slow = server.submit(PROMPT, seed=0, max_new_tokens=9)
        # It has the slot after the slow reader's request.
        server.submit(PROMPT, seed=1, max_new_tokens=2).result()
        (chunk,) = slow
        assert (len(chunk.token_ids), chunk.finish_reason) == (9, "length")
        assert list(slow) == []


def test_two_thousand_requests_whose_readers_leave_anyhow_leave_nothing():
    rng = np.random.default_rng(0)
    leaves = rng.choice(["read", "close", "cancel", "drop", "late"], 2000)
    stops = rng.integers(0, 4, 2000)
    requests = weakref.WeakSet()

    async def client(server, limit, leave, stop):
        async with limit:
            timeout = 1e-9 if leave == "late" else None
            stream = server.submit(PROMPT, seed=0, max_new_tokens=3, timeout=timeout)
            requests.add(stream.request)
            if leave == "cancel":
                task = asyncio.ensure_future(stream.aresult())
                for _ in range(stop):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            elif leave in ("close", "drop"):
                for _ in range(stop):
                    await anext(stream, None)
                if leave == "close":
                    stream.close()
            else:
                await stream.aresult()

    async def main():
        limit = asyncio.Semaphore(64)
        pairs = zip(leaves, stops, strict=True)
        await asyncio.gather(*(client(server, limit, *pair) for pair in pairs))

    num_threads = threading.active_count()
    with serving(make_engine()) as server:
        asyncio.run(main())
        server.close()
        counts = server.totals.num_requests
        assert sum(counts.values()) == 2000
        assert min(counts[reason] for reason in ("length", "aborted", "timed_out")) > 300
    assert threading.active_count() == num_threads
    gc.collect()
    assert len(requests) == 0


def test_a_step_that_raises_ends_all_requests_and_every_later_call_says_why():
    engine = make_engine()
    first = jax.errors.JaxRuntimeError("INTERNAL: a fault")

    def fail(number):
        if number == 4:
            raise first

    before_step(engine, fail)
    said = (
        "the engine is broken: a step raised JaxRuntimeError: INTERNAL: a fault; make another one."
    )

    async def read(stream):
        return [chunk async for chunk in stream]

    async def read_all():
        return await asyncio.gather(*(read(server.submit(PROMPT, seed=i)) for i in range(4)))

    with serving(engine) as server:
        in_thread = server.submit(PROMPT, seed=0)
        for chunks in (*asyncio.run(read_all()), list(in_thread)):
            assert (chunks[-1].finish_reason, chunks[-1].error) == ("engine_error", said)
        for _ in range(2):
            with pytest.raises(RuntimeError) as raised:
                server.submit(PROMPT, seed=0)
            assert (str(raised.value), raised.value.__cause__) == (said, first)
        server._thread.join()
        assert (server.state, server.error) == ("broken", said)
        server.close()
        assert server.state == "broken"
        with pytest.raises(RuntimeError, match=said):
            specjax.AsyncEngine(engine)


def test_a_request_ends_when_its_timeout_is_over_in_a_slot_and_in_the_queue(clock):
    expected = make_engine().submit(PROMPT, seed=0, max_new_tokens=20).result().token_ids
    engine = make_engine(num_slots=2)

    def tick(number):
        if number == 5:
            clock.seconds = 7.0

    before_step(engine, tick)
    with serving(engine) as server:
        values = {"seed": 0, "max_new_tokens": 20}
        asked = [values | {"timeout": timeout} for timeout in (7, 7, 7, 7.5)]
        *late, patient = submit_all(server, *asked)
        results = [stream.result() for stream in late]
        assert patient.result().token_ids == expected
    assert [one.finish_reason for one in results] == ["timed_out"] * 3
    assert [len(one.token_ids) for one in results] == [5, 5, 0]
    assert results[0].token_ids == expected[:5]
    assert results[0].error == "the request had not ended when its timeout was over."


def test_an_engine_that_drains_takes_nothing_and_finishes_what_it_has():
    engine, said, states = make_engine(num_slots=1), [], []

    def submit(number):
        if server.state != "running":
            states.append(server.state)
            with pytest.raises(RuntimeError) as raised:
                server.submit(PROMPT, seed=0)
            said.append(str(raised.value))

    before_step(engine, submit)
    with serving(engine) as server:
        with engine._scheduler._step_lock:
            streams = [server.submit(PROMPT, seed=i, max_new_tokens=5) for i in range(3)]
            closing = threading.Thread(target=server.close)
            closing.start()
            while server.state == "running":
                pass
        closing.join()
        assert [one.result().finish_reason for one in streams] == ["length"] * 3
    assert set(states) == {"draining"}
    assert set(said) == {"the engine drains: it takes no more requests; make another one."}
    assert (server.state, server.error) == ("closed", None)
    with pytest.raises(RuntimeError, match="the engine is closed; make another one"):
        server.submit(PROMPT, seed=0)


def test_a_drain_that_is_too_late_aborts_the_rest(clock):
    engine = make_engine(num_slots=1)

    def tick(number):
        clock.seconds += server.state == "draining"

    before_step(engine, tick)
    with serving(engine) as server:
        streams = [server.submit(PROMPT, seed=i, max_new_tokens=20) for i in range(3)]
        server.close(timeout=22)
        assert [one.result().finish_reason for one in streams] == ["length", "aborted", "aborted"]


def test_an_engine_without_a_thread_drains_too():
    engine = make_engine(num_slots=1)
    requests = [engine.submit(PROMPT, seed=i, max_new_tokens=5) for i in range(3)]
    engine.close(drain=True)
    assert [one.finish_reason for one in requests] == ["length"] * 3
    assert engine.is_closed
    engine.close(drain=True)


def test_a_flag_of_a_call_that_is_no_flag_is_refused_without_a_reason_that_it_has_not():
    engine = make_engine()
    with serving(engine) as server:
        for call in (
            lambda: server.close(drain=1),
            lambda: engine.close(drain=1),
            lambda: server.submit(PROMPT, seed=0, prompt_logprobs=1),
        ):
            with pytest.raises(ValueError, match=r" is 1; it needs True or False\.$"):
                call()
        assert server.state == "running"


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "1", True])
def test_a_timeout_that_is_no_time_is_refused(timeout):
    with serving(make_engine()) as server:
        for call in (lambda: server.submit(PROMPT, seed=0, timeout=timeout), server.close):
            values = {"timeout": timeout} if call == server.close else {}
            with pytest.raises(ValueError, match=f"^timeout is {timeout!r}; it needs seconds"):
                call(**values)
        assert server.state == "running"


def test_a_full_queue_a_wrong_prompt_and_a_second_thread_are_told_at_once():
    with serving(make_engine(num_slots=1, max_waiting=2)) as server:
        with pytest.raises(RuntimeError, match="another AsyncEngine"):
            specjax.AsyncEngine(server.engine)
        with server.engine._scheduler._step_lock:
            streams = [server.submit(PROMPT, seed=i, max_new_tokens=2) for i in range(2)]
            with pytest.raises(queue.Full, match="2 requests wait, and 1 more"):
                server.submit(PROMPT, seed=0)
            with pytest.raises(queue.Full, match="2 requests wait, and 2 more"):
                server.submit_samples(2, PROMPT, seed=0)
        assert [one.result().finish_reason for one in streams] == ["length"] * 2
        with pytest.raises(ValueError, match=r"^the prompt has token 4; the target's vocabulary"):
            server.submit([4], seed=0)
        with pytest.raises(ValueError, match=r"^the prompt is empty"):
            server.submit_samples(2, [], seed=0)
        for submit in (server.submit, functools.partial(server.submit_samples, 2)):
            with pytest.raises(TypeError, match=r"^AsyncEngine.submit\w*\(\) got .* 'stops'"):
                submit(PROMPT, seed=0, stops="a")


class Gate:
    """Holds an engine before a step until it is opened."""

    def __init__(self, engine, number=2):
        self.is_held, self.is_open = threading.Event(), threading.Event()
        before_step(engine, lambda now: now == number and self.hold())

    def hold(self):
        self.is_held.set()
        self.is_open.wait()


@pytest.mark.parametrize("leave", ["cancel", "timeout", "close", "with", "drop"])
def test_a_reader_that_leaves_aborts_its_request_alone(leave):
    engine = make_engine()
    gate = Gate(engine)
    expected = make_engine().submit(PROMPT, seed=1).result().token_ids

    async def wait(stream):
        # Two steps were dispatched, and one of them is read. The other is, once the gate is open.
        await anext(stream)
        await asyncio.to_thread(gate.is_held.wait)
        if leave == "cancel":
            task = asyncio.ensure_future(anext(stream))
            while stream._cursor.waiter is None:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif leave == "timeout":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 1e-3)
        elif leave == "close":
            task = asyncio.ensure_future(anext(stream, "no chunk"))
            while stream._cursor.waiter is None:
                await asyncio.sleep(0)
            await stream.aclose()
            gate.is_open.set()
            assert await task == "no chunk"
        elif leave == "with":
            async with stream:
                pass
        gate.is_open.set()
        return stream.request

    with serving(engine) as server:
        other, *streams = submit_all(server, {"seed": 1}, {"seed": 0})
        request = asyncio.run(wait(streams.pop()))
        assert other.result().token_ids == expected
    assert (request.finish_reason, len(request.token_ids)) == ("aborted", 2)


def test_the_result_of_a_closed_stream_says_that_it_was_aborted():
    engine = make_engine()
    gate = Gate(engine)
    with serving(engine) as server:
        streams = submit_all(server, {"seed": 0}, {"seed": 1})
        gate.is_held.wait()
        for stream in streams:
            stream.close()
        assert streams[0].request.finish_reason is None
        gate.is_open.set()
        results = streams[0].result(), asyncio.run(streams[1].aresult())
        assert [one.finish_reason for one in results] == ["aborted"] * 2
        assert next(streams[0], "no chunk") == "no chunk"


def test_a_stream_has_one_reader_at_a_time():
    engine = make_engine()
    gate = Gate(engine, number=0)

    async def read(stream):
        task = asyncio.ensure_future(anext(stream))
        while stream._cursor.waiter is None:
            await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another reader waits for this stream"):
            await anext(stream)
        gate.is_open.set()
        return await task

    with serving(engine) as server, server.submit(PROMPT, seed=0, max_new_tokens=1) as stream:
        assert asyncio.run(read(stream)).finish_reason == "length"


def test_a_loop_that_is_closed_disturbs_no_other():
    engine = make_engine()
    gate = Gate(engine, number=1)
    with serving(engine) as server:
        lost, other = submit_all(server, {"seed": 0}, {"seed": 1, "max_new_tokens": 9})
        gate.is_held.wait()
        lost._cursor.take()
        loop = asyncio.new_event_loop()
        lost._cursor.waiter = loop.create_future()
        loop.close()
        gate.is_open.set()
        assert len(other.result().token_ids) == 9
        lost._cursor.waiter = None


@pytest.mark.parametrize("is_idle", [True, False])
def test_an_engine_that_is_closed_by_itself_ends_its_readers(is_idle):
    engine = make_engine()
    gate = Gate(engine, number=2)
    with serving(engine) as server:
        stream = server.submit(PROMPT, seed=0, max_new_tokens=2 if is_idle else 9)
        if is_idle:
            gate.is_open.set()
            stream.result()
            engine.close()
        else:
            gate.is_held.wait()
            closing = threading.Thread(target=engine.close)
            closing.start()
            gate.is_open.set()
            closing.join()
            assert stream.result().finish_reason in ("aborted", "length")
        assert server.state == "closed"


def test_a_server_that_is_forgotten_ends_its_thread():
    server = specjax.AsyncEngine(make_engine())
    thread, stream = server._thread, server.submit(PROMPT, seed=0, max_new_tokens=9)
    del server
    assert len(stream.result().token_ids) == 9
    del stream
    gc.collect()
    thread.join()
    assert thread._engine.is_closed


def test_a_program_that_forgets_its_server_ends():
    program = """
import specjax
from specjax.markov_chain import markov_chain
options = specjax.LoopOptions(max_length=4096)
engine = specjax.Engine(markov_chain([[0.5, 0.5]] * 2), None, num_slots=2, options=options)
server = specjax.AsyncEngine(engine)
stream = server.submit([0], seed=0)
print(next(stream).token_ids != [])
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "True\n", "")
