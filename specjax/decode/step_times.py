"""Times of decode steps, and the table of them that K = "auto" reads: `measure_step_costs`.

    milliseconds[i][k] = median time of a step of batch_sizes[i] requests that draft k tokens each

Each number of drafted tokens has a program of its own, which verifies k + 1 rows per request under
synthetic acceptance: the time of a step hardly depends on how many tokens it accepts. All of them
begin after one reading of the prompts.
"""

import datetime
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.checks import check_count, check_type
from specjax.config import DraftSampleMethod, SpeculativeConfig
from specjax.decode.commit import Finish
from specjax.decode.drafters import Drafter, Models
from specjax.decode.init_and_step import step
from specjax.decode.options import LoopOptions, StaticOptions, StepOptions
from specjax.decode.prefill import begin_prefill, run_prefill
from specjax.decode.request_batch import RequestArguments, check_arguments
from specjax.decode.state import DecodeState, RequestBatch
from specjax.decode.target_step import vocabulary_size
from specjax.theory.step_costs import MAX_SPECULATIVE_TOKENS, StepCosts
from specjax.types import Model


class StepTimes(NamedTuple):
    """Times of one kind of step.

    Attributes:
      compile_seconds: of its program.
      step_seconds: for each round, seconds per step.
    """

    compile_seconds: float
    step_seconds: list[float]


class StepKind(NamedTuple):
    """One kind of step to time.

    Attributes:
      start: returns a batch after its prompts, given the number of a round.
      run: returns the state after a number of steps, all in one program.
    """

    start: Callable[[int], DecodeState]
    run: functools.partial[DecodeState]


def measure_step_costs(
    target: Model,
    drafter: Drafter,
    *,
    batch_sizes: Sequence[int],
    max_num_speculative_tokens: int = 4,
    context: int = 256,
    draft_sample_method: DraftSampleMethod = "probabilistic",
    options: LoopOptions = LoopOptions(),
    num_steps: int = 32,
    rounds: int = 5,
) -> StepCosts:
    """Returns the times of steps on this device, by which `SpeculativeConfig("auto")` chooses.

    One program is compiled for each batch size and number of drafted tokens. Programs of one batch
    size compile side by side. All numbers of one batch size take turns, so that other load affects
    all of them. Two pairs of caches are held at a time: after the prompts, which are read once, and
    after the steps.

    Args:
      target: as in `generate`.
      drafter: as in `generate`.
      batch_sizes: requests of a step, ints >= 1 in rising order. An engine reads the times of its
        `num_slots`, between two of these sizes by interpolation.
      max_num_speculative_tokens: the largest number of drafted tokens per step, 1 to 32.
      context: tokens of each request before its first step, an int >= 1.
      draft_sample_method: as in `SpeculativeConfig`.
      options: `LoopOptions`. Its `max_length`, if given, has to hold the context and
        (num_steps + 1) * (max_num_speculative_tokens + 1) + 1 tokens more.
      num_steps: of one timing, an int >= 1.
      rounds: timings of each program, an int >= 1. Their median counts.

    Returns:
      `StepCosts` of these batch sizes. `StepCosts.save` keeps them in a file.

    Raises:
      ValueError: for arguments that `generate` refuses, and sizes outside these ranges.

    Example:
      >>> from specjax.markov_chain import markov_chain
      >>> model = markov_chain([[0.1, 0.9], [0.8, 0.2]])
      >>> costs = measure_step_costs(
      ...     model, specjax.ngram_drafter(), batch_sizes=(1, 4), max_num_speculative_tokens=2,
      ...     context=3, num_steps=4, rounds=1)
      >>> [len(times) for times in costs.milliseconds]
      [3, 3]
      >>> config = specjax.SpeculativeConfig("auto", step_costs=costs)
    """
    check_type("drafter", drafter, Drafter, "a specjax.Drafter")
    why = "the most drafted tokens of a step"
    most = check_count("max_num_speculative_tokens", max_num_speculative_tokens, 1, why)
    if most > MAX_SPECULATIVE_TOKENS:
        raise ValueError(
            f"max_num_speculative_tokens is {most}; it needs to be at most "
            f"{MAX_SPECULATIVE_TOKENS}."
        )
    context = check_count("context", context, 1, "the tokens of a request before its first step")
    num_steps = check_count("num_steps", num_steps, 1, "the steps of one timing")
    rounds = check_count("rounds", rounds, 1, "the timings of each program")
    # Checked before anything is timed.
    sizes = StepCosts(tuple(batch_sizes), ((1.0, 1.0),) * len(batch_sizes)).batch_sizes
    vocab_size = vocabulary_size(target, 1, 1, context)
    milliseconds = []
    for size in sizes:
        tokens = (size, context, vocab_size, buffer_tokens(num_steps, most))
        arguments_of = functools.partial(_any_requests, *tokens)
        kinds = fixed_k_kinds(
            Models(target, drafter), most, arguments_of, draft_sample_method, options
        )
        _compile_kinds(kinds.values())
        times = time_kinds(kinds, num_steps, rounds)
        milliseconds.append([round(1e3 * statistics.median(x.step_seconds), 4) for x in times])
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    where = f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {now}, {context} tokens each"
    return StepCosts(sizes, tuple(map(tuple, milliseconds)), where)


def _any_requests(
    size: int, context: int, vocab_size: int, max_new_tokens: int, number: int
) -> RequestArguments:
    """Returns requests of a round. They start at different tokens, so that they differ."""
    prompts = (7 * np.arange(size)[:, None] + np.arange(context)) % vocab_size
    pair = prompts.astype(np.int32), np.full(size, context, np.int32)
    return RequestArguments(pair, jax.random.key(number, impl="threefry2x32"), max_new_tokens)


def buffer_tokens(num_steps: int, most: int) -> int:
    """Returns the buffer length after the context, equal for every K up to `most`.

    = 1 + (steps + 1) (K_max + 1): one token of the prefill, the maximum of the steps, and room for
    one more draft.
    """
    return 1 + (num_steps + 1) * (most + 1)


def fixed_k_kinds(
    models: Models,
    most: int,
    arguments_of: Callable[[int], RequestArguments],
    draft_sample_method: DraftSampleMethod,
    options: LoopOptions = LoopOptions(),
) -> dict[str, StepKind]:
    """Returns the steps of K = 0, 1, ... drafted tokens by names; with K = 0 there is no drafter.

    The caches after the prompts do not depend on K. So the prompts are read once, here.

    Args:
      models: with a drafter.
      most: the largest K, at least 1.
      arguments_of: returns the requests of a round, without EOS tokens, so that none ends. All
        rounds have the prompts of the first.
      draft_sample_method: as in `SpeculativeConfig`.
      options: of the loop.
    """
    used = [models._replace(drafter=None)] + most * [models]
    configs = [
        SpeculativeConfig(
            num_speculative_tokens=max(k, 1),
            rejection_sample_method="synthetic",
            draft_sample_method=draft_sample_method,
            synthetic_acceptance_rate=0.5,
        )
        for k in range(most + 1)
    ]

    def check(k: int, number: int) -> tuple[RequestBatch, StaticOptions]:
        return check_arguments(*used[k], arguments_of(number), configs[k], options)

    requests, static = check(most, 0)
    prompts = jax.block_until_ready(run_prefill(models, requests, options=static))

    def start(k: int, number: int) -> DecodeState:
        requests, static = check(k, number)
        # Outside the program, which would return copies of the caches.
        return _begin_steps(used[k], requests, options=static.step)._replace(
            target_cache=prompts.target_cache, drafter_state=prompts.drafter_state if k else None
        )

    return {
        f"K = {k}": StepKind(
            functools.partial(start, k),
            functools.partial(_run_steps, used[k], config=configs[k]),
        )
        for k in range(most + 1)
    }


@functools.partial(jax.jit, static_argnames="options")
def _begin_steps(models: Models, requests: RequestBatch, *, options: StepOptions) -> DecodeState:
    """Returns the state of `run_prefill` without caches."""
    state = begin_prefill(models, requests, options=options)
    return state._replace(target_cache=None, drafter_state=None)


@functools.partial(jax.jit, static_argnames=("config",))
def _run_steps(
    models: Models, state: DecodeState, num_steps: Any, *, config: SpeculativeConfig
) -> DecodeState:
    """Runs several decode steps in one program, like `generate`."""
    return jax.lax.fori_loop(
        0, num_steps, lambda _, state: step(*models, state, config=config)[0], state
    )


def _compile_kinds(kinds: Iterable[StepKind]) -> None:
    """Compiles the programs of `fixed_k_kinds` side by side; the calls get them from JAX."""
    lowered = [
        _run_steps.lower(*run.args, start(0), np.int32(1), **run.keywords) for start, run in kinds
    ]
    with futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: one.compile(), lowered))


def time_kinds(
    kinds: Mapping[str, StepKind],
    num_steps: int,
    rounds: int,
    on_stage: Callable[[str], None] = lambda name: None,
) -> list[StepTimes]:
    """Times steps of several kinds in alternation, so that other load affects all of them.

    The first round compiles and is not counted. Two pairs of caches are held at a time.

    Args:
      kinds: by names for display.
      num_steps: of one timing.
      rounds: that count.
      on_stage: called before each timing with a sentence about it.

    Raises:
      FloatingPointError: if the target's logits turn invalid.
    """
    start_seconds: dict[str, list[float]] = {name: [] for name in kinds}
    step_seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(rounds + 1):
        for name, kind in kinds.items():
            on_stage(f"timing {name}, round {number} of {rounds}")
            for times, seconds in zip(
                (start_seconds, step_seconds), _time_kind(kind, number, num_steps), strict=True
            ):
                times[name].append(seconds)
    return [
        StepTimes(max(0.0, first - statistics.median(later)), step_seconds[name][1:])
        for name, (first, *later) in start_seconds.items()
    ]


def _time_kind(kind: StepKind, number: int, num_steps: int) -> tuple[float, float]:
    """Returns the seconds of a start with its first step, and of each of some steps after it."""
    begin = time.perf_counter()
    state = kind.start(number)
    jax.block_until_ready(kind.run(state, np.int32(1)))
    start_seconds, begin = time.perf_counter() - begin, time.perf_counter()
    state = jax.block_until_ready(kind.run(state, np.int32(num_steps)))
    step_seconds = (time.perf_counter() - begin) / num_steps
    all_ended(state)
    return start_seconds, step_seconds


def all_ended(state: DecodeState) -> bool:
    """Returns whether every request has ended; an invalid one is an error."""
    finish = np.asarray(state.finish)
    if (finish == Finish.INVALID).any():
        raise FloatingPointError("the target's logits turned invalid.")
    return bool(finish.all())
