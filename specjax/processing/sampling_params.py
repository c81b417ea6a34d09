"""`SamplingParams`, and its fields in one table: axes, dtype, and how each is checked.

A value for all requests has `rank` axes; values of each request have one more, the first. Checks,
rules, padding, the engine and compiled programs read the table. A new penalty is a field and an
entry here, and a function in `logit_rules`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from specjax.checks import as_array, check_shape, check_type, parse_array, parse_optional
from specjax.core.truncation import Filters
from specjax.processing.grammar import Grammar

_BITS_PER_WORD = 32


class SamplingParams(NamedTuple):
    """Truncation, penalties, bias and masks of a batch, for all requests or for each.

    A field that is None is absent from the compiled program. The others are data: their values may
    differ between calls and between requests without a compilation. The value named "off" changes
    nothing for its request. `process_logits` and `logit_cutoff` have the formulas.

    Attributes:
      top_k: i32, [B] or scalar, off 0. Keeps the k likeliest tokens.
      top_p: f32, [B] or scalar, off 1. Keeps the smallest set of the likeliest tokens whose
        probability reaches it.
      min_p: f32, [B] or scalar, off 0. Keeps tokens whose probability is at least this fraction
        of the largest one.
      repetition_penalty: f32, [B] or scalar, > 0, off 1. Divides a positive logit, and multiplies
        a negative one, of a token in the prompt or the output.
      frequency_penalty: f32, [B] or scalar, off 0. Subtracted from a token's logit once per
        occurrence in the output. The prompt does not count, as in vLLM and the OpenAI API.
      presence_penalty: f32, [B] or scalar, off 0. Subtracted once from the logit of a token in
        the output. The prompt does not count.
      bias: f32, [V] or [B, V], off 0. Added to the logits; see `bias_array`.
      allowed: bool, [V] or [B, V], tokens that may be emitted. Or the mask in 32-bit words, i32 or
        u32, [ceil(V / 32)] or [B, ceil(V / 32)]. As in grammar libraries, token v is bit
        ``v % 32`` of word ``v // 32``. `init` also takes an axis of 1 before V: the first token's
        mask.
      bad_words: i32, [N, M] or [B, N, M], N token sequences that must not be completed, padded at
        the end with -1. A sequence may begin in the prompt; see `bad_words_array`.
      grammar: a `Grammar`, which every text follows from its first generated token on.
      grammar_state: i32, [B] or scalar, off -1. The state of `grammar` in which a text begins; None
        is 0.

    Example:
      >>> from specjax.markov_chain import markov_chain
      >>> model = markov_chain([[0.1, 0.9], [0.8, 0.2]])
      >>> output = specjax.generate(
      ...     model, None, [[0]], keys=jax.random.key(0), max_new_tokens=4,
      ...     sampling=specjax.SamplingParams(allowed=jnp.array([False, True])))
      >>> specjax.unpad(output.token_ids)
      [[0, 1, 1, 1, 1]]
    """

    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    bias: Any = None
    allowed: Any = None
    bad_words: Any = None
    grammar: Any = None
    grammar_state: Any = None

    @property
    def penalties(self) -> dict[str, Any]:
        """The penalties that are given, by name."""
        values = {name: getattr(self, name) for name, field in FIELDS.items() if field.is_penalty}
        return {name: penalty for name, penalty in values.items() if penalty is not None}

    @property
    def reads_prompt(self) -> bool:
        """Whether a penalty reads the tokens of the prompt."""
        return any(FIELDS[name].reads_prompt for name in self.penalties)

    @property
    def reads_drafted(self) -> bool:
        """Whether a row depends on the tokens that are drafted before it."""
        return bool(self.penalties) or self.bad_words is not None or self.grammar is not None


jax.export.register_namedtuple_serialization(
    SamplingParams, serialized_name="specjax.SamplingParams"
)


class SamplingField(NamedTuple):
    """A field of `SamplingParams`.

    Attributes:
      rank: axes of a value for all requests.
      dtype: of a number, or None for a field that `parse` checks.
      parse: (name, value, size, num_rows) -> checked array of a field that is no number, or None.
      is_penalty: whether the field is a penalty, which reads how often each token occurs.
      reads_prompt: whether a penalty reads the prompt, too.
      is_positive: whether a penalty has to be above 0.
      is_shared: whether all requests always have the same value.
      lowest: the least value of a number that an engine takes from a request.
      highest: the greatest.
    """

    rank: int = 0
    dtype: Any = None
    parse: Callable[[str, Any, int, int | None], Any] | None = None
    is_penalty: bool = False
    reads_prompt: bool = False
    is_positive: bool = False
    is_shared: bool = False
    lowest: float = -math.inf
    highest: float = math.inf

    @property
    def needed(self) -> str:
        """What a number of the field has to be, in words, for an error."""
        kind = "an integer" if self.dtype == jnp.int32 else "a finite number"
        if self.is_positive:
            return f"{kind} > 0"
        if math.isinf(self.lowest):
            return kind
        if math.isinf(self.highest):
            return f"{kind} >= {self.lowest:g}"
        return f"{kind} in [{self.lowest:g}, {self.highest:g}]"


def parse_sampling(
    sampling: SamplingParams, size: int, num_rows: int | None = None, prefix: str = ""
) -> SamplingParams:
    """Returns parameters as arrays of fixed dtypes, or refuses them.

    Args:
      sampling: the caller's, unchecked.
      size: B.
      num_rows: R, where a mask may be [B, R, V]; None where it may not.
      prefix: text that an error puts before the name of a field.

    Returns:
      `SamplingParams` of arrays. Widths are checked by `rule_checks.check_widths`.

    Raises:
      ValueError: for another shape or dtype, or a `grammar_state` without `grammar`.
    """
    parsed: dict[str, Any] = {}
    for name, value in sampling._asdict().items():
        field = FIELDS[name]
        if field.parse is None:
            parsed[name] = parse_optional(f"{prefix}{name}", value, field.dtype, (), (size,))
        elif value is None:
            parsed[name] = None
        else:
            parsed[name] = field.parse(f"{prefix}{name}", value, size, num_rows)
    if parsed["grammar_state"] is not None and parsed["grammar"] is None:
        raise ValueError(
            f"{prefix}grammar_state is given without {prefix}grammar, whose state it is."
        )
    if parsed["grammar"] is not None and parsed["grammar_state"] is None:
        parsed["grammar_state"] = np.int32(0)
    return SamplingParams(**parsed)


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
    hint = "specjax.bad_words_array(sequences) pads them"
    try:
        words = as_array(name, words)
    except ValueError:
        raise ValueError(f"{name} is no array; {hint}.") from None
    if words.ndim not in (2, 3) or (words.ndim == 3 and words.shape[0] != size):
        raise ValueError(
            f"{name} has shape {words.shape}; it needs [N, M] or [{size}, N, M]: {hint}."
        )
    return parse_array(name, words, jnp.int32, words.shape)


def _parse_grammar(name: str, grammar: Any, size: int, num_rows: int | None) -> Grammar:
    """Returns a `Grammar` of arrays, or refuses it."""
    needed = "a specjax.Grammar, such as specjax.contrib.grammars.json_schema_grammar makes"
    check_type(name, grammar, Grammar, needed)
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


def read_sampling(sampling: Any, size: int) -> SamplingParams:
    """Returns parameters as arrays of fixed dtypes, or refuses them.

    The widths of a bias and of a mask are checked where the vocabulary is known.
    """
    check_type("sampling", sampling, SamplingParams, "a specjax.SamplingParams or None")
    return parse_sampling(sampling, size, prefix="sampling.")


def split_sampling(sampling: Any) -> tuple[SamplingParams, Filters]:
    """Returns the parameters that change logits, and the filters that cut them off."""
    check_type("sampling", sampling, SamplingParams, "a specjax.SamplingParams or None")
    filters = Filters(*(getattr(sampling, name) for name in Filters._fields))
    return sampling._replace(top_k=None, top_p=None, min_p=None), filters


def read_draft_sampling(sampling: Any, size: int, greedy: bool) -> tuple[SamplingParams, Filters]:
    """Returns the checked rules and filters of a draft; an argmax needs no filters."""
    sampling = SamplingParams() if sampling is None else read_sampling(sampling, size)
    rules, filters = split_sampling(sampling)
    return rules, Filters(None, None, None) if greedy else filters


FIELDS = {
    "top_k": SamplingField(dtype=jnp.int32, lowest=-1),
    "top_p": SamplingField(dtype=jnp.float32, lowest=0, highest=1),
    "min_p": SamplingField(dtype=jnp.float32, lowest=0, highest=1),
    "repetition_penalty": SamplingField(
        dtype=jnp.float32, is_penalty=True, reads_prompt=True, is_positive=True
    ),
    "frequency_penalty": SamplingField(dtype=jnp.float32, is_penalty=True),
    "presence_penalty": SamplingField(dtype=jnp.float32, is_penalty=True),
    "bias": SamplingField(rank=1, parse=_parse_bias),
    "allowed": SamplingField(rank=1, parse=_parse_allowed),
    "bad_words": SamplingField(rank=2, parse=_parse_bad_words),
    "grammar": SamplingField(parse=_parse_grammar, is_shared=True),
    "grammar_state": SamplingField(dtype=jnp.int32, lowest=-1),
}
