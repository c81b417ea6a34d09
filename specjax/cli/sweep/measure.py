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
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.cli.model_pair import ModelPair
from specjax.cli.sweep.choice import Acceptance
from specjax.config import SpeculativeConfig
from specjax.decode.drafters import Drafter, Models
from specjax.decode.init_and_step import init, step
from specjax.decode.prefill import run_prefill
from specjax.decode.request_batch import RequestArguments, check_arguments
from specjax.decode.state import DecodeState
from specjax.decode.step_times import (
    StepKind,
    StepTimes,
    all_ended,
    buffer_tokens,
    fixed_k_kinds,
    time_kinds,
)
from specjax.types import Model


class Workload(NamedTuple):
    """A pair, the prompts, and the sizes of the measurement.

    Attributes:
      pair: of models, with the options of `specjax sweep`.
      target: the model whose distribution the output follows.
      drafter: proposes tokens.
      prompts: tokens of each prompt, none empty.
    """

    pair: ModelPair
    target: Model
    drafter: Drafter
    prompts: list[list[int]]

    @property
    def options(self) -> argparse.Namespace:
        """Options of the command."""
        return self.pair.options

    def key(self, number: int) -> jax.Array:
        """Returns the key of a prompt or a round."""
        # JAX_DEFAULT_PRNG_IMPL may name another implementation.
        return jax.random.fold_in(jax.random.key(self.options.seed, impl="threefry2x32"), number)


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
            eos_token_ids=np.array(workload.pair.target_config.eos_token_ids, np.int32),
            config=config,
        )
        num_accepted.append([])
        while not all_ended(state) and int(state.lengths[0]) < len(ids) + options.max_new_tokens:
            before = int(state.lengths[0])
            state, _ = step(workload.target, workload.drafter, state, config=config)
            # Each step commits one token beyond the accepted ones, or ends in an accepted EOS.
            num_accepted[-1].append(int(state.lengths[0]) - before - 1)
    return Acceptance(K, num_accepted)


@functools.partial(jax.jit, static_argnames=("config",))
def _run_pinned(
    models: Models,
    state: DecodeState,
    num_steps: Any,
    k: jax.Array,
    *,
    config: SpeculativeConfig,
) -> DecodeState:
    """Runs steps of adaptive K that each verify k drafted tokens, even if the drafter has fewer."""

    def body(_: Any, state: DecodeState) -> DecodeState:
        draft, settings = state.draft, state.settings
        assert settings.k_by_rate is not None
        ids, table = jnp.maximum(draft.token_ids, 0), jnp.full_like(settings.k_by_rate, k)
        num_tokens = jnp.broadcast_to(k, state.lengths.shape)
        state = state._replace(
            draft=draft.replace(token_ids=ids, num_tokens=num_tokens),
            settings=settings._replace(k_by_rate=table),
        )
        return step(*models, state, config=config)[0]._replace(settings=settings)

    return jax.lax.fori_loop(0, num_steps, body, state)


def _arguments_of(workload: Workload, number: int) -> RequestArguments:
    """Returns the requests of a round, without EOS tokens, so that no request ends."""
    options = workload.options
    text = np.concatenate([np.array(ids, np.int32) for ids in workload.prompts])
    # Requests start at different positions of the text, so that they differ.
    starts = range(0, -7 * options.batch_size, -7)
    return RequestArguments(
        [np.resize(np.roll(text, start), options.context) for start in starts],
        workload.key(number),
        buffer_tokens(options.steps, options.max_speculative_tokens),
        np.float32(options.temperature),
    )


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
    options, models = workload.options, Models(workload.target, workload.drafter)
    kinds = fixed_k_kinds(
        models,
        options.max_speculative_tokens,
        functools.partial(_arguments_of, workload),
        options.draft_sample_method,
    )
    return time_kinds(kinds, options.steps, options.rounds, on_stage)


def measure_adaptive_costs(workload: Workload, on_stage: Callable[[str], None]) -> list[float]:
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
    models = Models(workload.target, workload.drafter)

    def start(number: int) -> DecodeState:
        arguments = _arguments_of(workload, number)
        requests, static = check_arguments(*models, arguments, config)
        return run_prefill(models, requests, options=static)

    kinds = {
        f'k = {k} of K = "auto"': StepKind(
            start, functools.partial(_run_pinned, models, k=jnp.int32(k), config=config)
        )
        for k in range(most + 1)
    }
    times = time_kinds(kinds, workload.options.steps, workload.options.rounds, on_stage)
    medians = [statistics.median(one.step_seconds) for one in times]
    return [round(median / medians[0], 4) for median in medians]
