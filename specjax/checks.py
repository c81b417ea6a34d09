"""Checks of public arguments: a `ValueError` names the argument, its value and what is needed."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.file_io import quote
from specjax.types import Draft, Pieces, RaggedDraft

_MOST = 2**31 - 1
_LOGIT_DTYPES = ("bfloat16", "float16", "float32")


def parse_array(name: str, value: Any, dtype: Any, *shapes: tuple[int, ...]) -> Any:
    """Returns an argument as an array of `dtype` and of one of `shapes`, or raises `ValueError`.

    Python and NumPy numbers become arrays here, on the host and of a fixed dtype, so
    that 1, 1.0 and np.float64(1) share one compilation.
    """
    value = as_array(name, value)
    expected = jnp.dtype(dtype)
    if value.dtype == expected and not getattr(value, "weak_type", False):
        check_shape(name, value, *shapes)
        return value
    allowed = (jnp.integer,) if expected.kind == "i" else (jnp.integer, jnp.floating)
    if not any(jnp.issubdtype(value.dtype, kind) for kind in allowed):
        noun = "integers" if expected.kind == "i" else "numbers"
        raise ValueError(f"{name} has dtype {value.dtype}; it needs {noun} ({expected}).")
    check_shape(name, value, *shapes)
    if expected.kind == "i":
        value = _narrow(name, value, expected)
    if getattr(value, "weak_type", False):
        return jax.lax.convert_element_type(value, expected)
    return value if value.dtype == expected else value.astype(expected)


def as_array(name: str, value: Any) -> Any:
    """Returns an argument that has a shape and a dtype, or makes an array of its numbers."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return value
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{name} is not an array: {error}") from None
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name} is {type(value).__name__}; it needs an array of numbers.")
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _narrow(name: str, value: Any, expected: Any) -> Any:
    """Returns integers clipped to the range of `expected`; refuses known ones outside it."""
    limits = jnp.iinfo(expected)
    actual = jnp.iinfo(value.dtype)
    if actual.min >= limits.min and actual.max <= limits.max:
        return value
    if isinstance(value, np.ndarray | np.generic):
        if value.size and (value.min() < limits.min or value.max() > limits.max):
            raise ValueError(f"{name} holds integers outside the range of {expected}.")
        return value
    # A traced id beyond the range becomes the largest, which no vocabulary holds.
    low = value.dtype.type(max(limits.min, actual.min))
    return jnp.clip(value, low, value.dtype.type(limits.max))


def check_shape(name: str, value: Any, *shapes: tuple[int, ...]) -> None:
    """Raises `ValueError` for an array whose shape is none of `shapes`."""
    if value.shape not in shapes:
        expected = " or ".join(str(shape) for shape in shapes)
        raise ValueError(f"{name} has shape {value.shape}; it needs {expected}.")


def check_count(name: str, value: Any, least: int, why: str) -> int:
    """Returns a Python int of at least `least`; the error ends with `why` it is needed."""
    try:
        count = operator.index(value)
    except TypeError:
        count = None
    if count is None or isinstance(value, bool) or count < least:
        raise ValueError(f"{name} is {value!r}; it needs a Python int >= {least}, {why}.")
    if count > _MOST:
        raise ValueError(
            f"{name} is {value!r}; it needs at most {_MOST}: counts are 32-bit integers."
        )
    return count


def parse_optional(name: str, value: Any, dtype: Any, *shapes: tuple[int, ...]) -> Any:
    """Returns an argument as `parse_array` does, and None for None."""
    return None if value is None else parse_array(name, value, dtype, *shapes)


def parse_ids(name: str, value: Any) -> Any:
    """Returns token ids i32[E] of one int, several, or None; on the host what came from there."""
    ids = as_array(name, [] if value is None else value)
    ids = ids.astype(np.int32) if ids.size == 0 else parse_array(name, ids, jnp.int32, ids.shape)
    return ids.reshape(-1)


def parse_rates(rates: Any, size: int, k: int) -> Any:
    """Returns conditional rates f32[K] or f32[B, K]; refuses known ones outside [0, 1]."""
    rates = parse_optional("conditional_rates", rates, jnp.float32, (k,), (size, k))
    if isinstance(rates, np.ndarray) and not np.all((rates >= 0) & (rates <= 1)):
        raise ValueError("conditional_rates holds numbers outside [0, 1]; each is a probability.")
    return rates


def check_logits(name: str, logits: Any, form: str, leading: int | None = None) -> None:
    """Raises `ValueError` unless logits have the axes of `form`, `leading` first, and the dtype."""
    if logits.ndim != len(form.split(",")):
        raise ValueError(f"{name} has shape {logits.shape}; it needs {form}.")
    if leading is not None and logits.shape[0] != leading:
        raise ValueError(
            f"{name} has shape {logits.shape}; it needs {form} with a leading axis of {leading}."
        )
    if str(logits.dtype) not in _LOGIT_DTYPES:
        raise ValueError(
            f"{name} has dtype {logits.dtype}; logits are bfloat16, float16 or float32."
        )
    if logits.shape[-1] == 0:
        raise ValueError(f"{name} has an empty vocabulary axis: shape {logits.shape}.")


def parse_rows(logits: Any) -> Any:
    """Returns logits [..., V] of any number of axes as an array, or refuses them."""
    logits = as_array("logits", logits)
    if logits.ndim == 0:
        raise ValueError("logits has shape (); it needs [..., V], the vocabulary last.")
    check_logits("logits", logits, ", ".join("V" * logits.ndim))
    return logits


def check_num_listed(name: str, num: int, vocab_size: int) -> None:
    """Refuses to list more tokens than the vocabulary has."""
    if num > vocab_size:
        raise ValueError(
            f"{name} is {num} for a vocabulary of {vocab_size}; it needs at most that."
        )


def check_applied(
    name: str, outputs: Any, token_ids: Any, cache: Any, num_taps: int | None = None
) -> None:
    """Raises `ValueError` for outputs of a model's `apply` that a loop cannot carry on.

    Args:
      name: of the function, in messages.
      outputs: (hidden, cache), of `apply_with_taps` (hidden, features, cache).
      token_ids: i32[B, L], as given to the function.
      cache: as given to the function.
      num_taps: A of `apply_with_taps`, or None.
    """
    names = ("hidden", "cache") if num_taps is None else ("hidden", "features", "cache")
    if not isinstance(outputs, tuple | list) or len(outputs) != len(names):
        kind = f"{len(outputs)} values" if isinstance(outputs, tuple | list) else _form(outputs)
        raise ValueError(f"{name} returned {kind}; it needs ({', '.join(names)}).")
    size, length = token_ids.shape
    for noun, state, width in zip(names, outputs[:-1], ("E", f"{num_taps} * E"), strict=False):
        if np.shape(state)[:2] != (size, length) or np.ndim(state) != 3:
            raise ValueError(
                f"{name} returned {noun} {_form(state)} for token_ids {_form(token_ids)}; it needs "
                f"[{size}, {length}, {width}]."
            )
    caches = outputs[-1], cache.cache if isinstance(cache, Pieces) else cache
    parts = [[jax.tree.structure(each), *map(_form, jax.tree.leaves(each))] for each in caches]
    for part, needed in zip(*parts, strict=False):
        if part != needed:
            raise ValueError(
                f"{name} returned a cache with {quote(str(part))} in place of "
                f"{quote(str(needed))}; it needs the arrays of the cache that it is given, of the "
                "same shapes and dtypes."
            )


def check_model_logits(name: str, logits: Any, hidden: Any) -> None:
    """Raises `ValueError` unless a model's function `name` gave one row per hidden state."""
    shape, dtype = getattr(logits, "shape", ()), str(getattr(logits, "dtype", None))
    if shape[:-1] != hidden.shape[:-1] or 0 in shape[-1:] or dtype not in _LOGIT_DTYPES:
        raise ValueError(
            f"{name} returned {_form(logits)} for hidden {_form(hidden)}; it needs "
            f"[{', '.join(map(str, hidden.shape[:-1]))}, V] in bfloat16, float16 or float32."
        )


def _form(value: Any) -> str:
    """Returns dtype and shape of an array as text, such as float32[2, 3], else the type."""
    is_array = hasattr(value, "shape") and hasattr(value, "dtype")
    return f"{value.dtype}{list(value.shape)}" if is_array else type(value).__name__


def check_draft(draft: Draft) -> Draft:
    """Returns a draft with its small arrays in their dtypes; refuses arrays that do not fit."""
    if not isinstance(draft, Draft):
        raise ValueError(f"draft is {type(draft).__name__}; it needs a specjax.Draft.")
    ids = as_array("draft.token_ids", draft.token_ids)
    if ids.ndim != 2:
        raise ValueError(
            f"draft.token_ids has shape {ids.shape}; it needs [B, K]. Those of requests laid end "
            "to end are a specjax.RaggedDraft."
        )
    return Draft(**_parse_fields(draft, ids, ids.shape[0]))


def check_ragged_draft(draft: RaggedDraft, num_rows: int) -> RaggedDraft:
    """Returns a ragged draft as `check_draft` does, its counts i32[B + 1] from 0.

    Args:
      draft: the argument.
      num_rows: N + B, of the target's logits.
    """
    why = "the most drafted tokens of any request, because it is the width of the result"
    k = check_count("draft.max_draft_tokens", draft.max_draft_tokens, 0, why)
    ids = as_array("draft.token_ids", draft.token_ids)
    if ids.ndim != 1:
        raise ValueError(
            f"draft.token_ids has shape {ids.shape}; it needs [N]. Those of a padded batch are a "
            "specjax.Draft."
        )
    cumulative = check_cumulative(draft.cu_num_draft_tokens, ids.shape[0], num_rows)
    fields = _parse_fields(draft, ids, num_rows - ids.shape[0])
    return RaggedDraft(max_draft_tokens=k, cu_num_draft_tokens=cumulative, **fields)


def _parse_fields(draft: Draft | RaggedDraft, ids: Any, size: int) -> dict[str, Any]:
    """Returns the arrays that both kinds of drafts have, of `size` requests."""
    logits = None if draft.logits is None else as_array("draft.logits", draft.logits)
    if logits is None:
        for name in ("logprobs", "logsumexp", "cutoff", "rows", "token_map"):
            if getattr(draft, name) is not None:
                raise ValueError(
                    f"draft.{name} is given without draft.logits; drafts without logits are "
                    "one-hot and have no statistics."
                )
    else:
        check_logits("draft.logits", logits, "[S, K, V]" if ids.ndim == 2 else "[S, V]")
        leading = ids.shape[:1] if draft.rows is None else logits.shape[:1]
        if logits.shape[:-1] != leading + ids.shape[1:]:
            raise ValueError(
                f"draft.logits has shape {logits.shape} for token_ids {ids.shape}; it needs "
                f"{leading + ids.shape[1:]} and the vocabulary, one row per drafted token, or "
                "draft.rows, which says where each request's rows lie."
            )
    i32, f32, shape = jnp.int32, jnp.float32, ids.shape
    vocabulary = () if logits is None else logits.shape[-1:]
    return dict(
        token_ids=parse_array("draft.token_ids", ids, i32, shape),
        logits=logits,
        temperature=parse_optional("draft.temperature", draft.temperature, f32, (size,)),
        logprobs=parse_optional("draft.logprobs", draft.logprobs, f32, shape),
        logsumexp=parse_optional("draft.logsumexp", draft.logsumexp, f32, shape),
        cutoff=parse_optional("draft.cutoff", draft.cutoff, f32, shape),
        num_tokens=parse_optional("draft.num_tokens", draft.num_tokens, i32, (size,)),
        rows=parse_optional("draft.rows", draft.rows, i32, shape[:1]),
        token_map=parse_optional("draft.token_map", draft.token_map, i32, vocabulary),
        on_target_stream=check_flag("draft.on_target_stream", draft.on_target_stream),
    )


def check_draft_method(draft_sample_method: Any) -> None:
    """Raises `ValueError` for a method that there is not."""
    if draft_sample_method not in ("probabilistic", "greedy"):
        raise ValueError(
            f"draft_sample_method is {draft_sample_method!r}; it is 'probabilistic' or 'greedy'."
        )


def check_cumulative(cu_num_draft_tokens: Any, num_drafted: int, num_rows: int) -> Any:
    """Returns the cumulative counts of a ragged draft, i32[B + 1] from 0.

    The batch size is that of the target's rows, which are N + B.

    Args:
      cu_num_draft_tokens: the field, i32[B + 1], or i32[B] without the 0 that all begin with.
        An array on a CPU is waited for.
      num_drafted: N, drafted tokens.
      num_rows: of the target's logits.

    Raises:
      ValueError: for another shape, and for counts in the host's memory that do not begin with 0,
        fall, or end above N.
    """
    name = "draft.cu_num_draft_tokens"
    counts, size = as_array(name, cu_num_draft_tokens), num_rows - num_drafted
    if size < 0 or counts.shape not in ((size + 1,), (size,)):
        raise ValueError(
            f"{name} has shape {counts.shape}, and target_logits [N + B, V] has {num_rows} rows "
            f"for N = {num_drafted} drafted tokens, so that B is {size}; it needs [B + 1], from 0, "
            "or [B] without that 0."
        )
    begins_with_0, counts = len(counts) > size, parse_array(name, counts, jnp.int32, counts.shape)
    known = _in_host_memory(counts)
    if known is not None:
        steps = np.diff(known.astype(np.int64), prepend=0)
        falls = steps.min(initial=0) < 0 or (begins_with_0 and known[0] != 0)
        if falls or known.max(initial=0) > num_drafted:
            raise ValueError(
                f"{name} is {quote(known.tolist())}; it holds cumulative counts and needs to begin "
                f"with 0, or to leave that 0 out, never to fall, and to end at {num_drafted}, the "
                "drafted tokens, or below."
            )
    if begins_with_0:
        return counts
    xp: Any = np if isinstance(counts, np.ndarray) else jnp
    return xp.concatenate([xp.zeros(1, xp.int32), counts])


def _in_host_memory(value: Any) -> np.ndarray | None:
    """Returns an array in host memory, NumPy's or a CPU device's, as NumPy's; None for others."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, jax.core.Tracer) or not value.is_fully_addressable:
        return None
    is_there = all(device.platform == "cpu" for device in value.devices())
    return np.asarray(value) if is_there else None


def check_keys(keys: Any, batch_size: int, name: str = "keys") -> Any:
    """Returns typed threefry keys of shape () or [B]; refuses everything else."""
    hint = (
        "make typed threefry keys with jax.random.key(seed, impl='threefry2x32'), or "
        "jax.vmap(jax.random.key)(seeds) where that is the default"
    )
    dtype = getattr(keys, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        kind = f"dtype {dtype}" if dtype is not None else type(keys).__name__
        raise ValueError(f"{name} has {kind}, which is not a typed key; {hint}.")
    if str(jax.random.key_impl(keys)) != "threefry2x32":
        raise ValueError(
            f"{name} has the implementation {jax.random.key_impl(keys)}; noise is defined for "
            f"threefry2x32; {hint}."
        )
    if keys.shape not in ((), (batch_size,)):
        raise ValueError(
            f"keys has shape {keys.shape}; it needs ({batch_size},), one key per request, or () "
            "for one key that every request folds its row index into."
        )
    return keys


def check_type(name: str, value: Any, kind: type, needed: str) -> None:
    """Raises `ValueError` for a value of another type; the error says what is `needed`."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {type(value).__name__}; it needs {needed}.")


def check_flag(name: str, value: Any, reason: str = ": it is compiled in") -> bool:
    """Returns an argument that is True or False, or raises `ValueError` with the reason."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} is {value!r}; it needs True or False{reason}.")
    return bool(value)


def check_noise_dtype(noise_dtype: Any) -> Any:
    """Returns the noise dtype as a `jnp.dtype`: float32, or float64 where x64 is on."""
    try:
        dtype = jnp.dtype(noise_dtype)
    except TypeError:
        raise ValueError(f"noise_dtype is {noise_dtype!r}; it is float32 or float64.") from None
    if dtype == jnp.float32:
        return dtype
    if dtype != jnp.float64:
        raise ValueError(f"noise_dtype is {dtype}; it is float32 or float64.")
    if jax.dtypes.canonicalize_dtype(jnp.float64) != jnp.float64:
        raise ValueError(
            "noise_dtype=float64 needs 64-bit types, which are off; turn them on with "
            "jax.config.update('jax_enable_x64', True) or the environment variable "
            "JAX_ENABLE_X64=1."
        )
    return dtype
