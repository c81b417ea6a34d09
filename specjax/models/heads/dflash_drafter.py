"""`dflash_drafter`: a drafter that runs a DFlash head on the target's taps.

Slot t of the head's cache is of token t. `extend` writes the slots of committed tokens from the
target's taps, over what the blocks have left there. A block is at the last committed token, whose
taps are not known yet, and after it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.config import SpeculativeConfig
from specjax.decode.drafters import Drafter
from specjax.decode.propose import DraftInputs
from specjax.devices.placement import put_whole
from specjax.implementation import Implementation
from specjax.models.heads.check_target import check_target
from specjax.models.heads.dflash import DFlashConfig, DFlashFunctions, dflash_functions
from specjax.models.heads.draft_rows import draft_rows
from specjax.models.heads.head_target import HeadTarget, head_target
from specjax.types import Draft, Model

__all__ = ["check_dflash", "dflash_drafter"]


def check_dflash(
    config: DFlashConfig, *, hidden_size: int, vocab_size: int, num_layers: int
) -> None:
    """Refuses a head that was trained for another target.

    Args:
      config: of the head.
      hidden_size: of the target.
      vocab_size: of the target.
      num_layers: of the target.

    Raises:
      ValueError: if the head reads states of another size, tokens of another vocabulary, or after
        layers that the target has not.

    Example:
      >>> from specjax.models import TransformerConfig
      >>> layer = TransformerConfig(64, 16, 32, 2, 4, 2, 4, qk_norm=True)
      >>> config = DFlashConfig(layer, 64, taps=(1, 9), block_size=4, mask_token_id=63)
      >>> check_dflash(config, hidden_size=16, vocab_size=64, num_layers=8)
      Traceback (most recent call last):
        ...
      ValueError: the DFlash head reads states after layers [1, 9] and the target has 8 layers; \
use a head that was trained for this target.
    """
    check_target(
        "DFlash",
        trained=(config.layer.hidden_size, config.layer.vocab_size),
        target=(hidden_size, vocab_size),
        taps=config.taps,
        num_layers=num_layers,
    )


def dflash_drafter(
    target: Model,
    config: DFlashConfig,
    params: Any,
    *,
    implementation: str | Implementation | None = None,
) -> Drafter:
    """Returns a drafter that runs a DFlash head on top of the target.

    A step appends the keys and values of the tokens that the last step committed, by the target's
    taps, and runs the head once over a block. Embeddings and an lm_head that the head has not are
    the target's; they are held in memory once. The projections of keys and values are held twice,
    the second time next to one another, so that one product serves all layers.

    Args:
      target: from `load` or `build`; the target that the head was trained for.
      config: of the head.
      params: of the head, from `load_dflash` or `build_dflash`. `token_map` i32[V_d] among them
        holds the target's id of each draft token; without it they are the same.
      implementation: of the head's products and layers, as in `build`.

    Returns:
      A `Drafter` whose state is the head's cache. Its `propose` refuses a K that is larger than
      `config.max_speculative_tokens`; a smaller one computes as many rows of logits.

    Raises:
      ValueError: if the head is for another target.

    Example:
      >>> from specjax.models import TransformerConfig, build
      >>> from specjax.models.heads.dflash import build_dflash
      >>> target = build(TransformerConfig(64, 16, 32, 4, 4, 2, 4))
      >>> layer = TransformerConfig(64, 16, 32, 2, 4, 2, 4, qk_norm=True)
      >>> config = DFlashConfig(layer, 64, taps=(1, 2, 4), block_size=5, mask_token_id=63)
      >>> drafter = dflash_drafter(target, config, build_dflash(config))
      >>> output = specjax.generate(
      ...     target, drafter, [[7, 8, 9]], [3], keys=jax.random.key(0), max_new_tokens=4,
      ...     config=specjax.SpeculativeConfig(config.max_speculative_tokens))
      >>> int(output.lengths[0])
      7

    References:
      Chen et al., 2026, arXiv:2602.06036: DFlash.
    """
    shared = head_target(target)
    check_dflash(
        config,
        hidden_size=target.params["embedding"].shape[1],
        vocab_size=shared.vocab_size,
        num_layers=len(target.params["layers"]),
    )
    functions = dflash_functions(config, implementation)
    params = put_whole(target.placement, params)
    head = {name: params[name] for name in params if name != "token_map"}
    parts = {"head": head, "context": functions.context(head)}
    if not (config.has_embedding and config.has_lm_head):
        parts["target"] = target.params
    if "token_map" in params:
        parts["token_map"] = params["token_map"]
    return Drafter(
        parts,
        *_drafter_functions(config, shared, implementation),
        reads_features=True,
        taps=config.taps,
    )


@functools.lru_cache(maxsize=64)
def _drafter_functions(
    head: DFlashConfig, target: HeadTarget, implementation: str | Implementation | None
) -> tuple[Any, Any, Any]:
    """Returns the functions of a drafter; equal ones for equal heads, to share programs."""
    functions = dflash_functions(head, implementation)
    append = target.on_each_device(lambda params, *arrays: functions.append(*params, *arrays))

    def init(params: Any, batch_size: int, max_length: int) -> Any:
        return functions.init_cache(batch_size, max_length)

    def extend(
        params: Any, cache: Any, token_ids: jax.Array, positions: jax.Array, features: Any
    ) -> Any:
        weights = params["head"], params["context"]
        return append(weights, features, positions, cache)

    return init, extend, functools.partial(_draft, head, functions, target)


def _draft(
    head: DFlashConfig,
    functions: DFlashFunctions,
    target: HeadTarget,
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
    positions, num_tokens = inputs.positions, inputs.num_tokens
    assert num_tokens is not None
    k = config.num_speculative_tokens
    if k > head.max_speculative_tokens:
        raise ValueError(
            f"num_speculative_tokens is {k}; the DFlash head drafts blocks of "
            f"{head.max_speculative_tokens} tokens, so it needs to be at most that."
        )
    index = jnp.clip(positions - 1, 0, token_ids.shape[1] - 1)
    last_token = jnp.take_along_axis(token_ids, index[:, None], axis=1)
    masks = jnp.full((len(positions), head.block_size - 1), head.mask_token_id, jnp.int32)
    place = positions[:, None] - 1 + jnp.arange(head.block_size, dtype=jnp.int32)[None]
    place = jnp.where(num_tokens[:, None] >= 0, place, -1)
    ids = jnp.concatenate([last_token, masks], axis=1)
    states, cache = _run_block(head, functions, target, params, ids, place, cache)
    first = 0 if head.sample_from_anchor else 1
    logits = _logits(head, target, params, states[:, first : first + k], hidden.dtype)
    if "token_map" in params:
        options |= {"token_map": params["token_map"], "vocab_size": target.vocab_size}
    options |= {"placement": target.placement}
    return draft_rows(logits, inputs, config=config, **options), cache


def _run_block(
    head: DFlashConfig,
    functions: DFlashFunctions,
    target: HeadTarget,
    params: Any,
    token_ids: jax.Array,
    positions: jax.Array,
    cache: Any,
) -> tuple[jax.Array, Any]:
    """Returns hidden states [B, T, E] of a block, and the cache."""
    owner = params["head"]["decoder"] if head.has_embedding else params["target"]
    table = owner["embedding"]
    if target.placement is None:
        states, cache = functions.apply(params["head"], table, token_ids, positions, cache)
        return states, cache
    rows = table[token_ids] if head.has_embedding else target.embed(table, token_ids)

    def on_device(params: Any, rows: jax.Array, positions: jax.Array, cache: Any) -> Any:
        # The block's own rows are the table.
        ids = jnp.arange(positions.size, dtype=jnp.int32).reshape(positions.shape)
        return functions.apply(params, rows.reshape(-1, rows.shape[-1]), ids, positions, cache)

    states, cache = target.on_each_device(on_device)(params["head"], rows, positions, cache)
    return states, cache


def _logits(
    head: DFlashConfig, target: HeadTarget, params: Any, states: jax.Array, dtype: Any
) -> jax.Array:
    """Returns draft logits [B, K, V_d], by the target's lm_head if the head has none."""
    if not head.has_lm_head:
        # In the target's dtype: a wider one would cast its table.
        logits: jax.Array = target.logits(params["target"], states.astype(dtype))
        return logits
    # The table on the left, as in the target's product.
    rows = states.reshape(-1, states.shape[-1])
    return (params["head"]["head"] @ rows.T).T.reshape(*states.shape[:2], -1)
