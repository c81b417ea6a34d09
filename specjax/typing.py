"""Public types: plain pytrees of arrays, with `None` for an absent one.

Axes: `B` requests, `K` most drafted tokens per request and step, `S` slots of a
draft cache, `V` target vocabulary, `V_d` draft vocabulary, `L` token buffer.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.export

__all__ = ["Draft", "Drafter", "Finish", "Model", "Origin", "Sample", "Stream", "Verification"]


class Draft(NamedTuple):
    """Drafted tokens of a batch and the logits that they were sampled from.

    Attributes:
      token_ids: i32[B, K]. A -1 ends the drafted tokens of a request.
      logits: [S, K, V_d] in bf16, f16 or f32, raw draft logits, with S = B unless
        `rows` is given. None means one-hot drafts everywhere.
      temperature: f32[B], at which the tokens were sampled. None is the request's own
        temperature. 0 is greedy: q is one-hot, and the logits are not read.
      logprobs: f32[B, K], log q(token) at that temperature and cutoff. Computed when None.
      logsumexp: f32[B, K], of the kept logits over that temperature. Computed when None.
      cutoff: f32[B, K], q is zero on logits below it. None keeps every logit.
      num_tokens: i32[B]. None is K; 0 is no drafts; -1 is an inactive request, of which
        nothing is read and for which nothing is emitted. The decode loop knows itself which
        requests are inactive, and reads a drafter's -1 as 0.
      rows: i32[B], request b's logits are `logits[rows[b]]`. Reordering a batch moves no
        logits. None is b.
    """

    token_ids: jax.Array
    logits: jax.Array | None = None
    temperature: jax.Array | None = None
    logprobs: jax.Array | None = None
    logsumexp: jax.Array | None = None
    cutoff: jax.Array | None = None
    num_tokens: jax.Array | None = None
    rows: jax.Array | None = None


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


class Verification(NamedTuple):
    """The tokens that one speculative step emits.

    Attributes:
      token_ids: i32[B, K + 1], the emitted tokens, padded with -1.
      num_accepted: i32[B], accepted drafted tokens.
      num_emitted: i32[B], `num_accepted` and the recovered or bonus token; without that token
        where the target row that decides it is invalid.
      logprobs: f32[B, K + 1], log p of each emitted token (greedy requests at
        temperature 1), 0 at padding.
    """

    token_ids: jax.Array
    num_accepted: jax.Array
    num_emitted: jax.Array
    logprobs: jax.Array


class Finish:
    """Reasons for which a request ended; 0 while it goes on."""

    LENGTH = 1
    END_OF_SEQUENCE = 2
    INVALID = 3


class Origin:
    """Origins of a token; 0 is the prompt."""

    ACCEPTED = 1
    RECOVERED = 2
    BONUS = 3


class Stream:
    """The independent noise streams of one position.

    Noise shared by a draft and the residual that replaces it biases the output: every purpose has
    its own stream.

    Example:
      >>> Stream.TARGET, Stream.accept(0), Stream.draft(0), Stream.accept(1)
      (0, 1, 2, 3)
    """

    TARGET = 0

    @staticmethod
    def accept(index: Any) -> Any:
        """Returns the stream of the acceptance test of drafted token `index` (int or i32)."""
        return 2 * index + 1

    @staticmethod
    def draft(index: Any) -> Any:
        """Returns the stream that drafted token `index` (int or i32) is sampled on."""
        return 2 * index + 2


@dataclasses.dataclass(frozen=True)
class Model:
    """A language model: parameters and pure functions.

    It is a pytree whose leaves are the parameters, so that they are arguments of every compiled
    function and never constants. The functions are static: two models with equal functions share
    one compilation.

    Attributes:
      params: a pytree of arrays.
      init_cache: `(batch_size, max_length) -> cache`, a pytree indexed by position.
      apply: `(params, token_ids[B, L], positions[B, L], cache) ->
        (hidden[B, L, E], cache)`. Position -1 is padding: it writes nothing. Each
        token sees the cached slots up to and including its own position, so that a smaller
        length rewinds the cache after a rejection.
      logits: `(params, hidden[..., E]) -> logits[..., V]`, apart from `apply` so that
        a prefill computes those of the last row alone.
    """

    params: Any
    init_cache: Callable[[int, int], Any]
    apply: Callable[[Any, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
    logits: Callable[[Any, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Drafter:
    """A drafter: parameters and two pure functions, a pytree like `Model`.

    Attributes:
      params: a pytree of arrays, possibly empty.
      init: `(params, token_ids[B, L], lengths[B], max_length) -> state`, having seen
        every committed token but the last two at most.
      propose: `(params, state, token_ids[B, L], hidden[B, E], *, keys, positions[B],
        num_tokens[B], temperature[B], config) -> (Draft, state)`. `token_ids` holds the
        committed tokens. `positions` are their lengths, that is the absolute position of the
        first drafted token. `hidden` is the target's hidden state that decided the last
        committed token. `num_tokens` is the most tokens each request may draft, -1 for an
        inactive one. `config` is the static `SpeculativeConfig`.
        The draft's own `num_tokens` may be smaller, None, or -1. For an active request -1 is 0:
        only the loop ends requests.
        Where requests have more options than a temperature, `sampling`, their `SamplingParams`,
        and `history` are passed too, for `specjax.propose`. A drafter may ignore them: the output
        is exact either way, and a drafter that samples as the target does is accepted most.
        `implementation` is passed where the caller of the loop named one. A drafter that does not
        take these is refused where they are needed.
    """

    params: Any
    init: Callable[..., Any]
    propose: Callable[..., tuple[Draft, Any]]


for _kind in (Draft, Sample, Verification):
    jax.export.register_namedtuple_serialization(_kind, serialized_name=f"specjax.{_kind.__name__}")
jax.tree_util.register_dataclass(
    Model, data_fields=["params"], meta_fields=["init_cache", "apply", "logits"]
)
jax.tree_util.register_dataclass(Drafter, data_fields=["params"], meta_fields=["init", "propose"])
