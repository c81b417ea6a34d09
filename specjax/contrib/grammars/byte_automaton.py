"""Deterministic automata of bytes, by the subset construction from Thompson's automaton."""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from specjax.contrib.grammars.byte_pattern import Bytes, Choice, Members, Pattern, Repeat, Sequence

# Of the nondeterministic automaton: a character of a JSON string has 31, and becomes 14 states.
_PARTS_PER_STATE = 8


class ByteAutomaton(NamedTuple):
    """A deterministic automaton of bytes, which begins in state 0.

    Attributes:
      next_states: i32[Q, 256], -1 without a continuation.
      accepts: bool[Q], where a text may end.
    """

    next_states: np.ndarray
    accepts: np.ndarray


class _Edges:
    """States of a nondeterministic automaton, with an edge by a set of bytes, or empty edges.

    State 0 is the end of the text, and has no edge.
    """

    def __init__(self, max_states: int) -> None:
        self.values: list[frozenset[int] | None] = []  # None where no byte is read
        self.after: list[tuple[int, ...]] = []
        self._most_states = max_states
        # By a pattern's identity, as all live as long as the whole one, and the state after it.
        self._starts: dict[tuple[int, int], int] = {}
        self._closures: dict[int, tuple[int, ...]] = {}
        self._new_state(None, ())

    def check_size(self, num_parts: int) -> None:
        """Refuses a pattern with too many parts."""
        if num_parts > _PARTS_PER_STATE * self._most_states:
            raise ValueError(
                f"the pattern has more than {self._most_states} states; it needs smaller bounds, "
                "such as maxLength and maxItems, or fewer values and properties."
            )

    def _new_state(self, values: frozenset[int] | None, after: tuple[int, ...]) -> int:
        self.check_size(len(self.after) + 1)
        self.values.append(values)
        self.after.append(after)
        return len(self.after) - 1

    def add(self, pattern: Pattern, end: int) -> int:
        """Adds a pattern before the state `end`, and returns the state at its beginning.

        Memoized on (`pattern`, `end`), so three-byte and four-byte characters share the states of
        their last bytes.
        """
        known = self._starts.get((id(pattern), end))
        if known is None:
            known = self._starts[id(pattern), end] = self._add(pattern, end)
        return known

    def _add(self, pattern: Pattern, end: int) -> int:
        if isinstance(pattern, Bytes):
            return self._new_state(pattern.values, (end,))
        if isinstance(pattern, Sequence):
            for part in reversed(pattern.parts):
                end = self.add(part, end)
            return end
        if isinstance(pattern, Choice):
            return self._new_state(None, tuple(self.add(x, end) for x in pattern.options))
        if isinstance(pattern, Members):
            return self._add_members(pattern, end)
        return self._add_repeat(pattern, end)

    def _add_members(self, pattern: Members, end: int) -> int:
        # From the last member to the first: the states after no member, after a separator, and
        # after a member.
        after_none, after_separator, after_some, may_end = end, self._new_state(None, ()), end, True
        for member, required in zip(
            reversed(pattern.members), reversed(pattern.is_required), strict=True
        ):
            first = self.add(member, after_some)
            if required:
                after_none = after_separator = first
                may_end = False
            else:
                after_none = self._new_state(None, (first, after_none))
                after_separator = self._new_state(None, (first, after_separator))
            after_some = self.add(pattern.separator, after_separator)
            if may_end:
                after_some = self._new_state(None, (after_some, end))
        return after_none

    def _add_repeat(self, pattern: Repeat, end: int) -> int:
        part, least, last = pattern.part, pattern.least, end
        if pattern.most is None:
            end = self._new_state(None, ())
        num_before = len(self.after)
        first = self.add(part, end)
        # The first copy counts the others before they are made.
        num_copies = least if pattern.most is None else pattern.most
        self.check_size(num_before + (len(self.after) - num_before) * num_copies)
        if pattern.most is None:
            self.after[end] = (last, first)
        else:
            # Any optional copy may be the last: each start leads to two states, not to all later.
            for _ in range(pattern.most - least):
                end = self._new_state(None, (last, self.add(part, end)))
        for _ in range(least):
            end = self.add(part, end)
        return end

    def closure(self, states: Iterable[int]) -> tuple[int, ...]:
        """Returns the states reached by empty edges: the end, and those with an edge by a byte.

        Other states are left out, so that more subsets are equal.
        """
        closures = [self._closures.get(x) or self._closure(x) for x in states]
        return closures[0] if len(closures) == 1 else tuple(sorted(set().union(*closures)))

    def _closure(self, state: int) -> tuple[int, ...]:
        reachable, stack = {state}, [state]
        while stack:
            x = stack.pop()
            if self.values[x] is None:
                stack += set(self.after[x]) - reachable
                reachable.update(self.after[x])
        kept = (x for x in reachable if x == 0 or self.values[x] is not None)
        return self._closures.setdefault(state, tuple(sorted(kept)))


def byte_automaton(pattern: Pattern, max_states: int = 65536) -> ByteAutomaton:
    """Returns the deterministic automaton of a pattern.

    Args:
      pattern: of the whole text.
      max_states: maximum of Q.

    Raises:
      ValueError: if it has more states, or eight times as many parts. Copies of a repeated part are
        counted before they are made.

    Example:
      >>> from specjax.contrib.grammars.byte_pattern import literal, optional
      >>> automaton = byte_automaton(optional(literal(b"a")))
      >>> automaton.next_states[:, 96:99].tolist(), automaton.accepts.tolist()
      ([[-1, 1, -1], [-1, -1, -1]], [True, True])
    """
    edges = _Edges(max_states)
    first = edges.closure([edges.add(pattern, 0)])
    numbers, waiting, rows, num_parts = {first: 0}, [first], [], 0
    for subset in waiting:
        row = np.full(256, -1, np.int32)
        states = [x for x in subset if x]
        for values, members in _split_bytes(tuple(edges.values[x] for x in states)):
            after = edges.closure([edges.after[states[i]][0] for i in members])
            if after not in numbers:
                numbers[after] = len(waiting)
                waiting.append(after)
            row[values] = numbers[after]
        rows.append(row)
        num_parts += len(subset)
        edges.check_size(max(num_parts, _PARTS_PER_STATE * len(waiting)))
    return ByteAutomaton(np.stack(rows), np.array([0 in subset for subset in waiting]))


@functools.lru_cache(maxsize=1024)
def _split_bytes(sets: tuple[frozenset[int], ...]) -> list[tuple[np.ndarray, tuple[int, ...]]]:
    """Returns groups of bytes that occur in equal sets, each with the indices of those sets."""
    members: dict[int, list[int]] = {}
    for i, values in enumerate(sets):
        for value in values:
            members.setdefault(value, []).append(i)
    groups: dict[tuple[int, ...], list[int]] = {}
    for value in sorted(members):
        groups.setdefault(tuple(members[value]), []).append(value)
    return [(np.array(values), places) for places, values in groups.items()]
