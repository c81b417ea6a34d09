"""What a loop needs of a device's memory, known from shapes alone, before anything compiles.

    needed = batch_size * slot_bytes + max(step_bytes, chunk_bytes)

A lower bound: what the models' layers hold meanwhile is not in it. A batch that does not fit by it
is refused; one that fits may still run out of memory, and `capacity.explain_out_of_memory` says so.
"""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import jax
import numpy as np

from specjax.checks import check_count
from specjax.config import SpeculativeConfig
from specjax.decode.capacity import format_bytes, num_bytes
from specjax.decode.drafters import Drafter, Models
from specjax.decode.kinds import Kinds, kind_of_model
from specjax.decode.options import LoopOptions, StaticOptions, check_capacity
from specjax.decode.prefill import begin_prefill, is_traced
from specjax.decode.request_batch import RequestArguments, check_arguments
from specjax.decode.state import DecodeState, RequestBatch
from specjax.decode.target_step import apply_model, count_rows
from specjax.devices.placement import with_auto_axes
from specjax.processing.sampling_params import SamplingParams
from specjax.types import Model


class MemoryNeeds(NamedTuple):
    """Bytes of a loop's arrays besides the parameters, on all devices of a mesh together.

    Attributes:
      slot_bytes: state of one request: its caches by their dtypes, layers and `max_length`, its
        buffers, and the logits of its pending draft.
      step_bytes: of one step of all requests: the target's rows of logits [B, K + 1, V] and the
        hidden states that they are made of.
      chunk_bytes: of a chunk of prompts: the hidden states that the models return, and with
        `LoopOptions.prompt_logprobs` the target's logits.
    """

    slot_bytes: int
    step_bytes: int
    chunk_bytes: int

    def of_slots(self, num_slots: float) -> int:
        """Returns the bytes that so many slots and the larger of a step and a chunk take."""
        return int(num_slots * self.slot_bytes) + max(self.step_bytes, self.chunk_bytes)


def memory_needs(
    target: Model,
    drafter: Drafter | None,
    *,
    batch_size: int,
    options: LoopOptions,
    sampling: SamplingParams | None = None,
    config: SpeculativeConfig | None = None,
) -> MemoryNeeds:
    """Returns the bytes of a loop's arrays; nothing is compiled, and no array is made.

    Args:
      target: a `Model`; of its parameters, only shapes and dtypes are read.
      drafter: a `Drafter`, or None.
      batch_size: B, requests of `generate` or slots of an `Engine`, a Python int >= 1.
      options: `LoopOptions`. Its `max_length` is needed. Its listed log-probabilities and kept
        tokens count as buffers of whole texts, which slots of an engine do not have.
      sampling: `SamplingParams` with any values in the fields that requests have, or None.
      config: a `SpeculativeConfig`. None is the default one.

    Returns:
      `MemoryNeeds`.

    Raises:
      ValueError: for what `generate` refuses.

    Example:
      >>> from specjax.models import TransformerConfig, build
      >>> model = build(TransformerConfig(64, 32, 64, 3, 4, 2, 8))
      >>> options = specjax.LoopOptions(max_length=128, prefill_chunk_size=16)
      >>> needs = memory_needs(model, None, batch_size=4, options=options)
      >>> cache = 2 * 3 * 2 * 8 * 128 * 4  # keys and values, layers, heads, head_dim, tokens, f32
      >>> needs.slot_bytes - cache < 2000  # tokens and their log-probabilities
      True
      >>> needs.step_bytes == 4 * (64 + 32) * 4, needs.chunk_bytes == 4 * 16 * 32 * 4
      (True, True)
    """
    batch_size = check_count("batch_size", batch_size, 1, "the requests of a step")
    check_capacity(options, "the tokens of prompt and text")
    prompts = (np.zeros((batch_size, 1), np.int32), np.ones((batch_size,), np.int32))
    key = jax.random.key(0, impl="threefry2x32")
    arguments = RequestArguments(prompts, key, 1, sampling=sampling)
    requests, static = check_arguments(target, drafter, arguments, config, options)
    return _needs_of_batch(Models(target, drafter), requests, static)


def needs_of_state(
    models: Models, state: DecodeState, chunk_tokens: int, lists_chunks: bool = False
) -> MemoryNeeds:
    """Returns the needs of requests whose state, or its shapes, is known.

    Args:
      models: the target, and a drafter or None.
      state: of B requests. Leaves that they share count as B parts.
      chunk_tokens: tokens that a chunk has of all prompts together.
      lists_chunks: whether the logits of a chunk are made, too.
    """
    target, size = models.target, state.lengths.size
    ids = jax.ShapeDtypeStruct((size, count_rows(state)), np.int32)
    # As the step calls it, which takes over what is traced here.
    operands = (target, ids, ids, state.target_cache, models.taps)
    hidden, features, _ = apply_model.eval_shape(*operands)
    logits = jax.eval_shape(target.logits, target.params, hidden)
    # Where the hidden states are the logits, they are no second array, and prompts make none.
    states = num_bytes(features if hidden.shape == logits.shape else (hidden, features))
    step_bytes = states + num_bytes(logits)
    chunk_bytes = (step_bytes if lists_chunks else states) // ids.size * chunk_tokens
    return MemoryNeeds(num_bytes(state) // size, step_bytes, chunk_bytes)


def _needs_of_batch(models: Models, requests: RequestBatch, options: StaticOptions) -> MemoryNeeds:
    def needs(models: Models, requests: RequestBatch) -> MemoryNeeds:
        state = jax.eval_shape(
            functools.partial(begin_prefill, options=options.step), models, requests
        )
        size, width = requests.token_ids.shape
        chunk_tokens = size * min(options.chunk_size, width)
        return needs_of_state(models, state, chunk_tokens, options.prompt_logprobs)

    placed: MemoryNeeds = with_auto_axes(needs, models.target.placement, models, requests, like=())
    return placed


def check_memory(kinds: Kinds, options: StaticOptions) -> None:
    """Refuses a batch that the target's devices have no room for, before programs are compiled.

    A batch that fitted is not looked at again: its programs are there. Neither is one inside an
    outer program, nor one on devices that do not tell how much is free, such as CPUs.

    Args:
      kinds: of the call's models and requests.
      options: from `check_arguments`.

    Raises:
      MemoryError: with the bytes of each part, and what to lower.
    """
    if not is_traced():
        _check_once(kinds, options, kinds.target.devices or _default_devices())


@functools.lru_cache(maxsize=64)
def _check_once(kinds: Kinds, options: StaticOptions, devices: frozenset[jax.Device]) -> None:
    """Refuses a batch; what it raises is not kept, so that the next call looks again."""
    free = free_bytes(devices)
    if free is None:
        return
    target, drafter, requests = (kind.shapes() for kind in kinds)
    models, (size, max_length) = Models(target, drafter), requests.token_ids.shape
    needs = _needs_of_batch(models, requests, options)
    needed = needs.of_slots(size)
    if needed <= free:
        return
    parts = {
        "max_length": size * needs.slot_bytes,
        "num_speculative_tokens" if models.drafter else "number of prompts": needs.step_bytes,
        "prefill_chunk_size": needs.chunk_bytes,
    }
    largest = max(parts, key=parts.__getitem__)
    # Fewer requests need fewer logits. How many tokens a chunk has of each may depend on them.
    each = needs.slot_bytes + needs.step_bytes // size
    most = min((free - needs.chunk_bytes) // needs.slot_bytes, free // each)
    fewer = f", or at most {most} prompts at once" if 0 < most < size else ""
    raise MemoryError(
        f"The device has no room for {size} requests: each takes {format_bytes(needs.slot_bytes)} "
        f"at max_length {max_length}; a step takes {format_bytes(needs.step_bytes)} for its "
        f"logits, a chunk {format_bytes(needs.chunk_bytes)}; {format_bytes(needed)} together, and "
        f"{format_bytes(free)} are free. It needs a smaller {largest}{fewer}."
    )


def devices_of(target: Model) -> frozenset[jax.Device]:
    """Returns the devices on which a target's arrays were put; else JAX's default device."""
    return kind_of_model(target).devices or _default_devices()


def _default_devices() -> frozenset[jax.Device]:
    """Returns the device of arrays that were put on none, by themselves."""
    default = jax.config.values["jax_default_device"]
    if default is None or isinstance(default, str):
        default = jax.local_devices(backend=default)[0]
    return frozenset({default})


def free_bytes(devices: Iterable[jax.Device]) -> int | None:
    """Returns the bytes that are free on all devices together; None where one does not tell.

    A CPU does not: its allocator fails when it is asked. Nor does a device of another process.
    """
    devices = list(devices)
    if {each.process_index for each in devices} != {jax.process_index()}:
        return None
    stats = [device.memory_stats() or {} for device in devices]
    if not all("bytes_limit" in each for each in stats):
        return None
    return sum(each["bytes_limit"] - each.get("bytes_in_use", 0) for each in stats)
