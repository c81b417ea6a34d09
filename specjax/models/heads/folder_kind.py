"""`draft_kind`: what a folder drafts with, by its config.json alone."""

import os
import re
from typing import Any, Literal

from specjax.file_io import quote
from specjax.models.hf.folder import find_folder, read_json_object
from specjax.models.hf.mapped_tensors import MappedTensors, has_weights

__all__ = ["DraftKind", "draft_kind", "read_head_config", "refuse_eagle1"]

DraftKind = Literal["model", "eagle3", "dflash"]

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
_OTHER_DRAFTS = re.compile(
    r"assistant|dflash|domino|draft|dspark|eagle|hydra|lilicorr|medusa|mtp|nextn|speculator|xpress",
    re.IGNORECASE,
)
# A model has no such field.
_HEAD_FIELDS = ("dflash_config", "dspark_config", "markov_rank", "truncated_vocab_size")


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
      "eagle3" for an EAGLE-3 head, "dflash" for a DFlash head, "model" otherwise.

    Raises:
      ValueError: if config.json is missing or unreadable, or names a kind of draft head that is
        not supported.

    Example:
      >>> from specjax.models import pretrained_folder
      >>> draft_kind(pretrained_folder("eagle3")), draft_kind(pretrained_folder("draft"))
      ('eagle3', 'model')
    """
    fields, source = read_head_config(folder)
    model_type = fields.get("model_type")
    if model_type == "specjax_head":
        raise ValueError(
            f"{source} is of specjax's former head on the last state, which is no longer read; "
            "train an EAGLE-3 head for this target with examples/train_head.py."
        )
    kind = fields.get("speculators_model_type")
    if kind is not None:
        return _known(kind, _SPECULATORS, "speculators_model_type", source)
    inner = fields.get("dflash_config")
    projector = inner.get("projector_type") if isinstance(inner, dict) else None
    if projector is not None:
        return _known(projector, {"dflash": "dflash"}, "dflash_config.projector_type", source)
    names = fields.get("architectures")
    for name in names if isinstance(names, list) else [names]:
        if isinstance(name, str) and (name in _ARCHITECTURES or _OTHER_DRAFTS.search(name)):
            return _known(name, _ARCHITECTURES, "architectures", source)
    # The first EAGLE-3 heads name the architecture of their layer.
    if "draft_vocab_size" in fields or fields.get("eagle_config"):
        return "eagle3"
    told = [name for name in _HEAD_FIELDS if fields.get(name)]
    if told or (isinstance(model_type, str) and _OTHER_DRAFTS.search(model_type)):
        name = told[0] if told else "model_type"
        raise ValueError(
            f"{source} has {name} {quote(fields[name])}, which is a draft head's, and its "
            f"architectures say no kind that is supported: {', '.join(map(repr, _ARCHITECTURES))}."
        )
    return "model"


def refuse_eagle1(folder: str | os.PathLike[str]) -> None:
    """Refuses a head of EAGLE-1 or EAGLE-2, whose config.json is that of a model of one layer.

    Args:
      folder: of what `draft_kind` calls a model.

    Raises:
      ValueError: if its config.json or its tensors are those of such a head.
    """
    fields, source = read_head_config(folder)
    # Models that were converted to Llama may have the field, too, and more layers.
    is_named = "bias" in fields and fields.get("num_hidden_layers") == 1
    sign = f"{source} has bias" if is_named else ""
    if not sign and has_weights(folder) and _plain_names(folder) & {"fc.weight"}:
        sign = f"{folder} holds fc.weight"
    if sign:
        raise ValueError(
            f"{sign}, as heads of EAGLE-1 and EAGLE-2 do and models do not; of EAGLE's heads, "
            "those of EAGLE-3 are supported."
        )


def _plain_names(folder: str | os.PathLike[str]) -> set[str]:
    return {name.removeprefix("model.") for name in MappedTensors(folder).names()}


def _known(name: Any, kinds: dict[str, DraftKind], field: str, source: str) -> DraftKind:
    if not isinstance(name, str) or name not in kinds:
        raise ValueError(
            f"{source} has {field} {quote(name)}; the draft heads that are supported have "
            f"{', '.join(map(repr, kinds))}."
        )
    return kinds[name]
