"""Wrong versions of the kernels of a model's layers, seen through Pallas' interpreter."""

from ..mutation import Mutation
from .tests import few, products

__all__ = ["MUTATIONS"]

_MODELS, _PALLAS = "specjax.models.pallas.", "specjax.pallas."
_ANYWHERE = "test_tokens_anywhere_see_what_plain_jax_lets_them_see"
_ALONE = few(f"{_ANYWHERE}[interpret-all-few requests]")
_CROWD = few(f"{_ANYWHERE}[interpret-all-more requests]")
_WINDOW = few(f"{_ANYWHERE}[interpret-window and soft cap-more requests]")
_WINDOW_ALONE = few(f"{_ANYWHERE}[interpret-window and soft cap-few requests]")
_UNSEEN = "test_what_a_row_does_not_see_is_not_in_it_and_what_it_sees_is_not_hidden"
_STEPS = "test_steps_through_the_kernels_are_those_of_plain_jax"
_PARTS = "test_parts_are_one_softmax_whoever_puts_them_together"
_PRODUCT = products("test_parts_sum_to_the_product[(3, 4, 320, 160)-float32-interpret]")
_GATE = products("test_gates_are_of_rows_divided_late[(3, 4, 320, 160)-True-interpret]")

MUTATIONS = (
    Mutation(
        f"{_MODELS}attention_kernels._chunks_of",
        "slots - 1) + ATTENTION_SLOTS",
        "slots - 1) + ATTENTION_SLOTS - 1",
        _CROWD,
        "the chunk of which a token is the first is not looked at",
    ),
    Mutation(
        f"{_MODELS}attention_kernels.see",
        "share.weigh(chunk, queries, places, places, rule)",
        "share.weigh(chunk, queries, places, [], rule)",
        _ALONE,
        "a token that is fed is seen, and so is what its slot held",
    ),
    Mutation(
        f"{_MODELS}attention_kernels.see",
        "stored = entries(keys, values)",
        "stored = (keys, values)",
        few(f"{_UNSEEN}[interpret-few requests]"),
        "values that are not finite are kept, and reach rows that do not see them",
    ),
    Mutation(
        f"{_MODELS}attention_kernels._Share.weigh",
        "jnp.maximum(start, 1)",
        "start",
        _ALONE,
        "the first chunk is weighed twice",
    ),
    Mutation(
        f"{_MODELS}attention_kernels._chunks_of",
        "lowest - (window - 1)",
        "lowest - (window - 2)",
        _WINDOW,
        "a window loses its first slot where that is the last of a chunk",
    ),
    Mutation(
        f"{_MODELS}attention.attend",
        "num_programs=pairs * (parts + 1)",
        "num_programs=pairs * parts",
        _ALONE,
        "the last key-value heads of few requests are not attended to by all programs",
    ),
    Mutation(
        f"{_MODELS}attention.attend",
        "num_programs=batch * (num_heads + 2 * groups)",
        "num_programs=batch * (num_heads + groups)",
        _CROWD,
        "values of the last heads are not written into the cache",
    ),
    Mutation(
        f"{_MODELS}attention.attend",
        "return y.reshape(batch, padded, -1), cache",
        "return y.reshape(batch, padded, -1), (heads.keys, heads.values)",
        _CROWD,
        "the cache handed back lacks the tokens",
    ),
    Mutation(
        f"{_MODELS}add_rms_norm.joined",
        "offset=offset",
        "offset=0.0",
        few(f"{_STEPS}[interpret-gemma-True]"),
        "the norm's weight lacks its offset",
    ),
    Mutation(
        f"{_MODELS}matmul.gated",
        "squares = None if squares is None else squares.reshape(rows, -1)",
        "squares = None",
        _GATE,
        "a gate's rows are not divided by their root mean square",
    ),
    Mutation(
        f"{_MODELS}matmul.multiplied",
        "width // cut.columns * cut.parts",
        "width // cut.columns * cut.parts - 1",
        _PRODUCT,
        "the last tile of the last part is not multiplied",
    ),
    Mutation(
        f"{_MODELS}add_rms_norm.join",
        "sum(parts[1:], parts[0])",
        "parts[0]",
        few(f"{_STEPS}[interpret-llama-True]"),
        "only the first part of a product is added",
    ),
    Mutation(
        f"{_MODELS}add_rms_norm.join",
        "weight + offset",
        "weight",
        few(f"{_STEPS}[interpret-gemma-True]"),
        "the norm's weight lacks its offset",
    ),
    Mutation(
        f"{_MODELS}add_rms_norm.load_squares",
        "inside = lane < count",
        "inside = lane < count - 1",
        _GATE,
        "the last tile's squares are left out of the norm",
    ),
    Mutation(
        f"{_MODELS}add_rms_norm.scale_of",
        " + norm.eps",
        "",
        _GATE,
        "nothing is added to the mean square",
    ),
    Mutation(
        f"{_MODELS}combine.together.add",
        "each.total * weight for",
        "each.total for",
        few(f"{_PARTS}[interpret-all at once]"),
        "sums of weights are put together without their peaks",
    ),
    Mutation(
        f"{_MODELS}combine.write",
        "(g * (num_heads // groups) + head)",
        "(g + groups * head)",
        few(f"{_PARTS}[interpret-one part]"),
        "a key-value head's queries are taken to stand apart",
    ),
    Mutation(
        f"{_MODELS}combine.finish",
        "(part < parts.peak.shape[1]) & (t < tokens)",
        "part < parts.peak.shape[1]",
        few(f"{_PARTS}[interpret-a launch behind]"),
        "padding has what the memory held",
    ),
    Mutation(
        f"{_MODELS}matmul.gate",
        "gates * scale, ups * scale",
        "gates * scale, ups",
        _GATE,
        "the root mean square divides the gate alone",
    ),
    Mutation(
        f"{_MODELS}matmul.gate",
        "block.activation(gates) * ups",
        "block.activation(ups) * gates",
        _GATE,
        "gate and what it gates change places",
    ),
    Mutation(
        f"{_MODELS}matmul._share",
        "divide(part * (factors.rows.shape[1] // cut.depth), cut.parts)[0]",
        "part * (factors.rows.shape[1] // cut.depth // cut.parts)",
        _PRODUCT,
        "steps that do not divide into parts are left out",
    ),
    Mutation(
        f"{_MODELS}qkv.Projected.rotated",
        "jnp.where(dim < half, sin, -sin)",
        "sin",
        _ALONE,
        "the second half of a head turns the wrong way",
    ),
    Mutation(
        f"{_MODELS}qkv.place",
        "projected.halves(token, head, inside, turned=False)",
        "projected.halves(token, head, inside)",
        _CROWD,
        "values are turned like keys",
    ),
    Mutation(
        f"{_MODELS}qkv.place",
        "jnp.where(spoilt, -2 - mark, mark)",
        "mark",
        few(f"{_UNSEEN}[interpret-more requests]"),
        "keys do not tell that their values are not finite",
    ),
    Mutation(
        f"{_MODELS}qkv.place",
        "tuple(entries(x, x)[1] for x in values)",
        "tuple(values)",
        few(f"{_UNSEEN}[interpret-more requests]"),
        "values that are not finite are kept, and reach rows that do not see them",
    ),
    Mutation(
        f"{_MODELS}qkv.place",
        "(place >= 0) & (place < slots)",
        "place < slots",
        _CROWD,
        "a token that is none is written into the cache",
    ),
    Mutation(
        f"{_MODELS}qkv.place",
        "head - num_queries] = jnp.uint32(0)",
        "head - num_queries] += jnp.uint32(0)",
        few("test_parts_are_counted_from_zero_whatever_the_memory_held[interpret]"),
        "parts are counted from what the memory held",
    ),
    Mutation(
        f"{_MODELS}online_softmax.is_seen",
        "slot <= position",
        "slot < position",
        _CROWD,
        "a token does not see itself",
    ),
    Mutation(
        f"{_MODELS}online_softmax.is_seen",
        "position - rule.window",
        "position - rule.window - 1",
        _WINDOW,
        "a window is one slot too wide",
    ),
    Mutation(
        f"{_MODELS}online_softmax.add",
        "state.mixed * shrunk[:, None] + dot",
        "state.mixed + dot",
        _CROWD,
        "values of earlier tiles mask_below_cutoff the weight of a lower peak",
    ),
    Mutation(
        f"{_MODELS}online_softmax.add",
        "* rule.softcap",
        "* 1.0",
        _WINDOW_ALONE,
        "capped scores are not scaled back",
    ),
    Mutation(
        f"{_MODELS}tiles.query_rows",
        "(tokens if alone else padded)",
        "tokens",
        few(f"{_PARTS}[interpret-one part]"),
        "rows of padding are not written",
    ),
    Mutation(
        f"{_MODELS}tiles.product_cut",
        "columns < 32 or size % depth",
        "columns < 32",
        products("test_a_matrix_that_does_not_divide_is_left_to_xla[product_cut]"),
        "rows of a matrix after the last whole step are left out",
    ),
    Mutation(
        f"{_MODELS}tiles.attention_stages",
        "0 if num_rows >= 64 else num_rows * ATTENTION_SLOTS * itemsize",
        "0",
        products("test_attention_loads_as_many_turns_as_fit[16-128-2-kilobytes1]"),
        "weights are thought to take no shared memory",
    ),
)
