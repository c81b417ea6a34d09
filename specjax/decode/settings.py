"""`Settings`: what the requests of a batch ask for, constant from step to step."""

from typing import NamedTuple

import jax
import jax.export

from specjax.decode.logprobs import LogprobsConfig
from specjax.processing.sampling_params import SamplingParams

__all__ = ["Settings"]


class Settings(NamedTuple):
    """What does not change from step to step; data, so that other values do not recompile.

    Attributes:
      keys: typed threefry keys, [B].
      temperature: f32[B].
      prompt_lengths: i32[B], tokens of each prompt.
      max_lengths: i32[B], committed tokens at which a request ends.
      eos_token_ids: i32[E], tokens that end a request, filled up with -2.
      conditional_rates: f32[K] of synthetic acceptance, or None.
      sampling: `SamplingParams` of the requests, or None.
      logprobs: which log-probabilities are listed, or None.
    """

    keys: jax.Array
    temperature: jax.Array
    prompt_lengths: jax.Array
    max_lengths: jax.Array
    eos_token_ids: jax.Array
    conditional_rates: jax.Array | None
    sampling: SamplingParams | None = None
    logprobs: LogprobsConfig | None = None


jax.export.register_namedtuple_serialization(Settings, serialized_name="specjax.Settings")
