"""The fields of `SamplingParams` in one table: axes, dtype, and how each is checked.

A value for all requests has `rank` axes; values of each request have one more, the first. Checks,
rules, padding, the engine and compiled programs read this table. A new penalty is an entry here, a
field of `SamplingParams` and of `LogitRules`, and a function in `logit_rules`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checks import as_array, check_shape, parse_array, parse_optional
from specjax.processing.grammar import Grammar

__all__ = ["FIELDS", "SamplingField", "mask_width", "parse_fields"]

_BITS_PER_WORD = 32


class SamplingField(NamedTuple):
    """A field of `SamplingParams`.

    Attributes:
      rank: axes of a value for all requests.
      dtype: of a number, or None where `parse` decides.
      parse: (name, value, size, num_rows) -> checked array of a field that is no number, or None.
      reads_prompt: whether a penalty reads the prompt, too.
      is_positive: whether a penalty has to be above 0.
      is_shared: whether all requests always have the same value.
    """

    rank: int = 0
    dtype: Any = None
    parse: Callable[[str, Any, int, int | None], Any] | None = None
    reads_prompt: bool = False
    is_positive: bool = False
    is_shared: bool = False


def parse_fields(
    values: Mapping[str, Any], size: int, num_rows: int | None = None, prefix: str = ""
) -> dict[str, Any]:
    """Returns fields by name as arrays of fixed dtypes, None for those that are None, or refuses.

    Args:
      values: of the fields, as given by the caller.
      size: B.
      num_rows: R, where a mask may be [B, R, V]; None where it may not.
      prefix: what an error puts before the name of a field.

    Returns:
      Arrays. Widths are checked by `rule_checks.check_widths`.

    Raises:
      ValueError: for another shape or dtype, or a `grammar_state` without `grammar`.
    """
    parsed = {}
    for name, value in values.items():
        field = FIELDS[name]
        if field.parse is None:
            parsed[name] = parse_optional(f"{prefix}{name}", value, field.dtype, (), (size,))
        elif value is None:
            parsed[name] = None
        else:
            parsed[name] = field.parse(f"{prefix}{name}", value, size, num_rows)
    if parsed.get("grammar_state") is not None and parsed["grammar"] is None:
        raise ValueError(
            f"{prefix}grammar_state is given without {prefix}grammar, whose state it is."
        )
    if parsed.get("grammar") is not None and parsed["grammar_state"] is None:
        parsed["grammar_state"] = np.int32(0)
    return parsed


def mask_width(allowed: Any, vocab_size: int) -> int:
    """Returns the width of a mask of V tokens in this form, bool or words."""
    return vocab_size if allowed.dtype == jnp.bool_ else -(-vocab_size // _BITS_PER_WORD)


def _parse_bias(name: str, bias: Any, size: int, num_rows: int | None) -> Any:
    """Returns f32[V] or f32[B, V], or refuses."""
    if isinstance(bias, Mapping):
        raise ValueError(
            f"{name} is a mapping; it needs an array: specjax.bias_array(mapping, vocab_size)."
        )
    bias = as_array(name, bias)
    if bias.ndim not in (1, 2) or (bias.ndim == 2 and bias.shape[0] != size):
        raise ValueError(f"{name} has shape {bias.shape}; it needs [V] or [{size}, V].")
    return parse_array(name, bias, jnp.float32, bias.shape)


def _parse_allowed(name: str, allowed: Any, size: int, num_rows: int | None) -> Any:
    """Returns bool or u32 words, [V], [B, V], or [B, R, V] if rows are given, or refuses."""
    allowed = as_array(name, allowed)
    shapes = [(), (size,)] + ([] if num_rows is None else [(size, num_rows)])
    if allowed.ndim == 0 or allowed.shape[:-1] not in shapes:
        needed = " or ".join(f"[{', '.join([*map(str, shape), 'V'])}]" for shape in shapes)
        raise ValueError(f"{name} has shape {allowed.shape}; it needs {needed}.")
    if allowed.dtype == jnp.bool_ or allowed.dtype == jnp.uint32:
        return allowed
    if allowed.dtype != jnp.int32:
        raise ValueError(
            f"{name} has dtype {allowed.dtype}; it needs bool, or int32 or uint32 words of 32 "
            "tokens each, the first in the lowest bit."
        )
    if isinstance(allowed, np.ndarray):
        return allowed.view(np.uint32)
    return jax.lax.bitcast_convert_type(allowed, jnp.uint32)


def _parse_bad_words(name: str, words: Any, size: int, num_rows: int | None) -> Any:
    """Returns i32[N, M] or i32[B, N, M], or refuses."""
    cure = "specjax.bad_words_array(sequences) pads them"
    try:
        words = as_array(name, words)
    except ValueError:
        raise ValueError(f"{name} is no array; {cure}.") from None
    if words.ndim not in (2, 3) or (words.ndim == 3 and words.shape[0] != size):
        raise ValueError(
            f"{name} has shape {words.shape}; it needs [N, M] or [{size}, N, M]: {cure}."
        )
    return parse_array(name, words, jnp.int32, words.shape)


def _parse_grammar(name: str, grammar: Any, size: int, num_rows: int | None) -> Grammar:
    """Returns a `Grammar` of arrays, or refuses it."""
    if not isinstance(grammar, Grammar):
        raise ValueError(
            f"{name} is {type(grammar).__name__}; it needs a specjax.Grammar, such as "
            "specjax.contrib.grammars.json_schema_grammar makes."
        )
    names = {field: f"{name}.{field}" for field in Grammar._fields}
    arrays = {field: as_array(names[field], x) for field, x in grammar._asdict().items()}
    shapes = [x.shape for x in arrays.values()]
    if [len(shape) for shape in shapes] != [2, 1, 2] or 0 in shapes[0]:
        raise ValueError(
            f"{name} has arrays of shapes {shapes}; it needs next_states [Q, C], "
            "token_classes [V] and allowed [Q, ceil(V / 32)]."
        )
    for field in ("next_states", "token_classes"):
        arrays[field] = parse_array(names[field], arrays[field], jnp.int32, arrays[field].shape)
    num_states, vocab_size = shapes[0][0], shapes[1][0]
    arrays["allowed"] = _parse_allowed(names["allowed"], arrays["allowed"], num_states, None)
    if arrays["allowed"].dtype == jnp.bool_:
        raise ValueError(f"{names['allowed']} is bool; it needs words of 32 tokens, i32 or u32.")
    check_shape(names["allowed"], arrays["allowed"], (num_states, -(-vocab_size // _BITS_PER_WORD)))
    return Grammar(**arrays)


FIELDS = {
    "top_k": SamplingField(dtype=jnp.int32),
    "top_p": SamplingField(dtype=jnp.float32),
    "min_p": SamplingField(dtype=jnp.float32),
    "repetition_penalty": SamplingField(dtype=jnp.float32, reads_prompt=True, is_positive=True),
    "frequency_penalty": SamplingField(dtype=jnp.float32),
    "presence_penalty": SamplingField(dtype=jnp.float32),
    "bias": SamplingField(rank=1, parse=_parse_bias),
    "allowed": SamplingField(rank=1, parse=_parse_allowed),
    "bad_words": SamplingField(rank=2, parse=_parse_bad_words),
    "grammar": SamplingField(parse=_parse_grammar, is_shared=True),
    "grammar_state": SamplingField(dtype=jnp.int32),
}
