"""An automaton of bytes lifted to tokens: each token leads where its bytes do."""

from collections.abc import Iterable, Sequence

import numpy as np

from specjax.grammars.byte_automaton import ByteAutomaton
from specjax.processing.grammar import Grammar

__all__ = ["token_automaton"]

_BITS_PER_WORD = 32


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
      ValueError: if the tokens cannot complete any text, or there is no end-of-sequence token.
    """
    eos = sorted({eos_token_ids} if isinstance(eos_token_ids, int) else set(eos_token_ids))
    if not eos or eos[0] < 0 or eos[-1] >= len(vocabulary):
        raise ValueError(
            f"eos_token_ids is {eos}; it needs tokens of the vocabulary, in [0, {len(vocabulary)})."
        )
    reached = _follow_tokens(automaton, vocabulary)
    reached[:, eos] = -1
    reached = _drop_dead_ends(reached, automaton.accepts)
    if not (reached[0] >= 0).any() and not automaton.accepts[0]:
        raise ValueError("the tokens of the vocabulary complete no text of the grammar.")
    end = np.int32(len(reached))
    reached = np.concatenate([reached, np.full((1, len(vocabulary)), -1, np.int32)])
    may_end = np.append(automaton.accepts, True)
    reached[np.ix_(np.flatnonzero(may_end), np.array(eos))] = end
    reached = _drop_unreached(reached)
    own = np.arange(len(reached), dtype=np.int32)[:, None]
    next_states, classes = _merge_columns(np.where(reached < 0, own, reached))
    return Grammar(next_states, classes, _pack(reached >= 0))


def _follow_tokens(automaton: ByteAutomaton, vocabulary: Sequence[bytes]) -> np.ndarray:
    """Returns the state after each token i32[Q, V], -1 where its bytes lead nowhere."""
    longest = max(1, max(map(len, vocabulary)))
    padded = np.zeros((longest, len(vocabulary)), np.uint8)
    for token, text in enumerate(vocabulary):
        padded[: len(text), token] = np.frombuffer(text, np.uint8)
    lengths = np.array(list(map(len, vocabulary)))
    # Row -1 is that of no state.
    table = np.pad(automaton.next_states, ((0, 1), (0, 0)), constant_values=-1)
    reached = np.empty((len(automaton.accepts), len(vocabulary)), np.int32)
    for state, row in enumerate(reached):
        after = np.where(lengths > 0, table[state, padded[0]], -1)
        alive = np.flatnonzero(after >= 0)
        for i in range(1, longest):
            alive = alive[(after[alive] >= 0) & (lengths[alive] > i)]
            after[alive] = table[after[alive], padded[i, alive]]
        row[:] = after
    return reached


def _drop_dead_ends(reached: np.ndarray, accepts: np.ndarray) -> np.ndarray:
    """Returns -1 for tokens after which no tokens complete a text."""
    completes = accepts.copy()
    while True:
        leads = reached >= 0
        leads[leads] = completes[reached[leads]]
        more = completes | leads.any(axis=1)
        if (more == completes).all():
            return np.where(leads, reached, -1)
        completes = more


def _drop_unreached(reached: np.ndarray) -> np.ndarray:
    """Returns the states that some text reaches, numbered in their order."""
    reachable, waiting = {0}, [0]
    while waiting:
        following = set(np.unique(reached[waiting.pop()]).tolist()) - reachable - {-1}
        reachable |= following
        waiting += following
    kept = np.array(sorted(reachable))
    numbers = np.full(len(reached) + 1, -1, np.int32)
    numbers[kept] = np.arange(len(kept), dtype=np.int32)
    return numbers[reached[kept]]


def _merge_columns(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct columns i32[Q, C] of a table [Q, V], and which each is, i32[V]."""
    columns = np.ascontiguousarray(table.T)
    classes: dict[bytes, int] = {}
    numbers = [classes.setdefault(column.tobytes(), len(classes)) for column in columns]
    distinct = np.stack([np.frombuffer(column, np.int32) for column in classes], axis=1)
    return distinct, np.array(numbers, np.int32)


def _pack(allowed: np.ndarray) -> np.ndarray:
    """Returns bool [Q, V] as words u32[Q, ceil(V / 32)], the first token in the lowest bit."""
    missing = -allowed.shape[1] % _BITS_PER_WORD
    bits = np.pad(allowed, ((0, 0), (0, missing)))
    packed = np.packbits(bits, axis=1, bitorder="little")
    return packed.view("<u4").astype(np.uint32)
