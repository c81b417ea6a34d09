"""Decodes one prompt: streams its text and times it against plain decoding."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax import DecodeState, Generation, generate, init, step
from specjax.cli.token_text import TextStream, list_logprobs
from specjax.config import SpeculativeConfig
from specjax.decode.drafters import Drafter
from specjax.decode.finish_and_origin import Finish
from specjax.decode.logprobs import TopLogprobs
from specjax.decode.metrics import Metrics
from specjax.model import Model
from specjax.processing.sampling_params import SamplingParams

__all__ = [
    "GenerateJob",
    "GenerateResult",
    "Timings",
    "compile_stream",
    "json_report",
    "measure_speed",
    "metrics_json",
    "stream_text",
]

# Prompts are padded to a multiple of this: similar lengths share one compilation.
_PROMPT_MULTIPLE = 64
_MAX_ROUNDS = 3
# If a round of runs takes at least this long, one round is precise enough.
_MIN_ROUND_SECONDS = 5.0
_FINISH_NAMES = {
    Finish.LENGTH: "length",
    Finish.END_OF_SEQUENCE: "end_of_sequence",
    Finish.INVALID: "invalid_logits",
}


class GenerateJob(NamedTuple):
    """A prompt, a pair and the options of a decoding.

    Attributes:
      name: of the pair, for people.
      target: the model whose distribution the output follows.
      drafter: proposes tokens, or None for plain decoding.
      tokenizer: with the interface of the `tokenizers` library.
      text: the prompt.
      prompt_ids: tokens of the prompt, not empty.
      config: how tokens are drafted and verified.
      key: typed threefry key, ().
      max_new_tokens: most tokens generated.
      temperature: >= 0.
      eos_token_ids: tokens that end the text.
      sampling: cutoffs and penalties, or None.
      num_logprobs: most probable tokens listed per token, or None.
    """

    name: str
    target: Model
    drafter: Drafter | None
    tokenizer: Any
    text: str
    prompt_ids: list[int]
    config: SpeculativeConfig
    key: jax.Array
    max_new_tokens: int
    temperature: float
    eos_token_ids: tuple[int, ...]
    sampling: SamplingParams | None = None
    num_logprobs: int | None = None


class GenerateResult(NamedTuple):
    """Generated tokens, why decoding ended, metrics, and `top_logprobs` [N, ...] or None."""

    token_ids: list[int]
    finish: str
    metrics: Metrics
    top_logprobs: TopLogprobs | None = None


class Timings(NamedTuple):
    """Wall-clock times, with prefill and without compilation.

    Attributes:
      compile_seconds: spent on compiling, or on reading the compilation cache.
      seconds: median over decodings.
      tokens_per_second: generated tokens / `seconds`.
      plain_seconds: median without a drafter, None if not measured.
      plain_tokens_per_second: without a drafter, None if not measured.
      speedup: tokens_per_second / plain_tokens_per_second.
      repeats: decodings per median.
      loop: "generate", the whole loop as one program, or "stream", a program per step.
    """

    compile_seconds: float
    seconds: float
    tokens_per_second: float
    plain_seconds: float | None = None
    plain_tokens_per_second: float | None = None
    speedup: float | None = None
    repeats: int = 1
    loop: str = "generate"


def _call_arguments(job: GenerateJob) -> dict[str, Any]:
    length = len(job.prompt_ids)
    prompt = np.zeros((1, -(-length // _PROMPT_MULTIPLE) * _PROMPT_MULTIPLE), np.int32)
    prompt[0, :length] = job.prompt_ids
    return {
        "prompt_token_ids": prompt,
        "prompt_lengths": np.array([length], np.int32),
        "keys": job.key[None],
        "config": job.config,
        "max_new_tokens": job.max_new_tokens,
        "temperature": np.float32(job.temperature),
        "eos_token_ids": np.array(job.eos_token_ids, np.int32),
        "sampling": job.sampling,
        "num_logprobs": job.num_logprobs,
    }


def _result_of(job: GenerateJob, output: DecodeState | Generation) -> GenerateResult:
    ids, lengths, finish = jax.device_get((output.token_ids, output.lengths, output.finish))
    index = slice(len(job.prompt_ids), int(lengths[0]))
    top = jax.tree.map(lambda values: np.asarray(values)[0, index], output.top_logprobs)
    return GenerateResult(
        ids[0, index].tolist(), _FINISH_NAMES[int(finish[0])], output.metrics, top
    )


def _call_and_time(function: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    output = jax.block_until_ready(function())
    return output, time.perf_counter() - start


def compile_stream(job: GenerateJob) -> float:
    """Compiles the programs of `stream_text`, and returns how many seconds that took."""

    def run_first_step() -> Any:
        state = init(job.target, job.drafter, **_call_arguments(job))
        return step(job.target, job.drafter, state, config=job.config)

    return max(0.0, _call_and_time(run_first_step)[1] - _call_and_time(run_first_step)[1])


def stream_text(
    job: GenerateJob, show: Callable[[str, int], None]
) -> tuple[GenerateResult, Timings]:
    """Decodes step by step and passes on text as soon as it is final.

    Args:
      job: what to decode.
      show: called with each piece of text and the `Origin` of the token that completed it.

    Returns:
      The result, and its time with `show` included.
    """
    start = time.perf_counter()
    text = TextStream(job.tokenizer, job.prompt_ids)
    num_shown, origin = len(job.prompt_ids), 0
    state = init(job.target, job.drafter, **_call_arguments(job))
    while True:
        ids, origins, length, finish = jax.device_get(
            (state.token_ids, state.origins, state.lengths, state.finish)
        )
        for index in range(num_shown, int(length[0])):
            origin = int(origins[0, index])
            show(text.feed(int(ids[0, index])), origin)
        num_shown = int(length[0])
        if finish[0]:
            break
        state, _ = step(job.target, job.drafter, state, config=job.config)
    show(text.flush(), origin)
    seconds = time.perf_counter() - start
    result = _result_of(job, state)
    return result, Timings(0.0, seconds, len(result.token_ids) / seconds, loop="stream")


def measure_speed(job: GenerateJob, *, baseline: bool) -> tuple[GenerateResult, Timings]:
    """Times `generate` with the drafter and, in alternation, without.

    Args:
      job: what to decode.
      baseline: whether to time plain decoding too; ignored if the job has no drafter.

    Returns:
      The result with the drafter, and median times.
    """
    arguments = _call_arguments(job)
    drafters = [job.drafter, None] if baseline and job.drafter is not None else [job.drafter]

    def run_round() -> list[tuple[Generation, float]]:
        decode = functools.partial(generate, job.target, **arguments)
        return [_call_and_time(functools.partial(decode, drafter)) for drafter in drafters]

    first_round, rounds = run_round(), [run_round()]
    while (
        len(rounds) < _MAX_ROUNDS and sum(seconds for _, seconds in rounds[0]) < _MIN_ROUND_SECONDS
    ):
        rounds.append(run_round())
    medians = [statistics.median(result[i][1] for result in rounds) for i in range(len(drafters))]
    results = [_result_of(job, output) for output, _ in first_round]
    rates = [
        len(result.token_ids) / median for result, median in zip(results, medians, strict=True)
    ]
    compile_seconds = sum(seconds for _, seconds in first_round) - sum(medians)
    timings = Timings(max(0.0, compile_seconds), medians[0], rates[0], repeats=len(rounds))
    if len(drafters) > 1:
        speedup = rates[0] / rates[1] if rates[1] else None
        timings = timings._replace(
            plain_seconds=medians[1], plain_tokens_per_second=rates[1], speedup=speedup
        )
    return results[0], timings


def metrics_json(result: GenerateResult) -> dict[str, Any]:
    """Returns counts and rates of a result as plain numbers; lists are per drafted position."""
    metrics = result.metrics
    return {
        "mean_acceptance_length": float(metrics.mean_acceptance_length),
        "draft_acceptance_rate": float(metrics.draft_acceptance_rate),
        "acceptance_rates": np.asarray(metrics.acceptance_rates).tolist(),
        "num_steps": int(metrics.num_steps[0]),
        "num_emitted": int(metrics.num_emitted[0]),
        "num_drafted": np.asarray(metrics.num_drafted)[0].tolist(),
        "num_accepted": np.asarray(metrics.num_accepted)[0].tolist(),
    }


def json_report(job: GenerateJob, result: GenerateResult, timings: Timings) -> dict[str, Any]:
    """Returns the object that `--json` prints."""
    text = TextStream(job.tokenizer, job.prompt_ids)
    pieces = [text.feed(token) for token in result.token_ids]
    top = result.top_logprobs
    return {
        "text": "".join([*pieces, text.flush()]),
        "token_ids": result.token_ids,
        "finish": result.finish,
        "logprobs": None if top is None else list_logprobs(job.tokenizer, result.token_ids, top),
        "num_prompt_tokens": len(job.prompt_ids),
        "metrics": metrics_json(result),
        "timings": timings._asdict(),
        "device": jax.devices()[0].device_kind,
        "jax_version": jax.__version__,
    }
