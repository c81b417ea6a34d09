"""Checks the arguments of `Engine.submit`, and makes the request.

    Submission -> check_request -> CheckedRequest -> make_request -> Request

A wrong argument raises. A prompt that is empty, too long or has unknown ids makes a request that
has ended as "refused".
"""

import math
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checks import (
    as_array,
    check_count,
    check_flag,
    check_keys,
    parse_array,
    parse_ids,
)
from specjax.decode.capacity import pad_eos
from specjax.decode.matchers import MatchedText, Matcher
from specjax.engine.prompt_logprobs import PromptListing
from specjax.engine.request import FinishReason, Request, Stepper
from specjax.engine.slots import RequestSettings
from specjax.engine.stop_strings import StoppedText, Tokenizer, check_stop
from specjax.processing.sampling_params import FIELDS, SamplingParams, read_sampling

# Most stop ids of a request. Requests with fewer are padded, so that one program serves all.
MAX_STOP_IDS = 16
_NOISE = "{}; a request needs one of them, from which its noise follows."


class EngineLimits(NamedTuple):
    """Limits of an engine, against which requests are checked.

    Attributes:
      max_length: S.
      vocab_size: V.
      sampling: the fields that requests may set, without a batch axis; None for none.
      tokenizer: the engine's, or None.
      takes_matchers: whether requests may have matchers.
      prompt_logprobs: whether requests may list their prompts.
    """

    max_length: int
    vocab_size: int
    sampling: SamplingParams | None
    tokenizer: Tokenizer | None
    takes_matchers: bool
    prompt_logprobs: bool = False


class Submission(NamedTuple):
    """Arguments of `Engine.submit`, unchecked."""

    prompt: object
    key: jax.Array | None = None
    max_new_tokens: int | None = None
    temperature: object = 1.0
    eos_token_ids: object = ()
    sampling: SamplingParams | None = None
    stop: str | Iterable[str] | None = ()
    matcher: Matcher | None = None
    seed: int | None = None
    prompt_logprobs: bool = False


class SampleArguments(TypedDict, total=False):
    """Arguments of `Engine.submit_samples` but for the first two."""

    key: jax.Array | None
    seed: int | None
    max_new_tokens: int | None
    temperature: Any
    eos_token_ids: Any
    sampling: SamplingParams | None
    stop: str | Iterable[str] | None
    prompt_logprobs: bool


class SubmitArguments(SampleArguments, total=False):
    """Arguments of `Engine.submit` but for the prompt."""

    matcher: Matcher | None


class CheckedRequest(NamedTuple):
    """A submission, checked and as arrays; `submit_samples` makes several requests of one.

    Attributes:
      token_ids: the prompt, i32[L].
      settings: data for the device, of the same shapes for all requests.
      stop: the stop strings.
      error: a sentence why the request is refused, or None.
      matched: a matcher that has read nothing, or None.
      listing: of the prompt, empty; None if it is not listed.
    """

    token_ids: np.ndarray
    settings: RequestSettings
    stop: tuple[str, ...]
    error: str | None
    matched: MatchedText | None
    listing: PromptListing | None = None


def make_submission(call: str, prompt: object, arguments: SampleArguments) -> Submission:
    """Returns the arguments of a call, unchecked.

    Args:
      call: its name, for an error.
      prompt: as in `Engine.submit`.
      arguments: by their names.

    Raises:
      TypeError: for a name that the call does not have.
    """
    for name in arguments:
        if name not in Submission._fields:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
    return Submission(prompt, **arguments)


def check_request(submission: Submission, limits: EngineLimits) -> CheckedRequest:
    """Returns a submission checked, its data in the engine's shapes and dtypes.

    Raises:
      ValueError: for an argument that `Engine.submit` does not take.
    """
    max_new_tokens = submission.max_new_tokens
    if max_new_tokens is not None:
        why = "the tokens that a request may get, or None"
        max_new_tokens = check_count("max_new_tokens", max_new_tokens, 1, why)
    ids, error = _check_prompt(submission.prompt, max_new_tokens, limits)
    max_length = limits.max_length
    if max_new_tokens is not None:
        max_length = min(max_length, ids.size + max_new_tokens)
    settings = RequestSettings(
        sample=np.int32(-1),
        keys=_check_key(submission.key, submission.seed),
        temperature=_check_temperature(submission.temperature),
        prompt_lengths=np.int32(ids.size),
        max_lengths=np.int32(max_length),
        eos_token_ids=_check_stop_ids(submission.eos_token_ids),
        sampling=_check_sampling(submission.sampling, limits.sampling),
    )
    matched = None if submission.matcher is None else _check_matcher(submission.matcher, limits)
    strings = check_stop(submission.stop)
    if strings and limits.tokenizer is None:
        raise ValueError(
            "stop is given, and the engine has no tokenizer to make text with; give one to Engine, "
            "or eos_token_ids."
        )
    listing = PromptListing(ids) if _check_listed(submission.prompt_logprobs, limits) else None
    return CheckedRequest(ids, settings, strings, error, matched, listing)


def make_request(checked: CheckedRequest, limits: EngineLimits, stepper: Stepper) -> Request:
    """Returns a request, which has ended already if its prompt is refused.

    Args:
      checked: from `check_request`.
      limits: the engine's.
      stepper: as in `Request`.
    """
    ids, tokenizer = checked.token_ids.tolist(), limits.tokenizer
    # Ids of a refused prompt may be outside the tokenizer's vocabulary.
    context = ids if checked.error is None else []
    text = None if tokenizer is None else StoppedText(tokenizer, context, checked.stop)
    max_new_tokens = int(checked.settings.max_lengths) - len(ids)
    request = Request(ids, max_new_tokens, text, stepper, checked.matched, checked.listing)
    if checked.error is not None:
        request.end(FinishReason.REFUSED, checked.error)
    return request


def sample_indices(submission: Submission, num_samples: int) -> range:
    """Returns the indices of a submission's samples, each of which is folded into its key.

    Raises:
      ValueError: if their number is no int >= 1.
      TypeError: for a matcher.
    """
    samples = range(check_count("num_samples", num_samples, 1, "the requests of one prompt"))
    if submission.matcher is not None:
        raise TypeError("matcher is given; it reads one text, and samples are several.")
    return samples


def check_timeout(timeout: float | None) -> float:
    """Returns a timeout in seconds; infinity for None.

    Raises:
      ValueError: for what is no number > 0.

    Example:
      >>> check_timeout(3), check_timeout(None)
      (3.0, inf)
    """
    if timeout is None:
        return math.inf
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not is_number or not timeout > 0:
        raise ValueError(f"timeout is {timeout!r}; it needs seconds, a number > 0, or None.")
    return float(timeout)


def _check_prompt(
    token_ids: object, max_new_tokens: int | None, limits: EngineLimits
) -> tuple[np.ndarray, str | None]:
    """Returns the prompt i32[L], and a sentence why it is refused, or None."""
    ids = np.asarray(as_array("prompt", token_ids))
    if ids.ndim != 1:
        raise ValueError(f"prompt has shape {ids.shape}; it needs [P], one prompt.")
    if not ids.size:
        return ids.astype(np.int32), "the prompt is empty: it gives the model nothing to continue."
    if ids.dtype.kind not in "iu":
        raise ValueError(f"prompt has dtype {ids.dtype}; it needs integers.")
    wrong_ids = ids[(ids < 0) | (ids >= limits.vocab_size)]
    if wrong_ids.size:
        return ids, (
            f"the prompt has token {wrong_ids[0]}; the target's vocabulary has {limits.vocab_size} "
            "tokens."
        )
    num_new = 1 if max_new_tokens is None else max_new_tokens
    if ids.size + num_new > limits.max_length:
        return ids, (
            f"the prompt has {ids.size} tokens and may get {num_new} new ones; the engine's "
            f"max_length is {limits.max_length}."
        )
    return ids.astype(np.int32), None


def _check_key(key: jax.Array | None, seed: int | None) -> jax.Array:
    """Returns the key, or the one that `seed` makes."""
    if key is None:
        if seed is None:
            raise ValueError(_NOISE.format("neither key nor seed is given"))
        return key_of_seed(seed)
    if seed is not None:
        raise ValueError(_NOISE.format("key and seed are both given"))
    if getattr(key, "shape", ()) != ():
        raise ValueError(f"key has shape {key.shape}; a request needs one key, ().")
    return check_keys(key, 1, "key")


def key_of_seed(seed: int) -> jax.Array:
    """Returns the key of the words [seed >> 32, seed & 0xffffffff] of a seed modulo 2 ** 64.

    `jax.random.key(seed)` is this key with 64-bit types; without, it drops the high word.

    Raises:
      ValueError: for what is no int in [-2**63, 2**63).

    Example:
      >>> bool(key_of_seed(7) == jax.random.key(7, impl="threefry2x32"))
      True
    """
    try:
        number = operator.index(seed)
    except TypeError:
        number = None
    if number is None or isinstance(seed, bool) or not -(2**63) <= number < 2**63:
        raise ValueError(f"seed is {seed!r}; it needs a Python int in [-2**63, 2**63).")
    words = np.array([number >> 32 & 0xFFFFFFFF, number & 0xFFFFFFFF], np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")


def _check_temperature(value: object) -> np.ndarray:
    with np.errstate(over="ignore"):
        temperature = np.asarray(parse_array("temperature", value, np.float32, ()))
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature is {temperature}; it needs a finite number >= 0.")
    return temperature


def _check_stop_ids(value: object) -> np.ndarray:
    ids = np.asarray(parse_ids("eos_token_ids", value))
    if ids.size > MAX_STOP_IDS:
        raise ValueError(f"eos_token_ids has {ids.size} ids; it takes at most {MAX_STOP_IDS}.")
    return pad_eos(ids, MAX_STOP_IDS)


def _check_matcher(matcher: Matcher, limits: EngineLimits) -> MatchedText:
    if not limits.takes_matchers:
        raise ValueError(
            "matcher is given, and the engine was made without; it needs takes_matchers=True."
        )
    matched = MatchedText(matcher, limits.vocab_size, "the request")
    matched.mask()  # Refuses a matcher of another vocabulary.
    return matched


def _check_listed(prompt_logprobs: bool, limits: EngineLimits) -> bool:
    """Returns whether a prompt is listed, or refuses that of an engine that cannot."""
    if check_flag("prompt_logprobs", prompt_logprobs, "") and not limits.prompt_logprobs:
        raise ValueError(
            "prompt_logprobs is True, and the engine was made without; it needs "
            "options=LoopOptions(num_logprobs=..., prompt_logprobs=True)."
        )
    return prompt_logprobs


# Sampling parameters ------------------------------------------------------------------------------


def drop_batch_axis(sampling: SamplingParams | None) -> SamplingParams | None:
    """Returns sampling fields of one request without a batch axis; None if it sets none.

    Example:
      >>> fields = drop_batch_axis(SamplingParams(top_k=0, bias=np.zeros(3)))
      >>> fields.top_k.shape, fields.bias.shape, fields.top_p
      ((), (3,), None)
    """
    if sampling is None:
        return None
    sampling = read_sampling(sampling, 1)
    arrays = {
        name: value[0] if value.ndim > FIELDS[name].rank else value
        for name, value in _arrays_of(sampling).items()
    }
    return SamplingParams(**arrays, grammar=sampling.grammar) if arrays else None


def _arrays_of(sampling: SamplingParams) -> dict[str, np.ndarray]:
    """Returns name -> value of the fields that are set, without the grammar: requests share it."""
    fields = sampling._replace(grammar=None)._asdict().items()
    return {name: np.asarray(value) for name, value in fields if value is not None}


def _check_sampling(
    sampling: SamplingParams | None, defaults: SamplingParams | None
) -> SamplingParams | None:
    """Returns each field of the engine without a batch axis, as the request or the engine sets it.

    The grammar is left out: requests share the engine's.

    Raises:
      ValueError: for a field that the engine was not made with, one of another shape, and a value
        out of its range.
    """
    if isinstance(sampling, SamplingParams) and sampling.grammar is not None:
        raise ValueError(
            "sampling.grammar is given; requests share the tables of the engine's grammar, and "
            "sampling.grammar_state says in which of its states a text begins."
        )
    if isinstance(sampling, SamplingParams) and sampling.grammar_state is not None and defaults:
        sampling = sampling._replace(grammar=defaults.grammar)
    request = drop_batch_axis(sampling)
    fields = {} if defaults is None else _arrays_of(defaults)
    for name, value in ({} if request is None else _arrays_of(request)).items():
        if name not in fields:
            raise ValueError(
                f"sampling.{name} is given, and the engine was made without it; a field that "
                f"requests may set is given to Engine, such as sampling=SamplingParams({name}=...) "
                "with the value of requests that do not set it."
            )
        fields[name] = _check_field(name, value, fields[name])
    for name, value in fields.items():
        _check_range(name, value)
    if defaults is not None and "grammar_state" in fields:
        num_states = len(defaults.grammar.next_states)
        if fields["grammar_state"] >= num_states:
            raise ValueError(
                f"sampling.grammar_state is {fields['grammar_state']}; the engine's grammar has "
                f"the states 0 to {num_states - 1}, and -1 is no grammar."
            )
    return SamplingParams(**fields) if fields else None


def _check_field(name: str, value: np.ndarray, default: np.ndarray) -> np.ndarray:
    """Returns a request's value with the engine's shape and dtype, or refuses it."""
    if name == "bad_words" and all(map(int.__le__, value.shape, default.shape)):
        sizes = zip(default.shape, value.shape, strict=True)
        padding = [(0, max_size - size) for max_size, size in sizes]
        return np.pad(value, padding, constant_values=-1)
    if (value.shape, value.dtype) != (default.shape, default.dtype):
        raise ValueError(
            f"sampling.{name} is {value.dtype}{list(value.shape)}; the engine was made with "
            f"{default.dtype}{list(default.shape)}, and all requests need that."
        )
    return value


def _check_range(name: str, value: np.ndarray) -> None:
    """Refuses a number out of the range of its field, and a bias that is no number."""
    field = FIELDS[name]
    if field.parse is not None:
        if name == "bias" and np.isnan(value).any():
            token = int(np.argmax(np.isnan(value)))
            raise ValueError(f"sampling.bias is nan at token {token}; it needs numbers.")
        return
    is_in_range = np.isfinite(value) and field.lowest <= value <= field.highest
    if not is_in_range or (field.is_positive and value <= 0):
        raise ValueError(f"sampling.{name} is {value}; it needs {field.needed}.")
