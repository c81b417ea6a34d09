"""Wrong versions of kept sets: of the rows, of the loop that lists them, of the trainer's half."""

from ..mutation import Mutation
from .tests import kept_requests, kept_sets, kept_texts

_KEPT = "specjax.processing.kept_tokens."
_SETS = "test_sets_and_masks_are_the_support_of_the_rows[float32-64]"
_ROWS = "test_each_set_is_that_of_the_row_after_the_text_before_it[standard-model]"
_MASKS = "test_sets_are_those_of_generate_and_those_above_m_have_masks"

MUTATIONS = (
    Mutation(
        f"{_KEPT}list_kept",
        "mask_below_cutoff(logits, cutoff[..., None]) > -jnp.inf",
        "logits.astype(jnp.float32) > cutoff[..., None]",
        kept_sets(_SETS),
        "a token that ties with the cutoff is left out",
    ),
    Mutation(
        f"{_KEPT}list_kept",
        "jnp.minimum(ends[..., -1], 1)",
        "ends[..., -1]",
        kept_sets(_SETS),
        "a greedy row keeps all tokens that tie with its argmax",
    ),
    Mutation(
        f"{_KEPT}list_kept",
        "parsed.valid & jnp.isfinite(largest)",
        "jnp.isfinite(largest)",
        kept_sets("test_rows_that_no_sampler_takes_keep_nothing"),
        "a row of invalid temperature keeps tokens",
    ),
    Mutation(
        f"{_KEPT}_normalize_over",
        "whole = jnp.where((by_ids | ~is_row)[..., None], 0, whole)",
        "whole = whole",
        kept_sets("test_kept_logprobs_and_their_gradient_are_those_of_the_definition[False]"),
        "the gradient of a cut row is NaN",
    ),
    Mutation(
        "specjax.decode.token_info.list_rows",
        "list_kept(logits,",
        "list_kept(logits[:, :1] + 0 * logits,",
        kept_texts(_ROWS),
        "every token of a step has the set of its first row",
    ),
    Mutation(
        "specjax.decode.token_info.list_rows",
        "temperature, cutoff, **sizes",
        "temperature, None, **sizes",
        kept_texts(_ROWS),
        "cutoffs do not cut the sets that a loop lists",
    ),
    Mutation(
        "specjax.decode.generate.check_kept_sets",
        "num_kept < vocab_size",
        "num_kept <= vocab_size",
        kept_texts("test_without_a_cut_a_set_is_the_vocabulary_and_lists_no_ids"),
        "a row of which nothing was cut is refused as too large",
    ),
    Mutation(
        "specjax.engine.slots.read_output",
        "is_new & ~",
        "is_new & ",
        kept_requests("test_masks_stay_on_the_device_where_every_set_fits"),
        "masks are copied where no set needs one",
    ),
    Mutation(
        "specjax.engine.slots.StepOutput.info_at",
        "self.masks[slot, index].copy()",
        "self.masks[slot, 0].copy()",
        kept_requests(_MASKS),
        "every token of a step has the mask of its first row",
    ),
)
