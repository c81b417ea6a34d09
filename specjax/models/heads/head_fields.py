"""Fields of config.json that all kinds of draft heads share: layers, taps, K.

Three formats have them in different places: those of SpecForge and SGLang, of `speculators`, and of
DeepSpec. Loaders and trainers add fields with every kind of head. A field is read, is known to have
no effect, has an empty value (null, false, 0, empty), or is refused.
"""

from collections.abc import Mapping
from typing import Any

from specjax.file_io import JsonObject, quote
from specjax.models.hf.config_fields import FIELD_NAMES, OBJECT, Field
from specjax.models.hf.config_json import CHECKED_FIELDS, read_fields, refuse_quantised

_ANY_VALUE = Field(lambda v: True, "anything")
FLAG = Field(lambda v: v is None or isinstance(v, bool), "true or false")
"""A field that is true, false or absent."""
_COUNT = Field(lambda v: v is None or (type(v) is int and v >= 1), "an integer >= 1")
SIZE = _COUNT._replace(requirement="a size >= 1")
"""A field that is a size or absent."""
_LAYER_IDS = Field(
    lambda v: isinstance(v, list) and all(type(i) is int and i >= 0 for i in v),
    "a list of layer ids",
)
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


class HeadFields:
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
      nested: an object of the JSON that may hold fields of the top level, too.

    Raises:
      ValueError: if a field is missing, has a wrong type, or asks for something unsupported.

    Example:
      >>> fields = {"model_type": "llama", "vocab_size": 64, "hidden_size": 16,
      ...     "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
      ...     "draft_vocab_size": 40, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}}
      >>> head = HeadFields(fields, "config.json")
      >>> head.layer.head_dim, head.draft_vocab_size, head.taps
      (4, 40, (2, 4))
    """

    def __init__(self, fields: JsonObject, source: str, nested: str = "") -> None:
        refuse_quantised(fields, source)
        # A head's `is_causal` is about its rows; in a model's layer it has another meaning.
        inner = {name: value for name, value in fields.items() if name != "is_causal"}
        if fields.get("speculators_model_type") is not None:
            inner = {"model_type": "qwen3"} | _object(fields, "transformer_layer_config", source)
            inner = _CLASS_SIZES.get(str(inner["model_type"]), {}) | inner
            # The tensors are of the outer object's.
            inner = {"dtype": fields.get("dtype") or fields.get("torch_dtype")} | inner
        inner = {name: value for name, value in inner.items() if name not in _IGNORED_FIELDS}
        layer = self.layer = read_fields(inner, source)
        self.fields, self.source, self.nested = fields, source, nested
        self.layer_kind: str = inner["model_type"]
        self.target_hidden_size = self._size("target_hidden_size", layer.hidden_size)
        self.draft_vocab_size = self._size("draft_vocab_size", layer.vocab_size)
        if self.draft_vocab_size > layer.vocab_size:
            raise ValueError(
                f"{source} has draft_vocab_size {self.draft_vocab_size} and vocab_size "
                f"{layer.vocab_size}; a draft's vocabulary is a part of the target's."
            )
        self.taps = _read_taps(fields, source)
        speculation = _object(fields, "speculators_config", source)
        self.num_speculative_tokens = _read_k(speculation, source)
        verifier = _object(speculation, "verifier", source).get("name_or_path")
        self.verifier = verifier if isinstance(verifier, str) and verifier else None

    def read(self, name: str, field: Field = _ANY_VALUE) -> Any:
        """Returns a field of the top level or of `nested`, equal if in both; None if in neither.

        Args:
          name: of the field.
          field: its allowed values.

        Raises:
          ValueError: if the two differ, or the value is not allowed.
        """
        places = (self.fields, self.fields.get(self.nested) or {})
        values = [place[name] for place in places if place.get(name) is not None]
        if len(values) == 2 and values[0] != values[1]:
            both = f" and in {self.nested} ".join(map(quote, values))
            raise ValueError(
                f"{self.source} has {name} {both}; loaders differ in which counts: remove one."
            )
        return field.check(name, values[0] if values else None, self.source)

    def _size(self, name: str, default: int) -> int:
        return SIZE.check(name, self.fields.get(name), self.source) or default


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


def _read_taps(fields: JsonObject, source: str) -> tuple[int, ...] | None:
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
        taps_by_place[where] = tuple(i + offset for i in _LAYER_IDS.check(where, ids, source))
    if len(set(taps_by_place.values())) > 1:
        raise ValueError(
            f"{source} names the tapped layers in {' and '.join(taps_by_place)}, which differ: "
            f"after {' and '.join(quote(list(taps)) for taps in taps_by_place.values())} layers. "
            "Remove one."
        )
    return next(iter(taps_by_place.values()), None)


def _read_k(speculation: JsonObject, source: str) -> int | None:
    """Returns `speculative_tokens` of the default method of proposing."""
    methods = speculation.get("proposal_methods")
    methods = methods if isinstance(methods, list) else []
    methods = [method for method in methods if isinstance(method, dict)]
    name = speculation.get("default_proposal_method")
    defaults = [method for method in methods if method.get("proposal_type") == name]
    k = next((method.get("speculative_tokens") for method in defaults or methods), None)
    return _COUNT.check("speculative_tokens", k, source)


def _object(fields: JsonObject, name: str, source: str) -> JsonObject:
    """Returns an object inside another, {} if it is absent or null."""
    return OBJECT.check(name, fields.get(name), source) or {}
