"""Wrong versions of what stands between a call and its rules: temperatures, rows, histories."""

from ..mutation import Mutation
from .tests import drafts, edges, processing, ragged, sampled_decoding, sampling, verify

__all__ = ["MUTATIONS"]

_ENDS = "test_the_least_temperature_is_random_and_the_largest_keeps_a_mask[xla]"
_WORDS = "test_a_bad_word_may_begin_before_the_drafts_and_before_the_row_it_ends_in"
_HELD = "test_a_draft_holds_the_distribution_it_was_sampled_from[6-probabilistic]"
_RAGGED = "test_ragged_equals_padded[xla-0]"

MUTATIONS = (
    Mutation(
        "specjax.core.temperature.parse_temperature",
        "temperature < jnp.float32(MIN_TEMPERATURE)",
        "temperature <= jnp.float32(MIN_TEMPERATURE)",
        sampling(_ENDS),
        "a temperature of 1e-5 is greedy",
    ),
    Mutation(
        "specjax.core.temperature.parse_temperature",
        "scale = jnp.maximum(scale, jnp.float32(jnp.finfo(jnp.float32).tiny))",
        "scale = jnp.float32(1) * scale",
        sampling(_ENDS),
        "one over a huge temperature is a subnormal number",
    ),
    Mutation(
        "specjax.core.temperature.parse_temperature",
        "(temperature >= 0) & jnp.isfinite(temperature)",
        "temperature >= 0",
        sampling("test_an_invalid_temperature_draws_nothing[xla]"),
        "an infinite temperature is valid",
    ),
    Mutation(
        "specjax.samplers.reference.request.drafted_token",
        "row_logsumexp(row.normalizer, temperature.scale)",
        "row_logsumexp(row.normalizer, jnp.float32(1))",
        verify("test_mixed_batches_are_verified_as_the_oracle_does[xla-0]"),
        "the residual of a token that its draft could not draw forgets the temperature",
    ),
    Mutation(
        "specjax.samplers.reference.request.Request.from_arrays",
        "row[:, None] * max_draft_tokens",
        "first[:, None] * max_draft_tokens",
        verify("test_logits_are_found_through_rows[xla]"),
        "`Draft.rows` is not followed",
    ),
    Mutation(
        "specjax.samplers.reference.request.drafted_token",
        "drafted_row.kept_logits(token_id)",
        "drafted_row._replace(cutoff=None).kept_logits(token_id)",
        edges("test_a_token_the_draft_cannot_draw_is_rejected[xla-cut]"),
        "the draft's cutoff is ignored at the drafted token",
    ),
    Mutation(
        "specjax.samplers.reference.request._pad_ragged",
        "jnp.minimum(num_tokens, counts)",
        "num_tokens",
        ragged("test_more_drafts_than_a_request_has_rows_are_not_read[xla]"),
        "a request takes the drafts of the next",
    ),
    Mutation(
        "specjax.samplers.reference.request.Request.from_arrays",
        "target_row = cu[:-1] + first",
        "target_row = cu[:-1]",
        ragged(_RAGGED),
        "bonus rows are not counted in where a request's rows begin",
    ),
    Mutation(
        "specjax.samplers.reference.request._pad_ragged",
        "index if rows is None else",
        "index if rows is not None else",
        ragged("test_ragged_logits_are_found_through_rows[xla]"),
        "`Draft.rows` is not followed",
    ),
    Mutation(
        "specjax.samplers.reference.request.Request.from_arrays",
        "else target_row + cu[:-1]",
        "else target_row",
        ragged("test_a_request_with_more_than_the_most_drafts_has_its_first_verified[xla-0]"),
        "without drafts a request's row is not found by the counts",
    ),
    Mutation(
        "specjax.processing.history.recent_tokens",
        "jnp.where(index >= 0, recent, jnp.int32(-1))",
        "recent",
        processing(_WORDS),
        "before a text stands its first token",
    ),
    Mutation(
        "specjax.processing.token_counts.add_to_counts.add",
        "index < num_tokens[:, None]",
        "index <= num_tokens[:, None]",
        processing("test_counts_grow_by_what_is_emitted"),
        "a token more is counted than was emitted",
    ),
    Mutation(
        "specjax.processing.token_counts.count_committed.count",
        "inside & ~in_prompt",
        "inside",
        processing("test_counts_grow_by_what_is_emitted"),
        "the prompt counts as generated",
    ),
    Mutation(
        "specjax.processing.bad_words.forbid_words",
        "(word_index < 0)[:, None] |",
        "(word_index < -9)[:, None] |",
        processing(_WORDS),
        "words shorter than the longest never match",
    ),
    Mutation(
        "specjax.processing.bad_words.forbid_words",
        "row = first_row + jnp",
        "row = jnp",
        processing(_WORDS),
        "words of a later draft step are compared with the first one's past",
    ),
    Mutation(
        "specjax.processing.apply_sampling.apply_rules_and_filters",
        "logits, temperature, filters",
        "logits, jnp.ones_like(temperature), filters",
        sampled_decoding(_HELD),
        "top-p and min-p weigh at temperature 1",
    ),
    Mutation(
        "specjax.processing.sampling_params.read_draft_sampling",
        "if greedy else filters",
        "if not greedy else filters",
        drafts("test_proposals_are_the_draws_of_their_streams_and_positions")
        + sampled_decoding(_HELD),
        "a random draft is not cut",
    ),
)
