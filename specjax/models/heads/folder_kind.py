"""`draft_kind`: what a folder drafts with, by its config.json alone."""

import os
import re
from typing import Any, Literal

from specjax.models.hf.folder import find_folder, read_json_object

__all__ = ["DraftKind", "draft_kind", "read_head_config"]

DraftKind = Literal["model", "head", "eagle3", "dflash"]

_OWN_HEAD = "specjax_head"
_SPECULATORS: dict[str, DraftKind] = {"eagle3": "eagle3", "dflash": "dflash"}
_ARCHITECTURES: dict[str, DraftKind] = {
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "Qwen3Eagle3Model": "eagle3",
    "Eagle3Speculator": "eagle3",
    "Eagle3DraftModel": "eagle3",
    "DFlashDraftModel": "dflash",
    "DFlashSpeculator": "dflash",
    # DeepSpec's DFlash heads are DSpark heads without what DSpark adds.
    "Qwen3DSparkModel": "dflash",
}
# Other kinds of drafts, which would otherwise be read as a model.
_OTHER_DRAFTS = re.compile(r"eagle|dflash|dspark|speculator|medusa|mtp|nextn", re.IGNORECASE)


def read_head_config(folder: str | os.PathLike[str]) -> tuple[dict[str, Any], str]:
    """Returns the fields of a folder's config.json, and the name of that file.

    Args:
      folder: any path.

    Raises:
      ValueError: if the folder or a readable config.json in it is missing.
    """
    path = find_folder(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json; the folder of a draft needs it.")
    return read_json_object(path, "the fields of a draft"), str(path)


def draft_kind(folder: str | os.PathLike[str]) -> DraftKind:
    """Returns what a folder drafts with; a `config.py` in it is never run.

    Args:
      folder: of a draft model or a draft head.

    Returns:
      "eagle3" for an EAGLE-3 head, "dflash" for a DFlash head, "head" for one that `save_head`
      wrote, "model" otherwise.

    Raises:
      ValueError: if config.json is missing or unreadable, or names a kind of draft head that is
        not supported.

    Example:
      >>> from specjax.models import pretrained_folder
      >>> draft_kind(pretrained_folder("head")), draft_kind(pretrained_folder("draft"))
      ('head', 'model')
    """
    fields, source = read_head_config(folder)
    if fields.get("model_type") == _OWN_HEAD:
        return "head"
    kind = fields.get("speculators_model_type")
    if kind is not None:
        return _known(kind, _SPECULATORS, "speculators_model_type", source)
    names = fields.get("architectures")
    for name in names if isinstance(names, list) else [names]:
        if isinstance(name, str) and (name in _ARCHITECTURES or _OTHER_DRAFTS.search(name)):
            return _known(name, _ARCHITECTURES, "architectures", source)
    # The first EAGLE-3 heads name the architecture of their layer.
    return "eagle3" if "draft_vocab_size" in fields else "model"


def _known(name: Any, kinds: dict[str, DraftKind], field: str, source: str) -> DraftKind:
    if not isinstance(name, str) or name not in kinds:
        raise ValueError(
            f"{source} has {field} {name!r}; the draft heads that are supported have "
            f"{', '.join(map(repr, kinds))}."
        )
    return kinds[name]
