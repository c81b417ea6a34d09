"""Reads the rotary embeddings of a `config.json` of transformers 4 or 5."""

from typing import Any

from specjax.file_io import quote
from specjax.models.decoder.rope import RopeScaling
from specjax.models.hf.config_fields import OBJECT, POSITIVE, read_field

_Fields = dict[str, Any]
# The field of transformers 5 and that of 4. If both are present the older one counts, as in
# transformers.
_NEW_FIELD, _OLD_FIELD = "rope_parameters", "rope_scaling"
_LOCAL_LAYERS = "sliding_attention"
_LAYER_KINDS = ("full_attention", _LOCAL_LAYERS)


def read_rope(
    fields: _Fields, source: str, has_local: bool = False
) -> tuple[float, RopeScaling | None]:
    """Returns base and scaling of the rotary frequencies in layers with full attention.

    Args:
      fields: the parsed JSON.
      source: names the file in an error.
      has_local: whether layers with a window have other rotary frequencies.

    Raises:
      ValueError: if the scaling is neither "linear" nor "llama3" or lacks a number, or if
        `rope_parameters` does not match `has_local`.
    """
    new, old = (read_field(name, fields, source) or {} for name in (_NEW_FIELD, _OLD_FIELD))
    if new and bool(new.keys() & set(_LAYER_KINDS)) != has_local:
        raise ValueError(
            f"{source} has {_NEW_FIELD} for {'all layers' if has_local else 'each kind of layer'}; "
            f"model_type {fields.get('model_type')!r} needs them for "
            f"{' and for '.join(_LAYER_KINDS) if has_local else 'all layers'}."
        )
    new = _rope_of_layers("full_attention", new, source)
    for name, rope in ((_NEW_FIELD, new), (_OLD_FIELD, old)):
        _check_rope(name, rope, source)
    if has_local and "rope_type" not in old and old.get("type", "default") != "default":
        raise ValueError(
            f"{source} has {_OLD_FIELD} with type {quote(old['type'])} and no rope_type, "
            f"which scales nothing for model_type {fields.get('model_type')!r} in transformers; "
            f"rename type to rope_type, or remove {_OLD_FIELD}."
        )
    name, rope = (_OLD_FIELD, old) if old else (_NEW_FIELD, new)
    # The older field replaces the newer one; with local frequencies it is merged into it.
    theta = float(read_field("rope_theta", fields | (new | old if has_local else rope), source))
    kind = _scaling_kind(rope)
    if kind == "default":
        return theta, None
    scaling = RopeScaling(str(kind), _read_number("factor", name, rope, source))
    if kind == "linear":
        return theta, scaling
    low, high, length = (
        _read_number(parameter, name, rope, source) for parameter in scaling._fields[2:]
    )
    outer_length = fields.get("original_max_position_embeddings")
    if outer_length not in (None, length):
        raise ValueError(
            f"{source} has original_max_position_embeddings {quote(outer_length)} and "
            f"{name} with {length:g}; loaders differ in which one counts, so they need to be equal."
        )
    if low >= high:
        raise ValueError(
            f"{source} has {name} with low_freq_factor {low}; it needs to be below "
            f"high_freq_factor ({high})."
        )
    return theta, RopeScaling("llama3", scaling.factor, low, high, int(length))


def read_local_rope(fields: _Fields, source: str) -> float:
    """Returns the base of the unscaled rotary frequencies in layers with a window.

    Args:
      fields: the parsed JSON.
      source: names the file in an error.

    Raises:
      ValueError: if the frequencies are scaled.
    """
    rope = _rope_of_layers(_LOCAL_LAYERS, read_field(_NEW_FIELD, fields, source) or {}, source)
    _check_rope(_NEW_FIELD, rope, source)
    if _scaling_kind(rope) != "default":
        raise ValueError(
            f"{source} has {_NEW_FIELD} that scales those of {_LOCAL_LAYERS} by "
            f"{quote(_scaling_kind(rope))}; only those of full attention are scaled here."
        )
    # `rope_parameters` gives each kind of layer a `rope_theta`.
    renamed = {"rope_local_base_freq": rope["rope_theta"]} if "rope_theta" in rope else fields
    return float(read_field("rope_local_base_freq", renamed, source))


def _rope_of_layers(kind: str, rope: _Fields, source: str) -> _Fields:
    """Returns the rotary fields of one kind of layer, if kinds differ."""
    if not rope.keys() & set(_LAYER_KINDS):
        return {} if kind == _LOCAL_LAYERS else rope
    kind_rope: _Fields = OBJECT.check(f"{_NEW_FIELD} with {kind}", rope.get(kind) or {}, source)
    return kind_rope


def _read_number(parameter: str, name: str, rope: _Fields, source: str) -> float:
    return float(POSITIVE.check(f"{name} with {parameter}", rope.get(parameter), source))


def _scaling_kind(rope: _Fields) -> Any:
    default_kind = "default" if rope.keys() <= {"rope_theta"} else None
    return rope.get("rope_type", rope.get("type", default_kind))


def _check_rope(name: str, rope: _Fields, source: str) -> None:
    kind = _scaling_kind(rope)
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(
            f"{source} has {name} that scales the rotary embeddings by {quote(kind)}; only "
            "'linear' and 'llama3' are supported."
        )
    if rope.get("partial_rotary_factor", 1) not in (1, None):
        raise ValueError(
            f"{source} has {name} that rotates a part of each head; only whole heads are supported."
        )
