"""Requests that wait for slots: the queue and its entries.

    WaitingQueue      entries, first come, first served
    QueueEntry        requests that wait, and the row that their tokens are read into:
      PromptGroup       requests of one prompt, which is read once for all of them
      ParkedRequest     a request that was preempted

    slot       one of the B places of the compiled step
    row        the caches of one prompt, while the models read it
    place      one of the N rows of a `prefill_batch.PrefillBatch`
    read       prefilled: a program has put the tokens into the row's caches
    program    a compiled function of `Programs`

An entry is read chunk by chunk, if it has tokens to read. Then its requests go into slots. While a
prompt has a place in the batch, its row is there, and the entry has no row of its own.
"""

import abc
import itertools
import queue
import threading
from collections import deque
from collections.abc import Iterable, Mapping

import jax
import numpy as np

from specjax.decode.capacity import pad_prompt
from specjax.decode.state import DecodeState
from specjax.engine.programs import Programs, empty_chunk
from specjax.engine.request import Request
from specjax.engine.slots import PromptRow
from specjax.engine.submission import CheckedRequest

__all__ = ["ParkedRequest", "PromptGroup", "QueueEntry", "WaitingQueue"]


class QueueEntry(abc.ABC):
    """Requests that wait for slots, and the row that their tokens are read into.

    Args:
      requests: the requests.

    Attributes:
      waiting: the requests without a slot.
      row: the models' state of the tokens read so far; None before, and while a batch holds it.
      place: index of its row in the `PrefillBatch`, i32; None while the row is its own, or absent.
      num_read: how many tokens programs have read. The padding of a last chunk counts, that of a
        last piece does not.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        self.waiting = deque(requests)
        self.row: PromptRow | None = None
        self.place: np.integer | None = None
        self.num_read = 0
        # Tokens that the row has room for, one of `Programs.row_lengths`; 0 before the row is made.
        self._row_length = 0

    @property
    @abc.abstractmethod
    def token_ids(self) -> np.ndarray:
        """All tokens of the entry, i32[L]."""

    @property
    def unread(self) -> np.ndarray:
        """Tokens that are left to read: all but the last, which the first step feeds."""
        return self.token_ids[self.num_read : -1]

    def is_read(self) -> bool:
        """Returns whether the entry has a row, its own or a place, with all tokens but the last."""
        return (self.row is not None or self.place is not None) and not self.unread.size

    def next_chunk(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the next tokens and their positions, two i32[1, size], padded with 0 and -1."""
        chunk = self.unread[:size]
        token_ids, positions = empty_chunk(1, size)
        token_ids[0, : chunk.size] = chunk
        positions[0, : chunk.size] = self.num_read + np.arange(chunk.size)
        return token_ids, positions

    def read_chunk(self, programs: Programs) -> bool:
        """Reads the next tokens into the row; returns whether a token was unread.

        The row is made, or grown, in any case: a prompt of one token needs a row, too.
        """
        self._grow_row(programs)
        if not self.unread.size:
            return False
        self.row = programs.prefill_chunk(self.row, *self.next_chunk(programs.chunk_size))
        self.num_read += programs.chunk_size
        return True

    def _grow_row(self, programs: Programs) -> None:
        """Makes or grows the row to the shortest of `row_lengths` that holds the next chunk."""
        num_tokens = min(self.num_read + programs.chunk_size, self.token_ids.size - 1)
        length = next(length for length in programs.row_lengths if length >= num_tokens)
        if self.row is None:
            self.attach_row(programs.new_row(max_length=length), length)
        elif self._row_length < length:
            self.attach_row(programs.grow_row(self.row, max_length=length), length)

    def attach_row(self, row: PromptRow, length: int) -> None:
        """Sets the row, which has room for `length` tokens."""
        self.row, self._row_length, self.place = row, length, None

    @abc.abstractmethod
    def admit(self, programs: Programs, slots: DecodeState, slot: int) -> DecodeState:
        """Returns the slots with the first waiting request in one of them.

        The request still waits: `WaitingQueue.pop` takes it out of the queue.
        """

    @property
    def arrays(self) -> object:
        """The entry's device arrays, a pytree; the engine deletes them when it closes."""
        return self.row


class PromptGroup(QueueEntry):
    """Requests of one prompt.

    Args:
      checked: the submission that all of them came from.
      samples: the requests, and the sample index of each: it is folded into the request's key, so
        that samples of one prompt differ. -1 folds nothing.
    """

    def __init__(self, checked: CheckedRequest, samples: Mapping[Request, int]) -> None:
        super().__init__(samples)
        self._checked, self._samples = checked, samples

    @property
    def token_ids(self) -> np.ndarray:
        """The prompt, i32[L]."""
        return self._checked.token_ids

    def admit(self, programs: Programs, slots: DecodeState, slot: int) -> DecodeState:
        """Returns the slots with the first waiting request in one of them."""
        sample = np.int32(self._samples[self.waiting[0]])
        prompt = pad_prompt(self.token_ids[None], programs.row_lengths[-1])
        settings = self._checked.settings._replace(sample=sample)
        place = () if self.place is None else (self.place,)
        return programs.admit(slots, self.row, np.int32(slot), prompt, settings, *place)


class ParkedRequest(QueueEntry):
    """A request that was taken out of its slot.

    Args:
      request: the request.
      parked: its state, a batch of one.
      drops_cache: whether the target's cache is dropped, and computed again from its tokens.
    """

    def __init__(self, request: Request, parked: DecodeState, drops_cache: bool) -> None:
        super().__init__([request])
        self._parked = parked._replace(target_cache=None)
        self._token_ids: np.ndarray | None = None
        if not drops_cache:
            self.row = PromptRow(parked.target_cache, None)
            self._token_ids = np.zeros(0, np.int32)

    @property
    def token_ids(self) -> np.ndarray:
        """The committed tokens i32[L] that the target reads again; empty if its cache was kept.

        The host may not know them yet. The first access then blocks until the request's last step
        is computed.
        """
        if self._token_ids is None:
            token_ids, lengths = jax.device_get((self._parked.token_ids, self._parked.lengths))
            self._token_ids = token_ids[0, : int(lengths[0])]
        return self._token_ids

    def read_chunk(self, programs: Programs) -> bool:
        """Reads the next tokens by the target alone; returns whether a token was unread."""
        return super().read_chunk(programs.of_target())

    def admit(self, programs: Programs, slots: DecodeState, slot: int) -> DecodeState:
        """Returns the slots with the request in one of them."""
        assert self.row is not None
        parked = self._parked._replace(target_cache=self.row.target_cache)
        return programs.resume(slots, parked, np.int32(slot))

    @property
    def arrays(self) -> object:
        """The entry's device arrays, a pytree; the engine deletes them when it closes."""
        return self._parked, self.row


class WaitingQueue:
    """Entries that wait. Any thread may put one in and count their requests.

    Args:
      max_waiting: most requests that wait.

    Attributes:
      lock: held while an entry or the order of entries changes. The lock is reentrant, because
        methods that take it call each other.
      closed_reason: a sentence why the engine is closed and nothing may be put in, or None.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._entries: deque[QueueEntry] = deque()
        self.lock = threading.RLock()
        self.closed_reason: str | None = None

    def check_open(self) -> None:
        """Raises RuntimeError if the queue is closed."""
        if self.closed_reason is not None:
            raise RuntimeError(self.closed_reason)

    def close(self, why: str) -> list[Request]:
        """Closes the queue, and returns the requests that wait in it."""
        with self.lock:
            self.closed_reason, waiting = why, self.waiting()
            self._entries.clear()
        return waiting

    def num_entries(self) -> int:
        """Returns the number of entries."""
        return len(self._entries)

    def waiting(self) -> list[Request]:
        """Returns the requests that wait and have not ended."""
        with self.lock:
            waiting = (request for entry in self._entries for request in entry.waiting)
            return [request for request in waiting if request.finish_reason is None]

    def check_room(self, count: int) -> None:
        """Checks that `count` more requests may be put in.

        Raises:
          queue.Full: if too many would wait.
          RuntimeError: if the queue is closed.
        """
        self.check_open()
        num_waiting = len(self.waiting())
        if num_waiting + count > self._max_waiting:
            raise queue.Full(
                f"{num_waiting} requests wait, and {count} more are submitted; max_waiting is "
                f"{self._max_waiting}. Run the engine, or wait for requests to end."
            )

    def put(self, entry: QueueEntry) -> None:
        """Puts an entry at the end of the queue; raises the errors of `check_room`."""
        with self.lock:
            self.check_room(len(entry.waiting))
            self._entries.append(entry)

    def put_first(self, entry: QueueEntry) -> None:
        """Puts an entry before all others, however many requests wait.

        Whether the queue is closed is not checked: the request comes from a slot, and a closed
        engine has none in its slots.
        """
        with self.lock:
            self._entries.appendleft(entry)

    def arrays(self) -> list[object]:
        """Returns the device arrays of each entry, which the engine deletes when it closes."""
        with self.lock:
            return [entry.arrays for entry in self._entries]

    def drop_ended(self) -> None:
        """Removes ended requests, then empty entries with their rows."""
        with self.lock:
            for entry in self._entries:
                entry.waiting = deque(x for x in entry.waiting if x.finish_reason is None)
            self._entries = deque(entry for entry in self._entries if entry.waiting)

    def first(self, number: int) -> list[QueueEntry]:
        """Returns the first entries, at most `number`."""
        with self.lock:
            return list(itertools.islice(self._entries, number))

    def pop(self) -> Request:
        """Removes the first request and returns it; an entry is removed with its last request."""
        with self.lock:
            request = self._entries[0].waiting.popleft()
            if not self._entries[0].waiting:
                self._entries.popleft()
            return request
