"""The caches of one text, which a later prompt with the same beginning continues.

    kept tokens, prompt -> the tokens that both begin with -> caches that hold them

A cache that is indexed by position goes back to any earlier token: later entries are overwritten.
Other arrays, such as the last hidden state of an EAGLE-3 head, hold one token alone. They are
copied after each prompt and each text, and go back to these.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specjax.decode.drafters import Models, reads_chunks
from specjax.decode.state import DecodeState
from specjax.engine.slots import PromptCaches, grow_caches


class PrefixCache:
    """The caches of one text of one request.

    Args:
      models: the target, and a drafter or None.

    Raises:
      ValueError: if the target's cache cannot go back to an earlier token.
    """

    def __init__(self, models: Models) -> None:
        of_target, self._is_unindexed = _unindexed_leaves(models)
        if any(of_target):
            raise ValueError(
                "the target's cache has an array that does not grow with max_length, such as a "
                "recurrent state of the last token alone; it cannot go back to an earlier token, "
                "which the next turn of a conversation needs."
            )
        self._models = models
        # Tokens that both caches hold.
        self._token_ids: list[int] = []
        self._caches: PromptCaches | None = None
        # Numbers of tokens, and the drafter's arrays of one token after so many.
        self._marks: dict[int, list[np.ndarray]] = {}

    def mark(self, state: DecodeState) -> None:
        """Notes a state that has read a prompt: the drafter can go back to it."""
        self._mark(state.drafter_state, int(state.lengths[0]) - 1)

    def _mark(self, drafter_state: Any, num_read: int) -> None:
        if any(self._is_unindexed):
            leaves = zip(jax.tree.leaves(drafter_state), self._is_unindexed, strict=True)
            self._marks[num_read] = [np.asarray(x) for x, is_unindexed in leaves if is_unindexed]

    def keep(self, state: DecodeState) -> None:
        """Keeps the caches of a state between two steps."""
        num_read = _num_read(self._models, state)
        self._token_ids = np.asarray(state.token_ids[0, :num_read]).tolist()
        self._caches = PromptCaches(state.target_cache, state.drafter_state)
        self._mark(state.drafter_state, num_read)

    def take(self, prompt_ids: Sequence[int], max_length: int) -> tuple[int, PromptCaches] | None:
        """Returns how many tokens of a prompt are kept, and caches with room for `max_length`.

        The caches are kept no longer, until `keep` is called.

        Args:
          prompt_ids: of which the last has to be read, whatever is kept.
          max_length: not less than before.

        Returns:
          The number, at least 1, and the caches; None if no token is kept.
        """
        caches, self._caches = self._caches, None
        num_same = _num_equal(self._token_ids, prompt_ids[:-1])
        self._token_ids = []
        if any(self._is_unindexed):
            num_same = max((n for n in self._marks if n <= num_same), default=0)
            self._marks = {n: leaves for n, leaves in self._marks.items() if n <= num_same}
        if caches is None or num_same < 1:
            return None
        state = self._restore(caches.drafter_state, num_same)
        caches = caches._replace(drafter_state=state)
        return num_same, grow_caches(self._models, caches, max_length=max_length)

    def _restore(self, drafter_state: Any, num_read: int) -> Any:
        """Returns the drafter's state with its arrays of one token as they were."""
        if not any(self._is_unindexed):
            return drafter_state
        leaves, structure = jax.tree.flatten(drafter_state)
        marked = iter(self._marks[num_read])
        pairs = zip(leaves, self._is_unindexed, strict=True)
        restored = [
            jax.device_put(next(marked), x.sharding) if is_unindexed else x
            for x, is_unindexed in pairs
        ]
        return jax.tree.unflatten(structure, restored)


def _num_equal(some: Sequence[int], others: Sequence[int]) -> int:
    """Returns the number of tokens with which both begin."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(some), len(others)))


def _unindexed_leaves(models: Models) -> tuple[list[bool], list[bool]]:
    """Returns for each leaf of both models' caches whether it does not grow with their length."""
    short, long = (
        jax.eval_shape(functools.partial(models.init_caches, 1, length)) for length in (16, 32)
    )
    target, drafter = (
        [x.shape == y.shape for x, y in zip(*map(jax.tree.leaves, pair), strict=True)]
        for pair in zip(short, long, strict=True)
    )
    return target, drafter


def _num_read(models: Models, state: DecodeState) -> int:
    """Returns how many committed tokens both caches hold, between two steps."""
    # Nothing has read the last token.
    num_read, drafter = int(state.lengths[0]) - 1, models.drafter
    if not reads_chunks(state.drafter_state) or (drafter and drafter.reads_features):
        return num_read
    return min(num_read, int(state.k_policy.num_read(state.lengths)[0]))
