"""Wrong versions of rules as values, in plain JAX and in the kernels."""

from ..mutation import Mutation
from .tests import decode, rule_values

__all__ = ["MUTATIONS"]

_IMPOSSIBLE = "test_what_no_rule_may_accept_is_rejected"
_VARIATION = "test_a_rule_s_total_variation_is_that_of_its_docstring"
_GREEDY = "test_greedy_requests_ask_a_rule_that_is_for_them"
_STANDARD = "test_the_standard_rule_as_a_value_is_the_default"

MUTATIONS = (
    Mutation(
        "specjax.decode.loop.commit_rows",
        "config.rule if k else None",
        "None",
        decode("test_the_rule_of_the_config_is_the_one_that_accepts"),
        "the rule of a config is not asked",
    ),
    Mutation(
        "specjax.core.rules._Ratio.__call__",
        "u * self.lenience",
        "u / self.lenience",
        rule_values(f"{_VARIATION}[lenience]"),
        "lenience makes a rule stricter",
    ),
    Mutation(
        "specjax.core.rules._Typical.__call__",
        "jnp.minimum(",
        "jnp.maximum(",
        rule_values(f"{_VARIATION}[typical]"),
        "a typical token is above both thresholds",
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
        "specjax.core.rule.accepts",
        "possible & rule",
        "rule",
        rule_values(f"{_IMPOSSIBLE}[xla]"),
        "a rule may accept what the target cannot emit",
    ),
    Mutation(
        "specjax.core.rule.log_weights",
        "(lp > -jnp.inf) & (weights < jnp.inf)",
        "weights < jnp.inf",
        rule_values(f"{_IMPOSSIBLE}[xla]"),
        "a rule may put a masked token in place of a rejected one",
    ),
    Mutation(
        "specjax.samplers.rule_xla.accepts_by_rule",
        "if rule.greedy:",
        "if not rule.greedy:",
        rule_values(f"{_GREEDY}[xla]"),
        "greedy requests ask the rules that are not for them",
    ),
    Mutation(
        "specjax.samplers.rule_xla._draft_logprobs",
        "jnp.where(drafted.one_hot, one_hot, q)",
        "q",
        rule_values(f"{_STANDARD}[xla]"),
        "a one-hot draft among sampled ones is replaced as if it were sampled",
    ),
    Mutation(
        "specjax.pallas.verify.evaluate_by_rule",
        "if plan.options.greedy_is_argmax:",
        "if not plan.options.greedy_is_argmax:",
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
        rule_values("test_the_kernels_emit_the_reference_s_tokens"),
        "a token is counted among those likelier than itself",
    ),
)
