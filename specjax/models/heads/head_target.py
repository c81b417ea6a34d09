"""What a draft head uses of its target, on one device or over several.

On a target over devices each device has the whole head, and runs it on its requests. Embeddings and
logits are the target's: their shares stay where they are.
Axes: `B` requests, `T` tokens, `E` hidden, `V` vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from specjax.devices.placement import Placement
from specjax.models.decoder.layers import embed_tokens
from specjax.types import Model

__all__ = ["HeadTarget", "head_target"]


class HeadTarget(NamedTuple):
    """What a head uses of a target; equal for equal targets, whose drafters share programs.

    Attributes:
      logits: as in `Model`.
      vocab_size: V.
      placement: where the target lies, or None.
    """

    logits: Any
    vocab_size: int
    placement: Placement | None

    def embed(self, table: jax.Array, token_ids: jax.Array) -> jax.Array:
        """Returns the target's embeddings [B, T, E] of tokens, unscaled.

        Args:
          table: the target's, [V, E], or [N * W, E] of N devices.
          token_ids: i32[B, T].
        """
        placement = self.placement
        if placement is None or placement.model is None:
            return table[token_ids]

        def on_share(table: jax.Array, token_ids: jax.Array) -> jax.Array:
            return embed_tokens(table, token_ids, placement.model)

        specs = PartitionSpec(placement.model), placement.spec()
        # The sum leaves equal numbers on every device, which no type says.
        mapped = placement.map(on_share, specs, placement.spec(), check_vma=False)
        embedded: jax.Array = mapped(table, placement.pad(token_ids))
        return embedded[: len(token_ids)]

    def on_each_device(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that every device runs with all parameters, on its requests.

        GSPMD would bring a kernel the rows of all devices.

        Args:
          function: of parameters and pytrees of arrays [B, ...]; returns such a pytree.
        """
        placement = self.placement
        if placement is None:
            return function
        whole, requests = PartitionSpec(), placement.spec()

        def run(params: Any, *arrays: Any) -> Any:
            size = len(jax.tree.leaves(arrays)[0])
            specs = (whole, *(requests for _ in arrays))
            mapped = placement.map(function, specs, requests, check_vma=False)
            outputs = mapped(params, *jax.tree.map(placement.pad, arrays))
            return jax.tree.map(lambda x: x[:size], outputs)

        return run


def head_target(target: Model) -> HeadTarget:
    """Returns what a head uses of a target, from `load`, `build` or `split_model`."""
    vocab_size, size = target.params["embedding"].shape
    if target.split_logits is not None:
        # The shares of a table are filled up.
        row = jax.ShapeDtypeStruct((1, size), target.params["embedding"].dtype)
        vocab_size = jax.eval_shape(target.logits, target.params, row).shape[-1]
    return HeadTarget(target.logits, vocab_size, target.placement)
