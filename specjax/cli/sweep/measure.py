"""Measures step times of a pair for K = 0, 1, ... drafted tokens per step.

    tokens per second = batch size * tokens per step / seconds per step

Seconds per step depend on K and the machine, hardly on acceptance. They are measured under
synthetic acceptance, from no accepted drafted token to all. Tokens per step depend on the pair,
hardly on the machine: `inputs` measures them.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.cli.sweep.choice import synthetic_lengths
from specjax.config import DraftSampleMethod, SpeculativeConfig
from specjax.decode.commit import Finish
from specjax.decode.drafters import Drafter, Models
from specjax.decode.init_and_step import step
from specjax.decode.prefill import run_prefill
from specjax.decode.request_batch import RequestArguments, check_arguments
from specjax.decode.state import DecodeState
from specjax.theory.acceptance_rates import expected_acceptance_length, rates_for_length
from specjax.types import Model

__all__ = [
    "MeasuredPoint",
    "StepTimes",
    "Workload",
    "all_ended",
    "buffer_tokens",
    "measure_steps",
    "num_stages",
    "start_batch",
]


class Workload(NamedTuple):
    """A pair, the prompts, and the sizes of the measurement.

    Attributes:
      target: the model whose distribution the output follows.
      drafter: proposes tokens.
      prompts: tokens of each prompt, none empty.
      max_speculative_tokens: the largest K.
      batch_size: requests per step.
      context: tokens in the cache before the timed steps.
      temperature: >= 0.
      key: typed threefry key, ().
      eos_token_ids: tokens that end a text.
      max_new_tokens: tokens decoded for each prompt.
      draft_sample_method: as in `SpeculativeConfig`.
      num_steps: steps per timed run.
      num_rounds: timed runs per K and acceptance length.
    """

    target: Model
    drafter: Drafter
    prompts: list[list[int]]
    max_speculative_tokens: int
    batch_size: int
    context: int
    temperature: float
    key: jax.Array
    eos_token_ids: tuple[int, ...]
    max_new_tokens: int
    draft_sample_method: DraftSampleMethod
    num_steps: int
    num_rounds: int


class MeasuredPoint(NamedTuple):
    """Timed runs of one K at one synthetic acceptance length.

    Attributes:
      expected_length: mean tokens per step under the synthetic rates, by the closed form.
      measured_length: mean tokens per step that were emitted.
      step_seconds: for each round, seconds per step.
      tokens_per_second: for each round, tokens emitted / seconds.
    """

    expected_length: float
    measured_length: float
    step_seconds: list[float]
    tokens_per_second: list[float]


class StepTimes(NamedTuple):
    """Compile time and timed runs of one K, at each synthetic acceptance length."""

    K: int
    compile_seconds: float
    points: list[MeasuredPoint]

    @property
    def step_seconds(self) -> list[float]:
        """Seconds per step of every run at every acceptance length."""
        return [seconds for point in self.points for seconds in point.step_seconds]


def buffer_tokens(max_speculative_tokens: int, num_steps: int) -> int:
    """Returns the buffer length after the context, equal for every K.

    = 1 + (num_steps + 1) (K_max + 1): one token of the prefill, the maximum of the steps, and room
    for one more draft.
    """
    return 1 + (num_steps + 1) * (max_speculative_tokens + 1)


def num_stages(workload: Workload) -> int:
    """Returns the number of calls of `on_stage` by `measure_acceptance` and `measure_steps`."""
    return len(workload.prompts) + (1 + workload.num_rounds) * (workload.max_speculative_tokens + 1)


def all_ended(state: DecodeState) -> bool:
    """Returns whether every request has ended; an invalid one is an error."""
    finish = np.asarray(state.finish)
    if (finish == Finish.INVALID).any():
        raise FloatingPointError("the target's logits turned invalid.")
    return bool(finish.all())


@functools.partial(jax.jit, static_argnames=("config",))
def _run_steps(
    target: Model,
    drafter: Drafter | None,
    state: DecodeState,
    num_steps: Any,
    *,
    config: SpeculativeConfig,
) -> DecodeState:
    """Runs several decode steps in one program, like `generate`."""

    def body(_: Any, state: DecodeState) -> DecodeState:
        return step(target, drafter, state, config=config)[0]

    return jax.lax.fori_loop(0, num_steps, body, state)


def start_batch(
    workload: Workload, drafter: Drafter | None, config: SpeculativeConfig, number: int
) -> DecodeState:
    """Returns a batch after its prompts, without EOS tokens, so that no request ends.

    Its first step feeds the prompts' last tokens.
    """
    text = np.concatenate([np.array(ids, np.int32) for ids in workload.prompts])
    # Requests start at different positions of the text, so that they differ.
    rows = [
        np.resize(np.roll(text, -7 * row), workload.context) for row in range(workload.batch_size)
    ]
    num_tokens = buffer_tokens(workload.max_speculative_tokens, workload.num_steps)
    key, temperature = jax.random.fold_in(workload.key, number), np.float32(workload.temperature)
    arguments = RequestArguments(rows, key, num_tokens, temperature)
    requests, options = check_arguments(workload.target, drafter, arguments, config)
    return run_prefill(Models(workload.target, drafter), requests, options=options)


def _start_synthetic(workload: Workload, K: int, number: int) -> DecodeState:
    """Returns a batch after its first step, by the program of the timed ones."""
    drafter, config = workload.drafter if K else None, _synthetic_config(workload, K)
    state = start_batch(workload, drafter, config, number)
    state = _run_steps(workload.target, drafter, state, np.int32(1), config=config)
    return jax.block_until_ready(state)


def _synthetic_config(workload: Workload, K: int) -> SpeculativeConfig:
    # The rates in use are data of the state: one program serves every acceptance length.
    return SpeculativeConfig(
        num_speculative_tokens=max(K, 1),
        rejection_sample_method="synthetic",
        draft_sample_method=workload.draft_sample_method,
        synthetic_acceptance_length=1.0,
    )


def _set_acceptance_length(state: DecodeState, K: int, length: float) -> tuple[DecodeState, float]:
    """Returns the state with the rates of an acceptance length, and the expected length."""
    if K == 0:
        return state, 1.0
    rates = rates_for_length(length, K)
    settings = state.settings._replace(conditional_rates=rates)
    return state._replace(settings=settings), float(expected_acceptance_length(rates))


def _time_run(workload: Workload, K: int, state: DecodeState) -> tuple[float, int]:
    """Returns the seconds of one timed run and the tokens that it emitted."""
    drafter, config = workload.drafter if K else None, _synthetic_config(workload, K)
    jax.block_until_ready(state)
    start = time.perf_counter()
    num_steps = np.int32(workload.num_steps)
    final_state = _run_steps(workload.target, drafter, state, num_steps, config=config)
    jax.block_until_ready(final_state)
    seconds = time.perf_counter() - start
    all_ended(final_state)
    return seconds, int(final_state.metrics.num_emitted.sum())


def measure_steps(workload: Workload, on_stage: Callable[[str], None]) -> list[StepTimes]:
    """Times the decode loop for K = 0 ... `max_speculative_tokens`.

    Every K is compiled once. Then the Ks are timed in alternation, so that other load on the
    machine affects all of them. One state is held at a time.

    Args:
      workload: the pair and the sizes.
      on_stage: called before each compilation and each timing with a sentence about it.

    Returns:
      The times of each K from 0.

    Raises:
      FloatingPointError: if the target's logits turn invalid.
    """
    max_drafts = workload.max_speculative_tokens
    first_seconds = []
    for K in range(max_drafts + 1):
        on_stage(f"compiling K = {K}")
        start = time.perf_counter()
        _time_run(workload, K, _set_acceptance_length(_start_synthetic(workload, K, 0), K, 1.0)[0])
        first_seconds.append(time.perf_counter() - start)
    runs: dict[tuple[int, float], list[tuple[float, int]]] = {}
    expected_lengths, later_seconds = {}, {}
    for number in range(workload.num_rounds):
        for K in range(max_drafts + 1):
            on_stage(f"timing K = {K}, round {number + 1} of {workload.num_rounds}")
            start = time.perf_counter()
            state = _start_synthetic(workload, K, number)
            prefill_seconds = time.perf_counter() - start
            for length in synthetic_lengths(K):
                timed_state, expected_lengths[K, length] = _set_acceptance_length(state, K, length)
                runs.setdefault((K, length), []).append(_time_run(workload, K, timed_state))
            later_seconds[K] = prefill_seconds + runs[K, 1.0][-1][0]
    return [
        StepTimes(
            K,
            max(0.0, first_seconds[K] - later_seconds[K]),
            [
                _average_runs(workload, expected_lengths[K, n], runs[K, n])
                for n in synthetic_lengths(K)
            ],
        )
        for K in range(max_drafts + 1)
    ]


def _average_runs(
    workload: Workload, expected_length: float, runs: list[tuple[float, int]]
) -> MeasuredPoint:
    num_tokens = statistics.fmean(emitted for _, emitted in runs)
    return MeasuredPoint(
        expected_length,
        num_tokens / (workload.num_steps * workload.batch_size),
        [seconds / workload.num_steps for seconds, _ in runs],
        [emitted / seconds for seconds, emitted in runs],
    )
