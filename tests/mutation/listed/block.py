"""Wrong versions of block verification, in plain JAX and in the kernels."""

from ..mutation import Mutation
from .tests import block_laws, block_verification

__all__ = ["MUTATIONS"]

_DECISIONS = "test_decisions_are_those_of_numpy"
_XLA, _KERNELS = f"{_DECISIONS}[xla-300]", f"{_DECISIONS}[interpret-300]"
_SMALL = f"{_DECISIONS}[interpret-200]"
_BOUNDS = "test_bounds_decide_as_any_mass_between_them_would"

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
        "specjax.samplers.block_xla.accept_block_prefix",
        "first = jnp.where(active, judged.length, jnp.int32(0))",
        "first = judged.length",
        block_verification(_XLA),
        "a request of an invalid temperature accepts drafts",
    ),
    Mutation(
        "specjax.samplers.block_xla.is_block_request",
        "(index < request.num_tokens) & ",
        "",
        block_verification(_XLA),
        "rows that nothing was drafted from make a block of one-hot drafts",
    ),
    Mutation(
        "specjax.samplers.next_token_xla.residual_mass",
        "jnp.exp(log_rho) * (1 - p)",
        "1 - p",
        block_verification(_XLA),
        "rho is missing in the h of a prefix that a one-hot draft follows",
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
        "specjax.core.block_acceptance.accept_by_bounds",
        "accept_block(u, log_rho, most)",
        "accept_block(u, log_rho, least)",
        block_verification(_BOUNDS),
        "what its lower bound does not accept is rejected",
    ),
    Mutation(
        "specjax.core.block_acceptance.accept_by_bounds",
        "accept_block(u, log_rho, least)",
        "accept_block(u, log_rho, most)",
        block_verification(_BOUNDS),
        "what its upper bound does not reject is accepted",
    ),
    Mutation(
        "specjax.pallas.block.judge.judge_request",
        "(i == length))",
        "(i == request.num_draft_tokens))",
        block_verification(_KERNELS),
        "all drafts count as the whole, also those after an invalid row",
    ),
    Mutation(
        "specjax.pallas.block.judge._bounds",
        "return least, at_token + rho * (1 - p)",
        "return least, at_token",
        block_verification(_SMALL),
        "the mass of all tokens but the drafted one is left out of the upper bound",
    ),
    Mutation(
        "specjax.pallas.block.judge._bounds",
        " - (1 - q)",
        "",
        block_verification(_SMALL),
        "the draft's mass of all tokens but the drafted one is left out of the lower bound",
    ),
    Mutation(
        "specjax.pallas.block.judge.is_read",
        "(i >= longest)",
        "(i == longest)",
        block_verification(_SMALL),
        "open prefixes are not summed",
    ),
    Mutation(
        "specjax.pallas.block.bounds._bound",
        "least, residual + unread_mass)",
        "least, residual)",
        block_verification(_KERNELS),
        "blocks that were not read are left out of the upper bound",
    ),
    Mutation(
        "specjax.pallas.block.bounds._bound",
        "jnp.maximum(unread_mass - unread_draft_mass, 0)",
        "unread_mass",
        block_verification(_KERNELS),
        "the draft's mass in blocks that were not read is left out of the lower bound",
    ),
    Mutation(
        "specjax.pallas.block.verify._find_longest.test",
        "jnp.where(is_accepted, j, longest)",
        "longest",
        block_verification(_KERNELS),
        "an open prefix that its residual accepts is not taken",
    ),
    Mutation(
        "specjax.pallas.block.bonus_row.reduce_bonus_row",
        "tile_index = first_tile + skipped",
        "tile_index = first_tile",
        block_verification(_KERNELS),
        "of a bonus row's tiles a program reduces its first alone",
    ),
    Mutation(
        "specjax.pallas.block.bonus_row.with_bonus_row",
        "~prefix.rejected & request.active",
        "prefix.rejected & request.active",
        block_verification(_KERNELS),
        "the statistics of the bonus row are not read where it decides",
    ),
    Mutation(
        "specjax.pallas.block.verify.block_judge_kernel",
        "divmod_i32(i, num_programs)[1] == share",
        "i == share",
        block_verification(_KERNELS),
        "programs that judge a request leave its other prefixes unwritten",
    ),
    Mutation(
        "specjax.pallas.residual._row_times_rho",
        "row.normalizer.log_sum - prefix.log_rho",
        "row.normalizer.log_sum",
        block_verification(_KERNELS),
        "rho is missing in the residual",
    ),
    Mutation(
        "specjax.core.noise.Stream.draft",
        "2 * index + 2",
        "2 + 0 * index",
        block_laws("test_texts_of_several_steps_follow_the_target_jointly"),
        "drafts are keyed by position alone: the next step's are those that were looked at",
    ),
)
