"""Requests that wait for slots: the queue, its entries, and the prompts that are read together.

    WaitingQueue      entries, first come, first served
    QueueEntry        requests that wait, and the row that their tokens are read into:
      PromptGroup       requests of one prompt, which is read once for all of them
      ParkedRequest     a request that was preempted
    PrefillBatch      the rows of several prompts, which one program reads together

    slot       one of the B places of the compiled step
    row        the caches of one prompt, while the models read it
    place      one of the N rows of a `PrefillBatch`
    read       prefilled: a program has put the tokens into the row's caches
    program    a compiled function of `Programs`

An entry is read chunk by chunk, if it has tokens to read. Then its requests go into slots. While a
prompt has a place in the batch, its row is there, and the entry has no row of its own.
"""

import abc
import functools
import itertools
import queue
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeGuard

import jax
import numpy as np

from specjax.decode.capacity import pad_prompt
from specjax.decode.state import DecodeState
from specjax.engine.programs import Programs, empty_chunk
from specjax.engine.request import Request
from specjax.engine.slots import PromptRow
from specjax.engine.submission import CheckedRequest

__all__ = ["ParkedRequest", "PrefillBatch", "PromptGroup", "QueueEntry", "WaitingQueue"]


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


class PrefillBatch:
    """Prompts that are read together: N places, each with the row of one prompt.

    Args:
      programs: of the engine. If their `batch` is None, no prompt is read here.
    """

    def __init__(self, programs: Programs) -> None:
        # The prompt in each place; a place without one is free.
        self._groups: dict[int, PromptGroup] = {}
        # The N rows as one `PromptRow`, and an empty row, which is copied into the place of a prompt
        # that has none yet. Pieces need no copy, as `_read_pieces` explains.
        self._rows = self._empty_row = None
        if programs.batch is not None:
            new_row = functools.partial(programs.new_row, max_length=programs.row_lengths[0])
            self._rows = new_row(size=programs.batch.num_rows)
            self._empty_row = None if programs.batch.num_pieces else new_row()

    def read(
        self,
        programs: Programs,
        unread: Sequence[QueueEntry],
        max_chunks: float,
        is_urgent: bool,
    ) -> int:
        """Reads the next tokens of several prompts by one program; returns its cost in chunks.

            cost = ceil(N * piece_size / chunk_size)        1 if prompts are read in pieces

        A program with one piece of each prompt runs if the first entry fits the batch, and if there
        is a prompt for each of the N places. A program with P pieces of any prompts runs if all P
        can be filled, or if the reading is urgent and the first entry fits.

        Args:
          programs: of the engine.
          unread: the entries to read, the first of the queue first.
          max_chunks: the greatest cost of all reads until the first entry is read, for which an
            empty slot waits. Infinity if no slot is empty.
          is_urgent: whether a slot is empty, or fewer than two prompts are ready.

        Returns:
          The cost; 0 if nothing was read.
        """
        if programs.batch is None:
            return 0
        num_rows, piece_size, num_pieces = programs.batch
        # Pieces of later prompts may be read before an entry that is read by itself, if that can
        # wait.
        is_alone = not _fits_batch(unread[0], programs)
        if is_alone and (is_urgent or not num_pieces):
            return 0
        if num_pieces:
            return self._read_pieces(programs, unread, needs_all=not is_urgent)
        cost = -(-num_rows * piece_size // programs.chunk_size)
        num_reads = -(-unread[0].unread.size // piece_size)
        if num_reads * cost > max_chunks or not self._fill(programs, unread):
            return 0
        groups = [self._groups[index] for index in range(num_rows)]
        chunks = [group.next_chunk(piece_size) for group in groups]
        token_ids, positions = map(np.concatenate, zip(*chunks, strict=True))
        self._rows = programs.prefill_batch(self._rows, token_ids, positions)
        for group in groups:
            group.num_read += piece_size
        for group in groups:
            if not group.unread.size:
                self.detach_group(programs, group)
        return cost

    def _read_pieces(
        self, programs: Programs, unread: Sequence[QueueEntry], needs_all: bool
    ) -> int:
        """Reads the next pieces of prompts, in the order of the queue; returns a cost of 1 chunk.

        With `needs_all`, fewer than P pieces are not read, and the cost is 0.
        """
        assert programs.batch is not None
        _, piece_size, num_pieces = programs.batch
        token_ids, positions = empty_chunk(num_pieces, piece_size)
        rows, start, sizes = np.zeros(num_pieces, np.int32), 0, []
        matched = self._match_places(programs, unread)
        num_unread = sum(-(-group.unread.size // piece_size) for _, group in matched)
        if needs_all and num_unread < num_pieces:
            return 0
        for index, group in matched:
            # An earlier prompt's keys in this place lie at positions that this one has not reached.
            # Nothing attends to them, so no empty row is copied here.
            group.place, self._groups[index] = np.int32(index), group
            chunk = group.unread[: (num_pieces - start) * piece_size]
            end = start + -(-chunk.size // piece_size)
            token_ids[start:end].reshape(-1)[: chunk.size] = chunk
            new_positions = group.num_read + np.arange(chunk.size)
            positions[start:end].reshape(-1)[: chunk.size] = new_positions
            rows[start:end], start = index, end
            sizes.append(chunk.size)
        self._rows = programs.prefill_batch(self._rows, token_ids, positions, rows)
        # Not before the program has taken them: it may fail, and is then called again.
        for (_, group), num_tokens in zip(matched, sizes, strict=True):
            group.num_read += num_tokens
        return 1

    def _match_places(
        self, programs: Programs, unread: Sequence[QueueEntry]
    ) -> list[tuple[int, PromptGroup]]:
        """Returns unread prompts in the order of the queue, each with its place or a free one.

        Prompts that do not fit are left out, and so are those for which no place is free.
        """
        assert programs.batch is not None
        places = {group: index for index, group in self._groups.items()}
        free_places = [i for i in range(programs.batch.num_rows) if i not in self._groups]
        groups = [entry for entry in unread if _fits_batch(entry, programs)]
        new_groups = [group for group in groups if group not in places]
        places |= dict(zip(new_groups, free_places, strict=False))
        return [(places[group], group) for group in groups if group in places]

    def _fill(self, programs: Programs, unread: Sequence[QueueEntry]) -> bool:
        """Puts the rows of unread prompts into all free places; returns whether all are filled.

        If there are too few prompts, no row is put anywhere.
        """
        assert programs.batch is not None
        matched = dict(self._match_places(programs, unread))
        if len(self._groups | matched) < programs.batch.num_rows:
            return False
        for index, group in matched.items():
            if index in self._groups:
                continue
            row = self._empty_row if group.row is None else group.row
            self._rows = programs.put_row(self._rows, row, np.int32(index))
            group.row, group.place = None, np.int32(index)
            self._groups[index] = group
        return True

    def admit(
        self, programs: Programs, slots: DecodeState, entry: QueueEntry, slot: int
    ) -> DecodeState:
        """Returns the slots with the first waiting request of an entry in one of them.

        If the row is in this batch, its place becomes free. The row is copied out first if more
        requests of the prompt wait, or if the batch reads no pieces.
        """
        reads_pieces = programs.batch is not None and programs.batch.num_pieces > 0
        if entry.place is None or len(entry.waiting) > 1 or not reads_pieces:
            self.detach_group(programs, entry)
            return entry.admit(programs, slots, slot)
        # `entry.admit` gives the program all rows, and the place of one.
        entry.row = self._rows
        try:
            slots = entry.admit(programs, slots, slot)
        finally:
            entry.row = None
        del self._groups[int(entry.place)]
        return slots

    def detach_group(self, programs: Programs, entry: QueueEntry) -> None:
        """Gives an entry its row back and frees its place; does nothing for other entries.

        The entry's unread tokens are then read into its own row.
        """
        for index, group in self._groups.items():
            if group is entry:
                row = programs.take_row(self._rows, np.int32(index))
                self._groups.pop(index).attach_row(row, programs.row_lengths[0])
                return

    def drop_ended(self) -> None:
        """Frees the places of prompts without a waiting request.

        `WaitingQueue.drop_ended` comes first: it takes ended requests out of `waiting`.
        """
        self._groups = {i: group for i, group in self._groups.items() if group.waiting}

    @property
    def arrays(self) -> object:
        """The batch's device arrays, a pytree; the engine deletes them when it closes."""
        return self._rows, self._empty_row


def _fits_batch(entry: QueueEntry, programs: Programs) -> TypeGuard[PromptGroup]:
    """Returns whether an entry is a prompt with unread tokens that fits a row of the batch."""
    is_unread = isinstance(entry, PromptGroup) and entry.unread.size > 0
    return is_unread and entry.token_ids.size - 1 <= programs.row_lengths[0]


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
