"""Folders of draft heads: their kind, tensors and parameters.

`draft_kind` returns the kind of a folder's draft, by config.json. `HeadTensors` reads tensors under
the names of any format, and `save_head` writes the format of `speculators`. A `HeadFormat` holds
what differs between kinds.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import jax
import numpy as np
from jax.typing import DTypeLike

from specjax.file_io import JsonObject, quote
from specjax.models.heads.dflash import DFlashConfig
from specjax.models.heads.eagle3 import Eagle3Config
from specjax.models.heads.head_fields import HeadFields, Known, refuse_unknown
from specjax.models.hf.checkpoint import resolve_dtype
from specjax.models.hf.config_json import write_fields
from specjax.models.hf.folder import find_folder, read_json_object, write_folder
from specjax.models.hf.mapped_tensors import MappedTensors, has_weights
from specjax.models.hf.weight_map import (
    WeightEntry,
    assemble_arrays,
    set_path,
    stored_tensors,
    weight_entries,
)

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
    # DeepSpec's DFlash heads are DSpark heads without its additions.
    "Qwen3DSparkModel": "dflash",
}
# Other kinds of drafts, which would otherwise be read as a model.
_OTHER_DRAFTS = re.compile(
    r"assistant|dflash|domino|draft|dspark|eagle|hydra|lilicorr|medusa|mtp|nextn|speculator|xpress",
    re.IGNORECASE,
)
# A model has no such field.
_HEAD_FIELDS = ("dflash_config", "dspark_config", "markov_rank", "truncated_vocab_size")


def draft_kind(folder: str | os.PathLike[str]) -> DraftKind:
    """Returns the kind of a folder's draft; a `config.py` in it is never run.

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
    return _kind_of(*_read_config(folder))


def _read_config(folder: str | os.PathLike[str]) -> tuple[JsonObject, str]:
    """Returns the fields of a folder's config.json, and the name of that file."""
    path = find_folder(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json; the folder of a draft needs it.")
    return read_json_object(path, "the fields of a draft"), str(path)


def _kind_of(fields: JsonObject, source: str) -> DraftKind:
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
    name = next((name for name in _HEAD_FIELDS if fields.get(name)), "model_type")
    if name != "model_type" or (isinstance(model_type, str) and _OTHER_DRAFTS.search(model_type)):
        raise ValueError(
            f"{source} has {name} {quote(fields[name])}, which is a draft head's, and its "
            f"architectures say no kind that is supported: {', '.join(map(repr, _ARCHITECTURES))}."
        )
    return "model"


def refuse_eagle1(folder: str | os.PathLike[str]) -> None:
    """Refuses a head of EAGLE-1 or EAGLE-2, whose config.json is that of a model of one layer.

    Args:
      folder: of kind "model" by `draft_kind`.

    Raises:
      ValueError: if its config.json or its tensors are those of such a head.
    """
    fields, source = _read_config(folder)
    # Models that were converted to Llama may have the field, too, and more layers.
    is_named = "bias" in fields and fields.get("num_hidden_layers") == 1
    sign = f"{source} has bias" if is_named else ""
    if not sign and has_weights(folder) and "fc.weight" in HeadTensors(folder):
        sign = f"{folder} holds fc.weight"
    if sign:
        raise ValueError(
            f"{sign}, as heads of EAGLE-1 and EAGLE-2 do and models do not; of EAGLE's heads, "
            "those of EAGLE-3 are supported."
        )


def _known(name: Any, kinds: dict[str, DraftKind], field: str, source: str) -> DraftKind:
    if not isinstance(name, str) or name not in kinds:
        raise ValueError(
            f"{source} has {field} {quote(name)}; the draft heads that are supported have "
            f"{', '.join(map(repr, kinds))}."
        )
    return kinds[name]


# Tensors of a head that has tables or a vocabulary of its own.
_TOKEN_MAP, _EMBEDDING, _LM_HEAD = "d2t", "embed_tokens.weight", "lm_head.weight"
# Masks of the target tokens that the draft has, for training alone.
_UNREAD = ("t2d",)


class HeadTensors(MappedTensors):
    """The tensors of a head, named as in `speculators`: `layers.0.self_attn.q_proj.weight`.

    A file may write `midlayer.` for `layers.0.`, and `model.` before any name.

    Args:
      folder: with model.safetensors, or with model.safetensors.index.json and its files.

    Raises:
      ValueError: if it holds no safetensors, or unreadable ones.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        path = find_folder(folder)
        if not has_weights(path):
            _refuse_weights(path)
        super().__init__(path)
        self._plain_names: dict[str, str] = {}
        for stored in self.names():
            self._plain_names.setdefault(_plain_name(stored), stored)

    def __contains__(self, name: object) -> bool:
        return name in self._plain_names

    def stored_name(self, name: str) -> str:
        """Returns the name in the files of a tensor that `view` is asked for."""
        return self._plain_names.get(name, name)

    def load(self, entries: Iterable[WeightEntry], dtype: str) -> JsonObject:
        """Returns the parameters of entries, and refuses a folder that holds other tensors.

        Args:
          entries: arrays of the parameters, and the tensors that each concatenates.
          dtype: of the arrays.

        Raises:
          ValueError: as `view`, or for a tensor that was not read.
        """
        params: JsonObject = {}
        views = self.views(entries)
        names = (name for entry, _ in views for name in entry.names)
        self.check_all_read((*names, _TOKEN_MAP, *_UNREAD))
        for (entry, _), array in zip(views, assemble_arrays(views, dtype), strict=True):
            set_path(params, entry.path, array)
        return params

    def read_token_map(self, draft_vocab_size: int, vocab_size: int) -> np.ndarray | None:
        """Returns the target's id of each draft token, i32[V_d]; None for equal vocabularies.

        `d2t` holds offsets: token i of the draft is token i + d2t[i] of the target.

        Args:
          draft_vocab_size: V_d.
          vocab_size: of the target.

        Raises:
          ValueError: if `d2t` is missing, or maps to repeated ids or ids outside the target's.
        """
        if _TOKEN_MAP not in self:
            if draft_vocab_size == vocab_size:
                return None
            raise ValueError(
                f"{self.source} has no tensor d2t; config.json gives the draft "
                f"{draft_vocab_size} of the target's {vocab_size} tokens, and d2t says which."
            )
        offsets = self.view_integers(_TOKEN_MAP, (draft_vocab_size,))
        ids = np.arange(draft_vocab_size, dtype=np.int64) + offsets
        outside = (ids < 0) | (ids >= vocab_size)
        if outside.any():
            token = int(np.argmax(outside))
            raise ValueError(
                f"{self.source} maps draft token {token} to token {ids[token]} by d2t; "
                f"the target has tokens 0 to {vocab_size - 1}, so this head is another target's."
            )
        tokens, counts = np.unique(ids, return_counts=True)
        if counts.max() > 1:
            token = tokens[np.argmax(counts)]
            raise ValueError(
                f"{self.source} maps {counts.max()} draft tokens to token {token} by "
                "d2t; d2t holds offsets, and each target token may be that of one draft token."
            )
        is_identity = draft_vocab_size == vocab_size and not offsets.any()
        return None if is_identity else ids.astype(np.int32)


def _plain_name(stored: str) -> str:
    """Returns the name of a tensor without the prefixes of formats."""
    name = stored.removeprefix("model.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def head_entries(config: Eagle3Config | DFlashConfig) -> Iterator[WeightEntry]:
    """Yields the arrays of a head's `fc`, layers, last norm and own tables, and their tensors.

    Args:
      config: of the head.
    """
    size = config.layer.hidden_size
    width = len(config.taps) * config.target_hidden_size
    yield WeightEntry(("fc",), ("fc.weight",), ((size, width),), True)
    for entry in weight_entries(dataclasses.replace(config.layer, tie_word_embeddings=True)):
        if entry.path != ("embedding",) or config.has_embedding:
            names = tuple(name.removeprefix("model.") for name in entry.names)
            yield entry._replace(names=names)
    if config.has_lm_head:
        yield WeightEntry(("head",), (_LM_HEAD,), ((config.draft_vocab_size, size),), False)


_Config = TypeVar("_Config", Eagle3Config, DFlashConfig)


class HeadFormat(NamedTuple, Generic[_Config]):
    """The folder of a kind of heads.

    Attributes:
      kind: of the folder.
      title: of such a head, for errors.
      architecture: by which a written config.json names the kind.
      known: fields at the top level that this kind of head reads.
      nested: an object of config.json that may hold fields of the top level, too.
      known_nested: its fields.
      layer_kinds: `model_type` of the layers.
      read_config: `(head, num_target_layers, **tables) -> config`, where tables are `has_embedding`
        and `has_lm_head`.
      write_config: `config -> fields` of config.json that this kind of head has.
      entries: `(config, names) -> arrays` of the parameters and their tensors, given the names of
        the folder's tensors.
    """

    kind: DraftKind
    title: str
    architecture: str
    known: Known
    nested: str
    known_nested: Known
    layer_kinds: tuple[str, ...]
    read_config: Callable[..., _Config]
    write_config: Callable[[_Config], JsonObject]
    entries: Callable[[_Config, Container[str]], Iterator[WeightEntry]]


def open_head(
    form: HeadFormat[_Config], folder: str | os.PathLike[str], *, num_target_layers: int
) -> tuple[_Config, HeadFields, HeadTensors]:
    """Reads config.json, and the names and shapes of the tensors.

    Args:
      form: of the folder.
      folder: of the head.
      num_target_layers: of the target; decides the taps if config.json names none. A folder that
        names another number is refused.

    Returns:
      The configuration with the file's dtype, the other fields of the file, and the tensors, which
      are not read yet.

    Raises:
      ValueError: if the folder is of another kind, or asks for something unsupported.
    """
    fields, source = _read_config(folder)
    kind = _kind_of(fields, source)
    if kind != form.kind:
        raise ValueError(
            f"{folder} holds a {kind}; load_{form.kind} reads the folder of {form.title}."
        )
    head = HeadFields(fields, source, form.nested)
    refuse_unknown(fields, source, form.title, form.known, {form.nested: form.known_nested})
    if head.layer_kind not in form.layer_kinds:
        raise ValueError(
            f"{source} has model_type {head.layer_kind!r}; the layers of {form.title} are those of "
            f"{', '.join(map(repr, form.layer_kinds))}."
        )
    num_layers = head.read("num_target_layers")
    if num_layers not in (None, num_target_layers):
        raise ValueError(
            f"{source} has num_target_layers {quote(num_layers)} and the target has "
            f"{num_target_layers} layers; use a head that was trained for this target."
        )
    tensors = HeadTensors(folder)
    tables = {"has_embedding": _EMBEDDING in tensors, "has_lm_head": _LM_HEAD in tensors}
    try:
        return form.read_config(head, num_target_layers, **tables), head, tensors
    except ValueError as error:
        if str(error).startswith(source):
            raise
        raise ValueError(f"{source} contradicts itself: {error}") from None


def load_head(
    form: HeadFormat[_Config],
    folder: str | os.PathLike[str],
    dtype: DTypeLike | None,
    num_target_layers: int,
) -> tuple[Any, _Config]:
    """Returns the parameters of a head, and its configuration with their dtype.

    Args:
      form: of the folder.
      folder: of the head.
      dtype: as in `load`.
      num_target_layers: as in `open_head`.

    Raises:
      ValueError: as `open_head`, or if a tensor is missing, unreadable or unsupported, or is not
        read.
    """
    config, _, tensors = open_head(form, folder, num_target_layers=num_target_layers)
    layer = dataclasses.replace(config.layer, dtype=resolve_dtype(dtype, config.layer.dtype))
    token_map = tensors.read_token_map(config.draft_vocab_size, layer.vocab_size)
    params = tensors.load(form.entries(config, tensors), layer.dtype)
    if token_map is not None:
        params["token_map"] = jax.device_put(token_map)
    return params, dataclasses.replace(config, layer=layer)


def save_head(
    form: HeadFormat[_Config],
    folder: str | os.PathLike[str],
    params: Any,
    config: _Config,
    dtype: str,
    verifier: str | None,
) -> None:
    """Writes config.json and model.safetensors, each after the new one is complete.

    Args:
      form: of the folder.
      folder: created if absent.
      params: of the head, with a `token_map` if it drafts from a part of the vocabulary.
      config: of the head; its dtype is replaced by `dtype`.
      dtype: of the tensors on disk.
      verifier: the name of the target that the head was trained for, or None.

    Raises:
      ValueError: if the format has no room for the configuration.
    """
    k = config.num_speculative_tokens
    method = {"proposal_type": "greedy"} | ({} if k is None else {"speculative_tokens": k})
    fields = {
        "architectures": [form.architecture],
        "speculators_model_type": form.kind,
        "transformer_layer_config": write_fields(dataclasses.replace(config.layer, dtype=dtype)),
        "draft_vocab_size": config.draft_vocab_size,
        **form.write_config(config),
        "speculators_config": {
            "algorithm": form.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        "torch_dtype": dtype,
    }
    tensors = stored_tensors(params, form.entries(config, ()), dtype)
    if "token_map" in params:
        ids = np.asarray(params["token_map"], np.int64)
        tensors["d2t"] = ids - np.arange(len(ids))
        tensors["t2d"] = np.isin(np.arange(config.layer.vocab_size), ids)
    write_folder(folder, fields, tensors)


def _refuse_weights(path: Any) -> None:
    """Refuses a folder without safetensors; a pickle would run code when it is read."""
    if not any(path.glob("*.bin")) and not any(path.glob("*.pt")):
        raise ValueError(f"{path} has no model.safetensors; the folder of a draft head needs it.")
    name = sorted([*path.glob("*.bin"), *path.glob("*.pt")])[0].name
    raise ValueError(
        f"{path} has its weights in {name}, a pickle, which may run any code when it is read. "
        'Convert it where you trust it, in its folder: python -c "import torch; from '
        "safetensors.torch import save_file; save_file({n: t.contiguous() for n, t in "
        f"torch.load('{name}', weights_only=True).items()}}, 'model.safetensors')\""
    )
