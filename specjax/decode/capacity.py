"""Capacity: the tokens of a request that the buffers of a batch hold, S or `max_length`.

A program is compiled for a capacity. Prompts of other lengths and other numbers of new tokens use
it again. Arrays of the host are padded here in NumPy, because `jnp.pad` outside of a program would
compile for every width. `unpad` removes the padding.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checks import check_count, check_shape, parse_array
from specjax.core.noise import fold_in_rows
from specjax.decode.state import RequestBatch
from specjax.devices.placement import Placement
from specjax.processing.sampling_params import FIELDS

DEFAULT_CAPACITY = 128
# End-of-sequence ids are padded to a multiple of this.
_EOS_IDS = 8
# No token has this id, so that no emitted token equals it.
_NO_TOKEN = -2


def as_host_array(value: Any) -> Any:
    """Returns a NumPy array of a value on the host or on one device, and other arrays unchanged."""
    if isinstance(value, jax.core.Tracer):
        return value
    if isinstance(value, jax.Array) and len(value.sharding.device_set) > 1:
        return value
    return np.asarray(value)


def _is_known(*values: Any) -> bool:
    """Returns whether no value is traced, so that the host can read all of them."""
    return not any(isinstance(value, jax.core.Tracer) for value in values)


def parse_budget(max_new_tokens: Any, batch_size: int) -> Any:
    """Returns `max_new_tokens` as an int, or i32[] or i32[B] of an array; refuses less than 1."""
    if not hasattr(max_new_tokens, "shape") and not isinstance(max_new_tokens, list | tuple):
        return check_count("max_new_tokens", max_new_tokens, 1, "tokens that a request may have")
    counts = parse_array("max_new_tokens", max_new_tokens, jnp.int32, (), (batch_size,))
    if _is_known(counts) and np.min(np.asarray(counts), initial=1) < 1:
        raise ValueError(f"max_new_tokens holds {np.min(np.asarray(counts))}; it needs 1 or more.")
    return as_host_array(counts)


def choose_max_length(
    max_length: Any, width: int, lengths: Any, max_new_tokens: Any, limit: int | None
) -> int:
    """Returns the capacity of a batch, or refuses one that its texts or the target do not fit.

    Args:
      max_length: a Python int, or None for the next power of two, at least 128, that fits.
      width: L of the prompts' array.
      lengths: i32[B].
      max_new_tokens: an int or i32[B].
      limit: most tokens that the target's positions take, None if it names none.

    Returns:
      S, a Python int.
    """
    if _is_known(lengths, max_new_tokens):
        needed = int(np.max(np.asarray(lengths, np.int64) + np.asarray(max_new_tokens, np.int64)))
    elif _is_known(max_new_tokens):
        needed = width + int(np.max(np.asarray(max_new_tokens)))
    elif max_length is None:
        raise ValueError(
            "max_new_tokens is traced, so that it cannot size the buffers; give "
            "options=LoopOptions(max_length=...), a Python int."
        )
    else:
        needed = width + 1 if not _is_known(lengths) else int(np.max(np.asarray(lengths))) + 1
    is_given = max_length is not None
    if max_length is None:
        chosen = max(DEFAULT_CAPACITY, 1 << (needed - 1).bit_length())
        max_length = chosen if limit is None else max(min(chosen, limit), needed)
    max_length = check_count("max_length", max_length, 2, "the tokens that buffers have room for")
    if limit is not None and max_length > limit:
        cause = f"max_length is {max_length}" if is_given else f"a text may need {needed} tokens"
        raise ValueError(f"{cause}, and the target takes texts of at most {limit} tokens.")
    if needed > max_length:
        raise ValueError(
            f"max_length is {max_length}; the longest prompt and its max_new_tokens need {needed}."
        )
    return max_length


def pad_prompt(prompt: Any, max_length: int) -> Any:
    """Returns prompts i32[B, S] of i32[B, L], padded with 0 or, if L > S, without their end."""
    width = prompt.shape[1]
    if not isinstance(prompt, np.ndarray):
        if width > max_length:
            return prompt[:, :max_length]
        return jnp.pad(prompt, ((0, 0), (0, max_length - width)))
    padded = np.zeros((prompt.shape[0], max_length), np.int32)
    padded[:, : min(width, max_length)] = prompt[:, :max_length]
    return padded


def pad_batch_to_mesh(requests: RequestBatch, placement: Placement | None) -> RequestBatch:
    """Pads the batch to a multiple of the mesh's data axis by repeating the last request.

    A batch that the axis does not divide would not be sharded, and every step would send whole
    rows of logits between devices.

    Args:
      requests: from `check_arguments`.
      placement: of the target.
    """
    size = requests.lengths.shape[0]
    num_filled = round_up_to_mesh(size, placement)
    if num_filled == size:
        return requests
    settings, index = requests.settings, np.minimum(np.arange(num_filled), size - 1)
    keys = settings.keys if settings.keys.shape else fold_in_rows(settings.keys, size)

    def repeat(x: Any, rank: int = 1) -> Any:
        """Repeats the last request of an array; one of fewer than `rank` axes is for them all."""
        return x[index] if x is not None and np.ndim(x) >= rank else x

    names = ("temperature", "prompt_lengths", "max_lengths")
    each = {name: repeat(getattr(settings, name)) for name in names}
    if (sampling := settings.sampling) is not None:
        fields = {
            name: repeat(getattr(sampling, name), field.rank + 1)
            for name, field in FIELDS.items()
            if not field.is_shared
        }
        each["sampling"] = sampling._replace(**fields)
    settings = settings._replace(keys=keys[index], **each)
    return RequestBatch(requests.token_ids[index], requests.lengths[index], settings)


def round_up_to_mesh(size: int, placement: Placement | None) -> int:
    """Returns the least number of requests, from `size` on, that a mesh's data axis divides."""
    return size if placement is None else placement.round_up(size)


def pad_eos(ids: Any, min_size: int = _EOS_IDS) -> Any:
    """Returns ids i32[E], padded to a multiple of 8, at least `min_size`.

    So another number of ids compiles nothing.
    """
    check_shape("eos_token_ids", ids, (ids.size,))
    num_padding = max(min_size, -(-ids.size // _EOS_IDS) * _EOS_IDS) - ids.size
    pad = np.pad if isinstance(ids, np.ndarray) else jnp.pad
    return pad(ids, (0, num_padding), constant_values=_NO_TOKEN)


def unpad(token_ids: Any, vocab_size: int | None = None) -> list[list[int]]:
    """Returns rows of token ids as lists of ints on the host, without padding.

    Args:
      token_ids: i32[B, L]; negative ids are padding.
      vocab_size: int; ids at or above it are dropped too. None drops none.

    Returns:
      One list of ints per row.

    Example:
      >>> specjax.unpad(jnp.array([[3, 9, -1], [1, -1, -1]]), vocab_size=8)
      [[3], [1]]
    """
    rows = np.asarray(token_ids)
    limit = np.inf if vocab_size is None else vocab_size
    return [[int(token) for token in row if 0 <= token < limit] for row in rows]


@contextlib.contextmanager
def explain_out_of_memory(models: Any, batch_size: int, max_length: int) -> Iterator[None]:
    """Adds the bytes of a batch's caches to an out-of-memory error of the block.

    Args:
      models: the target, and a drafter or None.
      batch_size: B.
      max_length: S.

    Raises:
      MemoryError: for the device's error.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        cache, state = jax.eval_shape(lambda: models.init_caches(batch_size, max_length))
        sizes = [f"The target's cache takes {format_bytes(num_bytes(cache))}"]
        if models.drafter is not None:
            sizes.append(f"the drafter's state {format_bytes(num_bytes(state))}")
        raise MemoryError(
            f"The device is out of memory. {' and '.join(sizes)} for batch_size {batch_size} and "
            f"max_length {max_length}; a smaller one of either takes less."
        ) from error


def num_bytes(tree: Any) -> int:
    """Returns the bytes of a pytree of arrays, or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def format_bytes(size: int) -> str:
    """Returns a number of bytes as text, in the largest binary unit that is not larger.

    Example:
      >>> format_bytes(192), format_bytes(3 * 2**29)
      ('192 bytes', '1.50 GiB (1610612736 bytes)')
    """
    for exponent, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >> exponent:
            return f"{size / 2**exponent:.2f} {unit} ({size} bytes)"
    return f"{size} bytes"
