"""Wrong versions of models over devices: shares, sums, and what reads gathered rows."""

from ..mutation import Mutation
from .tests import commands, split_models

_FAMILIES = split_models("test_every_family_has_the_states_and_logits_of_one_device")
_GATHERED = split_models("test_what_reads_whole_rows_gets_them_gathered")
_KERNELS = split_models("test_the_kernels_of_a_step_run_on_each_share")
_LOWERED = split_models("test_a_step_lowers_to_kernels_of_a_share_and_sums_between_them")
_SENT = split_models("test_what_the_sums_of_a_step_send")

MUTATIONS = (
    Mutation(
        "specjax.models.sharding.share_ranges",
        "share * heads // num_shares * size",
        "share * (heads // num_shares) * size",
        split_models("test_a_key_value_head_lies_on_the_devices_of_its_queries"),
        "where there are fewer key-value heads than devices, all have the first",
    ),
    Mutation(
        "specjax.models.decoder.layers.sum_shares",
        "jax.lax.psum(y.astype(jnp.float32), axis_name)",
        "y.astype(jnp.float32)",
        _FAMILIES,
        "a device goes on with its own part of a product",
    ),
    Mutation(
        "specjax.models.decoder.layers.embed_tokens",
        "jnp.where(is_here[..., None], table",
        "jnp.where(rows[..., None] < len(table), table",
        _FAMILIES,
        "a token's embedding is added that another device has",
    ),
    Mutation(
        "specjax.models.decoder.decode_step_kernels._advance",
        "x, _sum_parts(parts, axis_name), cache",
        "x, parts, cache",
        _KERNELS,
        "a device adds its own part of the MLP alone",
    ),
    Mutation(
        "specjax.models.decoder.decode_step_kernels._advance",
        "is_added and not is_summed\n        parts",
        "is_added\n        parts",
        _LOWERED,
        "a sum of XLA's may begin before the product is stored",
    ),
    Mutation(
        "specjax.models.decoder.decode_step_kernels._sum_parts",
        "> _MAX_SENT_NUMBERS",
        "> 0",
        _SENT,
        "a launch adds few parts before they travel",
    ),
    Mutation(
        "specjax.models.decoder.decode_step_kernels._sum_parts",
        "math.prod(parts.shape[1:]) * (len(parts) - 1)",
        "0",
        _SENT,
        "parts of many rows travel",
    ),
    Mutation(
        "specjax.models.decoder.decode_step_kernels._is_in_kernels",
        " and attention.out_bias is None",
        "",
        _SENT,
        "XLA multiplies a single row",
    ),
    Mutation(
        "specjax.models.decoder.decode_ops.matmul",
        "jnp.float32 if is_summed else None",
        "None",
        split_models("test_no_part_is_rounded_before_the_devices_add_theirs"),
        "a device rounds its part of a product before it is added",
    ),
    Mutation(
        "specjax.models.decoder.decode_ops.glu",
        "is_summed=is_summed",
        "is_summed=False",
        split_models("test_no_part_is_rounded_before_the_devices_add_theirs"),
        "a device rounds its part of an MLP's product before it is added",
    ),
    Mutation(
        "specjax.devices.placement.with_auto_axes",
        "return _with_axis_types(outputs, mesh)",
        "return outputs",
        split_models("test_calls_inside_explicit_axes_give_arrays_of_these_axes"),
        "what comes back cannot be read with the caller's arrays",
    ),
    Mutation(
        "specjax.devices.placement.with_auto_axes",
        "_with_axis_types(operands, auto_mesh)",
        "operands",
        split_models("test_calls_inside_explicit_axes_give_arrays_of_these_axes"),
        "prompts of explicit axes are traced with a model of Auto ones",
    ),
    Mutation(
        "specjax.decode.prefill.begin_compilation",
        "if models.target.placement is not None:",
        "if False:",
        split_models("test_calls_inside_explicit_axes_give_arrays_of_these_axes"),
        "steps are compiled for a state that lies elsewhere",
    ),
    Mutation(
        "specjax.models.heads.head_target.HeadTarget.embed",
        "return embed_tokens(table, token_ids, placement.model)",
        "return table[token_ids]",
        split_models("test_heads_draft_on_a_split_target_as_on_one_device"),
        "a head looks a token up in the share that a device has",
    ),
    Mutation(
        "specjax.models.heads.head_target.HeadTarget.on_each_device",
        "if placement is None:",
        "if placement is None or function:",
        split_models("test_no_kernel_of_a_draft_head_is_left_to_gspmd"),
        "the kernels of a draft head are given the rows of all devices",
    ),
    Mutation(
        "specjax.models.heads.head_target.head_target",
        "if target.split_logits is not None:",
        "if False:",
        split_models("test_heads_draft_on_a_split_target_as_on_one_device"),
        "a table's padding counts as tokens of the target",
    ),
    Mutation(
        "specjax.devices.rows.SplitRows.gather",
        "logits[..., : self.vocab_size]",
        "logits",
        _GATHERED,
        "columns of padding may be emitted",
    ),
    Mutation(
        "specjax.devices.placement.Placement.round_up",
        "-(-size // num_parts) * num_parts",
        "size",
        _GATHERED,
        "requests that devices do not divide are not filled up",
    ),
    Mutation(
        "specjax.samplers.gumbel_sample.sample_batch",
        "if placement is None:",
        "if placement is None or size:",
        split_models("test_no_kernel_of_a_step_of_decoding_is_left_to_gspmd"),
        "the kernels that draw for a draft model are given the rows of all devices",
    ),
    Mutation(
        "specjax.decode.target_step._raw_logits",
        "target.split_logits is None or (settings.sampling, settings.token_info) != (None, None)",
        "target.split_logits is None",
        commands("test_a_text_of_models_over_devices_is_that_of_one"),
        "cutoffs and listings take padding for tokens",
    ),
    Mutation(
        "specjax.devices.placement.Placement.check_axes",
        "AxisType.Explicit in",
        "None in",
        split_models("test_an_engine_gives_the_tokens_of_one_device"),
        "an engine inside explicit axes fails in JAX's words",
    ),
    Mutation(
        "specjax.cli.command._read_command",
        "options.mesh is None or jax.distributed.is_initialized()",
        "True",
        commands("test_a_text_of_models_over_devices_is_that_of_one"),
        "the command compiles for two devices each time",
    ),
)
