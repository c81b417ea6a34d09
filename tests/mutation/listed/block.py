"""Wrong versions of block verification, in plain JAX and in the kernels."""

from ..mutation import Mutation
from .tests import block_laws, block_verification

_DECISIONS = "test_decisions_are_those_of_numpy"
_XLA, _KERNELS = f"{_DECISIONS}[xla-300]", f"{_DECISIONS}[interpret-300]"
_SMALL = f"{_DECISIONS}[interpret-200]"
_BOUNDS = "test_bounds_decide_as_any_mass_between_them_would"
_LEFT_OUT = "test_a_one_hot_draft_of_nearly_all_mass_is_left_out"
_RELATIVE = "test_the_least_residual_of_a_prefix_is_relative_to_its_ratio"
_BEFORE = "test_a_prefix_before_a_one_hot_draft_is_accepted_below_its_h"
_SHIFTED = (
    "rho multiplies the weight of each token of the row: a number is added to all scores that are "
    "compared, and the largest is the same token's"
)

MUTATIONS = (
    Mutation(
        "specjax.core.block_acceptance.accept_block",
        "mass - jnp.expm1(log_rho)",
        "mass + jnp.float32(1)",
        block_verification(_XLA),
        "rho is missing in h",
    ),
    Mutation(
        "specjax.samplers.reference.block.accept_block_prefix.prefix_of",
        "judged.log_rhos[length])",
        "jnp.float32(0))",
        block_verification(_XLA),
        "rho is missing in the residual",
    ),
    Mutation(
        "specjax.samplers.reference.block.accept_block_prefix.shorten",
        "state[0] - 1",
        "jnp.maximum(state[0] - 2, 0)",
        block_verification(_XLA),
        "every other prefix is not tried",
    ),
    Mutation(
        "specjax.samplers.reference.block._judge",
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
        "specjax.pallas.block.judge.needs_residual",
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
        "specjax.pallas.block.bonus_row.add_bonus_row",
        "~prefix.rejected & request.active",
        "prefix.rejected & request.active",
        block_verification(_KERNELS),
        "the statistics of the bonus row are not read where it decides",
    ),
    Mutation(
        "specjax.pallas.block.verify.block_judge_kernel",
        "divmod_i32(i, programs_per_request)[1] == share",
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
        "specjax.samplers.reference.next_token.next_token.token_log_weights",
        "jnp.where(empty, logprobs,",
        "jnp.where(empty, scaled,",
        why="where the residual is empty the token is drawn by rho p",
        equivalent=_SHIFTED,
    ),
    Mutation(
        "specjax.pallas.residual.draw_residual",
        "jnp.float32(min_mass) * jnp.exp(prefix.log_rho)",
        "jnp.float32(min_mass)",
        block_verification(f"{_RELATIVE}[interpret]"),
        "the least residual of an improbable prefix is that of a probable one",
    ),
    Mutation(
        "specjax.pallas.residual.draw_residual",
        "jnp.where(prefix.drafted.one_hot, jnp.float32(0), min_mass)",
        "min_mass",
        block_verification(f"{_LEFT_OUT}[interpret]"),
        "a one-hot draft that has nearly all mass is emitted again",
    ),
    Mutation(
        "specjax.pallas.residual.draw_residual.token_log_weights",
        "jnp.where(is_empty, logprobs,",
        "jnp.where(is_empty, _row_times_rho(prefix).logprobs(token_id),",
        why="where the residual is empty the token is drawn by rho p",
        equivalent=_SHIFTED,
    ),
    Mutation(
        "specjax.pallas.residual.load_residual_terms",
        "logprobs = _row_times_rho(prefix).logprobs(token_id)",
        "pass",
        block_verification(f"{_RELATIVE}[interpret]"),
        "inside a sampling block the residual is p - q",
    ),
    Mutation(
        "specjax.pallas.block.verify._store_masses.exclude_draft",
        "masses)) + log_rho",
        "masses))",
        block_verification(f"{_BEFORE}[interpret-0]"),
        "rho is missing in the h of an open prefix that a one-hot draft follows",
    ),
    Mutation(
        "specjax.core.noise.Stream.draft",
        "2 * index + 2",
        "2 + 0 * index",
        block_laws("test_texts_of_several_steps_follow_the_target_jointly"),
        "drafts are keyed by position alone: the next step's are those that were looked at",
    ),
)
