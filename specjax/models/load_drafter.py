"""Loads any supported drafter; `config.json` decides the kind."""

import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from jax.typing import DTypeLike

from specjax.config import SpeculativeConfig
from specjax.decode.drafters import Drafter, model_drafter
from specjax.implementation import Implementation
from specjax.models.decoder.config import TransformerConfig
from specjax.models.heads.drafters import dflash_drafter, eagle3_drafter
from specjax.models.heads.head_folder import (
    DraftKind,
    HeadFormat,
    draft_kind,
    load_head,
    open_head,
    refuse_eagle1,
)
from specjax.models.heads.head_formats import DFLASH, EAGLE3
from specjax.models.heads.head_target import check_target
from specjax.models.hf.checkpoint import load
from specjax.models.hf.config_json import load_config
from specjax.models.hf.folder import read_json_object
from specjax.theory.step_costs import StepCosts
from specjax.types import Model

_HEADS: dict[str, tuple[HeadFormat[Any], Callable[..., Drafter]]] = {
    "eagle3": (EAGLE3, eagle3_drafter),
    "dflash": (DFLASH, dflash_drafter),
}


class DraftInfo(NamedTuple):
    """Metadata of a folder's draft, without its weights.

    Attributes:
      kind: as `draft_kind` returns it.
      config: of the draft model or head.
      num_speculative_tokens: K that a head was trained for, or None.
      verifier: the name of the target that a head was trained for, or None.
      max_speculative_tokens: the largest K that a head drafts, or None.
      step_costs: for K = "auto", of a `step_costs.json` in the folder, or None.
      usual_acceptance_rate: for K = "auto" in an engine, of the same file, or None.
    """

    kind: DraftKind
    config: Any
    num_speculative_tokens: int | None = None
    verifier: str | None = None
    max_speculative_tokens: int | None = None
    step_costs: tuple[float, ...] | StepCosts | None = None
    usual_acceptance_rate: float | None = None


def read_draft(folder: str | os.PathLike[str], target: TransformerConfig) -> DraftInfo:
    """Returns the metadata of a folder's draft; refuses a head for another target.

    Args:
      folder: of a draft model or a draft head.
      target: configuration of the target.

    Raises:
      ValueError: if the folder is unreadable or unsupported, or its head is for another target.

    Example:
      >>> from specjax.models import load_config, pretrained_folder
      >>> target = load_config(pretrained_folder("target"))
      >>> read_draft(pretrained_folder("eagle3"), target).kind
      'eagle3'
    """
    kind = draft_kind(folder)
    if kind == "model":
        refuse_eagle1(folder)
        info = DraftInfo(kind, load_config(folder))
    else:
        layers = target.num_hidden_layers
        config, head, _ = open_head(_HEADS[kind][0], folder, num_target_layers=layers)
        sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
        check_target(config, num_layers=layers, **sizes)
        most = config.max_speculative_tokens
        k = config.num_speculative_tokens or most
        info = DraftInfo(kind, config, k, head.verifier, most)
    path = pathlib.Path(folder) / "step_costs.json"
    if not path.exists():
        return info
    try:
        fields = read_json_object(path, "step costs")
        rate = fields.get("usual_acceptance_rate")
        auto = SpeculativeConfig(
            "auto", step_costs=fields["step_costs"], usual_acceptance_rate=rate
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no file of step costs: {error}") from None
    return info._replace(
        step_costs=auto.step_costs, usual_acceptance_rate=auto.usual_acceptance_rate
    )


def load_drafter(
    folder: str | os.PathLike[str],
    target: Model,
    dtype: DTypeLike | None = None,
    *,
    implementation: str | Implementation | None = None,
) -> Drafter:
    """Loads a drafter: a smaller model, an EAGLE-3 head or a DFlash head.

    Args:
      folder: with config.json, which decides the kind, and model.safetensors.
      target: from `load`, `build` or `split_model`; a head runs on its states. If it lies over
        devices, each gets the whole draft, as by `load(folder, mesh=mesh, replicate=True)`. A
        smaller model is `row_invariant` if the target is; heads have no such form.
      dtype: as in `load`. For a head None is the dtype of the target and its taps.
      implementation: of the draft's steps, as in `build`.

    Returns:
      A `Drafter` for this target.

    Raises:
      ValueError: if the folder is unreadable or unsupported, or its head is for another target.

    Example:
      >>> from specjax.models import load, pretrained_folder
      >>> target, _ = load(pretrained_folder("target"))
      >>> load_drafter(pretrained_folder("eagle3"), target).taps
      (2, 4, 5)
    """
    kind = draft_kind(folder)
    if kind == "model":
        refuse_eagle1(folder)
        mesh = None if target.placement is None else target.placement.mesh
        options: dict[str, Any] = {"mesh": mesh, "replicate": True}
        options["row_invariant"] = target.row_invariant
        return model_drafter(load(folder, dtype, implementation=implementation, **options)[0])
    dtype = target.params["embedding"].dtype if dtype is None else dtype
    layers = len(target.params["layers"])
    form, drafter = _HEADS[kind]
    params, config = load_head(form, folder, dtype, layers)
    return drafter(target, config, params, implementation=implementation)
