"""One prompt's decoding on the host: streamed as text, and timed against plain decoding."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax import DecodeState, Generation, generate, init, step
from specjax.cli.token_text import list_logprobs
from specjax.config import SpeculativeConfig
from specjax.decode.logprobs import TopLogprobs
from specjax.decode.metrics import Metrics
from specjax.processing.sampling_params import SamplingParams
from specjax.typing import Drafter, Finish, Model

__all__ = [
    "Job",
    "Run",
    "TextStream",
    "Timings",
    "compile_stream",
    "measure",
    "metrics_of",
    "report",
    "stream",
]

# Prompts are padded to a multiple of this, so that those of similar length share compilations.
_WIDTH = 64
_REPEATS = 3
# Seconds of one round of runs from which on a single one is told from noise well enough.
_LONG = 5.0
_REASONS = {
    Finish.LENGTH: "length",
    Finish.END_OF_SEQUENCE: "end_of_sequence",
    Finish.INVALID: "invalid_logits",
}


class Job(NamedTuple):
    """What is to be decoded, and how.

    Attributes:
      name: of the pair, for people.
      target: the model that is followed.
      drafter: what drafts for it, or None.
      tokenizer: of both, with the interface of the `tokenizers` library.
      text: the prompt.
      prompt_ids: its tokens, not empty.
      config: how drafts are made and verified.
      key: typed threefry key, ().
      max_new_tokens: most tokens generated.
      temperature: >= 0.
      eos_token_ids: tokens that end the text.
      sampling: truncation and penalties, or None.
      num_logprobs: likeliest tokens listed per token, or None.
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


class Run(NamedTuple):
    """What came of it: `token_ids`, why it ended, `metrics`, `top_logprobs` [N, ...] if asked."""

    token_ids: list[int]
    finish: str
    metrics: Metrics
    top_logprobs: TopLogprobs | None = None


class Timings(NamedTuple):
    """Wall-clock figures; prefill is in them, compilation is not.

    Attributes:
      compile_seconds: of everything compiled, or read from the compilation cache.
      seconds: median of one decoding.
      tokens_per_second: tokens of that decoding over its seconds.
      plain_seconds: median of the same job without a drafter, None if not measured.
      plain_tokens_per_second: as above.
      speedup: ratio of the two rates.
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


class TextStream:
    """Text of tokens that come one by one, given out as soon as no later token can change it.

    A character whose bytes are spread over tokens is held back until it is whole. The tokens
    of the last piece stay as context, for decoders that treat the first token of a text apart.

    Args:
      tokenizer: with `decode(ids, skip_special_tokens)`.
      context: tokens that stand before the text and are no part of it.
    """

    def __init__(self, tokenizer: Any, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(context)
        self._from, self._done = max(0, len(context) - 8), len(context)

    def _pending(self) -> str:
        before = self._decode(self._ids[self._from : self._done])
        return self._decode(self._ids[self._from :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def feed(self, token_id: int) -> str:
        """The text that this token settles, often empty or more than its own."""
        self._ids.append(token_id)
        text = self._pending()
        # The replacement character is what an unfinished sequence of bytes decodes to.
        if not text or text.endswith("\ufffd"):
            return ""
        self._from, self._done = self._done, len(self._ids)
        return text

    def flush(self) -> str:
        """The text still held back, as it is."""
        text = self._pending()
        self._from = self._done = len(self._ids)
        return text


def _arguments(job: Job) -> dict[str, Any]:
    length = len(job.prompt_ids)
    prompt = np.zeros((1, -(-length // _WIDTH) * _WIDTH), np.int32)
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


def _run_of(job: Job, outcome: DecodeState | Generation) -> Run:
    ids, lengths, finish = jax.device_get((outcome.token_ids, outcome.lengths, outcome.finish))
    place = slice(len(job.prompt_ids), int(lengths[0]))
    top = jax.tree.map(lambda values: np.asarray(values)[0, place], outcome.top_logprobs)
    return Run(ids[0, place].tolist(), _REASONS[int(finish[0])], outcome.metrics, top)


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    outcome = jax.block_until_ready(function())
    return outcome, time.perf_counter() - start


def compile_stream(job: Job) -> float:
    """Compiles what `stream` runs, and gives the seconds that took."""

    def first_step() -> Any:
        state = init(job.target, job.drafter, **_arguments(job))
        return step(job.target, job.drafter, state, config=job.config)

    return max(0.0, _timed(first_step)[1] - _timed(first_step)[1])


def stream(job: Job, show: Callable[[str, int], None]) -> tuple[Run, Timings]:
    """Decodes step by step.

    Args:
      job: what to decode.
      show: is given each piece of text, and the `Origin` of the token that completed it.

    Returns:
      The run, and the time of it, `show` included.
    """
    start = time.perf_counter()
    text = TextStream(job.tokenizer, job.prompt_ids)
    done, origin = len(job.prompt_ids), 0
    state = init(job.target, job.drafter, **_arguments(job))
    while True:
        ids, origins, length, finish = jax.device_get(
            (state.token_ids, state.origins, state.lengths, state.finish)
        )
        for place in range(done, int(length[0])):
            origin = int(origins[0, place])
            show(text.feed(int(ids[0, place])), origin)
        done = int(length[0])
        if finish[0]:
            break
        state, _ = step(job.target, job.drafter, state, config=job.config)
    show(text.flush(), origin)
    seconds = time.perf_counter() - start
    run = _run_of(job, state)
    return run, Timings(0.0, seconds, len(run.token_ids) / seconds, loop="stream")


def measure(job: Job, *, baseline: bool) -> tuple[Run, Timings]:
    """Decodes by `generate`, and again without the drafter, taking turns.

    Args:
      job: what to decode.
      baseline: whether to time plain decoding too; a job without a drafter is plain itself.

    Returns:
      The run with the drafter, and medians.
    """
    arguments = _arguments(job)
    drafters = [job.drafter, None] if baseline and job.drafter is not None else [job.drafter]

    def one_round() -> list[tuple[Generation, float]]:
        decode = functools.partial(generate, job.target, **arguments)
        return [_timed(functools.partial(decode, drafter)) for drafter in drafters]

    first, rounds = one_round(), [one_round()]
    while len(rounds) < _REPEATS and sum(seconds for _, seconds in rounds[0]) < _LONG:
        rounds.append(one_round())
    medians = [statistics.median(run[i][1] for run in rounds) for i in range(len(drafters))]
    runs = [_run_of(job, outcome) for outcome, _ in first]
    rates = [len(run.token_ids) / median for run, median in zip(runs, medians, strict=True)]
    compiling = sum(seconds for _, seconds in first) - sum(medians)
    timings = Timings(max(0.0, compiling), medians[0], rates[0], repeats=len(rounds))
    if len(drafters) > 1:
        speedup = rates[0] / rates[1] if rates[1] else None
        timings = timings._replace(
            plain_seconds=medians[1], plain_tokens_per_second=rates[1], speedup=speedup
        )
    return runs[0], timings


def metrics_of(run: Run) -> dict[str, Any]:
    """The counts and rates of a run as plain numbers; lists are per draft position."""
    metrics = run.metrics
    return {
        "mean_acceptance_length": float(metrics.mean_acceptance_length),
        "draft_acceptance_rate": float(metrics.draft_acceptance_rate),
        "acceptance_rates": np.asarray(metrics.acceptance_rates).tolist(),
        "num_steps": int(metrics.num_steps[0]),
        "num_emitted": int(metrics.num_emitted[0]),
        "num_drafted": np.asarray(metrics.num_drafted)[0].tolist(),
        "num_accepted": np.asarray(metrics.num_accepted)[0].tolist(),
    }


def report(job: Job, run: Run, timings: Timings) -> dict[str, Any]:
    """The object that `--json` prints."""
    text = TextStream(job.tokenizer, job.prompt_ids)
    pieces = [text.feed(token) for token in run.token_ids]
    top = run.top_logprobs
    return {
        "text": "".join([*pieces, text.flush()]),
        "token_ids": run.token_ids,
        "finish": run.finish,
        "logprobs": None if top is None else list_logprobs(job.tokenizer, run.token_ids, top),
        "num_prompt_tokens": len(job.prompt_ids),
        "metrics": metrics_of(run),
        "timings": timings._asdict(),
        "device": jax.devices()[0].device_kind,
        "jax_version": jax.__version__,
    }
