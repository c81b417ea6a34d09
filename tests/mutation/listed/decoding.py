"""Wrong versions of drafting, the decode loop, commits, counts and acceptance rates."""

from ..mutation import Mutation
from .tests import (
    acceptance_rates,
    adaptive_k,
    capacity,
    conversations,
    decode,
    drafts,
    engines,
    memory,
    metrics,
    processing,
    step_costs,
    streamed,
    tokens,
)

__all__ = ["MUTATIONS"]

_DRAFTS = "specjax.samplers.drafts."
_LOOP = "specjax.decode.step."
_ROWS = "specjax.decode.target_step."
_NEXT = "specjax.decode.draft_step."
_ADAPTIVE = "specjax.decode.adaptive_k."
_READ = "specjax.decode.prefill._read_chunk"
_PROPOSE = "specjax.decode.propose."
_COMMIT = "specjax.decode.commit.append_emitted"
_METRICS = "specjax.decode.metrics."
_RULES = "specjax.processing.logit_rules."
_RATES = "specjax.theory.acceptance_rates."
_RECOUNT = "test_the_counts_are_those_of_a_recount"
_COMMITTED = "test_metrics_count_what_was_committed_up_to_the_end_of_a_sequence[False]"
_ANSWERED = "test_an_answer_is_that_of_the_whole_conversation_and_reads_only_what_is_new"
_LOOKUP = "test_prompt_lookup_is_that_of_its_definition"
_LONGEST = (
    "test_prompt_lookup_takes_the_longest_suffix_and_its_occurrence_with_most_tokens_after_it"
)
_FEATURES = "test_a_drafter_that_reads_features_is_given_those_of_every_committed_token_once"
_DOES_NOT_FIT = "test_a_batch_that_does_not_fit_is_refused_before_anything_compiles"
_ON_THE_LINE = "test_times_between_measured_batch_sizes_lie_on_the_line_through_them"
_TAPS = f"{_FEATURES}[taps1]"
_LAST_ROWS = "test_chunks_give_the_row_that_the_last_token_would_give"
_CHUNKS = "test_tokens_do_not_depend_on_the_capacity_or_on_the_chunks_of_a_prompt"
_ENDS = "test_the_first_of_several_ends_is_committed_and_what_follows_it_is_not"

MUTATIONS = (
    Mutation(
        f"{_PROPOSE}_draft_tokens.draw",
        "keys, positions + i, stream",
        "keys, positions, stream",
        drafts("test_proposals_are_the_draws_of_their_streams_and_positions"),
        "all drafts are drawn at the first position",
    ),
    Mutation(
        f"{_PROPOSE}_draft_tokens.draw",
        "Stream.draft(i)",
        "Stream.draft(0)",
        drafts("test_proposals_are_the_draws_of_their_streams_and_positions"),
        "all drafts are drawn on the first stream",
    ),
    Mutation(
        f"{_PROPOSE}_draft_tokens.draw",
        "positions + (i - 1)",
        "positions + i",
        drafts("test_each_token_is_fed_at_its_own_position"),
        "a token is fed one position too late",
    ),
    Mutation(
        f"{_PROPOSE}_draft_tokens.draw",
        "(sample.token_ids, *outputs)",
        "(jnp.maximum(sample.token_ids, 0), *outputs)",
        drafts("test_an_invalid_row_ends_the_drafts_of_its_request"),
        "a row that is not finite drafts token 0",
    ),
    Mutation(
        f"{_DRAFTS}gather_drafts.align",
        "num_valid_drafts(cache.token_ids, cache.num_tokens)[slot]",
        "num_valid_drafts(cache.token_ids, None)[slot]",
        drafts("test_a_cached_draft_that_is_inactive_or_short_stays_so"),
        "the cached number of tokens is ignored",
    ),
    Mutation(
        f"{_DRAFTS}gather_drafts.align",
        "matches &= (cached_request_ids >= 0)[None]",
        "matches &= (cached_request_ids > -9)[None]",
        drafts("test_empty_slots_match_no_request"),
        "an empty slot belongs to a request of its id",
    ),
    Mutation(
        "specjax.decode.drafters._model_functions.propose",
        "_token_at(token_ids, positions - 2)",
        "_token_at(token_ids, positions - 1)",
        decode("test_a_model_drafting_for_itself_is_accepted_over_120_tokens"),
        "the last token is fed twice, and the one before it not",
    ),
    Mutation(
        "specjax.decode.drafters._model_functions.propose.step",
        "[index - 1, index]",
        "[index, index]",
        decode("test_a_model_drafting_for_itself_is_accepted_over_120_tokens"),
        "the token before the last is fed at the place of the last",
    ),
    Mutation(
        "specjax.decode.propose._draw_tokens",
        "not _is_sharded((carry, token_ids, keys))",
        "True",
        drafts("test_proposals_of_arrays_over_explicit_axes_are_the_same"),
        "a proposal of requests over an explicit axis is refused",
    ),
    Mutation(
        "specjax.decode.propose._draw_tokens",
        "0 if is_one_loop else 1",
        "0",
        drafts("test_the_first_step_may_be_given_another_carry_than_it_returns"),
        "what was drawn before the loop is drawn again from its own token",
    ),
    Mutation(
        f"{_NEXT}propose_draft",
        "temperature=settings.temperature",
        "temperature=settings.temperature * 0 + 1",
        decode("test_a_model_drafting_for_itself_is_accepted_over_120_tokens"),
        "drafts are drawn at temperature 1",
    ),
    Mutation(
        "specjax.decode.drafters._look_up",
        "num_after * text.shape[0] + index",
        "index",
        decode(_LONGEST, _LOOKUP),
        "of several places the latest wins, however few tokens follow",
    ),
    Mutation(
        "specjax.decode.drafters._look_up",
        "range(min_ngram, max_ngram + 1)",
        "range(max_ngram, min_ngram - 1, -1)",
        decode(_LONGEST, _LOOKUP),
        "the shortest suffix wins over the longest",
    ),
    Mutation(
        "specjax.decode.drafters._look_up",
        "index < length - n",
        "index <= length - n",
        decode(_LOOKUP),
        "a suffix is found at its own place",
    ),
    Mutation(
        "specjax.decode.drafters._look_up",
        "matches &= length > n",
        "matches &= length > 0",
        why="a text no longer than the suffix is searched",
        equivalent="no place lies before length - n then",
    ),
    Mutation(
        f"{_LOOP}verify_pending",
        "CallOptions(config.noise_dtype, resolved",
        "CallOptions(jnp.float32, resolved",
        decode("test_float64_noise_reaches_verification_and_the_drafts"),
        "verification's noise is float32, whatever `use_fp64_gumbel` says",
    ),
    Mutation(
        f"{_PROPOSE}propose_step",
        "Options(config.noise_dtype, implementation)",
        "Options(jnp.float32, implementation)",
        decode("test_float64_noise_reaches_verification_and_the_drafts"),
        "the drafts' noise is float32, whatever `use_fp64_gumbel` says",
    ),
    Mutation(
        f"{_NEXT}propose_draft",
        "num_valid_drafts(draft.token_ids, draft.num_tokens)",
        "num_valid_drafts(draft.token_ids, None)",
        decode("test_a_drafter_may_count_fewer_tokens_than_it_returns"),
        "a drafter's own number of tokens is ignored",
    ),
    Mutation(
        f"{_NEXT}propose_draft",
        "jnp.maximum(num_drafted, 0)",
        "num_drafted",
        decode("test_a_count_of_minus_one_from_a_drafter_is_no_draft_and_ends_no_request[-1]"),
        "a drafter's -1 for a request that goes on ends it",
    ),
    Mutation(
        f"{_ROWS}step_inputs",
        "lengths[:, None] - 1 + index",
        "lengths[:, None] + index",
        decode("test_greedy_speculation_is_plain_greedy_decoding[model-greedy]"),
        "tokens are fed one position too late",
    ),
    Mutation(
        f"{_LOOP}commit_emitted",
        "jnp.where(is_first, -1, num_drafted)",
        "num_drafted",
        decode("test_origins_and_metrics_agree"),
        "the token after the prompt counts as a step of speculation",
    ),
    Mutation(
        f"{_LOOP}extend_drafter",
        "jnp.where(index < num_committed[:, None], positions, -1)",
        "positions",
        capacity(_FEATURES),
        "a drafter reads features of tokens that were rejected",
    ),
    Mutation(
        f"{_LOOP}extend_drafter",
        "rows.features if drafter.taps else rows.hidden",
        "jnp.roll(rows.features, 1, axis=-1) if drafter.taps else rows.hidden",
        capacity(_TAPS),
        "after a step the features stand in another order than the taps",
    ),
    Mutation(
        "specjax.decode.prefill.read_prompt_chunk",
        "state.lengths[:, None] - 1)",
        "state.lengths[:, None])",
        streamed(f"{_LAST_ROWS}[taps1]"),
        "a drafter whose prompt is read to its end is given the last token twice",
    ),
    Mutation(
        "specjax.decode.drafters._whole_prompt_functions.empty",
        "init(params, token_ids, lengths, max_length)",
        "jax.tree.map(jnp.zeros_like, init(params, token_ids, lengths, max_length))",
        capacity("test_a_prompt_of_one_token_is_drafted_for_alike_in_any_company"),
        "a drafter of whole prompts is not told of one of one token",
    ),
    Mutation(
        "specjax.decode.prefill.read_chunk",
        "features if models.taps else hidden",
        "jnp.tile(hidden, max(len(models.taps), 1))",
        capacity(_TAPS),
        "the features of a prompt are its last hidden states",
    ),
    Mutation(
        "specjax.decode.prefill.read_prompt_chunk",
        "state.lengths - 1 - positions[:, 0]",
        "state.lengths - 2 - positions[:, 0]",
        streamed(f"{_LAST_ROWS}[taps1]"),
        "the row of a prompt's last token is that of the token before",
    ),
    Mutation(
        _READ,
        "done + offsets < target_end[:, None]",
        "done + offsets <= target_end[:, None]",
        capacity(_FEATURES),
        "the last token of a prompt is read twice",
    ),
    Mutation(
        _READ,
        "jnp.where(inside, done + offsets, -1)",
        "jnp.where(inside, offsets, -1)",
        capacity(_CHUNKS),
        "every chunk of a prompt is read at its beginning",
    ),
    Mutation(
        f"{_LOOP}verify_pending",
        "positions=state.lengths",
        "positions=state.lengths * 0",
        decode("test_plain_decoding_is_gumbel_sample_token_by_token"),
        "every step draws its noise at position 0",
    ),
    Mutation(
        f"{_LOOP}commit_emitted",
        "jnp.where(state.finish == 0, finish, state.finish)",
        "finish",
        decode("test_a_request_that_ends_changes_no_other[model]"),
        "a request that has ended ends again, for another reason",
    ),
    Mutation(
        f"{_LOOP}_origins",
        "num_accepted == info.num_drafted[:, None]",
        "num_accepted < info.num_drafted[:, None]",
        decode("test_origins_and_metrics_agree"),
        "bonus and recovered tokens change their names",
    ),
    Mutation(
        f"{_NEXT}draft_budget",
        "is_active), jnp.int32(-1)",
        "is_active), jnp.int32(0)",
        decode("test_a_request_that_ends_changes_no_other[model]"),
        "a request that has ended is verified without drafts",
    ),
    Mutation(
        f"{_ROWS}run_smallest_k",
        "jnp.max(num_drafted)",
        "jnp.min(num_drafted)",
        adaptive_k("test_a_request_drafts_alone_what_it_drafts_in_a_batch"),
        "a request without drafts takes those of the others",
    ),
    Mutation(
        f"{_ADAPTIVE}_tokens_by_rate",
        "np.arange(1, len(config.step_costs))",
        "np.arange(len(config.step_costs) - 1)",
        adaptive_k("test_the_best_k_has_the_most_expected_tokens_for_its_cost"),
        "a step that drafts k tokens is worth those of one that drafts k - 1, all accepted",
    ),
    Mutation(
        f"{_ROWS}run_smallest_k",
        "longest <= size",
        "longest <= size + 1",
        engines("test_a_step_has_the_rows_that_its_longest_draft_needs_and_compiles_nothing"),
        "a step computes fewer rows than its longest draft needs",
    ),
    Mutation(
        f"{_ADAPTIVE}k_by_rate",
        "usual_k + theory.best_k(total[:, usual_k:], costs[usual_k:]).k",
        "theory.best_k(total, costs).k",
        adaptive_k("test_the_best_k_has_the_most_expected_tokens_for_its_cost"),
        "a request drafts fewer tokens than the slots beside it, as if that made a step shorter",
    ),
    Mutation(
        f"{_ADAPTIVE}k_by_rate",
        "tokens + (num_slots - 1) * usual_tokens[usual_k]",
        "tokens",
        adaptive_k("test_the_best_k_has_the_most_expected_tokens_for_its_cost"),
        "a request makes all slots' steps longer for its own gain alone",
    ),
    Mutation(
        f"{_ADAPTIVE}k_by_rate",
        "_USUAL_RATE if config.usual_acceptance_rate is None else config.usual_acceptance_rate",
        "_USUAL_RATE",
        adaptive_k("test_the_best_k_has_the_most_expected_tokens_for_its_cost"),
        "the usual rate of a config is not read",
    ),
    Mutation(
        "specjax.decode.memory.MemoryNeeds.of_slots",
        "max(self.step_bytes, self.chunk_bytes)",
        "self.step_bytes",
        memory("test_a_slot_a_step_and_a_chunk_take_the_bytes_of_their_arrays"),
        "a chunk of prompts takes no room",
    ),
    Mutation(
        "specjax.decode.memory._check_once",
        "needed <= free",
        "needed < free",
        memory("test_a_batch_that_just_fits_is_decoded_and_not_looked_at_again"),
        "a batch that just fits is refused",
    ),
    Mutation(
        "specjax.decode.memory._check_once",
        "(free - needs.chunk_bytes) // needs.slot_bytes",
        "free // needs.slot_bytes",
        memory(_DOES_NOT_FIT),
        "more prompts are named than fit next to a step",
    ),
    Mutation(
        "specjax.theory.step_costs.StepCosts.interpolate",
        "np.interp(batch_size, self.batch_sizes, times)",
        "np.interp(batch_size - 1, self.batch_sizes, times)",
        step_costs(_ON_THE_LINE),
        "a batch reads the costs of one with a request fewer",
    ),
    Mutation(
        "specjax.theory.step_costs.StepCosts.interpolate",
        "np.interp(batch_size, self.batch_sizes, times)",
        "times[max(np.searchsorted(self.batch_sizes, batch_size, 'right') - 1, 0)]",
        step_costs(_ON_THE_LINE),
        "a batch reads the costs of the next smaller size that was measured",
    ),
    Mutation(
        "specjax.theory.step_costs.StepCosts.interpolate",
        "np.interp(batch_size, self.batch_sizes, times)",
        "np.interp(batch_size, self.batch_sizes, times[1:] + times[-1:])",
        step_costs(_ON_THE_LINE),
        "a batch reads the costs of the next greater size that was measured",
    ),
    Mutation(
        "specjax.decode.request_batch.check_arguments",
        "config.for_batch_size(size)",
        "config.for_batch_size(1)",
        adaptive_k("test_a_text_is_that_of_the_costs_of_its_batch_size"),
        "a batch reads the step costs of one request",
    ),
    Mutation(
        "specjax.engine.engine.resolve_speculation",
        "config.for_batch_size(num_slots)",
        "config.for_batch_size(1)",
        engines("test_an_engine_reads_the_step_costs_of_as_many_requests_as_it_has_slots"),
        "an engine reads the step costs of one request",
    ),
    Mutation(
        "specjax.engine.engine.resolve_speculation",
        "step_costs=None, usual_acceptance_rate=None",
        "step_costs=None",
        engines("test_an_engine_of_one_usual_k_is_that_of_this_k"),
        "an engine whose requests all draft one number is refused where a usual rate is given",
    ),
    Mutation(
        f"{_ADAPTIVE}constant_k",
        "first == 0 or np.all",
        "np.all",
        adaptive_k("test_k_is_settled_if_no_rate_that_requests_come_to_changes_it"),
        "an engine keeps a drafter that never drafts",
    ),
    Mutation(
        f"{_ADAPTIVE}constant_k",
        "np.all(best == first)",
        "True",
        adaptive_k("test_k_is_settled_if_no_rate_that_requests_come_to_changes_it"),
        "no request of an engine ever changes its K",
    ),
    Mutation(
        f"{_ADAPTIVE}KPolicy.budget",
        "is_active[:, None]",
        "(is_active | True)[:, None]",
        adaptive_k("test_a_shared_k_gives_the_active_requests_the_most_tokens_for_its_cost"),
        "requests that have ended count where one K is chosen for all",
    ),
    Mutation(
        f"{_ADAPTIVE}KPolicy.update",
        "num_accepted < num_drafted",
        "num_accepted <= num_drafted",
        adaptive_k("test_rejections_end_drafting_and_plain_steps_bring_it_back"),
        "K counts a token as tested that was not drafted",
    ),
    Mutation(
        "specjax.decode.adaptive_k.KPolicy.num_read",
        "lengths - 3",
        "lengths - 1",
        conversations(f"{_ANSWERED}[model]"),
        "a draft model misses tokens at the end of the answer before",
    ),
    Mutation(
        "specjax.decode.commit.append",
        "index < counts[:, None]",
        "index <= counts[:, None]",
        tokens("test_emitted_tokens_are_appended_to_ragged_rows_and_nothing_else_is_touched"),
        "one value more is written than counts",
    ),
    Mutation(
        _COMMIT,
        "first_eos + 1",
        "first_eos",
        tokens(f"{_ENDS}[[2, 3, 4]-[2]]"),
        "the token that ends a sequence is not committed",
    ),
    Mutation(
        _COMMIT,
        "is_eos &= index < counts[:, None]",
        "is_eos &= index >= 0",
        why="padding after what was emitted may end a sequence",
        equivalent="such an end lies at or past the number emitted, which is the smaller then, "
        "and is no reason to end",
    ),
    Mutation(
        _COMMIT,
        "jnp.maximum(limit - lengths, 0)",
        "limit - lengths",
        tokens("test_each_request_has_a_limit_of_its_own"),
        "a request past its limit loses tokens",
    ),
    Mutation(
        _COMMIT,
        "new_lengths >= limit",
        "new_lengths > limit",
        tokens("test_the_last_slot_of_the_buffer_is_filled_and_ends_the_request"),
        "a full request goes on",
    ),
    Mutation(
        _COMMIT,
        "first_eos < counts",
        "first_eos <= counts",
        tokens("test_an_end_past_the_limit_is_not_the_reason"),
        "an end for which there was no room is the reason",
    ),
    Mutation(
        f"{_METRICS}_reached",
        "positions < count[..., None]",
        "positions <= count[..., None]",
        metrics(_RECOUNT),
        "one position more is counted than was reached",
    ),
    Mutation(
        f"{_METRICS}update_metrics",
        "draft_num_tokens >= 0",
        "draft_num_tokens > 0",
        metrics(_RECOUNT),
        "a step without drafts is not counted",
    ),
    Mutation(
        f"{_METRICS}update_metrics",
        "jnp.minimum(draft_num_tokens, committed), draft_num_tokens",
        "draft_num_tokens, draft_num_tokens",
        decode(_COMMITTED),
        "drafted positions past the end of a text count",
    ),
    Mutation(
        f"{_METRICS}update_metrics",
        "jnp.minimum(verification.num_accepted, committed)",
        "verification.num_accepted",
        decode(_COMMITTED),
        "accepted tokens past the end of a text count",
    ),
    Mutation(
        f"{_METRICS}_ratio",
        "/ denominator.astype",
        "/ jnp.maximum(denominator, 1).astype",
        metrics("test_a_position_that_no_step_drafted_has_no_rate"),
        "a position that was never drafted reads as one whose drafts were all rejected",
    ),
    Mutation(
        f"{_METRICS}Metrics.mean_acceptance_length",
        "self.num_emitted.sum(), self.num_steps.sum()",
        "self.num_accepted.sum(), self.num_steps.sum()",
        metrics(
            "test_the_rates_are_quotients_over_all_requests_and_no_number_where_nothing_was_counted"
        ),
        "the acceptance length lacks the token after the accepted ones",
    ),
    Mutation(
        f"{_RULES}_presence",
        "jnp.where(generated > 0, penalty, jnp.float32(0))",
        "penalty * generated.astype(jnp.float32)",
        processing("test_each_rule_is_its_definition[presence_penalty]"),
        "the presence penalty counts",
    ),
    Mutation(
        f"{_RULES}_unpack_mask",
        "bits.reshape(*allowed.shape[:-1], -1)[..., :vocab_size]",
        "jnp.flip(bits, -1).reshape(*allowed.shape[:-1], -1)[..., :vocab_size]",
        processing("test_a_packed_mask_is_the_mask[5-uint32]"),
        "the first token is in a word's highest bit",
    ),
    Mutation(
        f"{_RATES}_SMALLEST_DECAY",
        "0.85",
        "0.75",
        acceptance_rates("test_a_geometric_schedule_falls_off_by_the_smallest_decay_from_0_85_up"),
        "a geometric schedule may fall off faster",
    ),
    Mutation(
        f"{_RATES}conditional_rates",
        "jnp.ones_like(rates[..., :1])",
        "rates[..., :1]",
        acceptance_rates("test_conditional_rates_multiply_back_to_the_unconditional_ones"),
        "the first position is always accepted",
    ),
    Mutation(
        f"{_RATES}geometric_rates.excess",
        "index * (index + 1) / 2",
        "index * (index - 1) / 2",
        acceptance_rates("test_a_geometric_schedule_has_the_mean_that_was_asked_for"),
        "the decay begins one position too late",
    ),
)
