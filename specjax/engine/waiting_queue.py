"""The queue of an engine: requests that have no slot, first come, first served."""

import queue
import threading
from collections import deque
from typing import Any

from specjax.engine.group import ParkedRequest, Waiting
from specjax.engine.request import Request

__all__ = ["WaitingQueue"]


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
        self._groups: deque[Waiting] = deque()
        self.lock = threading.Lock()
        self.closed: str | None = None

    def check_open(self) -> None:
        """Raises RuntimeError if the queue is closed."""
        if self.closed is not None:
            raise RuntimeError(self.closed)

    def close(self, why: str) -> list[Waiting]:
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

    def put(self, group: Waiting) -> None:
        """Puts requests at the end, as `check_room` allows."""
        with self.lock:
            self._check_room(len(group.waiting))
            self._groups.append(group)

    def put_first(self, group: Waiting) -> None:
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

    def first(self, number: int) -> list[Waiting]:
        """Returns the first groups that have a request waiting, at most `number`."""
        first: list[Waiting] = []
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
