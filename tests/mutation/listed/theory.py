"""Wrong versions of the formulas of expected acceptance and speed."""

from ..mutation import Mutation
from .tests import acceptance_rates, theory

_PREFIXES = "specjax.theory.prefix_rates."
_TRANSPORT = "specjax.theory.optimal_transport."
_STEPS = "test_rates_and_lengths_of_a_step_are_those_of_all_that_it_may_emit"
_TEXTS = "test_rates_given_a_text_are_those_of_what_a_step_emits"
_COINS = "test_lengths_of_conditional_rates_are_those_of_all_runs_of_coins"
_PROGRAM = "test_the_optimum_of_several_candidates_is_that_of_the_linear_program"

MUTATIONS = (
    Mutation(
        "specjax.theory.acceptance.acceptance_rate",
        "xp.minimum(p, q).sum(axis=-1)",
        "(p * q).sum(axis=-1)",
        theory("test_the_acceptance_rate_is_that_of_the_rule_over_all_drafts[0]"),
        "the rate at which independent draws agree",
    ),
    Mutation(
        "specjax.theory.acceptance_rates.expected_acceptance_length",
        "jnp.cumprod(rates, axis=-1)",
        "rates",
        acceptance_rates("test_rates_that_change_do_not_recompile"),
        "conditional rates are taken for unconditional ones",
    ),
    Mutation(
        "specjax.theory.acceptance_rates.acceptance_lengths",
        "xp.concatenate([first, unconditional], axis=-1)",
        "xp.cumprod(xp.concatenate([first, unconditional], axis=-1), axis=-1)",
        theory(_COINS),
        "unconditional rates are taken for conditional ones",
    ),
    Mutation(
        _PREFIXES + "unconditional_rates",
        "drafted = drafted[..., None] * q",
        "drafted = accepted[..., None] * q",
        theory(f"{_STEPS}[3-3-block]"),
        "the cap of a block is the mass accepted before it: token by token, in effect",
    ),
    Mutation(
        _PREFIXES + "unconditional_rates",
        "np.minimum(accepted[..., None] * p, drafted)",
        "np.minimum(drafted / q * p, drafted)",
        theory(f"{_STEPS}[3-3-block]"),
        "a prefix is not capped at what was accepted before",
    ),
    Mutation(
        _PREFIXES + "unconditional_rates",
        "np.minimum.accumulate(np.minimum(rates, 1.0))",
        "np.array(rates, np.float64)",
        theory("test_a_draft_of_the_target_s_own_distribution_is_accepted_whole[standard]"),
        "rates that rounding makes rise or exceed 1",
    ),
    Mutation(
        _PREFIXES + "rates_given_text",
        'if method == "block":',
        "if True:",
        theory(f"{_TEXTS}[standard]"),
        "token by token is computed as a block",
    ),
    Mutation(
        "specjax.theory.speed.best_k",
        "speeds = lengths / times",
        "speeds = lengths - times",
        theory("test_the_best_k_emits_the_most_tokens_in_the_time_of_many_steps"),
        "a second is worth a token",
    ),
    Mutation(
        "specjax.theory.speed.best_k",
        "xp.argmax(speeds, axis=-1)",
        "speeds.shape[-1] - 1 - xp.argmax(speeds[..., ::-1], axis=-1)",
        theory("test_of_equal_speeds_the_fewest_drafts_are_best_and_rows_are_chosen_alone"),
        "the largest of equals is chosen",
    ),
    Mutation(
        "specjax.theory.speed.best_k",
        "xp.argmax(speeds, axis=-1)",
        "xp.argmax(lengths, axis=-1)",
        theory("test_the_best_k_emits_the_most_tokens_in_the_time_of_many_steps"),
        "the longest step is best, whatever its time",
    ),
    Mutation(
        _TRANSPORT + "optimal_acceptance_rate",
        "_sums(q) ** num_drafts",
        "_sums(q**num_drafts)",
        theory(f"{_PROGRAM}[4-2-True]"),
        "drafts inside a set are all equal",
    ),
    Mutation(
        _TRANSPORT + "optimal_acceptance_rate",
        "_all_inside(q, num_drafts)",
        "_sums(q) ** num_drafts",
        theory(f"{_PROGRAM}[4-2-False]"),
        "drafts without replacement are taken for independent ones",
    ),
    Mutation(
        _TRANSPORT + "_all_inside",
        "        pairs[:, 1] += pairs[:, 0]",
        "        pairs[:, 1] = np.maximum(pairs[:, 1], pairs[:, 0])",
        theory(f"{_PROGRAM}[5-2-False]"),
        "of the sets inside H the likeliest alone counts",
    ),
)
