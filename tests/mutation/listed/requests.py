"""Wrong versions of what stands between a call and its rules: temperatures, rows, histories."""

from ..mutation import Mutation
from .tests import drafts, edges, processing, ragged, sampled_decoding, sampling, verify

_ENDS = "test_the_least_temperature_is_random_and_the_largest_keeps_a_mask[xla]"
_WORDS = "test_a_bad_word_may_begin_before_the_drafts_and_before_the_row_it_ends_in"
_HELD = "test_a_draft_holds_the_distribution_it_was_sampled_from[6-probabilistic]"

MUTATIONS = (
    Mutation(
        "specjax.core.temperature.parse_temperature",
        "scale = jnp.maximum(scale, jnp.float32(jnp.finfo(jnp.float32).tiny))",
        "scale = jnp.float32(1) * scale",
        sampling(_ENDS),
        "one over a huge temperature is a subnormal number",
    ),
    Mutation(
        "specjax.samplers.reference.request.drafted_token",
        "row_logsumexp(row.normalizer, temperature.scale)",
        "row_logsumexp(row.normalizer, jnp.float32(1))",
        verify("test_mixed_batches_are_verified_as_the_oracle_does[xla-0]"),
        "the residual of a token that its draft could not draw forgets the temperature",
    ),
    Mutation(
        "specjax.samplers.reference.request.Request.from_inputs",
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
        "specjax.processing.bad_words.forbid_words",
        "(word_index < 0)[:, None] |",
        "(word_index < -9)[:, None] |",
        processing(_WORDS),
        "words shorter than the longest never match",
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
