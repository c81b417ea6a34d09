"""The parts of its target that a draft head uses: embeddings, logits and placement.

If the target lies over devices, its embeddings and logits are shares that stay on their devices.
The head itself is whole on each device, and runs on the requests of that device.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from specjax.devices.placement import Placement
from specjax.file_io import quote
from specjax.models.decoder.layers import embed_tokens
from specjax.models.heads.dflash import DFlashConfig
from specjax.models.heads.eagle3 import Eagle3Config
from specjax.types import Model


class HeadTarget(NamedTuple):
    """The parts of a target that a head uses; equal for equal targets, to share programs.

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
        # The sum is equal on every device, which no type expresses.
        mapped = placement.map(on_share, specs, placement.spec(), check_vma=False)
        embedded: jax.Array = mapped(table, placement.pad(token_ids))
        return embedded[: len(token_ids)]

    def on_each_device(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that every device runs with all parameters, on its requests.

        GSPMD would gather the rows of all devices for a kernel.

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


def head_target(target: Model, head: Eagle3Config | DFlashConfig) -> HeadTarget:
    """Returns the parts of its target that a head uses; refuses a target of another head.

    Args:
      target: from `load`, `build` or `split_model`.
      head: configuration of the head.

    Raises:
      ValueError: as `check_target`.
    """
    vocab_size, size = target.params["embedding"].shape
    if target.split_logits is not None:
        # The shares of a table are padded.
        row = jax.ShapeDtypeStruct((1, size), target.params["embedding"].dtype)
        vocab_size = jax.eval_shape(target.logits, target.params, row).shape[-1]
    layers = len(target.params["layers"])
    check_target(head, hidden_size=size, vocab_size=vocab_size, num_layers=layers)
    return HeadTarget(target.logits, vocab_size, target.placement)


def check_target(
    head: Eagle3Config | DFlashConfig, *, hidden_size: int, vocab_size: int, num_layers: int
) -> None:
    """Refuses a head that was trained for another target.

    Args:
      head: configuration of the head.
      hidden_size: of the target.
      vocab_size: of the target.
      num_layers: of the target.

    Raises:
      ValueError: if the head reads states of another size, tokens of another vocabulary, or layers
        that the target does not have.

    Example:
      >>> from specjax.models import TransformerConfig
      >>> head = Eagle3Config(TransformerConfig(64, 16, 32, 1, 4, 2, 4), 16, 64, taps=(1, 9))
      >>> check_target(head, hidden_size=16, vocab_size=64, num_layers=8)
      Traceback (most recent call last):
        ...
      ValueError: the EAGLE-3 head reads states after layers [1, 9] and the target has 8 layers; \
use a head that was trained for this target.
    """
    kind, layer, hint = head.kind, head.layer, "use a head that was trained for this target."
    if head.target_hidden_size != hidden_size:
        raise ValueError(
            f"the {kind} head reads hidden states of size {head.target_hidden_size} and the "
            f"target's have {hidden_size}; {hint}"
        )
    if layer.vocab_size != vocab_size:
        raise ValueError(
            f"the {kind} head is for {layer.vocab_size} tokens and the target has {vocab_size}; "
            f"{hint}"
        )
    if not head.taps or min(head.taps) < 0 or max(head.taps) > num_layers:
        raise ValueError(
            f"the {kind} head reads states after layers {quote(list(head.taps))} and the target "
            f"has {num_layers} layers; {hint}"
        )
