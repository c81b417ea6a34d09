"""Wrong versions of what takes subnormal numbers for zero."""

from ..mutation import Mutation
from .tests import subnormal

_ZERO = "test_a_cutoff_of_zero_keeps_subnormal_logits_and_a_greedy_request_the_first"

MUTATIONS = (
    Mutation(
        "specjax.core.logsumexp.mask_below_cutoff",
        "smallest_equal(cutoff)",
        "cutoff",
        subnormal(f"{_ZERO}[xla]"),
        "a cutoff of 0 cuts negative subnormal logits",
    ),
    Mutation(
        "specjax.core.gumbel_max.argmax_token",
        "flush_subnormals(partials.max)",
        "partials.max",
        subnormal(f"{_ZERO}[xla]"),
        "a block's largest subnormal number is above another's zero",
    ),
    Mutation(
        "specjax.decode.logprobs._top_logprobs",
        "largest_equal(x)",
        "x",
        subnormal("test_listed_tokens_and_ranks_take_subnormal_logits_for_ties"),
        "a subnormal logit is likelier than zero",
    ),
    Mutation(
        "specjax.pallas.blocks.block_argmax",
        "flush_subnormals(mask_below_cutoff(raw_logits, cutoff))",
        "mask_below_cutoff(raw_logits, cutoff)",
        subnormal(f"{_ZERO}[interpret]"),
        "a subnormal logit is above zero in its block",
    ),
    Mutation(
        "specjax.pallas.cutoff.bound.bound_cutoff",
        "return smallest_equal(low)",
        "return low",
        subnormal("test_what_ties_with_a_bound_of_the_cutoff_is_searched_with_it[interpret]"),
        "logits that tie with a bound of 0 lie below it",
    ),
)
