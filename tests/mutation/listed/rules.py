"""Wrong versions of rules as values, in plain JAX and in the kernels."""

from ..mutation import Mutation
from .tests import refusals, rule_values

_VARIATION = "test_a_rule_s_total_variation_is_that_of_its_docstring"
_GREEDY = "test_greedy_requests_ask_a_rule_that_is_for_them"
_STANDARD = "test_the_standard_rule_as_a_value_is_the_default"
_WEIGHTS = "test_only_differences_of_a_rule_s_log_weights_matter"
_KERNELS = "test_the_kernels_emit_the_reference_s_tokens"

MUTATIONS = (
    Mutation(
        "specjax.samplers.rejection_sample.rejection_sample",
        "draft.on_target_stream and not isinstance(rule, SyntheticRule)",
        "False",
        refusals("test_drafts_of_the_target_s_noise_are_refused_by_rules_that_they_would_bias"),
        "drafts of the target's noise are verified by rules whose output they bias",
    ),
    Mutation(
        "specjax.core.rules._Relaxed.__call__",
        "row.rank < self.top_n",
        "row.rank < self.top_n - 1",
        rule_values(f"{_VARIATION}[relaxed]"),
        "one token less is near the likeliest",
    ),
    Mutation(
        "specjax.core.rules._Mixture.__call__",
        "(1 - self.weight)",
        "0 * self.weight",
        rule_values(f"{_VARIATION}[ensemble]"),
        "the mixture has nothing of q",
    ),
    Mutation(
        "specjax.samplers.reference.rule.accepts_by_rule",
        "if rule.greedy:",
        "if not rule.greedy:",
        rule_values(f"{_GREEDY}[xla]"),
        "greedy requests ask the rules that are not for them",
    ),
    Mutation(
        "specjax.pallas.verify.evaluate_by_rule",
        "if schedule.options.greedy_is_argmax:",
        "if not schedule.options.greedy_is_argmax:",
        rule_values(f"{_GREEDY}[interpret]"),
        "greedy requests ask the rules that are not for them",
    ),
    Mutation(
        "specjax.pallas.verify.log_weights_by_rule",
        "jnp.where(drafted.one_hot, draft_logprobs, sampled)",
        "sampled",
        rule_values(f"{_STANDARD}[interpret]"),
        "a one-hot draft among sampled ones is replaced as if it were sampled",
    ),
    Mutation(
        "specjax.pallas.verify._row_values.is_likelier",
        "(lp > jnp.max(logprob))",
        "(lp >= jnp.max(logprob))",
        rule_values(_KERNELS),
        "a token is counted among those likelier than itself",
    ),
    Mutation(
        "specjax.core.rule.log_weights",
        "& (weights < jnp.inf)",
        "& ~jnp.isnan(weights)",
        rule_values(f"{_WEIGHTS}[xla]"),
        "a log-weight of +inf is no weight of 0",
    ),
    Mutation(
        "specjax.samplers.reference.rule.next_token_by_rule",
        "(largest > -jnp.inf)",
        "(largest > -12.0)",
        rule_values(f"{_WEIGHTS}[xla]"),
        "weights that are all small are taken for none",
    ),
    Mutation(
        "specjax.samplers.reference.rule.next_token_by_rule",
        'jnp.take(p, drafted.token_id, mode="clip")',
        "jnp.max(p)",
        rule_values(f"{_WEIGHTS}[xla]"),
        "the rank that a residual reads is that of the likeliest token",
    ),
    Mutation(
        "specjax.samplers.reference.rule.next_token_by_rule",
        "inside = (drafted.token_id >= 0) & (drafted.token_id < size)",
        "inside = drafted.token_id < 2**31",
        rule_values(f"{_WEIGHTS}[xla]"),
        "the rank of an id of no token is that of a token at the vocabulary's end",
    ),
    Mutation(
        "specjax.samplers.reference.rule._draft_logprobs",
        "constant_values=-jnp.inf",
        "constant_values=0.0",
        rule_values(f"{_STANDARD}[xla]"),
        "past a smaller draft's vocabulary a rule is told that q is 1",
    ),
    Mutation(
        "specjax.pallas.residual.draw_by_rule",
        "is_empty = largest == -jnp.inf",
        "is_empty = largest < -12.0",
        rule_values(f"{_WEIGHTS}[interpret]"),
        "weights that are all small are taken for none",
    ),
    Mutation(
        "specjax.pallas.residual.draw_by_rule.token_log_weights",
        "weights - shift",
        "weights",
        rule_values(f"{_WEIGHTS}[interpret]"),
        "inside a block a large number added to all log-weights rounds the noise away",
    ),
    Mutation(
        "specjax.pallas.verify.log_weights_by_rule",
        "prefix.row.logprobs(drafted_id)",
        "-prefix.row.normalizer.log_sum",
        rule_values(f"{_WEIGHTS}[interpret]"),
        "the rank that a residual reads is that of the likeliest token",
    ),
    Mutation(
        "specjax.pallas.verify.log_weights_by_rule",
        "jnp.where(drafted.token_id >= 0, drafted.token_id, jnp.int32(2**31 - 1))",
        "jnp.maximum(drafted.token_id, 0)",
        rule_values(f"{_WEIGHTS}[interpret]"),
        "the rank of a negative id is that of token 0",
    ),
)
