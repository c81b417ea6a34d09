"""What the decode loop carries, and what it hands out."""

from typing import Any, NamedTuple

import jax
import jax.export

from specjax.decode.logprobs import LogprobsConfig, TopLogprobs
from specjax.decode.metrics import Metrics
from specjax.processing.sampling_params import SamplingParams
from specjax.processing.token_counts import TokenCounts
from specjax.typing import Draft, Verification

__all__ = ["DecodeState", "Generation", "Settings", "StepInfo"]


class Settings(NamedTuple):
    """What stays the same from step to step; data, so that no change of it recompiles.

    Attributes:
      keys: typed threefry keys, [B].
      temperature: f32[B].
      max_lengths: i32[B].
      eos_token_ids: i32[E].
      conditional_rates: f32[K] of synthetic acceptance, or None.
      sampling: what the requests ask besides their temperature, or None.
      logprobs: which log-probabilities are kept, or None.
    """

    keys: jax.Array
    temperature: jax.Array
    max_lengths: jax.Array
    eos_token_ids: jax.Array
    conditional_rates: jax.Array | None
    sampling: SamplingParams | None = None
    logprobs: LogprobsConfig | None = None


class DecodeState(NamedTuple):
    """All that a step needs and gives back.

    Attributes:
      token_ids: i32[B, L], committed tokens, -1 behind them.
      lengths: i32[B].
      logprobs: f32[B, L], log p of each generated token, 0 elsewhere.
      origins: i8[B, L], 0 for the prompt and padding, else one of `Origin`.
      finish: i8[B], 0 or one of `Finish`.
      draft: the pending `Draft`.
      target_cache: the target's cache.
      drafter_state: the drafter's, None without a drafter.
      metrics: what speculation achieved so far.
      settings: keys, temperatures, limits.
      counts: of the committed tokens, kept for penalties; None where none is asked.
      top_logprobs: of each generated token [B, L, ...], None unless asked for; -1 and 0
        elsewhere.
    """

    token_ids: jax.Array
    lengths: jax.Array
    logprobs: jax.Array
    origins: jax.Array
    finish: jax.Array
    draft: Draft
    target_cache: Any
    drafter_state: Any
    metrics: Metrics
    settings: Settings
    counts: TokenCounts | None = None
    top_logprobs: TopLogprobs | None = None


class StepInfo(NamedTuple):
    """What one step did: its `verification`, and `num_drafted` i32[B], -1 if inactive.

    Of a step that ends a text the verification goes on past the end; what was committed is in
    the state, and its metrics count that alone.
    """

    verification: Verification
    num_drafted: jax.Array


class Generation(NamedTuple):
    """The outcome of `generate`: the fields of `DecodeState` that outlive the loop."""

    token_ids: jax.Array
    lengths: jax.Array
    logprobs: jax.Array
    origins: jax.Array
    finish: jax.Array
    metrics: Metrics
    top_logprobs: TopLogprobs | None = None


for _kind in (DecodeState, Generation, Settings, StepInfo):
    jax.export.register_namedtuple_serialization(_kind, serialized_name=f"specjax.{_kind.__name__}")
