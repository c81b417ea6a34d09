"""Runs `specjax serve`: loads the pair, makes the engine, and serves until a signal."""

import functools
import gc
import os
import pathlib
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import uvicorn

from specjax import models
from specjax.cli.arguments import SAMPLING_OPTIONS
from specjax.cli.folders.hub_cache import model_name
from specjax.cli.model_pair import ModelPair, encode_text, load_pair, with_trained_k
from specjax.contrib.grammars.llguidance_matcher import llguidance_reader
from specjax.contrib.serve.app import make_app
from specjax.contrib.serve.codec import Codec, GilFreeTokenizer, tokenizer_info
from specjax.contrib.serve.limits import Limits
from specjax.contrib.serve.parameters import Message
from specjax.contrib.serve.service import Service
from specjax.decode.options import LoopOptions
from specjax.engine.async_engine import AsyncEngine
from specjax.engine.engine import Engine
from specjax.processing.sampling_params import SamplingParams

_MOST_LENGTH = 4096
# Without spaces between values, of which a model may write any number.
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_COMPACT = {"x-guidance": _SEPARATORS}
_CUTOFFS = ("top_k", "top_p", "min_p")


def read_service(pair: ModelPair, terminal: Any) -> Callable[[], None]:
    """Returns a function that serves a pair; the address is taken before the weights are read."""
    if pair.options.use_fp64_gumbel:
        # For the engine's thread, too, which the command's own context does not reach.
        jax.config.update("jax_enable_x64", True)
    bound = bind(pair.options.host, pair.options.port)
    service = make_service(pair)
    return lambda: serve(service, bound, terminal)


def make_service(pair: ModelPair) -> Service:
    """Returns the service of a pair; it reads the weights, and compiles.

    Args:
      pair: of models, with the options of `specjax serve`.
    """
    pair, options = with_trained_k(pair), pair.options
    target_config, tokenizer = pair.target_config, GilFreeTokenizer(pair.tokenizer)
    eos_token_ids = tuple(target_config.eos_token_ids)
    codec = Codec(
        tokenizer,
        lambda text, is_rendered: encode_text(tokenizer, text, chat=is_rendered)[0],
        functools.partial(_render, pair.folder),
        eos_token_ids,
        tokenizer_info(pair.folder, pair.tokenizer, eos_token_ids),
    )
    longest = target_config.max_position_embeddings
    max_length = options.max_length or min(longest, _MOST_LENGTH)
    if max_length > longest:
        raise ValueError(
            f"--max-length is {max_length}; the target's longest sequence is {longest}."
        )
    limits = Limits(
        max_length,
        target_config.vocab_size,
        options.max_logprobs,
        options.max_body_bytes,
        # More would never fit the queue: 429 would make a client send them again and again.
        max_choices=min(128, options.max_waiting),
        max_seconds=options.timeout,
    )
    names = _CUTOFFS if options.no_penalties else SAMPLING_OPTIONS
    sampling = {name: SAMPLING_OPTIONS[name].off for name in names}
    service = Service(
        AsyncEngine(_make_engine(pair, limits, sampling)),
        codec,
        options.model_name or ("specjax" if options.target is None else model_name(pair.folder)),
        limits,
        sampling=tuple(sampling),
    )
    if not options.no_schemas and eos_token_ids:
        matcher_of: Any = llguidance_reader(
            service.texts.bytes, eos_token_ids, lambda text: tokenizer.encode(text).ids
        )
        service.matchers_of = lambda schema: matcher_of(_COMPACT | schema).deep_copy
    return service


def _render(folder: str | os.PathLike[str], messages: Sequence[Message]) -> str:
    """Returns the prompt of a conversation; an error names no path of this machine."""
    try:
        return models.chat_prompt(folder, messages)
    except ValueError as error:
        raise ValueError(str(error).replace(str(pathlib.Path(folder)), "the model")) from None


def _make_engine(pair: ModelPair, limits: Limits, sampling: Mapping[str, float | None]) -> Engine:
    options, (target, drafter) = pair.options, load_pair(pair)
    loop_options = LoopOptions(
        max_length=limits.max_length,
        num_logprobs=limits.max_logprobs,
        logprobs_mode="processed",
        prompt_logprobs=limits.max_logprobs is not None,
    )
    return Engine(
        target,
        drafter,
        num_slots=options.num_slots,
        options=loop_options,
        sampling=SamplingParams(**sampling),
        config=pair.config,
        tokenizer=pair.tokenizer,
        max_waiting=options.max_waiting,
        takes_matchers=not options.no_schemas,
    )


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket at an address, on which nothing listens yet.

    Raises:
      ValueError: if there is no such address, or another program has it.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise ValueError(
            f"--host is {host} and --port {port}, where this server cannot listen "
            f"({error.strerror})."
        ) from None
    return bound


def serve(service: Service, bound: socket.socket, terminal: Any) -> None:
    """Serves until SIGTERM or an interruption, and ends what runs.

    Args:
      service: from `make_service`.
      bound: from `bind`.
      terminal: prints where the server is.
    """
    api_key = os.environ.get("SPECJAX_API_KEY") or None
    host, port = bound.getsockname()[:2]
    if api_key is None and host not in ("127.0.0.1", "::1"):
        terminal.print_warning(
            f"anybody who reaches {host} may use this server; SPECJAX_API_KEY in its environment "
            "makes it ask for a key."
        )
    server = _Server(
        uvicorn.Config(
            make_app(service, api_key=api_key),
            log_level="warning",
            access_log=False,
            server_header=False,
        ),
        lambda: terminal.print_note(f"{service.name} at http://{host}:{port}/v1"),
    )
    # After what runs has ended, uvicorn sends itself the signal once more.
    signal.signal(signal.SIGTERM, lambda *_: None)
    # What is here now stays. The collector need not look at it again, so that it may be called for
    # the little that requests leave in cycles as often as Python does by default.
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 10)
    server.run(sockets=[bound])


class _Server(uvicorn.Server):
    """A server that says when it answers."""

    def __init__(self, config: uvicorn.Config, begin: Any) -> None:
        super().__init__(config)
        self._begin = begin

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._begin()
