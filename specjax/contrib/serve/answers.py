"""An answer to a request for texts: it submits, waits or streams, and aborts if the client goes.

    read, submit in threads -> choices -> wait for all -> one object
                                       -> chunks of all -> an event for each

A client that goes is a message of `receive`: the work is cancelled, and its choices are closed. A
client that reads slowly fills its socket: `send` waits, and tokens of that time share a chunk.
"""

import asyncio
import functools
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specjax.contrib.serve.errors import ApiError, error_body, error_headers
from specjax.contrib.serve.parameters import Parameters
from specjax.contrib.serve.responses import END_OF_STREAM, Reply, event, to_json
from specjax.contrib.serve.service import Choice, Service
from specjax.engine.request import StreamChunk
from specjax.engine.usage import Usage

_T = TypeVar("_T")
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Returns an object as an answer."""
    return Response(to_json(value), status, headers, "application/json")


def error_response(error: ApiError) -> Response:
    """Returns an error as an answer."""
    return json_response(error_body(error), error.status, error_headers(error))


class TextAnswer:
    """The answer to a request for texts, an application of ASGI.

    Args:
      service: that makes them.
      read: the body's parameters; called in a thread, as a body may be large.
      kind: of the answer's objects.
      executor: of the threads that read and submit.
      schema_executor: of the threads that submit what has a JSON schema, which is slow to read.
    """

    def __init__(
        self,
        service: Service,
        read: Callable[[], Parameters],
        kind: type[Reply],
        executor: Executor,
        schema_executor: Executor,
    ) -> None:
        self._service, self._read, self._kind = service, read, kind
        self._executor, self._schema_executor = executor, schema_executor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, or stops when the client goes."""
        limits = self._service.limits
        # The engine ends a text in time; a client may still not read it.
        seconds = limits.max_seconds + limits.max_body_seconds
        await _until_disconnect(receive, self._answer(scope, receive, send), seconds)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            parameters, choices = await self._submit()
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        service = self._service
        reply = self._kind(uuid.uuid4().hex, int(time.time()), service.name, service.texts)
        try:
            if parameters.stream:
                await self._stream(parameters, choices, reply, send)
            else:
                response = await self._whole(parameters, choices, reply)
                await response(scope, receive, send)
        finally:
            _close(choices)

    def _in_thread(
        self, call: Callable[[], _T], executor: Executor | None = None
    ) -> "asyncio.Future[_T]":
        return asyncio.get_running_loop().run_in_executor(executor or self._executor, call)

    async def _submit(self) -> tuple[Parameters, list[Choice]]:
        parameters = await self._in_thread(self._read)
        executor = self._executor if parameters.schema is None else self._schema_executor
        # A thread cannot be cancelled: what it submits for a client that has gone is closed then.
        future = self._in_thread(functools.partial(self._service.submit, parameters), executor)
        try:
            return parameters, await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(_close_submitted)
            raise

    async def _stream(
        self, parameters: Parameters, choices: Sequence[Choice], reply: Reply, send: Send
    ) -> None:
        response = Response(b"", 200, _STREAM_HEADERS, "text/event-stream")
        headers = [pair for pair in response.raw_headers if pair[0] != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def write(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        begun = set[int]()
        try:
            async for choice, chunk in _merge(choices, self._service.limits.chunk_seconds):
                make = functools.partial(_events, reply, choice, chunk, choice.index not in begun)
                data = await self._in_thread(make) if choice.is_long(chunk) else make()
                if data:
                    begun.add(choice.index)
                    await write(data)
            if parameters.include_usage:
                await write(event(reply.usage_chunk(_usage(choices, parameters.num_samples))))
        except ApiError as error:
            await write(event(error_body(error)))
        await write(END_OF_STREAM, more=False)

    async def _whole(
        self, parameters: Parameters, choices: Sequence[Choice], reply: Reply
    ) -> Response:
        """Returns the answer to a request that is no stream."""

        def make(choice: Choice) -> bytes:
            return reply.choice(choice.whole())

        try:
            for choice in choices:
                await choice.stream.aresult()
            parts = [await self._in_thread(functools.partial(make, choice)) for choice in choices]
        except ApiError as error:
            return error_response(error)
        body = reply.whole(parts, _usage(choices, parameters.num_samples))
        return Response(body, media_type="application/json")


def _events(reply: Reply, choice: Choice, chunk: StreamChunk, is_first: bool) -> bytes:
    """Returns what a stream writes for a chunk of a choice; nothing for one without text."""
    part = choice.part(chunk)
    if not part.text and not part.scores and part.finish_reason is None:
        return b""
    return (reply.first_event(choice.index) if is_first else b"") + event(reply.chunk(part))


def _usage(choices: Sequence[Choice], num_samples: int) -> dict[str, Any]:
    """Returns the counts of an answer; a prompt of several samples counts once."""
    of_prompts = [choice.usage for choice in choices[::num_samples]]
    total = Usage.sum([choice.usage for choice in choices])
    num_prompt_tokens = sum(usage.prompt_tokens for usage in of_prompts)
    return total._replace(prompt_tokens=num_prompt_tokens).to_dict()


async def _merge(
    choices: Sequence[Choice], seconds: float
) -> AsyncIterator[tuple[Choice, StreamChunk]]:
    """Yields the chunks of all choices as they come, of each not closer than `seconds`."""
    if len(choices) == 1:
        async for pair in _spaced(choices[0], seconds):
            yield pair
        return
    # With room for one, choices wait while the client reads slowly.
    pairs = asyncio.Queue[tuple[Choice, StreamChunk]](1)

    async def feed(choice: Choice) -> None:
        async for pair in _spaced(choice, seconds):
            await pairs.put(pair)

    tasks = [asyncio.ensure_future(feed(choice)) for choice in choices]
    try:
        num_going = len(tasks)
        while num_going:
            choice, chunk = await pairs.get()
            num_going -= chunk.finish_reason is not None
            yield choice, chunk
    finally:
        await _cancel(tasks)


async def _spaced(choice: Choice, seconds: float) -> AsyncIterator[tuple[Choice, StreamChunk]]:
    """Yields chunks; what comes within `seconds` of the chunk before is in the next one."""
    async for chunk in choice.stream:
        begin = time.monotonic()
        yield choice, chunk
        rest = begin + seconds - time.monotonic()
        if rest > 0 and chunk.finish_reason is None:
            await asyncio.sleep(rest)


def _close(choices: Sequence[Choice]) -> None:
    for choice in choices:
        choice.stream.close()


def _close_submitted(future: "asyncio.Future[list[Choice]]") -> None:
    if not future.cancelled() and future.exception() is None:
        _close(future.result())


async def _until_disconnect(
    receive: Receive, work: Coroutine[Any, Any, None], seconds: float
) -> None:
    """Runs `work` to its end, until the client has gone, or for so many seconds."""

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks: list[asyncio.Future[None]] = [
        asyncio.ensure_future(work),
        asyncio.ensure_future(wait_for_disconnect()),
    ]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
    finally:
        await _cancel(tasks)


async def _cancel(tasks: Sequence["asyncio.Future[None]"]) -> None:
    """Cancels tasks and waits for their ends."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
