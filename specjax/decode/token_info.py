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

from specjax.decode.logprobs import (
    LogprobsConfig,
    TopLogprobs,
    check_logprobs_config,
    check_num_listed,
    empty_logprobs,
    list_top_logprobs,
)
from specjax.decode.options import LoopOptions

__all__ = [
    "TokenInfo",
    "TokenInfoConfig",
    "check_token_info",
    "empty_token_info",
    "for_host",
    "list_rows",
]


class TokenInfo(NamedTuple):
    """What is listed of emitted tokens; a field is None if it is not listed.

    Attributes:
      top_logprobs: `TopLogprobs` [B, L, ...].
    """

    top_logprobs: TopLogprobs | None = None

    def at(self, *index: int) -> "TokenInfo":
        """Returns copies of one token's values, of NumPy arrays."""
        copied: TokenInfo = jax.tree.map(lambda values: values[index].copy(), self)
        return copied


@dataclasses.dataclass(frozen=True)
class TokenInfoConfig:
    """What a decode loop lists of each emitted token; static, so a pytree without leaves.

    Attributes:
      logprobs: which log-probabilities, or None.
      by_step: whether a host reads the values of each step, so that the state stores none.
    """

    logprobs: LogprobsConfig | None
    by_step: bool = False

    @property
    def reads_raw(self) -> bool:
        """Whether the logits of the model are read, before the sampling rules."""
        return self.logprobs is not None and self.logprobs.mode == "raw"

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuses to list more tokens than the vocabulary has."""
        if self.logprobs is not None:
            check_num_listed("num_logprobs", self.logprobs.num, vocab_size)


def check_token_info(options: LoopOptions) -> TokenInfoConfig | None:
    """Returns what options list of each emitted token, None if nothing; or refuses them."""
    logprobs = check_logprobs_config(options.num_logprobs, options.logprobs_mode)
    return None if logprobs is None else TokenInfoConfig(logprobs)


def for_host(config: TokenInfoConfig | None) -> TokenInfoConfig | None:
    """Returns the config of a loop in which a host reads the values of each step."""
    return None if config is None else dataclasses.replace(config, by_step=True)


def empty_token_info(config: TokenInfoConfig | None, shape: tuple[int, ...]) -> TokenInfo:
    """Returns the buffers of a state before the first token; empty if it stores nothing."""
    if config is None or config.by_step:
        return TokenInfo()
    return TokenInfo(empty_logprobs(config.logprobs, shape))


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
    return TokenInfo(_list_logprobs(config, token_ids, raw_logits, logits, cutoff, temperature))


def _list_logprobs(
    config: TokenInfoConfig,
    token_ids: jax.Array,
    raw_logits: jax.Array | None,
    logits: jax.Array,
    cutoff: jax.Array | None,
    temperature: jax.Array,
) -> TopLogprobs | None:
    if config.logprobs is None:
        return None
    num = config.logprobs.num
    if raw_logits is not None:
        return list_top_logprobs(raw_logits, token_ids, jnp.float32(1), None, n=num)
    # A token below the cutoff is not sampled: its probability is 0.
    return list_top_logprobs(logits, token_ids, temperature, cutoff, n=num)


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
