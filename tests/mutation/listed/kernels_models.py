"""Wrong versions of the kernels of a model's layers, seen through Pallas' interpreter."""

from ..mutation import Mutation
from .tests import few, products, transformer

_MODELS, _PALLAS = "specjax.models.decoder.pallas.", "specjax.pallas."
_ANYWHERE = "test_tokens_anywhere_see_what_plain_jax_lets_them_see"
_ALONE = few(f"{_ANYWHERE}[interpret-all-few requests]")
_CROWD = few(f"{_ANYWHERE}[interpret-all-more requests]")
_WINDOW = few(f"{_ANYWHERE}[interpret-window, soft cap and norms of heads-more requests]")
_WINDOW_ALONE = few(f"{_ANYWHERE}[interpret-window, soft cap and norms of heads-few requests]")
_UNSEEN = "test_what_a_row_does_not_see_is_not_in_it_and_what_it_sees_is_not_hidden"
_TILES = "test_tokens_of_a_prompt_are_tiles_and_see_what_plain_jax_lets_them_see"
_STEPS = "test_steps_through_the_kernels_are_those_of_plain_jax"
_PARTS = "test_splits_of_a_cache_combine_to_one_softmax"
_PRODUCT = products("test_parts_sum_to_the_product[(3, 4, 320, 160)-float32-interpret]")
_GATE = products("test_gates_are_of_rows_divided_late[(3, 4, 320, 160)-True-interpret]")

MUTATIONS = (
    Mutation(
        "specjax.models.decoder.transformer.Transformer.plain",
        "states[tap] for tap in taps",
        "states[tap - 1] for tap in taps",
        transformer("test_tap_k_is_the_residual_stream_after_k_layers[plain]"),
        "a tap is one layer too early",
    ),
    Mutation(
        "specjax.models.decoder.transformer.Transformer.plain",
        "states.append(x)",
        "states.append(layer.mlp_norm(x))",
        transformer("test_tap_k_is_the_residual_stream_after_k_layers[plain]"),
        "taps are normed",
    ),
    Mutation(
        "specjax.models.decoder.decode_step_kernels.decode_step",
        "states[tap][:, :tokens]",
        "states[tap - 1][:, :tokens]",
        few(f"{_STEPS}[interpret-llama-True-1]"),
        "a tap is one layer too early where kernels run",
    ),
    Mutation(
        f"{_MODELS}kv_split.visible_blocks",
        "num_slots - 1) + BLOCK_KV",
        "num_slots - 1) + BLOCK_KV - 1",
        _CROWD,
        "the block of which a token is the first is not looked at",
    ),
    Mutation(
        f"{_MODELS}attention_kernels.fused_attention_kernel",
        "kv.attend(first_block, queries, visible, positions, spec, exp2)",
        "kv.attend(first_block, queries, visible, [], spec, exp2)",
        _ALONE,
        "a token that is fed is seen, and so is what its slot held",
    ),
    Mutation(
        f"{_MODELS}attention_kernels.fused_attention_kernel",
        "entries = cache_entries(keys, values)",
        "entries = (keys, values)",
        few(f"{_UNSEEN}[interpret-few requests]"),
        "values that are not finite are kept, and reach rows that do not see them",
    ),
    Mutation(
        f"{_MODELS}combine.TileRows.of_tile",
        "token + tile * tiling.tokens_per_tile",
        "token",
        few(f"{_TILES}[interpret-all]"),
        "every tile of a prompt has the tokens of the first one",
    ),
    Mutation(
        f"{_MODELS}attention_kernels.num_active_splits",
        "num_blocks + (tiling.blocks_per_split - 1)",
        "num_blocks",
        few(
            "test_a_long_request_has_more_splits_and_its_bits_do_not_depend_on_the_others[interpret]"
        ),
        "a request with blocks beyond those of its splits has no split for them",
    ),
    Mutation(
        f"{_MODELS}matmul.glu_activation_kernel",
        "gate * factor, up * factor",
        "gate, up * factor",
        products(
            "test_products_of_more_rows_are_those_of_xla_in_parts_that_kernels_read[True-interpret]"
        ),
        "a gate is not divided by the norm of its row",
    ),
    Mutation(
        f"{_MODELS}kv_split.KVSplit.attend",
        "jnp.maximum(start, 1)",
        "start",
        _ALONE,
        "the first block is weighed twice",
    ),
    Mutation(
        f"{_MODELS}kv_split.visible_blocks",
        "lowest - (window - 1)",
        "lowest - (window - 2)",
        _WINDOW,
        "a window loses its first slot where that is the last of a block",
    ),
    Mutation(
        f"{_MODELS}attention._fused_attention",
        "num_programs=num_request_kv_heads * num_partials",
        "num_programs=num_request_kv_heads * (num_partials - 1)",
        _ALONE,
        "the last key-value heads of few requests are not attended to by all programs",
    ),
    Mutation(
        f"{_MODELS}attention._attention",
        "num_programs=batch * num_token_tiles(num_tokens) * (num_query_heads + num_kv_heads)",
        "num_programs=batch * num_token_tiles(num_tokens) * num_query_heads",
        _CROWD,
        "values of the last heads are not written into the cache",
    ),
    Mutation(
        f"{_MODELS}attention.decode_attention",
        "return y.reshape(batch, num_padded_tokens, -1), cache",
        "return y.reshape(batch, num_padded_tokens, -1), (operands.keys, operands.values)",
        _CROWD,
        "the cache handed back lacks the tokens",
    ),
    Mutation(
        f"{_MODELS}add_rms_norm.add_rms_norm",
        "offset=offset",
        "offset=0.0",
        few(f"{_STEPS}[interpret-gemma-True-3]"),
        "the norm's weight lacks its offset",
    ),
    Mutation(
        f"{_MODELS}matmul.fused_glu",
        "squares = None if squares is None else squares.reshape(num_rows, -1)",
        "squares = None",
        _GATE,
        "a gate's rows are not divided by their root mean square",
    ),
    Mutation(
        f"{_MODELS}matmul.split_k_matmul",
        "width // tiling.block_n * tiling.split_k",
        "width // tiling.block_n * tiling.split_k - 1",
        _PRODUCT,
        "the last tile of the last part is not multiplied",
    ),
    Mutation(
        f"{_MODELS}add_rms_norm.add_rms_norm_kernel",
        "sum(parts[1:], parts[0])",
        "parts[0]",
        few(f"{_STEPS}[interpret-llama-True-1]"),
        "only the first part of a product is added",
    ),
    Mutation(
        f"{_MODELS}add_rms_norm.add_rms_norm_kernel",
        "weight + offset",
        "weight",
        few(f"{_STEPS}[interpret-gemma-True-3]"),
        "the norm's weight lacks its offset",
    ),
    Mutation(
        f"{_MODELS}add_rms_norm.load_squares",
        "range(squares.shape[-1])",
        "range(squares.shape[-1] - 1)",
        _GATE,
        "the last tile's squares are left out of the norm",
    ),
    Mutation(
        f"{_MODELS}add_rms_norm.inv_rms",
        " + norm.eps",
        "",
        _GATE,
        "nothing is added to the mean square",
    ),
    Mutation(
        f"{_MODELS}combine.merge",
        "each.l_i * weight for",
        "each.l_i for",
        few(f"{_PARTS}[interpret-all at once]"),
        "sums of weights are put together without their peaks",
    ),
    Mutation(
        f"{_MODELS}combine.TileRows.of_tile",
        "head + g * queries_per_kv",
        "head * 2 + g",
        few(f"{_PARTS}[interpret-one split]"),
        "a key-value head's queries are taken to stand apart",
    ),
    Mutation(
        f"{_MODELS}combine.combine_kernel",
        "(split < num_partials) & is_token",
        "split < num_partials",
        few(f"{_PARTS}[interpret-a launch of its own]"),
        "padding has what the memory held",
    ),
    Mutation(
        f"{_MODELS}matmul.fused_glu_kernel",
        "gates * factors, ups * factors",
        "gates * factors, ups",
        _GATE,
        "the root mean square divides the gate alone",
    ),
    Mutation(
        f"{_MODELS}matmul.fused_glu_kernel",
        "activation(gates) * ups",
        "activation(ups) * gates",
        _GATE,
        "gate and what it gates change places",
    ),
    Mutation(
        f"{_MODELS}matmul._first_step",
        "divmod_i32(split * (operands.rows.shape[1] // tiling.block_k), tiling.split_k)[0]",
        "split * (operands.rows.shape[1] // tiling.block_k // tiling.split_k)",
        _PRODUCT,
        "steps that do not divide into parts are left out",
    ),
    Mutation(
        f"{_MODELS}request_qkv.RequestQKV.rotated_heads",
        "jnp.where(dim < half, sin, -sin)",
        "sin",
        _ALONE,
        "the second half of a head turns the wrong way",
    ),
    Mutation(
        f"{_MODELS}request_qkv.RequestQKV.rotated_halves",
        "jnp.sum(low * low, axis=1) + jnp.sum(high * high, axis=1)",
        "jnp.sum(low * low, axis=1)",
        _WINDOW,
        "a head is divided by the root mean square of its lower half",
    ),
    Mutation(
        f"{_MODELS}request_qkv.RequestQKV._normed",
        "scale.astype(jnp.float32) + offset",
        "scale.astype(jnp.float32)",
        few(f"{_STEPS}[interpret-gemma-True-3]"),
        "the weight of a head's norm lacks its offset",
    ),
    Mutation(
        f"{_MODELS}attention_kernels.fused_attention_kernel",
        "new_token, key_head, mask, operands.key_norm",
        "new_token, key_head, mask, operands.query_norm",
        _WINDOW_ALONE,
        "keys are weighed by the queries' norm",
    ),
    Mutation(
        f"{_MODELS}qkv.prepare_qkv_kernel",
        "inside, operands.key_norm",
        "inside, operands.query_norm",
        _WINDOW,
        "keys are weighed by the queries' norm in a launch of their own",
    ),
    Mutation(
        f"{_MODELS}qkv.prepare_qkv_kernel",
        "qkv.value_halves(token, head + num_kv_heads, inside)",
        "qkv.rotated_halves(token, head + num_kv_heads, inside, None)",
        _CROWD,
        "values are turned like keys",
    ),
    Mutation(
        f"{_MODELS}qkv.prepare_qkv_kernel",
        "cache_entries(key.astype(out.keys.dtype), value.astype(out.values.dtype))",
        "(key.astype(out.keys.dtype), value.astype(out.values.dtype))",
        few(f"{_UNSEEN}[interpret-more requests]"),
        "values that are not finite are kept, and reach rows that do not see them",
    ),
    Mutation(
        f"{_MODELS}qkv.prepare_qkv_kernel",
        "(position >= 0) & (position < num_slots)",
        "position < num_slots",
        _CROWD,
        "a token that is none is written into the cache",
    ),
    Mutation(
        f"{_MODELS}qkv.prepare_qkv_kernel",
        "(index < num_counters) & (tile_in_request == 0)",
        "index < 0",
        few("test_splits_are_counted_from_zero_whatever_the_memory_held[interpret]"),
        "parts are counted from what the memory held",
    ),
    Mutation(
        "specjax.models.decoder.shared_math.is_visible",
        "slot <= position",
        "slot < position",
        _CROWD,
        "a token does not see itself",
    ),
    Mutation(
        "specjax.models.decoder.shared_math.is_visible",
        "position - window",
        "position - window - 1",
        _WINDOW,
        "a window is one slot too wide",
    ),
    Mutation(
        f"{_MODELS}online_softmax.update",
        "p = jnp.where(visible, p, 0.0)",
        "p = p",
        _CROWD,
        "slots that a row does not see have a weight",
    ),
    Mutation(
        f"{_MODELS}online_softmax.update",
        "state.acc * alpha[:, None] + dot",
        "state.acc + dot",
        _CROWD,
        "values of earlier blocks keep the weight of a lower maximum",
    ),
    Mutation(
        f"{_MODELS}online_softmax.update",
        "spec.softcap)), spec.softcap",
        "spec.softcap)), 1.0",
        _WINDOW_ALONE,
        "capped scores are not scaled back",
    ),
    Mutation(
        f"{_MODELS}kv_split.visible_blocks",
        "jnp.minimum(lowest, num_slots), BLOCK_KV",
        "jnp.minimum(lowest, num_slots) + BLOCK_KV, BLOCK_KV",
        few(f"{_TILES}[interpret-all]"),
        "the block of a tile's first token is read without masks",
    ),
    Mutation(
        f"{_MODELS}kv_split.KVSplit.attend",
        "jnp.where(is_token, state.acc, 0.0)",
        "state.acc",
        few(f"{_TILES}[interpret-all]"),
        "rows without a token attend to whole blocks",
    ),
    Mutation(
        f"{_MODELS}tilings.num_query_rows",
        "(num_tokens if is_fused else num_padded_tokens)",
        "num_tokens",
        few(f"{_PARTS}[interpret-one split]"),
        "rows of padding are not written",
    ),
    Mutation(
        f"{_MODELS}tilings.matmul_tiling",
        "math.gcd((256 if is_table else 128) // itemsize, size)",
        "128 // itemsize",
        products("test_a_matrix_that_does_not_divide_is_left_to_xla[matmul_tiling]"),
        "rows of a matrix after the last whole step are left out",
    ),
    Mutation(
        f"{_MODELS}tilings.num_attention_stages",
        "0 if num_rows >= 64 else num_rows * BLOCK_KV * itemsize",
        "0",
        products("test_attention_loads_as_many_iterations_as_fit[16-128-2-kilobytes1]"),
        "weights are thought to take no shared memory",
    ),
)
