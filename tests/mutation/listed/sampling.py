"""Wrong versions of noise, sampling and the statistics of listed tokens."""

from ..mutation import Mutation
from .tests import logprobs, noise, sampling

_NOISE = "specjax.core.noise."
_SAMPLING = "specjax.core.gumbel_max."
_LOGPROBS = "specjax.decode.logprobs."

MUTATIONS = (
    Mutation(
        f"{_NOISE}threefry2x32",
        "jnp.uint32(i + 1)",
        "jnp.uint32(i)",
        noise("test_threefry_meets_its_published_vectors"),
        "the key schedule counts its injections from 0",
    ),
    Mutation(
        f"{_NOISE}address",
        "return fold_in(fold_in(key, position, threefry), stream, threefry)",
        "return fold_in(fold_in(key, stream, threefry), position, threefry)",
        noise("test_noise_matches_jax_random_bit_for_bit[False-True]"),
        "stream and position are folded in in the other order",
    ),
    Mutation(
        f"{_NOISE}batch_addresses.one",
        "jax.random.fold_in(jax.random.fold_in(key, position), stream)",
        "jax.random.fold_in(jax.random.fold_in(key, stream), position)",
        sampling("test_tokens_are_the_oracle_s[xla-129]"),
        "so they are for a whole batch",
    ),
    Mutation(
        f"{_NOISE}uniform_from_bits",
        "1 - 2.0**-24",
        "1.0",
        noise("test_uniforms_are_inside_and_gumbels_finite_at_both_ends[False]"),
        "a uniform may be 1",
    ),
    Mutation(
        f"{_NOISE}uniform_from_bits",
        "jnp.float32(0.5)",
        "jnp.float32(0)",
        noise("test_uniforms_are_inside_and_gumbels_finite_at_both_ends[False]"),
        "a uniform may be 0",
    ),
    Mutation(
        f"{_NOISE}gumbel_from_uniform",
        "-jnp.log(-jnp.log1p(-u))",
        "-jnp.log(-jnp.log(u))",
        noise("test_the_tail_of_the_gumbel_is_fine_enough_for_a_large_vocabulary"),
        "the large end of the Gumbel has the coarse end of the uniform",
    ),
    Mutation(
        f"{_NOISE}gumbel",
        "fold_in(at, level, threefry)",
        "fold_in(at, 0, threefry)",
        noise("test_gumbels_and_coins_stand_at_their_address[False]"),
        "blocks and tokens share their noise",
    ),
    Mutation(
        f"{_NOISE}fold_in_rows",
        "jnp.arange(size, dtype=jnp.uint32)",
        "jnp.arange(1, size + 1, dtype=jnp.uint32)",
        sampling("test_a_scalar_key_folds_in_the_row[xla]"),
        "a single key is folded with one more than the row",
    ),
    Mutation(
        f"{_SAMPLING}gather_logits",
        'mode="clip"), cutoff)',
        'mode="clip"), None)',
        sampling("test_masked_tokens_and_those_below_the_cutoff_are_never_drawn[xla]"),
        "the cutoff is ignored inside the chosen block",
    ),
    Mutation(
        f"{_SAMPLING}first_argmax",
        "jnp.min(jnp.where(scores == best[..., None], index, last), axis=-1, initial=last)",
        "jnp.max(jnp.where(scores == best[..., None], index, 0), axis=-1, initial=0)",
        sampling("test_greedy_rows_take_the_lowest_of_tied_ids[xla]"),
        "a tie goes to the highest id",
    ),
    Mutation(
        f"{_SAMPLING}gumbel_max_token",
        "gumbel(at, BLOCK_LEVEL, blocks",
        "gumbel(at, TOKEN_LEVEL, blocks",
        sampling("test_tokens_are_the_oracle_s[xla-1025]"),
        "blocks and tokens share their noise",
    ),
    Mutation(
        f"{_SAMPLING}gumbel_max_token.token_scores",
        "index.astype(jnp.uint32)",
        "(index % SAMPLING_BLOCK).astype(jnp.uint32)",
        sampling("test_tokens_are_the_oracle_s[xla-1025]"),
        "every block draws its tokens with the first block's noise",
    ),
    Mutation(
        "specjax.devices.rows.LogitRows.sample",
        "parsed.valid & row.valid",
        "row.valid",
        sampling("test_an_invalid_temperature_draws_nothing[xla]"),
        "a row of invalid temperature draws a token",
    ),
    Mutation(
        f"{_LOGPROBS}_top_logprobs",
        "masked > ",
        "masked >= ",
        logprobs("test_ties_are_listed_by_the_lowest_id_and_share_the_best_rank"),
        "equal tokens share the worst rank",
    ),
    Mutation(
        "specjax.devices.rows.LogitRows.take_each",
        "ids < self.vocab_size",
        "ids <= self.vocab_size",
        logprobs("test_masked_tokens_are_not_listed_and_rank_last"),
        "the first id past the vocabulary has a log-probability",
    ),
    Mutation(
        f"{_LOGPROBS}_top_logprobs",
        "listed & (best > -jnp.inf)",
        "listed",
        logprobs("test_masked_tokens_are_not_listed_and_rank_last"),
        "tokens that cannot come are listed",
    ),
    Mutation(
        f"{_LOGPROBS}_top_logprobs",
        "scaling.valid & row.valid & (token_ids >= 0)",
        "row.valid & (token_ids >= 0)",
        logprobs("test_padding_and_invalid_rows_list_nothing"),
        "a row of invalid temperature is listed",
    ),
    Mutation(
        "specjax.decode.logprobs._top_logprobs",
        "row_statistics_once(rows.partials(scaling.scale)",
        "row_statistics_once(logit_rows(logits, split).partials(scaling.scale)",
        logprobs("test_a_temperature_and_a_cutoff_are_those_of_the_row"),
        "tokens below the cutoff count in the sum",
    ),
)
