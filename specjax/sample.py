"""`Sample`: one token for each of `B` rows of logits, and its statistics."""

from typing import NamedTuple

import jax
import jax.export

__all__ = ["Sample"]


class Sample(NamedTuple):
    """One token per row and its statistics.

    Attributes:
      token_ids: i32[B], -1 where the row or its temperature is invalid.
      logprobs: f32[B], log-probability of the token at the row's temperature and
        cutoff (at temperature 1 for greedy rows).
      logsumexp: f32[B], of the kept logits over the temperature.
    """

    token_ids: jax.Array
    logprobs: jax.Array
    logsumexp: jax.Array


jax.export.register_namedtuple_serialization(Sample, serialized_name="specjax.Sample")
