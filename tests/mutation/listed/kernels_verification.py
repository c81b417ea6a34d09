"""Wrong versions of the kernels that verify and draw, seen through Pallas' interpreter."""

from ..mutation import Mutation
from .tests import edges, greedy_logprobs, interpreted, sampling, threefry, verify

__all__ = ["MUTATIONS"]

_PALLAS = "specjax.pallas."
_TOKENS = "test_verification_emits_the_reference_s_tokens"
_OUTSIDE = "test_an_id_outside_the_vocabulary_is_rejected_into_the_residual"
_ROUNDED = "test_a_residual_of_rounding_alone_falls_back_to_the_target"
_SAME = "test_tokens_are_the_same_and_greedy_requests_have_no_logprobs"
_GIVEN = "test_a_given_bonus_asks_nothing_of_its_row"


def _small(case: str) -> tuple[str, ...]:
    """By the schedule of a small batch."""
    return interpreted(f"{_TOKENS}[small-{case}]")


def _large(case: str) -> tuple[str, ...]:
    """By that of a large one."""
    return interpreted(f"{_TOKENS}[large-{case}]")


MUTATIONS = (
    Mutation(
        f"{_PALLAS}load_request.Plan.is_reduced",
        "i <= n if",
        "i < n if",
        _small("V = 1025"),
        "the bonus token's row is not reduced",
    ),
    Mutation(
        f"{_PALLAS}reduce_rows.locate_tile",
        "request.first_target_row + i",
        "request.first_target_row",
        _small("V = 1025"),
        "every row of a request is reduced from its first",
    ),
    Mutation(
        f"{_PALLAS}target_rows.verify_accept_kernel",
        "(stop < i)",
        "(stop <= i)",
        _large("greedy"),
        "the tiles of a row that is known to be rejected return before it is evaluated",
    ),
    Mutation(
        f"{_PALLAS}target_rows.verify_accept_kernel.publish_stop",
        "(rows_per_request - i)",
        "(rows_per_request - i - 1)",
        _large("random"),
        "a request stops one row after the first that accepts nothing",
    ),
    Mutation(
        f"{_PALLAS}target_rows._store_tile.reject_greedy",
        ") < tile_max)",
        ") <= tile_max)",
        _large("V = 1025"),
        "a greedy request rejects its argmax",
    ),
    Mutation(
        f"{_PALLAS}target_rows.is_decided_by_tiles",
        "arrays.conditional_rates is None and ",
        "",
        _large("synthetic"),
        "a greedy request rejects by its argmax under synthetic rates, too",
    ),
    Mutation(
        f"{_PALLAS}reduce_rows.locate_tile",
        "scale, cutoff,",
        "scale, None,",
        _small("V = 1025"),
        "the target's cutoff is ignored where rows are reduced",
    ),
    Mutation(
        f"{_PALLAS}next_token._next_token",
        "bonus_logprob, -jnp.inf)",
        "bonus_logprob, 0.0)",
        edges(f"{_GIVEN}[interpret]"),
        "a bonus handed in for an invalid row has log p 0",
    ),
    Mutation(
        f"{_PALLAS}next_token.given_bonus",
        " & ~prefix.rejected",
        "",
        edges("test_a_given_bonus_does_not_replace_a_recovered_token[interpret]"),
        "a bonus handed in replaces a recovered token",
    ),
    Mutation(
        f"{_PALLAS}next_token.draw_row",
        "<= 0",
        "<= 2.0**-18",
        edges("test_a_one_hot_draft_of_nearly_all_mass_is_left_out[interpret]"),
        "a one-hot draft that has nearly all mass is emitted again",
    ),
    Mutation(
        f"{_PALLAS}next_token.draw_row",
        "prefix.rejected & ~prefix.from_residual",
        "prefix.rejected",
        edges(f"{_ROUNDED}[interpret-8]"),
        "where a residual is empty the rejected token is left out of the target",
    ),
    Mutation(
        f"{_PALLAS}residual.draw_residual",
        "is_empty = jnp.sum(exp_scaled(log_masses)) <= least",
        "is_empty = jnp.sum(exp_scaled(log_masses)) <= 0",
        edges(f"{_ROUNDED}[interpret-64]"),
        "a large batch draws from what rounding leaves of p == q",
    ),
    Mutation(
        f"{_PALLAS}next_token.emitted",
        "is_emitted &= request.active",
        "is_emitted |= request.active",
        edges(
            "test_an_inactive_request_reads_nothing_and_emits_nothing[interpret]",
            "test_an_invalid_target_row_emits_nothing_from_there_on[interpret-judged]",
        ),
        "an active request always emits a token after its accepted drafts",
    ),
    Mutation(
        f"{_PALLAS}next_token._next_token.take_argmax",
        "-prefix.row.normalizer.log_sum",
        "jnp.zeros_like(prefix.row.normalizer.log_sum)",
        edges("test_greedy_statistics_are_at_temperature_one[interpret]"),
        "log p of an argmax is 0",
    ),
    Mutation(
        f"{_PALLAS}next_token.load_accepted_prefix",
        "i <= request.num_draft_tokens",
        "i < request.num_draft_tokens",
        _small("V = 1025"),
        "a small batch's request that accepts all its drafts has no stop",
    ),
    Mutation(
        f"{_PALLAS}next_token.load_accepted_prefix",
        " & ~drafted.one_hot",
        "",
        _large("random"),
        "the residual of a one-hot draft is that of a drawn one",
    ),
    Mutation(
        f"{_PALLAS}next_token.load_accepted_prefix",
        "rejected = num_accepted < request.num_draft_tokens",
        "rejected = num_accepted <= request.num_draft_tokens",
        _small("one-hot"),
        "a bonus token is drawn as a recovered one",
    ),
    Mutation(
        f"{_PALLAS}next_token.next_address",
        "prefix.num_accepted, Stream.TARGET",
        "jnp.zeros_like(prefix.num_accepted), Stream.TARGET",
        _large("random"),
        "the next token's noise stands at the step's first position",
    ),
    Mutation(
        f"{_PALLAS}load_request.RequestScalars.address",
        "arrays.positions[self.b] + i",
        "arrays.positions[self.b] + i * 0",
        _large("random"),
        "all noise of a step stands at its first position",
    ),
    Mutation(
        f"{_PALLAS}load_request.load_request",
        "(num_draft_tokens >= 0) & temperature.valid",
        "num_draft_tokens >= 0",
        edges("test_an_invalid_temperature_emits_nothing[interpret]"),
        "a request of invalid temperature emits",
    ),
    Mutation(
        f"{_PALLAS}load_request.locate_draft_row",
        "arrays.draft_rows[request.b] * plan.max_draft_tokens + i",
        "request.b * plan.max_draft_tokens + i",
        verify("test_logits_are_found_through_rows[interpret]"),
        "`Draft.rows` is not followed",
    ),
    Mutation(
        f"{_PALLAS}load_request.locate_draft_row",
        "arrays.temperature if temperatures is None else temperatures",
        "arrays.temperature",
        _large("random"),
        "a draft's own temperature is ignored",
    ),
    Mutation(
        f"{_PALLAS}load_request.load_drafted",
        "draft_id, row.cutoff, mask",
        "draft_id, None, mask",
        why="the draft's cutoff is ignored at the drafted token",
        equivalent="its log q is -inf then, as carried or as its row's sum gives it, and then the "
        "logit is not read",
    ),
    Mutation(
        f"{_PALLAS}target_rows.evaluate_acceptance",
        "Stream.accept(i)",
        "Stream.accept(i * 0)",
        _small("random"),
        "every uniform is of the first drafted token's stream",
    ),
    Mutation(
        f"{_PALLAS}target_rows.evaluate_acceptance",
        "accepted & has_draft & statistics.valid",
        "accepted & has_draft",
        edges("test_an_invalid_target_row_emits_nothing_from_there_on[interpret-synthetic]"),
        "a drafted token is accepted by an invalid row",
    ),
    Mutation(
        f"{_PALLAS}target_rows.evaluate_acceptance",
        "inside & accept_synthetic",
        "accept_synthetic",
        edges(f"{_OUTSIDE}[interpret-synthetic]"),
        "synthetic acceptance accepts an id outside the vocabulary",
    ),
    Mutation(
        f"{_PALLAS}target_rows.evaluate_acceptance",
        "accepted & has_draft & statistics.valid",
        "accepted & exists & statistics.valid",
        _small("greedy"),
        "one more token is verified than was drafted",
    ),
    Mutation(
        f"{_PALLAS}launch.is_last_arrival",
        "== jnp.uint32(total - 1)",
        "== jnp.uint32(0)",
        _large("V = 1025"),
        "the first of a row's programs to arrive sums up",
    ),
    Mutation(
        f"{_PALLAS}launch.select_one",
        "jnp.sum(jnp.where(mask, values, zero), dtype=values.dtype)",
        "jnp.max(jnp.where(mask, values, zero))",
        _small("random"),
        "a selected value below zero becomes zero",
    ),
    Mutation(
        f"{_PALLAS}launch.divmod_i32",
        "jax.lax.rem(number, divisor_i32)",
        "jax.lax.rem(number, divisor_i32 + 1)",
        _large("V = 1025"),
        "the remainder is of another divisor",
    ),
    Mutation(
        f"{_PALLAS}blocks.load_raw_logits",
        "token_id < logits.shape[1]",
        "token_id <= logits.shape[1]",
        _small("V = 1025"),
        "a row has one logit more than it holds",
    ),
    Mutation(
        f"{_PALLAS}blocks.tile_argmax",
        "row_tile.tile_index * tile.num_blocks + first_argmax",
        "first_argmax",
        _large("V = 1025"),
        "the argmax of a later tile is looked for in the first",
    ),
    Mutation(
        f"{_PALLAS}blocks.load_logits",
        "(token_id < logits.shape[1])",
        "(token_id <= logits.shape[1])",
        edges(f"{_OUTSIDE}[interpret-judged]"),
        "the first id past the vocabulary has a logit",
    ),
    Mutation(
        f"{_PALLAS}blocks.reduce_tile",
        "row_tile.scale[None], row_tile.cutoff",
        "jnp.ones_like(row_tile.scale)[None], row_tile.cutoff",
        _small("V = 1025"),
        "blocks are reduced at temperature 1",
    ),
    Mutation(
        f"{_PALLAS}gumbel_max.draw_token",
        "token_id.astype(jnp.uint32)",
        "(token_id % SAMPLING_BLOCK).astype(jnp.uint32)",
        interpreted("test_samples_are_the_reference_s[1025]"),
        "every block draws its tokens with the first block's noise",
    ),
    Mutation(
        f"{_PALLAS}threefry.threefry_ptx",
        "words[(i + 2) % 3]",
        "words[(i + 1) % 3]",
        threefry("test_the_ptx_computes_the_words_of_the_hash[1]"),
        "the hash of the kernels adds the key's words in the wrong order",
    ),
    Mutation(
        f"{_PALLAS}threefry.threefry_ptx",
        "ROTATIONS[i % 2]",
        "ROTATIONS[0]",
        threefry("test_the_ptx_computes_the_words_of_the_hash[0]"),
        "the hash of the kernels rotates by the first four numbers alone",
    ),
    Mutation(
        f"{_PALLAS}threefry.threefry_ptx",
        "x{index};",
        "x0;",
        threefry("test_the_ptx_computes_the_words_of_the_hash[1]"),
        "both words of the kernels' hash are the first",
    ),
    Mutation(
        f"{_PALLAS}gumbel_max.draw_noise",
        "gumbel(address, BLOCK_LEVEL, block",
        "gumbel(address, TOKEN_LEVEL, block",
        interpreted("test_samples_are_the_reference_s[1025]"),
        "blocks and tokens share their noise",
    ),
    Mutation(
        f"{_PALLAS}gumbel_max.draw_noise",
        "block = first_block + jax",
        "block = jax",
        _small("V = 1025"),
        "every tile draws its blocks with the first tile's noise",
    ),
    Mutation(
        f"{_PALLAS}gumbel_max.SamplingRow.kept_logits",
        "self.cutoff)",
        "None)",
        sampling("test_masked_tokens_and_those_below_the_cutoff_are_never_drawn[interpret]"),
        "the cutoff is ignored inside the chosen block",
    ),
    Mutation(
        f"{_PALLAS}residual.choose_winner",
        "total > least",
        "total > 0",
        edges(f"{_ROUNDED}[interpret-8]"),
        "a small batch draws from what rounding leaves of p == q",
    ),
    Mutation(
        f"{_PALLAS}residual._best_tile",
        "first_argmax(scores)",
        "first_argmax(masses)",
        _small("V = 1025"),
        "the heaviest tile wins whatever its noise",
    ),
    Mutation(
        f"{_PALLAS}residual.draw_tile",
        "next_address(arrays, prefix, plan), tile_index * plan.tile.num_blocks",
        "next_address(arrays, prefix, plan), tile_index * 0",
        _small("V = 1025"),
        "every tile draws from the first blocks",
    ),
    Mutation(
        f"{_PALLAS}emit_tokens._write_drawn.draw",
        "draw_from_residual, draw_from_row)",
        "draw_from_row, draw_from_row)",
        _large("V = 1025"),
        "a rejected sampled draft is replaced from the target row",
    ),
    Mutation(
        f"{_PALLAS}emit_tokens.residual_draw_kernel",
        "draw_and_arrive, tile_index == 0)",
        "draw_and_arrive, tile_index == 1)",
        _small("synthetic"),
        "the second tile's program writes what needs no residual, if there is one",
    ),
    Mutation(
        f"{_PALLAS}emit_tokens.residual_last_draw_kernel",
        "plan.rows_per_request + 1)",
        "plan.rows_per_request)",
        greedy_logprobs(f"{_SAME}[interpret-rejection]"),
        "the programs of a residual count themselves where the stop is published",
    ),
    Mutation(
        f"{_PALLAS}target_rows._store_tile.decide_greedy",
        "(argmax >= token_id)",
        "(argmax >= 0)",
        greedy_logprobs(f"{_SAME}[interpret-rejection]"),
        "a greedy request accepts a token that ties with one of a lower id",
    ),
    Mutation(
        f"{_PALLAS}target_rows._store_tile.decide_greedy",
        "has_draft & ~is_argmax",
        "has_draft & is_argmax",
        greedy_logprobs(f"{_SAME}[interpret-rejection]"),
        "a greedy request stops where its draft is the argmax",
    ),
    Mutation(
        f"{_PALLAS}blocks.load_maxima",
        "first_argmax(flush_subnormals(maxima))",
        "first_argmax(0 * maxima)",
        greedy_logprobs(f"{_SAME}[interpret-rejection]"),
        "without log-probabilities the argmax of a greedy request is looked for in the first tile",
    ),
    Mutation(
        f"{_PALLAS}blocks.load_maxima",
        "jnp.isfinite(shift)",
        "(shift > -jnp.inf)",
        greedy_logprobs(f"{_SAME}[interpret-coupled]"),
        "without log-probabilities a greedy request accepts from a row that holds +inf",
    ),
    Mutation(
        f"{_PALLAS}residual._load_draft_columns",
        "(x, row.cutoff)",
        "(x, None)",
        edges("test_what_the_draft_cut_off_is_all_that_an_equal_target_leaves[interpret]"),
        "the draft's cutoff is ignored in the residual",
    ),
    Mutation(
        f"{_PALLAS}residual._load_draft_columns",
        "row.temperature.scale",
        "jnp.float32(1)",
        _large("random"),
        "q in the residual is at temperature 1",
    ),
    Mutation(
        f"{_PALLAS}residual.reduce_masses",
        "residual_probs(logprobs, draft_logprobs",
        "residual_probs(draft_logprobs, logprobs",
        _large("V = 1025"),
        "blocks are chosen by max(q - p, 0)",
    ),
    Mutation(
        f"{_PALLAS}sample.sample_reduce_kernel",
        "scale, cutoff, None)",
        "scale, None, None)",
        interpreted("test_samples_are_the_reference_s[1025]"),
        "the cutoff is ignored where rows are reduced",
    ),
    Mutation(
        f"{_PALLAS}sample.sample_draw_kernel",
        "temperature.valid & statistics.valid",
        "statistics.valid",
        sampling("test_an_invalid_temperature_draws_nothing[interpret]"),
        "a row of invalid temperature draws a token",
    ),
    Mutation(
        f"{_PALLAS}sample.sample_reduce_kernel",
        "own = split * count",
        "own = split * 0",
        interpreted("test_noise_in_parts_or_in_none_draws_the_reference_s_samples[4]"),
        "every part of the noise is the first",
    ),
    Mutation(
        f"{_PALLAS}draft_statistics.draft_statistics_kernel",
        "row.temperature.scale",
        "request.temperature.scale",
        _large("random"),
        "draft rows are summed at the target's temperature",
    ),
    Mutation(
        f"{_PALLAS}draft_statistics.draft_statistics_kernel",
        "tile_index, scale, row.cutoff, None)",
        "tile_index, scale, None, None)",
        _small("random"),
        "the draft's cutoff is ignored in its sum",
    ),
    Mutation(
        f"{_PALLAS}draft_statistics.draft_statistics_kernel",
        "i < request.num_draft_tokens",
        "i + 1 < request.num_draft_tokens",
        _large("random"),
        "the last drafted token has no statistics",
    ),
    Mutation(
        f"{_PALLAS}draft_statistics.draft_statistics_kernel",
        "jnp.where(statistics.valid, logsumexp, jnp.nan)",
        "logsumexp",
        why="the logsumexp of an invalid row is stored as it is",
        equivalent="it is not valid then either: NaN, or the infinity of the row's largest logit",
    ),
    Mutation(
        f"{_PALLAS}kernel_config.Tile.num_tiles",
        "-(-vocab_size // self.size)",
        "max(1, vocab_size // self.size)",
        _large("V = 1025"),
        "the last tile, which is not full, is skipped",
    ),
    Mutation(
        f"{_PALLAS}verify.verify_rows",
        "arrays.draft_logprobs is not None and arrays.draft_logsumexp is not None",
        "arrays.draft_logprobs is not None",
        edges(
            "test_one_carried_statistic_without_the_other_is_not_read[interpret-draft_logsumexp]"
        ),
        "a log q is taken without the logsumexp that belongs to it",
    ),
    Mutation(
        f"{_PALLAS}verify.verify_rows",
        "arrays.draft_logprobs is not None and arrays.draft_logsumexp is not None",
        "arrays.draft_logsumexp is not None",
        edges("test_one_carried_statistic_without_the_other_is_not_read[interpret-draft_logprobs]"),
        "a logsumexp is taken without the log q that belongs to it",
    ),
    Mutation(
        f"{_PALLAS}verify.verify_rows",
        "reduce_rows if plan.is_small else accept_rows",
        "accept_rows if plan.is_small else accept_rows",
        why="a small batch's rows are evaluated as a large one's",
        equivalent="both ways give the same tokens, as "
        "`test_verification_emits_the_reference_s_tokens` shows; a schedule is a matter of time",
    ),
    Mutation(
        f"{_PALLAS}verify.verify_rows",
        "Plan(num_requests, options,",
        'Plan(num_requests, CallOptions("float32", options.implementation,'
        " options.max_draft_tokens),",
        _large("float64 noise, a draft of fewer tokens"),
        "noise is float32 whatever is asked",
    ),
)
