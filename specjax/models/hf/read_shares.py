"""Reads a folder's tensors onto the devices of a mesh: each share directly to its device."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from specjax.devices.placement import Placement
from specjax.models.decoder.config import TransformerConfig
from specjax.models.hf.weight_map import WeightEntry, concatenate, concatenate_on_device, get_path
from specjax.models.sharding.share import is_stacked, share_shapes, share_views, split_axis

__all__ = ["assemble_shares"]


def assemble_shares(
    entries: list[tuple[WeightEntry, list[np.ndarray]]],
    config: TransformerConfig,
    placement: Placement,
) -> Iterator[jax.Array]:
    """Yields the array of each entry over the devices; a device receives only its share.

    Args:
      entries: each with views of its tensors, as for `assemble_arrays`.
      config: of the whole model.
      placement: of the model.
    """
    shapes: Any = share_shapes(config, placement)
    for entry, views in entries:
        like: Any = get_path(shapes, entry.path)
        is_split = placement.model is not None and split_axis(entry.path) is not None
        num_shares = placement.num_shares if is_split else 1
        rows = like.shape[0] // num_shares
        by_share: dict[int, jax.Array] = {}
        arrays = []
        for device, index in like.sharding.addressable_devices_indices_map(like.shape).items():
            share = (index[0].start or 0) // rows if is_split else 0
            if share not in by_share:
                own = views
                if is_split:
                    of_share = (config, num_shares, entry.path, share, entry.transposed)
                    own = share_views(views, *of_share)
                by_share[share] = _put(own, entry, like, device)
            arrays.append(jax.device_put(by_share[share], device))
        yield jax.make_array_from_single_device_arrays(like.shape, like.sharding, arrays)


def _put(views: list[np.ndarray], entry: WeightEntry, like: Any, device: jax.Device) -> jax.Array:
    """Returns a share's array, transposed and concatenated on its device."""
    lead = (1,) if is_stacked(entry.path) and len(like.shape) > views[0].ndim else ()
    if device.platform == "cpu":
        array = concatenate(views, entry.transposed, like.dtype.name)
        return jax.device_put(array.reshape(*lead, *array.shape), device)
    there = [jax.device_put(view, device) for view in views]
    on_device = concatenate_on_device(there, entry.transposed, like.dtype.name)
    # One at a time, so that the tensors of only one are on the device as well.
    return jax.block_until_ready(on_device.reshape(*lead, *on_device.shape))
