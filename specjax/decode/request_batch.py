"""The requests of a batch: arguments of `generate` and `init`, checked and made arrays.

    RequestArguments -> check_arguments -> `RequestBatch` of arrays, `StaticOptions`

`prefill.run_requests` then calls `check_prompt_ids`, which needs the target's vocabulary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checks import (
    as_array,
    check_flag,
    check_keys,
    check_noise_dtype,
    check_type,
    parse_array,
    parse_ids,
)
from specjax.config import SpeculativeConfig
from specjax.decode.adaptive_k import k_by_rate
from specjax.decode.capacity import (
    as_host_array,
    choose_max_length,
    pad_eos,
    pad_prompt,
    parse_budget,
)
from specjax.decode.drafters import Drafter
from specjax.decode.options import LoopOptions, StaticOptions, StepOptions, choose_chunk_size
from specjax.decode.state import RequestBatch, Settings
from specjax.decode.target_step import vocabulary_size
from specjax.decode.token_info import check_token_info
from specjax.implementation import Implementation, resolve_implementation, with_row_invariance
from specjax.processing.sampling_params import SamplingParams, read_sampling
from specjax.types import Model


class RequestArguments(NamedTuple):
    """Arguments of `generate` that describe the requests, unchecked; other values are data."""

    prompts: Any
    keys: jax.Array
    max_new_tokens: Any
    temperature: Any = 1.0
    eos_token_ids: Any = ()
    sampling: SamplingParams | None = None


def check_arguments(
    target: Model,
    drafter: Drafter | None,
    arguments: RequestArguments,
    config: SpeculativeConfig | None = None,
    options: LoopOptions = LoopOptions(),
) -> tuple[RequestBatch, StaticOptions]:
    """Returns the arguments of `generate`: checked arrays, and options that are compiled in.

    Args:
      target: as in `generate`, unchecked, as is each of the following.
      drafter: as in `generate`.
      arguments: of all requests.
      config: as in `generate`.
      options: as in `generate`.
    """
    config = SpeculativeConfig() if config is None else config
    _check_types(target, drafter, config, options)
    token_info = check_token_info(options, config, target.row_invariant)
    sampling = arguments.sampling
    if isinstance(sampling, SamplingParams) and all(field is None for field in sampling):
        sampling = None
    step_options = check_step_options(target, config, options.implementation)
    prompt, lengths = (as_host_array(x) for x in parse_prompts(arguments.prompts))
    size, width = prompt.shape
    max_new_tokens = parse_budget(arguments.max_new_tokens, size)
    sizes = (options.max_length, width, lengths, max_new_tokens, target.max_length)
    max_length = choose_max_length(*sizes)
    temperature = parse_array("temperature", arguments.temperature, jnp.float32, (), (size,))
    temperature = as_host_array(temperature)
    if isinstance(temperature, np.ndarray):
        temperature = np.broadcast_to(temperature, (size,))
    settings = Settings(
        keys=check_keys(arguments.keys, size),
        temperature=temperature,
        prompt_lengths=lengths,
        max_lengths=(lengths + max_new_tokens).astype(jnp.int32),
        eos_token_ids=pad_eos(as_host_array(parse_ids("eos_token_ids", arguments.eos_token_ids))),
        conditional_rates=None if drafter is None else config.conditional_rates(),
        sampling=None if sampling is None else read_sampling(sampling, size),
        token_info=token_info,
        k_by_rate=None if drafter is None else k_by_rate(config.for_batch_size(size)),
    )
    chunk_size = choose_chunk_size(options, size)
    requests = RequestBatch(pad_prompt(prompt, max_length), lengths, settings)
    lists_prompts = _check_prompt_logprobs(options)
    return requests, StaticOptions(step_options, chunk_size, prompt_logprobs=lists_prompts)


def parse_prompts(prompts: Any) -> tuple[Any, Any]:
    """Returns prompts i32[B, L], padded with 0, and their lengths i32[B].

    A tuple of two whose first member has two axes or more is the pair (ids, lengths). Everything
    else, lists among them, is a sequence of prompts.

    Args:
      prompts: as in `generate`, unchecked.

    Returns:
      NumPy arrays. JAX arrays of a pair are returned as JAX arrays.

    Raises:
      ValueError: for an empty prompt, and for a value that is neither.

    Example:
      >>> ids, lengths = parse_prompts([[1, 2, 3], [4]])
      >>> ids.tolist(), lengths.tolist()
      ([[1, 2, 3], [4, 0, 0]], [3, 1])
      >>> [x.tolist() for x in parse_prompts((np.array([[1, 2, 3], [4, 9, 9]]), [3, 1]))]
      [[[1, 2, 3], [4, 9, 9]], [3, 1]]
    """
    if _is_pair(prompts):
        return _parse_pair("prompts", *prompts)
    rows = _parse_lists("prompts", prompts)
    lengths = np.array([row.size for row in rows], np.int32)
    ids = np.zeros((len(rows), lengths.max()), np.int32)
    for padded, row in zip(ids, rows, strict=True):
        padded[: row.size] = row
    return ids, lengths


def parse_texts(name: str, texts: Any) -> list[np.ndarray]:
    """Returns the ids of each text, i32[L] of its own length; `texts` are as `parse_prompts` takes.

    Args:
      name: of the argument, in messages.
      texts: unchecked.

    Raises:
      ValueError: for texts that `parse_prompts` refuses, and for traced ones.

    Example:
      >>> [row.tolist() for row in parse_texts("texts", (np.array([[1, 2], [4, 9]]), [2, 1]))]
      [[1, 2], [4]]
    """
    if not _is_pair(texts):
        return _parse_lists(name, texts)
    ids, lengths = _parse_pair(name, *texts)
    if isinstance(ids, jax.core.Tracer) or isinstance(lengths, jax.core.Tracer):
        raise ValueError(f"{name} is traced; the host reads it, so it needs arrays with values.")
    return [row[:length] for row, length in zip(np.asarray(ids), np.asarray(lengths), strict=True)]


def _is_pair(prompts: Any) -> bool:
    """Returns whether prompts are a tuple (ids, lengths)."""
    return isinstance(prompts, tuple) and len(prompts) == 2 and _num_axes(prompts[0]) >= 2


def _num_axes(value: Any) -> int:
    """Returns the number of axes of an array, or of nested lists, by their first members."""
    if isinstance(value, list | tuple):
        return 1 + (_num_axes(value[0]) if value else 0)
    return getattr(value, "ndim", 0)


def _parse_lists(name: str, prompts: Any) -> list[np.ndarray]:
    """Returns the ids of each prompt of a sequence of lists, i32[P]."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        shape = f" of shape {prompts.shape}" if hasattr(prompts, "shape") else ""
        raise ValueError(
            f"{name} is {type(prompts).__name__}{shape}; it needs lists of ids, such as "
            "[[1, 2, 3], [4]], or a tuple of arrays (ids, lengths)."
        )
    if not prompts:
        raise ValueError(f"{name} is empty; it needs one {name.removesuffix('s')} or more.")
    return [_parse_prompt(f"{name}[{i}]", prompt) for i, prompt in enumerate(prompts)]


def _parse_prompt(name: str, prompt: Any) -> np.ndarray:
    """Returns the ids of one prompt, i32[P]."""
    if isinstance(prompt, jax.core.Tracer):
        raise ValueError(f"{name} is traced; traced prompts are a tuple of arrays (ids, lengths).")
    row = np.asarray(as_array(name, prompt))
    if row.ndim != 1:
        raise ValueError(
            f"{name} has shape {row.shape}; a prompt is one list of ids, as in [[1, 2, 3], [4]], "
            "and padded arrays are a tuple (ids, lengths)."
        )
    if not row.size:
        raise ValueError(f"{name} is empty; an empty prompt gives the model nothing to continue.")
    ids: np.ndarray = parse_array(name, row, np.int32, row.shape)
    return ids


def _parse_pair(name: str, token_ids: Any, lengths: Any) -> tuple[Any, Any]:
    """Returns prompts i32[B, L] and their lengths i32[B]; NumPy arrays remain NumPy arrays."""
    token_ids = as_array(f"{name}[0]", token_ids)
    lengths = as_array(f"{name}[1]", lengths)
    if token_ids.ndim != 2 or 0 in token_ids.shape:
        raise ValueError(
            f"{name}[0] has shape {token_ids.shape}; of a tuple (ids, lengths), the ids need "
            "[B, L] with B, L >= 1."
        )
    ids = parse_array(f"{name}[0]", token_ids, jnp.int32, token_ids.shape)
    lengths = parse_array(f"{name}[1]", lengths, jnp.int32, token_ids.shape[:1])
    if not isinstance(lengths, jax.core.Tracer):
        known = np.asarray(lengths)
        low, high = int(known.min(initial=1)), int(known.max(initial=1))
        if low < 1 or high > token_ids.shape[1]:
            raise ValueError(
                f"{name}[1], the lengths, runs from {low} to {high}; each needs to be between 1 "
                f"and {token_ids.shape[1]}, the width of the ids: an empty prompt gives the model "
                "nothing to continue."
            )
    return ids, lengths


def check_prompt_ids(
    target: Model, requests: RequestBatch, num_rows: int, vocab_size: int | None = None
) -> None:
    """Refuses prompts with an id outside the target's vocabulary.

    Prompts that are traced, or lie on several devices, are not checked: they are no NumPy arrays.

    Args:
      target: as in `generate`.
      requests: from `check_arguments`.
      num_rows: K + 1; not read if `vocab_size` is given.
      vocab_size: V. None traces a step of the target, which `run_prefill` uses again.
    """
    ids, lengths = requests.token_ids, requests.lengths
    if not (isinstance(ids, np.ndarray) and isinstance(lengths, np.ndarray)):
        return
    if vocab_size is None:
        vocab_size = vocabulary_size(target, ids.shape[0], num_rows, ids.shape[1])
    is_token = np.arange(ids.shape[1]) < lengths[:, None]
    for row, column in np.argwhere(is_token & ((ids < 0) | (ids >= vocab_size)))[:1]:
        raise ValueError(
            f"prompts has {ids[row, column]} as token {column} of prompt {row}; it needs an id "
            f"in [0, {vocab_size}), the target's vocabulary."
        )


def check_text_ids(name: str, ids: np.ndarray, vocab_size: int) -> None:
    """Refuses a text i32[L] with an id outside a model's vocabulary."""
    for at in np.flatnonzero((ids < 0) | (ids >= vocab_size))[:1]:
        raise ValueError(
            f"{name} has {ids[at]} as token {at}; it needs an id in [0, {vocab_size}), the model's "
            "vocabulary."
        )


def check_step_options(
    target: Model, config: SpeculativeConfig, implementation: str | Implementation | None
) -> StepOptions:
    """Returns the options of a step, or refuses them."""
    check_noise_dtype(config.noise_dtype)
    if target.row_invariant:
        implementation = with_row_invariance(implementation)
    # Called even without a name, because it looks for Pallas. Once Pallas was found, the newest JAX
    # traces anew: so it is found before the first trace.
    resolved = resolve_implementation(implementation)
    return StepOptions(config.compile_key(), None if implementation is None else resolved)


def _check_prompt_logprobs(options: LoopOptions) -> bool:
    """Returns whether prompts are listed, or refuses that without a number of listed tokens."""
    if check_flag("prompt_logprobs", options.prompt_logprobs) and options.num_logprobs is None:
        raise ValueError(
            "prompt_logprobs is True, and num_logprobs is None; it needs a number of listed "
            "tokens, 0 or more."
        )
    return options.prompt_logprobs


def _check_types(target: Any, drafter: Any, config: Any, options: Any) -> None:
    check_type("target", target, Model, "a specjax.Model")
    if drafter is not None:
        needed = "specjax.model_drafter(model), specjax.ngram_drafter(), a specjax.Drafter of your "
        check_type("drafter", drafter, Drafter, f"{needed}own, or None")
    if drafter is not None and drafter.taps and not drafter.reads_features:
        raise ValueError(
            f"drafter has taps {list(drafter.taps)} and reads_features False; taps are the "
            "features of a drafter that reads them, so it needs reads_features=True."
        )
    check_type("config", config, SpeculativeConfig, "a specjax.SpeculativeConfig")
    check_type("options", options, LoopOptions, "specjax.LoopOptions(...)")
