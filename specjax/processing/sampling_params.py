"""`SamplingParams`: truncation, penalties, bias and masks, for all requests or for each."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, SupportsIndex

import jax.export
import jax.numpy as jnp
import numpy as np

from specjax.checks import check_count, parse_optional
from specjax.core.truncation import Filters
from specjax.processing.logit_rules import LogitRules
from specjax.processing.rule_checks import check_rules

__all__ = [
    "SamplingParams",
    "bad_words_array",
    "bias_array",
    "read_sampling",
    "split_sampling",
]


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
      allowed: bool, [V] or [B, V], tokens that may be emitted; or the mask in 32-bit words, i32
        or u32, [ceil(V / 32)] or [B, ceil(V / 32)]: bit ``v % 32`` of word ``v // 32``, as grammar
        libraries make it.
      bad_words: i32, [N, M] or [B, N, M], N token sequences that must not be completed, padded at
        the end with -1. A sequence may begin in the prompt; see `bad_words_array`.

    Example:
      >>> from specjax.decode.markov_chain import markov_chain
      >>> model = markov_chain([[0.1, 0.9], [0.8, 0.2]])
      >>> output = specjax.generate(
      ...     model, None, [[0]], [1], keys=jax.random.key(0), max_new_tokens=4,
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


def bias_array(
    biases: Mapping[int, float] | Sequence[Mapping[int, float]], vocab_size: int
) -> np.ndarray:
    """Returns a dense bias of {token id: bias} on the host: 4 bytes per request and token of V.

    Args:
      biases: a mapping for all requests, or a sequence of B mappings, one per request.
      vocab_size: V of the logits, a Python int >= 1.

    Returns:
      f32[V] of a mapping, f32[B, V] of a sequence; 0 for tokens that are not named.

    Raises:
      ValueError: for a token id outside [0, V).

    Example:
      >>> specjax.bias_array({2: -1.5}, 4).tolist()
      [0.0, 0.0, -1.5, 0.0]
    """
    vocab_size = check_count("vocab_size", vocab_size, 1, "the width of the bias")
    if not isinstance(biases, Mapping):
        rows = [bias_array(one, vocab_size) for one in biases]
        return np.stack(rows) if rows else np.zeros((0, vocab_size), np.float32)
    row = np.zeros((vocab_size,), np.float32)
    for token_id, value in biases.items():
        if not isinstance(token_id, SupportsIndex) or not 0 <= token_id < vocab_size:
            raise ValueError(
                f"biases has token {token_id!r}; it needs ids in [0, {vocab_size}), the vocabulary."
            )
        row[token_id] = value
    return row


def bad_words_array(words: Sequence[Any]) -> np.ndarray:
    """Returns token sequences as one padded array on the host.

    Args:
      words: token sequences for all requests, or a sequence of B of these, one per request.

    Returns:
      i32[N, M] or i32[B, N, M], padded at the end with -1.

    Raises:
      ValueError: for an empty sequence or a negative id among the tokens.

    Example:
      >>> specjax.bad_words_array([[5], [7, 2]]).tolist()
      [[5, -1], [7, 2]]
    """
    if not all(map(_is_sequence, words)):
        raise ValueError("words holds a single token; each word is a sequence of token ids.")
    nested = any(_is_sequence(token) for word in words for token in word)
    batch = [list(map(list, request)) for request in (words if nested else [words])]
    ids = [token for request in batch for word in request for token in word]
    if not all(isinstance(token, SupportsIndex) for token in ids):
        raise ValueError(
            "words holds a token that is no integer; each word is a sequence of token ids."
        )
    if min(ids, default=0) < 0 or not all(word for request in batch for word in request):
        raise ValueError("words holds an empty sequence or a negative id; a word is token ids.")
    num_words = max((len(request) for request in batch), default=0)
    longest = max((len(word) for request in batch for word in request), default=1)
    array = np.full((len(batch), num_words, longest), -1, np.int32)
    for b, request in enumerate(batch):
        for n, word in enumerate(request):
            array[b, n, : len(word)] = word
    return array if nested else array[0]


def _is_sequence(value: Any) -> bool:
    # An array without axes is an iterable by its type only.
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) > 0


def read_sampling(sampling: Any, size: int) -> SamplingParams:
    """Returns parameters as arrays of fixed dtypes, or refuses them.

    The widths of a bias and of a mask are checked where the vocabulary is known.
    """
    rules, filters = split_sampling(sampling)
    each = ((), (size,))
    filters = Filters(
        top_k=parse_optional("sampling.top_k", filters.top_k, jnp.int32, *each),
        top_p=parse_optional("sampling.top_p", filters.top_p, jnp.float32, *each),
        min_p=parse_optional("sampling.min_p", filters.min_p, jnp.float32, *each),
    )
    rules = check_rules(rules, size, prefix="sampling.")
    return SamplingParams(**filters._asdict(), **rules._asdict())


def split_sampling(sampling: Any) -> tuple[LogitRules, Filters]:
    """Returns what changes logits, and what is applied to them as a cutoff."""
    if not isinstance(sampling, SamplingParams):
        raise ValueError(
            f"sampling is {type(sampling).__name__}; it needs a specjax.SamplingParams or None."
        )
    fields = sampling._asdict()
    filters = Filters(*(fields.pop(name) for name in Filters._fields))
    return LogitRules(**fields), filters


jax.export.register_namedtuple_serialization(
    SamplingParams, serialized_name="specjax.SamplingParams"
)
