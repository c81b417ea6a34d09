"""Measures the data that choose K: acceptance of drafts, and costs of steps.

    step_costs[k] = seconds of a step that drafts k tokens / seconds of one that drafts none

The prompts are decoded once, at the largest K. One program runs the steps of all k. It holds the
target's layers for one row and for K + 1.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.cli.sweep.choice import Acceptance
from specjax.cli.sweep.measure import Workload, all_ended, start_batch
from specjax.config import SpeculativeConfig
from specjax.decode.drafters import Drafter
from specjax.decode.init_and_step import init, step
from specjax.decode.state import DecodeState
from specjax.types import Model

__all__ = ["measure_acceptance", "measure_step_costs", "num_cost_stages"]


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
    config = SpeculativeConfig(
        num_speculative_tokens=K, draft_sample_method=workload.draft_sample_method
    )
    num_accepted: list[list[int]] = []
    for number, ids in enumerate(workload.prompts):
        on_stage(f"decoding prompt {number + 1} of {len(workload.prompts)}, K = {K}")
        state = init(
            workload.target,
            workload.drafter,
            [ids],
            keys=jax.random.fold_in(workload.key, number)[None],
            max_new_tokens=workload.max_new_tokens + K + 1,
            temperature=np.float32(workload.temperature),
            eos_token_ids=np.array(workload.eos_token_ids, np.int32),
            config=config,
        )
        num_accepted.append([])
        while not all_ended(state) and int(state.lengths[0]) < len(ids) + workload.max_new_tokens:
            before = int(state.lengths[0])
            state, _ = step(workload.target, workload.drafter, state, config=config)
            # Each step commits one token beyond the accepted ones, or ends in an accepted EOS.
            num_accepted[-1].append(int(state.lengths[0]) - before - 1)
    return Acceptance(K, num_accepted)


def num_cost_stages(workload: Workload) -> int:
    """Returns the number of calls of `on_stage` by `measure_step_costs`."""
    return 1 + workload.num_rounds


def measure_step_costs(workload: Workload, on_stage: Callable[[str], None]) -> list[float]:
    """Times steps of every k from 0 to the largest, in alternation.

    Args:
      workload: the pair and the sizes.
      on_stage: called before the compilation and before each round with a sentence about it.

    Returns:
      The costs of k = 0, 1, ...; the first is 1.
    """
    most = workload.max_speculative_tokens
    config = SpeculativeConfig(
        "auto",
        draft_sample_method=workload.draft_sample_method,
        step_costs=(1.0,) * (most + 1),
    )
    seconds: list[list[float]] = [[] for _ in range(most + 1)]
    for number in range(workload.num_rounds + 1):
        on_stage(f'timing K = "auto", round {number} of {workload.num_rounds}')
        state = jax.block_until_ready(start_batch(workload, workload.drafter, config, number))
        for k, runs in enumerate(seconds):
            operands = (workload.target, workload.drafter, state, jnp.int32(k))
            start = time.perf_counter()
            jax.block_until_ready(_run_steps(*operands, config=config, n=workload.num_steps))
            runs.append(time.perf_counter() - start)
    # The first round compiles.
    medians = [statistics.median(runs[1:]) for runs in seconds]
    return [round(median / medians[0], 4) for median in medians]


@functools.partial(jax.jit, static_argnames=("config", "n"))
def _run_steps(
    target: Model,
    drafter: Drafter,
    state: DecodeState,
    k: jax.Array,
    *,
    config: SpeculativeConfig,
    n: int,
) -> DecodeState:
    """Runs steps that each verify k drafted tokens, even if the drafter finds fewer."""

    def body(_: Any, state: DecodeState) -> DecodeState:
        draft, settings = state.draft, state.settings
        assert settings.k_by_rate is not None
        ids, table = jnp.maximum(draft.token_ids, 0), jnp.full_like(settings.k_by_rate, k)
        num_tokens = jnp.broadcast_to(k, state.lengths.shape)
        state = state._replace(
            draft=draft.replace(token_ids=ids, num_tokens=num_tokens),
            settings=settings._replace(k_by_rate=table),
        )
        state = step(target, drafter, state, config=config)[0]
        return state._replace(settings=settings)

    return jax.lax.fori_loop(0, n, body, state)
