"""What goes into a slot and comes out: a prompt's row, a request's settings, a step's output."""

from typing import Any, NamedTuple

import jax

from specjax.decode.logprobs import TopLogprobs
from specjax.decode.metrics import Metrics
from specjax.processing.sampling_params import SamplingParams

__all__ = ["PromptRow", "RequestSettings", "StepOutput"]


class PromptRow(NamedTuple):
    """What the models know of a prompt while it is read: states of a batch of one, or of several.

    Attributes:
      target_cache: the target's cache.
      drafter_state: the drafter's state, None without a drafter.
    """

    target_cache: Any
    drafter_state: Any


class RequestSettings(NamedTuple):
    """What a request asks for, as data.

    Attributes:
      key: typed threefry key, ().
      sample: i32, the index of a sample, folded into the key; -1 folds nothing.
      temperature: f32.
      prompt_length: i32.
      max_length: i32, committed tokens at which the request ends.
      stop_token_ids: i32[E], tokens that end the request, filled up with -2.
      sampling: `SamplingParams` of one request without a batch axis, or None.
    """

    key: jax.Array
    sample: Any
    temperature: Any
    prompt_length: Any
    max_length: Any
    stop_token_ids: Any
    sampling: SamplingParams | None


class StepOutput(NamedTuple):
    """What a step committed, for the host.

    Attributes:
      token_ids: i32[B, K + 1], of which the first `num_tokens` of a request are new.
      num_tokens: i32[B], tokens that each request gained.
      logprobs: f32[B, K + 1].
      origins: i8[B, K + 1].
      finish: i8[B], as in `DecodeState`; negative for an empty slot.
      metrics: `Metrics` of the requests so far.
      top_logprobs: `TopLogprobs` [B, K + 1, ...], or None.
      drafted: i32[B, K], the pending draft, -1 after its end; None unless a host masks rows.
    """

    token_ids: jax.Array
    num_tokens: jax.Array
    logprobs: jax.Array
    origins: jax.Array
    finish: jax.Array
    metrics: Metrics
    top_logprobs: TopLogprobs | None
    drafted: jax.Array | None
