"""Wrong versions of an engine that a thread steps, and of the seeds and ranges of its requests."""

from ..mutation import Mutation
from .tests import submissions, threads

_ENGINE = "specjax.engine."
_LEAVES = "test_two_thousand_requests_whose_readers_leave_anyhow_leave_nothing"
_FIFTY = "test_fifty_clients_in_threads_and_two_event_loops_get_the_texts_of_an_engine_that_is_run"
_RAISES = "test_a_step_that_raises_ends_all_requests_and_every_later_call_says_why"
_RANGE = "test_a_number_out_of_its_range_is_refused_in_a_sentence_and_the_ends_are_taken"

MUTATIONS = (
    Mutation(
        f"{_ENGINE}async_engine._StepThread._obey_next",
        "if command.is_closed:",
        "if False:",
        threads("test_a_reader_that_leaves_aborts_its_request_alone[close]"),
        "a request goes on whose reader left",
    ),
    Mutation(
        f"{_ENGINE}async_engine._StepThread._publish",
        "now >= cursor.deadline",
        "now > cursor.deadline",
        threads("test_a_request_ends_when_its_timeout_is_over_in_a_slot_and_in_the_queue"),
        "a timeout is a step too long",
    ),
    Mutation(
        f"{_ENGINE}async_engine._StepThread._obey_next",
        "if not command.is_followed:",
        "if not command.is_closed:",
        threads(_LEAVES),
        "a request is not counted whose reader left at once",
    ),
    Mutation(
        f"{_ENGINE}async_engine._StepThread.run",
        "self._scheduler.fail(error)",
        "pass",
        threads(_RAISES),
        "an engine whose step raised is closed as if it were asked to",
    ),
    Mutation(
        f"{_ENGINE}queue.WaitingQueue.check_open",
        "from self.cause",
        "",
        threads(_RAISES),
        "a broken engine keeps its first error to itself",
    ),
    Mutation(
        f"{_ENGINE}queue.WaitingQueue.check_room",
        "if self.is_draining:",
        "if False:",
        threads("test_an_engine_that_drains_takes_nothing_and_finishes_what_it_has"),
        "an engine that drains takes requests",
    ),
    Mutation(
        f"{_ENGINE}request.Request.usage",
        "num_drafted - num_accepted",
        "num_drafted",
        threads(_FIFTY),
        "accepted tokens count as rejected, too",
    ),
    Mutation(
        f"{_ENGINE}request_stream.Cursor.take",
        "self._num_characters += len(chunk.text)",
        "pass",
        threads(_FIFTY),
        "a reader gets a text again and again",
    ),
    Mutation(
        f"{_ENGINE}request_stream.RequestStream.__del__",
        "self.close()",
        "pass",
        threads("test_a_reader_that_leaves_aborts_its_request_alone[drop]"),
        "a request goes on that nobody can read",
    ),
    Mutation(
        f"{_ENGINE}submission.key_of_seed",
        "number >> 32",
        "0",
        submissions("test_all_64_bits_of_a_seed_are_in_its_key"),
        "seeds that differ in their high bits make one key",
    ),
    Mutation(
        f"{_ENGINE}submission._check_range",
        "value <= 0",
        "value < 0",
        submissions(f"{_RANGE}[repetition_penalty-inside3-outside3-a finite number > 0]"),
        "a repetition penalty of 0 is taken",
    ),
)
