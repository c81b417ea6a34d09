"""A decoder over a mesh as a `Model`: its functions run every share inside `shard_map`.

Axes: `B` requests, `T` new tokens, `S` slots, `D` head dimension, `E` hidden, `V` vocabulary, `N`
shares, `W` tokens of each.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from specjax.devices.placement import Placement, parse_mesh
from specjax.implementation import Implementation
from specjax.models.decoder.config import TransformerConfig
from specjax.models.decoder.transformer import Transformer, functions, tap_function
from specjax.models.sharding.share import is_stacked, param_specs, shard_config, split_array
from specjax.types import Model

__all__ = ["sharded_model", "split_model"]


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
        array = np.asarray(array)
        if placement.model is not None:
            keys = tuple(entry.key for entry in path)
            array = split_array(array, config, placement.num_shares, keys)
        # Not by `device_put`, which gathers and compares the arrays of several processes.
        sharding = placement.sharding(spec)
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    split = jax.tree.map_with_path(put, params, param_specs(config, placement))
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
      own: of a share.
      placement: where the model lies.
      implementation: of a decode step.
    """

    config: TransformerConfig
    own: TransformerConfig
    placement: Placement
    implementation: str | Implementation | None

    def init_cache(self, batch_size: int, max_length: int) -> Any:
        """Returns empty keys and values of each layer, two [B', G', S, D].

        B' = B rounded up to a multiple of the data axis, G' = key-value heads of all shares.
        """
        own, placement = self.own, self.placement
        placement.check_axes()
        groups = own.num_key_value_heads * placement.num_shares
        shape = (placement.round_up(batch_size), groups, max_length, own.head_dim)
        sharding = placement.sharding(placement.spec(placement.model))
        entry = jax.lax.with_sharding_constraint(jnp.zeros(shape, own.dtype), sharding)
        return tuple((entry, entry) for _ in range(own.num_hidden_layers))

    def apply(self, params: Any, token_ids: Any, positions: Any, cache: Any) -> Any:
        """Returns hidden states [B, T, E], and the cache with the tokens in it."""
        _, function, _ = functions(self.own, self.implementation, self.placement.model)
        return self._run(function, params, token_ids, positions, cache)

    def apply_with_taps(
        self, params: Any, token_ids: Any, positions: Any, cache: Any, taps: tuple[int, ...]
    ) -> Any:
        """Returns hidden states, the features [B, T, A * E] of taps, and the cache."""
        function = tap_function(self.own, self.implementation, self.placement.model)
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

        specs, requests = param_specs(self.config, placement), placement.spec()
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
        _, _, function = functions(self.own, self.implementation, placement.model)

        def on_share(params: Any, hidden: jax.Array) -> jax.Array:
            logits: jax.Array = function(_own_arrays(params, placement), hidden)
            if placement.model is None or not is_whole:
                return logits
            last = logits.ndim - 1
            logits = jax.lax.all_gather(logits, placement.model, axis=last, tiled=True)
            return logits[..., : self.config.vocab_size]

        specs, last = param_specs(self.config, placement), None if is_whole else placement.model
        spec = placement.spec(*(None,) * (hidden.ndim - 2), last)
        mapped = placement.map(on_share, (specs, placement.spec()), spec, check_vma=False)
        logits: jax.Array = mapped(params, placement.pad(hidden))
        return logits[:size]


@functools.cache
def _steps_of(
    config: TransformerConfig,
    placement: Placement,
    implementation: str | Implementation | None,
) -> _ShardedFunctions:
    """Returns the functions of a model; equal arguments give one object, to share programs."""
    own = config if placement.model is None else shard_config(config, placement.num_shares)
    return _ShardedFunctions(config, own, placement, implementation)


def _own_arrays(params: Any, placement: Placement) -> Any:
    """Returns a device's arrays without the axis of shares."""
    if placement.model is None:
        return params
    return jax.tree.map_with_path(
        lambda path, x: x[0] if is_stacked((path[-1].key,)) else x, params
    )
