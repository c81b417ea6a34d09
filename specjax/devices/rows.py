"""Rows of logits as values: `LogitRows`, or `SplitRows` whose vocabulary lies over a mesh axis.

`logit_rows` makes them and is the one place that asks which. Their methods are the same, so that
no reader asks again. `SplitRows` does core's arithmetic on the blocks of 128 tokens that begin on a
device, and gathers a number of each block.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specjax.core.gumbel_max import argmax_token, gather_logits, gumbel_max_token, token_logprobs
from specjax.core.logsumexp import (
    MaxSum,
    RowStatistics,
    block_logprobs,
    block_partials,
    mask_below_cutoff,
    reduce_blocks,
    row_logsumexp,
    row_statistics_once,
)
from specjax.core.noise import SAMPLING_BLOCK, Words
from specjax.core.residual import residual_log_masses, residual_probs
from specjax.core.subnormal import flush_subnormals
from specjax.core.temperature import Temperature, parse_temperature
from specjax.devices.placement import Placement
from specjax.devices.vocabulary_split import VocabularySplit
from specjax.types import Sample

_Read = TypeVar("_Read")

_OVER_DEVICES: dict[Callable[..., jax.Array], Callable[..., jax.Array]] = {
    jnp.add: jax.lax.psum,
    jnp.minimum: jax.lax.pmin,
    jnp.maximum: jax.lax.pmax,
}


@dataclasses.dataclass(frozen=True)
class LogitRows:
    """Rows of logits that a device has whole, and what is read of them; `logit_rows` makes them.

    Attributes:
      logits: [V] of one row or [..., V] of several; of split rows a device's part.
      cutoff: f32 of each row, logits below it are left out. None keeps all.
      split: of the vocabulary; None of whole rows.
    """

    logits: jax.Array
    cutoff: jax.Array | None = None
    split: VocabularySplit | None = None

    def row(self, index: jax.Array) -> Self:
        """Returns row `index`, [V], of rows [R, V]."""
        logits = jax.lax.dynamic_index_in_dim(self.logits, index, 0, keepdims=False)
        cutoff = None if self.cutoff is None else self.cutoff[index]
        return dataclasses.replace(self, logits=logits, cutoff=cutoff)

    def kept_logits(self) -> jax.Array:
        """Returns the logits f32 of a row, -inf below its cutoff."""
        return mask_below_cutoff(self.logits, self.cutoff)

    def argmax(self, partials: MaxSum) -> jax.Array:
        """Returns the argmax i32[] of a row from its partials; ties go to the lowest id."""
        return argmax_token(partials, self.take)

    def statistics(
        self, scale: jax.Array, only_maxima: jax.Array | None = None
    ) -> tuple[MaxSum, RowStatistics]:
        """Returns the partials of a row and the statistics that follow; arguments of `partials`."""
        partials = self.partials(scale, only_maxima)
        return partials, row_statistics_once(partials, scale)

    def draw(
        self,
        at: Words,
        temperature: Temperature,
        noise_dtype: Any,
        only_maxima: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, RowStatistics]:
        """Returns the token i32[] of a row, its log p, and the row's statistics.

        Args:
          at: address of the draw.
          temperature: of the row; where it is greedy the token is the argmax.
          noise_dtype: float32 or float64.
          only_maxima: as in `partials`.
        """
        partials, row = self.statistics(temperature.scale, only_maxima)

        def logprobs(ids: jax.Array) -> jax.Array:
            return token_logprobs(self.take(ids), row.normalizer, temperature.scale)

        log_masses = block_logprobs(partials, row.normalizer, temperature.scale)
        random = gumbel_max_token(log_masses, logprobs, at, noise_dtype)
        token = jnp.where(temperature.greedy, self.argmax(partials), random)
        return token, logprobs(token), row

    def sample(self, at: Words, temperature: jax.Array, noise_dtype: Any) -> Sample:
        """Draws the `Sample` of a row at its address."""
        parsed = parse_temperature(temperature)
        token, logprob, row = self.draw(at, parsed, noise_dtype)
        valid = parsed.valid & row.valid
        return Sample(
            token_ids=jnp.where(valid, token, jnp.int32(-1)),
            logprobs=jnp.where(valid, logprob, jnp.float32(0)),
            logsumexp=row_logsumexp(row.normalizer, parsed.scale),
        )

    @property
    def vocab_size(self) -> int:
        """Returns V, without padding."""
        return self.logits.shape[-1]

    def partials(self, scale: jax.Array, only_maxima: jax.Array | None = None) -> MaxSum:
        """Returns the partials f32[..., ceil(V / SAMPLING_BLOCK)] of the blocks of each row.

        Args:
          scale: f32[...], one over the temperature.
          only_maxima: as in `core.logsumexp.reduce_blocks`.
        """
        return block_partials(self.logits, scale, self.cutoff, only_maxima)

    def take(self, ids: jax.Array) -> jax.Array:
        """Returns the kept logits f32 of a row at ids of any shape; -inf outside [0, V)."""
        return gather_logits(self.logits, ids, self.cutoff)

    def take_each(self, ids: jax.Array) -> jax.Array:
        """Returns the kept logits f32[...] of rows [..., V], of each at its own id i32[...]."""
        index = jnp.clip(ids, 0, self.vocab_size - 1)[..., None]
        taken = jnp.take_along_axis(self.logits, index, axis=-1)[..., 0]
        kept = mask_below_cutoff(taken, self.cutoff)
        return jnp.where(ids < self.vocab_size, kept, -jnp.inf)

    def residual_log_masses(self, p: jax.Array, q: jax.Array) -> jax.Array:
        """Returns `core.residual.residual_log_masses` of log p and log q at a row's tokens."""
        return residual_log_masses(p, q)

    def top_k(self, values: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
        """Returns the n largest of values [..., V] of the rows' tokens in f32, and their ids.

        XLA's top-k lists 0.0 before -0.0, so numbers that count as zero are made one zero first.
        """
        return _top_k(values, n)

    def true_logits(self) -> jax.Array:
        """Returns the logits, -inf in the padding past V."""
        return self.logits

    def merge(self, two: Callable[..., jax.Array], values: jax.Array) -> jax.Array:
        """Returns numbers of all tokens from those of the tokens in `logits`.

        Args:
          two: how two numbers become one: jnp.add, jnp.minimum or jnp.maximum.
          values: of any shape.
        """
        return values

    def offsets(self, ids: jax.Array) -> jax.Array:
        """Returns how far ids are from that of the first token in `logits`."""
        return ids

    def columns(self, ids: jax.Array) -> jax.Array:
        """Returns where tokens stand in `logits`; past the end those that another device has."""
        return ids

    def read(self, as_needed: Callable[[], _Read], at_once: Callable[[], _Read]) -> _Read:
        """Returns the result of the schedule that suits these rows.

        Args:
          as_needed: reads a row when what was read before asks for it: of whole rows.
          at_once: reads all rows: of split ones, because every read is a message.
        """
        return as_needed()

    def fit(self, draft_logits: jax.Array | None) -> jax.Array | None:
        """Returns the draft's logits with the padding of these rows, which may be another."""
        return draft_logits

    def gather(self, placement: Placement) -> "LogitRows":
        """Returns whole rows, which each device then has for its requests."""
        return self

    def spec(self, placement: Placement) -> PartitionSpec:
        """Returns how rows [B, R, V] lie: by their requests, split ones by the vocabulary too."""
        return placement.spec()


@dataclasses.dataclass(frozen=True)
class SplitRows(LogitRows):
    """A device's part of each row, or inside `jit` whole arrays whose last axis lies over devices.

    Attributes:
      split: the mesh axis over which the rows lie, and V.
    """

    split: VocabularySplit = dataclasses.field(kw_only=True)

    @property
    def vocab_size(self) -> int:
        """Returns V, of all devices together."""
        return self.split.vocab_size

    def partials(self, scale: jax.Array, only_maxima: jax.Array | None = None) -> MaxSum:
        """Returns the partials of all blocks; each device computes those of its own."""
        cutoff = None if self.cutoff is None else self.cutoff[..., None, None]
        blocks = _device_blocks(self.logits, self.split)
        partials = reduce_blocks(blocks, scale[..., None], cutoff, only_maxima=only_maxima)
        both = _gather_blocks(jnp.stack(partials, axis=-2), self.logits.shape[-1], self.split)
        return jax.lax.optimization_barrier(MaxSum(both[..., 0, :], both[..., 1, :]))

    def take(self, ids: jax.Array) -> jax.Array:
        """Returns the kept logits of a row at ids."""
        return mask_below_cutoff(_take(self.logits, ids, self.split), self.cutoff)

    def take_each(self, ids: jax.Array) -> jax.Array:
        """Returns the kept logits of rows, of each at its own id."""
        flat = self.logits.reshape(-1, self.logits.shape[-1])
        taken = jax.vmap(lambda row, i: _take(row, i, self.split))(flat, ids.reshape(-1))
        return mask_below_cutoff(taken.reshape(ids.shape), self.cutoff)

    def residual_log_masses(self, p: jax.Array, q: jax.Array) -> jax.Array:
        """Returns the log-masses of the residual in all blocks; p and q are a device's part."""
        residual = residual_probs(p, q)
        masses = jnp.sum(_device_blocks(residual, self.split, fill=0), axis=-1)
        return jnp.log(_gather_blocks(masses, residual.shape[-1], self.split))

    def top_k(self, values: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
        """Returns the n largest values and their ids, merged from each device's n largest."""
        width, axis = values.shape[-1], values.ndim - 1
        if not n:
            shape = (*values.shape[:-1], 0)
            return jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32)
        best, ids = _top_k(values, min(n, width))
        ids = ids + first_token(width, self.split)
        # Devices stand in the order of ids, so that ties still go to the lowest.
        best, ids = (
            jax.lax.all_gather(x, self.split.axis_name, axis=axis, tiled=True, to="invarying")
            for x in (best, ids)
        )
        best, index = jax.lax.top_k(best, n)
        return best, jnp.take_along_axis(ids, index, axis=-1)

    def true_logits(self) -> jax.Array:
        """Returns a device's logits, -inf in the padding past V."""
        first = first_token(self.logits.shape[-1], self.split)
        return _true_row(self.logits, first, self.split, -jnp.inf)

    def merge(self, two: Callable[..., jax.Array], values: jax.Array) -> jax.Array:
        """Returns the devices' values merged into one; each device has it."""
        return _OVER_DEVICES[two](values, self.split.axis_name)

    def offsets(self, ids: jax.Array) -> jax.Array:
        """Returns how far ids are from the first that this device has."""
        return ids - first_token(self.logits.shape[-1], self.split)

    def columns(self, ids: jax.Array) -> jax.Array:
        """Returns where tokens stand on this device; past the end those of another."""
        offsets = self.offsets(ids)
        return jnp.where(offsets < 0, self.logits.shape[-1], offsets)

    def read(self, as_needed: Callable[[], _Read], at_once: Callable[[], _Read]) -> _Read:
        """Returns the result of `at_once`."""
        return at_once()

    def fit(self, draft_logits: jax.Array | None) -> jax.Array | None:
        """Returns the draft's logits with the padding of these rows, which may be another."""
        if draft_logits is None:
            return None
        draft_logits = draft_logits[..., : self.vocab_size]
        missing = self.logits.shape[-1] - draft_logits.shape[-1]
        widths = (*((0, 0),) * (draft_logits.ndim - 1), (0, missing))
        return jnp.pad(draft_logits, widths, constant_values=-jnp.inf)

    def gather(self, placement: Placement) -> LogitRows:
        """Returns whole rows, which each device then has for its requests."""
        whole = placement.sharding(placement.spec())
        logits = jax.lax.with_sharding_constraint(self.logits, whole)
        return LogitRows(logits[..., : self.vocab_size], self.cutoff)

    def spec(self, placement: Placement) -> PartitionSpec:
        """Returns how rows [B, R, V] lie: by their requests and by the vocabulary."""
        return placement.spec(None, self.split.axis_name)


def logit_rows(
    logits: jax.Array, split: VocabularySplit | None = None, cutoff: jax.Array | None = None
) -> LogitRows:
    """Returns rows of logits as what they are: whole, or split over devices.

    Args:
      logits: [..., V], or a device's part of it.
      split: of V, or None.
      cutoff: f32[...]; None keeps all.
    """
    if split is None:
        return LogitRows(logits, cutoff)
    return SplitRows(logits, cutoff, split=split)


def first_token(width: int, split: VocabularySplit) -> jax.Array:
    """Returns the id i32[] of the first token that this device has."""
    return jax.lax.axis_index(split.axis_name).astype(jnp.int32) * jnp.int32(width)


def _true_row(row: jax.Array, first: jax.Array, split: VocabularySplit, fill: float) -> jax.Array:
    """Returns columns [..., N], from the id `first` on, with `fill` past the vocabulary's end."""
    ids = first + jnp.arange(row.shape[-1], dtype=jnp.int32)
    return jnp.where(ids < split.vocab_size, row, jnp.array(fill, row.dtype))


def _device_blocks(row: jax.Array, split: VocabularySplit, fill: float = -jnp.inf) -> jax.Array:
    """Returns the blocks that begin on this device.

    Where the device's tokens do not begin with a block, the first ones are the end of the previous
    device's last block. That device reads them: `SAMPLING_BLOCK` - 1 numbers of each row travel.

    Args:
      row: [..., width].
      split: of the row.
      fill: stands past the vocabulary's end.

    Returns:
      [..., ceil(width / SAMPLING_BLOCK), SAMPLING_BLOCK]. On a device where one block less begins,
      the last one is arbitrary.
    """
    width = row.shape[-1]
    num_blocks = -(-width // SAMPLING_BLOCK)
    size = jax.lax.axis_size(split.axis_name)
    first = first_token(width, split)
    is_aligned = width % SAMPLING_BLOCK == 0
    if not is_aligned:
        to_previous = [(device + 1, device) for device in range(size - 1)]
        head = jax.lax.ppermute(row[..., : SAMPLING_BLOCK - 1], split.axis_name, to_previous)
        # As long as the furthest slice needs it.
        spare = (*row.shape[:-1], num_blocks * SAMPLING_BLOCK - width)
        row = jnp.concatenate([row, head, jnp.full(spare, fill, row.dtype)], axis=-1)
        start = -first % SAMPLING_BLOCK
        row = jax.lax.dynamic_slice_in_dim(row, start, num_blocks * SAMPLING_BLOCK, axis=-1)
        first = first + start
    if not is_aligned or split.vocab_size < width * size:
        row = _true_row(row, first, split, fill)
    return row.reshape(*row.shape[:-1], num_blocks, SAMPLING_BLOCK)


def _gather_blocks(values: jax.Array, width: int, split: VocabularySplit) -> jax.Array:
    """Returns a number of every block of the vocabulary, in its order, on every device.

    Args:
      values: [..., ceil(width / SAMPLING_BLOCK)], of the device's `_device_blocks`.
      width: tokens of a row on each device.
      split: of the row.

    Returns:
      [..., ceil(V / SAMPLING_BLOCK)].
    """
    size = jax.lax.axis_size(split.axis_name)
    last = values.ndim - 1
    by_device = jax.lax.all_gather(values, split.axis_name, axis=last, to="invarying")
    num_blocks = -(-split.vocab_size // SAMPLING_BLOCK)
    begins = [min(-(-device * width // SAMPLING_BLOCK), num_blocks) for device in range(size + 1)]
    parts = [by_device[..., d, : begins[d + 1] - begins[d]] for d in range(size)]
    return jnp.concatenate(parts, axis=-1)


def _take(row: jax.Array, index: jax.Array, split: VocabularySplit) -> jax.Array:
    """Returns the logits f32 of a row [width] at token ids, -inf for ids outside [0, V).

    One device has each token. The others add 0, which changes no number and keeps NaN.
    """
    width = row.shape[0]
    column = index - first_token(width, split)
    is_token = (index >= 0) & (index < split.vocab_size)
    is_here = is_token & (column >= 0) & (column < width)
    x = jnp.take(row, column, mode="clip").astype(jnp.float32)
    x = jax.lax.psum(jnp.where(is_here, x, jnp.float32(0)), split.axis_name)
    return jnp.where(is_token, x, -jnp.inf)


def _top_k(rows: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """Returns the n largest numbers of each row in f32, and where they stand."""
    rows = flush_subnormals(rows.astype(jnp.float32)).astype(rows.dtype)

    def top_k(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        best, ids = jax.lax.top_k(rows, n)
        return best.astype(jnp.float32), ids.astype(jnp.int32)

    def top_k_of_float32(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        return top_k(rows.astype(jnp.float32))

    if rows.dtype == jnp.float32:
        return top_k(rows)
    # On a CPU, XLA sorts whole rows of anything but float32, a hundred times as long.
    result: tuple[jax.Array, jax.Array] = jax.lax.platform_dependent(
        rows, cpu=top_k_of_float32, default=top_k
    )
    return result


for _kind in (LogitRows, SplitRows):
    jax.tree_util.register_dataclass(_kind, data_fields=["logits", "cutoff"], meta_fields=["split"])
