"""Wrong versions of what scores given texts, lists prompts and compares rows."""

from ..mutation import Mutation
from .tests import listed_prompts, row_invariance, scores

_FORWARD = "test_scores_are_those_of_one_forward_pass_over_the_whole_text[chain]"
_LISTED = "test_prompts_have_the_log_probabilities_of_a_forward_pass"
_PROMPTS = "test_prompts_that_generate_and_init_list_have_their_scores[16]"
_SCORE = "specjax.decode.score."
_ROWS = "specjax.decode.row_invariance."
_ENGINE = "specjax.engine.prompt_logprobs."

MUTATIONS = (
    Mutation(
        f"{_SCORE}score",
        "return [scores[i] for i in range(len(rows))]",
        "return [scores[i] for i in order]",
        scores(_FORWARD),
        "scores come in the order of lengths",
    ),
    Mutation(
        f"{_SCORE}_read_batch",
        "np.where(index < lengths - 1, index, np.int32(-1))",
        "np.where(index < lengths - 2, index, np.int32(-1))",
        scores("test_scores_are_those_of_one_forward_pass_over_the_whole_text[recurrent]"),
        "the row before the last token is not read",
    ),
    Mutation(
        f"{_SCORE}_read_batch",
        "num_listed=max(1, num_logprobs or 0)",
        "num_listed=num_logprobs or 0",
        scores("test_chunks_batches_and_padding_change_rounding_alone"),
        "the argmax is not known unless tokens are listed",
    ),
    Mutation(
        f"{_SCORE}_scores_of",
        "np.where(is_valid, logprob, np.float32(np.nan))",
        "logprob",
        scores("test_impossible_tokens_have_minus_infinity_and_invalid_rows_nan"),
        "an invalid row has a probability of 1",
    ),
    Mutation(
        f"{_SCORE}_scores_of",
        "is_valid & (token_ids[:, 0] == text)",
        "rank == 1",
        scores("test_greedy_tokens_are_the_argmax_and_ties_go_to_the_lowest_id"),
        "every token of a tie is the argmax",
    ),
    Mutation(
        "specjax.decode.prefill._list_chunk",
        "jax.lax.dynamic_slice_in_dim(padded, done + 1, hidden.shape[1], axis=1)",
        "jax.lax.dynamic_slice_in_dim(padded, done, hidden.shape[1], axis=1)",
        scores(_PROMPTS),
        "a prompt's rows rank the tokens that they have read",
    ),
    Mutation(
        f"{_ENGINE}PromptListing.next_ids",
        "positions + 1",
        "positions",
        listed_prompts(f"{_LISTED}[alone]"),
        "a prompt's rows rank the tokens that they have read",
    ),
    Mutation(
        f"{_ENGINE}PromptListing.add",
        "(top, rows, positions[rows] >= 0)",
        "(top, rows, positions[rows] >= -1)",
        listed_prompts(f"{_LISTED}[alone]"),
        "padding of a chunk is listed, too",
    ),
    Mutation(
        "specjax.engine.prefill_batch.PrefillBatch.read",
        "(entry.listing, slice(i, i + 1))",
        "(entry.listing, slice(0, 1))",
        listed_prompts(f"{_LISTED}[a piece of each]"),
        "a prompt of a batch lists the rows of the first",
    ),
    Mutation(
        "specjax.engine.prefill_batch.PrefillBatch._read_packed",
        "(entry.listing, slice(start, end))",
        "(entry.listing, slice(0, end))",
        listed_prompts(f"{_LISTED}[packed pieces]"),
        "a prompt lists the pieces of those before it",
    ),
    Mutation(
        f"{_ROWS}_compare",
        "stages[int(differs[:, position].argmax())]",
        "stages[int(differs.any(axis=1).argmin())]",
        row_invariance("test_the_stage_is_the_first_that_differs"),
        "the stage is one that does not differ",
    ),
    Mutation(
        f"{_ROWS}_bits",
        'values.view(f"u{values.dtype.itemsize}")',
        "values.round(5)",
        row_invariance("test_rows_that_depend_on_the_chunk_are_found"),
        "a last bit is no difference",
    ),
)
