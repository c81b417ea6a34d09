"""Fields of config.json that all kinds of draft heads share: layers, taps, K.

Three formats have them in different places: those of SpecForge and SGLang, of `speculators`, and of
DeepSpec. Loaders and trainers add fields with every kind of head. A field is read, is known to have
no effect, has an empty value (null, false, 0, empty), or is refused.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from specjax.file_io import JsonObject, quote
from specjax.models.decoder.config import TransformerConfig
from specjax.models.hf.config_fields import FIELD_NAMES
from specjax.models.hf.config_reader import read_fields
from specjax.models.hf.unread_fields import CHECKED_FIELDS

__all__ = [
    "ANY",
    "HeadFields",
    "Known",
    "any_of",
    "default_taps",
    "read_head_fields",
    "refuse_unknown",
]

_Fields = JsonObject
# `speculators` leaves out fields with the values of the classes in transformers.
_CLASS_SIZES = {
    kind: {
        "vocab_size": vocab_size,
        "hidden_size": 4096,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    }
    for kind, vocab_size, intermediate_size in (("llama", 32000, 11008), ("qwen3", 151936, 22016))
}
# Fields with the ids of tapped layers, and the offsets to numbers of layers that have run.
_TAP_SOURCES = (
    ((), "eagle_aux_hidden_state_layer_ids", 0),
    ((), "aux_hidden_state_layer_ids", 0),
    ((), "target_layer_ids", 1),
    (("eagle_config",), "eagle_aux_hidden_state_layer_ids", 1),
    (("dflash_config",), "target_layer_ids", 1),
)
# Read here, or by the kind of head, with another meaning than a model's.
_IGNORED_FIELDS = ("architectures", "logit_scale", "quantization_config")

ANY = None
"""Stands for every value of a field."""
Known = Mapping[str, tuple[Any, ...] | None]
"""Fields by name, each with the values that are allowed."""


def any_of(names: str) -> Known:
    """Returns fields that may have any value.

    Args:
      names: of the fields, with spaces between.

    Example:
      >>> any_of("block_size mask_token_id")
      {'block_size': None, 'mask_token_id': None}
    """
    return dict.fromkeys(names.split(), ANY)


_FORMAT = """
    _commit_hash _name_or_path architectures auto_map base_model_ep_plan base_model_pp_plan
    base_model_tp_plan custom_pipelines dtype has_no_defaults_at_init is_llama_config model_type
    name_or_path speculators_config speculators_model_type speculators_version torch_dtype
    transformers_version unsloth_fixed unsloth_version
"""
_TOKENS = """
    bos_token_id decoder_start_token_id eos_token_id pad_token_id prefix sep_token_id
    tokenizer_class
"""
# The tensors decide whether a head has embeddings and an lm_head.
_TRAINING = """
    attention_dropout embed_requires_grad gradient_checkpointing hidden_dropout initializer_range
    max_anchors num_anchors pretraining_tp tie_word_embeddings ttt_length ttt_steps
"""
_EXECUTION = """
    _attn_implementation _attn_implementation_autoset attn_implementation chunk_size_feed_forward
    flex_attention_backend is_decoder output_attentions output_hidden_states return_dict
    tf_legacy_loss tie_encoder_decoder torchscript use_bfloat16 use_cache
"""
_CLASSIFICATION = "finetuning_task id2label label2id num_labels problem_type task_specific_params"
# Defaults of transformers' own loop.
_GENERATION = """
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
    forced_eos_token_id length_penalty max_length max_new_tokens min_length no_repeat_ngram_size
    num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values
    repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
"""
_HARMLESS = any_of(_FORMAT + _TOKENS + _TRAINING + _EXECUTION + _CLASSIFICATION + _GENERATION)
# `read_fields` reads these, or refuses the values that change the layers.
_LAYER: Known = {
    **dict.fromkeys((*FIELD_NAMES, *CHECKED_FIELDS), ANY),
    **any_of("initial_context_length original_max_position_embeddings"),
    "text_config": (),
    # Pairs of a half apart rotate together, as `rotate` does it.
    "is_neox_style": (True,),
    "rope_is_neox_style": (True,),
}
_ROPE = any_of(
    "factor high_freq_factor low_freq_factor original_max_position_embeddings "
    "partial_rotary_factor rope_theta rope_type type"
)
_SPECULATION = any_of("algorithm default_proposal_method proposal_methods verifier")


class HeadFields(NamedTuple):
    """The fields of a config.json, independent of its format.

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
      nested: an object of the JSON that may hold fields of the top level, too, or None.
    """

    fields: JsonObject
    source: str
    layer: TransformerConfig
    layer_kind: str
    target_hidden_size: int
    draft_vocab_size: int
    taps: tuple[int, ...] | None
    num_speculative_tokens: int | None
    verifier: str | None
    nested: str | None = None

    def value(self, name: str) -> Any:
        """Returns a field of the top level or of `nested`, equal if in both; None if in neither.

        Args:
          name: of the field.

        Raises:
          ValueError: if the two differ.
        """
        inner = None if self.nested is None else self.fields.get(self.nested)
        places = (self.fields, inner or {})
        values = [place[name] for place in places if place.get(name) is not None]
        if len(values) == 2 and values[0] != values[1]:
            both = f" and in {self.nested} ".join(map(quote, values))
            raise ValueError(
                f"{self.source} has {name} {both}; loaders differ in which counts: remove one."
            )
        return values[0] if values else None

    def flag(self, name: str) -> bool | None:
        """Returns a field that is true, false or absent.

        Args:
          name: of the field.

        Raises:
          ValueError: if it has another value.
        """
        value = self.value(name)
        if value is not None and not isinstance(value, bool):
            raise ValueError(
                f"{self.source} has {name} {quote(value)}; it needs to be true or false."
            )
        return value

    def check_num_target_layers(self, num_target_layers: int) -> None:
        """Refuses a head that names another number of layers than the target has.

        Args:
          num_target_layers: of the target.

        Raises:
          ValueError: if they differ.
        """
        num_layers = self.value("num_target_layers")
        if num_layers not in (None, num_target_layers):
            raise ValueError(
                f"{self.source} has num_target_layers {quote(num_layers)} and the target has "
                f"{num_target_layers} layers; use a head that was trained for this target."
            )


def read_head_fields(fields: JsonObject, source: str) -> HeadFields:
    """Returns the fields of a head's config.json.

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
    inner = {name: value for name, value in inner.items() if name not in _IGNORED_FIELDS}
    layer = read_fields(inner, source)
    target_hidden_size = _size(fields, "target_hidden_size", layer.hidden_size, source)
    draft_vocab_size = _size(fields, "draft_vocab_size", layer.vocab_size, source)
    if draft_vocab_size > layer.vocab_size:
        raise ValueError(
            f"{source} has draft_vocab_size {draft_vocab_size} and vocab_size "
            f"{layer.vocab_size}; a draft's vocabulary is a part of the target's."
        )
    speculation = _object(fields, "speculators_config", source)
    verifier = _object(speculation, "verifier", source).get("name_or_path")
    return HeadFields(
        fields=fields,
        source=source,
        layer=layer,
        layer_kind=inner["model_type"],
        target_hidden_size=target_hidden_size,
        draft_vocab_size=draft_vocab_size,
        taps=_read_taps(fields, source),
        num_speculative_tokens=_read_k(speculation, source),
        verifier=verifier if isinstance(verifier, str) and verifier else None,
    )


def refuse_unknown(
    fields: JsonObject, source: str, kind: str, known: Known, nested: Mapping[str, Known]
) -> None:
    """Refuses a field that the head may depend on and that nothing reads.

    Args:
      fields: the parsed JSON.
      source: names the file in an error.
      kind: of the head with its article, for the error.
      known: fields at the top level that this kind of head reads.
      nested: objects at the top level, and their fields.

    Raises:
      ValueError: for the first such field, by name.

    Example:
      >>> known = {"block_size": ANY, "is_causal": (False,)}
      >>> refuse_unknown({"block_size": 4, "is_causal": False}, "config.json", "a head", known, {})
      >>> refuse_unknown({"is_causal": True}, "config.json", "a head", known, {})
      Traceback (most recent call last):
        ...
      ValueError: config.json has is_causal True; a head needs it to be False or absent.
      >>> refuse_unknown({"markov_rank": 256}, "config.json", "a head", known, {})
      Traceback (most recent call last):
        ...
      ValueError: config.json has markov_rank 256, which is not read and may change what a head \
drafts; it needs to be null or absent.
    """
    layer, place = fields, ""
    if fields.get("speculators_model_type") is not None:
        layer, place = fields.get("transformer_layer_config") or {}, "transformer_layer_config."
        _refuse(fields, source, kind, "", {**_HARMLESS, **known, "transformer_layer_config": ANY})
        known = {}
    _refuse(layer, source, kind, place, {**_HARMLESS, **_LAYER, **known})
    for name in ("rope_scaling", "rope_parameters"):
        _refuse(layer.get(name), source, kind, f"{place}{name}.", _ROPE)
    for name, inner in {"speculators_config": _SPECULATION, **nested}.items():
        _refuse(fields.get(name), source, kind, f"{name}.", inner)


def _refuse(fields: Any, source: str, kind: str, place: str, known: Known) -> None:
    """Refuses an unknown field of one object; null is an empty object."""
    for name, value in (fields or {}).items():
        allowed = known.get(name, ())
        # transformers writes false, 0 or null for features that a model does not use.
        if value is None or allowed is ANY or value in allowed or (not value and not allowed):
            continue
        field = f"{source} has {place}{name} {quote(value)}"
        if allowed:
            raise ValueError(f"{field}; {kind} needs it to be {allowed[0]!r} or absent.")
        raise ValueError(
            f"{field}, which is not read and may change what {kind} drafts; it needs to be null or "
            "absent."
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

    In `eagle_config`, and in `target_layer_ids` of DeepSpec and DFlash, an id means that layer's
    output, as in SGLang. At the top level `speculators` counts layers.
    """
    taps_by_place = {}
    for path, name, offset in _TAP_SOURCES:
        place = fields
        for key in path:
            place = _object(place, key, source)
        ids = place.get(name)
        if ids in (None, []):
            continue
        where = ".".join((*path, name))
        if not isinstance(ids, list) or any(type(i) is not int or i < 0 for i in ids):
            raise ValueError(
                f"{source} has {where} {quote(ids)}; it needs to be a list of layer ids."
            )
        taps_by_place[where] = tuple(i + offset for i in ids)
    if len(set(taps_by_place.values())) > 1:
        raise ValueError(
            f"{source} names the tapped layers in {' and '.join(taps_by_place)}, which differ: "
            f"after {' and '.join(quote(list(taps)) for taps in taps_by_place.values())} layers. "
            "Remove one."
        )
    return next(iter(taps_by_place.values()), None)


def _read_k(speculation: _Fields, source: str) -> int | None:
    """Returns `speculative_tokens` of the default method of proposing."""
    methods = speculation.get("proposal_methods")
    methods = methods if isinstance(methods, list) else []
    methods = [method for method in methods if isinstance(method, dict)]
    name = speculation.get("default_proposal_method")
    defaults = [method for method in methods if method.get("proposal_type") == name]
    k = next((method.get("speculative_tokens") for method in defaults or methods), None)
    if k is not None and (type(k) is not int or k < 1):
        raise ValueError(
            f"{source} has speculative_tokens {quote(k)}; it needs to be an integer >= 1."
        )
    return k


def _size(fields: _Fields, name: str, default: int, source: str) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise ValueError(f"{source} has {name} {quote(value)}; it needs to be a size >= 1.")
    return value


def _object(fields: _Fields, name: str, source: str) -> _Fields:
    """Returns an object inside another, {} if it is absent or null."""
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{source} has {name} {quote(value)}; it needs to be an object.")
    return value
