"""`save_dflash`: writes the folder of a DFlash head in the format of `speculators`."""

import dataclasses
import os
from typing import Any

from specjax.models.heads.dflash import DFlashConfig
from specjax.models.heads.dflash_folder import dflash_entries
from specjax.models.heads.head_writer import speculators_config, write_head
from specjax.models.hf.config_writer import write_fields

__all__ = ["save_dflash"]


def save_dflash(
    folder: str | os.PathLike[str],
    params: Any,
    config: DFlashConfig,
    dtype: str = "bfloat16",
    *,
    verifier: str | None = None,
) -> None:
    """Saves a folder that `load_dflash` reads back, up to rounding to `dtype`.

    Args:
      folder: created if absent. Its config.json and model.safetensors are replaced, each after the
        new one is complete.
      params: of the head.
      config: of the head; its dtype is replaced by `dtype`.
      dtype: of the tensors on disk.
      verifier: the name of the target that the head was trained for, or None.

    Raises:
      ValueError: if the format has no room for the configuration.

    Example:
      >>> import tempfile
      >>> from specjax.models import DFlashConfig, TransformerConfig, build_dflash, load_dflash
      >>> layer = TransformerConfig(64, 16, 32, 2, 4, 2, 4, qk_norm=True)
      >>> config = DFlashConfig(layer, 64, taps=(1, 2), block_size=4, mask_token_id=63)
      >>> folder = tempfile.mkdtemp()
      >>> save_dflash(folder, build_dflash(config), config)
      >>> load_dflash(folder, "float32", num_target_layers=4)[1].taps
      (1, 2)
    """
    fields = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": write_fields(dataclasses.replace(config.layer, dtype=dtype)),
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": list(config.taps),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "speculators_config": speculators_config("dflash", config.num_speculative_tokens, verifier),
        "torch_dtype": dtype,
    }
    write_head(
        folder,
        fields,
        params,
        dflash_entries(config),
        dtype=dtype,
        vocab_size=config.layer.vocab_size,
    )
