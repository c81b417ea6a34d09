"""Decodes one prompt: streams its text and times its steps, optionally also plain decoding."""

import argparse
import contextlib
import pathlib
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.cli.model_pair import ModelPair, describe_configs, load_pair, pair_shapes
from specjax.cli.program_store import program_path
from specjax.cli.stream_programs import StreamPrograms
from specjax.decode.capacity import DEFAULT_CAPACITY
from specjax.decode.drafters import Drafter
from specjax.decode.logprobs import TopLogprobs
from specjax.decode.metrics import Metrics
from specjax.decode.options import (
    PREFILL_CHUNK_SIZE,
    LoopOptions,
    StaticOptions,
    default_chunk_size,
    uses_kernels,
)
from specjax.decode.request_batch import RequestArguments, check_arguments
from specjax.decode.state import DecodeState, RequestBatch
from specjax.engine.request import FINISH_REASONS, FinishReason
from specjax.engine.stop_strings import StoppedText
from specjax.processing.sampling_params import SamplingParams
from specjax.types import Model

# Returns a context that shows its argument while it is open.
Spinner = Callable[[str], contextlib.AbstractContextManager[Any]]


class GenerateJob(NamedTuple):
    """A prompt, and the pair that decodes it.

    Attributes:
      pair: of models, with the options of the command.
      text: the prompt.
      prompt_ids: tokens of the prompt, not empty.
      sampling: cutoffs, penalties and a grammar, or None.
      folder: of kept compiled programs, or None.
      target: the model whose distribution the output follows; None until it is loaded.
      drafter: proposes tokens, or None for plain decoding.
      programs: that stream the text, or None to compile them when it is streamed.
      max_length: tokens that the buffers have room for, of several prompts or a conversation; None
        is those of the prompt and its text.
    """

    pair: ModelPair
    text: str
    prompt_ids: list[int]
    sampling: SamplingParams | None = None
    folder: pathlib.Path | None = None
    target: Model | None = None
    drafter: Drafter | None = None
    programs: StreamPrograms | None = None
    max_length: int | None = None

    @property
    def options(self) -> argparse.Namespace:
        """Options of the command."""
        return self.pair.options

    @property
    def models(self) -> tuple[Model, Drafter | None]:
        """The target and the drafter."""
        assert self.target is not None
        return self.target, self.drafter

    @property
    def key(self) -> jax.Array:
        """The key of the text; JAX_DEFAULT_PRNG_IMPL may name another implementation."""
        return jax.random.key(self.options.seed, impl="threefry2x32")


class GenerateResult(NamedTuple):
    """Generated text and tokens, why decoding ended, metrics, and listed log-probabilities."""

    text: str
    token_ids: list[int]
    finish: str
    metrics: Metrics
    top_logprobs: TopLogprobs | None = None


class Timings(NamedTuple):
    """Wall-clock times of the steps after the first token, without compilation and prefill.

    Attributes:
      compile_seconds: spent on compiling, or on reading the compilation cache.
      seconds: of these steps together.
      tokens_per_second: tokens of these steps / `seconds`, None if there was no such step.
      plain_seconds: without a drafter, None if not measured.
      plain_tokens_per_second: without a drafter, None if not measured.
      speedup: tokens_per_second / plain_tokens_per_second.
    """

    compile_seconds: float
    seconds: float
    tokens_per_second: float | None
    plain_seconds: float | None = None
    plain_tokens_per_second: float | None = None
    speedup: float | None = None


def _chunk_size(job: GenerateJob) -> int:
    """Tokens of the prompt that are read at once: on a CPU fewer in the smallest capacity.

    A CPU reads the padding of a chunk as slowly as its tokens. A prompt of 60 tokens takes half
    the time in a chunk of 64. One of 1800 is a fifth slower in chunks of 64 than of 128.
    """
    if uses_kernels():
        return default_chunk_size()
    # Messages of a conversation are short, too.
    is_short = len(job.prompt_ids) + job.options.max_new_tokens <= DEFAULT_CAPACITY
    is_short |= job.max_length is not None
    return DEFAULT_CAPACITY // 2 if is_short else PREFILL_CHUNK_SIZE


def check_job(job: GenerateJob) -> tuple[RequestBatch, StaticOptions]:
    """Returns the checked request of a job, and the options that are compiled in."""
    arguments = RequestArguments(
        [job.prompt_ids],
        job.key[None],
        job.options.max_new_tokens,
        np.float32(job.options.temperature),
        np.array(job.pair.target_config.eos_token_ids, np.int32),
        job.sampling,
    )
    options = LoopOptions(
        max_length=job.max_length,
        prefill_chunk_size=_chunk_size(job),
        num_logprobs=job.options.logprobs,
    )
    return check_arguments(*job.models, arguments, job.pair.config, options)


def begin_programs(job: GenerateJob) -> StreamPrograms:
    """Returns the programs that stream a job's text; reads only the shapes of its weights."""
    requests, static = check_job(job)
    path = None
    if job.folder is not None:
        types = jax.tree.map(_describe, (requests, static))
        kind = repr((describe_configs(job.pair), job.drafter is None, types))
        path = program_path(job.folder, kind)
    return StreamPrograms(*job.models, requests, static, path)


def load_models(job: GenerateJob) -> GenerateJob:
    """Returns a job with its models; its programs are compiled while the weights are read.

    A pair whose shapes are not known before it is read has no programs yet.
    """
    with futures.ThreadPoolExecutor(1) as pool:
        weights = pool.submit(load_pair, job.pair)
        shapes = pair_shapes(job.pair)
        if shapes is not None:
            target, drafter = shapes
            programs = begin_programs(job._replace(target=target, drafter=drafter))
            job = job._replace(programs=programs)
        target, drafter = weights.result()
    return job._replace(target=target, drafter=drafter)


def _describe(argument: Any) -> str:
    return str(jax.typeof(argument)) if hasattr(argument, "dtype") else repr(argument)


def _result_of(
    job: GenerateJob, state: DecodeState, length: int, text: StoppedText
) -> GenerateResult:
    """Returns the result of the first `length` tokens of a state."""
    ids, finish, metrics, top = jax.device_get(
        (state.token_ids, state.finish, state.metrics, state.top_logprobs)
    )
    index = slice(len(job.prompt_ids), length)
    top = jax.tree.map(lambda values: values[0, index], top)
    name = FINISH_REASONS.get(int(finish[0]), "interrupted")
    name = FinishReason.STOP_STRING if text.stopped else name
    return GenerateResult(text.text, ids[0, index].tolist(), name, metrics, top)


def _ignore(*_: Any) -> None:
    """Shows nothing."""


def stream_text(
    job: GenerateJob,
    *,
    spinner: Spinner = contextlib.nullcontext,
    begin: Callable[[GenerateJob], None] = _ignore,
    show: Callable[[str, int], None] = _ignore,
    warms_up: bool = False,
) -> tuple[GenerateResult, Timings]:
    """Decodes step by step, up to a stop string, and shows text as soon as it is final.

    Args:
      job: what to decode.
      spinner: returns a context that shows the current work before the first token.
      begin: called once, when the first token has been drawn.
      show: called with each piece of text and the `Origin` of the token that completed it.
      warms_up: whether the programs of a step run once on a copy, after the first token. If not, a
        processor of few cores compiles while it decodes, and runs the first steps more slowly.

    Returns:
      The result, and its times without those of `show`.
    """
    with spinner("compiling"):
        programs = job.programs or begin_programs(job)
        seconds_before = programs.seconds_waited
        programs.wait_for_prompt()
    # Programs of several prompts were begun with the first one.
    requests = None if job.max_length is None else check_job(job)[0]
    with spinner("reading the prompt"):
        state = programs.read_prompt(*job.models, requests)
    with spinner("compiling"):
        state = programs.step(*job.models, state)
    begin(job)
    result, timings, _ = stream_steps(job, programs, state, show=show, warms_up=warms_up)
    compile_seconds = timings.compile_seconds - seconds_before
    return result, timings._replace(compile_seconds=compile_seconds)


def stream_steps(
    job: GenerateJob,
    programs: StreamPrograms,
    state: DecodeState,
    *,
    show: Callable[[str, int], None] = _ignore,
    warms_up: bool = False,
    is_interrupted: Callable[[], bool] = lambda: False,
) -> tuple[GenerateResult, Timings, DecodeState]:
    """Decodes from the first token on, and shows text as soon as it is final.

    Args:
      job: what to decode.
      programs: that have read its prompt.
      state: after the first token.
      show: as in `stream_text`.
      warms_up: as in `stream_text`.
      is_interrupted: asked before each step; True ends the text.

    Returns:
      The result, its times without those of `show`, and the last state.
    """
    text = StoppedText(job.pair.tokenizer, job.prompt_ids, job.options.stop)
    num_shown, first_length = len(job.prompt_ids), int(state.lengths[0])
    step_seconds, origin = 0.0, 0
    while True:
        ids, origins, lengths, finish = jax.device_get(
            (state.token_ids, state.origins, state.lengths, state.finish)
        )
        while num_shown < int(lengths[0]) and not text.stopped:
            origin = int(origins[0, num_shown])
            show(text.feed(int(ids[0, num_shown])), origin)
            num_shown += 1
        if text.stopped or finish[0] or is_interrupted():
            break
        if warms_up:
            programs.warm_up(*job.models, state)
            warms_up = False
        start = time.perf_counter() - programs.seconds_waited
        state = programs.step(*job.models, state)
        step_seconds += time.perf_counter() - programs.seconds_waited - start
    show(text.flush(), origin)
    rate = (num_shown - first_length) / step_seconds if step_seconds else None
    result = _result_of(job, state, num_shown, text)
    return result, Timings(programs.seconds_waited, step_seconds, rate), state


def compare_with_plain(
    job: GenerateJob, timings: Timings, *, spinner: Spinner = contextlib.nullcontext
) -> Timings:
    """Times plain decoding of a prompt, by the programs that stream without a drafter.

    Args:
      job: what was decoded.
      timings: of its decoding.
      spinner: as in `stream_text`.

    Returns:
      The times with those of plain decoding; unchanged if the job has no drafter.
    """
    if job.drafter is None:
        return timings
    plain_job = job._replace(drafter=None, programs=None)
    _, plain = stream_text(plain_job, spinner=spinner, warms_up=True)
    rate, plain_rate = timings.tokens_per_second, plain.tokens_per_second
    return timings._replace(
        compile_seconds=timings.compile_seconds + plain.compile_seconds,
        plain_seconds=plain.seconds,
        plain_tokens_per_second=plain_rate,
        speedup=rate / plain_rate if rate is not None and plain_rate else None,
    )
