"""One decoder for all families: its module, and its view as pure functions.

Every layer has separate arrays: a scan over stacked layers would copy each layer's slice before
using it.
Axes: `B` requests, `T` new tokens, `E` hidden, `V` vocabulary.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.implementation import Implementation, with_row_invariance
from specjax.models.decoder.attention import AttentionBackend
from specjax.models.decoder.config import TransformerConfig
from specjax.models.decoder.dispatch import run_decoder, run_table
from specjax.models.decoder.layers import Layer, RMSNorm, embed_tokens, weight
from specjax.models.decoder.rope import rope_cos_sin
from specjax.types import Model


class Transformer(nnx.Module):
    """The decoder as an NNX module; `functions` is its view as pure functions.

    Args:
      config: sizes and constants.
      rngs: source of the initial weights; None gives zeros.
      axis_name: the mesh axis over which heads, MLPs and vocabulary lie, of which this device has
        the share that `config` describes; None is the whole decoder.
    """

    def __init__(
        self, config: TransformerConfig, rngs: nnx.Rngs | None, axis_name: str | None = None
    ) -> None:
        self.config, self.axis_name = config, axis_name
        self.embedding = weight(rngs, config, config.vocab_size, config.hidden_size)
        layers = range(config.num_hidden_layers)
        self.layers = nnx.List([Layer(config, n, rngs, axis_name) for n in layers])
        self.norm = RMSNorm(config, config.hidden_size)
        if not config.tie_word_embeddings:
            self.head = weight(rngs, config, config.vocab_size, config.hidden_size)

    def embed(self, token_ids: jax.Array) -> jax.Array:
        """Returns the scaled embeddings [B, T, E] of tokens."""
        return self._scaled(embed_tokens(self.embedding[...], token_ids, self.axis_name))

    def _scaled(self, embeddings: jax.Array) -> jax.Array:
        scale = self.config.embedding_scale
        return embeddings if scale is None else embeddings * jnp.asarray(scale, embeddings.dtype)

    def cos_sin(self, positions: jax.Array) -> dict[Any, Any]:
        """Returns cosines and sines for each kind of rotary frequencies that a layer has."""
        kinds = dict.fromkeys(layer.rope for layer in self.layers)
        return {kind: rope_cos_sin(*kind, self.config.head_dim, positions) for kind in kinds}

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        cache: Any,
        implementation: str | Implementation | None = None,
    ) -> tuple[jax.Array, Any]:
        """Returns hidden states [B, T, E] after the last norm, and the cache with the tokens in it.

        Args:
          token_ids: i32[B, T].
          positions: i32[B, T], -1 for no token.
          cache: a pair of keys and values for each layer.
          implementation: as in `build`.
        """
        hidden, _, cache = run_decoder(self, token_ids, positions, cache, implementation)
        return hidden, cache

    def plain(
        self, token_ids: jax.Array, positions: jax.Array, cache: Any, taps: tuple[int, ...] = ()
    ) -> tuple[jax.Array, tuple[jax.Array, ...], Any]:
        """Returns hidden states, taps and cache as `run_decoder` does, in plain JAX."""
        x, cos_sin, written = self.embed(token_ids), self.cos_sin(positions), []
        states = [x]
        for layer, entry in zip(self.layers, cache, strict=True):
            operands = (x, cos_sin[layer.rope], positions, entry)
            x, entry = _plain_layer(*nnx.split(layer), *operands)
            written.append(entry)
            states.append(x)
        hidden = self.norm(x).astype(x.dtype)
        return hidden, tuple(states[tap] for tap in taps), tuple(written)

    def causal(
        self,
        token_ids: jax.Array,
        implementation: AttentionBackend = None,
        taps: tuple[int, ...] = (),
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Returns hidden states [B, T, E] of whole sequences and taps, without a cache."""
        # A product: the gradient of a lookup adds colliding rows, in low precision and any order.
        table = self.embedding[...]
        x = jax.nn.one_hot(token_ids, self.config.vocab_size, dtype=table.dtype) @ table
        x = self._scaled(x)
        positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1])[None], token_ids.shape)
        cos_sin, states = self.cos_sin(positions), [x]
        for layer in self.layers:
            x = _causal_layer(implementation, *nnx.split(layer), x, cos_sin[layer.rope])
            states.append(x)
        return self.norm(x), tuple(states[tap] for tap in taps)

    def logits(
        self, hidden: jax.Array, implementation: str | Implementation | None = None
    ) -> jax.Array:
        """Returns logits [..., V] of hidden states [..., E]; of a share, this device's logits.

        Args:
          hidden: of `__call__`.
          implementation: as in `build`.
        """
        table = self.embedding if self.config.tie_word_embeddings else self.head
        logits = run_table(hidden, table[...], implementation)
        cap = self.config.logit_softcap
        if cap is None:
            return logits
        return (jnp.tanh(logits.astype(jnp.float32) / cap) * cap).astype(logits.dtype)


# JAX traces an inner `jit` once for equal layers, and lowers it to one function; XLA inlines it.
@functools.partial(jax.jit, static_argnums=0)
def _plain_layer(graph: Any, state: Any, *operands: Any) -> Any:
    return nnx.merge(graph, state).plain(*operands)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _causal_layer(
    implementation: AttentionBackend, graph: Any, state: Any, x: Any, cos_sin: Any
) -> Any:
    return nnx.merge(graph, state).causal(x, cos_sin, implementation)


@functools.cache
def _split(config: TransformerConfig, axis_name: str | None = None) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, None, axis_name)))


def merge_model(
    config: TransformerConfig, params: Any, axis_name: str | None = None
) -> Transformer:
    """Returns the decoder with these parameters.

    Args:
      config: sizes and constants.
      params: as in `Model.params`.
      axis_name: as in `Transformer`.
    """
    model: Transformer = nnx.merge(_split(config, axis_name)[0], nnx.State(params))
    return model


def param_shapes(config: TransformerConfig) -> Any:
    """Returns the parameters of `build` as a nested dict of `jax.ShapeDtypeStruct`."""
    return nnx.to_pure_dict(_split(config)[1])


@functools.cache
def functions(
    config: TransformerConfig,
    implementation: str | Implementation | None = None,
    axis_name: str | None = None,
) -> tuple[Any, Any, Any]:
    """Returns `(init_cache, apply, logits)` as `specjax.types.Model` describes them.

    Equal arguments give equal functions, so that their models share compilations.

    Args:
      config: sizes and constants.
      implementation: as in `build`.
      axis_name: as in `Transformer`; the functions then run inside `shard_map`.

    Returns:
      The three functions.

    Example:
      >>> init_cache, apply, logits = functions(TransformerConfig(64, 16, 32, 2, 4, 2, 4))
      >>> keys, values = init_cache(batch_size=1, max_length=8)[0]  # of the first layer
      >>> keys.shape
      (1, 2, 8, 4)
    """

    def init_cache(batch_size: int, max_length: int) -> Any:
        shape = (batch_size, config.num_key_value_heads, max_length, config.head_dim)
        layers = range(config.num_hidden_layers)
        return tuple(
            (jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype)) for _ in layers
        )

    def apply(
        params: Any, token_ids: jax.Array, positions: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        model = merge_model(config, params, axis_name)
        return model(token_ids, positions, cache, implementation)

    def logits(params: Any, hidden: jax.Array) -> jax.Array:
        return merge_model(config, params, axis_name).logits(hidden, implementation)

    return init_cache, apply, logits


@functools.cache
def tap_function(
    config: TransformerConfig,
    implementation: str | Implementation | None = None,
    axis_name: str | None = None,
) -> Any:
    """Returns `apply_with_taps`, as `specjax.types.Model` describes it, of this configuration.

    Args:
      config: sizes and constants.
      implementation: as in `build`.
      axis_name: as in `functions`.

    Raises:
      ValueError: by the returned function, if a tap is not in 0 to the number of layers, or if
        there is no tap.
    """

    def apply_with_taps(
        params: Any, token_ids: jax.Array, positions: jax.Array, cache: Any, taps: tuple[int, ...]
    ) -> tuple[jax.Array, jax.Array, Any]:
        wrong = [tap for tap in taps if not 0 <= tap <= config.num_hidden_layers]
        if wrong or not taps:
            raise ValueError(
                f"taps are {list(taps)}; each needs to be a number of layers from 0, the "
                f"embeddings, to {config.num_hidden_layers}, all layers of this model."
            )
        model = merge_model(config, params, axis_name)
        operands = (token_ids, positions, cache, implementation)
        hidden, states, cache = run_decoder(model, *operands, taps)
        return hidden, jnp.concatenate(states, axis=-1), cache

    return apply_with_taps


def build(
    config: TransformerConfig,
    params: Any = None,
    *,
    seed: int = 0,
    implementation: str | Implementation | None = None,
    row_invariant: bool = False,
) -> Model:
    """Returns a `specjax.types.Model` of this configuration.

    Args:
      config: sizes and constants.
      params: nested dict of arrays as another such model holds it. None draws
        random weights from `seed`.
      seed: of the random weights.
      implementation: of a step or a chunk: "xla", "triton", "interpret", an `Implementation`, or
        None. None chooses the kernels on GPUs that have them. XLA multiplies more than 128 rows.
      row_invariant: whether the bits of a token's logits depend on no other request, on no later
        token, and on no number of tokens that are read at once. `generate` and the engine then
        verify so, too. On an H100 a step takes up to 13 % longer, a prompt 1.4 times as long. On a
        CPU a step of one row takes 1.7 times as long.

    Returns:
      `Model` whose functions are `functions(config, implementation)`.

    Example:
      >>> config = TransformerConfig(64, 16, 32, 2, 4, 2, 4)
      >>> model = build(config)
      >>> sorted(model.params)
      ['embedding', 'layers', 'norm']
    """
    if row_invariant:
        implementation = with_row_invariance(implementation)
    if params is None:
        params = nnx.to_pure_dict(nnx.state(Transformer(config, nnx.Rngs(seed)), nnx.Param))
    return Model(
        params,
        *functions(config, implementation),
        max_length=config.max_position_embeddings,
        apply_with_taps=tap_function(config, implementation),
        reads_pieces=True,
        row_invariant=row_invariant,
    )
