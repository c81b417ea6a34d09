"""An automaton of bytes lifted to tokens: a token moves like the sequence of its bytes.

    move(token) = {s: next(s, bytes(token)) for each state s where that exists}

Tokens with equal moves form a class, and a vocabulary has few moves. For example, any token of five
plain letters extends a string by five characters. So no table of states and tokens is ever held,
and most time goes into the arrays of `Grammar`.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from specjax.contrib.grammars.byte_automaton import ByteAutomaton
from specjax.processing.grammar import Grammar

_BITS_PER_WORD = 32
_MAX_BYTES = 2**29
_MAX_STATES = 65536


class _Move(NamedTuple):
    """A token's move from each of `sources` i32[N], in order, to one of `targets` i32[N]."""

    sources: np.ndarray
    targets: np.ndarray


class _Moves:
    """Distinct moves, numbered in the order in which they came."""

    def __init__(self, moves: Iterable[_Move] = ()) -> None:
        self.distinct: list[_Move] = []
        self._numbers: dict[bytes, int] = {}
        self.numbers = np.array([self.add(move) for move in moves], np.int32)

    def add(self, move: _Move) -> int:
        """Returns the number of a move."""
        key = move.sources.tobytes() + move.targets.tobytes()
        number = self._numbers.setdefault(key, len(self.distinct))
        if number == len(self.distinct):
            self.distinct.append(move)
        return number


def max_states(vocab_size: int) -> int:
    """Returns the maximum number of states: masks of at most 512 MiB, at most 65536 states."""
    return min(_MAX_STATES, _MAX_BYTES // (4 * max(1, _num_words(vocab_size))))


def token_automaton(
    automaton: ByteAutomaton, vocabulary: Sequence[bytes], eos_token_ids: int | Iterable[int]
) -> Grammar:
    """Returns the grammar of texts that the automaton accepts, cut into tokens in any way.

    A token is allowed if its bytes lead to a state from which tokens can complete a text. An
    end-of-sequence token is allowed where a text may end, and after it only another.

    Args:
      automaton: of bytes.
      vocabulary: the bytes of each of the V tokens; a token without bytes is never allowed.
      eos_token_ids: tokens that end a text, whatever their bytes are.

    Returns:
      `Grammar` of NumPy arrays, which begins in state 0.

    Raises:
      ValueError: if the tokens cannot complete any text, there is no end-of-sequence token, or
        next_states takes more than 512 MiB.
    """
    eos = sorted({eos_token_ids} if isinstance(eos_token_ids, int) else set(eos_token_ids))
    if not eos or eos[0] < 0 or eos[-1] >= len(vocabulary):
        raise ValueError(
            f"eos_token_ids is {eos}; it needs tokens of the vocabulary, in [0, {len(vocabulary)})."
        )
    moves, numbers = _moves_of_tokens(automaton.next_states, vocabulary)
    # One more state: the text has ended, by an end-of-sequence token.
    end = len(automaton.accepts)
    may_end = np.append(np.flatnonzero(automaton.accepts), end).astype(np.int32)
    moves.append(_Move(may_end, np.full_like(may_end, end)))
    numbers[eos] = len(moves) - 1
    distinct, of_token = np.unique(numbers, return_inverse=True)
    moves, num_states = _keep_complete([moves[i] for i in distinct], end)
    numbered = _Moves(moves)
    merged, classes = numbered.distinct, numbered.numbers[of_token.reshape(-1)]
    if 4 * num_states * len(merged) > _MAX_BYTES:
        raise ValueError(
            f"the grammar has {num_states} states and {len(merged)} classes of tokens, whose table "
            f"takes more than {_MAX_BYTES >> 20} MiB; it needs smaller bounds or fewer values."
        )
    next_states = np.repeat(np.arange(num_states, dtype=np.int32)[:, None], len(merged), axis=1)
    follows = np.zeros((num_states, len(merged) + 1), bool)  # the last is the class of no token
    for i, move in enumerate(merged):
        next_states[move.sources, i] = move.targets
        follows[move.sources, i] = True
    return Grammar(next_states, classes, _masks(follows, classes))


def _moves_of_tokens(
    table: np.ndarray, vocabulary: Sequence[bytes]
) -> tuple[list[_Move], np.ndarray]:
    """Returns the moves of all prefixes of tokens, and the index of each token's move, i32[V].

    The loop reads byte i of all tokens in one pass, and extends each distinct move by each distinct
    byte once.
    """
    states = np.arange(len(table), dtype=np.int32)
    nowhere = _Move(states[:0], states[:0])
    moves, after = _Moves([nowhere, _Move(states, states)]), {}
    classes = _Moves(_Move(states, column) for column in table.T).numbers
    lengths = np.array(list(map(len, vocabulary)))
    text = classes[np.frombuffer(b"".join(vocabulary), np.uint8)]
    first = np.cumsum(lengths) - lengths
    column = np.unique(classes, return_index=True)[1]
    numbers = np.minimum(lengths, 1).astype(np.int32)
    reading = np.flatnonzero(numbers)
    for i in range(int(lengths.max())):
        reading = reading[(lengths[reading] > i) & (numbers[reading] > 0)]
        steps = numbers[reading].astype(np.int64) * 256 + text[first[reading] + i]
        distinct, places = np.unique(steps, return_inverse=True)
        for step in distinct.tolist():
            if step not in after:
                sources, targets = moves.distinct[step // 256]
                targets = table[targets, column[step % 256]]
                after[step] = moves.add(_Move(sources[targets >= 0], targets[targets >= 0]))
        numbers[reading] = np.array([after[step] for step in distinct.tolist()], np.int32)[places]
    return moves.distinct, numbers


def _keep_complete(moves: Sequence[_Move], end: int) -> tuple[list[_Move], int]:
    """Returns the moves between states on the way from the first to the end, and their number."""
    sources, targets = (np.concatenate(x) for x in zip(*moves, strict=True))
    edges = np.unique(sources.astype(np.int64) * (end + 1) + targets)
    sources, targets = edges // (end + 1), edges % (end + 1)
    completes = _reached(targets, sources, end, end + 1)
    if not completes[0]:
        raise ValueError("the tokens of the vocabulary complete no text of the grammar.")
    inside = completes[targets]
    kept = completes & _reached(sources[inside], targets[inside], 0, end + 1)
    numbers = np.where(kept, np.cumsum(kept) - 1, -1).astype(np.int32)
    kept_moves = []
    for move in moves:
        sources, targets = numbers[move.sources], numbers[move.targets]
        is_kept = (sources >= 0) & (targets >= 0)
        kept_moves.append(_Move(sources[is_kept], targets[is_kept]))
    return kept_moves, int(kept.sum())


def _reached(sources: np.ndarray, targets: np.ndarray, first: int, num_states: int) -> np.ndarray:
    """Returns the states to which edges lead from the first one, bool[num_states]."""
    order = np.argsort(sources, kind="stable")
    targets = targets[order]
    begins = np.searchsorted(sources[order], np.arange(num_states + 1))
    reached, waiting = np.zeros(num_states, bool), [first]
    reached[first] = True
    while waiting:
        state = waiting.pop()
        after = targets[begins[state] : begins[state + 1]]
        after = after[~reached[after]]
        reached[after] = True
        waiting += after.tolist()
    return reached


def _masks(follows: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Returns the tokens of the classes that follow each state, u32[Q, ceil(V / 32)].

    Args:
      follows: bool[Q, C + 1]; no token has the last class.
      classes: i32[V].
    """
    num_states, num_classes = follows.shape
    num_words = _num_words(len(classes))
    padded = np.full(num_words * _BITS_PER_WORD, num_classes - 1, np.int32)
    padded[: len(classes)] = classes
    masks = np.empty((num_states, num_words), np.uint32)
    known: dict[bytes, int] = {}  # far from a bound, most states have equal sets of next tokens
    for state, row in enumerate(follows):
        alike = known.setdefault(np.packbits(row).tobytes(), state)
        if alike == state:
            masks[state] = np.packbits(row[padded], bitorder="little").view("<u4")
        else:
            masks[state] = masks[alike]
    return masks


def _num_words(vocab_size: int) -> int:
    return -(-vocab_size // _BITS_PER_WORD)
