"""Loads of a request in a kernel of verification: scalars, drafted tokens and their rows."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from specjax.call_arrays import FlatBatch
from specjax.call_options import CallOptions
from specjax.core.acceptance import is_one_hot, num_valid_drafts
from specjax.core.logsumexp import LogNormalizer, normalizer_from_statistics
from specjax.core.noise import Hash, Words, fold_in
from specjax.core.temperature import Temperature, parse_temperature
from specjax.devices.rows import logit_rows
from specjax.pallas.blocks import RowTile, load_logits
from specjax.pallas.gumbel_max import SamplingRow
from specjax.pallas.kernel_config import KernelConfig, Tile, next_power_of_2
from specjax.pallas.launch import interpreter_barrier, launch, output, reduce_where
from specjax.pallas.split.shared_rows import load_first_token, unpadded
from specjax.pallas.threefry import make_threefry
from specjax.types import Verification


class Schedule(NamedTuple):
    """The static schedule of a launch.

    Attributes:
      num_requests: B.
      options: of the call.
      tile: the share of a row that one program reduces.
      is_small_batch: of the call, by `KernelConfig.is_small_batch`.
      log_weights: of a rule, from (prefix, token ids, log p) to log-weights of the token in place
        of a rejected one; None for max(p - q, 0).
      has_bonus_rows: whether the row after a request's last drafted token is reduced, too.
    """

    num_requests: int
    options: CallOptions
    tile: Tile
    is_small_batch: bool
    log_weights: Callable[..., jax.Array] | None = None
    has_bonus_rows: bool = True

    @property
    def max_draft_tokens(self) -> int:
        """Returns K >= 0, the largest number of drafted tokens per request."""
        return self.options.max_draft_tokens

    @property
    def rows_per_request(self) -> int:
        """Returns K + 1, the largest number of target rows per request."""
        return self.max_draft_tokens + 1

    @property
    def noise_dtype(self) -> Any:
        """Returns float32 or float64."""
        return self.options.noise_dtype

    @property
    def interpret(self) -> bool:
        """Returns whether the kernels run in Pallas' interpreter."""
        return self.options.implementation.interpret

    @property
    def threefry(self) -> Hash:
        """Returns the hash of the kernels."""
        return make_threefry(self.interpret)

    @property
    def config(self) -> KernelConfig:
        """Returns the sizes of the kernels."""
        return self.options.implementation.config(KernelConfig)

    def vocab_size(self, arrays: FlatBatch) -> int:
        """Returns V, of all devices together."""
        return logit_rows(arrays.target_logits, self.options.split).vocab_size

    def num_tiles(self, arrays: FlatBatch) -> int:
        """Returns the number of tiles of a target row."""
        return self.tile.num_tiles(arrays.target_logits.shape[1])

    def is_reduced(self, request: "Request", i: jax.Array) -> jax.Array:
        """Returns whether row i of a request is reduced by the first launch, bool of i's shape."""
        n = request.num_draft_tokens
        return i <= n if self.has_bonus_rows else i < n

    def verification_shape(self) -> Verification:
        """Returns the shapes of the call's `Verification`."""
        requests, rows = (self.num_requests,), (self.num_requests, self.rows_per_request)
        return Verification(
            token_ids=output(rows, jnp.int32),
            num_accepted=output(requests, jnp.int32),
            num_emitted=output(requests, jnp.int32),
            logprobs=output(rows),
        )

    def launch(
        self,
        kernel: Callable[..., None],
        operands: Any,
        outputs: Any,
        num_programs: int,
        num_warps: int | None = None,
        **static: Any,
    ) -> Any:
        """Launches a kernel of this schedule, and returns its outputs.

        Args:
          kernel: as in `launch.launch`, which is told the schedule.
          operands: as there.
          outputs: as there.
          num_programs: as there.
          num_warps: per program; None is the tile's.
          **static: other arguments of the kernel.
        """
        return launch(
            functools.partial(kernel, schedule=self, **static),
            operands,
            outputs,
            num_programs=num_programs,
            num_warps=num_warps or self.tile.num_warps,
            interpret=self.interpret,
        )


class Request(NamedTuple):
    """One request in a kernel: the call that it is part of, and its scalars.

    Attributes:
      arrays: references to those of the call.
      schedule: of the launch.
      b: i32, its index in the batch.
      first_draft: i32, index of its first drafted token in the flat token arrays.
      first_target_row: i32, index of its first row in the target logits.
      num_draft_tokens: i32, valid drafted tokens; -1 for the caller's -1, an inactive request.
      temperature: the target's, parsed.
      active: bool, whether it may emit tokens.
    """

    arrays: FlatBatch
    schedule: Schedule
    b: jax.Array
    first_draft: jax.Array
    first_target_row: jax.Array
    num_draft_tokens: jax.Array
    temperature: Temperature
    active: jax.Array

    def row_index(self, i: jax.Array) -> jax.Array:
        """Returns the index of row i among the K + 1 reduced rows of each request."""
        return self.b * self.schedule.rows_per_request + i

    def address(self, i: jax.Array, stream: Any) -> Words:
        """Returns the addresses of the draws at positions `positions[b] + i`."""
        arrays, schedule = self.arrays, self.schedule
        words = arrays.keys[self.b, 0], arrays.keys[self.b, 1]
        key = jnp.broadcast_to(words[0], i.shape), jnp.broadcast_to(words[1], i.shape)
        at = fold_in(key, arrays.positions[self.b] + i, schedule.threefry)
        at = fold_in(interpreter_barrier(at, schedule.interpret), stream, schedule.threefry)
        return interpreter_barrier(at, schedule.interpret)

    def cutoff(self, i: jax.Array, mask: jax.Array) -> jax.Array | None:
        """Returns the cutoffs of target rows i, 0 where `mask` is False; None without cutoffs."""
        cutoff = self.arrays.target_cutoff
        return None if cutoff is None else load_masked(cutoff, self.first_target_row + i, mask)

    def row(self, i: jax.Array, normalizer: LogNormalizer) -> SamplingRow:
        """Returns target row i, i32[], with its normalizer."""
        return SamplingRow(
            unpadded(self.arrays.target_logits, self.arrays),
            self.first_target_row + i,
            self.temperature.scale,
            self.cutoff(i, self.active),
            normalizer,
            load_first_token(self.arrays),
        )

    def row_tile(self, i: jax.Array, tile_index: jax.Array, tile: Tile | None = None) -> RowTile:
        """Returns a tile of target row i, which exists; None is one of the schedule's size."""
        return RowTile(
            unpadded(self.arrays.target_logits, self.arrays),
            self.first_target_row + i,
            tile_index,
            self.temperature.scale,
            self.cutoff(i, i >= 0),
            tile or self.schedule.tile,
            self.schedule.interpret,
            self.temperature.greedy,
        )


class DraftRow(NamedTuple):
    """The row of draft logits that a drafted token was sampled from.

    Attributes:
      row_index: i32, of the row in the draft logits.
      temperature: the draft's, parsed.
      cutoff: f32, or None.
    """

    row_index: jax.Array
    temperature: Temperature
    cutoff: jax.Array | None


class DraftedToken(NamedTuple):
    """A drafted token and the distribution that it was drawn from.

    Attributes:
      token_id: i32.
      logprob: f32, log q of the token; 0 where one-hot.
      normalizer: of the draft row.
      one_hot: bool, whether q is 1 at the token.
      row: the draft row.
    """

    token_id: jax.Array
    logprob: jax.Array
    normalizer: LogNormalizer
    one_hot: jax.Array
    row: DraftRow

    def select(self, mask: jax.Array) -> "DraftedToken":
        """Returns the one token, of several, where `mask` is True."""
        cutoff = self.row.cutoff
        return DraftedToken(
            reduce_where(self.token_id, mask),
            reduce_where(self.logprob, mask),
            LogNormalizer(*[reduce_where(x, mask) for x in self.normalizer]),
            reduce_where(self.one_hot.astype(jnp.int32), mask) != 0,
            self.row._replace(
                row_index=reduce_where(self.row.row_index, mask),
                cutoff=None if cutoff is None else reduce_where(cutoff, mask),
            ),
        )


def load_masked(values: Any, index: Any, mask: jax.Array) -> jax.Array:
    """Loads elements of a reference, 0 where `mask` is False."""
    return plgpu.load(values.at[index], mask=mask, other=jnp.zeros((), values.dtype))


def load_request(arrays: FlatBatch, b: jax.Array, schedule: Schedule) -> Request:
    """Loads request b."""
    k = schedule.max_draft_tokens
    temperature = parse_temperature(arrays.temperature[b])
    if arrays.cu_num_draft_tokens is None:
        first_draft, capacity = b * k, jnp.int32(k)
    else:
        # A wrong count must not lead to loads outside the arrays, which would end the process.
        total = arrays.target_logits.shape[0] - schedule.num_requests
        ends = [jnp.clip(arrays.cu_num_draft_tokens[i], 0, total) for i in (b, b + 1)]
        first_draft, capacity = ends[0], jnp.clip(ends[1] - ends[0], 0, k)
    num_tokens = capacity
    if arrays.num_tokens is not None:
        num_tokens = jnp.minimum(arrays.num_tokens[b], capacity)
    if arrays.token_ids is None:
        num_draft_tokens = jnp.maximum(num_tokens, jnp.int32(-1))
    else:
        i = jax.lax.iota(jnp.int32, next_power_of_2(k))
        at, is_inside = arrays.token_ids.at[first_draft + i], i < capacity
        token_ids = plgpu.load(at, mask=is_inside, other=jnp.int32(-1))
        num_draft_tokens = num_valid_drafts(token_ids, num_tokens)
    active = (num_draft_tokens >= 0) & temperature.valid
    # Each of the b earlier requests has one target row more than drafts.
    return Request(
        arrays, schedule, b, first_draft, first_draft + b, num_draft_tokens, temperature, active
    )


def locate_draft_row(request: Request, i: jax.Array, mask: jax.Array) -> DraftRow:
    """Returns the draft rows of drafted tokens i, through `draft_rows` if it is not None."""
    arrays, index = request.arrays, request.first_draft + i
    if arrays.draft_rows is None:
        row = index
    elif arrays.cu_num_draft_tokens is None:
        row = arrays.draft_rows[request.b] * request.schedule.max_draft_tokens + i
    else:
        row = load_masked(arrays.draft_rows, index, mask)
    if arrays.draft_rows is not None:
        # Nor may a wrong row.
        row = jnp.clip(row, 0, arrays.draft_logits.shape[0] - 1)
    temperatures, cutoff = arrays.draft_temperature, arrays.draft_cutoff
    temperature = (arrays.temperature if temperatures is None else temperatures)[request.b]
    cutoff = None if cutoff is None else load_masked(cutoff, index, mask)
    return DraftRow(row, parse_temperature(temperature), cutoff)


def load_draft_ids(arrays: FlatBatch, token_id: jax.Array) -> jax.Array:
    """Loads the draft ids of target ids of any shape; V_d where the draft has no such token."""
    if arrays.draft_ids is None:
        return token_id
    inside = (token_id >= 0) & (token_id < arrays.draft_ids.shape[0])
    none = jnp.int32(arrays.draft_logits.shape[1])
    return plgpu.load(arrays.draft_ids.at[token_id], mask=inside, other=none)


def load_drafted(request: Request, i: jax.Array, mask: jax.Array) -> DraftedToken:
    """Loads a request's drafted tokens i where `mask` is True; `arrays.token_ids` is not None."""
    arrays, index = request.arrays, request.first_draft + i
    token_id = load_masked(arrays.token_ids, index, mask)
    if arrays.draft_logits is None:
        zero = jnp.zeros_like(token_id, jnp.float32)
        row = DraftRow(index, request.temperature, None)
        # `index >= 0` is True, of the index's shape.
        return DraftedToken(token_id, zero, LogNormalizer(zero, zero), index >= 0, row)
    row = locate_draft_row(request, i, mask)
    if arrays.shared is None:
        draft_id = load_draft_ids(arrays, token_id)
        logit = load_logits(arrays.draft_logits, row.row_index, draft_id, row.cutoff, mask)
    else:
        logit = arrays.shared.load_draft_logit(request.row_index(i), mask)
    logprob = load_masked(arrays.draft_logprobs, index, mask)
    logsumexp = load_masked(arrays.draft_logsumexp, index, mask)
    one_hot = is_one_hot(row.temperature, logprob, logsumexp)
    normalizer = normalizer_from_statistics(logit, logprob, logsumexp)
    return DraftedToken(token_id, jnp.where(one_hot, 0, logprob), normalizer, one_hot, row)


def load_drafted_logits(
    request: Request, i: jax.Array, token_id: jax.Array, mask: jax.Array
) -> jax.Array:
    """Loads the target logits of a request's drafted tokens i where `mask` is True."""
    arrays = request.arrays
    if arrays.shared is not None:
        return arrays.shared.load_target_logit(request.row_index(i), mask)
    exists = i <= request.num_draft_tokens
    row = request.first_target_row + jnp.where(exists, i, 0)
    return load_logits(arrays.target_logits, row, token_id, request.cutoff(i, exists), mask)


def load_drafted_logit(request: Request, i: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Loads a request's drafted token i, i32[], and its logit, f32[]; 0 and -inf without one."""
    # Arrays of one element, of which a reduction makes a scalar.
    i, arrays = i + jax.lax.iota(jnp.int32, 1), request.arrays
    exists, row = i < request.num_draft_tokens, request.first_target_row + i
    token_id = load_masked(arrays.token_ids, request.first_draft + i, exists)
    cutoff = request.cutoff(i, exists)
    logit = load_logits(arrays.target_logits, row, token_id, cutoff, exists)
    return jnp.max(token_id), jnp.max(logit)
