"""`init` and `step`: decoding with speculation one step at a time, for streaming."""

import dataclasses
import functools
from typing import Any

import jax

from specjax.config import SpeculativeConfig
from specjax.decode.drafters import Drafter, Models
from specjax.decode.kinds import kinds_of
from specjax.decode.memory import check_memory
from specjax.decode.options import LoopOptions
from specjax.decode.prefill import run_requests
from specjax.decode.request_batch import RequestArguments, check_arguments, check_step_options
from specjax.decode.state import DecodeState, StepInfo
from specjax.decode.step import run_first_step, run_step
from specjax.devices.placement import with_auto_axes
from specjax.implementation import Implementation
from specjax.processing.host_masks import split_first_mask, with_first_mask, with_row_masks
from specjax.processing.sampling_params import SamplingParams
from specjax.types import Model


def init(
    target: Model,
    drafter: Drafter | None,
    prompts: Any,
    *,
    keys: jax.Array,
    max_new_tokens: Any,
    temperature: Any = 1.0,
    eos_token_ids: Any = (),
    sampling: SamplingParams | None = None,
    config: SpeculativeConfig | None = None,
    options: LoopOptions = LoopOptions(),
) -> DecodeState:
    """Reads the prompts, samples the first token of each request and drafts the next ones.

    Args:
      target: each argument as in `generate`.
      drafter: a `Drafter`, or None.
      prompts: lists of ids, or a tuple of arrays (ids, lengths).
      keys: typed threefry keys, [B] or ().
      max_new_tokens: int or i32[B].
      temperature: f32, [B] or scalar.
      eos_token_ids: int, ints or i32[E].
      sampling: `SamplingParams`, or None. Here its `allowed` may be bool [B, 1, V], or words i32 or
        u32 [B, 1, ceil(V / 32)]. It then masks the first generated token, for a host that gives
        each `step` such masks.
      config: a `SpeculativeConfig`, or None.
      options: `LoopOptions`.

    Returns:
      `DecodeState` with one token generated, which `step` takes. Where a mesh's axis `data` does
      not divide the requests, copies of the last one follow them in the state.

    Raises:
      ValueError: for arguments that `generate` refuses.
      MemoryError: as `generate` does.

    Example:
      >>> from specjax.markov_chain import markov_chain
      >>> model = markov_chain([[0.1, 0.9], [0.8, 0.2]])
      >>> state = specjax.init(
      ...     model, None, [[0]], keys=jax.random.key(0), max_new_tokens=3, temperature=0,
      ...     options=specjax.LoopOptions(max_length=4))
      >>> state.token_ids.tolist(), state.lengths.tolist()
      ([[0, 1, -1, -1]], [2])
    """
    sampling, first_mask = split_first_mask(sampling)
    arguments = RequestArguments(
        prompts, keys, max_new_tokens, temperature, eos_token_ids, sampling
    )
    requests, static = check_arguments(target, drafter, arguments, config, options)
    if first_mask is not None:
        settings, size = requests.settings, requests.lengths.shape[0]
        num_rows = static.step.num_rows(drafter)
        masked = with_first_mask(settings.sampling, first_mask, size, num_rows)
        requests = requests._replace(settings=settings._replace(sampling=masked))
    static = dataclasses.replace(static, reads_last=True)
    models = Models(target, drafter)
    kinds = kinds_of(models, requests)
    check_memory(kinds, static)
    state: DecodeState = run_requests(run_first_step, models, requests, kinds, static)
    return state


def step(
    target: Model,
    drafter: Drafter | None,
    state: DecodeState,
    *,
    config: SpeculativeConfig | None = None,
    allowed: Any = None,
    implementation: str | Implementation | None = None,
) -> tuple[DecodeState, StepInfo]:
    """Takes one speculative step of every request that has not ended.

    Args:
      target: as in `init`.
      drafter: as in `init`.
      state: from `init` or `step`.
      config: as in `init`. Its method may differ from the one before, but not to or from
        "synthetic". The step then drops drafts that were drawn for the method before, and stays
        exact.
      allowed: tokens that each row of this step may emit: bool [B, K + 1, V], or words i32 or u32
        [B, K + 1, ceil(V / 32)]. Row i follows the i first drafted tokens of the state, and row K
        gives the bonus token. The mask holds for the target's rows alone: the draft was drawn
        before. A state that `init` began with such a mask needs one in every step. `RowMasks` makes
        them. B counts the state's requests, its copies of the last one, too.
      implementation: as in `init`.

    Returns:
      The next `DecodeState`, and `StepInfo` of the step.

    Raises:
      ValueError: for a draft whose arrays do not fit together, and for another number of drafted
        tokens than the state was begun with. For acceptance rates or `allowed` that the state or
        this call has alone.

    Example:
      >>> from specjax.markov_chain import markov_chain
      >>> model = markov_chain([[0.1, 0.9], [0.8, 0.2]])
      >>> state = specjax.init(
      ...     model, None, [[0]], keys=jax.random.key(0), max_new_tokens=3, temperature=0,
      ...     options=specjax.LoopOptions(max_length=4))
      >>> state, info = specjax.step(model, None, state)
      >>> state.token_ids.tolist(), info.verification.num_emitted.tolist()
      ([[0, 1, 0, -1]], [1])
    """
    config = SpeculativeConfig() if config is None else config
    options = check_step_options(target, config, implementation)
    k = 0 if drafter is None else config.num_speculative_tokens
    is_auto = drafter is not None and config.adaptive_k
    if (k, is_auto) != (state.metrics.num_drafted.shape[-1], state.k_policy.is_adaptive):
        number = f'"auto", at most {k}' if is_auto else f"{k}"
        raise ValueError(
            f"num_speculative_tokens is {number}, and the state was begun with another; step needs "
            "the config and the drafter of init."
        )
    has_rates = state.settings.conditional_rates is not None
    if drafter is not None and (config.rejection_sample_method == "synthetic") != has_rates:
        raise ValueError(
            f"rejection_sample_method is {config.rejection_sample_method!r}, and the state was "
            f"begun {'with' if has_rates else 'without'} acceptance rates, which it keeps; step "
            "needs the config of init."
        )
    if state.settings.token_info is not None:
        state.settings.token_info.check_rule(config)
    size = state.lengths.shape[0]
    sampling = with_row_masks(state.settings.sampling, allowed, size, k + 1)
    state = state._replace(settings=state.settings._replace(sampling=sampling))
    run = functools.partial(run_step, options=options)
    # `like` says whether mesh axes are explicit. One array of the state is enough: to look at all
    # would take long next to a step of half a millisecond.
    models = Models(target, drafter)
    return with_auto_axes(run, target.placement, models, state, like=state.token_ids)
