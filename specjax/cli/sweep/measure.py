"""Measures the acceptance of a pair's drafts, and the times of its steps.

    tokens per second = batch size * tokens per step / seconds per step
    step_costs[k] = seconds of a step that drafts k tokens / seconds of one that drafts none

Seconds per step depend on K and the machine, hardly on acceptance. They are measured for
K = 0, 1, ... drafted tokens under synthetic acceptance, a program for each K. One program of
adaptive K runs the steps of all k for the costs: it holds the target's layers for one row and for
K + 1.

Tokens per step depend on the pair, hardly on the machine. For them the prompts are decoded once,
at the largest K.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.cli.sweep.choice import Acceptance
from specjax.config import SpeculativeConfig
from specjax.decode.commit import Finish
from specjax.decode.drafters import Drafter, Models
from specjax.decode.init_and_step import init, step
from specjax.decode.prefill import run_prefill
from specjax.decode.request_batch import RequestArguments, check_arguments
from specjax.decode.state import DecodeState
from specjax.types import Model

__all__ = [
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


class StepTimes(NamedTuple):
    """Times of one kind of step.

    Attributes:
      compile_seconds: of its program.
      step_seconds: for each round, seconds per step.
    """

    compile_seconds: float
    step_seconds: list[float]


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
    arguments = RequestArguments(
        [np.resize(np.roll(text, start), options.context) for start in starts],
        workload.key(number),
        buffer_tokens(options),
        np.float32(options.temperature),
    )
    requests, static = check_arguments(workload.target, drafter, arguments, config)
    return run_prefill(Models(workload.target, drafter), requests, options=static)


def _time_kinds(
    workload: Workload,
    kinds: Mapping[str, tuple[Drafter | None, SpeculativeConfig, jax.Array | None]],
    on_stage: Callable[[str], None],
) -> list[StepTimes]:
    """Times steps of several kinds in alternation, so that other load affects all of them.

    The first round compiles and is not counted. One state is held at a time.
    """
    start_seconds: dict[str, list[float]] = {name: [] for name in kinds}
    step_seconds: dict[str, list[float]] = {name: [] for name in kinds}
    num_steps, rounds = workload.options.steps, workload.options.rounds
    for number in range(rounds + 1):
        for name, (drafter, config, k) in kinds.items():
            on_stage(f"timing {name}, round {number} of {rounds}")
            run = functools.partial(_run_steps, workload.target, drafter, k=k, config=config)
            start = time.perf_counter()
            state = _start_batch(workload, drafter, config, number)
            state = jax.block_until_ready(run(state, np.int32(1)))
            start_seconds[name].append(time.perf_counter() - start)
            start = time.perf_counter()
            state = jax.block_until_ready(run(state, np.int32(num_steps)))
            step_seconds[name].append((time.perf_counter() - start) / num_steps)
            _all_ended(state)
    return [
        StepTimes(max(0.0, first - statistics.median(later)), step_seconds[name][1:])
        for name, (first, *later) in start_seconds.items()
    ]


def measure_steps(workload: Workload, on_stage: Callable[[str], None]) -> list[StepTimes]:
    """Times the decode loop for K = 0 ... `max_speculative_tokens`.

    Args:
      workload: the pair and the sizes.
      on_stage: called before each timing with a sentence about it.

    Returns:
      The times of each K from 0.

    Raises:
      FloatingPointError: if the target's logits turn invalid.
    """

    def config(K: int) -> SpeculativeConfig:
        return SpeculativeConfig(
            num_speculative_tokens=max(K, 1),
            rejection_sample_method="synthetic",
            draft_sample_method=workload.options.draft_sample_method,
            synthetic_acceptance_rate=0.5,
        )

    largest = range(workload.options.max_speculative_tokens + 1)
    kinds = {f"K = {K}": (workload.drafter if K else None, config(K), None) for K in largest}
    return _time_kinds(workload, kinds, on_stage)


def measure_step_costs(workload: Workload, on_stage: Callable[[str], None]) -> list[float]:
    """Times steps of adaptive K that draft 0, 1, ..., `max_speculative_tokens` tokens.

    Args:
      workload: the pair and the sizes.
      on_stage: called before each timing with a sentence about it.

    Returns:
      The costs of k = 0, 1, ...; the first is 1.
    """
    most = workload.options.max_speculative_tokens
    config = SpeculativeConfig(
        "auto",
        draft_sample_method=workload.options.draft_sample_method,
        step_costs=(1.0,) * (most + 1),
    )
    kinds = {
        f'k = {k} of K = "auto"': (workload.drafter, config, jnp.int32(k)) for k in range(most + 1)
    }
    times = _time_kinds(workload, kinds, on_stage)
    medians = [statistics.median(one.step_seconds) for one in times]
    return [round(median / medians[0], 4) for median in medians]
