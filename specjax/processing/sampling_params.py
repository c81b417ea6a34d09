"""`SamplingParams`: truncation, penalties, bias and masks, for all requests or for each."""

from typing import Any, NamedTuple

import jax.export

from specjax.core.truncation import Filters
from specjax.processing.fields import parse_fields
from specjax.processing.logit_rules import LogitRules

__all__ = ["SamplingParams", "read_draft_sampling", "read_sampling", "split_sampling"]


class SamplingParams(NamedTuple):
    """Truncation, penalties, bias and masks of a batch, for all requests or for each.

    A field that is None is absent from the compiled program. The others are data: their values may
    differ between calls and between requests without a compilation. The value named "off" changes
    nothing for its request. `process_logits` and `logit_cutoff` have the formulas.

    Attributes:
      top_k: i32, [B] or scalar, off 0. Keeps the k likeliest tokens.
      top_p: f32, [B] or scalar, off 1. Keeps the smallest set of the likeliest tokens whose
        probability reaches it.
      min_p: f32, [B] or scalar, off 0. Keeps tokens whose probability is at least this fraction
        of the largest one.
      repetition_penalty: f32, [B] or scalar, > 0, off 1. Divides a positive logit, and multiplies
        a negative one, of a token in the prompt or the output.
      frequency_penalty: f32, [B] or scalar, off 0. Subtracted from a token's logit once per
        occurrence in the output. The prompt does not count, as in vLLM and the OpenAI API.
      presence_penalty: f32, [B] or scalar, off 0. Subtracted once from the logit of a token in
        the output. The prompt does not count.
      bias: f32, [V] or [B, V], off 0. Added to the logits; see `bias_array`.
      allowed: bool, [V] or [B, V], tokens that may be emitted; or the mask in 32-bit words, i32
        or u32, [ceil(V / 32)] or [B, ceil(V / 32)]: bit ``v % 32`` of word ``v // 32``, as grammar
        libraries make it. `init` also takes an axis of 1 before V: the first token's mask.
      bad_words: i32, [N, M] or [B, N, M], N token sequences that must not be completed, padded at
        the end with -1. A sequence may begin in the prompt; see `bad_words_array`.
      grammar: a `Grammar`, which every text follows from its first generated token on.
      grammar_state: i32, [B] or scalar, off -1. The state of `grammar` in which a text begins; None
        is 0.

    Example:
      >>> from specjax.markov_chain import markov_chain
      >>> model = markov_chain([[0.1, 0.9], [0.8, 0.2]])
      >>> output = specjax.generate(
      ...     model, None, [[0]], keys=jax.random.key(0), max_new_tokens=4,
      ...     sampling=specjax.SamplingParams(allowed=jnp.array([False, True])))
      >>> specjax.unpad(output.token_ids)
      [[0, 1, 1, 1, 1]]
    """

    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    bias: Any = None
    allowed: Any = None
    bad_words: Any = None
    grammar: Any = None
    grammar_state: Any = None


def read_sampling(sampling: Any, size: int) -> SamplingParams:
    """Returns parameters as arrays of fixed dtypes, or refuses them.

    The widths of a bias and of a mask are checked where the vocabulary is known.
    """
    _check_type(sampling)
    return SamplingParams(**parse_fields(sampling._asdict(), size, prefix="sampling."))


def split_sampling(sampling: Any) -> tuple[LogitRules, Filters]:
    """Returns what changes logits, and what is applied to them as a cutoff."""
    _check_type(sampling)
    fields = sampling._asdict()
    filters = Filters(*(fields.pop(name) for name in Filters._fields))
    return LogitRules(**fields), filters


def _check_type(sampling: Any) -> None:
    if not isinstance(sampling, SamplingParams):
        raise ValueError(
            f"sampling is {type(sampling).__name__}; it needs a specjax.SamplingParams or None."
        )


jax.export.register_namedtuple_serialization(
    SamplingParams, serialized_name="specjax.SamplingParams"
)


def read_draft_sampling(sampling: Any, size: int, greedy: bool) -> tuple[LogitRules, Filters]:
    """Returns the checked rules and filters of a draft; an argmax needs no filters."""
    sampling = SamplingParams() if sampling is None else read_sampling(sampling, size)
    rules, filters = split_sampling(sampling)
    return rules, Filters(None, None, None) if greedy else filters
