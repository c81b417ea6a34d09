"""What a request asks of sampling besides its temperature: data, `None` for not asked."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from specjax.checks import as_array, check_count, read_array, read_optional

__all__ = [
    "SamplingParams",
    "allowed_width",
    "bad_words_array",
    "bias_array",
    "check_sampling",
    "fit_vocabulary",
    "fit_width",
    "read_allowed",
    "read_bad_words",
    "read_bias",
    "read_sampling",
]

_WORD = 32
_NUMBERS = {
    "top_k": jnp.int32,
    "top_p": jnp.float32,
    "min_p": jnp.float32,
    "repetition_penalty": jnp.float32,
    "frequency_penalty": jnp.float32,
    "presence_penalty": jnp.float32,
}


class SamplingParams(NamedTuple):
    """Truncation, penalties and masks of a batch; each is data, for all requests or for each.

    What is None is absent from the compiled program; what is given may change from call to
    call, and from request to request, without a compilation. A request is left alone by the
    value named "off".

    Attributes:
      top_k: i32, [B] or scalar, off 0: keeps the k likeliest tokens.
      top_p: f32, [B] or scalar, off 1: keeps the smallest set of the likeliest tokens whose
        probability reaches it.
      min_p: f32, [B] or scalar, off 0: keeps tokens at least this likely relative to the
        likeliest.
      repetition_penalty: f32, [B] or scalar, > 0, off 1: what stands in the prompt or was
        generated has its logit divided by it if positive, else multiplied.
      frequency_penalty: f32, [B] or scalar, off 0: subtracted from a token's logit as often
        as it was generated. The prompt does not count, as in vLLM and the OpenAI API.
      presence_penalty: f32, [B] or scalar, off 0: subtracted once if it was generated; the
        prompt does not count.
      bias: f32, [V] or [B, V], off 0: added to the logits; see `bias_array`.
      allowed: what may be emitted, bool [V] or [B, V], or the same in 32-bit words, i32 or
        u32 [ceil(V / 32)] or [B, ceil(V / 32)]: bit ``v % 32`` of word ``v // 32``, as
        grammar libraries give it.
      bad_words: i32, [N, M] or [B, N, M], N token sequences that must not be completed,
        padded behind with -1, whether they begin in the prompt or behind it; see
        `bad_words_array`.

    Example:
      >>> model = specjax.Model(  # a Markov chain on two tokens
      ...     jnp.log(jnp.array([[0.1, 0.9], [0.8, 0.2]])),
      ...     init_cache=lambda batch_size, max_length: (),
      ...     apply=lambda params, token_ids, positions, cache: (token_ids[..., None], cache),
      ...     logits=lambda params, hidden: params[hidden[..., 0]])
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
    """A dense bias of {token id: bias}, on the host: 4 bytes per request and token of V.

    Args:
      biases: one mapping for all requests, or a sequence of one per request.
      vocab_size: V, a Python int >= 1, that of the logits.

    Returns:
      f32[V], or f32[B, V] of a sequence.

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
    """Token sequences as one padded array, on the host.

    Args:
      words: a sequence of token sequences for all requests, or a sequence of those, one per
        request.

    Returns:
      i32[N, M], or i32[B, N, M], padded with -1.

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
        raise ValueError("words holds what is no integer; each word is a sequence of token ids.")
    if min(ids, default=0) < 0 or not all(word for request in batch for word in request):
        raise ValueError("words holds an empty sequence or a negative id; a word is token ids.")
    num_words = max((len(request) for request in batch), default=0)
    longest = max((len(word) for request in batch for word in request), default=1)
    array = np.full((len(batch), num_words, longest), -1, np.int32)
    for b, request in enumerate(batch):
        for n, word in enumerate(request):
            array[b, n, : len(word)] = word
    return array if nested else array[0]


def check_sampling(sampling: Any) -> None:
    """Refuses everything but `SamplingParams`."""
    if not isinstance(sampling, SamplingParams):
        raise ValueError(
            f"sampling is {type(sampling).__name__}; it needs a specjax.SamplingParams or None."
        )


def _is_sequence(value: Any) -> bool:
    # An array without axes is an iterable by its type only.
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) > 0


def read_sampling(sampling: SamplingParams, size: int) -> SamplingParams:
    """Parameters as arrays of fixed dtypes, or a `ValueError`; widths are checked by their use."""
    check_sampling(sampling)
    each = ((), (size,))
    numbers = {
        name: read_optional(f"sampling.{name}", getattr(sampling, name), dtype, *each)
        for name, dtype in _NUMBERS.items()
    }
    return SamplingParams(
        **numbers,
        bias=read_bias("sampling.bias", sampling.bias, size),
        allowed=read_allowed("sampling.allowed", sampling.allowed, size),
        bad_words=read_bad_words("sampling.bad_words", sampling.bad_words, size),
    )


def read_bias(name: str, bias: Any, size: int) -> Any:
    """f32[V] or f32[B, V], or a refusal."""
    if bias is None:
        return None
    if isinstance(bias, Mapping):
        raise ValueError(
            f"{name} is a mapping; it needs an array: specjax.bias_array(mapping, vocab_size)."
        )
    bias = as_array(name, bias)
    if bias.ndim not in (1, 2) or (bias.ndim == 2 and bias.shape[0] != size):
        raise ValueError(f"{name} has shape {bias.shape}; it needs [V] or [{size}, V].")
    return read_array(name, bias, jnp.float32, bias.shape)


def read_allowed(name: str, allowed: Any, size: int, num_rows: int | None = None) -> Any:
    """Bool or u32 words, [V], [B, V], and [B, R, V] if rows are given, or a refusal."""
    if allowed is None:
        return None
    allowed = as_array(name, allowed)
    forms = [(), (size,)] + ([] if num_rows is None else [(size, num_rows)])
    if allowed.ndim == 0 or allowed.shape[:-1] not in forms:
        wanted = " or ".join(f"[{', '.join([*map(str, form), 'V'])}]" for form in forms)
        raise ValueError(f"{name} has shape {allowed.shape}; it needs {wanted}.")
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


def read_bad_words(name: str, words: Any, size: int) -> Any:
    """i32[N, M] or i32[B, N, M], or a refusal."""
    if words is None:
        return None
    cure = "specjax.bad_words_array(sequences) pads them"
    try:
        words = as_array(name, words)
    except ValueError:
        raise ValueError(f"{name} is no array; {cure}.") from None
    if words.ndim not in (2, 3) or (words.ndim == 3 and words.shape[0] != size):
        raise ValueError(
            f"{name} has shape {words.shape}; it needs [N, M] or [{size}, N, M]: {cure}."
        )
    return read_array(name, words, jnp.int32, words.shape)


def allowed_width(allowed: Any, vocab_size: int) -> int:
    """The last axis that a mask of V tokens has in this form: bool, or words."""
    return vocab_size if allowed.dtype == jnp.bool_ else -(-vocab_size // _WORD)


def fit_vocabulary(sampling: SamplingParams, vocab_size: int) -> SamplingParams:
    """Parameters made for one vocabulary as those of another, longer or shorter at its end.

    Tokens that the first does not know have no bias and are not allowed, but for those that
    the last word of a packed mask has bits for.
    """
    bias, allowed = sampling.bias, sampling.allowed
    if bias is not None:
        bias = fit_width(bias, vocab_size)
    if allowed is not None:
        allowed = fit_width(allowed, allowed_width(allowed, vocab_size))
    return sampling._replace(bias=bias, allowed=allowed)


def fit_width(array: Any, width: int) -> Any:
    """The last axis cut, or filled with zeros, to `width`."""
    array = array[..., :width]
    behind = [(0, 0)] * (array.ndim - 1) + [(0, width - array.shape[-1])]
    return jnp.pad(array, behind) if behind[-1][1] else array


jax.export.register_namedtuple_serialization(
    SamplingParams, serialized_name="specjax.SamplingParams"
)
