"""What is known of target rows once they are reduced, and in a large batch judged."""

from typing import Any, NamedTuple

from specjax.pallas.blocks import Partials

__all__ = ["Judged", "Reduced"]


class Reduced(NamedTuple):
    """A small batch's target rows [B * (K + 1)]: their partials.

    Attributes:
      partials: of the rows that exist.
      counters: u32[B], zero: programs arrived at the residual.
    """

    partials: Partials
    counters: Any


class Judged(NamedTuple):
    """A large batch's target rows [B * (K + 1)]: their partials and the verdicts on them.

    Attributes:
      partials: of the rows that were read.
      anchor: f32, and `log_sum`: `Verdict.law`.
      logprobs: f32, as in `Verdict`; `best` i32 likewise.
      counters: u32[B, K + 2], programs arrived at each row; then K + 1 less the first row known
        not to be kept, or 0.
    """

    partials: Partials
    anchor: Any
    log_sum: Any
    logprobs: Any
    best: Any
    counters: Any
