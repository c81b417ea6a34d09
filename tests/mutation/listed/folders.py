"""Wrong versions of what folders say: sizes, fields of draft heads, messages of a template."""

from ..mutation import Mutation
from .tests import (
    chats,
    checkpoints,
    dflash_folder,
    eagle3,
    eagle3_folder,
    head_folders,
    sample_block,
)

_HF, _HEADS = "specjax.models.hf.", "specjax.models.heads."
_BY_NAME = "test_a_field_that_changes_what_is_drafted_is_refused_by_name"
_ORDER = "test_taps_stay_in_the_order_of_the_folder"

MUTATIONS = (
    Mutation(
        f"{_HF}chat_template.chat_prompt",
        "if value is not None",
        "if value",
        chats("test_a_field_of_a_message_that_is_null_is_absent"),
        "an empty list of calls is taken from a message, as null is",
    ),
    Mutation(
        f"{_HF}config_fields._integer",
        "1 <= v <= most",
        "1 <= v",
        checkpoints("test_a_hostile_size_is_refused_in_a_short_sentence[qwen3]"),
        "sizes have no bound",
    ),
    Mutation(
        f"{_HF}checkpoint.load_shapes",
        "if has_weights(folder):",
        "if not has_weights(folder):",
        checkpoints("test_a_configuration_that_does_not_fit_is_refused"),
        "programs are traced of sizes that the tensors have not",
    ),
    Mutation(
        f"{_HEADS}head_fields.refuse_unknown",
        '{"speculators_config": _SPECULATION, **nested}',
        '{"speculators_config": _SPECULATION}',
        dflash_folder(f"{_BY_NAME}[causal_head-True]"),
        "a causal head is read as one that is not",
    ),
    Mutation(
        f"{_HEADS}head_fields._refuse",
        "(not value and not allowed)",
        "not value",
        eagle3_folder(f"{_BY_NAME}[eagle_config.-use_aux_hidden_state-False]"),
        "false passes where a head needs true",
    ),
    Mutation(
        f"{_HEADS}head_fields.refuse_unknown",
        'in ("rope_scaling", "rope_parameters"):',
        "in ():",
        eagle3_folder(f"{_BY_NAME}[rope_scaling.-mrope_section-value9]"),
        "rotary embeddings in sections are read as plain ones",
    ),
    Mutation(
        f"{_HEADS}head_formats._samples_from_anchor",
        'head.read("sample_from_anchor", FLAG)',
        'head.fields.get("sample_from_anchor")',
        dflash_folder("test_dflash_config_is_read_or_refused"),
        "an inner sample_from_anchor is lost: each row drafts the token before its own",
    ),
    Mutation(
        f"{_HEADS}drafters._features_drafter",
        "head.taps, target",
        "tuple(sorted(head.taps)), target",
        eagle3_folder(_ORDER),
        "fc reads taps in another order than it was trained with",
    ),
    Mutation(
        f"{_HEADS}drafters._Eagle3.propose.step",
        "logits if scale == 1.0 else logits * scale",
        "logits",
        eagle3("test_a_head_drafts_from_what_the_formulas_say[fc_norm]"),
        "q is that of another temperature",
    ),
    Mutation(
        f"{_HEADS}sample_block._draw_all",
        "cutoff, token_map=token_map)",
        "cutoff, token_map=None)",
        sample_block("test_a_block_is_drawn_at_once_as_it_is_one_by_one[mapped]"),
        "the residual of a block with a draft vocabulary takes q from the wrong tokens",
    ),
    Mutation(
        f"{_HEADS}head_folder.refuse_eagle1",
        '"fc.weight" in HeadTensors(folder)',
        "False",
        head_folders("test_a_head_of_eagle_1_is_refused_as_a_head[False]"),
        "a head of EAGLE-1 is refused as a model that lacks a norm",
    ),
)
