"""`init` and `step`: decoding with speculation one step at a time, for streaming."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checks import (
    check_count,
    check_keys,
    check_noise_dtype,
    check_prompt,
    parse_array,
    parse_ids,
)
from specjax.config import SpeculativeConfig
from specjax.decode.adaptive_k import k_by_rate
from specjax.decode.capacity import (
    as_host_array,
    choose_max_length,
    explain_out_of_memory,
    pad_batch_to_mesh,
    pad_eos,
    pad_prompt,
    parse_budget,
)
from specjax.decode.drafters import Drafter
from specjax.decode.logprobs import check_logprobs_config
from specjax.decode.prefill import prefill_and_run
from specjax.decode.state import DecodeState, Settings, StepInfo
from specjax.decode.step import run_step
from specjax.decode.target_step import vocabulary_size
from specjax.devices.placement import call_on_auto_axes
from specjax.implementation import Implementation, resolve_implementation
from specjax.processing.row_masks import with_first_mask, with_row_masks
from specjax.processing.sampling_params import SamplingParams, read_sampling
from specjax.types import Model

__all__ = ["PREFILL_CHUNK_SIZE", "check_arguments", "check_prompt_ids", "init", "step"]

PREFILL_CHUNK_SIZE = 128


def init(
    target: Model,
    drafter: Drafter | None,
    prompt_token_ids: Any,
    prompt_lengths: Any,
    *,
    keys: jax.Array,
    config: SpeculativeConfig | None = None,
    max_new_tokens: Any,
    max_length: int | None = None,
    prefill_chunk_size: int = PREFILL_CHUNK_SIZE,
    temperature: Any = 1.0,
    eos_token_ids: Any = (),
    sampling: SamplingParams | None = None,
    allowed: Any = None,
    num_logprobs: int | None = None,
    logprobs_mode: str = "raw",
    implementation: str | Implementation | None = None,
) -> DecodeState:
    """Reads the prompts, samples the first token of each request and drafts the next ones.

    Args:
      target: each argument as in `generate`.
      drafter: a `Drafter`, or None.
      prompt_token_ids: i32[B, L].
      prompt_lengths: i32[B].
      keys: typed threefry keys, [B] or ().
      config: a `SpeculativeConfig`, or None.
      max_new_tokens: int or i32[B].
      max_length: a Python int, or None.
      prefill_chunk_size: a Python int.
      temperature: f32, [B] or scalar.
      eos_token_ids: int, ints or i32[E].
      sampling: `SamplingParams`, or None.
      allowed: what the first generated token may be, from a host that gives each `step` such masks:
        bool [B, V], or words i32 or u32 [B, ceil(V / 32)] as in `SamplingParams`, whose own mask
        it replaces. None is no mask.
      num_logprobs: a Python int, or None.
      logprobs_mode: "raw" or "processed".
      implementation: None, "xla", "triton" or "interpret".

    Returns:
      `DecodeState` with one token generated, which `step` takes. Where a mesh's axis `data` does
      not divide the requests, copies of the last one follow them in the state.

    Raises:
      ValueError: for what `generate` refuses.

    Example:
      >>> from specjax.markov_chain import markov_chain
      >>> model = markov_chain([[0.1, 0.9], [0.8, 0.2]])
      >>> state = specjax.init(
      ...     model, None, [[0]], [1], keys=jax.random.key(0), max_new_tokens=3, max_length=4,
      ...     temperature=0)
      >>> state.token_ids.tolist(), state.lengths.tolist()
      ([[0, 1, -1, -1]], [2])
    """
    arguments = check_arguments(
        target,
        drafter,
        prompt_token_ids,
        prompt_lengths,
        keys=keys,
        config=config,
        max_new_tokens=max_new_tokens,
        max_length=max_length,
        prefill_chunk_size=prefill_chunk_size,
        temperature=temperature,
        eos_token_ids=eos_token_ids,
        sampling=sampling,
        num_logprobs=num_logprobs,
        logprobs_mode=logprobs_mode,
        implementation=implementation,
    )
    check_prompt_ids(arguments, target, drafter)
    if allowed is not None:
        num_rows = 1 + (0 if drafter is None else arguments["config"].num_speculative_tokens)
        settings, size = arguments["settings"], arguments["prompt"].shape[0]
        masked = with_first_mask(settings.sampling, allowed, size, num_rows)
        arguments["settings"] = settings._replace(sampling=masked)
    with explain_out_of_memory(target, drafter, *arguments["prompt"].shape):
        run = functools.partial(prefill_and_run, run_step)
        like = arguments["prompt"], arguments["settings"]
        filled = pad_batch_to_mesh(arguments, target.placement)
        state, _ = call_on_auto_axes(run, target, drafter, like=like, **filled)
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
      config: as in `init`. Of another method, its step drops drafts that were drawn for the method
        before, and goes on exactly; to or from "synthetic" there is no change.
      allowed: what each row of this step may emit: bool [B, K + 1, V], or words i32 or u32
        [B, K + 1, ceil(V / 32)]. Row i follows the i first drafted tokens of the state, and row K
        gives the bonus token. Of the target alone: the draft was drawn before. A state that `init`
        began with `allowed` needs it in every step. `RowMasks` makes them. B counts the
        state's requests, its copies of the last one, too.
      implementation: as in `init`.

    Returns:
      The next `DecodeState`, and `StepInfo` of the step.

    Raises:
      ValueError: for a draft whose arrays do not fit together, for another number of drafted tokens
        than the state was begun with, and for acceptance rates or `allowed` that one of the two has
        alone.

    Example:
      >>> from specjax.markov_chain import markov_chain
      >>> model = markov_chain([[0.1, 0.9], [0.8, 0.2]])
      >>> state = specjax.init(
      ...     model, None, [[0]], [1], keys=jax.random.key(0), max_new_tokens=3, max_length=4,
      ...     temperature=0)
      >>> state, info = specjax.step(model, None, state)
      >>> state.token_ids.tolist(), info.verification.num_emitted.tolist()
      ([[0, 1, 0, -1]], [1])
    """
    config = SpeculativeConfig() if config is None else config
    options = _check_options(config, implementation)
    k = 0 if drafter is None else config.num_speculative_tokens
    is_auto = drafter is not None and config.adaptive_k
    if (k, is_auto) != (state.metrics.num_drafted.shape[-1], state.k_policy.is_adaptive):
        asked = f'"auto", at most {k}' if is_auto else f"{k}"
        raise ValueError(
            f"num_speculative_tokens is {asked}, and the state was begun with another; step needs "
            "the config and the drafter of init."
        )
    has_rates = state.settings.conditional_rates is not None
    if drafter is not None and (config.rejection_sample_method == "synthetic") != has_rates:
        raise ValueError(
            f"rejection_sample_method is {config.rejection_sample_method!r}, and the state was "
            f"begun {'with' if has_rates else 'without'} acceptance rates, which it keeps; step "
            "needs the config of init."
        )
    size = state.lengths.shape[0]
    sampling = with_row_masks(state.settings.sampling, allowed, size, k + 1)
    state = state._replace(settings=state.settings._replace(sampling=sampling))
    # One array of the state, since a step may last half a millisecond.
    return call_on_auto_axes(run_step, target, drafter, state, like=state.token_ids, **options)


def check_arguments(
    target: Model,
    drafter: Drafter | None,
    prompt_token_ids: Any,
    prompt_lengths: Any,
    *,
    keys: jax.Array,
    config: SpeculativeConfig | None,
    max_new_tokens: Any,
    max_length: int | None = None,
    prefill_chunk_size: int = PREFILL_CHUNK_SIZE,
    temperature: Any = 1.0,
    eos_token_ids: Any = (),
    sampling: SamplingParams | None = None,
    num_logprobs: int | None = None,
    logprobs_mode: str = "raw",
    implementation: str | Implementation | None = None,
) -> dict[str, Any]:
    """Returns the checked arguments of `run_prefill`."""
    logprobs = check_logprobs_config(num_logprobs, logprobs_mode)
    config = SpeculativeConfig() if config is None else config
    _check_types(target, drafter, config)
    if isinstance(sampling, SamplingParams) and all(field is None for field in sampling):
        sampling = None
    options = _check_options(config, implementation)
    prompt, lengths = (as_host_array(x) for x in check_prompt(prompt_token_ids, prompt_lengths))
    size, width = prompt.shape
    max_new_tokens = parse_budget(max_new_tokens, size)
    max_length = choose_max_length(max_length, width, lengths, max_new_tokens, target.max_length)
    temperature = as_host_array(parse_array("temperature", temperature, jnp.float32, (), (size,)))
    if isinstance(temperature, np.ndarray):
        temperature = np.broadcast_to(temperature, (size,))
    settings = Settings(
        keys=check_keys(keys, size),
        temperature=temperature,
        prompt_lengths=lengths,
        max_lengths=(lengths + max_new_tokens).astype(jnp.int32),
        eos_token_ids=pad_eos(as_host_array(parse_ids("eos_token_ids", eos_token_ids))),
        conditional_rates=None if drafter is None else config.conditional_rates(),
        sampling=None if sampling is None else read_sampling(sampling, size),
        logprobs=logprobs,
        k_by_rate=None if drafter is None else k_by_rate(config),
    )
    why = "the tokens of a prompt that are read at once"
    return {
        "prompt": pad_prompt(prompt, max_length),
        "lengths": lengths,
        "settings": settings,
        "chunk_size": check_count("prefill_chunk_size", prefill_chunk_size, 1, why),
        **options,
    }


def check_prompt_ids(
    arguments: dict[str, Any],
    target: Model,
    drafter: Drafter | None,
    vocab_size: int | None = None,
) -> None:
    """Refuses prompts with an id outside the target's vocabulary; no array is read for it.

    Args:
      arguments: from `check_arguments`, which reads prompts of the host or of one device.
      target: as in `generate`.
      drafter: as in `generate`.
      vocab_size: V. None traces a step of the target, as `run_prefill` does.
    """
    prompt, lengths = arguments["prompt"], arguments["lengths"]
    if not (isinstance(prompt, np.ndarray) and isinstance(lengths, np.ndarray)):
        return
    if vocab_size is None:
        k = 0 if drafter is None else arguments["config"].num_speculative_tokens
        vocab_size = vocabulary_size(target, prompt.shape[0], k + 1, prompt.shape[1])
    is_token = np.arange(prompt.shape[1]) < lengths[:, None]
    for row, column in np.argwhere(is_token & ((prompt < 0) | (prompt >= vocab_size)))[:1]:
        raise ValueError(
            f"prompt_token_ids[{row}, {column}] is {prompt[row, column]}; it needs an id in "
            f"[0, {vocab_size}), the target's vocabulary."
        )


def _check_options(
    config: SpeculativeConfig, implementation: str | Implementation | None
) -> dict[str, Any]:
    """Returns the static options of a step."""
    check_noise_dtype(config.noise_dtype)
    # Also without a name: this looks for Pallas, and the newest JAX traces anew once it is found.
    resolved = resolve_implementation(implementation)
    return {
        "config": config.compile_key(),
        "implementation": None if implementation is None else resolved,
    }


def _check_types(target: Any, drafter: Any, config: Any) -> None:
    if not isinstance(target, Model):
        raise ValueError(f"target is {type(target).__name__}; it needs a specjax.Model.")
    if drafter is not None and not isinstance(drafter, Drafter):
        raise ValueError(
            f"drafter is {type(drafter).__name__}; it needs specjax.model_drafter(model), "
            "specjax.ngram_drafter(), a specjax.Drafter of your own, or None."
        )
    if drafter is not None and drafter.taps and not drafter.reads_features:
        raise ValueError(
            f"drafter has taps {list(drafter.taps)} and reads_features False; taps are the "
            "features of a drafter that reads them, so it needs reads_features=True."
        )
    if not isinstance(config, SpeculativeConfig):
        raise ValueError(
            f"config is {type(config).__name__}; it needs a specjax.SpeculativeConfig."
        )
