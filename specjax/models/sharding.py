"""A decoder over the devices of a mesh: each runs the ordinary decoder of its share.

This is Megatron's tensor parallelism: a device has a share of the heads, of each MLP, and of the
vocabulary. `share_views` gives a share's part of each array. `split_model` runs all shares as one
`Model`; `specjax.models.hf.checkpoint` reads each from a folder.

An array that is split has its shares along the first axis. Some arrays concatenate projections:
queries, keys and values; gate and up. They get a separate first axis for the shares, because a
share has a part of each projection.

Per layer devices exchange two sums of [B, T, E], after attention and after the MLP, and per step
one after the embedding. A device has the logits [B, T, W], W = ceil(V / num_shares) rounded up to
whole blocks of 128. Axes: `B` requests, `T` new tokens, `S` slots, `D` head dimension, `E` hidden,
`V` vocabulary, `N` shares, `W` tokens of each, `G` key-value heads.

References:
  Shoeybi et al., 2019, arXiv:1909.08053.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from specjax.core.noise import SAMPLING_BLOCK
from specjax.devices.placement import Placement, parse_mesh
from specjax.implementation import Implementation
from specjax.models.decoder.config import TransformerConfig
from specjax.models.decoder.transformer import Transformer, functions, param_shapes, tap_function
from specjax.types import Model

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
    for name in ("num_attention_heads", "intermediate_size"):
        if getattr(config, name) % num_shares:
            raise ValueError(
                f"{name} is {getattr(config, name)}, and the mesh's axis 'model' has {num_shares} "
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
        num_padding = shard_config(config, num_shares).vocab_size - len(parts[0])
        parts = [np.pad(parts[0], ((0, num_padding), (0, 0)))] if num_padding else parts
    return parts


def share_shapes(config: TransformerConfig, placement: Placement) -> Any:
    """Returns the parameters of a model on a mesh as `jax.ShapeDtypeStruct`s with shardings.

    Args:
      config: of the whole model.
      placement: where it lies.
    """
    num_shares = placement.num_shares

    def shape_of(path: Any, part: Any) -> Any:
        keys, shape = _keys(path), part.shape
        if placement.model is not None and split_axis(keys) is not None:
            whole = (num_shares * shape[0], *shape[1:])
            shape = (num_shares, *shape) if is_stacked(keys) else whole
        sharding = placement.sharding(_spec(keys, placement))
        return jax.ShapeDtypeStruct(shape, part.dtype, sharding=sharding)

    share = config if placement.model is None else shard_config(config, num_shares)
    return jax.tree.map_with_path(shape_of, param_shapes(share))


def _param_specs(config: TransformerConfig, placement: Placement) -> Any:
    """Returns the `PartitionSpec` of each array of the parameters."""
    return jax.tree.map_with_path(
        lambda path, _: _spec(_keys(path), placement), param_shapes(config)
    )


def _spec(path: tuple[Any, ...], placement: Placement) -> PartitionSpec:
    return PartitionSpec() if split_axis(path) is None else PartitionSpec(placement.model)


def _keys(path: Any) -> tuple[Any, ...]:
    return tuple(entry.key for entry in path)


def split_model(
    config: TransformerConfig,
    params: Any = None,
    *,
    mesh: Any,
    replicate: bool = False,
    seed: int = 0,
    implementation: str | Implementation | None = None,
) -> Model:
    """Returns a `Model` over a mesh: requests are split over "data", weights over "model".

    Args:
      config: sizes and constants.
      params: as in `build`, of the whole model; None draws those of `build`, first whole on one
        device.
      mesh: a `jax.sharding.Mesh` with an axis "data", an axis "model", or both.
      replicate: whether every device has all weights, which may suit a small draft.
      seed: of the random weights.
      implementation: of a decode step, as in `build`, on each device's share.

    Returns:
      `Model` whose parameters are other arrays than those of `build`: `save` refuses them.

    Raises:
      ValueError: for another mesh, or one whose axis "model" does not divide heads and MLP.

    Example:
      >>> mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
      >>> model = split_model(TransformerConfig(64, 16, 32, 2, 4, 2, 4), mesh=mesh)
      >>> model.params["layers"][0]["attention"]["qkv"].shape  # each device has one of the two
      (2, 16, 16)
    """
    placement = parse_mesh(mesh, replicate)
    if placement.model is not None:
        shard_config(config, placement.num_shares)
    if params is None:
        params = nnx.to_pure_dict(nnx.state(Transformer(config, nnx.Rngs(seed)), nnx.Param))

    def put(path: Any, array: Any, spec: PartitionSpec) -> jax.Array:
        # On the host, so that each device receives its share alone.
        array, keys, num_shares = np.asarray(array), _keys(path), placement.num_shares
        axis = None if placement.model is None else split_axis(keys)
        if axis is not None:
            ends = itertools.accumulate(part.stop for part in share_ranges(config, 1, keys, 0))
            projections = np.split(array, list(ends)[:-1], axis=axis)
            shares = [
                np.concatenate(share_views(projections, config, num_shares, keys, share), axis=axis)
                for share in range(num_shares)
            ]
            array = np.stack(shares) if is_stacked(keys) else np.concatenate(shares)
        # Not by `device_put`, which gathers and compares the arrays of several processes.
        sharding = placement.sharding(spec)
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    split = jax.tree.map_with_path(put, params, _param_specs(config, placement))
    return sharded_model(config, split, placement, implementation=implementation)


def sharded_model(
    config: TransformerConfig,
    params: Any,
    placement: Placement,
    *,
    implementation: str | Implementation | None = None,
) -> Model:
    """Returns the `Model` of parameters that are already on a mesh.

    Args:
      config: of the whole model.
      params: arrays of `share_shapes`.
      placement: where they lie.
      implementation: as in `split_model`.
    """
    steps = _steps_of(config, placement, implementation)
    return Model(
        params,
        steps.init_cache,
        steps.apply,
        steps.logits,
        max_length=config.max_position_embeddings,
        apply_with_taps=steps.apply_with_taps,
        placement=placement,
        split_logits=None if placement.model is None else steps.split_logits,
    )


@dataclasses.dataclass(frozen=True)
class _ShardedFunctions:
    """Functions of a model over a mesh, as `Model` describes them.

    Attributes:
      config: of the whole model.
      share: of the share of a device.
      placement: where the model lies.
      implementation: of a decode step.
    """

    config: TransformerConfig
    share: TransformerConfig
    placement: Placement
    implementation: str | Implementation | None

    def init_cache(self, batch_size: int, max_length: int) -> Any:
        """Returns empty keys and values of each layer, two [B', G', S, D].

        B' = B rounded up to a multiple of the data axis, G' = key-value heads of all shares.
        """
        share, placement = self.share, self.placement
        placement.check_axes()
        groups = share.num_key_value_heads * placement.num_shares
        shape = (placement.round_up(batch_size), groups, max_length, share.head_dim)
        sharding = placement.sharding(placement.spec(placement.model))
        entry = jax.lax.with_sharding_constraint(jnp.zeros(shape, share.dtype), sharding)
        return tuple((entry, entry) for _ in range(share.num_hidden_layers))

    def apply(self, params: Any, token_ids: Any, positions: Any, cache: Any) -> Any:
        """Returns hidden states [B, T, E], and the cache with the tokens in it."""
        _, function, _ = functions(self.share, self.implementation, self.placement.model)
        return self._run(function, params, token_ids, positions, cache)

    def apply_with_taps(
        self, params: Any, token_ids: Any, positions: Any, cache: Any, taps: tuple[int, ...]
    ) -> Any:
        """Returns hidden states, the features [B, T, A * E] of taps, and the cache."""
        function = tap_function(self.share, self.implementation, self.placement.model)
        function = functools.partial(function, taps=taps)
        return self._run(function, params, token_ids, positions, cache)

    def _run(
        self,
        function: Callable[..., Any],
        params: Any,
        token_ids: jax.Array,
        positions: jax.Array,
        cache: Any,
    ) -> Any:
        """Returns the outputs of a share's function, for every request, and the cache."""
        placement, size = self.placement, token_ids.shape[0]

        def on_share(params: Any, *operands: Any) -> Any:
            *outputs, cache = function(_own_arrays(params, placement), *operands)
            return tuple(outputs), cache

        specs, requests = _param_specs(self.config, placement), placement.spec()
        heads = placement.spec(placement.model)
        # The sums are equal on every device, which no type expresses: JAX's check is off.
        mapped = placement.map(
            on_share, (specs, requests, requests, heads), (requests, heads), check_vma=False
        )
        ids, positions = placement.pad(token_ids), placement.pad(positions, -1)
        outputs, cache = mapped(params, ids, positions, cache)
        return *(x[:size] for x in outputs), cache

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Returns logits [..., V] of hidden states [..., E], gathered on every device."""
        return self._run_logits(params, hidden, is_whole=True)

    def split_logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Returns logits [..., N * W] on the devices that computed them; the last are padding."""
        return self._run_logits(params, hidden, is_whole=False)

    def _run_logits(self, params: Any, hidden: jax.Array, is_whole: bool) -> jax.Array:
        placement, size = self.placement, hidden.shape[0]
        _, _, function = functions(self.share, self.implementation, placement.model)

        def on_share(params: Any, hidden: jax.Array) -> jax.Array:
            logits: jax.Array = function(_own_arrays(params, placement), hidden)
            if placement.model is None or not is_whole:
                return logits
            last = logits.ndim - 1
            logits = jax.lax.all_gather(logits, placement.model, axis=last, tiled=True)
            return logits[..., : self.config.vocab_size]

        specs, last = _param_specs(self.config, placement), None if is_whole else placement.model
        spec = placement.spec(*(None,) * (hidden.ndim - 2), last)
        mapped = placement.map(on_share, (specs, placement.spec()), spec, check_vma=False)
        logits: jax.Array = mapped(params, placement.pad(hidden))
        return logits[:size]


@functools.cache
def _steps_of(
    config: TransformerConfig, placement: Placement, implementation: str | Implementation | None
) -> _ShardedFunctions:
    """Returns the functions of a model; equal arguments give one object, to share programs."""
    share = config if placement.model is None else shard_config(config, placement.num_shares)
    return _ShardedFunctions(config, share, placement, implementation)


def _own_arrays(params: Any, placement: Placement) -> Any:
    """Returns a device's arrays without the axis of shares."""
    if placement.model is None:
        return params
    return jax.tree.map_with_path(
        lambda path, x: x[0] if is_stacked((path[-1].key,)) else x, params
    )
