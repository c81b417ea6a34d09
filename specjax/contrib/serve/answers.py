"""An answer to a request for texts: it submits, waits or streams, and aborts if the client goes.

    submit in a thread -> choices -> parts of all -> one object, or an event for each part

A client that goes is a message of `receive`: the work is cancelled, and its choices are closed. A
client that reads slowly fills its socket: `send` waits, and tokens of that time share a chunk.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specjax.contrib.serve.errors import ApiError, error_body, error_headers
from specjax.contrib.serve.parameters import Parameters
from specjax.contrib.serve.responses import END_OF_STREAM, Part, Reply, event, to_json
from specjax.contrib.serve.service import Choice, Service
from specjax.engine.usage import Usage

__all__ = ["TextAnswer", "error_response", "json_response"]

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
    """

    def __init__(
        self,
        service: Service,
        read: Callable[[], Parameters],
        kind: type[Reply],
        executor: Executor,
    ) -> None:
        self._service, self._read, self._kind = service, read, kind
        self._executor = executor

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
        reply = self._kind(
            uuid.uuid4().hex, int(time.time()), self._service.name, self._service.texts
        )
        try:
            if parameters.stream:
                await self._stream(parameters, choices, reply, send)
            else:
                response = await _whole(choices, reply, parameters.num_samples)
                await response(scope, receive, send)
        finally:
            _close(choices)

    async def _submit(self) -> tuple[Parameters, list[Choice]]:
        def submit() -> tuple[Parameters, list[Choice]]:
            parameters = self._read()
            return parameters, self._service.submit(parameters)

        # A thread cannot be cancelled: what it submits for a client that has gone is closed then.
        future = asyncio.get_running_loop().run_in_executor(self._executor, submit)
        try:
            return await asyncio.shield(future)
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
            async for part in _merge(choices, self._service.limits.chunk_seconds):
                first = None if part.choice in begun else reply.first_chunk(part.choice)
                begun.add(part.choice)
                head = b"" if first is None else event(first)
                await write(head + event(reply.chunk(part)))
            if parameters.include_usage:
                await write(event(reply.usage_chunk(_usage(choices, parameters.num_samples))))
        except ApiError as error:
            await write(event(error_body(error)))
        await write(END_OF_STREAM, more=False)


async def _whole(choices: Sequence[Choice], reply: Reply, num_samples: int) -> Response:
    """Returns the answer to a request that is no stream."""
    try:
        parts = [_join([part async for part in choice.parts()]) for choice in choices]
    except ApiError as error:
        return error_response(error)
    return json_response(reply.whole(parts, _usage(choices, num_samples)))


def _join(parts: Sequence[Part]) -> Part:
    """Returns the parts of one choice as one."""
    last = parts[-1]
    scores = None if last.scores is None else [x for part in parts for x in part.scores or ()]
    offsets = [x for part in parts for x in part.offsets]
    text = "".join(part.text for part in parts)
    return last._replace(text=text, scores=scores, offsets=offsets)


def _usage(choices: Sequence[Choice], num_samples: int) -> dict[str, Any]:
    """Returns the counts of an answer; a prompt of several samples counts once."""
    of_prompts = [choice.stream.usage for choice in choices[::num_samples]]
    total = Usage.sum([choice.stream.usage for choice in choices])
    num_prompt_tokens = sum(usage.prompt_tokens for usage in of_prompts)
    return total._replace(prompt_tokens=num_prompt_tokens).to_dict()


async def _merge(choices: Sequence[Choice], seconds: float) -> AsyncIterator[Part]:
    """Yields the parts of all choices as they come, those of a choice not closer than `seconds`."""
    if len(choices) == 1:
        async for part in _spaced(choices[0].parts(), seconds):
            yield part
        return
    # With room for one part, choices wait while the client reads slowly.
    parts = asyncio.Queue[Part | BaseException | None](1)

    async def feed(choice: Choice) -> None:
        try:
            async for part in _spaced(choice.parts(), seconds):
                await parts.put(part)
            await parts.put(None)
        except ApiError as error:
            await parts.put(error)

    tasks = [asyncio.ensure_future(feed(choice)) for choice in choices]
    try:
        num_going = len(tasks)
        while num_going:
            item = await parts.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_going -= 1
            else:
                yield item
    finally:
        await _cancel(tasks)


async def _spaced(parts: AsyncIterator[Part], seconds: float) -> AsyncIterator[Part]:
    """Yields parts; what comes within `seconds` of the part before is in the next one."""
    async for part in parts:
        begin = time.monotonic()
        yield part
        rest = begin + seconds - time.monotonic()
        if rest > 0 and part.finish_reason is None:
            await asyncio.sleep(rest)


def _close(choices: Sequence[Choice]) -> None:
    for choice in choices:
        choice.stream.close()


def _close_submitted(future: "asyncio.Future[tuple[Parameters, list[Choice]]]") -> None:
    if not future.cancelled() and future.exception() is None:
        _close(future.result()[1])


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
