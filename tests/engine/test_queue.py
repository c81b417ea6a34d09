"""The queue of an engine: its bound holds, and a submission does not look at those before it."""

import collections
import queue

import pytest

from specjax.engine.queue import WaitingQueue


class Request:
    """A request that counts how often it is asked whether it has ended."""

    def __init__(self, reads):
        self._reads, self.ended = reads, None

    @property
    def finish_reason(self):
        self._reads["all"] += 1
        return self.ended


class Entry:
    def __init__(self, *requests, turn=0):
        self.waiting, self.turn = collections.deque(requests), turn


def test_ten_thousand_submissions_look_at_no_request_that_waits():
    reads, waiting = collections.Counter(), WaitingQueue(10_000)
    for _ in range(10_000):
        # As `Engine.submit`: before it makes the request, and when it puts it in.
        waiting.check_room(1)
        waiting.put(Entry(Request(reads)))
    assert waiting.has_waiting()
    # It is known to wait once the first has not ended.
    assert reads["all"] == 1
    with pytest.raises(queue.Full, match="10000 requests wait, and 1 more"):
        waiting.check_room(1)
    for _ in range(10_000):
        waiting.pop()
    assert not waiting.has_waiting()
    assert reads["all"] < 40_000


def test_the_bound_holds_whenever_requests_end():
    reads, waiting = collections.Counter(), WaitingQueue(4)
    requests = [Request(reads) for _ in range(8)]

    def num_more():
        """How many requests are let in, one at a time, as far as the queue says."""
        return max(n for n in range(6) if n == 0 or has_room(n))

    def has_room(count):
        try:
            waiting.check_room(count)
        except queue.Full:
            return False
        return True

    waiting.put(Entry(*requests[:3]))
    waiting.put(Entry(requests[3]))
    assert num_more() == 0
    requests[0].ended = requests[3].ended = "aborted"
    assert num_more() == 2
    # Requests that are counted as ended free no second place when they leave the queue.
    assert waiting.pop() is requests[0]
    assert num_more() == 2
    waiting.drop_ended()
    assert num_more() == 2
    waiting.put_first(Entry(requests[4]))
    assert num_more() == 1
    requests[4].ended = "aborted"
    # One that ended without a count since frees its place once.
    assert waiting.pop() is requests[4]
    assert num_more() == 2
    assert waiting.pop() is requests[1]
    assert num_more() == 3
    assert [one for one in requests if one in waiting.waiting()] == [requests[2]]


def test_the_first_prompt_of_a_body_goes_before_the_later_ones_of_earlier_bodies():
    waiting = WaitingQueue(100)

    def put(name, size=1):
        for i in range(size):
            waiting.put(Entry(f"{name}{i}", turn=i))

    put("a", 4)
    assert [entry.waiting[0] for entry in waiting.first(3)] == ["a0", "a1", "a2"]
    put("b", 3)
    for name in "cdef":
        put(name)
    waiting.put_first(Entry("parked"))
    names = [entry.waiting[0] for entry in waiting.first(100)]
    # Prompts that are being read stay first, and prompt i waits for at most i later bodies.
    assert " ".join(names) == "parked a0 a1 a2 b0 b1 c0 a3 b2 d0 e0 f0"
