"""Drafters that run a head on the target's taps: `eagle3_drafter` and `dflash_drafter`.

Slot t of an EAGLE-3 head's cache holds the pair of token t + 1 and the state of token t. The first
token of a text makes no pair. Slot t of a DFlash head's cache holds token t. `extend` writes the
slots of committed tokens from the target's taps, over entries of drafted ones.
A DFlash block begins at the last committed token, whose taps are not known yet.
If the target lies over devices, each device has the whole head, and runs it on its requests.
Embeddings and logits are the target's: their shares stay on their devices.
Axes: `B` requests, `T` tokens, `K` drafted tokens, `E` hidden of the target, `H` hidden of the
head, `V` vocabulary, `V_d` draft vocabulary.
"""

import dataclasses
import functools
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from specjax.config import SpeculativeConfig
from specjax.decode.drafters import Drafter, split_pieces, with_rows
from specjax.decode.propose import DraftInputs, propose_step
from specjax.devices.placement import replicate
from specjax.implementation import Implementation
from specjax.models.decoder.layers import table_logits
from specjax.models.decoder.transformer import functions
from specjax.models.heads.dflash import DFlashConfig, init_dflash_cache, merge_dflash
from specjax.models.heads.eagle3 import Eagle3Config, merge_eagle3
from specjax.models.heads.head_target import HeadTarget, head_target
from specjax.models.heads.sample_block import sample_block
from specjax.types import Draft, Model, Pieces

_Config = TypeVar("_Config", Eagle3Config, DFlashConfig)


def eagle3_drafter(
    target: Model,
    config: Eagle3Config,
    params: Any,
    *,
    implementation: str | Implementation | None = None,
) -> Drafter:
    """Returns a drafter that runs an EAGLE-3 head on top of the target.

    A step runs the head once over the last step's committed tokens, with the target's states. It
    then runs it once for every drafted token, with the head's own states. Near a text's end these
    are at up to K - 3 positions past it, as for `model_drafter`. If the head has no embeddings or
    no lm_head, it uses the target's, which are held in memory once.

    Args:
      target: from `load` or `build`; the target that the head was trained for.
      config: of the head.
      params: of the head, from `load_eagle3` or `build_eagle3`. `token_map` i32[V_d] among them
        holds the target's id of each draft token; without it they are the same.
      implementation: of the head's layer, as in `build`.

    Returns:
      A `Drafter` whose state holds the head's cache.

    Raises:
      ValueError: if the head is for another target.

    Example:
      >>> from specjax.models import TransformerConfig, build, build_eagle3
      >>> target = build(TransformerConfig(64, 16, 32, 4, 4, 2, 4))
      >>> config = Eagle3Config(TransformerConfig(64, 16, 32, 1, 4, 2, 4), 16, 64, taps=(1, 2, 4))
      >>> drafter = eagle3_drafter(target, config, build_eagle3(config))
      >>> output = specjax.generate(
      ...     target, drafter, [[7, 8, 9]], keys=jax.random.key(0), max_new_tokens=4)
      >>> int(output.lengths[0])
      7

    References:
      Li et al., 2025, arXiv:2503.01840: EAGLE-3.
    """
    steps = _functions(_Eagle3, config, head_target(target, config), implementation)
    parts = _drafter_params(target, config, params)
    return _features_drafter(target, config, parts, steps)


def dflash_drafter(
    target: Model,
    config: DFlashConfig,
    params: Any,
    *,
    implementation: str | Implementation | None = None,
) -> Drafter:
    """Returns a drafter that runs a DFlash head on top of the target.

    A step appends the keys and values of the last step's committed tokens, by the target's taps.
    It then runs the head once over a block. If the head has no embeddings or no lm_head, it uses
    the target's, which are held in memory once. The projections of keys and values are held twice,
    the second time concatenated, so that one product serves all layers.

    Args:
      target: from `load` or `build`; the target that the head was trained for.
      config: of the head.
      params: of the head, from `load_dflash` or `build_dflash`. `token_map` i32[V_d] among them
        holds the target's id of each draft token; without it they are the same.
      implementation: of the head's products and layers, as in `build`.

    Returns:
      A `Drafter` whose state is the head's cache. Its `propose` refuses a K larger than
      `config.max_speculative_tokens`. A smaller K computes K rows of logits.

    Raises:
      ValueError: if the head is for another target.

    Example:
      >>> from specjax.models import TransformerConfig, build, build_dflash
      >>> target = build(TransformerConfig(64, 16, 32, 4, 4, 2, 4))
      >>> layer = TransformerConfig(64, 16, 32, 2, 4, 2, 4, qk_norm=True)
      >>> config = DFlashConfig(layer, 64, taps=(1, 2, 4), block_size=5, mask_token_id=63)
      >>> drafter = dflash_drafter(target, config, build_dflash(config))
      >>> output = specjax.generate(
      ...     target, drafter, [[7, 8, 9]], keys=jax.random.key(0), max_new_tokens=4,
      ...     config=specjax.SpeculativeConfig(config.max_speculative_tokens))
      >>> int(output.lengths[0])
      7

    References:
      Chen et al., 2026, arXiv:2602.06036: DFlash.
    """
    steps = _functions(_DFlash, config, head_target(target, config), implementation)
    parts = _drafter_params(target, config, params)
    parts["context"] = merge_dflash(config, parts["head"]).context()
    return _features_drafter(target, config, parts, steps)


def _features_drafter(
    target: Model, head: Eagle3Config | DFlashConfig, params: Any, steps: tuple[Any, Any, Any]
) -> Drafter:
    """Returns a drafter whose head reads the target's taps."""
    taps, reads_pieces = head.taps, target.reads_pieces
    return Drafter(params, *steps, reads_features=True, taps=taps, reads_pieces=reads_pieces)


def _drafter_params(
    target: Model, head: Eagle3Config | DFlashConfig, params: Any
) -> dict[str, Any]:
    """Returns the head's parameters, its token map, and the target's if the head shares a table."""
    params = dict(replicate(target.placement, params))
    parts = {"token_map": params.pop("token_map")} if "token_map" in params else {}
    if not (head.has_embedding and head.has_lm_head):
        parts["target"] = target.params
    return parts | {"head": params}


def _follows(rows: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns bool[P], whether the token before a piece's first ends the piece before it.

    Args:
      rows: i32[P], of `Pieces`.
      positions: i32[P, C], of the pieces' tokens.
    """
    first, last = positions[:, 0], jnp.roll(positions[:, -1], 1)
    return (rows == jnp.roll(rows, 1)) & (first > 0) & (first == last + 1)


def _last_tokens(token_ids: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns the last committed token i32[B, 1] of each request."""
    index = jnp.clip(positions - 1, 0, token_ids.shape[1] - 1)
    return jnp.take_along_axis(token_ids, index[:, None], axis=1)


@functools.lru_cache(maxsize=64)
def _functions(kind: Any, *fields: Any) -> tuple[Any, Any, Any]:
    """Returns the functions of a drafter; equal ones for equal heads, to share programs."""
    drafter = kind(*fields)
    return drafter.init, drafter.extend, drafter.propose


@dataclasses.dataclass(frozen=True)
class _HeadDrafter(Generic[_Config]):
    """Parts of the functions of a drafter that runs a head of any kind.

    Attributes:
      head: configuration of the head.
      target: the parts of its target that it uses.
      implementation: of the head's products and layers.
    """

    head: _Config
    target: HeadTarget
    implementation: str | Implementation | None

    def _sampling_options(self, params: Any, **options: Any) -> dict[str, Any]:
        """Returns options of `propose_step` or `sample_block`, with the draft's vocabulary."""
        if "token_map" in params:
            options |= {"token_map": params["token_map"], "vocab_size": self.target.vocab_size}
        return options | {"placement": self.target.placement}

    def _table(self, params: Any) -> jax.Array:
        """Returns the table of embeddings, the target's if the head has none."""
        if not self.head.has_embedding:
            return params["target"]["embedding"]
        return params["head"].get("decoder", params["head"])["embedding"]

    def _embed(self, params: Any, token_ids: jax.Array) -> jax.Array:
        """Returns the embeddings [B, T, H] of tokens."""
        table = self._table(params)
        return table[token_ids] if self.head.has_embedding else self.target.embed(table, token_ids)

    def _logits(self, params: Any, rows: jax.Array, dtype: Any) -> jax.Array:
        """Returns draft logits [..., V_d] of rows [..., H], by the lm_head of either."""
        if self.head.has_lm_head:
            return table_logits(params["head"]["head"], rows)
        # In the target's dtype: a wider one would cast the whole table.
        logits: jax.Array = self.target.logits(params["target"], rows.astype(dtype))
        return logits


class _Eagle3State(NamedTuple):
    """The head's cache, and the state [B, H] of the last token whose taps were read."""

    cache: Any
    last: jax.Array


class _Eagle3(_HeadDrafter[Eagle3Config]):
    """The functions of a drafter that runs an EAGLE-3 head."""

    def init(self, params: Any, batch_size: int, max_length: int) -> _Eagle3State:
        """Implements `Drafter.init`."""
        layer = self.head.layer
        (cache,) = functions(layer)[0](batch_size, max_length)
        return _Eagle3State(cache, jnp.zeros((batch_size, layer.hidden_size), layer.dtype))

    def _fuse(self, params: Any, features: jax.Array) -> jax.Array:
        """Returns the states [B, T, H] of the target's taps."""
        return merge_eagle3(self.head, params).fuse(features, self.implementation)

    def _run(
        self, params: Any, tokens: jax.Array, states: jax.Array, positions: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        """Returns the head's outputs [B, T, H], and its cache."""
        head = merge_eagle3(self.head, params)
        return head(tokens, states, positions, cache, self.implementation)

    def extend(
        self,
        params: Any,
        state: _Eagle3State | Pieces,
        token_ids: jax.Array,
        positions: jax.Array,
        features: Any,
    ) -> _Eagle3State:
        """Implements `Drafter.extend`: writes the pairs of committed tokens."""
        on_each_device = self.target.on_each_device
        run, fuse = on_each_device(self._run), on_each_device(self._fuse)
        states = fuse(params["head"], features)
        pieces = state if isinstance(state, Pieces) else None
        cache, last = state if pieces is None else pieces.cache
        if pieces is not None:
            follows = _follows(pieces.rows, positions)
            cache, before = pieces._replace(cache=cache), jnp.roll(states[:, -1], 1, axis=0)
            last = jnp.where(follows[:, None], before, last[pieces.rows])
        before = jnp.concatenate([last[:, None], states[:, :-1]], axis=1)
        # A token at position 0 makes no pair: it gets position -1.
        pairs = jnp.maximum(positions - 1, -1)
        tokens = self._embed(params, token_ids)
        _, cache = run(params["head"], tokens, before, pairs, cache)
        # In every request padding follows the tokens.
        num_read = jnp.sum(positions >= 0, axis=1, dtype=jnp.int32)
        index = jnp.maximum(num_read - 1, 0)[:, None, None]
        last = jnp.where(
            num_read[:, None] > 0, jnp.take_along_axis(states, index, axis=1)[:, 0], last
        )
        if pieces is not None:
            # A text's last piece alone writes; one past the end is dropped.
            is_last = (num_read > 0) & ~jnp.roll(follows, -1)
            before = pieces.cache.last
            row = jnp.where(is_last, pieces.rows, len(before))
            last = before.at[row].set(last, mode="drop")
        return _Eagle3State(cache, last)

    def propose(
        self,
        params: Any,
        state: _Eagle3State | Pieces,
        token_ids: jax.Array,
        hidden: jax.Array,
        inputs: DraftInputs,
        **options: Any,
    ) -> tuple[Draft, Any]:
        """Implements `Drafter.propose`: runs the head over its own outputs."""
        num_tokens, scale = inputs.num_tokens, self.head.logit_scale
        run = self.target.on_each_device(self._run)
        assert num_tokens is not None
        whole, cache_rows = split_pieces(state)
        first = whole.last if cache_rows is None else whole.last[cache_rows]

        def step(carry: Any, token: jax.Array, position: jax.Array) -> tuple[jax.Array, Any]:
            cache, last = carry
            pairs = jnp.where(num_tokens >= 0, position - 1, -1)[:, None]
            tokens = self._embed(params, token[:, None])
            pieces = with_rows(cache, cache_rows)
            outputs, cache = run(params["head"], tokens, last[:, None], pairs, pieces)
            last = outputs[:, 0]
            rows = merge_eagle3(self.head, params["head"]).decode(last)
            logits = self._logits(params, rows, hidden.dtype)
            return logits if scale == 1.0 else logits * scale, (cache, last)

        drafts, (cache, _) = propose_step(
            step,
            (whole.cache, first),
            _last_tokens(token_ids, inputs.positions)[:, 0],
            inputs,
            **self._sampling_options(params, **options),
        )
        return drafts, whole._replace(cache=cache)


class _DFlash(_HeadDrafter[DFlashConfig]):
    """The functions of a drafter that runs a DFlash head."""

    def init(self, params: Any, batch_size: int, max_length: int) -> Any:
        """Implements `Drafter.init`."""
        return init_dflash_cache(self.head, batch_size, max_length)

    def extend(
        self, params: Any, cache: Any, token_ids: jax.Array, positions: jax.Array, features: Any
    ) -> Any:
        """Implements `Drafter.extend`: appends the keys and values of committed tokens."""
        weights = params["head"], params["context"]
        append = self.target.on_each_device(self._append)
        return append(weights, features, positions, cache)

    def _append(
        self, weights: tuple[Any, Any], features: jax.Array, positions: jax.Array, cache: Any
    ) -> Any:
        params, context = weights
        head = merge_dflash(self.head, params)
        return head.append(context, features, positions, cache, self.implementation)

    def propose(
        self,
        params: Any,
        cache: Any,
        token_ids: jax.Array,
        hidden: jax.Array,
        inputs: DraftInputs,
        *,
        config: SpeculativeConfig,
        **options: Any,
    ) -> tuple[Draft, Any]:
        """Implements `Drafter.propose`: runs the head over one block."""
        head, positions, num_tokens = self.head, inputs.positions, inputs.num_tokens
        assert num_tokens is not None
        k = config.num_speculative_tokens
        if k > head.max_speculative_tokens:
            raise ValueError(
                f"num_speculative_tokens is {k}; the DFlash head drafts blocks of "
                f"{head.max_speculative_tokens} tokens, so it needs to be at most that."
            )
        last_token = _last_tokens(token_ids, positions)
        masks = jnp.full((len(positions), head.block_size - 1), head.mask_token_id, jnp.int32)
        place = positions[:, None] - 1 + jnp.arange(head.block_size, dtype=jnp.int32)[None]
        place = jnp.where(num_tokens[:, None] >= 0, place, -1)
        ids = jnp.concatenate([last_token, masks], axis=1)
        states, cache = self._run_block(params, ids, place, cache)
        first = 0 if head.sample_from_anchor else 1
        drafts = sample_block(
            self._logits(params, states[:, first : first + k], hidden.dtype),
            inputs,
            config=config,
            **self._sampling_options(params, **options),
        )
        return drafts, cache

    def _run_block(
        self, params: Any, token_ids: jax.Array, positions: jax.Array, cache: Any
    ) -> Any:
        """Returns hidden states [B, T, E] of a block, and the cache."""

        def run(
            params: Any, table: jax.Array, ids: jax.Array, positions: jax.Array, cache: Any
        ) -> Any:
            decoder = merge_dflash(self.head, params, table).decoder
            return decoder(ids, positions, cache, self.implementation)

        if self.target.placement is None:
            return run(params["head"], self._table(params), token_ids, positions, cache)

        def on_device(params: Any, rows: jax.Array, positions: jax.Array, cache: Any) -> Any:
            # The block's own rows are the table.
            ids = jnp.arange(positions.size, dtype=jnp.int32).reshape(positions.shape)
            return run(params, rows.reshape(-1, rows.shape[-1]), ids, positions, cache)

        rows = self._embed(params, token_ids)
        return self.target.on_each_device(on_device)(params["head"], rows, positions, cache)
