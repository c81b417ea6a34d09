"""Requests that wait for slots: the queue and its entries.

    WaitingQueue      entries in the order of their turns
    QueueEntry        requests that wait, and the caches that their tokens are read into
      PromptGroup       requests of one prompt, which is read once for all of them
      ParkedRequest     a request that was preempted, with its state

The scheduler reads the first entries chunk by chunk, and then puts their requests into slots:

    put -> read_chunk, or `PrefillBatch.read`, until is_read
        -> `PrefillBatch.admit`, which takes every entry, and pop, for each of its requests

    slot       one of the B places of the compiled step
    caches     what the models keep of the tokens that they have read: a `slots.PromptCaches`
    read       prefilled: a program of `Programs` has put the tokens into the caches
    place      index of a prompt among the N of a `PrefillBatch`, which holds its caches meanwhile
"""

import abc
import bisect
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
from specjax.engine.prompt_logprobs import PromptListing, run_chunk
from specjax.engine.request import Request
from specjax.engine.slots import PromptCaches
from specjax.engine.submission import CheckedRequest


class QueueEntry(abc.ABC):
    """Requests that wait for slots, and the caches that their tokens are read into.

    Args:
      requests: at least one.

    Attributes:
      waiting: the requests without a slot.
      caches: of the tokens read so far; None before the first chunk, and while it has a place
        (but see `PromptGroup.admit`).
      place: i32, of its caches in the `PrefillBatch`; None if it has none there.
      num_read: how many tokens were read. A last chunk counts whole, so that this may be more
        than there are.
      turn: by which the queue is sorted.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        self.waiting = deque(requests)
        self.caches: PromptCaches | None = None
        self.place: np.integer | None = None
        self.num_read = self.turn = 0
        # Tokens that `caches` have room for, one of `Programs.cache_lengths`.
        self._max_length = 0

    @property
    @abc.abstractmethod
    def token_ids(self) -> np.ndarray:
        """The text so far, i32[L], to read up to its last token; empty if nothing is to be read."""

    @property
    def unread(self) -> np.ndarray:
        """Tokens still to read; never the last of all, which the request's next step feeds."""
        return self.token_ids[self.num_read : -1]

    @property
    def listing(self) -> PromptListing | None:
        """Where the log-probabilities of its tokens go; None if they are not listed."""
        return None

    def is_read(self) -> bool:
        """Returns whether its requests may go into slots: the caches hold all tokens needed."""
        return (self.caches is not None or self.place is not None) and not self.unread.size

    def next_chunk(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the next unread tokens and their positions, two i32[1, size].

        Both are padded, tokens with 0 and positions with -1.
        """
        chunk = self.unread[:size]
        token_ids, positions = empty_chunk(1, size)
        token_ids[0, : chunk.size] = chunk
        positions[0, : chunk.size] = self.num_read + np.arange(chunk.size)
        return token_ids, positions

    def read_chunk(self, programs: Programs) -> int:
        """Reads the next chunk into the entry's own caches; returns how many chunks: 1, or 0.

        A prompt of one token has nothing to read, but needs empty caches for its slot.
        """
        self._grow_caches(programs)
        if not self.unread.size:
            return 0
        chunk, owners = self.next_chunk(programs.chunk_size), [(self.listing, slice(None))]
        self.caches = run_chunk(programs, self.caches, chunk, owners)
        self.num_read += programs.chunk_size
        return 1

    def _grow_caches(self, programs: Programs) -> None:
        """Makes or grows the caches to the shortest of `cache_lengths` that holds the chunk."""
        num_tokens = min(self.num_read + programs.chunk_size, self.token_ids.size - 1)
        length = next(length for length in programs.cache_lengths if length >= num_tokens)
        if self.caches is None:
            self.attach_caches(programs.new_caches(max_length=length), length)
        elif self._max_length < length:
            self.attach_caches(programs.grow_caches(self.caches, max_length=length), length)

    def attach_caches(self, caches: PromptCaches, max_length: int) -> None:
        """Sets the entry's own caches, which have room for `max_length` tokens."""
        self.caches, self._max_length, self.place = caches, max_length, None

    @abc.abstractmethod
    def admit(self, programs: Programs, slots: DecodeState, slot: int) -> DecodeState:
        """Returns the slots with the first waiting request in one of them.

        Only `PrefillBatch.admit` calls it. The request still waits, until `WaitingQueue.pop`.
        """

    @property
    def arrays(self) -> object:
        """The entry's device arrays, a pytree; the engine deletes them when it closes."""
        return self.caches


class PromptGroup(QueueEntry):
    """Requests of one prompt.

    Args:
      checked: the submission that all of them came from.
      samples: request -> its sample index, which is folded into the key, so that samples of one
        prompt differ. -1 folds nothing.
      priority: as in `AsyncEngine.submit`.
    """

    def __init__(
        self, checked: CheckedRequest, samples: Mapping[Request, int], priority: int = 0
    ) -> None:
        super().__init__(samples)
        self._checked, self._samples = checked, samples
        self.turn = priority

    @property
    def token_ids(self) -> np.ndarray:
        """The prompt, i32[L]."""
        return self._checked.token_ids

    @property
    def listing(self) -> PromptListing | None:
        """Where the log-probabilities of its tokens go; None if they are not listed."""
        return self._checked.listing

    def admit(self, programs: Programs, slots: DecodeState, slot: int) -> DecodeState:
        """Returns the slots with the first waiting request in one of them."""
        sample = np.int32(self._samples[self.waiting[0]])
        prompt = pad_prompt(self.token_ids[None], programs.cache_lengths[-1])
        settings = self._checked.settings._replace(sample=sample)
        # With a place, `self.caches` are those of all N prompts: `PrefillBatch.admit` sets them for
        # this call.
        place = () if self.place is None else (self.place,)
        return programs.admit(slots, self.caches, np.int32(slot), prompt, settings, *place)


class ParkedRequest(QueueEntry):
    """A request that was preempted, and the state that it had in its slot.

    Args:
      request: the request.
      parked: its state, a batch of one.
      drops_cache: whether the target's cache is dropped, and computed again from its tokens.
    """

    def __init__(self, request: Request, parked: DecodeState, drops_cache: bool) -> None:
        super().__init__([request])
        self._parked = parked._replace(target_cache=None)
        # None before the first access.
        self._token_ids: np.ndarray | None = None
        if not drops_cache:
            self.caches = PromptCaches(parked.target_cache, None)
            self._token_ids = np.zeros(0, np.int32)

    @property
    def token_ids(self) -> np.ndarray:
        """The committed tokens i32[L], which the target reads again; empty if its cache was kept.

        The first access waits for the device: the request's last step may still run.
        """
        if self._token_ids is None:
            token_ids, lengths = jax.device_get((self._parked.token_ids, self._parked.lengths))
            self._token_ids = token_ids[0, : int(lengths[0])]
        return self._token_ids

    def _grow_caches(self, programs: Programs) -> None:
        """Makes caches of the target alone, which have one length, S."""
        if self.caches is None:
            length = programs.cache_lengths[-1]
            self.attach_caches(programs.new_target_caches(max_length=length), length)

    def admit(self, programs: Programs, slots: DecodeState, slot: int) -> DecodeState:
        """Returns the slots with the request in one of them."""
        # Never those of a `PrefillBatch`, which reads prompts alone.
        assert self.caches is not None
        parked = self._parked._replace(target_cache=self.caches.target_cache)
        return programs.resume(slots, parked, np.int32(slot))

    @property
    def arrays(self) -> object:
        """The entry's device arrays, a pytree; the engine deletes them when it closes."""
        return self._parked, self.caches


class WaitingQueue:
    """Entries that wait. Any thread may put one in and count their requests.

        turn = now + priority, of an entry that is put in
        now  = 1 more for each entry of priority 0, and at least the last turn that `first` returned

    Equal turns are first come, first served. An entry of priority i waits for at most i later ones
    of priority 0, however many come, and for none forever.

    The rest is called under the scheduler's `_step_lock`, under which caches change, too.

    Args:
      max_waiting: most requests that wait.

    Attributes:
      lock: held while the order of entries changes, or who waits in one; reentrant, because methods
        that take it call each other.
      closed_reason: a sentence why the engine is closed and nothing may be put in, or None.
      cause: the error that closed the engine, or None.
      is_draining: whether nothing more may be put in, while what waits goes on.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._entries: deque[QueueEntry] = deque()
        self._now = 0
        # An upper bound of `len(waiting())`: a request that ends is counted until it is removed.
        self._num_waiting = 0
        self.lock = threading.RLock()
        self.closed_reason: str | None = None
        self.cause: BaseException | None = None
        self.is_draining = False

    def check_open(self) -> None:
        """Raises RuntimeError if the queue is closed, from the error that closed it."""
        if self.closed_reason is not None:
            raise RuntimeError(self.closed_reason) from self.cause

    def drain(self) -> None:
        """Refuses requests from now on; those that wait go on."""
        with self.lock:
            self.is_draining = True

    def close(self, why: str, cause: BaseException | None) -> list[Request]:
        """Closes the queue, and returns the requests that wait in it."""
        with self.lock:
            self.closed_reason, self.cause, waiting = why, cause, self.waiting()
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

    def has_waiting(self) -> bool:
        """Returns whether a request waits and has not ended."""
        with self.lock:
            each = (request for entry in self._entries for request in entry.waiting)
            return any(request.finish_reason is None for request in each)

    def check_room(self, count: int) -> None:
        """Checks that `count` more requests may be put in.

        The requests are looked at one by one only where their upper bound leaves no room.

        Raises:
          queue.Full: if too many would wait.
          RuntimeError: if the queue is closed or drains.
        """
        self.check_open()
        if self.is_draining:
            raise RuntimeError("the engine drains: it takes no more requests; make another one.")
        if self._num_waiting + count <= self._max_waiting:
            return
        with self.lock:
            self._num_waiting = num_waiting = len(self.waiting())
        if num_waiting + count > self._max_waiting:
            raise queue.Full(
                f"{num_waiting} requests wait, and {count} more are submitted; max_waiting is "
                f"{self._max_waiting}. Run the engine, or wait for requests to end."
            )

    def put(self, entry: QueueEntry) -> None:
        """Puts an entry after those of its turn or earlier; raises the errors of `check_room`.

        Until now the entry's `turn` is its priority.
        """
        with self.lock:
            self.check_room(len(entry.waiting))
            self._num_waiting += len(entry.waiting)
            priority, entry.turn = entry.turn, self._now + entry.turn
            self._now += priority == 0
            bisect.insort(self._entries, entry, key=lambda other: other.turn)

    def put_first(self, entry: QueueEntry) -> None:
        """Puts an entry before all others, however many requests wait.

        Its request comes from a slot. A closed engine has none there, so this does not check.
        """
        with self.lock:
            self._num_waiting += len(entry.waiting)
            self._entries.appendleft(entry)

    def arrays(self) -> list[object]:
        """Returns the device arrays of each entry, which the engine deletes when it closes."""
        with self.lock:
            return [entry.arrays for entry in self._entries]

    def drop_ended(self) -> None:
        """Removes ended requests, then entries without requests and, with them, their caches."""
        with self.lock:
            for entry in self._entries:
                entry.waiting = deque(x for x in entry.waiting if x.finish_reason is None)
            self._entries = deque(entry for entry in self._entries if entry.waiting)
            self._num_waiting = sum(len(entry.waiting) for entry in self._entries)

    def first(self, number: int) -> list[QueueEntry]:
        """Returns the first entries, at most `number`, which stay the first until they are popped.

        The scheduler reads their prompts, and as many have room in a `PrefillBatch`.
        """
        with self.lock:
            entries = list(itertools.islice(self._entries, number))
            if entries:
                # No later entry has an earlier turn.
                self._now = max(self._now, entries[-1].turn)
            return entries

    def pop(self) -> Request:
        """Removes the first request and returns it; an entry is removed with its last request."""
        with self.lock:
            request = self._entries[0].waiting.popleft()
            # An ended request is not subtracted: the count may have been taken again without it,
            # and has to stay an upper bound.
            self._num_waiting -= request.finish_reason is None
            if not self._entries[0].waiting:
                self._entries.popleft()
            return request
