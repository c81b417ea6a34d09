"""What the config.json of every kind of draft head holds: its layers, its taps, its K.

Three formats differ in where they say it: that of SpecForge and SGLang, that of `speculators`, and
DeepSpec's.
"""

import reprlib
from typing import Any, NamedTuple

from specjax.models.config import TransformerConfig
from specjax.models.hf.config_reader import read_fields

__all__ = ["HeadFields", "check_num_target_layers", "default_taps", "read_head_fields"]

_Fields = dict[str, Any]
# `speculators` leaves out fields with the values of the classes in transformers.
_CLASS_SIZES = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
}
# Where a format names the layers that are tapped, and how many more layers have run there.
_TAPS = (
    ((), "eagle_aux_hidden_state_layer_ids", 0),
    ((), "aux_hidden_state_layer_ids", 0),
    ((), "target_layer_ids", 1),
    (("eagle_config",), "eagle_aux_hidden_state_layer_ids", 1),
    (("dflash_config",), "target_layer_ids", 1),
)
# Read here, or by the kind of head, with another meaning than a model's.
_NOT_OF_THE_LAYER = ("architectures", "logit_scale", "quantization_config")


class HeadFields(NamedTuple):
    """What a config.json says, whatever its format.

    Attributes:
      fields: the parsed JSON.
      source: names the file in an error.
      layer: the configuration of the head's layers. Its vocabulary is the target's.
      layer_kind: `model_type` of the layers.
      target_hidden_size: of the target.
      draft_vocab_size: tokens that the head drafts from.
      taps: numbers of layers after which the target's residual stream is read, 0 the embeddings;
        None where the file leaves them out.
      num_speculative_tokens: K that the head was made for, or None.
      verifier: the name of the target that it was trained for, or None.
    """

    fields: dict[str, Any]
    source: str
    layer: TransformerConfig
    layer_kind: str
    target_hidden_size: int
    draft_vocab_size: int
    taps: tuple[int, ...] | None
    num_speculative_tokens: int | None
    verifier: str | None


def read_head_fields(fields: dict[str, Any], source: str) -> HeadFields:
    """Returns what the config.json of a head says.

    Args:
      fields: the parsed JSON.
      source: names the file in an error.

    Raises:
      ValueError: if a field is missing, has a wrong type, or asks for something unsupported.

    Example:
      >>> fields = {"model_type": "llama", "vocab_size": 64, "hidden_size": 16,
      ...     "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
      ...     "draft_vocab_size": 40, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}}
      >>> head = read_head_fields(fields, "config.json")
      >>> head.layer.head_dim, head.draft_vocab_size, head.taps
      (4, 40, (2, 4))
    """
    if fields.get("quantization_config") is not None:
        raise ValueError(
            f"{source} has a quantization_config; quantised weights are not supported; use a "
            "folder with weights in a float dtype."
        )
    inner = fields
    if fields.get("speculators_model_type") is not None:
        inner = {"model_type": "qwen3"} | _object(fields, "transformer_layer_config", source)
        inner = _CLASS_SIZES.get(str(inner["model_type"]), {}) | inner
        # The tensors are of the outer object's.
        inner = {"dtype": fields.get("dtype") or fields.get("torch_dtype")} | inner
    inner = {name: value for name, value in inner.items() if name not in _NOT_OF_THE_LAYER}
    layer = read_fields(inner, source)
    sizes = {"target_hidden_size": layer.hidden_size, "draft_vocab_size": layer.vocab_size}
    for name, default in sizes.items():
        sizes[name] = default if fields.get(name) is None else fields[name]
        if type(sizes[name]) is not int or sizes[name] < 1:
            raise ValueError(
                f"{source} has {name} {reprlib.repr(fields[name])}; it needs to be a size >= 1."
            )
    if sizes["draft_vocab_size"] > layer.vocab_size:
        raise ValueError(
            f"{source} has draft_vocab_size {sizes['draft_vocab_size']} and vocab_size "
            f"{layer.vocab_size}; a draft's vocabulary is a part of the target's."
        )
    speculation = _object(fields, "speculators_config", source)
    verifier = _object(speculation, "verifier", source).get("name_or_path")
    return HeadFields(
        fields=fields,
        source=source,
        layer=layer,
        layer_kind=inner["model_type"],
        **sizes,
        taps=_read_taps(fields, source),
        num_speculative_tokens=_read_k(speculation, source),
        verifier=verifier if isinstance(verifier, str) and verifier else None,
    )


def check_num_target_layers(told: Any, source: str, num_target_layers: int) -> None:
    """Refuses a head that names another number of layers than the target has.

    Args:
      told: `num_target_layers` of config.json, or None.
      source: names the file in an error.
      num_target_layers: of the target.

    Raises:
      ValueError: if they differ.
    """
    if told not in (None, num_target_layers):
        raise ValueError(
            f"{source} has num_target_layers {reprlib.repr(told)} and the target has "
            f"{num_target_layers} layers; use a head that was trained for this target."
        )


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Returns the taps of an EAGLE-3 head whose config.json leaves them out.

    Args:
      num_layers: of the target.

    Example:
      >>> default_taps(32)
      (2, 16, 29)
    """
    return (2, num_layers // 2, num_layers - 3)


def _read_taps(fields: _Fields, source: str) -> tuple[int, ...] | None:
    """Returns taps in numbers of layers that have run, by the convention of each place.

    In `eagle_config` and in DeepSpec's and DFlash's `target_layer_ids` a layer's id stands for its
    output, as SGLang reads it. At the top level `speculators` counts layers.
    """
    found = {}
    for path, name, offset in _TAPS:
        place = fields
        for key in path:
            place = _object(place, key, source)
        ids = place.get(name)
        if ids in (None, []):
            continue
        where = ".".join((*path, name))
        if not isinstance(ids, list) or any(type(i) is not int or i < 0 for i in ids):
            raise ValueError(
                f"{source} has {where} {reprlib.repr(ids)}; it needs to be a list of layer ids."
            )
        found[where] = tuple(i + offset for i in ids)
    if len(set(found.values())) > 1:
        raise ValueError(
            f"{source} names the tapped layers in {' and '.join(found)}, which differ: after "
            f"{' and '.join(reprlib.repr(list(taps)) for taps in found.values())} layers. Remove "
            "one."
        )
    return next(iter(found.values()), None)


def _read_k(speculation: _Fields, source: str) -> int | None:
    """Returns `speculative_tokens` of the default method of proposing."""
    methods = speculation.get("proposal_methods")
    wanted = speculation.get("default_proposal_method")
    methods = methods if isinstance(methods, list) else []
    methods = [method for method in methods if isinstance(method, dict)]
    named = [method for method in methods if method.get("proposal_type") == wanted]
    k = next((method.get("speculative_tokens") for method in named or methods), None)
    if k is not None and (type(k) is not int or k < 1):
        raise ValueError(
            f"{source} has speculative_tokens {reprlib.repr(k)}; it needs to be an integer >= 1."
        )
    return k


def _object(fields: _Fields, name: str, source: str) -> _Fields:
    """Returns an object inside another, {} if it is absent or null."""
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{source} has {name} {reprlib.repr(value)}; it needs to be an object.")
    return value
