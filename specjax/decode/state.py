"""The types of the decode loop, pytrees that its programs take and return.

RequestBatch    prompts and `Settings`, before the prefill
DecodeState     what the prefill returns, and each step takes and returns
StepInfo        what a step returns besides
"""

from typing import Any, NamedTuple

import jax
import jax.export

from specjax.decode.adaptive_k import DraftHistory, KPolicy
from specjax.decode.logprobs import TopLogprobs
from specjax.decode.metrics import Metrics
from specjax.decode.token_info import TokenInfo, TokenInfoConfig
from specjax.processing.history import History
from specjax.processing.kept_tokens import KeptTokens
from specjax.processing.sampling_params import SamplingParams
from specjax.processing.token_counts import TokenCounts
from specjax.types import Draft, Verification


class Settings(NamedTuple):
    """Parameters of the requests, which no step changes; other values do not recompile.

    Attributes:
      keys: typed threefry keys, [B].
      temperature: f32[B].
      prompt_lengths: i32[B], tokens of each prompt.
      max_lengths: i32[B], committed tokens at which a request ends.
      eos_token_ids: i32[E], tokens that end a request, padded with -2; or i32[B, E], those of
        each.
      conditional_rates: f32[K] of synthetic acceptance, or None.
      sampling: `SamplingParams` of the requests, or None.
      token_info: which lists each emitted token gets, or None.
      k_by_rate: a table of `adaptive_k`; None if K is fixed. i32[65]: the tokens that a request
        drafts at each acceptance rate 0, 1/64, ..., 1. Or f32[65, K + 1], where all requests draft
        one number: the expected tokens per cost of each number at each rate.
    """

    keys: jax.Array
    temperature: jax.Array
    prompt_lengths: jax.Array
    max_lengths: jax.Array
    eos_token_ids: jax.Array
    conditional_rates: jax.Array | None
    sampling: SamplingParams | None = None
    token_info: TokenInfoConfig | None = None
    k_by_rate: jax.Array | None = None


class RequestBatch(NamedTuple):
    """The requests of a batch before anything is read; data, so that other values do not recompile.

    Attributes:
      token_ids: i32[B, S], prompts, padded at the end with any ids.
      lengths: i32[B], tokens of each prompt.
      settings: of the requests. Here `keys` and `temperature` may have the shape (), too.
    """

    token_ids: jax.Array
    lengths: jax.Array
    settings: Settings


class DecodeState(NamedTuple):
    """The state of a batch between two steps, which `step` takes and returns.

    Attributes:
      token_ids: i32[B, S], committed tokens, then -1.
      lengths: i32[B], committed tokens of each request, of which the prompt's are the first.
      logprobs: f32[B, S], log p of each generated token, 0 elsewhere.
      origins: i8[B, S], 0 for the prompt and padding, else one of `Origin`.
      finish: i8[B], 0 for a request that goes on, else one of `Finish`.
      draft: the pending `Draft`, which the next step verifies.
      target_cache: the target's cache.
      drafter_state: the drafter's state, None without a drafter.
      metrics: `Metrics` of all steps so far.
      settings: keys, temperatures and other parameters of the requests.
      counts: `TokenCounts` of the committed tokens, None without penalties.
      top_logprobs: `TopLogprobs` [B, S, ...], as in `Generation`; None if none are listed.
      draft_history: `DraftHistory` of the requests; None if K is fixed.
      grammar_state: i32[B], the state of the grammar after the committed tokens; None without one.
      kept_tokens: `KeptTokens` [B, S, ...] of the generated tokens, 0 and -1 elsewhere; None if
        none are listed.
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
    draft_history: DraftHistory | None = None
    grammar_state: jax.Array | None = None
    kept_tokens: KeptTokens | None = None

    @property
    def history(self) -> History:
        """The committed tokens, for rules of sampling."""
        return History(self.token_ids, self.lengths, self.counts, self.grammar_state)

    @property
    def token_info(self) -> TokenInfo:
        """The lists of the committed tokens, [B, S, ...]."""
        return TokenInfo(*(getattr(self, name) for name in TokenInfo._fields))

    @property
    def k_policy(self) -> KPolicy:
        """The policy that says how many tokens are drafted."""
        return KPolicy(self.settings.k_by_rate, self.draft_history)


class StepInfo(NamedTuple):
    """The outcome of one step's verification.

    Attributes:
      verification: `Verification` of the step. Its tokens may go on past the end of a text, where
        the state's do not.
      num_drafted: i32[B], drafted tokens of each request, -1 for an inactive one.
      token_info: lists of the emitted tokens, [B, K + 1, ...].
    """

    verification: Verification
    num_drafted: jax.Array
    token_info: TokenInfo = TokenInfo()


for _kind in (DecodeState, Settings, StepInfo):
    jax.export.register_namedtuple_serialization(_kind, serialized_name=f"specjax.{_kind.__name__}")
