"""Wrong versions of coupled sampling, in plain JAX, in the kernels and in the decode loop."""

from ..mutation import Mutation
from .tests import coupled_decoding, coupled_sampling

_TOKENS = "test_tokens_are_the_oracle_s"
_RAGGED = "test_requests_end_to_end_are_those_of_the_padded_form"
_INVALID = "test_an_invalid_row_that_decides_emits_nothing_from_there_on"
_MATCHES = "test_drafts_match_as_often_as_the_formula_says"
_CHANGE = "test_a_change_of_the_method_drops_drafts_of_the_target_s_noise"

MUTATIONS = (
    Mutation(
        "specjax.samplers.reference.coupled.couple_request.judge",
        "(token == request.token_ids[i])",
        "(token >= 0)",
        coupled_sampling(f"{_TOKENS}[xla]"),
        "a drafted token is accepted whatever the target draws",
    ),
    Mutation(
        "specjax.samplers.reference.coupled.couple_request.judge",
        "Stream.TARGET",
        "Stream.accept(index)",
        coupled_sampling(f"{_TOKENS}[xla]"),
        "the target draws on another stream than plain decoding",
    ),
    Mutation(
        "specjax.pallas.coupled.draw_and_compare",
        "(token_id == token) & ",
        "",
        coupled_sampling(f"{_TOKENS}[interpret]"),
        "a drafted token is accepted whatever the target draws",
    ),
    Mutation(
        "specjax.pallas.coupled.draw_and_compare",
        "& jnp.isfinite(log_sum)",
        "& (token >= 0)",
        coupled_sampling(f"{_INVALID}[interpret-padded]"),
        "an invalid row may accept what happens to be drawn from it",
    ),
    Mutation(
        "specjax.pallas.coupled._draw_row.draw",
        "request.address(i, Stream.TARGET",
        "request.address(0 * i, Stream.TARGET",
        coupled_sampling(f"{_TOKENS}[interpret]"),
        "every row of a request draws with the noise of the first",
    ),
    Mutation(
        "specjax.pallas.coupled._drawn_prefix",
        "has_draft & (token_id == token) & ",
        "has_draft & ",
        coupled_sampling(f"{_RAGGED}[interpret]"),
        "a small batch accepts a drafted token whatever the target draws",
    ),
    Mutation(
        "specjax.pallas.coupled.draw_and_compare",
        "i < request.num_draft_tokens",
        "i < schedule.max_draft_tokens",
        coupled_sampling(f"{_TOKENS}[interpret]"),
        "tokens past those that were drafted are accepted where the target draws them",
    ),
    Mutation(
        "specjax.pallas.next_token.AcceptedPrefix.from_row",
        "rejected=num_accepted < request.num_draft_tokens",
        "rejected=num_accepted < 0",
        coupled_sampling(f"{_RAGGED}[interpret]"),
        "in a small batch a bonus handed in replaces a draw that no draft agreed with",
    ),
    Mutation(
        "specjax.pallas.coupled._drawn_prefix",
        "& jnp.isfinite(log_sum)",
        "& (token >= 0)",
        coupled_sampling(f"{_INVALID}[interpret-end to end]"),
        "in a small batch an invalid row may accept what happens to be drawn from it",
    ),
    Mutation(
        "specjax.pallas.reduce_rows._store_noise",
        "address, split * count, count",
        "address, 0 * split, count",
        coupled_sampling(f"{_RAGGED}[interpret]"),
        "every share of a row's blocks has the noise of the first",
    ),
    Mutation(
        "specjax.decode.propose._draft_tokens.draw",
        "Stream.TARGET if coupled else Stream.draft(i)",
        "Stream.draft(i)",
        coupled_decoding(_MATCHES),
        "a coupled draft is drawn on a draft stream: the text stays, the matches go",
    ),
    Mutation(
        "specjax.decode.propose._draft_tokens",
        "on_target_stream=True",
        "on_target_stream=False",
        coupled_decoding(_CHANGE),
        "tokens drawn with the target's noise look like likeliest ones: any method verifies them",
    ),
    Mutation(
        "specjax.decode.draft_step.discard_incompatible_draft",
        "jnp.minimum(jnp.asarray(state.draft.num_tokens), 0)",
        "jnp.asarray(state.draft.num_tokens)",
        coupled_decoding(_CHANGE),
        "in place of a draft of another method tokens 0 are verified",
    ),
    Mutation(
        "specjax.decode.step.verify_pending",
        "static_rule(config.verification_rule(settings.conditional_rates))",
        'type(COUPLED)("standard")',
        coupled_decoding("test_a_seeded_text_is_that_of_plain_decoding[xla]"),
        "tokens drawn on the target's stream are verified by rejection",
    ),
    Mutation(
        "specjax.theory.coupling.match_probability",
        "return float(blocks @ np.array(inside))",
        "return float(_match_probabilities(p, q).sum())",
        coupled_sampling("test_drafts_on_the_target_s_stream_match_as_often_as_the_formula_says"),
        "the matches are counted as those of noise on one level",
    ),
)
