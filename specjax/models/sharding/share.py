"""A share of a decoder: its configuration, and its part of each array of the parameters.

An array that is split has its shares along the first axis. Some arrays concatenate projections:
queries, keys and values; gate and up. They get a separate first axis for the shares, because a
share has a part of each projection. Axes: `N` shares, `G` key-value heads.
"""

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from specjax.core.noise import SAMPLING_BLOCK
from specjax.devices.placement import Placement
from specjax.models.decoder.config import TransformerConfig
from specjax.models.decoder.transformer import param_shapes

__all__ = [
    "is_stacked",
    "param_specs",
    "shard_config",
    "share_ranges",
    "share_shapes",
    "share_views",
    "split_array",
    "split_axis",
]

# The split axis of an array of the whole model, by the array's name.
_AXES = {"embedding": 0, "head": 0, "qkv": -1, "qkv_bias": -1, "out": 0, "gate_up": -1, "down": 0}
_STACKED = ("qkv", "qkv_bias", "gate_up")


def split_axis(path: tuple[Any, ...]) -> int | None:
    """Returns the split axis of an array of the whole model, or None.

    Args:
      path: keys into the nested parameters.
    """
    return _AXES.get(path[-1])


def is_stacked(path: tuple[Any, ...]) -> bool:
    """Returns whether the shares of an array get a separate axis."""
    return path[-1] in _STACKED


def shard_config(config: TransformerConfig, num_shares: int) -> TransformerConfig:
    """Returns the configuration of one share, or refuses a number of shares.

    With fewer key-value heads than shares, each head is replicated on N / G devices.

    Args:
      config: of the whole model.
      num_shares: N.

    Raises:
      ValueError: if N does not divide the heads or the MLP, or neither of N and G divides the
        other.
    """
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    if heads % num_shares:
        raise ValueError(
            f"num_attention_heads is {heads}, and the mesh's axis 'model' has {num_shares} "
            "devices, which do not divide it; take a number of devices that does, or load the "
            "model with replicate=True (--replicate-draft, for a draft)."
        )
    if groups % num_shares and num_shares % groups:
        raise ValueError(
            f"num_key_value_heads is {groups}, and the mesh's axis 'model' has {num_shares} "
            "devices; one of the two needs to divide the other: then heads are split, or each is "
            "replicated on the devices that share it. Take another mesh, or load the model with "
            "replicate=True (--replicate-draft, for a draft)."
        )
    if config.intermediate_size % num_shares:
        raise ValueError(
            f"intermediate_size is {config.intermediate_size}, and the mesh's axis 'model' has "
            f"{num_shares} devices, which do not divide it; take a number of devices that does, or "
            "load the model with replicate=True (--replicate-draft, for a draft)."
        )
    # Whole blocks of noise, so that no block is on two devices, as the kernels need.
    num_blocks = -(-config.vocab_size // (num_shares * SAMPLING_BLOCK))
    return dataclasses.replace(
        config,
        num_attention_heads=heads // num_shares,
        num_key_value_heads=max(groups // num_shares, 1),
        intermediate_size=config.intermediate_size // num_shares,
        vocab_size=num_blocks * SAMPLING_BLOCK,
    )


def share_ranges(
    config: TransformerConfig, num_shares: int, path: tuple[Any, ...], share: int
) -> list[slice]:
    """Returns a share's slice of each projection that an array concatenates.

    Args:
      config: of the whole model.
      num_shares: N.
      path: of an array that is split.
      share: its number.

    Returns:
      Slices of the split axis of each projection. The last slices of the vocabulary may be shorter
      or empty; those shares are padded.
    """
    size, name = config.head_dim, path[-1]
    if name in ("embedding", "head"):
        width, end = shard_config(config, num_shares).vocab_size, config.vocab_size
        return [slice(min(share * width, end), min((share + 1) * width, end))]

    def part(heads: int, size: int = 1) -> slice:
        start = share * heads // num_shares * size
        return slice(start, start + max(heads // num_shares, 1) * size)

    if name in ("qkv", "qkv_bias"):
        keys = part(config.num_key_value_heads, size)
        return [part(config.num_attention_heads, size), keys, keys]
    if name == "out":
        return [part(config.num_attention_heads, size)]
    return [part(config.intermediate_size)] * (2 if name == "gate_up" else 1)


def share_views(
    views: list[np.ndarray],
    config: TransformerConfig,
    num_shares: int,
    path: tuple[Any, ...],
    share: int,
    transposed: bool = False,
) -> list[np.ndarray]:
    """Returns a share's part of each projection; rows past the vocabulary are zeros.

    Args:
      views: of the projections that an array concatenates.
      config: of the whole model.
      num_shares: N.
      path: of an array that is split.
      share: its number.
      transposed: whether the views are `(out, in)`, as in a file.
    """
    axis = _AXES[path[-1]] % views[0].ndim
    lead = (slice(None),) * (views[0].ndim - 1 - axis if transposed else axis)
    ranges = share_ranges(config, num_shares, path, share)
    parts = [view[(*lead, part)] for view, part in zip(views, ranges, strict=True)]
    if path[-1] in ("embedding", "head"):
        missing = shard_config(config, num_shares).vocab_size - len(parts[0])
        parts = [np.pad(parts[0], ((0, missing), (0, 0)))] if missing else parts
    return parts


def split_array(
    array: np.ndarray, config: TransformerConfig, num_shares: int, path: tuple[Any, ...]
) -> np.ndarray:
    """Returns an array of the whole model with its shares along the first axis, on the host.

    Args:
      array: as in `Model.params`.
      config: of the whole model.
      num_shares: N.
      path: of the array.
    """
    axis = split_axis(path)
    if axis is None:
        return array
    ends = itertools.accumulate(part.stop for part in share_ranges(config, 1, path, 0))
    projections = np.split(array, list(ends)[:-1], axis=axis)
    shares = [
        np.concatenate(share_views(projections, config, num_shares, path, share), axis=axis)
        for share in range(num_shares)
    ]
    return np.stack(shares) if is_stacked(path) else np.concatenate(shares)


def share_shapes(config: TransformerConfig, placement: Placement) -> Any:
    """Returns the parameters of a model on a mesh as `jax.ShapeDtypeStruct`s with shardings.

    Args:
      config: of the whole model.
      placement: where it lies.
    """
    num_shares = placement.num_shares

    def shape_of(path: Any, own: Any) -> Any:
        keys, shape = _keys(path), own.shape
        if placement.model is not None and split_axis(keys) is not None:
            lead = (num_shares,) if is_stacked(keys) else (num_shares * shape[0],)
            shape = lead + (shape if is_stacked(keys) else shape[1:])
        sharding = placement.sharding(_spec(keys, placement))
        return jax.ShapeDtypeStruct(shape, own.dtype, sharding=sharding)

    own = config if placement.model is None else shard_config(config, num_shares)
    return jax.tree.map_with_path(shape_of, param_shapes(own))


def param_specs(config: TransformerConfig, placement: Placement) -> Any:
    """Returns the `PartitionSpec` of each array of the parameters."""
    return jax.tree.map_with_path(
        lambda path, _: _spec(_keys(path), placement), param_shapes(config)
    )


def _spec(path: tuple[Any, ...], placement: Placement) -> PartitionSpec:
    return PartitionSpec() if split_axis(path) is None else PartitionSpec(placement.model)


def _keys(path: Any) -> tuple[Any, ...]:
    return tuple(entry.key for entry in path)
