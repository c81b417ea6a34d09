"""Statistics of rows that devices exchange: partials of tiles, logits of drafted tokens.

    columns    T maxima, T sums, T argmaxes, the target's and the draft's logit of the drafted token

T is the number of a device's tiles of a row. All are float32, which holds ids below 2^24 exactly.
So one message carries them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from specjax.call_arrays import FlatBatch, SampleArrays
from specjax.devices.rows import first_token
from specjax.devices.vocabulary_split import VocabularySplit
from specjax.pallas.blocks import Partials
from specjax.pallas.launch import output

_NUM_LOGITS = 2


class SharedRows(NamedTuple):
    """Statistics of one device, f32[rows, columns], or of all devices, f32[D, rows, columns].

    Attributes:
      values: the reference.
    """

    values: Any

    @property
    def num_tiles(self) -> int:
        """Returns T, the tiles that a device has of a row."""
        return (self.values.shape[-1] - _NUM_LOGITS) // 3

    def target_logit_at(self, row: jax.Array, column: jax.Array) -> Any:
        """Returns where a device stores its target logits of drafted tokens."""
        return self.values.at[row + 0 * column, column + (3 * self.num_tiles)]

    def draft_logit_at(self, row: jax.Array, column: jax.Array) -> Any:
        """Returns where a device stores its draft logits of drafted tokens."""
        return self.values.at[row + 0 * column, column + (3 * self.num_tiles + 1)]

    def load_target_logit(self, row: jax.Array, mask: jax.Array) -> jax.Array:
        """Loads the drafted tokens' target logits, -inf where `mask` is False."""
        return self._load(row, 3 * self.num_tiles, mask)

    def load_draft_logit(self, row: jax.Array, mask: jax.Array) -> jax.Array:
        """Loads the drafted tokens' draft logits, -inf where `mask` is False."""
        return self._load(row, 3 * self.num_tiles + 1, mask)

    def _load(self, row: jax.Array, column: int, mask: jax.Array) -> jax.Array:
        """Returns the maximum over devices; all but one have -inf."""
        logit = jnp.full(row.shape, -jnp.inf, jnp.float32)
        for device in range(self.values.shape[0]):
            at = self.values.at[jnp.full_like(row, device), row, jnp.full_like(row, column)]
            logit = jnp.maximum(logit, plgpu.load(at, mask=mask, other=jnp.float32(-jnp.inf)))
        return logit


class _StridedRef:
    """A strided view of T columns of each device, as a reference [rows, D * T] of ordered tiles."""

    dtype = jnp.dtype(jnp.float32)

    def __init__(self, shared: SharedRows, first: int, offset: jax.Array | None = None) -> None:
        self._values, self._first, self._offset = shared.values, first, offset
        self._num_tiles = shared.num_tiles

    @property
    def shape(self) -> tuple[int, int]:
        """Returns the number of rows, and of tiles of all devices."""
        *devices, rows, _ = self._values.shape
        return rows, self._num_tiles * (devices[0] if devices else 1)

    @property
    def at(self) -> "_StridedRef":
        """Returns the object itself, which is indexed as `Ref.at` is."""
        return self

    def __getitem__(self, index: tuple[jax.Array, jax.Array]) -> Any:
        row, tile = index
        num_tiles = jnp.full_like(tile, self._num_tiles)
        device, column = jax.lax.div(tile, num_tiles), jax.lax.rem(tile, num_tiles)
        return self._values.at[device, row, column + self._first]

    def __setitem__(self, index: tuple[jax.Array, jax.Array], value: jax.Array) -> None:
        row, tile = index
        if self._offset is not None:
            value = (value + self._offset).astype(jnp.float32)
        self._values[row, tile + self._first] = value


def best_of_devices(gathered: jax.Array, scores: jax.Array) -> jax.Array:
    """Returns of each row the proposal [R, columns] of best score; ties go to the first device.

    Args:
      gathered: the proposals of all devices, [D, R, columns].
      scores: [D, R].
    """
    best, score = gathered[0], scores[0]
    # A loop over few devices, so that it is one kernel. Devices are in the order of their tokens.
    for device in range(1, gathered.shape[0]):
        is_better = scores[device] > score
        best = jnp.where(is_better[:, None], gathered[device], best)
        score = jnp.where(is_better, scores[device], score)
    return best


def shared_shape(num_rows: int, num_tiles: int) -> SharedRows:
    """Returns the shape of one device's `SharedRows`."""
    return SharedRows(output((num_rows, 3 * num_tiles + _NUM_LOGITS)))


class _UnpaddedRef:
    """Rows of logits that end with the vocabulary: a masked view that loads no padding."""

    def __init__(self, logits: Any, num_tokens: jax.Array) -> None:
        self.at, self.dtype = logits.at, logits.dtype
        self.shape = (logits.shape[0], num_tokens)


def first_token_of(width: int, split: VocabularySplit) -> jax.Array:
    """Returns this device's first token id, i32[1]; with padding also its token count, i32[2].

    Kernels take it as an operand, `first_token` of their arrays.
    """
    first = first_token(width, split)
    if split.vocab_size == width * jax.lax.axis_size(split.axis_name):
        return first[None]
    return jnp.stack([first, jnp.clip(split.vocab_size - first, 0, width)])


def unpadded(logits: Any, arrays: SampleArrays | FlatBatch) -> Any:
    """Returns a reference to logits of this device, without padding."""
    if arrays.first_token is None or arrays.first_token.shape[0] == 1:
        return logits
    return _UnpaddedRef(logits, arrays.first_token[1])


def load_first_token(arrays: SampleArrays | FlatBatch) -> jax.Array | None:
    """Loads the id of the first token that this device has; None where rows are whole."""
    return None if arrays.first_token is None else arrays.first_token[0]


def with_shared_tiles(partials: Partials, shared: SharedRows, arrays: FlatBatch) -> Partials:
    """Returns the partials of a device's blocks together with those of shared tiles.

    With one device's tiles they are for stores, with those of all devices for loads.
    """
    num_tiles = shared.num_tiles
    return partials._replace(
        tile_max=_StridedRef(shared, 0),
        tile_sum=_StridedRef(shared, num_tiles),
        tile_argmax=_StridedRef(shared, 2 * num_tiles, load_first_token(arrays)),
    )
