"""`RequestStream`: the chunks of one request, for a reader that another thread serves.

    stepping thread                         the reader: a thread, or a coroutine of any event loop
    Request.add, Request.end                Cursor.take -> a chunk, or None without news
    wake_readers(cursors)       ------>     Cursor.start_waiting, and once woken take again
    abort, if is_closed         <------     RequestStream.close puts the cursor into `commands`

No queue holds chunks. The request holds its tokens, at most `max_new_tokens`, and a cursor counts
those that were read. So unread tokens merge into the next chunk, and a slow reader delays no other.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from specjax.engine.request import Request, StreamChunk

# A reader that waits: a thread by an event, or a coroutine by a future of its event loop.
Waiter: TypeAlias = "threading.Event | asyncio.Future[None]"


class Cursor:
    """The part of a request that was read, and the reader that waits for more.

    Args:
      request: the request that is read.
      deadline: time of `time.monotonic` at which the request is ended; infinity for none.

    Attributes:
      waiter: the reader that waits, or None.
      is_closed: whether its last chunk was read, or its reader left.
      is_followed: whether the thread that steps knows the request; it counts the request once.
    """

    def __init__(self, request: Request, deadline: float) -> None:
        self.request, self.deadline = request, deadline
        self.waiter: Waiter | None = None
        self.is_closed = self.is_followed = False
        self._num_tokens = self._num_characters = 0

    def has_news(self) -> bool:
        """Returns whether `take` would return a chunk."""
        request = self.request
        return len(request.token_ids) > self._num_tokens or request.finish_reason is not None

    def take(self) -> StreamChunk | None:
        """Returns a chunk of all news, or None; a chunk with a finish reason closes the cursor."""
        if not self.has_news():
            return None
        chunk = self.request.chunk_from(self._num_tokens, self._num_characters)
        self._num_tokens += len(chunk.token_ids)
        self._num_characters += len(chunk.text)
        if chunk.finish_reason is not None:
            self.is_closed = True
        return chunk

    def start_waiting(self, waiter: Waiter) -> bool:
        """Sets the waiter; returns whether it has to wait.

        Earlier tokens are seen here, and later ones find the waiter. A closed one waits until its
        request has ended.
        """
        self.waiter = waiter
        return not self.has_news()


class RequestStream:
    """The chunks of a request, from `AsyncEngine.submit`: `for chunk in stream`, or `async for`.

    An iteration ends after the chunk that has a finish reason. Unread tokens merge into the next
    chunk. One reader at a time may wait, in a thread or in a coroutine of any event loop.

    The request is aborted by `close`, by the end of `with stream:` or `async with stream:`, and
    when nothing refers to the stream any more. A cancellation or a `KeyboardInterrupt` of a reader
    that waits for a chunk aborts it, too.

    Args:
      cursor: the request's.
      report: gives the thread that steps a closed cursor. Any thread may call it, also during an
        interrupted call of its own.
      engine: an object that must not be collected before the stream.

    Attributes:
      request: the `Request`, with all its tokens so far.
    """

    def __init__(self, cursor: Cursor, report: Callable[[Cursor], None], engine: object) -> None:
        self.request = cursor.request
        self._cursor, self._report, self._engine = cursor, report, engine

    def close(self) -> None:
        """Ends the iteration, and aborts the request before the next step, unless it has ended.

        Any thread may call this without waiting.
        """
        # `__del__` may call this in any thread that collects garbage, so it takes no lock.
        # `SimpleQueue.put` may interrupt itself.
        was_closed, self._cursor.is_closed = self._cursor.is_closed, True
        if not was_closed and self.request.finish_reason is None:
            self._report(self._cursor)

    def __del__(self) -> None:
        self.close()

    async def aclose(self) -> None:
        """Calls `close`, for `contextlib.aclosing`."""
        self.close()

    def result(self) -> Request:
        """Waits in a thread until the request has ended, by `close`, too, and returns it."""
        while self._goes_on():
            self._wait()
        return self.request

    async def aresult(self) -> Request:
        """Waits in a coroutine until the request has ended, by `close`, too, and returns it."""
        while self._goes_on():
            await self._wait_in_loop()
        return self.request

    def _goes_on(self) -> bool:
        """Takes all news, and returns whether the request has not ended."""
        while (chunk := self._cursor.take()) is not None:
            if chunk.finish_reason is not None:
                return False
        return True

    def __iter__(self) -> "RequestStream":
        return self

    def __next__(self) -> StreamChunk:
        while not self._cursor.is_closed:
            if (chunk := self._cursor.take()) is not None:
                return chunk
            self._wait()
        raise StopIteration

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> StreamChunk:
        while not self._cursor.is_closed:
            if (chunk := self._cursor.take()) is not None:
                return chunk
            await self._wait_in_loop()
        raise StopAsyncIteration

    def _wait(self) -> None:
        event = threading.Event()
        with self._waiting(event) as must_wait:
            if must_wait:
                event.wait()

    async def _wait_in_loop(self) -> None:
        future = asyncio.get_running_loop().create_future()
        with self._waiting(future) as must_wait:
            if must_wait:
                await future

    @contextlib.contextmanager
    def _waiting(self, waiter: Waiter) -> Iterator[bool]:
        """Sets the waiter for a block, and closes the stream if the block is left by an error."""
        if self._cursor.waiter is not None:
            raise RuntimeError("another reader waits for this stream; it has one at a time.")
        try:
            yield self._cursor.start_waiting(waiter)
        except BaseException:
            self.close()
            raise
        finally:
            self._cursor.waiter = None

    def __enter__(self) -> "RequestStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> "RequestStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


def wake_readers(cursors: Iterable[Cursor]) -> None:
    """Wakes the waiting readers of cursors with news; calls each event loop once."""
    futures: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for cursor in cursors:
        # Read once: the reader may leave meanwhile.
        waiter = cursor.waiter
        if waiter is None or not cursor.has_news():
            continue
        if isinstance(waiter, threading.Event):
            waiter.set()
        else:
            futures.setdefault(waiter.get_loop(), []).append(waiter)
    for loop, of_loop in futures.items():
        # An event loop that is closed has no reader any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_resolve, of_loop)


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
