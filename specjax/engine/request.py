"""`Request`: the tokens and the text that a request got so far, and the reason of its end."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple, Protocol

import jax
import numpy as np

from specjax.decode.commit import Finish
from specjax.decode.logprobs import TopLogprobs
from specjax.decode.matchers import MatchedText
from specjax.decode.metrics import Metrics
from specjax.engine.prompt_logprobs import PromptListing
from specjax.engine.slots import StepOutput
from specjax.engine.stop_strings import StoppedText
from specjax.engine.usage import Usage
from specjax.processing.kept_tokens import KeptTokens


class FinishReason:
    """Reasons of a request's end."""

    LENGTH = "length"
    END_OF_SEQUENCE = "end_of_sequence"
    STOP_STRING = "stop_string"
    INVALID_LOGITS = "invalid_logits"
    MATCHER_ERROR = "matcher_error"
    TOKENIZER_ERROR = "tokenizer_error"
    REFUSED = "refused"
    ABORTED = "aborted"
    ENGINE_ERROR = "engine_error"
    TIMED_OUT = "timed_out"


# Of a `Finish`, which a step gives a request.
FINISH_REASONS = {
    Finish.LENGTH: FinishReason.LENGTH,
    Finish.END_OF_SEQUENCE: FinishReason.END_OF_SEQUENCE,
    Finish.INVALID: FinishReason.INVALID_LOGITS,
}
_OPENAI_FINISH_REASONS = {
    FinishReason.LENGTH: "length",
    FinishReason.END_OF_SEQUENCE: "stop",
    FinishReason.STOP_STRING: "stop",
}


def openai_finish_reason(reason: str) -> str | None:
    """Returns a `FinishReason` in the words of OpenAI's API, "stop" or "length".

    Args:
      reason: one of `FinishReason`.

    Returns:
      "stop" for "end_of_sequence" and "stop_string", "length" for "length". None for each other
      reason: the text was cut off, and a server answers with an error.

    Example:
      >>> openai_finish_reason("stop_string"), openai_finish_reason("aborted")
      ('stop', None)
    """
    return _OPENAI_FINISH_REASONS.get(reason)


# Errors that ask the program to stop. A tokenizer or matcher that raises one is not at fault.
PROGRAM_EXITS = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)


def describe(error: BaseException) -> str:
    """Returns the name of an error and the beginning of its message.

    Example:
      >>> describe(KeyError(3))
      'KeyError: 3'
    """
    try:
        return f"{type(error).__name__}: {error!s:.1000}"
    except Exception:  # Its __str__ may raise.
        return type(error).__name__


class Stepper(Protocol):
    """Takes an engine's steps. Each method returns whether a request has not ended."""

    def take_step(self) -> bool:
        """Takes a step."""

    async def take_step_async(self) -> bool:
        """Takes a step that coroutines share."""


class Piece(NamedTuple):
    """The tokens and the text that a request gained since the piece before.

    Attributes:
      token_ids: its new tokens.
      text: its new text, which ends with a whole character; empty without a tokenizer.
    """

    token_ids: list[int]
    text: str


class StreamChunk(NamedTuple):
    """A request's new tokens since the chunk before, and whether it has ended.

    The lists have an entry for each new token. Exactly one chunk of a request, the last, has a
    `finish_reason`.

    Attributes:
      token_ids: the new tokens.
      text: the new text, which ends with a whole character; empty without a tokenizer.
      logprobs: as `Request.logprobs`.
      top_logprobs: as `Request.top_logprobs`; empty unless the engine lists them.
      origins: as `Request.origins`.
      finish_reason: one of `FinishReason` in the last chunk, else None.
      error: a sentence which error ended the request, or None.
      usage: counts of the request up to this chunk.
    """

    token_ids: list[int]
    text: str
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]
    origins: list[int]
    finish_reason: str | None
    error: str | None
    usage: Usage


class Request:
    """A request of an engine; `Engine.submit` makes it, and iterating over it yields its pieces.

    `for piece in request` and `async for piece in request` run the engine until this request has
    ended. All other requests go on with it.

    Attributes:
      prompt_token_ids: its prompt.
      token_ids: tokens generated so far; an end-of-sequence token is one of them.
      logprobs: log-probability of each, of the distribution that it was sampled from.
      origins: one of `Origin` for each.
      top_logprobs: a `TopLogprobs` of NumPy arrays for each; empty unless the engine lists them.
      kept_tokens: a `KeptTokens` of NumPy arrays for each, with a mask where the set has more
        tokens than ids; empty unless the engine lists them.
      prompt_logprobs: a list of None for the prompt's first token, and a `TopLogprobs` of NumPy
        arrays for each other, of the model's distribution at temperature 1. None before the first
        generated token, and unless `submit` asked for it.
      text: the text of `token_ids` up to a stop string; None without a tokenizer.
      finish_reason: None while the request goes on, else one of `FinishReason`.
      error: a sentence why the request was refused, or which error ended it; else None.
    """

    def __init__(
        self,
        prompt_token_ids: list[int],
        max_new_tokens: int,
        text: StoppedText | None,
        stepper: Stepper | None,
        matched: MatchedText | None = None,
        listing: PromptListing | None = None,
    ) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.origins: list[int] = []
        self.top_logprobs: list[TopLogprobs] = []
        self.kept_tokens: list[KeptTokens] = []
        self.prompt_logprobs: list[TopLogprobs | None] | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None
        self._max_new_tokens = max_new_tokens
        # Another thread may abort the request while the one that steps adds tokens.
        self._lock = threading.RLock()
        self._text, self._matched = text, matched
        # Of the prompt, until the first token: the arrays of the device are computed by then.
        self._listing = listing
        # The engine's scheduler; None once the request has ended, so that it keeps no engine.
        self._stepper = stepper
        # The counts of all slots and the request's slot; once it has ended, its own counts and 0.
        self._metrics: tuple[Metrics, int] | None = None
        # The tokens of the pending draft, for the matcher.
        self._drafted: list[int] = []
        if text is not None:
            # Done here, because with the first token all slots would wait for a long prompt.
            with self._contain_errors(FinishReason.TOKENIZER_ERROR):
                text.read_context()

    @property
    def text(self) -> str | None:
        """The text so far, up to a stop string; None without a tokenizer."""
        return None if self._text is None else self._text.text

    @property
    def num_remaining(self) -> int:
        """Most tokens that the request may still get."""
        return self._max_new_tokens - len(self.token_ids)

    @property
    def metrics(self) -> Metrics | None:
        """The request's `Metrics`, NumPy arrays of [] and [K]; None before its first token."""
        if self._metrics is None:
            return None
        metrics, slot = self._metrics
        return jax.tree.map(lambda count: np.asarray(count[slot]), metrics)

    @property
    def usage(self) -> Usage:
        """The request's counts so far, in OpenAI's words."""
        num_drafted = num_accepted = 0
        if self._metrics is not None:
            metrics, slot = self._metrics
            # For a few numbers a list is faster than NumPy, and every chunk has them.
            num_drafted = sum(metrics.num_drafted[slot].tolist())
            num_accepted = sum(metrics.num_accepted[slot].tolist())
        num_tokens = len(self.prompt_token_ids), len(self.token_ids)
        return Usage(*num_tokens, num_accepted, num_drafted - num_accepted)

    def chunk_from(self, num_tokens: int, num_characters: int) -> StreamChunk:
        """Returns all that the request has after its first tokens and characters, as of one moment.

        Args:
          num_tokens: tokens that were read before.
          num_characters: characters of `text` that were read before.
        """
        with self._lock:
            return StreamChunk(
                self.token_ids[num_tokens:],
                (self.text or "")[num_characters:],
                self.logprobs[num_tokens:],
                self.top_logprobs[num_tokens:],
                self.origins[num_tokens:],
                self.finish_reason,
                self.error,
                self.usage,
            )

    def result(self) -> "Request":
        """Runs the engine until this request has ended, and returns it."""
        while (stepper := self._stepper) is not None:
            self._check_progress(stepper.take_step())
        return self

    def __iter__(self) -> Iterator[Piece]:
        for piece, stepper in self._pieces():
            if any(piece):
                yield piece
            if stepper is not None:
                self._check_progress(stepper.take_step())

    async def __aiter__(self) -> AsyncIterator[Piece]:
        for piece, stepper in self._pieces():
            if any(piece):
                yield piece
            if stepper is not None:
                self._check_progress(await stepper.take_step_async())

    def _pieces(self) -> Iterator[tuple[Piece, Stepper | None]]:
        """Yields pieces, some empty, and the stepper that makes the next; None with the last."""
        num_tokens = num_characters = 0
        while True:
            stepper = self._stepper
            piece = Piece(self.token_ids[num_tokens:], (self.text or "")[num_characters:])
            num_tokens += len(piece.token_ids)
            num_characters += len(piece.text)
            yield piece, stepper
            if stepper is None:
                return

    def _check_progress(self, is_busy: bool) -> None:
        if not is_busy and self.finish_reason is None:
            raise RuntimeError("the engine has nothing to do, and this request has not ended.")

    def end(self, reason: str, error: str | None = None) -> None:
        """Ends the request, if it has not ended: the first reason stays."""
        with self._lock:
            if self.finish_reason is not None:
                return
            if self._text is not None and reason != FinishReason.TOKENIZER_ERROR:
                with self._contain_errors(FinishReason.TOKENIZER_ERROR):
                    self._text.flush()
                # `flush` may have raised, which ends the request.
                if self.finish_reason is not None:
                    return
                reason = FinishReason.STOP_STRING if self._text.stopped else reason
            if self._metrics is not None:
                # Copy this slot's counts; the batch array can be freed.
                metrics, slot = self._metrics
                self._metrics = Metrics(*(count[slot : slot + 1].copy() for count in metrics)), 0
            self.error = error
            self.finish_reason = reason
            self._listing = None
            self._stepper = None

    @property
    def has_matcher(self) -> bool:
        """Whether a matcher on the host masks its tokens."""
        return self._matched is not None

    def fill_masks(self, masks: np.ndarray) -> None:
        """Writes the masks u32[K + 1, ceil(V / 32)] of its next step, if it has a matcher."""
        if self._matched is not None:
            with self._contain_errors(FinishReason.MATCHER_ERROR):
                self._matched.fill(self._drafted, masks)

    @contextlib.contextmanager
    def _contain_errors(self, reason: str) -> Iterator[None]:
        """Ends this request for a reason such as "matcher_error" if the block raises.

        The error goes no further, unless it is one of `PROGRAM_EXITS`.
        """
        try:
            yield
        except BaseException as error:  # A panic of Rust is no Exception.
            self.end(reason, f"its {reason.removesuffix('_error')} raised {describe(error)}")
            if isinstance(error, PROGRAM_EXITS):
                raise

    def add(self, output: StepOutput, slot: int) -> None:
        """Adds the tokens that a step committed for this request, unless it has ended.

        Args:
          output: of the step, as NumPy arrays.
          slot: index of this request in them.
        """
        with self._lock:
            if self.finish_reason is None:
                self._add(output, slot)

    def _add(self, output: StepOutput, slot: int) -> None:
        """Adds tokens up to a stop string, and ends the request where the step or its text does."""
        if self._listing is not None:
            self.prompt_logprobs = self._listing.by_token()
            self._listing = None
        num_tokens, finish = int(output.num_tokens[slot]), int(output.finish[slot])
        self._metrics = output.metrics, slot
        for i in range(num_tokens):
            token_id = int(output.token_ids[slot, i])
            self.logprobs.append(float(output.logprobs[slot, i]))
            self.origins.append(int(output.origins[slot, i]))
            info = output.info_at(slot, i)
            if info.top_logprobs is not None:
                self.top_logprobs.append(info.top_logprobs)
            if info.kept_tokens is not None:
                self.kept_tokens.append(info.kept_tokens)
            self.token_ids.append(token_id)
            if self._text is not None:
                with self._contain_errors(FinishReason.TOKENIZER_ERROR):
                    self._text.feed(token_id)
                if self._text.stopped or self.finish_reason is not None:
                    break
        if self._text is not None and self._text.stopped:
            self.end(FinishReason.STOP_STRING)
        elif finish > 0:
            self.end(FINISH_REASONS[finish])
        elif self._matched is not None and self.finish_reason is None:
            with self._contain_errors(FinishReason.MATCHER_ERROR):
                self._matched.read(self.token_ids[len(self.token_ids) - num_tokens :])
            assert output.drafted is not None
            self._drafted = [token for token in output.drafted[slot].tolist() if token >= 0]
