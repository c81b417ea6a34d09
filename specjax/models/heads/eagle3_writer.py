"""`save_eagle3`: writes the folder of an EAGLE-3 head in the format of `speculators`.

That format alone says without doubt what its taps are.
"""

import dataclasses
import os
from typing import Any

from specjax.models.heads.eagle3 import Eagle3Config
from specjax.models.heads.eagle3_folder import eagle3_entries
from specjax.models.heads.head_writer import speculators_config, write_head
from specjax.models.hf.config_writer import write_fields

__all__ = ["save_eagle3"]

_FLAGS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")


def save_eagle3(
    folder: str | os.PathLike[str],
    params: Any,
    config: Eagle3Config,
    dtype: str = "bfloat16",
    *,
    verifier: str | None = None,
) -> None:
    """Saves a folder that `load_eagle3` reads back, up to rounding to `dtype`.

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
      >>> from specjax.models import TransformerConfig, build_eagle3, load_eagle3
      >>> layer = TransformerConfig(64, 16, 32, 1, 4, 2, 4)
      >>> config, folder = Eagle3Config(layer, 16, 64, taps=(1, 2, 4)), tempfile.mkdtemp()
      >>> save_eagle3(folder, build_eagle3(config), config)
      >>> load_eagle3(folder, "float32", num_target_layers=4)[1].taps
      (1, 2, 4)
    """
    if config.fc_bias or config.logit_scale != 1.0:
        raise ValueError(
            f"the head has fc_bias {config.fc_bias} and logit_scale {config.logit_scale}; the "
            "format of speculators has neither."
        )
    write_head(
        folder,
        _fields(config, dtype, verifier),
        params,
        eagle3_entries(config),
        dtype=dtype,
        vocab_size=config.layer.vocab_size,
    )


def _fields(config: Eagle3Config, dtype: str, verifier: str | None) -> dict[str, Any]:
    """Returns the fields of config.json."""
    layer = dataclasses.replace(config.layer, dtype=dtype)
    size, target = layer.hidden_size, config.target_hidden_size
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": write_fields(layer),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None if target == size else target,
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        **{name: getattr(config, name) for name in _FLAGS},
        "speculators_config": speculators_config("eagle3", config.num_speculative_tokens, verifier),
        "torch_dtype": dtype,
    }
