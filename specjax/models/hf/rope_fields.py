"""The rotary embeddings that a `config.json` describes, in the words of transformers 4 or 5."""

from typing import Any

from specjax.models.config import RopeScaling
from specjax.models.hf.config_fields import read_field, read_scale

__all__ = ["read_local_rope", "read_rope"]

_Fields = dict[str, Any]
# Since transformers 5, and before; where both are, the older one counts, as it does there.
_NEW_FIELD, _OLD_FIELD = "rope_parameters", "rope_scaling"
_LOCAL_LAYERS = "sliding_attention"
_LAYER_KINDS = ("full_attention", _LOCAL_LAYERS)


def read_rope(
    fields: _Fields, source: str, has_local: bool = False
) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary frequencies, of full attention where they are several.

    Args:
      fields: the parsed JSON.
      source: how a refusal names it.
      has_local: whether layers with a window have rotary frequencies of their own.

    Raises:
      ValueError: if something else than "linear" or "llama3" scales them, or incompletely, or if
        there is one kind of them where there need to be two, or the reverse.
    """
    new, old = (
        read_field(_NEW_FIELD, fields, source) or {},
        read_field(_OLD_FIELD, fields, source) or {},
    )
    if new and bool(new.keys() & set(_LAYER_KINDS)) != has_local:
        raise ValueError(
            f"{source} has {_NEW_FIELD} for {'all layers' if has_local else 'each kind of layer'}; "
            f"model_type {fields.get('model_type')!r} needs them for "
            f"{' and for '.join(_LAYER_KINDS) if has_local else 'all layers'}."
        )
    new = _rope_of_layers("full_attention", new, source)
    for name, rope in ((_NEW_FIELD, new), (_OLD_FIELD, old)):
        _check_rope(name, rope, source)
    name, rope = (_OLD_FIELD, old) if old else (_NEW_FIELD, new)
    # Where both are, the older takes the place of the newer; of several kinds it is a part.
    theta = float(read_field("rope_theta", fields | (new | old if has_local else rope), source))
    kind = _scaling_kind(rope)
    if kind == "default":
        return theta, None
    scaling = RopeScaling(str(kind), read_scale("factor", name, rope, source))
    if kind == "linear":
        return theta, scaling
    low, high, length = (
        read_scale(parameter, name, rope, source) for parameter in scaling._fields[2:]
    )
    outer_length = fields.get("original_max_position_embeddings")
    if outer_length not in (None, length):
        raise ValueError(
            f"{source} has original_max_position_embeddings {outer_length!r} and {name} with "
            f"{length:g}; readers differ in which one counts, they need to be equal."
        )
    if low >= high:
        raise ValueError(
            f"{source} has {name} with low_freq_factor {low}; it needs to be below "
            f"high_freq_factor ({high})."
        )
    return theta, RopeScaling("llama3", scaling.factor, low, high, int(length))


def read_local_rope(fields: _Fields, source: str) -> float:
    """Base of the rotary frequencies in layers with a window, which nothing scales.

    Args:
      fields: the parsed JSON.
      source: how a refusal names it.

    Raises:
      ValueError: if something scales them.
    """
    rope = _rope_of_layers(_LOCAL_LAYERS, read_field(_NEW_FIELD, fields, source) or {}, source)
    _check_rope(_NEW_FIELD, rope, source)
    if _scaling_kind(rope) != "default":
        raise ValueError(
            f"{source} has {_NEW_FIELD} that scales those of {_LOCAL_LAYERS} by "
            f"{_scaling_kind(rope)!r}; only those of full attention are scaled here."
        )
    # The newer words give each kind of layer its own `rope_theta`.
    renamed = {"rope_local_base_freq": rope["rope_theta"]} if "rope_theta" in rope else fields
    return float(read_field("rope_local_base_freq", renamed, source))


def _rope_of_layers(kind: str, rope: _Fields, source: str) -> _Fields:
    """The rotary embeddings of one kind of layer, where each kind has its own."""
    if not rope.keys() & set(_LAYER_KINDS):
        return {} if kind == _LOCAL_LAYERS else rope
    kind_rope = rope.get(kind) or {}
    if not isinstance(kind_rope, dict):
        raise ValueError(
            f"{source} has {_NEW_FIELD} with {kind} {kind_rope!r}; it needs to be an object."
        )
    return kind_rope


def _scaling_kind(rope: _Fields) -> Any:
    default_kind = "default" if rope.keys() <= {"rope_theta"} else None
    return rope.get("rope_type", rope.get("type", default_kind))


def _check_rope(name: str, rope: _Fields, source: str) -> None:
    kind = _scaling_kind(rope)
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(
            f"{source} has {name} that scales the rotary embeddings by {kind!r}; only 'linear' and "
            "'llama3' are built here."
        )
    if rope.get("partial_rotary_factor", 1) not in (1, None):
        raise ValueError(f"{source} has {name} that turns a part of each head; all is turned here.")
