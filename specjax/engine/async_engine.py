"""`AsyncEngine`: an engine that a thread of its own steps, for readers in threads and event loops.

    any thread                               the thread that steps: while there is work,
                                             or once a command comes
    submit               -> WaitingQueue.put
                         -> commands.put       obey     follow a new request, abort a closed one
    RequestStream.close  -> commands.put       step     the `Engine`
    RequestStream        <- wake_readers       publish  end late requests, wake readers, count
    close                -> commands.put     at its end: close the `Engine`; all requests end

The `Engine` checks a request, and its queue takes it, in the thread that submits. So an error is
raised there, and no step waits for a check.
"""

import asyncio
import atexit
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

from specjax.checks import check_count, check_flag
from specjax.engine.engine import Engine
from specjax.engine.request import FinishReason
from specjax.engine.request_stream import Cursor, RequestStream, wake_readers
from specjax.engine.submission import (
    SampleArguments,
    Submission,
    SubmitArguments,
    check_timeout,
    make_submission,
    sample_indices,
)
from specjax.engine.usage import Totals


class _Stop(NamedTuple):
    """A command to end once there is no work, or at a deadline of `time.monotonic`."""

    deadline: float


class _StepThread(threading.Thread):
    """Steps an engine while it has requests, and wakes their readers.

    Args:
      engine: an `Engine`, which only the thread steps from now on.

    Attributes:
      commands: cursors of requests, new ones and closed ones, and `_Stop`.
      totals: `Totals` of the requests that have ended.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(name="specjax-engine", daemon=True)
        self._engine, self._scheduler = engine, engine._scheduler
        self.commands: queue.SimpleQueue[Cursor | _Stop] = queue.SimpleQueue()
        self.totals = Totals.zero()
        # Requests that had not ended when the thread last looked.
        self._followed: set[Cursor] = set()
        # When to end although there is work; None before a `_Stop`.
        self._end: float | None = None

    def run(self) -> None:
        """Steps until a `_Stop`, an error or `Engine.close`, and then closes the engine."""
        # At first it may have requests of its own.
        is_busy = True
        try:
            while not self._engine.is_closed and self._obey(is_busy):
                is_busy = self._engine.step()
                self._publish()
        except BaseException as error:  # Readers and later calls are told.
            self._scheduler.fail(error)
        self._scheduler.close()
        while not self.commands.empty():
            self._obey_next()
        self._publish()

    def _obey(self, is_busy: bool) -> bool:
        """Obeys all commands, and returns whether to step: waits for one if there is no work."""
        while not self.commands.empty() or not (is_busy or self._end is not None):
            self._obey_next()
            is_busy = True
        return self._end is None or (is_busy and time.monotonic() < self._end)

    def _obey_next(self) -> None:
        command = self.commands.get()
        if isinstance(command, _Stop):
            ends = [command.deadline] if self._end is None else [command.deadline, self._end]
            self._end = min(ends)
            return
        # A reader may leave before its cursor comes here for the first time.
        if command.is_closed:
            self._scheduler.abort(command.request)
        if not command.is_followed:
            command.is_followed = True
            self._followed.add(command)

    def _publish(self) -> None:
        """Ends requests whose timeout is over, wakes readers, and counts ended requests."""
        now = time.monotonic()
        for cursor in self._followed:
            if now >= cursor.deadline:
                why = "the request had not ended when its timeout was over."
                self._scheduler.abort(cursor.request, FinishReason.TIMED_OUT, why)
        # Before readers are woken: one that ends meanwhile is woken next time.
        ended = [one for one in self._followed if one.request.finish_reason is not None]
        wake_readers(self._followed)
        self._followed.difference_update(ended)
        for request in (cursor.request for cursor in ended):
            assert request.finish_reason is not None
            self.totals = self.totals.add(request.finish_reason, request.usage, request.metrics)


class AsyncEngine:
    """Steps an `Engine` in a thread while there is work, for any number of readers.

    `submit` returns a `RequestStream` at once: `async for chunk in stream` in a task of any event
    loop, or `for chunk in stream` in a thread. A request goes on whether or not it is read. Its
    tokens are those of the `Engine`, and do not depend on other requests. vLLM's counterpart is
    `AsyncLLM`.

    A step that raises breaks the engine. All requests end as "engine_error", with a sentence that
    names the first cause. Later calls of `submit` raise `RuntimeError` with that sentence.

    `with` and `async with` drain the engine at their end. If an error leaves the block, they abort
    its requests.

    Args:
      engine: an `Engine`. From now on call neither `step` nor `run`, and iterate over no `Request`:
        only the thread steps it. Contexts such as `with jax.enable_x64()` do not reach the thread;
        `jax.config.update` does.

    Attributes:
      engine: the `Engine`, whose counts any thread may read.

    Raises:
      RuntimeError: if the engine is closed, or another `AsyncEngine` steps it.

    Example:
      >>> import asyncio
      >>> from specjax.markov_chain import markov_chain
      >>> model = markov_chain([[0.1, 0.9], [0.8, 0.2]])
      >>> options = specjax.LoopOptions(max_length=16)
      >>> engine = specjax.Engine(model, None, num_slots=2, options=options)
      >>> async def read(server, seed):
      ...     tokens = []
      ...     async for chunk in server.submit([0], seed=seed, temperature=0, max_new_tokens=3):
      ...         tokens += chunk.token_ids
      ...     return tokens, chunk.finish_reason, chunk.usage.total_tokens
      >>> async def main():
      ...     async with specjax.AsyncEngine(engine) as server:
      ...         return await asyncio.gather(*(read(server, seed) for seed in range(2)))
      >>> asyncio.run(main())
      [([1, 0, 1], 'length', 4), ([1, 0, 1], 'length', 4)]
    """

    def __init__(self, engine: Engine) -> None:
        engine._scheduler.queue.check_open()
        if any(other.engine is engine for other in list(_running)):
            raise RuntimeError("another AsyncEngine steps this engine; make another Engine.")
        self.engine: Engine = engine
        self._thread = _StepThread(engine)
        self._thread.start()
        _running.add(self)

    def submit(
        self,
        prompt: Any,
        *,
        timeout: float | None = None,
        priority: int = 0,
        **arguments: Unpack[SubmitArguments],
    ) -> RequestStream:
        """Puts a request into the queue, without waiting for anything.

        Args:
          prompt: as in `Engine.submit`.
          timeout: most seconds from now to its end, a number > 0; None is no limit. Then the
            request ends as "timed_out", between two steps, and keeps its tokens.
          priority: a Python int >= 0: up to so many later requests of priority 0 go before this
            one, unless its prompt is being read. Equal ones are first come, first served.
          **arguments: those of `Engine.submit`: `key` or `seed`, `max_new_tokens`, `temperature`,
            `eos_token_ids`, `sampling`, `stop`, `matcher`, `prompt_logprobs`.

        Returns:
          The request's `RequestStream`.

        Raises:
          ValueError: as `Engine.submit` does, for a prompt that it refuses, and for a priority
            that is no int >= 0.
          queue.Full: if `max_waiting` requests wait.
          RuntimeError: if the engine drains, is closed or is broken.

        Example:
          >>> from specjax.markov_chain import markov_chain
          >>> model = markov_chain([[0.1, 0.9], [0.8, 0.2]])
          >>> options = specjax.LoopOptions(max_length=16)
          >>> engine = specjax.Engine(model, None, num_slots=2, options=options)
          >>> with specjax.AsyncEngine(engine) as server:
          ...     stream = server.submit([0], seed=1, temperature=0, max_new_tokens=3, timeout=60)
          ...     stream.result().token_ids
          [1, 0, 1]
        """
        submission = make_submission("AsyncEngine.submit", prompt, arguments)
        return self._submit(submission, [-1], timeout, priority)[0]

    def submit_samples(
        self,
        num_samples: int,
        prompt: Any,
        *,
        timeout: float | None = None,
        priority: int = 0,
        **arguments: Unpack[SampleArguments],
    ) -> list[RequestStream]:
        """Puts several requests of one prompt into the queue; the prompt is read once.

        Args:
          num_samples: a Python int >= 1.
          prompt: as in `Engine.submit`.
          timeout: as in `submit`, for each request.
          priority: as in `submit`, of all together.
          **arguments: those of `Engine.submit_samples`. Sample i has the key
            `jax.random.fold_in(key, i)`.

        Returns:
          A `RequestStream` for each sample.

        Raises:
          ValueError: as `submit` does.
          queue.Full: if more than `max_waiting` requests would wait.
          RuntimeError: as `submit` does.
        """
        submission = make_submission("AsyncEngine.submit_samples", prompt, arguments)
        samples = sample_indices(submission, num_samples)
        return self._submit(submission, samples, timeout, priority)

    def _submit(
        self,
        submission: Submission,
        samples: Sequence[int],
        timeout: float | None,
        priority: int,
    ) -> list[RequestStream]:
        """Returns the streams of new requests, which the thread follows from now on."""
        deadline = time.monotonic() + check_timeout(timeout)
        check_count("priority", priority, 0, "the later requests that may go before")
        requests = self.engine._enqueue(submission, samples, priority)
        if requests[0].finish_reason == FinishReason.REFUSED:
            raise ValueError(requests[0].error)
        cursors = [Cursor(request, deadline) for request in requests]
        put = self._thread.commands.put
        for cursor in cursors:
            put(cursor)
        return [RequestStream(cursor, put, self) for cursor in cursors]

    @property
    def state(self) -> str:
        """One of "running", "draining", "closed" and "broken"."""
        waiting = self.engine._scheduler.queue
        if waiting.closed_reason is not None:
            return "closed" if waiting.cause is None else "broken"
        return "draining" if waiting.is_draining else "running"

    @property
    def error(self) -> str | None:
        """A sentence why the engine is broken, or None."""
        return self.engine._scheduler.queue.closed_reason if self.state == "broken" else None

    @property
    def totals(self) -> Totals:
        """Counts of the requests that have ended."""
        return self._thread.totals

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Closes the engine and waits for the end of its thread.

        From now on `submit` raises `RuntimeError`. A coroutine calls `aclose`, which does not block
        its event loop.

        Args:
          drain: whether requests first go on until they have ended. Else they are aborted.
          timeout: seconds after which all are aborted, a number > 0, or None.

        Raises:
          ValueError: for a timeout that is no number > 0.
        """
        seconds = check_timeout(timeout) if check_flag("drain", drain, "") else 0.0
        self.engine._scheduler.queue.drain()
        if self._thread.is_alive():
            self._thread.commands.put(_Stop(time.monotonic() + seconds))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    async def aclose(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Closes the engine in another thread, while the event loop goes on.

        Args:
          drain: as in `close`.
          timeout: as in `close`.
        """
        await asyncio.to_thread(self.close, drain=drain, timeout=timeout)

    def __enter__(self) -> "AsyncEngine":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(drain=kind is None)

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.aclose(drain=kind is None)

    def __del__(self) -> None:
        if (thread := self.__dict__.get("_thread")) is not None:
            thread.commands.put(_Stop(0.0))


# A thread that is in a device's program while the interpreter ends could crash it.
_running: "weakref.WeakSet[AsyncEngine]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for engine in list(_running):
        engine.close(drain=False)
