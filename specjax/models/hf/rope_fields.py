"""The rotary embeddings that a `config.json` describes, in the words of transformers 4 or 5."""

from typing import Any

from specjax.models.config import RopeScaling
from specjax.models.hf.config_fields import read_field, read_scale

__all__ = ["read_local_rope", "read_rope"]

_Fields = dict[str, Any]
# Since transformers 5, and before; where both are, the older one counts, as it does there.
_NEW, _OLD = "rope_parameters", "rope_scaling"
_LOCAL = "sliding_attention"
_KINDS = ("full_attention", _LOCAL)


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
    new, old = read_field(_NEW, fields, source) or {}, read_field(_OLD, fields, source) or {}
    if new and bool(new.keys() & set(_KINDS)) != has_local:
        raise ValueError(
            f"{source} has {_NEW} for {'all layers' if has_local else 'each kind of layer'}; "
            f"model_type {fields.get('model_type')!r} needs them for "
            f"{' and for '.join(_KINDS) if has_local else 'all layers'}."
        )
    new = _of_layers("full_attention", new, source)
    for name, found in ((_NEW, new), (_OLD, old)):
        _check(name, found, source)
    name, found = (_OLD, old) if old else (_NEW, new)
    # Where both are, the older takes the place of the newer; of several kinds it is a part.
    theta = float(read_field("rope_theta", fields | (new | old if has_local else found), source))
    kind = _kind(found)
    if kind == "default":
        return theta, None
    scaling = RopeScaling(str(kind), read_scale("factor", name, found, source))
    if kind == "linear":
        return theta, scaling
    low, high, length = (read_scale(part, name, found, source) for part in scaling._fields[2:])
    outer = fields.get("original_max_position_embeddings")
    if outer not in (None, length):
        raise ValueError(
            f"{source} has original_max_position_embeddings {outer!r} and {name} with {length:g}; "
            "readers differ in which one counts, they need to be equal."
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
    found = _of_layers(_LOCAL, read_field(_NEW, fields, source) or {}, source)
    _check(_NEW, found, source)
    if _kind(found) != "default":
        raise ValueError(
            f"{source} has {_NEW} that scales those of {_LOCAL} by {_kind(found)!r}; only those of "
            "full attention are scaled here."
        )
    # The newer words give each kind of layer its own `rope_theta`.
    renamed = {"rope_local_base_freq": found["rope_theta"]} if "rope_theta" in found else fields
    return float(read_field("rope_local_base_freq", renamed, source))


def _of_layers(kind: str, found: _Fields, source: str) -> _Fields:
    """The rotary embeddings of one kind of layer, where each kind has its own."""
    if not found.keys() & set(_KINDS):
        return {} if kind == _LOCAL else found
    inner = found.get(kind) or {}
    if not isinstance(inner, dict):
        raise ValueError(f"{source} has {_NEW} with {kind} {inner!r}; it needs to be an object.")
    return inner


def _kind(found: _Fields) -> Any:
    plain = "default" if found.keys() <= {"rope_theta"} else None
    return found.get("rope_type", found.get("type", plain))


def _check(name: str, found: _Fields, source: str) -> None:
    kind = _kind(found)
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(
            f"{source} has {name} that scales the rotary embeddings by {kind!r}; only 'linear' and "
            "'llama3' are built here."
        )
    if found.get("partial_rotary_factor", 1) not in (1, None):
        raise ValueError(f"{source} has {name} that turns a part of each head; all is turned here.")
