"""Wrong versions of an engine with faults, preemptions and an end, and of how K is chosen in it."""

from ..mutation import Mutation
from .tests import adaptive_k, engines, faults, soaks

_ENGINE = "specjax.engine."
_RAISED = "test_whatever_a_tokenizer_raises_ends_its_request_alone[error0-Panic: out of bounds]"
_STOPS = "test_what_stops_a_program_leaves_a_step_and_takes_nothing_from_other_slots"
_MOVED = "test_an_error_before_a_program_takes_anything_moves_nothing"
_LOST = "test_an_engine_that_lost_what_a_program_took_ends_all_requests_and_says_so"
_CLOSED = "test_a_closed_engine_says_so_and_its_requests_have_ended"
_SOAK = "test_a_soak_finds_nothing_wrong"
_BEST = "test_the_best_k_has_the_most_expected_tokens_for_its_cost"
_AGAIN = "test_a_model_that_drafts_again_has_read_what_it_missed"

MUTATIONS = (
    Mutation(
        f"{_ENGINE}queue.WaitingQueue.put_first",
        "self._entries.appendleft(entry)",
        "self._entries.append(entry)",
        engines("test_a_preempted_request_goes_on_before_those_that_wait"),
        "a preempted request waits until all others had a slot",
    ),
    Mutation(
        f"{_ENGINE}request.Request._contain_errors",
        "except BaseException",
        "except Exception",
        faults(_RAISED),
        "a panic of a tokenizer leaves the step",
    ),
    Mutation(
        f"{_ENGINE}request.Request._contain_errors",
        "isinstance(error, PROGRAM_EXITS)",
        "False",
        faults(f"{_STOPS}[KeyboardInterrupt]"),
        "an interrupt in a tokenizer is swallowed",
    ),
    Mutation(
        f"{_ENGINE}scheduler.Scheduler._deliver",
        "            occupants[row] = None\n            if request is None",
        "            if request is None",
        faults(f"{_STOPS}[SystemExit]"),
        "a step that was half read adds its tokens twice",
    ),
    Mutation(
        f"{_ENGINE}queue.QueueEntry.read_chunk",
        "self.caches = run_chunk(programs, self.caches, chunk, owners)\n"
        "        self.num_read += programs.chunk_size",
        "self.num_read += programs.chunk_size\n"
        "        self.caches = run_chunk(programs, self.caches, chunk, owners)",
        soaks(_MOVED),
        "a chunk counts as read before a program has it",
    ),
    Mutation(
        f"{_ENGINE}prefill_batch.PrefillBatch.read",
        "        self._caches = run_chunk(self._programs, self._caches, chunk, owners)\n"
        "        # A last piece counts whole, as in `QueueEntry.num_read`.\n"
        "        for entry in batch_entries:\n"
        "            entry.num_read += piece_size\n",
        "        for entry in batch_entries:\n"
        "            entry.num_read += piece_size\n"
        "        self._caches = run_chunk(self._programs, self._caches, chunk, owners)\n",
        soaks(_MOVED),
        "chunks of a batch count as read before a program has them",
    ),
    Mutation(
        f"{_ENGINE}prefill_batch.PrefillBatch.detach",
        "        caches = self._programs.take_caches(self._caches, entry.place)\n"
        "        del self._entries[int(entry.place)]\n",
        "        del self._entries[int(entry.place)]\n"
        "        caches = self._programs.take_caches(self._caches, entry.place)\n",
        soaks(_MOVED),
        "a prompt leaves its batch without its caches",
    ),
    Mutation(
        f"{_ENGINE}scheduler.Scheduler._admit",
        """        self._slots = self._batch.admit(self._slots, entry, slot)
        with self.queue.lock:
            self._occupants[slot] = self.queue.pop()
""",
        """        with self.queue.lock:
            self._occupants[slot] = self.queue.pop()
        self._slots = self._batch.admit(self._slots, entry, slot)
""",
        soaks(_MOVED),
        "a request leaves the queue before it has a slot",
    ),
    Mutation(
        f"{_ENGINE}scheduler.Scheduler._arrays",
        "self.queue.arrays()",
        "None",
        soaks(f"{_LOST}[prefill_chunk]"),
        "an engine goes on that lost the caches of a prompt",
    ),
    Mutation(
        f"{_ENGINE}scheduler.Scheduler._arrays",
        "self._slots, self._batch.arrays,",
        "self._slots,",
        soaks(f"{_LOST}[prefill_batch]"),
        "an engine goes on that lost the caches of a batch",
    ),
    Mutation(
        f"{_ENGINE}scheduler.Scheduler._is_intact",
        "(self._arrays(), outputs)",
        "self._arrays()",
        faults("test_a_step_that_could_not_be_read_is_read_again_unless_it_is_lost[True]"),
        "a step that is lost is read again for ever",
    ),
    Mutation(
        f"{_ENGINE}scheduler.Scheduler._close",
        "leaf.delete()",
        "pass",
        faults(_CLOSED),
        "a closed engine keeps the memory of its slots",
    ),
    Mutation(
        f"{_ENGINE}scheduler.Scheduler",
        "if self._in_flight and self._in_flight[0] is step:",
        "if True:",
        faults("test_coroutines_end_with_an_engine_that_another_thread_closes"),
        "coroutines read a step of an engine that was closed meanwhile",
    ),
    Mutation(
        f"{_ENGINE}queue.WaitingQueue.check_room",
        "self.check_open()",
        "",
        faults("test_a_queue_that_is_closed_meanwhile_takes_no_request"),
        "a request is put into the queue of a closed engine and never ends",
    ),
    Mutation(
        f"{_ENGINE}engine.Engine._enqueue",
        "queue.check_room(len(samples))",
        "",
        faults("test_no_request_is_made_before_the_queue_has_room_for_all"),
        "requests are made that the queue has no room for",
    ),
    Mutation(
        f"{_ENGINE}request.Request.end",
        "self._stepper = None",
        "self._kept, self._stepper = self._stepper, None",
        faults("test_a_request_that_ended_keeps_no_engine"),
        "a request that ended keeps its engine",
    ),
    Mutation(
        f"{_ENGINE}scheduler.Scheduler.preempt",
        "self._to_release.add(slot)",
        "",
        soaks(_SOAK),
        "the device decodes on in the slot of a preempted request",
    ),
    Mutation(
        f"{_ENGINE}scheduler.Scheduler._admit",
        "self._to_release.discard(slot)",
        "",
        engines("test_a_preempted_request_goes_on_before_those_that_wait"),
        "a request loses the slot that another one left in the same round",
    ),
    Mutation(
        f"{_ENGINE}scheduler.Scheduler._vacate_slots",
        "self._to_release.add(slot)",
        "pass",
        soaks(_SOAK),
        "the device decodes on for a request that the host ended",
    ),
    Mutation(
        f"{_ENGINE}queue.QueueEntry.unread",
        "[self.num_read : -1]",
        "[self.num_read : -2]",
        engines("test_a_preempted_request_gets_the_same_tokens[True]"),
        "the last token that is to be read is left out",
    ),
    Mutation(
        f"{_ENGINE}scheduler.delayed_interrupts",
        "calls.callback(handlers[number], number, frame)",
        "pass",
        engines("test_an_interrupt_waits_until_slots_and_requests_are_whole"),
        "an interrupt that came while slots changed is forgotten",
    ),
    Mutation(
        "specjax.decode.adaptive_k.KPolicy.draft",
        "num_read=jnp.where(is_drafting, num_read, history.num_read)",
        "num_read=num_read",
        adaptive_k(_AGAIN),
        "a drafter has read what was committed while it did not draft",
    ),
    Mutation(
        "specjax.decode.adaptive_k.KPolicy.draft",
        "lengths - 1 - history.num_read > 1",
        "lengths - 1 - history.num_read > 2",
        adaptive_k(_AGAIN),
        "a drafter that missed two tokens does not read the first",
    ),
    Mutation(
        "specjax.decode.adaptive_k.KPolicy.update",
        "jnp.minimum(history.num_read, lengths - 1)",
        "history.num_read",
        adaptive_k("test_a_drafter_has_read_no_token_that_was_rejected"),
        "a drafter has read tokens that were rejected",
    ),
    Mutation(
        "specjax.decode.adaptive_k._decay",
        "count - (count >> _DECAY_SHIFT)",
        "count",
        adaptive_k("test_rejections_end_drafting_and_plain_steps_bring_it_back"),
        "a request that once stopped drafting never drafts again",
    ),
    Mutation(
        "specjax.decode.adaptive_k.k_by_rate",
        "if num_slots > 1 else 0",
        "",
        adaptive_k(_BEST),
        "a request alone drafts no fewer tokens than other slots would",
    ),
    Mutation(
        "specjax.decode.adaptive_k.constant_k",
        "best[_PRIOR_ACCEPTED * _NUM_RATES // _PRIOR_TESTED]",
        "best[0]",
        adaptive_k("test_k_is_settled_if_no_rate_that_requests_come_to_changes_it"),
        "an engine has no drafter, as none is worth it where no draft is accepted",
    ),
    Mutation(
        "specjax.decode.adaptive_k.KPolicy.budget",
        "jnp.minimum(num_tokens, jnp.argmax(total).astype(jnp.int32))",
        "jnp.argmax(total).astype(jnp.int32)",
        adaptive_k("test_no_request_drafts_past_the_end_that_it_may_have"),
        "a request drafts past the end that it may have",
    ),
)
