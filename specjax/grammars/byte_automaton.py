"""Deterministic automata of bytes: a pattern's, by subsets of Thompson's nondeterministic one."""

from typing import NamedTuple

import numpy as np

from specjax.grammars.byte_pattern import Bytes, Choice, Pattern, Sequence

__all__ = ["ByteAutomaton", "byte_automaton"]

_MOST_STATES = 65536
# Of the nondeterministic automaton: a character of a JSON string has 70, and becomes 23.
_MOST_PARTS = 64 * _MOST_STATES


class ByteAutomaton(NamedTuple):
    """A deterministic automaton of bytes, which begins in state 0.

    Attributes:
      next_states: i32[Q, 256], -1 where no text goes on.
      accepts: bool[Q], where a text may end.
    """

    next_states: np.ndarray
    accepts: np.ndarray


class _Edges:
    """States of a nondeterministic automaton: where each leads by a byte, and by none."""

    def __init__(self) -> None:
        self.by_none: list[list[int]] = []
        self.by_byte: list[tuple[Bytes, int] | None] = []
        # By a pattern's identity, as all live as long as the whole one, and the state after it.
        self._starts: dict[tuple[int, int], int] = {}

    def new_state(self) -> int:
        if len(self.by_none) >= _MOST_PARTS:
            raise _too_many_states()
        self.by_none.append([])
        self.by_byte.append(None)
        return len(self.by_none) - 1

    def add(self, pattern: Pattern, end: int) -> int:
        """Adds what a pattern matches before a state, and returns the state at its beginning.

        One pattern before one state is added once, wherever it stands: what follows the properties
        of an object, one or another of which may be absent, is shared by all of them.
        """
        known = self._starts.get((id(pattern), end))
        if known is None:
            known = self._starts[id(pattern), end] = self._add(pattern, end)
        return known

    def _add(self, pattern: Pattern, end: int) -> int:
        if isinstance(pattern, Bytes):
            start = self.new_state()
            self.by_byte[start] = (pattern, end)
            return start
        if isinstance(pattern, Sequence):
            for part in reversed(pattern.parts):
                end = self.add(part, end)
            return end
        if isinstance(pattern, Choice):
            start = self.new_state()
            self.by_none[start] += [self.add(option, end) for option in pattern.options]
            return start
        if pattern.most is None:
            loop = self.new_state()
            self.by_none[loop] += [end, self.add(pattern.part, loop)]
            end = loop
        else:
            for _ in range(pattern.most - pattern.least):
                start = self.new_state()
                self.by_none[start] += [end, self.add(pattern.part, end)]
                end = start
        for _ in range(pattern.least):
            end = self.add(pattern.part, end)
        return end

    def closure(self, states: list[int], end: int) -> frozenset[int]:
        """Returns the states reached from these by no byte: the end, and those that a byte leaves.

        Without the others, which decide nothing, more subsets are equal.
        """
        reachable, stack = set(states), list(states)
        while stack:
            for state in self.by_none[stack.pop()]:
                if state not in reachable:
                    reachable.add(state)
                    stack.append(state)
        return frozenset(x for x in reachable if x == end or self.by_byte[x] is not None)


def byte_automaton(pattern: Pattern) -> ByteAutomaton:
    """Returns the deterministic automaton of a pattern.

    Args:
      pattern: of the whole text.

    Raises:
      ValueError: if it has more than 65536 states.

    Example:
      >>> from specjax.grammars.byte_pattern import literal, optional
      >>> automaton = byte_automaton(optional(literal(b"a")))
      >>> automaton.next_states[:, 96:99].tolist(), automaton.accepts.tolist()
      ([[-1, 1, -1], [-1, -1, -1]], [True, True])
    """
    edges = _Edges()
    end = edges.new_state()
    start = edges.add(pattern, end)
    first = edges.closure([start], end)
    numbers, waiting, rows = {first: 0}, [first], []
    for subset in waiting:
        reached: dict[int, list[int]] = {}
        for state in subset:
            edge = edges.by_byte[state]
            if edge is not None:
                for value in edge[0].values:
                    reached.setdefault(value, []).append(edge[1])
        row = np.full(256, -1, np.int32)
        for value, states in reached.items():
            after = edges.closure(states, end)
            if after not in numbers:
                numbers[after] = len(waiting)
                waiting.append(after)
            row[value] = numbers[after]
        rows.append(row)
        if len(waiting) > _MOST_STATES:
            raise _too_many_states()
    return ByteAutomaton(np.stack(rows), np.array([end in subset for subset in waiting]))


def _too_many_states() -> ValueError:
    return ValueError(
        f"the pattern has more than {_MOST_STATES} states; it needs smaller bounds, such as "
        "maxLength and maxItems."
    )
