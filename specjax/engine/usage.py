"""Counts and ends of requests in the words of OpenAI's API."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specjax.decode.metrics import Metrics


class Usage(NamedTuple):
    """Counts of one request, as the field `usage` of an answer of OpenAI's API has them.

        total_tokens = prompt_tokens + completion_tokens

    Attributes:
      prompt_tokens: tokens of the prompt.
      completion_tokens: tokens generated so far; an end-of-sequence token is one of them.
      accepted_prediction_tokens: drafted tokens that were accepted.
      rejected_prediction_tokens: drafted tokens that were not. Those after the end of a text do not
        count.

    Example:
      >>> usage = Usage(7, 5, 3, 1)
      >>> usage.to_dict()["total_tokens"]
      12
      >>> Usage.sum([usage, Usage(7, 2, 0, 4)]) == Usage(7, 7, 3, 5)
      True
    """

    prompt_tokens: int
    completion_tokens: int
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Tokens of the prompt and of the text."""
        return self.prompt_tokens + self.completion_tokens

    def to_dict(self) -> dict[str, int | dict[str, int]]:
        """Returns the JSON object `usage`, with OpenAI's names."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted_prediction_tokens,
                "rejected_prediction_tokens": self.rejected_prediction_tokens,
            },
        }

    @classmethod
    def sum(cls, usages: "Sequence[Usage]") -> "Usage":
        """Returns the counts of several samples of one prompt, which counts once.

        Args:
          usages: of the samples, at least one.
        """
        counts = zip(*(usage[1:] for usage in usages), strict=True)
        return cls(usages[0].prompt_tokens, *map(sum, counts))


class Totals(NamedTuple):
    """Counts of all requests of an engine that have ended.

    Attributes:
      num_requests: number of requests by `FinishReason`.
      num_prompt_tokens: tokens of their prompts.
      num_completion_tokens: tokens that they got.
      num_drafted: i64[K], as in `Metrics`; [0] before a request with a token has ended.
      num_accepted: i64[K], as in `Metrics`.
    """

    num_requests: Mapping[str, int]
    num_prompt_tokens: int
    num_completion_tokens: int
    num_drafted: np.ndarray
    num_accepted: np.ndarray

    @classmethod
    def zero(cls) -> "Totals":
        """Returns the counts of no request."""
        none = np.zeros(0, np.int64)
        return cls({}, 0, 0, none, none)

    def add(self, finish_reason: str, usage: Usage, metrics: Metrics | None) -> "Totals":
        """Returns the counts with one more request.

        Args:
          finish_reason: of the request, which has ended.
          usage: of the request.
          metrics: of the request, counts of [] and [K]; None if it got no token.
        """
        num_before = self.num_requests.get(finish_reason, 0)
        num_drafted, num_accepted = self.num_drafted, self.num_accepted
        if metrics is not None:
            none = np.zeros(metrics.num_drafted.shape, np.int64)
            num_drafted = (num_drafted if num_drafted.size else none) + metrics.num_drafted
            num_accepted = (num_accepted if num_accepted.size else none) + metrics.num_accepted
        return Totals(
            {**self.num_requests, finish_reason: num_before + 1},
            self.num_prompt_tokens + usage.prompt_tokens,
            self.num_completion_tokens + usage.completion_tokens,
            num_drafted,
            num_accepted,
        )
