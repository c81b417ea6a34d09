"""Wrong versions of the engine: what a slot keeps of the request before, when steps are read."""

from ..mutation import Mutation
from .tests import (
    batches,
    commands,
    engines,
    json_schemas,
    pieces,
    queues,
    step_sizes,
    stop_strings,
    text_streams,
)

_FEATURES = "test_a_drafter_that_reads_features_and_chooses_k_is_told_of_one_request_at_a_time"
_THREADS = "test_a_text_ends_once_if_another_thread_aborts_it_meanwhile"
_KEPT = "test_a_request_that_ended_keeps_nothing_of_other_slots"
_TOKENIZER = "test_a_tokenizer_that_raises_ends_one_request_and_no_other"
_ROOM = "test_slots_have_the_room_of_all_devices_that_the_target_is_on"
_SAMPLES = "test_samples_of_a_prompt_are_those_of_its_keys_and_read_it_once"
_TOGETHER = "test_prompts_that_are_read_together_give_what_each_gives_alone"
_GROWN = "test_prompts_are_read_into_caches_that_grow_and_give_the_same_without_compiling"
_TURNS = "test_prompt_i_of_a_body_lets_i_later_bodies_go_first"
_STAYS = "test_prompts_that_are_being_read_stay_first"
_SERVED = "test_first_come_first_served_and_a_slot_is_empty_for_at_most_a_step"
_LONG = "test_a_long_prompt_is_read_between_the_steps_of_others"
_INTERRUPTED = "test_an_interrupted_step_is_read_before_the_next_masks"
_STOPPED = "test_a_stop_string_ends_a_request_within_a_step_and_across_tokens"
_COROUTINES = "test_pieces_add_up_and_coroutines_share_the_steps"
_PREEMPTED = "test_a_preempted_request_gets_the_same_tokens"
_PREFILL_AHEAD = "test_the_next_prompt_is_read_before_a_slot_is_empty"
_GENERATE = "test_a_request_gets_what_generate_gives"
_CUT = "test_a_text_ends_before_its_first_stop_string_however_it_is_cut"
_ANY = "test_any_strings_end_a_text_where_the_first_is_complete_and_no_more_is_held_than_needed"
_STOPS_AT_ONCE = "test_a_stop_string_ends_a_text_with_the_token_that_completed_it"
_WHOLE = "test_pieces_are_the_end_of_the_whole_text"
_COMMAND = "test_a_text_ends_before_a_stop_string_that_tokens_share_and_shows_no_part_of_it"
_LINES = "test_a_file_gives_the_texts_of_its_lines_and_goes_on_wherever_it_was_cut"
_CACHES = "test_pieces_of_several_prompts_write_the_caches_of_each_alone"
_ALONE = "test_an_engine_that_reads_pieces_gives_the_texts_of_one_that_reads_each_prompt_alone"
_BOUND = "test_the_bound_holds_whenever_requests_end"
_FULL = "test_a_chunk_of_pieces_waits_until_it_is_full_unless_a_slot_does"
_MATCHED = "test_an_engine_gives_valid_json_by_the_automaton_and_by_llguidance_next_to_free_texts"
_SMALLEST = "test_a_step_has_the_smallest_size_that_holds_the_occupied_slots"
_SOME = "test_a_step_of_some_slots_moves_these_as_a_full_step_does_and_no_other"
_SAME = "test_greedy_texts_are_those_of_full_steps"
_MASKED = "test_adaptive_k_penalties_and_matchers_follow_their_slots"

MUTATIONS = (
    Mutation(
        "specjax.engine.scheduler.Scheduler._dispatch_next",
        "0 if _has_matchers(self._occupants) else 1",
        "1",
        engines(_INTERRUPTED),
        "a step with masks is read by the call after it",
    ),
    Mutation(
        "specjax.engine.scheduler.Scheduler._deliver_masked_steps",
        "any(_has_matchers(step.occupants) for step in self._in_flight)",
        "self._in_flight and _has_matchers(self._occupants)",
        engines(_INTERRUPTED),
        "masks of a request that was preempted after an interrupted step are made too early",
    ),
    Mutation(
        "specjax.engine.scheduler.Scheduler._end_round",
        "any(True for _ in self._unfinished())",
        "bool(self._in_flight)",
        engines(_STOPPED),
        "a step is asked for to read what a request got after its stop string",
    ),
    Mutation(
        "specjax.engine.scheduler.Scheduler._end_round",
        "self._drop_ended()",
        "pass",
        engines(
            "test_a_preempted_request_that_ends_by_a_step_in_flight_leaves_nothing_on_the_device"
        ),
        "a request that ended while it was parked keeps its caches",
    ),
    Mutation(
        "specjax.engine.scheduler.Scheduler._unfinished",
        "*(step.occupants for step in tuple(self._in_flight))",
        "",
        engines(_COROUTINES),
        "a request counts nowhere while its last token is read",
    ),
    Mutation(
        "specjax.engine.scheduler.Scheduler.num_running",
        "set(self._unfinished()) - set(self.queue.waiting())",
        "set(self._unfinished())",
        engines(_PREEMPTED),
        "a preempted request with an unread step counts twice",
    ),
    Mutation(
        "specjax.engine.queue.WaitingQueue.put",
        "self._now + entry.turn",
        "self._now",
        queues(_TURNS),
        "all prompts of a body go before the first of another",
    ),
    Mutation(
        "specjax.engine.queue.WaitingQueue.first",
        "max(self._now, entries[-1].turn)",
        "self._now",
        queues(_STAYS),
        "a prompt that is being read is overtaken, and a request waits forever",
    ),
    Mutation(
        "specjax.engine.scheduler.Scheduler._fill_slots",
        "min(budget, self.queue.num_entries())",
        "budget",
        engines(_LONG),
        "a prompt that waits alone keeps the others waiting for two chunks",
    ),
    Mutation(
        "specjax.engine.scheduler.Scheduler._fill_slots",
        "2 * len(empty) or",
        "len(empty) or",
        engines(_LONG),
        "one chunk for an empty slot",
    ),
    Mutation(
        "specjax.engine.scheduler.Scheduler._fill_slots",
        "for entry in entries if",
        "for entry in entries[:1] if",
        engines(_PREFILL_AHEAD),
        "the second prompt is read when a slot is empty",
    ),
    Mutation(
        "specjax.engine.scheduler.Scheduler._vacate_slots",
        "num_remaining > num_steps",
        "num_remaining > 0",
        engines(_SERVED),
        "a slot whose request has all its tokens waits until the host reads them",
    ),
    Mutation(
        "specjax.engine.scheduler.Scheduler._vacate_slots",
        "num_remaining > num_steps",
        "num_remaining > num_steps + 1",
        engines(_SERVED),
        "a request loses its slot before its last step",
    ),
    Mutation(
        "specjax.engine.queue.WaitingQueue.drop_ended",
        "deque(entry for entry in self._entries if entry.waiting)",
        "self._entries",
        engines("test_nothing_is_kept_of_prompts_that_were_aborted"),
        "caches of aborted prompts are kept while an earlier one waits",
    ),
    Mutation(
        "specjax.engine.queue.WaitingQueue.waiting",
        "[request for request in waiting if request.finish_reason is None]",
        "list(waiting)",
        engines("test_the_queue_is_bounded"),
        "aborted requests have a place in the queue",
    ),
    Mutation(
        "specjax.engine.queue.WaitingQueue.put",
        "with self.lock",
        "if self.lock",
        engines("test_the_queue_is_bounded_for_several_threads"),
        "two threads take the last place in the queue",
    ),
    Mutation(
        "specjax.engine.queue.WaitingQueue.pop",
        "self._num_waiting -= request.finish_reason is None",
        "self._num_waiting -= 1",
        queues(_BOUND),
        "a request that was counted as ended frees a second place",
    ),
    Mutation(
        "specjax.engine.queue.WaitingQueue.put",
        "self._num_waiting += len(entry.waiting)",
        "self._num_waiting += 1",
        queues(_BOUND),
        "samples of one prompt take one place in the queue",
    ),
    Mutation(
        "specjax.engine.request.Request.end",
        "with self._lock",
        "if self._lock",
        engines(_THREADS),
        "text is decoded twice by a thread that aborts a request and one that adds tokens",
    ),
    Mutation(
        "specjax.engine.request.Request.end",
        "count[slot : slot + 1].copy()",
        "count[slot : slot + 1]",
        engines(_KEPT),
        "a request that ended keeps what all slots counted",
    ),
    Mutation(
        "specjax.decode.token_info.TokenInfo.at",
        "values[index].copy()",
        "values[index]",
        engines(_KEPT),
        "each token of a request keeps the listed tokens of all slots",
    ),
    Mutation(
        "specjax.engine.request.Request.add",
        "with self._lock",
        "if self._lock",
        engines(_THREADS),
        "tokens are added to a request that another thread ends",
    ),
    Mutation(
        "specjax.engine.scheduler.Scheduler.take_step",
        "with self._step_lock, self._closing_on_loss()",
        "with self._closing_on_loss()",
        engines("test_threads_that_run_an_engine_take_turns"),
        "two threads step an engine at once",
    ),
    Mutation(
        "specjax.engine.programs._caches_of_each_length",
        "programs.cache_lengths[i + 2 :]",
        "programs.cache_lengths[i + 3 :]",
        engines(_GROWN),
        "growth past the next length is compiled by a request",
    ),
    Mutation(
        "specjax.decode.memory.free_bytes",
        "for device in devices",
        "for device in list(devices)[:1]",
        engines(_ROOM),
        "slots over several devices need the room of one",
    ),
    Mutation(
        "specjax.engine.programs.explain_slots_out_of_memory",
        "(programs.num_slots + prefill_slots)",
        "(programs.num_slots + 2)",
        engines(_ROOM),
        "caches that grow have no room next to those that they grow out of",
    ),
    Mutation(
        "specjax.engine.scheduler.delayed_interrupts",
        "_signal.signal(number, delay)",
        "pass",
        engines("test_an_interrupt_waits_until_slots_and_requests_are_whole"),
        "an interrupt while slots change loses tokens of requests",
    ),
    Mutation(
        "specjax.engine.prefill_batch.PrefillBatch._fill",
        "self._caches = self._programs.put_caches(self._caches, caches, np.int32(place))",
        "",
        engines(_TOGETHER),
        "a prompt is read after another one's tokens in its place of the batch",
    ),
    Mutation(
        "specjax.engine.prefill_batch.PrefillBatch.read",
        "if is_alone and (is_urgent or not batch.packs_pieces)",
        "if False",
        engines("test_a_short_prompt_that_is_read_first_waits_for_one_before_it"),
        "prompts are read together while the first waits, which nothing is left of",
    ),
    Mutation(
        "specjax.engine.prefill_batch.PrefillBatch.read",
        "num_reads * cost > max_chunks",
        "False",
        engines("test_a_short_prompt_that_is_read_first_waits_for_one_before_it"),
        "the first prompt waits for others to be read, while its slot is empty",
    ),
    Mutation(
        "specjax.engine.programs._choose_batch",
        "chunk_size < _MIN_CHUNK",
        "2 * chunk_size < _MIN_CHUNK",
        engines("test_prompts_are_read_together_where_that_changes_no_bit"),
        "short chunks have other last bits alone than in a batch",
    ),
    Mutation(
        "specjax.engine.programs._choose_batch",
        "leaf.dtype == jnp.bfloat16",
        "False",
        engines("test_prompts_are_read_together_where_that_changes_no_bit"),
        "chunks of bfloat16 have other last bits alone than in a batch",
    ),
    Mutation(
        "specjax.engine.prefill_batch.PrefillBatch.drop_ended",
        "in self._entries.items() if entry.waiting",
        "in self._entries.items()",
        engines("test_an_aborted_prompt_leaves_its_place_in_a_batch"),
        "an aborted prompt is read to its end",
    ),
    Mutation(
        "specjax.engine.prefill_batch.PrefillBatch.detach",
        "take_caches(self._caches, entry.place)",
        "take_caches(self._caches, np.int32(0))",
        engines(_TOGETHER),
        "a prompt gets the caches of another one of its batch",
    ),
    Mutation(
        "specjax.engine.scheduler.Scheduler._fill_slots",
        "self._batch.detach(unread[0])",
        "pass",
        engines(_TOGETHER),
        "a prompt that is read alone loses what a batch has read of it",
    ),
    Mutation(
        "specjax.engine.scheduler.Scheduler._fill_slots",
        "self.queue.first(self._programs.prefill_depth)",
        "sorted(self.queue.first(self._programs.prefill_depth), key=lambda x: not x.is_read())",
        engines("test_a_short_prompt_that_is_read_first_waits_for_one_before_it"),
        "a short prompt takes the slot of a longer one before it",
    ),
    Mutation(
        "specjax.engine.programs.make_programs",
        "is_whole or batch is not None",
        "batch is not None",
        engines("test_a_drafter_of_whole_prompts_is_told_of_the_prompt_alone"),
        "a drafter of whole prompts reads them into caches that grow",
    ),
    Mutation(
        "specjax.engine.request.Request._add",
        "[len(self.token_ids) - num_tokens :]",
        "[:]",
        json_schemas(_MATCHED),
        "a matcher reads the tokens of earlier steps again",
    ),
    Mutation(
        "specjax.engine.request.Request.end",
        "if self.finish_reason is not None:\n                    return\n                reason",
        "reason",
        engines(_TOKENIZER),
        "a tokenizer that raises on the rest of a text leaves no error",
    ),
    Mutation(
        "specjax.engine.request.Request._add",
        "with self._contain_errors(FinishReason.TOKENIZER_ERROR)",
        "if True",
        engines(_TOKENIZER),
        "a tokenizer that raises takes the tokens of other requests",
    ),
    Mutation(
        "specjax.engine.request.Request._contain_errors",
        "except BaseException",
        "except ValueError",
        json_schemas(_MATCHED),
        "a matcher that raises ends the engine",
    ),
    Mutation(
        "specjax.engine.slots.admit",
        "**caches._asdict()",
        "drafter_state=caches.drafter_state",
        engines(_GENERATE),
        "a request begins with the cache of no prompt",
    ),
    Mutation(
        "specjax.engine.slots.admit",
        "sample < 0, key, folded",
        "sample < 0, key, key",
        engines(_SAMPLES),
        "all samples of a prompt have one key",
    ),
    Mutation(
        "specjax.engine.slots.prefill_chunk",
        "PromptCaches(*states)",
        "PromptCaches(states[0], caches.drafter_state)",
        engines(_FEATURES),
        "the drafter does not read the prompt",
    ),
    Mutation(
        "specjax.engine.queue.QueueEntry._grow_caches",
        "length >= num_tokens",
        "length >= num_tokens - 1",
        engines(_GROWN),
        "caches grow a token too late",
    ),
    Mutation(
        "specjax.engine.slots.grow_caches",
        "return jax.lax.dynamic_update_slice(longer, leaf, (0,) * leaf.ndim)",
        "return longer",
        engines(_GROWN),
        "caches that grow forget what was read",
    ),
    Mutation(
        "specjax.engine.queue.QueueEntry._grow_caches",
        "programs.grow_caches(self.caches, max_length=length)",
        "programs.new_caches(max_length=length)",
        engines(_GROWN),
        "caches that grow between two chunks forget what was read",
    ),
    Mutation(
        "specjax.engine.scheduler.Scheduler._dispatch_next",
        "if _has_matchers(self._occupants) else 1",
        "if _has_matchers(self._occupants) else 0",
        engines(_SERVED),
        "the host waits for every step before it dispatches the next",
    ),
    Mutation(
        "specjax.engine.queue.ParkedRequest.token_ids",
        "int(lengths[0])",
        "int(lengths[0]) - 1",
        engines(_PREEMPTED),
        "the target's cache lacks a token after it was computed again",
    ),
    Mutation(
        "specjax.engine.stop_strings._make_automaton",
        "automaton.sizes[child] or automaton.sizes[shorter]",
        "automaton.sizes[child]",
        stop_strings(_CUT, _ANY),
        "a stop string within the beginning of another is passed over",
    ),
    Mutation(
        "specjax.engine.stop_strings._make_automaton",
        "automaton.next_node(automaton.shorter[node], character)",
        "automaton.children[0].get(character, 0)",
        stop_strings(_CUT, _ANY),
        "of a beginning that fails, one character alone may begin another",
    ),
    Mutation(
        "specjax.engine.stop_strings.StoppedText._release",
        "self._stops.depths[self._node]",
        "max(0, self._stops.depths[self._node] - 1)",
        stop_strings(_CUT, _ANY),
        "all but the last character of a stop string is shown",
    ),
    Mutation(
        "specjax.engine.stop_strings.StoppedText.feed",
        "self._completed_node = self._node",
        "pass",
        text_streams(_STOPS_AT_ONCE),
        "a run of bytes completes no stop string that began before it",
    ),
    Mutation(
        "specjax.engine.stop_strings.TextStream._follow_run",
        """            if error.reason != "unexpected end of data":
                self._character = None
""",
        """            if error.reason != "unexpected end of data":
                self._character = b""
""",
        text_streams(_STOPS_AT_ONCE),
        "a run that is no text is looked through for stop strings",
    ),
    Mutation(
        "specjax.engine.stop_strings.TextStream._follow_run",
        'self.completed, self._max_held = "", 0',
        'self.completed = ""',
        text_streams(_WHOLE),
        "a run of bytes is cut, and becomes text that it is not",
    ),
    Mutation(
        "specjax.engine.stop_strings.TextStream._take",
        "-_NUM_CONTEXT if num_held else self._num_settled",
        "self._num_settled",
        text_streams("test_a_token_costs_alike_however_many_came_before"),
        "tokens that complete no character are all decoded again",
    ),
    Mutation(
        "specjax.engine.stop_strings.TextStream.read_context",
        " and self._read(ids[-1])[1] is None",
        "",
        text_streams(_WHOLE),
        "a run of bytes that the prompt began is decoded from its middle",
    ),
    Mutation(
        "specjax.engine.stop_strings.TextStream.read_context",
        """            if self._read(token_id)[0] is not None:
                ids.append(token_id)
""",
        "            ids.append(token_id)\n",
        text_streams(_WHOLE),
        "special tokens at the end of a prompt take the place of its text",
    ),
    Mutation(
        "specjax.cli.generate.stream_steps",
        "if text.stopped or finish[0] or is_interrupted():",
        "if finish[0] or is_interrupted():",
        commands(_COMMAND),
        "the command decodes on after a stop string",
    ),
    Mutation(
        "specjax.cli.generate.stream_steps",
        "result = _result_of(job, state, num_shown, text)",
        "result = _result_of(job, state, int(lengths[0]), text)",
        commands(_COMMAND),
        "tokens after the one that completed a stop string are listed",
    ),
    Mutation(
        "specjax.cli.batch.run_batch._make_engine",
        "max_waiting=_ROUNDS_AHEAD * job.options.num_slots",
        "max_waiting=4096",
        batches("test_the_queue_has_room_for_all_that_is_submitted_at_once"),
        "a file through thousands of slots fills the queue before its first step",
    ),
    Mutation(
        "specjax.cli.batch.run_batch._stop",
        "if line.stop is None",
        "if not line.stop",
        batches(_LINES),
        "a line cannot ask for no stop strings",
    ),
    Mutation(
        "specjax.engine.prefill_batch.PrefillBatch._read_packed",
        "if needs_all and",
        "if",
        pieces(_FULL),
        "a slot that is empty waits for a chunk that is full",
    ),
    Mutation(
        "specjax.engine.prefill_batch.PrefillBatch._read_packed",
        "if needs_all and",
        "if False and",
        pieces(_FULL),
        "a chunk is read for a few tokens while no slot is empty",
    ),
    Mutation(
        "specjax.engine.prefill_batch.PrefillBatch._read_packed",
        "entry.num_read + np.arange",
        "np.arange",
        pieces(_ALONE),
        "a prompt's next pieces are read at the positions of its first",
    ),
    Mutation(
        "specjax.engine.prefill_batch.PrefillBatch._read_packed",
        "places[start:end] = place",
        "places[start:end] = 0",
        pieces(_ALONE),
        "all prompts of a chunk are read into one place",
    ),
    Mutation(
        "specjax.engine.prefill_batch.PrefillBatch._read_packed",
        "sizes.append(unread.size)",
        "entry.num_read, sizes = entry.num_read + unread.size, [*sizes, 0]",
        pieces("test_a_chunk_that_failed_is_read_again"),
        "a chunk counts as read before its program has it",
    ),
    Mutation(
        "specjax.engine.prefill_batch.PrefillBatch.read",
        "is_alone and (is_urgent or not batch.packs_pieces)",
        "is_alone",
        pieces("test_full_chunks_are_read_behind_a_prompt_of_one_token"),
        "a prompt of one token keeps full chunks waiting",
    ),
    Mutation(
        "specjax.models.heads.drafters._follows",
        "& (first == last + 1)",
        "",
        pieces(_CACHES),
        "a piece follows one of its text that is not next to it",
    ),
    Mutation(
        "specjax.models.heads.drafters._Eagle3.extend",
        "jnp.where(follows[:, None], before, last[pieces.rows])",
        "last[pieces.rows]",
        pieces(_CACHES),
        "a piece's first token is paired with the state before the chunk",
    ),
    Mutation(
        "specjax.models.heads.drafters._Eagle3.extend",
        "is_last = (num_read > 0) & ~jnp.roll(follows, -1)",
        "is_last = num_read > -1",
        pieces(_CACHES),
        "a piece without a token overwrites the last state of a row",
    ),
    Mutation(
        "specjax.models.decoder.pallas.request_qkv.cache_row",
        "b if rows is None else rows[b]",
        "b",
        pieces(f"{_CACHES}[interpret-model]"),
        "kernels read and write the row of a piece's number",
    ),
    Mutation(
        "specjax.engine.step_sizes.choose_slots",
        "n >= is_empty.count(False)",
        "n > is_empty.count(False)",
        step_sizes(_SMALLEST),
        "a step has a larger size than it needs",
    ),
    Mutation(
        "specjax.engine.step_sizes.choose_slots",
        'np.argsort(is_empty, kind="stable")',
        "list(range(len(is_empty)))",
        step_sizes(_SMALLEST),
        "a step of fewer slots has the first, empty or not",
    ),
    Mutation(
        "specjax.engine.step_sizes.step_some_slots",
        "leaf.at[chosen].set",
        "leaf.at[: len(chosen)].set",
        step_sizes(f"{_SOME}[model]"),
        "the results of a step of some slots go into the first",
    ),
    Mutation(
        "specjax.engine.step_sizes.step_some_slots",
        "allowed[chosen]",
        "allowed[: len(chosen)]",
        step_sizes(f"{_MASKED}[False]"),
        "a step of some slots has the masks of the first",
    ),
    Mutation(
        "specjax.engine.step_sizes._bind",
        "Pieces(given[cache], rows)",
        "Pieces(given[cache], jax.numpy.arange(len(rows)))",
        step_sizes(f"{_SOME}[dflash]"),
        "a step of some slots reads and writes the first rows of the caches",
    ),
    Mutation(
        "specjax.models.heads.drafters._Eagle3.propose",
        "whole.last[cache_rows]",
        "whole.last[: len(cache_rows)]",
        step_sizes(f"{_SOME}[eagle3]"),
        "a head drafts from the last states of the first slots",
    ),
    Mutation(
        "specjax.engine.scheduler.Scheduler._dispatch_step",
        "[self._occupants[slot] for slot in chosen]",
        "list(self._occupants)",
        step_sizes(f"{_SAME}[None]"),
        "a request gets the tokens of another row of a step of some slots",
    ),
)
