"""Options of a decode loop: as its caller gives them, and as its programs are compiled for."""

import dataclasses
from typing import Any

from specjax.checks import check_count, check_type
from specjax.config import SpeculativeConfig
from specjax.implementation import Implementation, resolve_implementation

# Tokens of a prompt that a CPU reads at once. A CPU reads padding as slowly as tokens.
PREFILL_CHUNK_SIZE = 128

# Tokens that a GPU reads at once, of all prompts together; each has at least 128. An 8B model on an
# H100 reads 512 in 1.4 times the time of 256. Longer chunks are hardly faster per token, and the
# other requests of an engine wait for them.
_GPU_CHUNK_SIZE = 512


def uses_kernels() -> bool:
    """Returns whether models run through kernels by default on this machine."""
    return resolve_implementation(None).name in ("auto", "triton")


def default_chunk_size(num_prompts: int = 1) -> int:
    """Returns the tokens of each of some prompts that the models read at once by default."""
    if not uses_kernels():
        return PREFILL_CHUNK_SIZE
    return max(PREFILL_CHUNK_SIZE, _GPU_CHUNK_SIZE // num_prompts)


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """Options of a decode loop, the same for all its requests. Hashable Python values.

    They are checked by `generate`, `init` and the others that take them.

    Attributes:
      max_length: S, the tokens of a request that the buffers and caches have room for, a Python
        int. None is the next power of two, at least 128, that fits the prompts and
        `max_new_tokens`, and at most the number of the target's positions. Programs are compiled
        for a capacity and a batch size. Within them, prompts of other lengths, other
        `max_new_tokens`, end-of-sequence ids and sampling values compile nothing. Tokens do not
        depend on `max_length`.
      prefill_chunk_size: tokens of a prompt that the models read at once, a Python int >= 1. It
        bounds the memory of a long prompt; tokens do not depend on it. None is 128;
        through kernels 512 of one prompt, 256 of each of two.
      num_logprobs: likeliest tokens listed for every generated token, besides its own rank and
        log-probability, a Python int in [0, V]. None lists none.
      logprobs_mode: "raw" lists the model's distribution at temperature 1, "processed" the
        distribution that was sampled from. `Generation.logprobs` are always of the second.
      max_kept_tokens: M, most ids listed of the tokens that could be sampled in the place of each
        generated token, a Python int in [1, V]. A trainer needs the sets for an importance ratio;
        see `KeptTokens`. `generate` refuses a set of more tokens, and an engine gives its mask.
        None lists none. A custom `rule` and "synthetic" refuse it.
      implementation: of verification, cutoffs and drafts, as in `rejection_sample`. A name is
        passed to `drafter.propose` too. A model chooses the kernels of its own layers.
      prompt_logprobs: whether `num_logprobs` tokens are listed for prompts' tokens, too, from the
        second on: always of the model's distribution at temperature 1. `generate` and `init` list
        all prompts. An `Engine` lists those whose `submit` asks for it.

    Example:
      >>> from specjax.markov_chain import markov_chain
      >>> model = markov_chain([[0.1, 0.9], [0.8, 0.2]])
      >>> output = specjax.generate(
      ...     model, None, [[0]], keys=jax.random.key(0), max_new_tokens=3, temperature=0,
      ...     options=specjax.LoopOptions(max_length=6))
      >>> output.token_ids.tolist()
      [[0, 1, 0, 1, -1, -1]]
    """

    max_length: int | None = None
    prefill_chunk_size: int | None = None
    num_logprobs: int | None = None
    logprobs_mode: str = "raw"
    max_kept_tokens: int | None = None
    implementation: str | Implementation | None = None
    prompt_logprobs: bool = False


def choose_chunk_size(options: LoopOptions, num_prompts: int) -> int:
    """Returns the tokens of each of some prompts that the models read at once, as options say.

    Raises:
      ValueError: for a `prefill_chunk_size` that is no int >= 1.
    """
    if options.prefill_chunk_size is None:
        return default_chunk_size(num_prompts)
    why = "the tokens of a prompt that are read at once"
    return check_count("prefill_chunk_size", options.prefill_chunk_size, 1, why)


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """Checked options of a step, a static argument of `jit`: other ones are another program.

    Attributes:
      config: from `SpeculativeConfig.compile_key`.
      implementation: a resolved one if the caller named one, else None.
      draft_buckets: numbers of drafted tokens, besides 0 and K, for which a step of adaptive K has
        a copy of the target's layers.
    """

    config: SpeculativeConfig
    implementation: Implementation | None
    draft_buckets: tuple[int, ...] = ()

    def num_rows(self, drafter: object) -> int:
        """Returns K + 1, the logits rows of a step; 1 where the drafter is None."""
        return 1 if drafter is None else 1 + self.config.num_speculative_tokens


@dataclasses.dataclass(frozen=True)
class StaticOptions:
    """Checked options of a prefill and the steps after it, a static argument of `jit`.

    Attributes:
      step: the options of each step.
      chunk_size: most tokens of a request's prompt that the models read at once.
      reads_last: whether the target's prefill reads the last token of each prompt, too: True for
        `init`, False for `generate`, whose first step reads it.
      prompt_logprobs: whether the prompts' tokens are listed.
    """

    step: StepOptions
    chunk_size: int
    reads_last: bool = False
    prompt_logprobs: bool = False


def check_capacity(options: Any, why: str) -> int:
    """Returns the `max_length` of options, for a caller that needs one.

    Args:
      options: a caller's, unchecked.
      why: what the length is for, said in the error.
    """
    check_type("options", options, LoopOptions, "specjax.LoopOptions(...)")
    return check_count("max_length", options.max_length, 2, why)
