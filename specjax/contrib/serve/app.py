"""`make_app`: the routes of a server, an application of Starlette."""

import asyncio
import contextlib
import functools
import hmac
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from specjax.contrib.serve import fields
from specjax.contrib.serve.answers import TextAnswer, error_response, json_response
from specjax.contrib.serve.errors import ApiError
from specjax.contrib.serve.limits import Limits
from specjax.contrib.serve.metrics_text import metrics_text
from specjax.contrib.serve.parameters import (
    Parameters,
    read_chat,
    read_completion,
    read_messages,
)
from specjax.contrib.serve.responses import ChatReply, CompletionReply, Reply
from specjax.contrib.serve.service import Service

# Threads that read bodies and encode prompts: a few, as they share the processor with the engine.
_NUM_THREADS = 4
# Reading a schema may take a second of a processor: others wait for it, and nothing else does.
_NUM_SCHEMA_THREADS = 1


def make_app(service: Service, *, api_key: str | None = None) -> ASGIApp:
    """Returns the application of a service.

    When the server shuts down, the engine ends what it has begun, and closes.

    Args:
      service: that makes the texts.
      api_key: that requests name as `Authorization: Bearer KEY`; None asks for none.
    """
    executor = ThreadPoolExecutor(_NUM_THREADS, "specjax-serve")
    schema_executor = ThreadPoolExecutor(_NUM_SCHEMA_THREADS, "specjax-serve-schema")
    routes = _Routes(service, executor, schema_executor)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await service.engine.aclose()
        executor.shutdown()
        schema_executor.shutdown()

    def post(path: str, answer: Callable[..., Any], *arguments: Any) -> Route:
        return Route(path, functools.partial(answer, *arguments), methods=["POST"])

    app = Starlette(
        routes=[
            post("/v1/completions", routes.text, read_completion, CompletionReply),
            post("/v1/chat/completions", routes.text, read_chat, ChatReply),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/v1/responses", routes.responses, methods=["GET", "POST"]),
            Route("/health", routes.health),
            Route("/metrics", routes.metrics),
            post("/tokenize", routes.call, routes.tokenize),
            post("/detokenize", routes.call, routes.detokenize),
            Route("/tokenizer_info", routes.tokenizer_info),
        ],
        exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), _answer_error),
        lifespan=lifespan,
    )
    return app if api_key is None else _KeyCheck(app, api_key)


class _Routes:
    """What each path answers."""

    def __init__(self, service: Service, executor: Executor, schema_executor: Executor) -> None:
        self._service, self._executor = service, executor
        self._schema_executor = schema_executor
        self._limits = service.limits
        self._created = int(time.time())

    async def text(
        self, read: Callable[[Any, Limits], Parameters], kind: type[Reply], request: Request
    ) -> Any:
        body = await self._body(request)
        return TextAnswer(
            self._service,
            lambda: read(fields.parse_json(body), self._limits),
            kind,
            self._executor,
            self._schema_executor,
        )

    async def _body(self, request: Request) -> bytes:
        """Returns a body within the limits of bytes and time."""
        most, seconds = self._limits.max_body_bytes, self._limits.max_body_seconds
        body, size = bytearray(), 0
        try:
            async with asyncio.timeout(seconds):
                async for chunk in request.stream():
                    size += len(chunk)
                    # The rest is read and dropped: a client that is still writing hears no answer.
                    if size <= most:
                        body += chunk
        except TimeoutError:
            raise ApiError(f"the body was not there in {seconds:g} s.", status=408) from None
        if size > most:
            raise ApiError(f"the body has {size} bytes; it takes at most {most}.", status=413)
        return bytes(body)

    async def call(self, answer: Callable[[Any], Any], request: Request) -> Response:
        """Answers by what a function makes of a body, in a thread."""
        body = await self._body(request)
        loop = asyncio.get_running_loop()
        value = loop.run_in_executor(self._executor, lambda: answer(fields.parse_json(body)))
        return json_response(await value)

    def tokenize(self, body: Any) -> dict[str, Any]:
        given = fields.read_fields(
            body,
            {
                "model": fields.text,
                "prompt": fields.text,
                "messages": lambda name, value: read_messages(name, value, self._limits),
                "add_special_tokens": fields.flag,
                "return_token_strs": fields.flag,
                # What the chat template does anyhow.
                "add_generation_prompt": fields.constant(True),
                "continue_final_message": fields.constant(False),
            },
        )
        if ("prompt" in given) == ("messages" in given):
            raise ApiError("there is not one of prompt and messages.", "prompt")
        codec, most = self._service.codec, self._limits.max_length
        if "messages" in given:
            ids = codec.encode_chat(given["messages"], most)
        else:
            is_whole = not given.get("add_special_tokens", True)
            ids = codec.encode_text(given["prompt"], is_whole, most)
        names = map(codec.tokenizer.id_to_token, ids) if given.get("return_token_strs") else None
        return {
            "tokens": ids,
            "token_strs": None if names is None else list(names),
            "count": len(ids),
            "max_model_len": most,
        }

    def detokenize(self, body: Any) -> dict[str, Any]:
        readers = {"model": fields.text, "tokens": lambda _, value: value}
        tokens = fields.read_fields(body, readers).get("tokens")
        size = self._limits.vocab_size
        ids = tokens if isinstance(tokens, list) else [None]
        if len(ids) > self._limits.max_length:
            raise ApiError(f"tokens has more than {self._limits.max_length} ids.", "tokens")
        if not all(type(token) is int and 0 <= token < size for token in ids):
            raise ApiError(f"tokens needs a list of ids in [0, {size}).", "tokens")
        return {"prompt": self._service.codec.tokenizer.decode(ids, skip_special_tokens=False)}

    async def tokenizer_info(self, _: Request) -> Response:
        return json_response(self._service.codec.info)

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._service.name,
            "object": "model",
            "created": self._created,
            "owned_by": "specjax",
            "max_model_len": self._limits.max_length,
        }

    async def models(self, _: Request) -> Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        if request.path_params["name"] != self._service.name:
            raise ApiError(
                f"this server has the model {self._service.name!r} alone.",
                "model",
                status=404,
                code="model_not_found",
            )
        return json_response(self._model())

    async def responses(self, _: Request) -> Response:
        raise ApiError(
            "this server has no /v1/responses; /v1/chat/completions takes the same messages, by "
            "client.chat.completions.create.",
            status=404,
        )

    async def health(self, _: Request) -> Response:
        engine = self._service.engine
        value = {"status": engine.state} | ({"error": engine.error} if engine.error else {})
        return json_response(value, 200 if engine.state == "running" else 503)

    async def metrics(self, _: Request) -> Response:
        text = metrics_text(self._service.engine)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")


class _KeyCheck:
    """An application that only requests with the key reach; all may ask for /health."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app, self._header = app, f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and not self._lets_in(scope):
            app = error_response(
                ApiError(
                    "the request has no key, or another one; this server needs its own as "
                    "Authorization: Bearer KEY.",
                    status=401,
                    code="invalid_api_key",
                )
            )
        await app(scope, receive, send)

    def _lets_in(self, scope: Scope) -> bool:
        header = dict(scope["headers"]).get(b"authorization", b"")
        return scope["path"] == "/health" or hmac.compare_digest(header, self._header)


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path} is not what this server answers."
        error = ApiError(message, status=error.status_code)
    elif not isinstance(error, ApiError):
        error = ApiError(f"{type(error).__name__} in the server.", status=500)
    return error_response(error)
