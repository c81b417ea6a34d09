"""Wrong versions of acceptance, the residual, verification and recovery in plain JAX."""

from ..mutation import Mutation
from .tests import edges, laws, verify

_ACCEPTANCE = "specjax.core.acceptance."
_RESIDUAL = "specjax.core.residual."
_VERIFY = "specjax.samplers.reference.verify."
_RECOVERY = "specjax.samplers.reference.next_token."
_LOG_Q = "test_a_draft_whose_carried_log_q_is_invalid_is_verified_as_one_hot"
_NO_HEAT = "test_a_draft_of_an_invalid_temperature_is_verified_as_one_hot"
_ONE_TOKEN = "test_a_residual_of_one_token_is_that_token"
_ROUNDED = "test_a_residual_of_rounding_alone_falls_back_to_the_target"
_CALM = "test_sampled_drafts_are_verified_as_the_oracle_does[xla]"
_MIXED = "test_mixed_batches_are_verified_as_the_oracle_does[xla-0]"
_OUTSIDE = "test_an_id_outside_the_vocabulary_is_rejected_into_the_residual"
_GIVEN = "test_a_given_bonus_asks_nothing_of_its_row"

_LAWLESS = {
    "pattern": "~jnp.isfinite(logsumexp) | ~(logprob < jnp.inf)",
    "replacement": "~jnp.isfinite(logsumexp)",
    "why": "of carried statistics only the logsumexp says that a draft is one-hot",
}
_HEAT = {
    "pattern": "temperature.greedy | ~temperature.valid | invalid",
    "replacement": "temperature.greedy | invalid",
    "why": "a NaN or negative temperature of a draft is taken for 1",
}
_LARGE_BOUND = {
    "pattern": "2.0**-18",
    "replacement": "2.0**-10",
    "why": "a residual of mass 1e-4 becomes the target",
}
_NO_BOUND = {
    "pattern": "2.0**-18",
    "replacement": "0.0",
    "why": "a token is drawn from what rounding leaves of p == q",
}
_ANCHOR = {
    "pattern": "jnp.isfinite(logit) & jnp.isfinite(logprob)",
    "replacement": "jnp.zeros_like(logit, jnp.bool_)",
    "why": "q follows from the carried logsumexp alone, which low temperatures round",
}

MUTATIONS = (
    Mutation(f"{_ACCEPTANCE}is_one_hot", **_LAWLESS, killed_by=edges(f"{_LOG_Q}[xla]")),
    Mutation(f"{_ACCEPTANCE}is_one_hot", **_LAWLESS, killed_by=edges(f"{_LOG_Q}[interpret]")),
    Mutation(f"{_ACCEPTANCE}is_one_hot", **_HEAT, killed_by=edges(f"{_NO_HEAT}[xla]")),
    Mutation(f"{_ACCEPTANCE}is_one_hot", **_HEAT, killed_by=edges(f"{_NO_HEAT}[interpret]")),
    Mutation(
        f"{_ACCEPTANCE}num_valid_drafts",
        "token_ids == -1",
        "token_ids < 0",
        edges(f"{_OUTSIDE}[xla-judged]"),
        "any negative id ends the drafts, not -1 alone",
    ),
    Mutation(
        f"{_ACCEPTANCE}num_valid_drafts",
        "jnp.clip(num_tokens, -1, k)",
        "jnp.clip(num_tokens, 0, k)",
        edges("test_num_tokens_is_clipped[xla]"),
        "an inactive request is one without drafts",
    ),
    Mutation(
        f"{_ACCEPTANCE}log_ratio",
        "(target_logprob > -jnp.inf) & (draft_logprob > -jnp.inf)",
        "draft_logprob > -jnp.inf",
        why="p = 0 is not looked at",
        equivalent="with log q valid the difference is -inf by itself, which no log u is below",
    ),
    Mutation(
        f"{_ACCEPTANCE}log_ratio",
        "target_logprob - draft_logprob",
        "draft_logprob - target_logprob",
        laws("test_accepted_plus_residual_mass_is_the_target"),
        "q / p in place of p / q",
    ),
    Mutation(
        f"{_ACCEPTANCE}accept_synthetic",
        "u < rate",
        "jnp.log(u) < rate",
        edges("test_synthetic_rates_of_zero_accept_nothing[xla]"),
        "a rate is compared with the logarithm of the coin",
    ),
    Mutation(
        f"{_RESIDUAL}MIN_RESIDUAL_MASS", **_LARGE_BOUND, killed_by=edges(f"{_ONE_TOKEN}[xla-1.0-8]")
    ),
    Mutation(
        f"{_RESIDUAL}MIN_RESIDUAL_MASS",
        **_LARGE_BOUND,
        killed_by=edges(f"{_ONE_TOKEN}[interpret-1.0-8]"),
    ),
    Mutation(
        f"{_RESIDUAL}MIN_RESIDUAL_MASS",
        **_LARGE_BOUND,
        killed_by=edges(f"{_ONE_TOKEN}[interpret-1.0-64]"),
    ),
    Mutation(f"{_RESIDUAL}MIN_RESIDUAL_MASS", **_NO_BOUND, killed_by=edges(f"{_ROUNDED}[xla-64]")),
    Mutation(
        f"{_RESIDUAL}residual_probs",
        "q < p",
        "q != p",
        laws("test_accepted_plus_residual_mass_is_the_target"),
        "where q is larger the residual is negative",
    ),
    Mutation(
        f"{_RESIDUAL}residual_log_masses",
        "residual_probs(target_logprobs, draft_logprobs)",
        "residual_probs(draft_logprobs, target_logprobs)",
        verify(_CALM),
        "blocks are chosen by max(q - p, 0)",
    ),
    Mutation(
        f"{_RESIDUAL}residual_log_masses",
        "jnp.sum(tail, axis=-1)]",
        "0 * jnp.sum(tail, axis=-1)]",
        verify(_CALM),
        "the last block, which is shorter, has no residual",
    ),
    Mutation(
        "specjax.core.logsumexp.normalizer_from_statistics",
        **_ANCHOR,
        killed_by=edges(f"{_ONE_TOKEN}[xla-0.0001-8]"),
    ),
    Mutation(
        "specjax.core.logsumexp.normalizer_from_statistics",
        **_ANCHOR,
        killed_by=edges(f"{_ONE_TOKEN}[interpret-0.0001-8]"),
    ),
    Mutation(
        f"{_RECOVERY}emit",
        "bonus_logprob, -jnp.inf)",
        "bonus_logprob, 0.0)",
        edges(f"{_GIVEN}[xla]"),
        "a bonus handed in for an invalid row has log p 0",
    ),
    Mutation(
        f"{_RECOVERY}emit",
        "emits |= is_given",
        "emits &= active",
        edges(f"{_GIVEN}[xla]"),
        "a bonus handed in asks that its row is valid",
    ),
    Mutation(
        f"{_VERIFY}_accepts",
        "Stream.accept(i)",
        "Stream.accept(0)",
        verify(_CALM),
        "every coin is of the first drafted token's stream",
    ),
    Mutation(
        f"{_VERIFY}_accepts",
        "rows.address(i, Stream",
        "rows.address(0 * i, Stream",
        verify(_CALM),
        "every coin stands at the step's first position",
    ),
    Mutation(
        "specjax.samplers.reference.verify._accept_prefix.judge",
        "rows.target_row(index)",
        "rows.target_row(i)",
        verify(_CALM),
        "the bonus comes from the row before its own",
    ),
    Mutation(
        f"{_RECOVERY}next_token",
        "rows.address(prefix.num_accepted, Stream",
        "rows.address(0 * prefix.num_accepted, Stream",
        verify(_CALM),
        "the next token's noise stands at the step's first position",
    ),
    Mutation(
        f"{_RECOVERY}next_token",
        "Stream.TARGET",
        "Stream.draft(0)",
        verify(_CALM),
        "residual and draft share their noise",
    ),
    Mutation(
        f"{_RECOVERY}next_token",
        "jnp.sum(jnp.exp(log_masses)) <= max_empty_mass",
        "jnp.bool_(False)",
        edges("test_a_one_hot_target_on_a_one_hot_draft_has_an_empty_residual[xla]"),
        "an empty residual does not fall back to the target",
    ),
    Mutation(
        f"{_RECOVERY}_sampled_residual",
        "jnp.minimum(prefix.num_accepted, request.token_ids.shape[0] - 1)",
        "jnp.int32(0)",
        verify(_CALM),
        "the residual is of the first draft row, whichever token was rejected",
    ),
    Mutation(
        f"{_RECOVERY}_sampled_residual.sampled_log_masses",
        "constant_values=-jnp.inf",
        "constant_values=0.0",
        verify("test_any_vocabularies_and_any_number_of_drafts[xla-300-200-3]"),
        "past a smaller draft's vocabulary q is 1",
    ),
    Mutation(
        f"{_RECOVERY}_sampled_residual.sampled_log_masses",
        "prefix.row.normalizer, rows.temperature.scale",
        "prefix.row.normalizer, scale",
        verify(_MIXED),
        "p is taken at the draft's temperature",
    ),
    Mutation(
        f"{_RECOVERY}_sampled_residual.logprobs",
        "row.kept_logits(index)",
        "row._replace(cutoff=None).kept_logits(index)",
        edges("test_what_the_draft_cut_off_is_all_that_an_equal_target_leaves[xla]"),
        "inside a block the draft's cutoff is ignored",
    ),
)
