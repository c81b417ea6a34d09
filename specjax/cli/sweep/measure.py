"""Measures the acceptance of a pair's drafts, and the times of its steps.

    tokens per second = batch size * tokens per step / seconds per step
    step_costs[k] = seconds of a step that drafts k tokens / seconds of one that drafts none

Seconds per step depend on K and the machine, hardly on acceptance. They are measured for
K = 0, 1, ... drafted tokens under synthetic acceptance, from no accepted drafted token to all, a
program for each K. One program of adaptive K runs the steps of all k for the costs: it holds the
target's layers for one row and for K + 1.

Tokens per step depend on the pair, hardly on the machine. For them the prompts are decoded once,
at the largest K.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.cli.sweep.choice import Acceptance, synthetic_lengths
from specjax.config import SpeculativeConfig
from specjax.decode.commit import Finish
from specjax.decode.drafters import Drafter
from specjax.decode.init_and_step import init, step
from specjax.decode.prefill import run_prefill
from specjax.decode.request_batch import RequestArguments, check_arguments
from specjax.decode.state import DecodeState
from specjax.theory.acceptance_rates import expected_acceptance_length, rates_for_length
from specjax.types import Model

__all__ = [
    "MeasuredPoint",
    "StepTimes",
    "Workload",
    "buffer_tokens",
    "measure_acceptance",
    "measure_step_costs",
    "measure_steps",
]


class Workload(NamedTuple):
    """A pair, the prompts, and the sizes of the measurement.

    Attributes:
      name: of the pair, for display.
      target: the model whose distribution the output follows.
      drafter: proposes tokens.
      prompts: tokens of each prompt, none empty.
      eos_token_ids: tokens that end a text.
      options: of `specjax sweep`.
    """

    name: str
    target: Model
    drafter: Drafter
    prompts: list[list[int]]
    eos_token_ids: tuple[int, ...]
    options: argparse.Namespace

    def key(self, number: int) -> jax.Array:
        """Returns the key of a prompt or a round."""
        # JAX_DEFAULT_PRNG_IMPL may name another implementation.
        return jax.random.fold_in(jax.random.key(self.options.seed, impl="threefry2x32"), number)


class MeasuredPoint(NamedTuple):
    """Timed runs of one K at one synthetic acceptance length.

    Attributes:
      expected_length: mean tokens per step under the synthetic rates, by the closed form.
      step_seconds: for each round, seconds per step.
      step_tokens: for each round, tokens that a step emitted, of all requests.
    """

    expected_length: float
    step_seconds: list[float]
    step_tokens: list[float]


class StepTimes(NamedTuple):
    """Compile time and timed runs of one K, at each synthetic acceptance length."""

    K: int
    compile_seconds: float
    points: list[MeasuredPoint]

    @property
    def step_seconds(self) -> list[float]:
        """Seconds per step of every run at every acceptance length."""
        return [seconds for point in self.points for seconds in point.step_seconds]


def buffer_tokens(options: argparse.Namespace) -> int:
    """Returns the buffer length after the context, equal for every K.

    = 1 + (steps + 1) (K_max + 1): one token of the prefill, the maximum of the steps, and room for
    one more draft.
    """
    return 1 + (options.steps + 1) * (options.max_speculative_tokens + 1)


def _all_ended(state: DecodeState) -> bool:
    """Returns whether every request has ended; an invalid one is an error."""
    finish = np.asarray(state.finish)
    if (finish == Finish.INVALID).any():
        raise FloatingPointError("the target's logits turned invalid.")
    return bool(finish.all())


def measure_acceptance(workload: Workload, K: int, on_stage: Callable[[str], None]) -> Acceptance:
    """Decodes the prompts one by one and counts accepted tokens per step.

    Args:
      workload: the pair and the prompts.
      K: drafted tokens per step, >= 1.
      on_stage: called before each prompt with a sentence about it.

    Returns:
      The number of drafted tokens that each step of each prompt accepted, up to the end of its
      text. The last step drafts K tokens, too: the buffer is longer than the text.

    Raises:
      FloatingPointError: if the target's logits turn invalid.
    """
    options = workload.options
    config = SpeculativeConfig(K, draft_sample_method=options.draft_sample_method)
    num_accepted: list[list[int]] = []
    for number, ids in enumerate(workload.prompts):
        on_stage(f"decoding prompt {number + 1} of {len(workload.prompts)}, K = {K}")
        state = init(
            workload.target,
            workload.drafter,
            [ids],
            keys=workload.key(number)[None],
            max_new_tokens=options.max_new_tokens + K + 1,
            temperature=np.float32(options.temperature),
            eos_token_ids=np.array(workload.eos_token_ids, np.int32),
            config=config,
        )
        num_accepted.append([])
        while not _all_ended(state) and int(state.lengths[0]) < len(ids) + options.max_new_tokens:
            before = int(state.lengths[0])
            state, _ = step(workload.target, workload.drafter, state, config=config)
            # Each step commits one token beyond the accepted ones, or ends in an accepted EOS.
            num_accepted[-1].append(int(state.lengths[0]) - before - 1)
    return Acceptance(K, num_accepted)


@functools.partial(jax.jit, static_argnames=("config",))
def _run_steps(
    target: Model,
    drafter: Drafter | None,
    state: DecodeState,
    num_steps: Any,
    k: jax.Array | None,
    *,
    config: SpeculativeConfig,
) -> DecodeState:
    """Runs several decode steps in one program, like `generate`.

    With k each step verifies k drafted tokens, even if the drafter finds fewer.
    """

    def body(_: Any, state: DecodeState) -> DecodeState:
        draft, settings = state.draft, state.settings
        if k is not None:
            assert settings.k_by_rate is not None
            ids, table = jnp.maximum(draft.token_ids, 0), jnp.full_like(settings.k_by_rate, k)
            num_tokens = jnp.broadcast_to(k, state.lengths.shape)
            state = state._replace(
                draft=draft.replace(token_ids=ids, num_tokens=num_tokens),
                settings=settings._replace(k_by_rate=table),
            )
        return step(target, drafter, state, config=config)[0]._replace(settings=settings)

    return jax.lax.fori_loop(0, num_steps, body, state)


def _start_batch(
    workload: Workload, drafter: Drafter | None, config: SpeculativeConfig, number: int
) -> DecodeState:
    """Returns a batch after its prompts, without EOS tokens, so that no request ends.

    Its first step feeds the prompts' last tokens.
    """
    options = workload.options
    text = np.concatenate([np.array(ids, np.int32) for ids in workload.prompts])
    # Requests start at different positions of the text, so that they differ.
    starts = range(0, -7 * options.batch_size, -7)
    requests, static = check_arguments(
        workload.target,
        drafter,
        [np.resize(np.roll(text, start), options.context) for start in starts],
        keys=workload.key(number),
        config=config,
        max_new_tokens=buffer_tokens(options),
        temperature=np.float32(options.temperature),
    )
    return run_prefill(workload.target, drafter, requests, options=static)


def _time_run(
    workload: Workload,
    drafter: Drafter | None,
    state: DecodeState,
    config: SpeculativeConfig,
    k: jax.Array | None = None,
) -> tuple[float, float]:
    """Returns the seconds per step of one timed run, and the tokens that a step emitted."""
    num_steps = workload.options.steps
    jax.block_until_ready(state)
    start = time.perf_counter()
    operands = (workload.target, drafter, state, np.int32(num_steps), k)
    state = jax.block_until_ready(_run_steps(*operands, config=config))
    seconds = time.perf_counter() - start
    _all_ended(state)
    return seconds / num_steps, int(state.metrics.num_emitted.sum()) / num_steps


def measure_steps(workload: Workload, on_stage: Callable[[str], None]) -> list[StepTimes]:
    """Times the decode loop for K = 0 ... `max_speculative_tokens`.

    The Ks are timed in alternation, so that other load on the machine affects all of them. The
    first round compiles them and is not counted. One state is held at a time.

    Args:
      workload: the pair and the sizes.
      on_stage: called before each timing with a sentence about it.

    Returns:
      The times of each K from 0.

    Raises:
      FloatingPointError: if the target's logits turn invalid.
    """
    options = workload.options
    start_seconds: list[list[float]] = [[] for _ in range(options.max_speculative_tokens + 1)]
    runs: dict[tuple[int, float], list[tuple[float, float]]] = {}
    for number in range(options.rounds + 1):
        for K, starts in enumerate(start_seconds):
            on_stage(f"timing K = {K}, round {number} of {options.rounds}")
            drafter = workload.drafter if K else None
            # The rates in use are data of the state: one program serves every acceptance length.
            config = SpeculativeConfig(
                num_speculative_tokens=max(K, 1),
                rejection_sample_method="synthetic",
                draft_sample_method=options.draft_sample_method,
                synthetic_acceptance_length=1.0,
            )
            start = time.perf_counter()
            state = _start_batch(workload, drafter, config, number)
            operands = (workload.target, drafter, state, np.int32(1), None)
            state = jax.block_until_ready(_run_steps(*operands, config=config))
            starts.append(time.perf_counter() - start)
            for length in synthetic_lengths(K):
                if K:
                    rates = rates_for_length(length, K)
                    settings = state.settings._replace(conditional_rates=rates)
                    state = state._replace(settings=settings)
                run = _time_run(workload, drafter, state, config)
                runs.setdefault((K, length), []).append(run)

    def point(K: int, length: float) -> MeasuredPoint:
        expected = float(expected_acceptance_length(rates_for_length(length, K))) if K else 1.0
        seconds, tokens = zip(*runs[K, length][1:], strict=True)
        return MeasuredPoint(expected, list(seconds), list(tokens))

    return [
        StepTimes(
            K,
            max(0.0, first - statistics.median(later)),
            [point(K, length) for length in synthetic_lengths(K)],
        )
        for K, (first, *later) in enumerate(start_seconds)
    ]


def measure_step_costs(workload: Workload, on_stage: Callable[[str], None]) -> list[float]:
    """Times steps of every k from 0 to the largest, in alternation.

    Args:
      workload: the pair and the sizes.
      on_stage: called before each round with a sentence about it.

    Returns:
      The costs of k = 0, 1, ...; the first is 1.
    """
    options, most = workload.options, workload.options.max_speculative_tokens
    config = SpeculativeConfig(
        "auto",
        draft_sample_method=options.draft_sample_method,
        step_costs=(1.0,) * (most + 1),
    )
    seconds: list[list[float]] = [[] for _ in range(most + 1)]
    for number in range(options.rounds + 1):
        on_stage(f'timing K = "auto", round {number} of {options.rounds}')
        state = _start_batch(workload, workload.drafter, config, number)
        for k, runs in enumerate(seconds):
            runs.append(_time_run(workload, workload.drafter, state, config, jnp.int32(k))[0])
    # The first round compiles.
    medians = [statistics.median(runs[1:]) for runs in seconds]
    return [round(median / medians[0], 4) for median in medians]
