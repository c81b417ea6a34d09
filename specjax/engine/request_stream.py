"""`RequestStream`: the chunks of one request, for a reader that another thread serves.

    stepping thread                         the reader: a thread, or a coroutine of any event loop
    Request.add, Request.end                Cursor.take -> a chunk, or None: nothing is new
    wake_readers(cursors)       ------>     Cursor.start_waiting, and once woken take again
    abort, if is_closed         <------     RequestStream.close puts the cursor into `commands`

No queue holds chunks. The request holds its tokens, at most `max_new_tokens`, and a cursor says how
many of them were read. So the tokens of a slow reader merge into its next chunk, and delay no other
reader.
"""

import asyncio
import contextlib
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Protocol, TypeAlias

from specjax.engine.request import Request, StreamChunk
from specjax.engine.usage import Usage

__all__ = ["Commands", "Cursor", "RequestStream", "Waiter", "wake_readers"]


# A reader that waits: a thread by an event, or a coroutine by a future of its event loop.
Waiter: TypeAlias = "threading.Event | asyncio.Future[None]"


class Commands(Protocol):
    """Takes cursors whose streams were closed, for the thread that steps."""

    def put(self, cursor: "Cursor") -> None:
        """Adds a cursor; may be called anywhere, also while another call of it is interrupted."""


class Cursor:
    """How much of a request was read, and who waits for more.

    Args:
      request: that is read.
      deadline: of `time.monotonic`, after which the request is ended; infinity for none.

    Attributes:
      waiter: the reader that waits, or None.
      is_closed: whether its last chunk was read, or its reader left.
      is_followed: whether the thread that steps has counted the request, or will.
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
        """Returns all that is new, or None; the chunk with a finish reason closes the cursor."""
        if not self.has_news():
            return None
        chunk = self.request.chunk_from(self._num_tokens, self._num_characters)
        self._num_tokens += len(chunk.token_ids)
        self._num_characters += len(chunk.text)
        if chunk.finish_reason is not None:
            self.is_closed = True
        return chunk

    def start_waiting(self, waiter: Waiter) -> bool:
        """Sets the waiter; returns whether there is something to wait for.

        What came before is seen here, and what comes later finds the waiter.
        """
        self.waiter = waiter
        return not (self.is_closed or self.has_news())


class RequestStream:
    """The chunks of a request, from `AsyncEngine.submit`: `for chunk in stream`, or `async for`.

    An iteration ends after the chunk that has a finish reason. What was not taken merges into the
    next chunk. One reader at a time may wait, in a thread or in a coroutine of any event loop.

    The request is aborted if its reader leaves: by `close`, at the end of `with stream:` or
    `async with stream:`, by a cancelled task or a `KeyboardInterrupt` that waits for a chunk, and
    when nothing refers to the stream any more.

    Args:
      cursor: of the request.
      commands: of the thread that steps.
      engine: kept while the stream is.

    Attributes:
      request: the `Request`, whose fields hold all that it got so far.
    """

    def __init__(self, cursor: Cursor, commands: Commands, engine: object) -> None:
        self.request = cursor.request
        self._cursor, self._commands, self._engine = cursor, commands, engine

    @property
    def usage(self) -> Usage:
        """The request's counts so far, in OpenAI's words."""
        return self.request.usage

    def close(self) -> None:
        """Ends the iteration, and aborts the request before the next step, unless it has ended.

        Any thread may call it. It does not wait.
        """
        # `__del__` may call this in any thread that collects garbage, so it takes no lock.
        # `SimpleQueue.put` may interrupt itself.
        was_closed, self._cursor.is_closed = self._cursor.is_closed, True
        if not was_closed and self.request.finish_reason is None:
            self._commands.put(self._cursor)

    def __del__(self) -> None:
        self.close()

    async def aclose(self) -> None:
        """Does what `close` does; `contextlib.aclosing` calls it."""
        self.close()

    def result(self) -> Request:
        """Waits in a thread until the request has ended, and returns it."""
        for _ in self:
            pass
        return self.request

    async def aresult(self) -> Request:
        """Waits in a coroutine until the request has ended, and returns it."""
        async for _ in self:
            pass
        return self.request

    def __iter__(self) -> "RequestStream":
        return self

    def __next__(self) -> StreamChunk:
        while not self._cursor.is_closed:
            if (chunk := self._cursor.take()) is not None:
                return chunk
            event = threading.Event()
            with self._waiting(event) as must_wait:
                if must_wait:
                    event.wait()
        raise StopIteration

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> StreamChunk:
        while not self._cursor.is_closed:
            if (chunk := self._cursor.take()) is not None:
                return chunk
            future = asyncio.get_running_loop().create_future()
            with self._waiting(future) as must_wait:
                if must_wait:
                    await future
        raise StopAsyncIteration

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> "RequestStream":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def wake_readers(cursors: Iterable[Cursor]) -> None:
    """Wakes the readers that wait and have something to read; each event loop is called once."""
    futures: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for cursor in cursors:
        # Read once: the reader may leave meanwhile.
        waiter = cursor.waiter
        if waiter is None or not (cursor.is_closed or cursor.has_news()):
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
