"""Wrong versions of rows that depend on no other row."""

from ..mutation import Mutation
from .tests import invariant_texts, row_groups

_MODELS = "specjax.models.decoder."
_PLAIN = row_groups("test_rows_are_those_of_the_plain_step[xla-llama-256]")
_BIASES = row_groups("test_rows_are_those_of_the_plain_step[interpret-everything-256]")
_KERNELS = row_groups("test_rows_are_those_of_the_plain_step[interpret-llama-256]")

MUTATIONS = (
    Mutation(
        f"{_MODELS}dispatch.run_decoder",
        "decode_by_groups if resolved.row_invariant else type(model).plain",
        "type(model).plain",
        invariant_texts("test_a_text_is_the_same_with_drafts_of_its_own_words[cpu]"),
        "a step of one row has other shapes than one of four",
    ),
    Mutation(
        f"{_MODELS}row_groups._attend.attend.add",
        "l_i * alpha + jnp.sum",
        "l_i + jnp.sum",
        _PLAIN,
        "a segment's weights are added without the change of the maximum",
    ),
    Mutation(
        f"{_MODELS}pallas.kv_split.KVSplit._num_before",
        "0, self.segment)",
        "0, self.segment - 1)",
        _KERNELS,
        "the last block of a segment is not read",
    ),
    Mutation(
        f"{_MODELS}pallas.attention_kernels.attention_kernel.add",
        "add_segment(state, attend(num_active, i))",
        "attend(num_active, i)",
        row_groups("test_rows_are_those_of_the_plain_step[interpret-llama-1]"),
        "a program keeps its last segment alone",
    ),
    Mutation(
        f"{_MODELS}pallas.combine.combine_kernel",
        "last, -1) + size, size)",
        "last, -1), size)",
        _KERNELS,
        "the segment of the last token is not added",
    ),
    Mutation(
        f"{_MODELS}pallas.add_rms_norm.add_rms_norm_kernel",
        "added += _load(operands.bias, (index,), inside)",
        "added += 0",
        _BIASES,
        "the bias of attention's output is left out",
    ),
    Mutation(
        f"{_MODELS}pallas.request_qkv.RequestQKV.heads",
        "jnp.broadcast_to(head, token.shape),",
        "jnp.broadcast_to(head * 0, token.shape),",
        _BIASES,
        "every head has the first one's bias",
    ),
    Mutation(
        f"{_MODELS}pallas.matmul._tile_rows",
        "number += tile * tiling.block_m",
        "number += tile * 0",
        _KERNELS,
        "every tile of a product has the first rows",
    ),
)
