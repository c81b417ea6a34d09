"""`refuse_unknown`: refuses a field of a head's config.json that nothing reads.

Such a field may change what the head computes: loaders and trainers add some with every kind of
head. A field is read, known to change nothing, or asks for nothing (null, false, 0, empty).
"""

import reprlib
from collections.abc import Mapping
from typing import Any

from specjax.models.hf.config_fields import FIELD_NAMES
from specjax.models.hf.unread_fields import CHECKED_FIELDS

__all__ = ["ANY", "Known", "refuse_unknown"]

ANY = None
"""Stands for every value of a field."""
Known = Mapping[str, tuple[Any, ...] | None]
"""Fields by name, each with the values that are allowed."""

_FORMAT = (
    *("_commit_hash", "_name_or_path", "architectures", "auto_map", "custom_pipelines"),
    *("dtype", "is_llama_config", "model_type", "name_or_path", "speculators_config"),
    *("speculators_model_type", "speculators_version", "torch_dtype", "transformers_version"),
    *("base_model_ep_plan", "base_model_pp_plan", "base_model_tp_plan"),
    *("has_no_defaults_at_init", "unsloth_fixed", "unsloth_version"),
)
_TOKENS = (
    *("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "prefix"),
    *("sep_token_id", "tokenizer_class"),
)
# Where embeddings and an lm_head come from is said by the tensors.
_TRAINING = (
    *("attention_dropout", "embed_requires_grad", "gradient_checkpointing", "hidden_dropout"),
    *("initializer_range", "max_anchors", "num_anchors", "pretraining_tp", "tie_word_embeddings"),
    *("ttt_length", "ttt_steps"),
)
_EXECUTION = (
    *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation"),
    *("chunk_size_feed_forward", "flex_attention_backend", "is_decoder", "output_attentions"),
    *("output_hidden_states", "return_dict", "tf_legacy_loss", "tie_encoder_decoder"),
    *("torchscript", "use_bfloat16", "use_cache"),
)
_CLASSIFICATION = (
    *("finetuning_task", "id2label", "label2id", "num_labels", "problem_type"),
    "task_specific_params",
)
# Defaults of transformers' own loop.
_GENERATION = (
    *("bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample"),
    *("early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty"),
    *("forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length"),
    *("max_new_tokens", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams"),
    *("num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty"),
    *("return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p"),
)
_HARMLESS = dict.fromkeys(
    (*_FORMAT, *_TOKENS, *_TRAINING, *_EXECUTION, *_CLASSIFICATION, *_GENERATION), ANY
)
# `read_fields` reads these, or refuses the values that change the layers.
_LAYER: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys((*FIELD_NAMES, *CHECKED_FIELDS), ANY),
    **dict.fromkeys(("initial_context_length", "original_max_position_embeddings"), ANY),
    "text_config": (),
    # Pairs of a half apart rotate together, as `rotate` does it.
    "is_neox_style": (True,),
    "rope_is_neox_style": (True,),
}
_ROPE = dict.fromkeys(
    (
        *("factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings"),
        *("partial_rotary_factor", "rope_theta", "rope_type", "type"),
    ),
    ANY,
)
_SPECULATION = dict.fromkeys(
    ("algorithm", "default_proposal_method", "proposal_methods", "verifier"), ANY
)


def refuse_unknown(
    fields: dict[str, Any], source: str, kind: str, own: Known, nested: Mapping[str, Known]
) -> None:
    """Refuses a field that the head may depend on and that nothing reads.

    Args:
      fields: the parsed JSON.
      source: names the file in an error.
      kind: of the head with its article, for people.
      own: fields at the top level that this kind of head reads.
      nested: objects at the top level, and their fields.

    Raises:
      ValueError: for the first such field, by name.

    Example:
      >>> own = {"block_size": ANY, "is_causal": (False,)}
      >>> refuse_unknown({"block_size": 4, "is_causal": False}, "config.json", "a head", own, {})
      >>> refuse_unknown({"is_causal": True}, "config.json", "a head", own, {})
      Traceback (most recent call last):
        ...
      ValueError: config.json has is_causal True; a head needs it to be False or absent.
      >>> refuse_unknown({"markov_rank": 256}, "config.json", "a head", own, {})
      Traceback (most recent call last):
        ...
      ValueError: config.json has markov_rank 256, which is not read and may change what a head \
drafts; it needs to be null or absent.
    """
    layer, place = fields, ""
    if fields.get("speculators_model_type") is not None:
        layer, place = fields.get("transformer_layer_config") or {}, "transformer_layer_config."
        _refuse(fields, source, kind, "", {**_HARMLESS, **own, "transformer_layer_config": ANY})
        own = {}
    _refuse(layer, source, kind, place, {**_HARMLESS, **_LAYER, **own})
    for name in ("rope_scaling", "rope_parameters"):
        _refuse(layer.get(name), source, kind, f"{place}{name}.", _ROPE)
    for name, known in {"speculators_config": _SPECULATION, **nested}.items():
        _refuse(fields.get(name), source, kind, f"{name}.", known)


def _refuse(fields: Any, source: str, kind: str, place: str, known: Known) -> None:
    """Refuses an unknown field of one object; null is an empty one."""
    for name, value in (fields or {}).items():
        allowed = known.get(name, ())
        if value is None or allowed is ANY or value in allowed or (not value and not allowed):
            continue
        said = f"{source} has {place}{name} {reprlib.repr(value)}"
        if allowed:
            raise ValueError(f"{said}; {kind} needs it to be {allowed[0]!r} or absent.")
        raise ValueError(
            f"{said}, which is not read and may change what {kind} drafts; it needs to be null or "
            "absent."
        )
