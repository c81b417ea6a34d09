"""`Service`: submits what a request asks for to the engine, and makes parts of what comes back.

Parameters -> `Service.submit` -> a `Choice` of each sample of each prompt -> `Choice.part`
"""

import queue
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import jax

from specjax.contrib.serve.codec import Codec
from specjax.contrib.serve.errors import ApiError
from specjax.contrib.serve.limits import Limits
from specjax.contrib.serve.parameters import Parameters
from specjax.contrib.serve.responses import Part
from specjax.contrib.serve.token_scores import TokenScore, score_tokens
from specjax.contrib.serve.token_texts import Offsets, TokenTexts
from specjax.decode.matchers import Matcher
from specjax.engine.async_engine import AsyncEngine
from specjax.engine.request import FinishReason, StreamChunk, openai_finish_reason
from specjax.engine.request_stream import RequestStream
from specjax.engine.submission import key_of_seed
from specjax.engine.usage import Usage
from specjax.processing.sampling_params import SamplingParams

# Values by which a field of `SamplingParams` changes nothing.
_OFF = {"top_k": (0, -1), "top_p": (1,), "min_p": (0,), "repetition_penalty": (1,)}

# Tokens of a chunk from which on its part is made in a thread.
_MANY = 128


class Choice:
    """One text of an answer.

    Args:
      index: of the choice, over prompts x n.
      stream: the engine's.
      parameters: of the request.
      texts: of single tokens.
      echoed: the text of the prompt, or None if the choice does not begin with it.
    """

    def __init__(
        self,
        index: int,
        stream: RequestStream,
        parameters: Parameters,
        texts: TokenTexts,
        echoed: str | None,
    ) -> None:
        self.index, self.stream = index, stream
        self._num_logprobs, self._echoed = parameters.num_logprobs, echoed
        self._is_echo_alone = parameters.max_new_tokens == 0
        self._offsets = Offsets(texts)

    @property
    def usage(self) -> Usage:
        """The counts of the text; those of an echo alone leave out the token behind it."""
        usage = self.stream.request.usage
        return Usage(usage.prompt_tokens, 0) if self._is_echo_alone else usage

    def whole(self) -> Part:
        """Returns all of a choice that has ended, from which no part was taken."""
        return self.part(self.stream.request.chunk_from(0, 0))

    def is_long(self, chunk: StreamChunk) -> bool:
        """Returns whether the part of a chunk takes milliseconds to make."""
        lists_prompt = self._echoed is not None and self._num_logprobs is not None
        return lists_prompt or len(chunk.token_ids) > _MANY

    def part(self, chunk: StreamChunk) -> Part:
        """Returns what a chunk adds; the first adds the prompt, too, if it is echoed.

        Raises:
          ApiError: if the choice ends otherwise than by its length, an end token or a stop string.
        """
        if self._is_echo_alone:
            chunk = chunk._replace(text="", token_ids=[], logprobs=[], top_logprobs=[])
        text, scores, offsets = chunk.text, None, list[int]()
        if self._num_logprobs is not None:
            scores = self._scores(chunk)
            if self._echoed is not None:
                scores = self._prompt_scores() + scores
            offsets = self._offsets.take(score.token_id for score in scores)
        text, self._echoed = (self._echoed or "") + text, None
        reason = chunk.finish_reason
        word = None if reason is None else _finish_reason(reason, chunk.error)
        if word is not None and self._is_echo_alone:
            word = "length"
        return Part(self.index, text, scores, offsets, word)

    def _scores(self, chunk: StreamChunk) -> list[TokenScore]:
        listed = self._num_logprobs or 0
        return score_tokens(chunk.token_ids, chunk.logprobs, chunk.top_logprobs, listed)

    def _prompt_scores(self) -> list[TokenScore]:
        request = self.stream.request
        rows = request.prompt_logprobs
        assert rows is not None
        logprobs = [None if row is None else float(row.logprob) for row in rows]
        ids = request.prompt_token_ids
        return score_tokens(ids, logprobs, rows, self._num_logprobs or 0)


def _finish_reason(reason: str, error: str | None) -> str:
    """Returns an end in OpenAI's words, or raises it as an error."""
    word = openai_finish_reason(reason)
    if word is None:
        status = 504 if reason == FinishReason.TIMED_OUT else 500
        raise ApiError(error or f"the text ended as {reason}.", status=status, code=reason)
    return word


class Service:
    """An engine as a service.

    Args:
      engine: whose thread steps it.
      codec: of the target.
      name: of the model.
      limits: of a request.
      sampling: names of the fields that requests may set.

    Attributes:
      matchers_of: JSON schema -> a function that makes matchers of it, so that a request with many
        texts reads its schema once; None if the engine takes none.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        codec: Codec,
        name: str,
        limits: Limits,
        *,
        sampling: Sequence[str] = (),
    ) -> None:
        self.engine, self.codec, self.name, self.limits = engine, codec, name, limits
        self.texts = TokenTexts(codec.tokenizer, limits.vocab_size)
        self._sampling = tuple(sampling)
        self.matchers_of: Callable[[Any], Callable[[], Matcher]] | None = None

    def submit(self, parameters: Parameters) -> list[Choice]:
        """Returns the choices of a request, all of them in the engine's queue.

        Raises:
          ApiError: for a model of another name, what the engine refuses, and a full queue.
        """
        if parameters.model not in (None, self.name):
            raise ApiError(
                f"the model is {parameters.model!r}; this server has {self.name!r}.",
                "model",
                status=404,
                code="model_not_found",
            )
        prompts = self._encode(parameters)
        arguments = self._arguments(parameters)
        new_matcher = self._read_schema(parameters.schema)
        choices: list[Choice] = []
        try:
            for i, ids in enumerate(prompts):
                echoed = self._echo(parameters, i, ids)
                # As many later bodies go first as the body has texts before.
                ranked = arguments | {"priority": len(choices)}
                for stream in self._submit_prompt(ids, parameters, ranked, new_matcher):
                    choices.append(Choice(len(choices), stream, parameters, self.texts, echoed))
        except BaseException as error:
            for choice in choices:
                choice.stream.close()
            raise _refusal(error) from error
        return choices

    def _encode(self, parameters: Parameters) -> list[list[int]]:
        """Returns the ids of each prompt, which leave room for what they may get."""
        most = self.limits.max_length
        if parameters.messages:
            prompts = [self.codec.encode_chat(parameters.messages, most)]
        else:
            prompts = [
                one if isinstance(one, list) else self.codec.encode_text(one, False, most)
                for one in parameters.prompts
            ]
        param = "messages" if parameters.messages else "prompt"
        num_new = parameters.max_new_tokens or 1
        for ids in prompts:
            if not ids:
                raise ApiError(
                    "the prompt has no tokens: it gives the model nothing to continue.", param
                )
            if len(ids) + num_new > most:
                raise ApiError(
                    f"the prompt has {len(ids)} tokens and may get {num_new} new ones; this server "
                    f"takes at most {most} together.",
                    param,
                    code="context_length_exceeded",
                )
        return prompts

    def _arguments(self, parameters: Parameters) -> dict[str, Any]:
        """Returns the arguments of the engine's `submit` but for prompt, seed and matcher."""
        values = {}
        for name, value in parameters.sampling.items():
            if name in self._sampling:
                values[name] = value
            elif value not in _OFF.get(name, (0,)):
                raise ApiError(f"{name} is given; this server was started without it.", name)
        arguments = {
            # The engine makes at least one token, which an echo alone leaves out.
            "max_new_tokens": 1 if parameters.max_new_tokens == 0 else parameters.max_new_tokens,
            "temperature": parameters.temperature,
            "eos_token_ids": self.codec.eos_token_ids,
            "sampling": SamplingParams(**values) if values else None,
            "stop": parameters.stop,
            "timeout": self.limits.max_seconds,
        }
        if parameters.echo and parameters.num_logprobs is not None:
            if self.limits.max_logprobs is None:
                raise ApiError(
                    "echo is given with logprobs; this server was started without --max-logprobs.",
                    "logprobs",
                )
            arguments["prompt_logprobs"] = True
        return arguments

    def _read_schema(self, schema: object | None) -> Callable[[], Matcher] | None:
        """Returns a function that makes matchers of a schema; None without one."""
        if schema is None:
            return None
        name = "response_format"
        if self.matchers_of is None:
            raise ApiError(f"{name} is given; this server was started without JSON schemas.", name)
        try:
            return self.matchers_of(schema)
        except ValueError as error:
            raise ApiError(str(error), name) from None

    def _submit_prompt(
        self,
        ids: list[int],
        parameters: Parameters,
        arguments: dict[str, Any],
        new_matcher: Callable[[], Matcher] | None,
    ) -> list[RequestStream]:
        """Returns a stream of each sample: sample i has the key folded with i, if n > 1."""
        seed = secrets.randbits(63) if parameters.seed is None else parameters.seed
        key, num_samples = key_of_seed(seed), parameters.num_samples
        if new_matcher is None and num_samples > 1:
            return self.engine.submit_samples(num_samples, ids, key=key, **arguments)
        keys = (
            [jax.random.fold_in(key, i) for i in range(num_samples)] if num_samples > 1 else [key]
        )
        # A matcher reads one text.
        return [
            self.engine.submit(ids, key=key, matcher=new_matcher and new_matcher(), **arguments)
            for key in keys
        ]

    def _echo(self, parameters: Parameters, index: int, ids: list[int]) -> str | None:
        if not parameters.echo:
            return None
        prompt = parameters.prompts[index]
        return prompt if isinstance(prompt, str) else self.codec.tokenizer.decode(ids)


def _refusal(error: BaseException) -> BaseException:
    """Returns what a refusal of the engine is for a client."""
    if isinstance(error, queue.Full):
        return ApiError(str(error), status=429, code="queue_full")
    if isinstance(error, ValueError):
        return ApiError(str(error))
    if isinstance(error, RuntimeError):
        return ApiError(str(error), status=503)
    return error
