"""Prompts that one program reads together: the batch of their caches, and which tokens come next.

    num_pieces = 0    one piece of each of N prompts, on a CPU: weights are loaded once for all
    num_pieces = P    P pieces of any of them, on a GPU: a chunk of one shape, without padding

A piece is up to `piece_size` successive tokens of one prompt. A prompt that does not fit, or waits
for others too long, is read by itself (`QueueEntry.read_chunk`). `caches`, `place` and `read` are
as in `queue`. The scheduler calls `read` and `admit`, and has one batch.
"""

import functools
from collections.abc import Sequence
from typing import TypeGuard

import numpy as np

from specjax.decode.state import DecodeState
from specjax.engine.programs import Programs, empty_chunk
from specjax.engine.queue import PromptGroup, QueueEntry

__all__ = ["PrefillBatch"]


class PrefillBatch:
    """Prompts that are read together: N places, each with the caches of one prompt.

    Args:
      programs: of the engine. If their `batch` is None, no prompt is read here.
    """

    def __init__(self, programs: Programs) -> None:
        # Place -> its prompt; other places are free.
        self._groups: dict[int, PromptGroup] = {}
        # The caches of all N prompts, stacked; and those of an empty prompt, which `_fill` copies
        # into a place before a prompt is read there. `_read_pieces` explains why pieces need none.
        self._caches = self._empty_caches = None
        if programs.batch is not None:
            empty = functools.partial(programs.new_caches, max_length=programs.cache_lengths[0])
            self._caches = empty(size=programs.batch.num_prompts)
            self._empty_caches = None if programs.batch.num_pieces else empty()

    def read(
        self,
        programs: Programs,
        unread: Sequence[QueueEntry],
        max_chunks: float,
        is_urgent: bool,
    ) -> int:
        """Reads the next tokens of several prompts by one program; returns its cost in chunks.

            cost = ceil(N * piece_size / chunk_size)        1 if num_pieces > 0

        One piece of each is read if the first entry fits the batch, and if there is a prompt for
        each of the N places. P pieces are read if all P can be filled, or if the reading is urgent
        and the first entry fits.

        Args:
          programs: of the engine.
          unread: the entries to read, in the order of the queue.
          max_chunks: the greatest cost of all calls until the first entry is read, for which an
            empty slot waits. Infinity if no slot is empty.
          is_urgent: whether a slot is empty, or fewer than two prompts are ready for one.

        Returns:
          The cost; 0 if nothing was read.
        """
        if programs.batch is None:
            return 0
        num_prompts, piece_size, num_pieces = programs.batch
        # An entry that does not fit is read by itself. While it can wait, pieces of later ones are
        # read.
        is_alone = not _fits_batch(unread[0], programs)
        if is_alone and (is_urgent or not num_pieces):
            return 0
        if num_pieces:
            return self._read_pieces(programs, unread, needs_all=not is_urgent)
        cost = -(-num_prompts * piece_size // programs.chunk_size)
        num_reads = -(-unread[0].unread.size // piece_size)
        if num_reads * cost > max_chunks or not self._fill(programs, unread):
            return 0
        groups = [self._groups[place] for place in range(num_prompts)]
        chunks = [group.next_chunk(piece_size) for group in groups]
        token_ids, positions = map(np.concatenate, zip(*chunks, strict=True))
        self._caches = programs.prefill_batch(self._caches, token_ids, positions)
        for group in groups:
            group.num_read += piece_size
        for group in groups:
            if not group.unread.size:
                self.detach_group(programs, group)
        return cost

    def _read_pieces(
        self, programs: Programs, unread: Sequence[QueueEntry], needs_all: bool
    ) -> int:
        """Reads the next P pieces in the order of the queue; returns the cost, 1 chunk.

        A prompt gets as many successive pieces as it has tokens for, then the next prompt. With
        `needs_all`, fewer than P pieces are not read, and the cost is 0.
        """
        assert programs.batch is not None
        _, piece_size, num_pieces = programs.batch
        token_ids, positions = empty_chunk(num_pieces, piece_size)
        places, start, sizes = np.zeros(num_pieces, np.int32), 0, []
        matched = self._match_places(programs, unread)
        num_unread = sum(-(-group.unread.size // piece_size) for _, group in matched)
        if needs_all and num_unread < num_pieces:
            return 0
        for place, group in matched:
            # The prompt that had this place before may have left keys at later positions. Nothing
            # attends to them before they are overwritten, so no empty caches are copied here.
            group.place, self._groups[place] = np.int32(place), group
            chunk = group.unread[: (num_pieces - start) * piece_size]
            end = start + -(-chunk.size // piece_size)
            token_ids[start:end].reshape(-1)[: chunk.size] = chunk
            new_positions = group.num_read + np.arange(chunk.size)
            positions[start:end].reshape(-1)[: chunk.size] = new_positions
            places[start:end], start = place, end
            sizes.append(chunk.size)
        self._caches = programs.prefill_batch(self._caches, token_ids, positions, places)
        # Not earlier: a program that failed is called again with these tokens.
        for (_, group), num_tokens in zip(matched, sizes, strict=True):
            group.num_read += num_tokens
        return 1

    def _match_places(
        self, programs: Programs, unread: Sequence[QueueEntry]
    ) -> list[tuple[int, PromptGroup]]:
        """Returns pairs of a place and an unread prompt, in the order of the queue.

        A prompt without a place gets a free one. Prompts that do not fit are left out, and so are
        those for which no place is free.
        """
        assert programs.batch is not None
        places = {group: place for place, group in self._groups.items()}
        free_places = [i for i in range(programs.batch.num_prompts) if i not in self._groups]
        groups = [entry for entry in unread if _fits_batch(entry, programs)]
        new_groups = [group for group in groups if group not in places]
        places |= dict(zip(new_groups, free_places, strict=False))
        return [(places[group], group) for group in groups if group in places]

    def _fill(self, programs: Programs, unread: Sequence[QueueEntry]) -> bool:
        """Puts unread prompts into all free places; returns whether each place has one.

        If there are too few prompts, none is put anywhere.
        """
        assert programs.batch is not None
        matched = dict(self._match_places(programs, unread))
        if len(self._groups | matched) < programs.batch.num_prompts:
            return False
        for place, group in matched.items():
            if place in self._groups:
                continue
            caches = self._empty_caches if group.caches is None else group.caches
            self._caches = programs.put_caches(self._caches, caches, np.int32(place))
            group.caches, group.place = None, np.int32(place)
            self._groups[place] = group
        return True

    def admit(
        self, programs: Programs, slots: DecodeState, entry: QueueEntry, slot: int
    ) -> DecodeState:
        """Returns the slots with the first waiting request of an entry in one of them.

        An entry with a place leaves it. The program takes its caches out of the batch, unless more
        requests of the prompt wait, for which they are copied first. Without pieces, `read` has
        detached each prompt that it read to the end.
        """
        reads_pieces = programs.batch is not None and programs.batch.num_pieces > 0
        if entry.place is None or len(entry.waiting) > 1 or not reads_pieces:
            self.detach_group(programs, entry)
            return entry.admit(programs, slots, slot)
        # `entry.admit` gives the program the caches of all N prompts, and the place of one.
        entry.caches = self._caches
        try:
            slots = entry.admit(programs, slots, slot)
        finally:
            entry.caches = None
        del self._groups[int(entry.place)]
        return slots

    def detach_group(self, programs: Programs, entry: QueueEntry) -> None:
        """Gives an entry caches of its own, a copy, and frees its place.

        Entries without a place stay as they are. Unread tokens are then read by `read_chunk`.
        """
        for place, group in self._groups.items():
            if group is entry:
                caches = programs.take_caches(self._caches, np.int32(place))
                self._groups.pop(place).attach_caches(caches, programs.cache_lengths[0])
                return

    def drop_ended(self) -> None:
        """Frees the places of prompts without a waiting request.

        The scheduler calls `WaitingQueue.drop_ended` first, which takes them out of `waiting`.
        """
        self._groups = {i: group for i, group in self._groups.items() if group.waiting}

    @property
    def arrays(self) -> object:
        """The batch's device arrays, a pytree; the engine deletes them when it closes."""
        return self._caches, self._empty_caches


def _fits_batch(entry: QueueEntry, programs: Programs) -> TypeGuard[PromptGroup]:
    """Returns whether an entry is a prompt with unread tokens that fits a place of the batch."""
    is_unread = isinstance(entry, PromptGroup) and entry.unread.size > 0
    return is_unread and entry.token_ids.size - 1 <= programs.cache_lengths[0]
