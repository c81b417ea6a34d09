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


def put(waiting, name, *priorities):
    for i in priorities:
        waiting.put(Entry(f"{name}{i}", turn=i))


def names(waiting, number):
    """Names of the first entries, which are being read from now on."""
    return " ".join(entry.waiting[0] for entry in waiting.first(number))


def test_prompt_i_of_a_body_lets_i_later_bodies_go_first():
    waiting = WaitingQueue(100)
    put(waiting, "a", 0, 1, 2)
    for name in "bcd":
        put(waiting, name, 0, 1)
    assert names(waiting, 100) == "a0 b0 a1 c0 a2 b1 d0 c1 d1"


def test_prompts_that_are_being_read_stay_first():
    waiting = WaitingQueue(100)
    put(waiting, "a", 0, 1, 2, 3)
    assert names(waiting, 3) == "a0 a1 a2"
    put(waiting, "b", 0, 1, 2)
    for name in "cdef":
        put(waiting, name, 0)
    waiting.put_first(Entry("parked"))
    assert names(waiting, 100) == "parked a0 a1 a2 b0 a3 c0 b1 d0 b2 e0 f0"


def test_no_entry_waits_forever_although_others_come_with_lower_priorities():
    waiting = WaitingQueue(100)
    request, served = Request(collections.Counter()), []
    waiting.put(Entry(request, turn=3))
    for _ in range(4):
        waiting.put(Entry(Request(collections.Counter()), turn=1))
        waiting.first(1)
        served.append(waiting.pop())
    assert served.index(request) == 2
