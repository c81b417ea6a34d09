"""Wrong versions of trained draft heads: what they read, and what their folders say."""

from ..mutation import Mutation
from .tests import (
    dflash,
    dflash_folder,
    draft_folders,
    eagle3,
    eagle3_folder,
    embedded_eagle3,
    head_folders,
    sample_block,
)

_HEADS = "specjax.models.heads."
_EXTEND = f"{_HEADS}drafters._Eagle3.extend"
_FORMULAS = "test_a_head_drafts_from_what_the_formulas_say"
_OVERLAP = embedded_eagle3("test_acceptance_of_generate_is_the_overlap_at_every_position_of_a_step")
_LLAMA = eagle3(f"{_FORMULAS}[llama]")
_BLOCK = dflash("test_a_block_is_drafted_from_what_the_formulas_say[z-lab-4]")
_ONE_CALL = "test_a_block_is_drawn_at_once_as_it_is_one_by_one"
_DFLASH = f"{_HEADS}drafters._DFlash.propose"
_APPENDED = "features, positions, cache)"

MUTATIONS = (
    Mutation(
        _EXTEND,
        "[last[:, None], states[:, :-1]], axis=1",
        "[states], axis=1",
        _LLAMA,
        "a token is paired with its own state, not that of the token before it",
    ),
    Mutation(
        _EXTEND,
        'run(params["head"], tokens, before, pairs, cache)',
        'run(params["head"], tokens, before, jnp.where(pairs < 6, pairs, -1), cache)',
        _LLAMA,
        "the cache of committed tokens is kept from drafting",
    ),
    Mutation(
        _EXTEND,
        "jnp.take_along_axis(states, index, axis=1)[:, 0]",
        "states[:, -1]",
        _LLAMA,
        "the last state is that of padding",
    ),
    Mutation(
        f"{_HEADS}drafters._Eagle3.propose.step",
        "(cache, last)",
        "(cache, carry[1])",
        _LLAMA,
        "a drafted token is given the target's state again",
    ),
    Mutation(
        f"{_HEADS}eagle3.Eagle3Head.layer_input",
        "normed if self.config.norm_before_residual else states",
        "states",
        eagle3(f"{_FORMULAS}[fc_norm]"),
        "the residual is never normed",
    ),
    Mutation(
        f"{_HEADS}eagle3.Eagle3Head.__call__",
        "self.norm(x) if self.config.norm_output else x",
        "x",
        eagle3(f"{_FORMULAS}[qwen3]"),
        "a drafted token is given the output before its norm",
    ),
    Mutation(
        "specjax.models.decoder.decode_step_kernels.layer_step",
        "DeferredNorm(rows, None)",
        "DeferredNorm(2 * rows, None)",
        eagle3("test_the_layer_runs_through_the_kernels"),
        "what attention reads is doubled where kernels run",
    ),
    Mutation(
        f"{_HEADS}head_fields._read_taps",
        "i + offset for i",
        "i for i",
        eagle3("test_drafts_are_accepted_as_often_as_the_target_and_the_head_overlap"),
        "a tap is one layer too early",
    ),
    Mutation(
        f"{_HEADS}head_folder.HeadTensors.read_token_map",
        "np.arange(draft_vocab_size, dtype=np.int64) + offsets",
        "offsets + np.int64(0)",
        head_folders("test_d2t_holds_offsets_and_every_token_once"),
        "d2t is read as ids, not as offsets",
    ),
    Mutation(
        f"{_HEADS}head_folder._plain_name",
        'stored.removeprefix("model.")',
        "stored",
        eagle3_folder("test_a_head_is_the_same_in_every_format[llama]"),
        "a prefix of names is kept",
    ),
    Mutation(
        f"{_HEADS}drafters._HeadDrafter._sampling_options",
        '"token_map": params["token_map"]',
        '"token_map": jnp.sort(params["token_map"] + 1) % self.target.vocab_size',
        eagle3("test_drafts_are_accepted_as_often_as_the_target_and_the_head_overlap"),
        "draft tokens are those next to their own",
    ),
    Mutation(
        f"{_HEADS}drafters._DFlash.extend",
        _APPENDED,
        "features, jnp.where(positions < 6, positions, -1), cache)",
        _BLOCK,
        "keys and values of a block are kept for the tokens that were committed",
    ),
    Mutation(
        f"{_HEADS}drafters._DFlash.extend",
        _APPENDED,
        "features, positions + (positions >= 0), cache)",
        dflash("test_drafts_are_accepted_as_often_as_the_target_and_the_head_overlap"),
        "features are those of the token before",
    ),
    Mutation(
        _DFLASH,
        "positions[:, None] - 1 + jnp",
        "positions[:, None] + jnp",
        _BLOCK,
        "a block is one position too late",
    ),
    Mutation(
        _DFLASH,
        "states[:, first : first + k]",
        "states[:, :k]",
        _BLOCK,
        "a row drafts the token after its own",
    ),
    Mutation(
        f"{_HEADS}dflash._BlockDecoder",
        "is_causal=False",
        "is_causal=True",
        _BLOCK,
        "rows of a block attend to those before them alone",
    ),
    Mutation(
        f"{_HEADS}dflash.DFlashHead.append",
        "self.hidden_norm(rows)",
        "rows",
        _BLOCK,
        "features are not normed",
    ),
    Mutation(
        f"{_HEADS}dflash.init_dflash_cache",
        "max_length + config.block_size",
        "max_length",
        dflash("test_a_block_beyond_the_buffer_drafts_what_it_would_in_a_larger_one"),
        "rows of a block beyond the buffer have no keys",
    ),
    Mutation(
        "specjax.models.decoder.shared_math.last_visible",
        "jnp.maximum",
        "jnp.minimum",
        dflash("test_a_block_runs_through_the_kernels"),
        "in the kernels a block attends to its first row alone",
    ),
    Mutation(
        f"{_HEADS}head_fields._TAP_SOURCES",
        '(("dflash_config",), "target_layer_ids", 1)',
        '(("dflash_config",), "target_layer_ids", 0)',
        dflash("test_drafts_are_accepted_as_often_as_the_target_and_the_head_overlap"),
        "a tap is one layer too early",
    ),
    Mutation(
        f"{_HEADS}head_formats._samples_from_anchor",
        "is_deep_spec if value is None else value",
        "bool(value)",
        dflash_folder("test_a_head_is_the_same_in_every_format[anchor]"),
        "a block of DeepSpec drafts at its own positions",
    ),
    Mutation(
        f"{_HEADS}sample_block._draw_all",
        "Stream.draft(row)",
        "Stream.draft(0 * row)",
        sample_block(f"{_ONE_CALL}[plain]"),
        "every row is drawn on the stream of the first",
    ),
    Mutation(
        f"{_HEADS}sample_block.sample_block.step",
        "i + 1",
        "i",
        sample_block("test_a_penalty_counts_the_tokens_drafted_before"),
        "one by one, every token is drawn from the first row",
    ),
    Mutation(
        "specjax.cli.model_pair.with_trained_k",
        " if getattr(options, x) is None",
        "",
        draft_folders(
            "test_auto_goes_by_the_step_costs_next_to_a_head_unless_an_option_gives_some"
        ),
        "the step costs next to a head take the place of those that an option gives",
    ),
    Mutation(
        "specjax.cli.model_pair.with_trained_k",
        "num_speculative_tokens=k, step_costs=None",
        "num_speculative_tokens=4, step_costs=None",
        draft_folders("test_a_greedy_text_of_a_head_is_the_target_s_and_an_option_gives_another_k"),
        "a head drafts as many tokens as a model",
    ),
    Mutation(
        f"{_HEADS}head_fields._read_taps",
        "i + offset for i",
        "i + offset + 1 for i",
        eagle3("test_drafts_are_accepted_as_often_as_the_target_and_the_head_overlap"),
        "a tap is one layer too late",
    ),
    Mutation(
        _EXTEND,
        'fuse(params["head"], features)',
        'fuse(params["head"], jnp.roll(features, 1, axis=1))',
        _OVERLAP,
        "features are those of the position before",
    ),
    Mutation(
        f"{_HEADS}drafters._HeadDrafter._sampling_options",
        '"token_map": params["token_map"]',
        '"token_map": jnp.arange(len(params["token_map"]), dtype=jnp.int32)',
        _OVERLAP,
        "the offsets of d2t are lost",
    ),
    Mutation(
        f"{_HEADS}eagle3.unrolled_eagle3",
        "(place <= place.T) & (place > 0)",
        "place <= place.T",
        eagle3("test_an_unrolled_head_drafts_what_it_drafts_from_a_cache[qwen3]"),
        "in training the first token makes a pair, which it has not when drafting",
    ),
)
