"""The host's part: which prompt is read next, which request is in which slot, and what it got.

A round fills the empty slots, dispatches a step, and then reads what the step before gave, while
the device computes. So a request that ended is known one step later, unless it had to end: a step
gives it a token at least, and it may get no more.
"""

import asyncio
import contextlib
import importlib
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.decode.state import DecodeState
from specjax.engine.programs import Programs
from specjax.engine.queue import ParkedRequest, PrefillBatch, PromptGroup, WaitingQueue
from specjax.engine.request import PROGRAM_EXITS, FinishReason, Request, describe
from specjax.engine.slots import StepOutput

__all__ = ["DispatchedStep", "Scheduler", "delayed_interrupts"]

# Those of `signal` make an enum of each answer, and take ten times as long for all signals.
_signal = importlib.import_module("_signal")
_SIGNALS = tuple(map(int, signal.valid_signals()))


@contextlib.contextmanager
def delayed_interrupts() -> Iterator[None]:
    """Delays signals that have a handler in Python until the block has ended, in the main thread.

    Python runs handlers in no other thread. The block should not wait for long.

    Example:
      >>> import signal
      >>> before, done = signal.signal(signal.SIGINT, signal.default_int_handler), []
      >>> try:
      ...     with delayed_interrupts():
      ...         signal.raise_signal(signal.SIGINT)
      ...         done.append("all of it")
      ... except KeyboardInterrupt:
      ...     done.append("interrupted")
      >>> _ = signal.signal(signal.SIGINT, before)
      >>> done
      ['all of it', 'interrupted']
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers, received, is_over = dict[int, Any](), dict[int, Any](), False

    def delay(number: int, frame: Any) -> None:
        if is_over:  # Another handler raised before this signal had its own back.
            handlers[number](number, frame)
        else:
            received[number] = frame

    try:
        for number in _SIGNALS:
            if callable(handler := _signal.getsignal(number)):
                handlers[number] = handler
                _signal.signal(number, delay)
        yield
    finally:
        is_over = True
        # Calls each handler, whatever another one raises.
        with contextlib.ExitStack() as calls:
            for number, frame in received.items():
                calls.callback(handlers[number], number, frame)
            for number, handler in handlers.items():
                _signal.signal(number, handler)


# Prompts that are read as soon as they come, while no slot is empty.
_MAX_READY = 2


class DispatchedStep(NamedTuple):
    """A step that was dispatched, and the requests that were in the slots and have not read it."""

    output: StepOutput
    occupants: list[Request | None]


class Scheduler:
    """Slots, their requests, and the queue, first come, first served.

    Args:
      programs: of the engine.
      slots: empty ones.
      all_allowed: masks of rows that allow every token, if requests may have matchers; else None.
      max_waiting: most requests that wait.

    Attributes:
      num_steps: steps dispatched.
      num_occupied: slots with a request in them, summed over these steps.
    """

    def __init__(
        self,
        programs: Programs,
        slots: DecodeState,
        all_allowed: Any,
        max_waiting: int,
    ) -> None:
        self._programs, self._slots = programs, slots
        self._all_allowed, self._all_allowed_on_device = all_allowed, jax.device_put(all_allowed)
        self._occupants: list[Request | None] = [None] * slots.lengths.shape[0]
        self._queue = WaitingQueue(max_waiting)
        batch = programs.batch
        self._batch = None if batch is None else PrefillBatch(programs, batch)
        self._in_flight: deque[DispatchedStep] = deque()
        self._to_release: set[int] = set()
        self._has_aborted = False
        # Held by the thread whose turn it is to step or preempt.
        self._step_lock = threading.RLock()
        self._in_user_code = False
        self._shared_step: asyncio.Future[bool] | None = None
        self.num_steps = self.num_occupied = 0

    @property
    def num_waiting(self) -> int:
        """Requests that are in no slot and have not ended."""
        return self._queue.num_waiting()

    @property
    def num_running(self) -> int:
        """Requests that were put in a slot, have not ended, and do not wait for another."""
        return len(set(self._unfinished()) - self._queue.parked())

    def _unfinished(self) -> Iterator[Request]:
        """Returns requests that had a slot and have not ended; some twice."""
        each = (self._occupants, *(step.occupants for step in tuple(self._in_flight)))
        return (one for row in each for one in row if one is not None and one.finish_reason is None)

    def enqueue(self, group: PromptGroup) -> None:
        """Puts requests at the end of the queue.

        Raises:
          queue.Full: if too many would wait.
        """
        self._queue.put(group)

    def check_open(self) -> None:
        """Raises RuntimeError if the engine is closed, or lost what the device held."""
        self._queue.check_open()

    def check_room(self, count: int) -> None:
        """Raises what `enqueue` would raise for so many requests."""
        self._queue.check_room(count)

    @delayed_interrupts()
    def abort(self, request: Request) -> None:
        """Ends a request; the next round lets go what was read of its prompt."""
        request.end(FinishReason.ABORTED)
        self._has_aborted = True

    def close(self) -> None:
        """Ends what has not ended, and frees what the device holds for it."""
        with self._step_lock:
            if self._queue.closed is None:
                self._close(FinishReason.ABORTED, "the engine is closed; make another one.")

    @delayed_interrupts()
    def _close(self, reason: str, why: str, error: str | None = None) -> None:
        arrays = self._arrays()
        waiting = [request for group in self._queue.close(why) for request in group.waiting]
        with self._calling_user_code():
            for request in (*self._unfinished(), *waiting):
                request.end(reason, error)
        self._occupants = [None] * len(self._occupants)
        self._in_flight.clear()
        for leaf in jax.tree.leaves(arrays):
            leaf.delete()

    def _arrays(self) -> Any:
        """Returns what the device holds for requests, but for what steps put out."""
        rows = None if self._batch is None else self._batch.arrays
        return self._slots, rows, self._queue.arrays()

    @contextlib.contextmanager
    def _closing_on_loss(self) -> Iterator[None]:
        """Closes the engine if an error took what the device holds for requests.

        A program consumes its donated inputs. An error before that changes nothing: the inputs are
        still valid, and the next round continues from them.
        """
        try:
            yield
        except BaseException as error:
            with self._step_lock:
                if self._queue.closed is None and not self._is_intact():
                    why = (
                        "the engine lost what the device held for its requests, when it raised "
                        f"{describe(error)}; make another one."
                    )
                    self._close(FinishReason.ENGINE_ERROR, why, why)
                    if not isinstance(error, PROGRAM_EXITS):
                        raise RuntimeError(why) from error
            raise

    def _is_intact(self) -> bool:
        """Returns whether every array of the requests is valid: none consumed, none failed."""
        outputs = [step.output for step in self._in_flight]
        try:
            jax.block_until_ready((self._arrays(), outputs))
        except Exception:
            return False
        return True

    def preempt(self, request: Request, drops_cache: bool) -> bool:
        """Takes a request out of its slot and puts it first in the queue, with its state.

        Args:
          request: any.
          drops_cache: whether the target's cache is dropped, and computed again.

        Returns:
          Whether it was in a slot.
        """
        with self._step_lock, self._closing_on_loss(), delayed_interrupts():
            if request not in self._occupants or request.finish_reason is not None:
                return False
            slot = self._occupants.index(request)
            parked = self._programs.park(self._slots, np.int32(slot))
            self._queue.put_first(ParkedRequest(request, parked, drops_cache))
            self._occupants[slot] = None
            self._to_release.add(slot)
            return True

    def take_step(self) -> bool:
        """Takes what `Engine.step` takes, and returns whether work is left.

        Raises:
          RuntimeError: while coroutines wait for a step.
        """
        with self._step_lock, self._closing_on_loss():
            if self._is_shared():
                raise RuntimeError(
                    "Coroutines wait for a step of this engine; iterate over requests with "
                    "`async for` until they have it."
                )
            num_unread = self._dispatch_next()
            while (step := self._oldest_step(num_unread)) is not None:
                self._deliver(step, jax.device_get(step.output))
            return self._is_busy()

    async def take_step_async(self) -> bool:
        """Takes a step that coroutines share, and lets others run while the device does."""

        async def take() -> bool:
            with self._closing_on_loss():
                with self._step_lock:
                    num_unread = self._dispatch_next()
                while (step := self._oldest_step(num_unread)) is not None:
                    output = await asyncio.to_thread(jax.device_get, step.output)
                    with self._step_lock:
                        self._deliver(step, output)
                with self._step_lock:
                    return self._is_busy()

        if not self._is_shared():
            self._shared_step = asyncio.ensure_future(take())
        assert self._shared_step is not None
        if self._shared_step.get_loop() is not asyncio.get_running_loop():
            raise RuntimeError("Coroutines of another event loop wait for a step of this engine.")
        return await asyncio.shield(self._shared_step)

    def _is_shared(self) -> bool:
        """Whether a step that coroutines share has not ended; a closed loop never ends one."""
        step = self._shared_step
        return step is not None and not step.done() and not step.get_loop().is_closed()

    @delayed_interrupts()
    def _dispatch_next(self) -> int:
        """Fills slots and dispatches a step; returns how many steps may stay unread meanwhile."""
        if self._in_user_code:
            raise RuntimeError("A tokenizer or a matcher cannot run the engine that calls it.")
        # Left unread by a round that was interrupted; masks need what they drafted.
        while any(_has_matchers(step.occupants) for step in self._in_flight):
            self._deliver(self._in_flight[0], jax.device_get(self._in_flight[0].output))
        if self._queue.closed is not None:
            return 0
        if self._has_aborted:
            self._has_aborted = False
            self._queue.drop_ended()
            if self._batch is not None:
                self._batch.drop_ended()
        self._vacate_slots()
        self._fill_slots()
        self._release_slots()
        if not self._count_occupied():
            return 0
        masks = self._row_masks()
        if self._queue.closed is not None:  # by a matcher
            return 0
        self._dispatch_step(masks)
        # The masks of the next step need what this one drafts.
        return 0 if _has_matchers(self._occupants) else 1

    @delayed_interrupts()
    def _deliver(self, step: DispatchedStep, output: StepOutput) -> None:
        """Gives the requests what a step committed, and empties slots of those that ended.

        Args:
          step: the oldest one. A signal's handler may have read it since, or closed the engine.
          output: of that step, as NumPy arrays.
        """
        occupants = step.occupants
        for slot, request in enumerate(occupants):
            # What it raises takes nothing from the others: they read the step in the next round.
            occupants[slot] = None
            if request is None or request.finish_reason is not None:
                continue
            with self._calling_user_code():
                request.add(output, slot)
            # The device has ended it, too. A stop string is known to the host alone.
            is_here = self._occupants[slot] is request
            if is_here and output.finish[slot] != 0 and request.finish_reason is not None:
                self._occupants[slot] = None
        if self._in_flight and self._in_flight[0] is step:
            self._in_flight.popleft()

    def _oldest_step(self, num_unread: int) -> DispatchedStep | None:
        """Returns the oldest step, if more are unread than may be."""
        steps = tuple(self._in_flight)
        return steps[0] if len(steps) > num_unread else None

    @contextlib.contextmanager
    def _calling_user_code(self) -> Iterator[None]:
        """Refuses rounds in a block that calls tokenizers or matchers: they would begin in it."""
        before, self._in_user_code = self._in_user_code, True
        try:
            yield
        finally:
            self._in_user_code = before

    def _count_occupied(self) -> int:
        return sum(request is not None for request in self._occupants)

    def _is_busy(self) -> bool:
        """Whether a request is left that has not ended."""
        return any(True for _ in self._unfinished()) or self.num_waiting > 0

    def _vacate_slots(self) -> None:
        """Empties slots of requests that the host ended, and that steps not yet read will end."""
        for slot, request in enumerate(self._occupants):
            if request is None:
                continue
            num_steps = sum(step.occupants[slot] is request for step in self._in_flight)
            if request.finish_reason is not None:
                self._to_release.add(slot)
            elif request.num_remaining > num_steps:
                continue
            self._occupants[slot] = None

    def _fill_slots(self) -> None:
        """Reads chunks of waiting prompts, and admits requests whose prompt is read.

        Two chunks, and two for every empty slot after the first, keep more slots busy than one. No
        more than prompts wait: a single one is no reason to keep those in the slots waiting for two
        chunks. A batch of prompts counts by its tokens.
        """
        empty = [slot for slot, request in enumerate(self._occupants) if request is None]
        num_chunks = max(1, min(2 * max(1, len(empty)), self._queue.num_groups()))
        while groups := self._queue.first(self._programs.prefill_depth):
            if empty and groups[0].is_read():
                slot = empty.pop(0)
                self._slots, request = groups[0].put(self._programs, self._slots, slot)
                with self._queue.lock:
                    groups[0].waiting.popleft()
                    self._occupants[slot] = request
                self._to_release.discard(slot)
                continue
            unread = [group for group in groups if not group.is_read()]
            if not unread or num_chunks <= 0:
                return
            most = num_chunks if empty else None
            if self._batch is not None and self._batch.read(unread, most):
                num_chunks -= self._batch.num_chunks
            elif empty or len(groups) - len(unread) < _MAX_READY:
                if self._batch is not None:
                    self._batch.detach_group(unread[0])
                num_chunks -= unread[0].read_chunk(self._programs)
            else:
                return

    def _release_slots(self) -> None:
        """Says to the device which slots no request is in any more."""
        if self._to_release:
            rows = np.zeros(len(self._occupants), bool)
            rows[list(self._to_release)] = True
            self._slots = self._programs.release(self._slots, rows)
            self._to_release.clear()

    def _row_masks(self) -> Any:
        """Returns the masks of the next step's rows, on the device; None if there are never any."""
        if not _has_matchers(self._occupants):
            return self._all_allowed_on_device
        masks = self._all_allowed.copy()
        for rows, request in zip(masks, self._occupants, strict=True):
            if request is not None:
                with self._calling_user_code():
                    request.fill_masks(rows)
        return jax.device_put(masks)

    def _dispatch_step(self, masks: Any) -> None:
        self._slots, output = self._programs.step(self._slots, masks)
        self._in_flight.append(DispatchedStep(output, list(self._occupants)))
        self.num_steps += 1
        self.num_occupied += self._count_occupied()
        for leaf in jax.tree.leaves(output):
            leaf.copy_to_host_async()


def _has_matchers(occupants: Iterable[Request | None]) -> bool:
    return any(request is not None and request.has_matcher for request in occupants)
