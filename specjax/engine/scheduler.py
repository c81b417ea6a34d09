"""The host's part of an engine: which request is in which slot, and the order of a step.

A round is one call of `take_step`, or of `take_step_async`:

    dispatch     drop aborted requests -> vacate slots -> fill slots -> release slots
                 -> fill masks -> dispatch a step of the smallest size that holds all requests
    deliver      give each request the tokens of the step before, while the device runs this one;
                 vacate the slots of those that ended with it

    vacate       the host takes a request out of its slot, which a new one may have
    release      the device stops decoding in a slot that got no new request

The host learns of an end one step late, except by length, which it can count. A slot that ends by
length is filled again before its last step is delivered. The masks of a matcher need the drafts of
the step before. So while a request with a matcher is in a slot, each step is delivered at once.

Signals wait while slots and requests change. An error of a tokenizer or a matcher ends its request
alone. An error after which arrays of the device are lost closes the engine.

There are two locks: `_step_lock` for the thread that steps or preempts, and `queue.lock` for the
order of the queue. A thread that needs both takes `_step_lock` first.
"""

import asyncio
import contextlib
import importlib
import math
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import NamedTuple

import jax
import numpy as np

from specjax.decode.state import DecodeState
from specjax.engine.prefill_batch import PrefillBatch
from specjax.engine.programs import Programs
from specjax.engine.queue import ParkedRequest, QueueEntry, WaitingQueue
from specjax.engine.request import PROGRAM_EXITS, FinishReason, Request, describe
from specjax.engine.slots import StepOutput, read_output, without_masks
from specjax.engine.step_sizes import choose_slots

# While no slot is empty, reading is urgent if fewer entries than this are ready for a slot.
_MIN_READY = 2
# The functions of `signal` make an enum of each result, which takes ten times as long. Not
# `import _signal`, for which mypy finds no types.
_signal = importlib.import_module("_signal")
_SIGNALS = tuple(map(int, signal.valid_signals()))


@contextlib.contextmanager
def delayed_interrupts() -> Iterator[None]:
    """Defers signals with a Python handler to the end of a block, in the main thread.

    Python runs handlers in no other thread. The block should be short.

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
    handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
    received: dict[int, FrameType | None] = {}
    is_over = False

    def delay(number: int, frame: FrameType | None) -> None:
        if is_over:  # The block has ended, but this signal's own handler is not restored yet.
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
        # The stack restores all handlers, then calls those of received signals, whatever raises.
        with contextlib.ExitStack() as calls:
            for number, frame in received.items():
                calls.callback(handlers[number], number, frame)
            for number, handler in handlers.items():
                _signal.signal(number, handler)


class DispatchedStep(NamedTuple):
    """A step that was dispatched, and for each row the request that has not got its tokens.

    Attributes:
      output: on the device, with n rows.
      occupants: n requests; None where a slot was empty, and once a request has its tokens.
    """

    output: StepOutput
    occupants: list[Request | None]


class Scheduler:
    """Slots, their requests, and the queue.

    Args:
      programs: of the engine.
      slots: empty ones.
      all_allowed: from `engine.all_allowed_masks`, u32[B, K + 1, ceil(V / 32)]; None if no request
        may have a matcher.
      max_waiting: most requests that wait.

    Attributes:
      queue: the requests without a slot.
      num_steps: steps dispatched.
      num_occupied: slots with a request in them, summed over these steps.
    """

    def __init__(
        self,
        programs: Programs,
        slots: DecodeState,
        all_allowed: np.ndarray | None,
        max_waiting: int,
    ) -> None:
        self._programs, self._slots = programs, slots
        self._all_allowed = all_allowed
        self._all_allowed_on_device = jax.device_put(all_allowed)
        self._occupants: list[Request | None] = [None] * programs.num_slots
        self.queue = WaitingQueue(max_waiting)
        self._batch = PrefillBatch(programs)
        # Steps that were dispatched and not delivered to all of their requests, the oldest first.
        self._in_flight: deque[DispatchedStep] = deque()
        # Vacated slots in which the device still decodes.
        self._to_release: set[int] = set()
        self._has_aborted = False
        # Held by the thread that steps or preempts.
        self._step_lock = threading.RLock()
        self._in_user_code = False
        self._shared_step: asyncio.Future[bool] | None = None
        self.num_steps = self.num_occupied = 0

    # Calls of the engine ------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Requests that were put in a slot, have not ended, and do not wait for another."""
        # A parked request may still have a step in flight.
        return len(set(self._unfinished()) - set(self.queue.waiting()))

    def _unfinished(self) -> Iterator[Request]:
        """Returns requests that had a slot and have not ended; some twice."""
        each = (self._occupants, *(step.occupants for step in tuple(self._in_flight)))
        requests = (one for occupants in each for one in occupants if one is not None)
        return (request for request in requests if request.finish_reason is None)

    def _end_round(self) -> bool:
        """Returns whether a request has not ended; if all have, drops what the queue still holds.

        A preempted request may have ended by a step that was in flight.
        """
        is_busy = any(True for _ in self._unfinished()) or self.queue.has_waiting()
        if not is_busy:
            self._drop_ended()
        return is_busy

    @delayed_interrupts()
    def abort(
        self, request: Request, reason: str = FinishReason.ABORTED, error: str | None = None
    ) -> None:
        """Ends a request; the next round drops its caches or vacates its slot."""
        request.end(reason, error)
        self._has_aborted = True

    def preempt(self, request: Request, drops_cache: bool) -> bool:
        """Takes a request out of its slot and puts it first in the queue, with its state.

        Args:
          request: any of the engine's.
          drops_cache: whether the target's cache is dropped, and computed again.

        Returns:
          Whether the request was in a slot.
        """
        with self._step_lock, self._closing_on_loss(), delayed_interrupts():
            if request not in self._occupants or request.finish_reason is not None:
                return False
            slot = self._occupants.index(request)
            parked = self._programs.park(self._slots, np.int32(slot))
            self.queue.put_first(ParkedRequest(request, parked, drops_cache))
            self._occupants[slot] = None
            self._to_release.add(slot)
            return True

    def take_step(self) -> bool:
        """Takes a step, and returns whether a request has not ended.

        Raises:
          RuntimeError: while coroutines wait for a step.
        """
        with self._step_lock, self._closing_on_loss():
            if self._is_step_shared():
                raise RuntimeError(
                    "Coroutines wait for a step of this engine; iterate over requests with "
                    "`async for` until they have it."
                )
            max_in_flight = self._dispatch_next()
            while (step := self._oldest_step(max_in_flight)) is not None:
                self._deliver(step, read_output(step.output))
            return self._end_round()

    async def take_step_async(self) -> bool:
        """Takes a step that coroutines share, and lets others run while the device does."""

        async def take() -> bool:
            with self._closing_on_loss():
                with self._step_lock:
                    max_in_flight = self._dispatch_next()
                while (step := self._oldest_step(max_in_flight)) is not None:
                    output = await asyncio.to_thread(read_output, step.output)
                    with self._step_lock:
                        self._deliver(step, output)
                with self._step_lock:
                    return self._end_round()

        if not self._is_step_shared():
            self._shared_step = asyncio.ensure_future(take())
        assert self._shared_step is not None
        if self._shared_step.get_loop() is not asyncio.get_running_loop():
            raise RuntimeError("Coroutines of another event loop wait for a step of this engine.")
        return await asyncio.shield(self._shared_step)

    def _is_step_shared(self) -> bool:
        """True while a shared step is pending on a live event loop."""
        step = self._shared_step
        return step is not None and not step.done() and not step.get_loop().is_closed()

    # A step -------------------------------------------------------------------------------------

    @delayed_interrupts()
    def _dispatch_next(self) -> int:
        """Fills slots and dispatches a step; returns how many steps may stay in flight."""
        if self._in_user_code:
            raise RuntimeError("A tokenizer or a matcher cannot run the engine that calls it.")
        self._deliver_masked_steps()
        if self.queue.closed_reason is not None:
            return 0
        if self._has_aborted:
            self._drop_ended()
        self._vacate_slots()
        self._fill_slots()
        self._release_slots()
        if not self._count_occupied():
            return 0
        masks = self._fill_masks()
        if self.queue.closed_reason is not None:  # A matcher closed the engine.
            return 0
        self._dispatch_step(masks)
        return 0 if _has_matchers(self._occupants) else 1

    def _deliver_masked_steps(self) -> None:
        """Delivers steps with matchers that an interrupted round left in flight."""
        while any(_has_matchers(step.occupants) for step in self._in_flight):
            self._deliver(self._in_flight[0], read_output(self._in_flight[0].output))

    @delayed_interrupts()
    def _drop_ended(self) -> None:
        """Drops ended requests of the queue and of the batch of prompts, with their caches."""
        self._has_aborted = False
        self.queue.drop_ended()
        self._batch.drop_ended()

    def _vacate_slots(self) -> None:
        """Takes requests out of their slots if they ended, or will end by the steps in flight."""
        for slot, request in enumerate(self._occupants):
            if request is None:
                continue
            num_steps = sum(request in step.occupants for step in self._in_flight)
            if request.finish_reason is not None:
                self._to_release.add(slot)
            elif request.num_remaining > num_steps:  # A step gives at least one token.
                continue
            # Otherwise it ends by length, and the device ends it itself: nothing to release.
            self._occupants[slot] = None

    def _fill_slots(self) -> None:
        """Prefills waiting prompts chunk by chunk, and admits requests whose prompt is read.

            num_chunks = min(2 * empty slots, entries of the queue), at least 1

        Two chunks for an empty slot keep more slots busy than one. But a single entry gets one
        chunk, so that the slots do not wait for two. While no slot is empty, the first number is
        `Programs.chunks_in_advance`.

        Each turn of the loop admits a request, or reads a chunk or a batch, or ends the loop.
        """
        empty = [slot for slot, request in enumerate(self._occupants) if request is None]
        budget = 2 * len(empty) or self._programs.chunks_in_advance
        num_chunks = max(1, min(budget, self.queue.num_entries()))
        # `prefill_depth` entries may be read before a slot is empty.
        while entries := self.queue.first(self._programs.prefill_depth):
            if empty and entries[0].is_read():
                self._admit(entries[0], empty.pop(0))
                continue
            unread = [entry for entry in entries if not entry.is_read()]
            num_ready = len(entries) - len(unread)
            if not unread or num_chunks <= 0:
                return
            is_urgent = bool(empty) or num_ready < _MIN_READY
            # An empty slot waits for the first entry: a batch has to read it within `num_chunks`.
            # Otherwise no slot waits.
            max_chunks = num_chunks if empty else math.inf
            if cost := self._batch.read(unread, max_chunks, is_urgent):
                num_chunks -= cost
            elif is_urgent:
                # Read by itself: out of the batch, with caches of its own. A prompt of one token
                # costs 0 chunks.
                self._batch.detach(unread[0])
                num_chunks -= unread[0].read_chunk(self._programs)
            else:
                return

    def _admit(self, entry: QueueEntry, slot: int) -> None:
        """Puts the first request of `entry`, the queue's first entry, into a slot.

        The queue is locked while the request leaves it: in other threads it waits until it has a
        slot.
        """
        self._slots = self._batch.admit(self._slots, entry, slot)
        with self.queue.lock:
            self._occupants[slot] = self.queue.pop()
        self._to_release.discard(slot)

    def _release_slots(self) -> None:
        """Stops decoding on the device in vacated slots."""
        if self._to_release:
            is_released = np.zeros(len(self._occupants), bool)
            is_released[list(self._to_release)] = True
            self._slots = self._programs.release(self._slots, is_released)
            self._to_release.clear()

    def _fill_masks(self) -> jax.Array | None:
        """Returns the masks of the next step's logits, u32[B, K + 1, ceil(V / 32)].

        None if the engine takes no matchers.
        """
        if self._all_allowed is None or not _has_matchers(self._occupants):
            return self._all_allowed_on_device
        masks = self._all_allowed.copy()
        for masks_of_slot, request in zip(masks, self._occupants, strict=True):
            if request is not None:
                with self._calling_user_code():
                    request.fill_masks(masks_of_slot)
        return jax.device_put(masks)

    def _dispatch_step(self, masks: jax.Array | None) -> None:
        """Dispatches a step of the slots chosen; its output is copied once it is there."""
        chosen = choose_slots(self._occupants, self._programs.step_sizes)
        self._slots, output = self._programs.step(self._slots, masks, chosen)
        occupants = [self._occupants[slot] for slot in chosen]
        self._in_flight.append(DispatchedStep(output, occupants))
        self.num_steps += 1
        self.num_occupied += self._count_occupied()
        for leaf in jax.tree.leaves(without_masks(output)):
            leaf.copy_to_host_async()

    @delayed_interrupts()
    def _deliver(self, step: DispatchedStep, output: StepOutput) -> None:
        """Gives requests the tokens of a step, and vacates the slots of those that ended.

        Args:
          step: the oldest one. A signal's handler may have delivered it, or closed the engine.
          output: of that step, as NumPy arrays.
        """
        occupants = step.occupants
        for row, request in enumerate(occupants):
            # Cleared before `add`: if that raises, the others get their tokens in the next round.
            occupants[row] = None
            if request is None or request.finish_reason is not None:
                continue
            with self._calling_user_code():
                request.add(output, row)
            # Vacated here only if the device has stopped in the slot, too. After a stop string it
            # decodes on: `_vacate_slots` then vacates the slot and has it released.
            has_stopped = output.finish[row] != 0 and request.finish_reason is not None
            if has_stopped and request in self._occupants:
                self._occupants[self._occupants.index(request)] = None
        if self._in_flight and self._in_flight[0] is step:
            self._in_flight.popleft()

    def _oldest_step(self, max_in_flight: int) -> DispatchedStep | None:
        """Returns the oldest step in flight if there are more than `max_in_flight`, else None."""
        steps = tuple(self._in_flight)
        return steps[0] if len(steps) > max_in_flight else None

    def _count_occupied(self) -> int:
        return sum(request is not None for request in self._occupants)

    @contextlib.contextmanager
    def _calling_user_code(self) -> Iterator[None]:
        """Marks a block that calls tokenizers or matchers, which may not begin a round."""
        before, self._in_user_code = self._in_user_code, True
        try:
            yield
        finally:
            self._in_user_code = before

    # The end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends all requests, and frees the device's memory for them."""
        with self._step_lock:
            if self.queue.closed_reason is None:
                self._close(FinishReason.ABORTED, "the engine is closed; make another one.")

    def fail(self, error: BaseException) -> None:
        """Closes the engine as broken by an error of a step, unless it is closed."""
        with self._step_lock:
            if self.queue.closed_reason is None:
                why = f"the engine is broken: a step raised {describe(error)}; make another one."
                self._close(FinishReason.ENGINE_ERROR, why, error)

    @delayed_interrupts()
    def _close(self, reason: str, why: str, cause: BaseException | None = None) -> None:
        """Closes the queue, ends all requests, and deletes the device's arrays.

        Args:
          reason: a `FinishReason`, of the requests.
          why: a sentence, the `closed_reason` of the queue, and with a cause the requests' `error`.
          cause: the error that closes the engine, or None.
        """
        arrays = self._arrays()
        with self._calling_user_code():
            for request in (*self._unfinished(), *self.queue.close(why, cause)):
                request.end(reason, None if cause is None else why)
        self._occupants = [None] * len(self._occupants)
        self._in_flight.clear()
        for leaf in jax.tree.leaves(arrays):
            leaf.delete()

    def _arrays(self) -> object:
        """Returns the device's arrays of requests in slots, in the batch and in the queue."""
        return self._slots, self._batch.arrays, self.queue.arrays()

    @contextlib.contextmanager
    def _closing_on_loss(self) -> Iterator[None]:
        """Closes the engine if an error took the device's arrays of requests.

        A program consumes its donated inputs. An error before that changes nothing: the inputs are
        still valid, and the next round continues from them.
        """
        try:
            yield
        except BaseException as error:
            with self._step_lock:
                if self.queue.closed_reason is None and not self._is_intact():
                    why = (
                        "the engine lost what the device held for its requests, when it raised "
                        f"{describe(error)}; make another one."
                    )
                    self._close(FinishReason.ENGINE_ERROR, why, error)
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


def _has_matchers(occupants: Iterable[Request | None]) -> bool:
    return any(request is not None and request.has_matcher for request in occupants)
