"""Measures the table of step costs that K = "auto" chooses by, on this machine.

    step_costs[k] = seconds of a step that drafts k tokens / seconds of one that drafts none

Both are steps of one program, which holds the target's layers for one row and for K + 1.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.cli.sweep_measure import Workload, start_batch
from specjax.config import SpeculativeConfig
from specjax.decode.drafters import Drafter
from specjax.decode.init_and_step import step
from specjax.decode.state_and_info import DecodeState
from specjax.model import Model

__all__ = ["measure_step_costs", "num_cost_stages"]


def num_cost_stages(workload: Workload) -> int:
    """Returns how often `measure_step_costs` calls `on_stage`."""
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
    """Runs steps that each verify k drafted tokens, whether or not the drafter found as many."""

    def body(_: Any, state: DecodeState) -> DecodeState:
        draft, settings = state.draft, state.settings
        assert settings.k_by_rate is not None
        ids, table = jnp.maximum(draft.token_ids, 0), jnp.full_like(settings.k_by_rate, k)
        num_tokens = jnp.broadcast_to(k, state.lengths.shape)
        state = state._replace(
            draft=draft._replace(token_ids=ids, num_tokens=num_tokens),
            settings=settings._replace(k_by_rate=table),
        )
        state = step(target, drafter, state, config=config)[0]
        return state._replace(settings=settings)

    return jax.lax.fori_loop(0, n, body, state)
