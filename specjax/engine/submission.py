"""What a submitted request asks for, checked: data for the device, or why it is refused."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from specjax.checks import as_array, check_count, check_keys, parse_array, parse_ids
from specjax.decode.capacity import pad_eos
from specjax.decode.matchers import MatchedText, Matcher
from specjax.engine.request import FinishReason, Request
from specjax.engine.slots import RequestSettings
from specjax.engine.stop_strings import StoppedText, check_stop
from specjax.processing.fields import FIELDS
from specjax.processing.sampling_params import SamplingParams, read_sampling

__all__ = [
    "EngineLimits",
    "MAX_STOP_IDS",
    "CheckedRequest",
    "make_request",
    "parse_defaults",
    "check_request",
]

# How many there are is data up to this.
MAX_STOP_IDS = 16


class EngineLimits(NamedTuple):
    """What an engine was made with that a request is checked by.

    Attributes:
      max_length: S.
      vocab_size: of the target.
      sampling: the fields that requests may set, without a batch axis; None for none.
      tokenizer: with `decode(ids, skip_special_tokens)`, or None.
      takes_matchers: whether requests may have matchers.
    """

    max_length: int
    vocab_size: int
    sampling: SamplingParams | None
    tokenizer: Any
    takes_matchers: bool


class CheckedRequest(NamedTuple):
    """A request as it was submitted, checked.

    Attributes:
      token_ids: the prompt, i32[P].
      padded: the prompt, i32[1, S], filled with 0.
      settings: what the device is told.
      stop: the stop strings.
      error: a sentence that says why the request is refused, or None.
      matched: a matcher that has read nothing, or None.
    """

    token_ids: np.ndarray
    padded: np.ndarray
    settings: RequestSettings
    stop: tuple[str, ...]
    error: str | None
    matched: MatchedText | None


def check_request(
    token_ids: Any,
    options: EngineLimits,
    *,
    key: Any,
    max_new_tokens: Any = None,
    temperature: Any = 1.0,
    stop: str | Iterable[str] = (),
    stop_token_ids: Any = (),
    sampling: SamplingParams | None = None,
    matcher: Matcher | None = None,
) -> CheckedRequest:
    """Returns what `Engine.submit` was given, as data of fixed shapes and dtypes.

    Raises:
      ValueError: for what `Engine.submit` does not take.
    """
    if max_new_tokens is not None:
        why = "the tokens that a request may get, or None"
        max_new_tokens = check_count("max_new_tokens", max_new_tokens, 1, why)
    ids, error = _read_prompt(token_ids, max_new_tokens, options)
    most = options.max_length if max_new_tokens is None else ids.size + max_new_tokens
    settings = RequestSettings(
        key=_check_key(key),
        sample=np.int32(-1),
        temperature=_parse_temperature(temperature),
        prompt_length=np.int32(ids.size),
        max_length=np.int32(min(most, options.max_length)),
        stop_token_ids=_parse_stop_ids(stop_token_ids),
        sampling=_parse_sampling(sampling, options.sampling),
    )
    padded = np.zeros((1, options.max_length), np.int32)
    if error is None:
        padded[0, : ids.size] = ids
    matched = None
    if matcher is not None:
        if not options.takes_matchers:
            raise ValueError(
                "matcher is given, and the engine was made without; it needs takes_matchers=True."
            )
        matched = MatchedText(matcher, options.vocab_size, "the request")
        matched.mask()  # refused here if it is of another vocabulary
    return CheckedRequest(
        ids, padded, settings, _parse_stop(stop, options.tokenizer), error, matched
    )


def make_request(
    checked: CheckedRequest, options: EngineLimits, run: Any, run_async: Any
) -> Request:
    """Returns the request of a submission, which has ended if it is refused.

    Args:
      checked: the submission.
      options: the engine's.
      run: as in `Request`.
      run_async: as in `Request`.
    """
    ids, tokenizer = checked.token_ids.tolist(), options.tokenizer
    # A tokenizer cannot decode ids that it does not have.
    context = ids if checked.error is None else []
    text = None if tokenizer is None else StoppedText(tokenizer, context, checked.stop)
    most = int(checked.settings.max_length) - len(ids)
    request = Request(ids, most, text, run, run_async, checked.matched)
    if checked.error is not None:
        request.end(FinishReason.REFUSED, checked.error)
    return request


def _read_prompt(
    token_ids: Any, max_new_tokens: int | None, options: EngineLimits
) -> tuple[np.ndarray, str | None]:
    """Returns the prompt i32[P], and a sentence that says why it is refused, or None."""
    ids = np.asarray(as_array("prompt_token_ids", token_ids))
    if ids.ndim != 1:
        raise ValueError(f"prompt_token_ids has shape {ids.shape}; it needs [P], one prompt.")
    if not ids.size:
        return ids.astype(np.int32), "the prompt is empty: it gives the model nothing to continue."
    if ids.dtype.kind not in "iu":
        raise ValueError(f"prompt_token_ids has dtype {ids.dtype}; it needs integers.")
    wrong = ids[(ids < 0) | (ids >= options.vocab_size)]
    if wrong.size:
        return ids, (
            f"the prompt has token {wrong[0]}; the target's vocabulary has {options.vocab_size} "
            "tokens."
        )
    num_new = 1 if max_new_tokens is None else max_new_tokens
    if ids.size + num_new > options.max_length:
        return ids, (
            f"the prompt has {ids.size} tokens and may get {num_new} new ones; the engine's "
            f"max_length is {options.max_length}."
        )
    return ids.astype(np.int32), None


def _check_key(key: Any) -> Any:
    if getattr(key, "shape", ()) != ():
        raise ValueError(f"key has shape {key.shape}; a request needs one key, ().")
    return check_keys(key, 1, "key")


def _parse_temperature(value: Any) -> np.ndarray:
    with np.errstate(over="ignore"):
        temperature = np.asarray(parse_array("temperature", value, np.float32, ()))
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature is {temperature}; it needs a finite number >= 0.")
    return temperature


def _parse_stop_ids(value: Any) -> np.ndarray:
    ids = np.asarray(parse_ids("stop_token_ids", value))
    if ids.size > MAX_STOP_IDS:
        raise ValueError(f"stop_token_ids has {ids.size} ids; it takes at most {MAX_STOP_IDS}.")
    padded: np.ndarray = pad_eos(ids, MAX_STOP_IDS)
    return padded


def _parse_stop(stop: str | Iterable[str], tokenizer: Any) -> tuple[str, ...]:
    strings = check_stop(stop)
    if strings and tokenizer is None:
        raise ValueError(
            "stop is given, and the engine has no tokenizer to make text with; give one to Engine, "
            "or stop_token_ids."
        )
    return strings


def parse_defaults(sampling: SamplingParams | None) -> SamplingParams | None:
    """Returns the fields that requests may set, each a row without a batch axis; None for none.

    Example:
      >>> defaults = parse_defaults(SamplingParams(top_k=0, bias=np.zeros(3)))
      >>> defaults.top_k.shape, defaults.bias.shape, defaults.top_p
      ((), (3,), None)
    """
    if sampling is None:
        return None
    fields = read_sampling(sampling, 1)._asdict()
    rows = {name: _row(name, value) for name, value in fields.items() if name != "grammar"}
    is_given = any(row is not None for row in rows.values())
    return SamplingParams(**rows, grammar=fields["grammar"]) if is_given else None


def _row(name: str, value: Any) -> Any:
    if value is None:
        return None
    value = np.asarray(value)
    return value[0] if value.ndim > FIELDS[name].rank else value


def _parse_sampling(
    sampling: SamplingParams | None, defaults: SamplingParams | None
) -> SamplingParams | None:
    """Returns a request's rows; what it does not set has the engine's value.

    The tables of a grammar are not among them, as all requests share the engine's.

    Raises:
      ValueError: for a field that the engine was not made with, or one of another shape.
    """
    given = _parse_given(sampling, defaults)
    if given is None:
        return defaults and defaults._replace(grammar=None)
    rows = {}
    for name, default in (defaults or SamplingParams())._asdict().items():
        value = getattr(given, name)
        if name == "grammar":
            continue
        if value is None:
            rows[name] = default
        elif default is None:
            raise ValueError(
                f"sampling.{name} is given, and the engine was made without it; a field that "
                f"requests may set is given to Engine, such as sampling=SamplingParams({name}=...) "
                "with the value of requests that do not set it."
            )
        elif name == "bad_words" and all(map(int.__le__, value.shape, default.shape)):
            missing = [
                (0, most - size) for most, size in zip(default.shape, value.shape, strict=True)
            ]
            rows[name] = np.pad(value, missing, constant_values=-1)
        elif (value.shape, value.dtype) != (default.shape, default.dtype):
            raise ValueError(
                f"sampling.{name} is {value.dtype}{list(value.shape)}; the engine was made with "
                f"{default.dtype}{list(default.shape)}, and all requests need that."
            )
        else:
            rows[name] = value
    return SamplingParams(**rows)


def _parse_given(
    sampling: SamplingParams | None, defaults: SamplingParams | None
) -> SamplingParams | None:
    """Returns what a request sets, as rows; its first state is one of the engine's grammar."""
    if not isinstance(sampling, SamplingParams):
        return parse_defaults(sampling)
    if sampling.grammar is not None:
        raise ValueError(
            "sampling.grammar is given; requests share the tables of the engine's grammar, and "
            "sampling.grammar_state says in which of its states a text begins."
        )
    if sampling.grammar_state is not None and defaults is not None:
        sampling = sampling._replace(grammar=defaults.grammar)
    return parse_defaults(sampling)
