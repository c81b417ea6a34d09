"""`load_config`: the configuration of a Hugging Face folder."""

import dataclasses
import os

from specjax.models.decoder.config import TransformerConfig
from specjax.models.hf.config_fields import read_field
from specjax.models.hf.config_reader import read_fields
from specjax.models.hf.folder import find_member, read_json_object

__all__ = ["load_config"]

_CONTENT = "the fields of a configuration"


def load_config(folder: str | os.PathLike[str]) -> TransformerConfig:
    """Reads `config.json`; EOS tokens come from `generation_config.json` if there is one.

    Args:
      folder: a Hugging Face folder of a supported family.

    Returns:
      The configuration, with the dtype that the file names.

    Raises:
      ValueError: if a file is missing or unreadable, or asks for something unsupported.

    Example:
      >>> from specjax.models import pretrained_folder
      >>> load_config(pretrained_folder("draft")).vocab_size
      4096
    """
    path = find_member(folder, "config.json")
    config = read_fields(read_json_object(path, _CONTENT), str(path))
    # Chat models name the token that ends a turn there, often only there.
    generation_config = path.with_name("generation_config.json")
    if not generation_config.is_file():
        return config
    eos_token_ids = read_field(
        "eos_token_id", read_json_object(generation_config, _CONTENT), str(generation_config)
    )
    if eos_token_ids is None:
        return config
    return dataclasses.replace(
        config,
        eos_token_ids=tuple(eos_token_ids if type(eos_token_ids) is list else [eos_token_ids]),
    )
