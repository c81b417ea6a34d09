"""Prompts that one program reads together: the batch of their caches, and which tokens come next.

    one each    a piece of each of N prompts, on a CPU: weights are loaded once for all
    packed      P pieces of any of N prompts, on a GPU: a chunk of one shape, without padding

A piece is up to `piece_size` successive tokens of one prompt. `BatchShape.packs_pieces` tells the
two kinds of batch apart. A prompt that does not fit, or waits for others too long, is read by
itself (`QueueEntry.read_chunk`).

    entry      a `PromptGroup`: what the queue holds for one prompt, with its requests
    caches     what the models keep of the tokens that they have read
    place      index of an entry among the N of the batch, which holds its caches meanwhile
    read       prefilled: a program has put the tokens into the caches

The scheduler owns one batch, and is its only caller.
"""

import functools
from collections.abc import Sequence
from typing import TypeGuard

import numpy as np

from specjax.decode.state import DecodeState
from specjax.engine.programs import Programs, empty_chunk
from specjax.engine.prompt_logprobs import run_chunk
from specjax.engine.queue import PromptGroup, QueueEntry


class PrefillBatch:
    """Prompts that are read together: N places, each with the caches of one prompt.

    Args:
      programs: of the engine. If their `batch` is None, no prompt is read here.
    """

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        # Place -> its entry; other places are free.
        self._entries: dict[int, PromptGroup] = {}
        # The caches of all N prompts, stacked; and those of an empty prompt, which `_fill` copies
        # into a place before a prompt is read there. `_read_packed` explains why it needs none.
        self._caches = self._empty_caches = None
        if programs.batch is not None:
            # The shortest length: a batch has one, and longer prompts are read by themselves.
            empty = functools.partial(programs.new_caches, max_length=programs.cache_lengths[0])
            self._caches = empty(size=programs.batch.num_prompts)
            self._empty_caches = None if programs.batch.packs_pieces else empty()

    def read(self, entries: Sequence[QueueEntry], max_chunks: float, is_urgent: bool) -> int:
        """Reads the next tokens of several prompts by one program; returns its cost in chunks.

            cost = ceil(N * piece_size / chunk_size)        1 if packed

        One each: a piece of each of N prompts is read if there is one for each place, and if the
        first entry fits the batch. All reads until the first entry is read to its end may cost at
        most `max_chunks`; otherwise nothing is read here.

        Packed: P pieces are read if all P can be filled, or if the reading is urgent and the first
        entry fits.

        Args:
          entries: the unread ones, at least one, in the order of the queue.
          max_chunks: how many chunks an empty slot waits for the first entry. Infinity if no slot
            is empty, as then no slot waits.
          is_urgent: whether a slot is empty, or fewer entries than the scheduler's `_MIN_READY`
            are ready for one.

        Returns:
          The cost; 0 if nothing was read.
        """
        batch = self._programs.batch
        if batch is None:
            return 0
        # An entry that does not fit is read by itself. While it can wait, pieces of later ones are
        # read.
        is_alone = not self._fits_batch(entries[0])
        if is_alone and (is_urgent or not batch.packs_pieces):
            return 0
        if batch.packs_pieces:
            return self._read_packed(entries, needs_all=not is_urgent)
        num_prompts, piece_size, _ = batch
        cost = -(-num_prompts * piece_size // self._programs.chunk_size)
        num_reads = -(-entries[0].unread.size // piece_size)
        if num_reads * cost > max_chunks or not self._fill(entries):
            return 0
        batch_entries = [self._entries[place] for place in range(num_prompts)]
        # Two of [1, piece_size] for each entry; together two of [N, piece_size].
        chunks = [entry.next_chunk(piece_size) for entry in batch_entries]
        chunk = tuple(map(np.concatenate, zip(*chunks, strict=True)))
        owners = [(entry.listing, slice(i, i + 1)) for i, entry in enumerate(batch_entries)]
        self._caches = run_chunk(self._programs, self._caches, chunk, owners)
        # A last piece counts whole, as in `QueueEntry.num_read`.
        for entry in batch_entries:
            entry.num_read += piece_size
        # A second loop: `detach` calls a program that may fail, and by then all are counted.
        for entry in batch_entries:
            if not entry.unread.size:
                self.detach(entry)
        return cost

    def _read_packed(self, entries: Sequence[QueueEntry], needs_all: bool) -> int:
        """Reads the next P pieces in the order of the queue; returns the cost, 1 chunk.

        An entry gets as many successive pieces as it has tokens for, then the next entry. With
        `needs_all`, fewer than P pieces are not read, and the cost is 0.

        In a packed batch an entry that fits is read only here, and `Programs.prefill_depth` is N.
        So each of `entries` that fits has a place, or gets one.
        """
        assert self._programs.batch is not None
        _, piece_size, num_pieces = self._programs.batch
        token_ids, positions = empty_chunk(num_pieces, piece_size)
        places = np.zeros(num_pieces, np.int32)
        matched = self._match_places(entries)
        num_unread = sum(-(-entry.unread.size // piece_size) for _, entry in matched)
        if needs_all and num_unread < num_pieces:
            return 0
        start, sizes, owners = 0, [], []
        for place, entry in matched:
            # The prompt that had this place before may have left keys at later positions. Nothing
            # attends to them before they are overwritten, so no empty caches are copied here.
            # Entries after the last piece get a place, and no tokens yet.
            entry.place = np.int32(place)
            self._entries[place] = entry
            unread = entry.unread[: (num_pieces - start) * piece_size]
            end = start + -(-unread.size // piece_size)
            token_ids[start:end].reshape(-1)[: unread.size] = unread
            new_positions = entry.num_read + np.arange(unread.size)
            positions[start:end].reshape(-1)[: unread.size] = new_positions
            places[start:end] = place
            owners.append((entry.listing, slice(start, end)))
            start = end
            sizes.append(unread.size)
        chunk = (token_ids, positions, places)
        self._caches = run_chunk(self._programs, self._caches, chunk, owners)
        # Not earlier: a program that failed is called again with these tokens.
        for (_, entry), num_tokens in zip(matched, sizes, strict=True):
            entry.num_read += num_tokens
        return 1

    def _match_places(self, entries: Sequence[QueueEntry]) -> list[tuple[int, PromptGroup]]:
        """Returns pairs of a place and an unread entry, in the order of the queue.

        An entry without a place gets a free one. Entries that do not fit are left out, and so are
        those for which no place is free.
        """
        assert self._programs.batch is not None
        places = {entry: place for place, entry in self._entries.items()}
        free_places = [i for i in range(self._programs.batch.num_prompts) if i not in self._entries]
        candidates = [entry for entry in entries if self._fits_batch(entry)]
        new_entries = [entry for entry in candidates if entry not in places]
        places |= dict(zip(new_entries, free_places, strict=False))
        return [(places[entry], entry) for entry in candidates if entry in places]

    def _fill(self, entries: Sequence[QueueEntry]) -> bool:
        """Puts unread entries into all free places; returns whether each place has one.

        If there are too few entries, none is put anywhere.
        """
        assert self._programs.batch is not None
        matched = dict(self._match_places(entries))
        if len(self._entries | matched) < self._programs.batch.num_prompts:
            return False
        for place, entry in matched.items():
            if place in self._entries:
                continue
            # Its own caches, if it was read by itself before.
            caches = self._empty_caches if entry.caches is None else entry.caches
            self._caches = self._programs.put_caches(self._caches, caches, np.int32(place))
            entry.caches = None
            entry.place = np.int32(place)
            self._entries[place] = entry
        return True

    def admit(self, slots: DecodeState, entry: QueueEntry, slot: int) -> DecodeState:
        """Returns the slots with the first waiting request of an entry in one of them.

        An entry with a place leaves it. Packed: for its last waiting request, the program that
        admits takes the caches out of the batch itself. If more wait, they get a copy. One each:
        `read` has detached each entry that it read to the end.
        """
        is_packed = self._programs.batch is not None and self._programs.batch.packs_pieces
        if entry.place is None or len(entry.waiting) > 1 or not is_packed:
            self.detach(entry)
            return entry.admit(self._programs, slots, slot)
        # `entry.admit` gives the program the caches of all N prompts, and the place of one.
        entry.caches = self._caches
        try:
            slots = entry.admit(self._programs, slots, slot)
        finally:
            entry.caches = None
        del self._entries[int(entry.place)]
        return slots

    def detach(self, entry: QueueEntry) -> None:
        """Gives an entry caches of its own, a copy, and frees its place.

        Entries without a place stay as they are. Unread tokens are then read by `read_chunk`.
        """
        if entry.place is None:
            return
        caches = self._programs.take_caches(self._caches, entry.place)
        del self._entries[int(entry.place)]
        entry.attach_caches(caches, self._programs.cache_lengths[0])

    def drop_ended(self) -> None:
        """Frees the places of entries without a waiting request.

        The scheduler calls `WaitingQueue.drop_ended` first, which takes ended requests out of
        `waiting`.
        """
        self._entries = {i: entry for i, entry in self._entries.items() if entry.waiting}

    @property
    def arrays(self) -> object:
        """The batch's device arrays, a pytree; the engine deletes them when it closes."""
        return self._caches, self._empty_caches

    def _fits_batch(self, entry: QueueEntry) -> TypeGuard[PromptGroup]:
        """Returns whether an entry is a prompt with unread tokens, short enough for a place."""
        is_unread = isinstance(entry, PromptGroup) and entry.unread.size > 0
        return is_unread and entry.token_ids.size - 1 <= self._programs.cache_lengths[0]
