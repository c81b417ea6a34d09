"""A grammar of five tokens that is small enough to enumerate, and what follows it, in float64.

Imports nothing that it judges: tokens are allowed by a table of Python, state by state.
"""

import numpy as np
import processed

V = 5
# In each state the tokens that may follow, and where they lead. No state allows what another does.
FOLLOWS = (
    {0: 0, 1: 1, 3: 2},
    {2: 0, 1: 1, 4: 3},
    {0: 1, 4: 2, 2: 3},
    {3: 0, 2: 3},
)


def tables(vocab_size=V):
    """next_states, token_classes and allowed of `specjax.Grammar`; tokens 1 and 3 swap classes.

    Of fewer tokens, where the last are left out; each state still allows some.
    """
    classes = np.array([0, 3, 2, 1, 4], np.int32)
    next_states = np.repeat(np.arange(len(FOLLOWS), dtype=np.int32)[:, None], V, axis=1)
    allowed = np.zeros((len(FOLLOWS), V), bool)
    for state, follows in enumerate(FOLLOWS):
        for token, after in follows.items():
            next_states[state, classes[token]] = after
            allowed[state, token] = True
    return next_states, classes[:vocab_size], processed.pack(allowed[:, :vocab_size])


def state_after(state, tokens):
    """The state after some tokens; one that is not allowed leaves it, and -1 is no grammar."""
    for token in tokens:
        state = state if state < 0 else FOLLOWS[state].get(token, state)
    return state


def allowed_after(state, tokens):
    """bool[V]."""
    state = state_after(state, tokens)
    return np.array([state < 0 or token in FOLLOWS[state] for token in range(V)])


def joint_probs(table, prompt, num_tokens, state, temperature=1.0):
    """Probability of every continuation under the grammar: f64[V, ..., V], an axis per token."""
    past = [0, *prompt]
    row = np.float64(np.float32(table[past[-2], past[-1]])) / temperature
    row = np.where(allowed_after(state, []), np.exp(row - row.max()), 0.0)
    row /= row.sum()
    if num_tokens == 1:
        return row
    later = [
        joint_probs(table, [*prompt, v], num_tokens - 1, state_after(state, [v]), temperature)
        if row[v]
        else np.zeros((V,) * (num_tokens - 1))
        for v in range(V)
    ]
    return np.stack([chance * joint for chance, joint in zip(row, later, strict=True)])


class Matcher:
    """A matcher for `RowMasks` that walks the automaton."""

    def __init__(self, state):
        self.states = [state]

    def compute_bitmask(self):
        return processed.pack(allowed_after(self.states[-1], [])).tobytes()

    def try_consume_tokens(self, tokens):
        for i, token in enumerate(tokens):
            if token not in FOLLOWS[self.states[-1]]:
                return i
            self.states.append(state_after(self.states[-1], [token]))
        return len(tokens)

    def rollback(self, num_tokens):
        del self.states[len(self.states) - num_tokens :]
        return True
