"""Requests that wait for slots: groups of one prompt, preempted ones, and the queue of both."""

import queue
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeGuard

import jax
import numpy as np

from specjax.decode.state import DecodeState
from specjax.engine.programs import BatchPrograms, Programs
from specjax.engine.request import Request
from specjax.engine.slots import PromptRow, RequestSettings
from specjax.engine.submission import CheckedRequest

__all__ = [
    "ParkedRequest",
    "PrefillBatch",
    "PromptGroup",
    "QueueEntry",
    "WaitingQueue",
    "make_group",
]


class PromptGroup:
    """Requests of one prompt.

    Args:
      prompt: i32[1, S], padded.
      num_tokens: of the prompt.
      waiting: the requests and their settings.

    Attributes:
      waiting: the requests that are in no slot yet.
      row: what the models know of the prompt; None before it is read, and while a batch has it.
    """

    def __init__(
        self,
        prompt: np.ndarray,
        num_tokens: int,
        waiting: dict[Request, RequestSettings],
    ) -> None:
        self.waiting = deque(waiting)
        self._settings = waiting
        self._prompt, self._num_tokens = prompt, num_tokens
        self.row: PromptRow | None = None
        self._num_read = self._row_length = 0

    def is_read(self) -> bool:
        """Returns whether the models have read all but the prompt's last token."""
        return self.row is not None and self._num_read >= self._num_tokens - 1

    def read_chunk(self, programs: Programs) -> bool:
        """Reads the next tokens; returns whether the models computed something."""
        end = self._num_tokens - 1
        row = self._grow_row(programs, min(self._num_read + programs.chunk_size, end))
        if not self.num_unread:
            return False
        self.row = programs.prefill_chunk(row, *self.next_chunk(programs.chunk_size))
        self.count_read(programs.chunk_size)
        return True

    @property
    def num_unread(self) -> int:
        """Tokens that the models have not read: all but the prompt's last."""
        return max(0, self._num_tokens - 1 - self._num_read)

    def next_chunk(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the next tokens and their positions, two i32[1, C]; -1 after the last."""
        return _next_chunk(self._prompt, self._num_read, self._num_tokens - 1, size)

    def count_read(self, size: int) -> None:
        """Counts a chunk as read, once a program has it."""
        self._num_read += size

    def fits(self, programs: Programs) -> bool:
        """Returns whether the whole prompt has room in a row of the least length."""
        return self._num_tokens - 1 <= programs.row_lengths[0]

    @property
    def arrays(self) -> Any:
        """Returns the arrays that this object holds on the device."""
        return self.row

    def attach_row(self, row: PromptRow | None, length: int) -> None:
        """Sets the row; None while a batch has it.

        Args:
          row: of this length.
          length: in tokens.
        """
        self.row, self._row_length = row, length

    def _grow_row(self, programs: Programs, num_tokens: int) -> PromptRow:
        """Returns the row, with room for the tokens and perhaps for as many again."""
        length = next(length for length in programs.row_lengths if length >= num_tokens)
        if self.row is None:
            self.row, self._row_length = programs.new_row(max_length=length), length
        elif self._row_length < length:
            self.row, self._row_length = programs.grow_row(self.row, max_length=length), length
        return self.row

    def put(self, programs: Programs, slots: DecodeState, slot: int) -> tuple[DecodeState, Request]:
        """Returns the slots with the first waiting request in one of them, and the request."""
        request = self.waiting[0]
        settings = self._settings[request]
        assert self.row is not None
        slots = programs.admit(slots, self.row, np.int32(slot), self._prompt, settings)
        return slots, request


def make_group(
    checked: CheckedRequest, requests: list[Request], *, is_sampled: bool
) -> PromptGroup:
    """Returns the group of one submission's requests.

    Args:
      checked: the submission.
      requests: one, or its samples.
      is_sampled: whether each has a key of its own, with its index folded in.
    """
    each = [np.int32(index if is_sampled else -1) for index in range(len(requests))]
    settings = (checked.settings._replace(sample=sample) for sample in each)
    waiting = dict(zip(requests, settings, strict=True))
    return PromptGroup(checked.padded, checked.token_ids.size, waiting)


class ParkedRequest:
    """A request that was taken out of its slot.

    Args:
      request: the request.
      parked: its state, a batch of one.
      drops_cache: whether the target's cache is dropped, and computed again from its tokens.

    Attributes:
      waiting: the request, until it is in a slot.
      row: what the target knows of the tokens that are computed again, or None.
    """

    def __init__(self, request: Request, parked: DecodeState, drops_cache: bool) -> None:
        self.waiting = deque([request])
        self._parked = parked._replace(target_cache=None) if drops_cache else parked
        self.row: PromptRow | None = None
        self._text: tuple[Any, int] | None = None
        self._num_read = 0

    def is_read(self) -> bool:
        """Returns whether the target has read all but the last committed token."""
        if self._parked.target_cache is not None:
            return True
        return self.row is not None and self._num_read >= self._committed()[1] - 1

    def read_chunk(self, programs: Programs) -> bool:
        """Reads the next tokens; returns whether the target computed something."""
        if self.row is None:
            self.row = programs.new_target_row()
        token_ids, length = self._committed()
        if self._num_read >= length - 1:
            return False
        chunk = _next_chunk(token_ids, self._num_read, length - 1, programs.chunk_size)
        self.row = programs.prefill_target_chunk(self.row, *chunk)
        self._num_read += programs.chunk_size
        return True

    @property
    def arrays(self) -> Any:
        """Returns the arrays that this object holds on the device."""
        return self._parked, self.row

    def _committed(self) -> tuple[Any, int]:
        """Returns the tokens i32[1, S] that the device has committed, which the host may not know.

        It waits for the last step that was dispatched before the request was parked.
        """
        if self._text is None:
            token_ids, lengths = jax.device_get((self._parked.token_ids, self._parked.lengths))
            self._text = np.maximum(token_ids, 0), int(lengths[0])
        return self._text

    def put(self, programs: Programs, slots: DecodeState, slot: int) -> tuple[DecodeState, Request]:
        """Returns the slots with the request in one of them, and the request."""
        parked = self._parked
        if self.row is not None:
            parked = parked._replace(target_cache=self.row.target_cache)
        return programs.resume(slots, parked, np.int32(slot)), self.waiting[0]


QueueEntry = PromptGroup | ParkedRequest


class PrefillBatch:
    """Prompts that are read together, as the rows of a batch.

    Args:
      programs: of the engine.
      batch: `programs.batch`.

    Attributes:
      num_chunks: how many chunks of one prompt have as many tokens.
    """

    def __init__(self, programs: Programs, batch: BatchPrograms) -> None:
        self._programs, self._batch = programs, batch
        self._rows = batch.new_rows()
        self._empty_row = programs.new_row(max_length=programs.row_lengths[0])
        self.num_chunks = -(-batch.size * batch.num_tokens // programs.chunk_size)
        self._groups: dict[int, PromptGroup] = {}

    def read(self, unread: Sequence[QueueEntry], max_chunks: int | None) -> bool:
        """Reads the next tokens of as many prompts as the batch has rows; returns whether it did.

        Args:
          unread: what is to be read, the first first.
          max_chunks: in which the first is to be read, as a slot is empty; or None.
        """
        first = unread[0]
        if not self._takes(first):
            return False
        num_readings = -(-first.num_unread // self._batch.num_tokens)
        if max_chunks is not None and num_readings * self.num_chunks > max_chunks:
            return False
        size, lent = self._batch.size, self._groups.values()
        others = [group for group in unread if self._takes(group) and group not in lent]
        free = [index for index in range(size) if index not in self._groups]
        if len(others) < len(free):
            return False
        for index, group in zip(free, others, strict=False):
            row = self._empty_row if group.row is None else group.row
            self._rows = self._batch.put(self._rows, row, np.int32(index))
            group.attach_row(None, 0)
            self._groups[index] = group
        chunks = [self._groups[i].next_chunk(self._batch.num_tokens) for i in range(size)]
        token_ids, positions = map(np.concatenate, zip(*chunks, strict=True))
        self._rows = self._batch.prefill(self._rows, token_ids, positions)
        for group in lent:
            group.count_read(self._batch.num_tokens)
        for group in tuple(lent):
            if not group.num_unread:
                self.detach_group(group)
        return True

    @property
    def arrays(self) -> Any:
        """Returns the arrays that this object holds on the device."""
        return self._rows, self._empty_row

    def drop_ended(self) -> None:
        """Lets prompts go that no request waits for any more."""
        self._groups = {i: group for i, group in self._groups.items() if group.waiting}

    def _takes(self, group: QueueEntry) -> TypeGuard[PromptGroup]:
        """Returns whether something of a prompt is to be read that has room in a row."""
        return (
            isinstance(group, PromptGroup) and group.num_unread > 0 and group.fits(self._programs)
        )

    def detach_group(self, group: QueueEntry) -> None:
        """Gives a prompt its row, if it is one of the batch's; it is read alone from now on."""
        index = next((i for i, other in self._groups.items() if other is group), None)
        if index is not None:
            row = self._batch.take(self._rows, np.int32(index))
            self._groups.pop(index).attach_row(row, self._programs.row_lengths[0])


def _next_chunk(
    token_ids: np.ndarray, begin: int, end: int, chunk_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens and positions from `begin` on and before `end`, two i32[1, C]."""
    size = max(0, min(chunk_size, end - begin))
    ids = np.zeros((1, chunk_size), np.int32)
    positions = np.full_like(ids, -1)
    ids[0, :size] = token_ids[0, begin : begin + size]
    positions[0, :size] = np.arange(begin, begin + size, dtype=np.int32)
    return ids, positions


class WaitingQueue:
    """Groups of requests that wait. Any thread may put one in and count them.

    Args:
      max_waiting: most requests that wait.

    Attributes:
      lock: held while a group or the order of groups changes.
      closed: a sentence that says why nothing may be put in any more, or None.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._groups: deque[QueueEntry] = deque()
        self.lock = threading.Lock()
        self.closed: str | None = None

    def check_open(self) -> None:
        """Raises RuntimeError if the queue is closed."""
        if self.closed is not None:
            raise RuntimeError(self.closed)

    def close(self, why: str) -> list[QueueEntry]:
        """Closes the queue, and returns what waits in it."""
        with self.lock:
            self.closed = why
            groups = list(self._groups)
            self._groups.clear()
        return groups

    def num_groups(self) -> int:
        """Returns how many groups wait, some of which may have ended."""
        return len(self._groups)

    def num_waiting(self) -> int:
        """Returns how many requests wait and have not ended."""
        with self.lock:
            return self._count()

    def _count(self) -> int:
        waiting = (request for group in self._groups for request in group.waiting)
        return sum(request.finish_reason is None for request in waiting)

    def parked(self) -> set[Request]:
        """Returns the requests that had a slot and wait for another."""
        with self.lock:
            groups = [group for group in self._groups if isinstance(group, ParkedRequest)]
            return {request for group in groups for request in group.waiting}

    def check_room(self, count: int) -> None:
        """Checks that more requests may be put in.

        Raises:
          queue.Full: if too many would wait.
          RuntimeError: if the queue is closed.
        """
        with self.lock:
            self._check_room(count)

    def _check_room(self, count: int) -> None:
        self.check_open()
        num_waiting = self._count()
        if num_waiting + count > self._max_waiting:
            raise queue.Full(
                f"{num_waiting} requests wait, and {count} more are submitted; max_waiting is "
                f"{self._max_waiting}. Run the engine, or wait for requests to end."
            )

    def put(self, group: QueueEntry) -> None:
        """Puts requests at the end, as `check_room` allows."""
        with self.lock:
            self._check_room(len(group.waiting))
            self._groups.append(group)

    def put_first(self, group: QueueEntry) -> None:
        """Puts requests before all others, however many wait."""
        with self.lock:
            self._groups.appendleft(group)

    def arrays(self) -> list[Any]:
        """Returns what the device holds for the groups."""
        with self.lock:
            return [group.arrays for group in self._groups]

    def drop_ended(self) -> None:
        """Takes requests that ended out, and groups without others with what was read of them."""
        with self.lock:
            for group in self._groups:
                going = [request for request in group.waiting if request.finish_reason is None]
                group.waiting = deque(going)
            self._groups = deque(group for group in self._groups if group.waiting)

    def first(self, number: int) -> list[QueueEntry]:
        """Returns the first groups that have a request waiting, at most `number`."""
        first: list[QueueEntry] = []
        with self.lock:
            for group in self._groups:
                while group.waiting and group.waiting[0].finish_reason is not None:
                    group.waiting.popleft()
                if group.waiting:
                    first.append(group)
                if len(first) == number:
                    break
            while self._groups and self._groups[0] not in first[:1]:
                self._groups.popleft()
        return first
