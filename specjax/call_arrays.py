"""The arrays of a call and its static options, from the public function to the reference or kernel.

One type holds the arrays of each kind of call, and one the options that are compiled into it.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from specjax.checks import check_noise_dtype, check_type
from specjax.core.rule import STANDARD, Rule, StaticRule
from specjax.devices.placement import Placement
from specjax.devices.vocabulary_split import VocabularySplit, axis_of
from specjax.implementation import Implementation, resolve_implementation
from specjax.types import Draft, RaggedDraft

__all__ = [
    "CallOptions",
    "Options",
    "SampleArrays",
    "TreeArrays",
    "VerifyArrays",
    "check_options",
    "check_whole_rows",
]


@dataclasses.dataclass(frozen=True)
class Options:
    """How a sampler or verifier runs; static and hashable. A call refuses what it cannot honour.

    Attributes:
      noise_dtype: float32, or float64 where `jax_enable_x64` is on.
      implementation: None chooses at lowering. It takes Triton kernels on an NVIDIA GPU of compute
        capability 8.0 or newer, plain JAX elsewhere. "xla" and "triton" name one of them,
        "interpret" the kernels in Pallas' interpreter, for tests. A
        `specjax.implementation.Implementation` also carries sizes of the kernels.
      axis_name: inside `shard_map`, the mesh axis over which V lies. Logits are then this device's
        part of each row, of at least 128 tokens, and the result is the same on each. None for whole
        arrays. Where the sharding of the logits splits V over a mesh axis, each device reads its
        part, too. Inside `jit` that is seen of Explicit axes.
      vocab_size: V, where it lies over a mesh axis; what the axis holds past it is padding. None is
        all of it.

    Example:
      >>> options = specjax.Options(implementation="xla")
      >>> specjax.gumbel_sample(
      ...     jnp.array([[0.0, 9.0]]), keys=jax.random.key(0), positions=0, stream=0,
      ...     temperature=0.0, options=options).token_ids
      Array([1], dtype=int32)
    """

    noise_dtype: DTypeLike = jnp.float32
    implementation: str | Implementation | None = None
    axis_name: str | None = None
    vocab_size: int | None = None


@dataclasses.dataclass(frozen=True)
class CallOptions:
    """Static options of a call of the samplers.

    Attributes:
      noise_dtype: float32 or float64.
      implementation: a resolved one.
      max_draft_tokens: K, drafted tokens per request at most; at least 0.
      rule: how drafted tokens are verified; synthetic rates are data of the standard rule.
      greedy_logprobs: whether greedy requests get log-probabilities; 0 otherwise.
      split: of the vocabulary over a mesh axis, or None.
      placement: of the model whose whole rows are drawn from, or None.
    """

    noise_dtype: Any
    implementation: Implementation
    max_draft_tokens: int = 0
    rule: StaticRule = STANDARD
    greedy_logprobs: bool = True
    split: VocabularySplit | None = None
    placement: Placement | None = None

    @classmethod
    def from_options(cls, options: Options, **static: Any) -> "CallOptions":
        """Returns the options of a call from those of its caller, resolved, or refuses them.

        Args:
          options: of the public call; its axis and vocabulary are read by `parse_split`.
          **static: the other fields.
        """
        return cls(
            check_noise_dtype(options.noise_dtype),
            resolve_implementation(options.implementation),
            **static,
        )

    @property
    def axis_name(self) -> str | None:
        """Returns the mesh axis over which rows of logits lie, or None."""
        return axis_of(self.split)

    @property
    def custom_rule(self) -> Rule | None:
        """Returns the rule if it is one of functions and there are drafts to judge, else None."""
        return self.rule if isinstance(self.rule, Rule) and self.max_draft_tokens else None

    @property
    def greedy_is_argmax(self) -> bool:
        """Returns whether greedy requests accept the argmax alone, as without a rule for them."""
        return self.custom_rule is None or not self.custom_rule.greedy

    @property
    def skips_greedy_sums(self) -> bool:
        """Returns whether no logit of a greedy request is exponentiated: its maxima decide."""
        return self.greedy_is_argmax and not self.greedy_logprobs


def check_options(options: Options) -> None:
    """Raises `ValueError` for what is no `Options`."""
    needed = 'a specjax.Options, such as specjax.Options(implementation="xla")'
    check_type("options", options, Options, needed)


def check_whole_rows(options: Options, why: str) -> None:
    """Raises `ValueError` for options of a split vocabulary; the error ends with `why`."""
    for name in ("axis_name", "vocab_size"):
        if getattr(options, name) is not None:
            raise ValueError(
                f"options.{name} is {getattr(options, name)!r}; it needs to be None: {why}."
            )


class SampleArrays(NamedTuple):
    """Arrays of `gumbel_sample`, or in a kernel the references to them.

    A public call passes typed keys and per-row values, each [B] or (). `sample_batch` makes them
    [B], and the keys words.

    Attributes:
      logits: [B, V].
      keys: u32[B, 2].
      positions: i32[B].
      stream: i32[B].
      temperature: f32[B].
      cutoff: f32[B], or None.
      first_token: as in `VerifyArrays`.
    """

    logits: Any
    keys: Any
    positions: Any
    stream: Any
    temperature: Any
    cutoff: Any
    first_token: Any = None


class VerifyArrays(NamedTuple):
    """Arrays of a verification, or in a kernel the references to them.

    A public call passes typed keys and per-request values, each [B] or (). `once_per_request`
    makes them [B], and the keys words. Rows of logits are flat, [R, V], from `verify_shard` on;
    token arrays [B, K] are flat, [B * K], in kernels. Without drafts, K = 0, the arrays of drafts
    are None.

    Attributes:
      target_logits: [B, K + 1, V], or ragged [N + B, V].
      target_cutoff: f32 of the rows of `target_logits`, or None.
      draft_logits: [S, K, V_d], or ragged [S, V_d]; None where every draft is one-hot.
      token_ids: i32[B, K], or ragged i32[N].
      draft_logprobs: f32 like `token_ids`, or None.
      draft_logsumexp: f32 like `token_ids`, or None.
      draft_cutoff: f32 like `token_ids`, or None.
      draft_temperature: f32[B]; None for the request's own.
      num_tokens: i32[B], drafted tokens of each request, or None.
      draft_rows: i32[B], the index in [0, S) of each request's rows of `draft_logits`; ragged:
        i32[N], the row of each token. None for the request's or token's own index.
      cu_num_draft_tokens: i32[B + 1] of a ragged batch, else None.
      keys: u32[B, 2].
      positions: i32[B].
      temperature: f32[B].
      conditional_rates: f32[B, K], or None.
      bonus_token_ids: i32[B], or None.
      token_map: i32[V_d] of a public call, the target's id of every draft id, or None.
      draft_ids: i32[V], its inverse, which `once_per_request` makes: the draft id of every token of
        the target, V_d where the draft has none. None where the ids are the same.
      first_token: i32[1], in the kernels of a split vocabulary: the id of the first token that this
        device has. Where the vocabulary is padded i32[2], with the number of its tokens. None
        stands for whole rows.
      shared: what devices have told each other of their rows, `pallas.split.shared_rows`; or None.
    """

    target_logits: Any
    target_cutoff: Any
    draft_logits: Any
    token_ids: Any
    draft_logprobs: Any
    draft_logsumexp: Any
    draft_cutoff: Any
    draft_temperature: Any
    num_tokens: Any
    draft_rows: Any
    cu_num_draft_tokens: Any
    keys: Any
    positions: Any
    temperature: Any
    conditional_rates: Any
    bonus_token_ids: Any
    token_map: Any = None
    draft_ids: Any = None
    first_token: Any = None
    shared: Any = None

    @classmethod
    def from_draft(
        cls,
        draft: Draft | RaggedDraft,
        target_logits: Any,
        *,
        keys: Any,
        positions: Any,
        temperature: Any,
        cutoff: Any = None,
        conditional_rates: Any = None,
        bonus_token_ids: Any = None,
    ) -> "VerifyArrays":
        """Returns the arrays of a public call from its arguments, under their public names."""
        return cls(
            target_logits=target_logits,
            target_cutoff=cutoff,
            draft_logits=draft.logits,
            token_ids=draft.token_ids,
            draft_logprobs=draft.logprobs,
            draft_logsumexp=draft.logsumexp,
            draft_cutoff=draft.cutoff,
            draft_temperature=draft.temperature,
            num_tokens=draft.num_tokens,
            draft_rows=draft.rows,
            cu_num_draft_tokens=draft.cu_num_draft_tokens
            if isinstance(draft, RaggedDraft)
            else None,
            keys=keys,
            positions=positions,
            temperature=temperature,
            conditional_rates=conditional_rates,
            bonus_token_ids=bonus_token_ids,
            token_map=draft.token_map,
        )

    def without_drafts(self) -> "VerifyArrays":
        """Returns the arrays of a batch that has no drafted tokens."""
        return self._replace(
            draft_logits=None,
            token_ids=None,
            draft_logprobs=None,
            draft_logsumexp=None,
            draft_cutoff=None,
            draft_temperature=None,
            draft_rows=None,
            conditional_rates=None,
            token_map=None,
        )


class TreeArrays(NamedTuple):
    """Arrays of `tree_rejection_sample`.

    A public call passes typed keys and per-request values, each [B] or (). Its jitted body makes
    them [B], and the keys words.

    Attributes:
      token_ids: i32[B, N].
      parents: i32[B, N].
      target_logits: [B, N + 1, V].
      target_cutoff: f32[B, N + 1], or None.
      draft_logits: [B, N + 1, V_d]; None where every node is one-hot.
      draft_cutoff: f32[B, N + 1], or None.
      draft_temperature: f32[B]; None for the request's own.
      keys: u32[B, 2].
      positions: i32[B].
      temperature: f32[B].
    """

    token_ids: Any
    parents: Any
    target_logits: Any
    target_cutoff: Any
    draft_logits: Any
    draft_cutoff: Any
    draft_temperature: Any
    keys: Any
    positions: Any
    temperature: Any
