"""The options of a call: `Options` of its caller, and `CallOptions`, which are compiled into it."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from specjax.checks import check_noise_dtype, check_type
from specjax.core.rule import STANDARD, Rule, StaticRule
from specjax.devices.placement import Placement
from specjax.devices.vocabulary_split import VocabularySplit, axis_of
from specjax.implementation import Implementation, resolve_implementation


@dataclasses.dataclass(frozen=True)
class Options:
    """How a sampler or verifier runs; static and hashable. Unsuitable options are refused.

    Attributes:
      noise_dtype: float32, or float64 where `jax_enable_x64` is on.
      implementation: None chooses at lowering. It takes Triton kernels on an NVIDIA GPU of compute
        capability 8.0 or newer, plain JAX elsewhere. "xla" and "triton" name one of them,
        "interpret" the kernels in Pallas' interpreter, for tests. A
        `specjax.implementation.Implementation` also carries sizes of the kernels.
      axis_name: inside `shard_map`, the mesh axis over which V lies. Logits are then this device's
        part of each row, of at least 128 tokens. The result is the same on each device. None for
        whole arrays. Where the sharding of the logits splits V over a mesh axis, each device reads
        its part, too. Inside `jit` that is seen of Explicit axes.
      vocab_size: V, where it lies over a mesh axis. The tokens of the axis past V are padding. None
        is all of it.

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
