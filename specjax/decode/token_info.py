"""`TokenInfo`: what a decode loop lists of each emitted token, besides its own log-probability.

    LoopOptions -> check_token_info -> `TokenInfoConfig`, static, in `Settings.token_info`
    rows of a step -> list_rows -> `TokenInfo` [B, K + 1, ...], in `StepInfo`
    `StepInfo` -> buffers [B, S, ...] of the state, or a host that reads each step

Modules that carry it treat it as one pytree. Here alone is asked what is in it.
"""

import dataclasses
import json
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp

from specjax.checks import check_num_listed
from specjax.config import SpeculativeConfig
from specjax.decode.logprobs import (
    LogprobsConfig,
    TopLogprobs,
    check_logprobs_config,
    empty_logprobs,
    list_top_logprobs,
)
from specjax.decode.options import LoopOptions
from specjax.processing.kept_tokens import KeptTokens, check_max_kept, empty_kept, list_kept


class TokenInfo(NamedTuple):
    """What is listed of emitted tokens; a field is None if it is not listed.

    Attributes:
      top_logprobs: `TopLogprobs` [B, L, ...].
      kept_tokens: `KeptTokens` [B, L, ...].
    """

    top_logprobs: TopLogprobs | None = None
    kept_tokens: KeptTokens | None = None

    def split_masks(self) -> tuple["TokenInfo", jax.Array | None]:
        """Returns the values without the masks of kept sets, and the masks, or None."""
        if self.kept_tokens is None:
            return self, None
        return self._replace(
            kept_tokens=self.kept_tokens._replace(mask=None)
        ), self.kept_tokens.mask

    def at(self, *index: int) -> "TokenInfo":
        """Returns copies of one token's values, of NumPy arrays.

        A host does this for each token of a step, where `jax.tree.map` would take milliseconds.
        """

        def copy(field: Any) -> Any:
            if field is None:
                return None
            return field._make(None if values is None else values[index].copy() for values in field)

        return TokenInfo(*map(copy, self))


@dataclasses.dataclass(frozen=True)
class TokenInfoConfig:
    """What a decode loop lists of each emitted token; static, so a pytree without leaves.

    Attributes:
      logprobs: which log-probabilities, or None.
      max_kept: most ids of its kept set; None if kept sets are not listed.
      by_step: whether a host reads the values of each step, so that the state stores none. Kept
        sets then have masks.
      row_invariant: as in `Model`; log-probabilities are then listed so, too.
    """

    logprobs: LogprobsConfig | None
    max_kept: int | None = None
    by_step: bool = False
    row_invariant: bool = False

    @property
    def reads_raw(self) -> bool:
        """Whether the logits of the model are read, before the sampling rules."""
        return self.logprobs is not None and self.logprobs.mode == "raw"

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuses to list more tokens than the vocabulary has."""
        if self.logprobs is not None:
            check_num_listed("num_logprobs", self.logprobs.num, vocab_size)
        if self.max_kept is not None:
            check_max_kept("max_kept_tokens", self.max_kept, vocab_size)

    def check_rule(self, config: SpeculativeConfig) -> None:
        """Refuses kept sets where a token may be emitted that its row does not decide."""
        method = config.rejection_sample_method
        if self.max_kept is not None and (config.rule is not None or method == "synthetic"):
            name = "a rule" if config.rule is not None else f"rejection_sample_method {method!r}"
            raise ValueError(
                f"max_kept_tokens is {self.max_kept}, and config has {name}; what that emits does "
                "not follow the target's row, so that no kept set is that of the token. Kept "
                'tokens need "standard", "block" or "coupled".'
            )


def check_token_info(
    options: LoopOptions, config: SpeculativeConfig, row_invariant: bool = False
) -> TokenInfoConfig | None:
    """Returns what options list of each emitted token, None if nothing; or refuses them."""
    logprobs = check_logprobs_config(options.num_logprobs, options.logprobs_mode)
    max_kept = options.max_kept_tokens
    if max_kept is not None:
        max_kept = check_max_kept("max_kept_tokens", max_kept)
    if (logprobs, max_kept) == (None, None):
        return None
    listed = TokenInfoConfig(logprobs, max_kept, row_invariant=row_invariant)
    listed.check_rule(config)
    return listed


def for_host(config: TokenInfoConfig | None) -> TokenInfoConfig | None:
    """Returns the config of a loop in which a host reads the values of each step."""
    return None if config is None else dataclasses.replace(config, by_step=True)


def empty_token_info(config: TokenInfoConfig | None, shape: tuple[int, ...]) -> TokenInfo:
    """Returns the buffers of a state before the first token; empty if it stores nothing."""
    if config is None or config.by_step:
        return TokenInfo()
    kept = None if config.max_kept is None else empty_kept(shape, config.max_kept)
    return TokenInfo(empty_logprobs(config.logprobs, shape), kept)


def list_rows(
    config: TokenInfoConfig,
    token_ids: jax.Array,
    raw_logits: jax.Array | None,
    logits: jax.Array,
    cutoff: jax.Array | None,
    temperature: jax.Array,
) -> TokenInfo:
    """Returns what is listed of the tokens that rows emitted.

    Args:
      config: what is listed.
      token_ids: i32[B, R], the emitted tokens.
      raw_logits: [B, R, V] of the model, if `config.reads_raw`.
      logits: [B, R, V] after the sampling rules.
      cutoff: f32[B, R], or None.
      temperature: f32[B].
    """
    top = kept = None
    if config.logprobs is not None:
        # A token below the cutoff is not sampled: its probability is 0.
        rows = (logits, token_ids, temperature, cutoff)
        if raw_logits is not None:
            rows = (raw_logits, token_ids, jnp.float32(1), None)
        top = list_top_logprobs(*rows, n=config.logprobs.num, row_invariant=config.row_invariant)
    if config.max_kept is not None:
        sizes = {"max_kept": config.max_kept, "with_mask": config.by_step}
        kept = list_kept(logits, temperature, cutoff, **sizes)
    return TokenInfo(top, kept)


def _serialize(fields: Any) -> bytes:
    (logprobs, *flags) = fields
    listed = None if logprobs is None else dataclasses.astuple(logprobs)
    return json.dumps([listed, *flags]).encode()


def _deserialize(data: Any) -> tuple[Any, ...]:
    listed, *flags = json.loads(bytes(data))
    return (None if listed is None else LogprobsConfig(*listed), *flags)


_FIELDS = [field.name for field in dataclasses.fields(TokenInfoConfig)]
jax.tree_util.register_dataclass(TokenInfoConfig, data_fields=[], meta_fields=_FIELDS)
jax.export.register_pytree_node_serialization(
    TokenInfoConfig,
    serialized_name="specjax.TokenInfoConfig",
    serialize_auxdata=_serialize,
    deserialize_auxdata=_deserialize,
)
jax.export.register_namedtuple_serialization(TokenInfo, serialized_name="specjax.TokenInfo")
