"""Prompts that one program reads together: the batch of their rows, and which tokens come next.

    one piece of each    on a CPU, where N prompts wait: the weights come from memory once for all
    P pieces of any      on a GPU: a chunk without padding, whose program has one shape

`row`, `place` and `read` as in `queue`.
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
    """Prompts that are read together: N places, each with the row of one prompt.

    Args:
      programs: of the engine. If their `batch` is None, no prompt is read here.
    """

    def __init__(self, programs: Programs) -> None:
        # The prompt in each place; a place without one is free.
        self._groups: dict[int, PromptGroup] = {}
        # The N rows as one `PromptRow`, and an empty row, a copy of which is the first row of a
        # prompt in a place. Pieces need no copy, as `_read_pieces` explains.
        self._rows = self._empty_row = None
        if programs.batch is not None:
            new_row = functools.partial(programs.new_row, max_length=programs.row_lengths[0])
            self._rows = new_row(size=programs.batch.num_rows)
            self._empty_row = None if programs.batch.num_pieces else new_row()

    def read(
        self,
        programs: Programs,
        unread: Sequence[QueueEntry],
        max_chunks: float,
        is_urgent: bool,
    ) -> int:
        """Reads the next tokens of several prompts by one program; returns its cost in chunks.

            cost = ceil(N * piece_size / chunk_size)        1 if prompts are read in pieces

        A program with one piece of each prompt runs if the first entry fits the batch, and if there
        is a prompt for each of the N places. A program with P pieces of any prompts runs if all P
        can be filled, or if the reading is urgent and the first entry fits.

        Args:
          programs: of the engine.
          unread: the entries to read, the first of the queue first.
          max_chunks: the greatest cost of all reads until the first entry is read, for which an
            empty slot waits. Infinity if no slot is empty.
          is_urgent: whether a slot is empty, or fewer than two prompts are ready.

        Returns:
          The cost; 0 if nothing was read.
        """
        if programs.batch is None:
            return 0
        num_rows, piece_size, num_pieces = programs.batch
        # Pieces of later prompts may be read before an entry that is read by itself, if that can
        # wait.
        is_alone = not _fits_batch(unread[0], programs)
        if is_alone and (is_urgent or not num_pieces):
            return 0
        if num_pieces:
            return self._read_pieces(programs, unread, needs_all=not is_urgent)
        cost = -(-num_rows * piece_size // programs.chunk_size)
        num_reads = -(-unread[0].unread.size // piece_size)
        if num_reads * cost > max_chunks or not self._fill(programs, unread):
            return 0
        groups = [self._groups[index] for index in range(num_rows)]
        chunks = [group.next_chunk(piece_size) for group in groups]
        token_ids, positions = map(np.concatenate, zip(*chunks, strict=True))
        self._rows = programs.prefill_batch(self._rows, token_ids, positions)
        for group in groups:
            group.num_read += piece_size
        for group in groups:
            if not group.unread.size:
                self.detach_group(programs, group)
        return cost

    def _read_pieces(
        self, programs: Programs, unread: Sequence[QueueEntry], needs_all: bool
    ) -> int:
        """Reads the next pieces of prompts, in the order of the queue; returns a cost of 1 chunk.

        With `needs_all`, fewer than P pieces are not read, and the cost is 0.
        """
        assert programs.batch is not None
        _, piece_size, num_pieces = programs.batch
        token_ids, positions = empty_chunk(num_pieces, piece_size)
        rows, start, sizes = np.zeros(num_pieces, np.int32), 0, []
        matched = self._match_places(programs, unread)
        num_unread = sum(-(-group.unread.size // piece_size) for _, group in matched)
        if needs_all and num_unread < num_pieces:
            return 0
        for index, group in matched:
            # An earlier prompt's keys in this place lie at positions that this one has not reached.
            # Nothing attends to them, so no empty row is copied here.
            group.place, self._groups[index] = np.int32(index), group
            chunk = group.unread[: (num_pieces - start) * piece_size]
            end = start + -(-chunk.size // piece_size)
            token_ids[start:end].reshape(-1)[: chunk.size] = chunk
            new_positions = group.num_read + np.arange(chunk.size)
            positions[start:end].reshape(-1)[: chunk.size] = new_positions
            rows[start:end], start = index, end
            sizes.append(chunk.size)
        self._rows = programs.prefill_batch(self._rows, token_ids, positions, rows)
        # Not before the program has taken them: it may fail, and is then called again.
        for (_, group), num_tokens in zip(matched, sizes, strict=True):
            group.num_read += num_tokens
        return 1

    def _match_places(
        self, programs: Programs, unread: Sequence[QueueEntry]
    ) -> list[tuple[int, PromptGroup]]:
        """Returns unread prompts in the order of the queue, each with its place or a free one.

        Prompts that do not fit are left out, and so are those for which no place is free.
        """
        assert programs.batch is not None
        places = {group: index for index, group in self._groups.items()}
        free_places = [i for i in range(programs.batch.num_rows) if i not in self._groups]
        groups = [entry for entry in unread if _fits_batch(entry, programs)]
        new_groups = [group for group in groups if group not in places]
        places |= dict(zip(new_groups, free_places, strict=False))
        return [(places[group], group) for group in groups if group in places]

    def _fill(self, programs: Programs, unread: Sequence[QueueEntry]) -> bool:
        """Puts the rows of unread prompts into all free places; returns whether all are filled.

        If there are too few prompts, no row is put anywhere.
        """
        assert programs.batch is not None
        matched = dict(self._match_places(programs, unread))
        if len(self._groups | matched) < programs.batch.num_rows:
            return False
        for index, group in matched.items():
            if index in self._groups:
                continue
            row = self._empty_row if group.row is None else group.row
            self._rows = programs.put_row(self._rows, row, np.int32(index))
            group.row, group.place = None, np.int32(index)
            self._groups[index] = group
        return True

    def admit(
        self, programs: Programs, slots: DecodeState, entry: QueueEntry, slot: int
    ) -> DecodeState:
        """Returns the slots with the first waiting request of an entry in one of them.

        If the row is in this batch, its place becomes free. The row is copied out first if more
        requests of the prompt wait, or if the batch reads no pieces.
        """
        reads_pieces = programs.batch is not None and programs.batch.num_pieces > 0
        if entry.place is None or len(entry.waiting) > 1 or not reads_pieces:
            self.detach_group(programs, entry)
            return entry.admit(programs, slots, slot)
        # `entry.admit` gives the program all rows, and the place of one.
        entry.row = self._rows
        try:
            slots = entry.admit(programs, slots, slot)
        finally:
            entry.row = None
        del self._groups[int(entry.place)]
        return slots

    def detach_group(self, programs: Programs, entry: QueueEntry) -> None:
        """Gives an entry its row back and frees its place; does nothing for other entries.

        The entry's unread tokens are then read into its own row.
        """
        for index, group in self._groups.items():
            if group is entry:
                row = programs.take_row(self._rows, np.int32(index))
                self._groups.pop(index).attach_row(row, programs.row_lengths[0])
                return

    def drop_ended(self) -> None:
        """Frees the places of prompts without a waiting request.

        `WaitingQueue.drop_ended` comes first: it takes ended requests out of `waiting`.
        """
        self._groups = {i: group for i, group in self._groups.items() if group.waiting}

    @property
    def arrays(self) -> object:
        """The batch's device arrays, a pytree; the engine deletes them when it closes."""
        return self._rows, self._empty_row


def _fits_batch(entry: QueueEntry, programs: Programs) -> TypeGuard[PromptGroup]:
    """Returns whether an entry is a prompt with unread tokens that fits a row of the batch."""
    is_unread = isinstance(entry, PromptGroup) and entry.unread.size > 0
    return is_unread and entry.token_ids.size - 1 <= programs.row_lengths[0]
