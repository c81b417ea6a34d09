"""Wrong versions of block verification, in plain JAX and in the kernels."""

from ..mutation import Mutation
from .tests import block_laws, block_verification

__all__ = ["MUTATIONS"]

_DECISIONS = "test_decisions_are_those_of_numpy"
_XLA, _KERNELS = f"{_DECISIONS}[xla-300]", f"{_DECISIONS}[interpret-300]"

MUTATIONS = (
    Mutation(
        "specjax.core.block_acceptance.cap_ratios",
        "jnp.minimum(log_rhos[-1] + log_ratio, jnp.float32(0))",
        "log_rhos[-1] + log_ratio",
        block_verification(_XLA),
        "the product of ratios is not capped at 1",
    ),
    Mutation(
        "specjax.core.block_acceptance.accept_block",
        "total.astype(u.dtype) < mass",
        "total.astype(u.dtype) > mass",
        block_verification(_XLA),
        "a prefix is accepted where its uniform is above h",
    ),
    Mutation(
        "specjax.core.block_acceptance.accept_block",
        "mass - jnp.expm1(log_rho)",
        "mass + jnp.float32(1)",
        block_verification(_XLA),
        "rho is missing in h",
    ),
    Mutation(
        "specjax.samplers.block_xla.accept_block_prefix.prefix_of",
        "judged.log_rhos[length])",
        "jnp.float32(0))",
        block_verification(_XLA),
        "rho is missing in the residual",
    ),
    Mutation(
        "specjax.samplers.block_xla.accept_block_prefix.shorten",
        "state[0] - 1",
        "jnp.maximum(state[0] - 2, 0)",
        block_verification(_XLA),
        "every other prefix is not tried",
    ),
    Mutation(
        "specjax.samplers.block_xla._judge",
        "| ~valid",
        "| (index < 0)",
        block_verification(_XLA),
        "a target row that is not a distribution does not end the drafts",
    ),
    Mutation(
        "specjax.pallas.block_verify.block_judge_kernel",
        "(i == length - 1)",
        "(i == request.num_draft_tokens - 1)",
        block_verification(_KERNELS),
        "all drafts count as the whole, also those after an invalid row",
    ),
    Mutation(
        "specjax.pallas.block_verify._prefix_of",
        "jnp.where((n > 0) & is_block, log_rho, jnp.float32(0))",
        "jnp.where((n < 0) & is_block, log_rho, jnp.float32(0))",
        block_verification(_KERNELS),
        "rho is missing in the residual",
    ),
    Mutation(
        "specjax.pallas.block_verify.block_residual_kernel",
        "may_accept & ~longer",
        "(j == 0) & ~longer",
        block_verification(_KERNELS),
        "no prefix but the whole draft and the empty one is tried",
    ),
    Mutation(
        "specjax.core.noise.Stream.draft",
        "2 * index + 2",
        "2 + 0 * index",
        block_laws("test_texts_of_several_steps_follow_the_target_jointly"),
        "drafts are keyed by position alone: the next step's are those that were looked at",
    ),
)
