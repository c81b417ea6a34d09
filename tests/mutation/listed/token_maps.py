"""Wrong versions of draft vocabularies: a map that is lost, read askew, or not zero outside."""

from ..mutation import Mutation
from .tests import draft_vocabularies, grammars, ragged, token_maps

_CORE = "specjax.core.token_map."
_PALLAS = "specjax.pallas."
_VOCABULARY = "specjax.processing.draft_vocabulary.DraftVocabulary."
_ORACLE = "test_a_mapped_draft_is_verified_as_the_oracle_verifies_a_scattered_one"
_EQUAL = "test_with_carried_statistics_tokens_are_those_of_the_scattered_draft_bit_for_bit"
_PARAMETERS = "test_sampling_parameters_go_through_the_map"
_UNKNOWN = "test_columns_that_the_grammar_does_not_know_are_not_allowed"
_DRAWN = "test_drafts_are_drawn_by_draft_ids_and_fed_back_as_target_ids"
_COUPLED = "test_coupled_drafts_take_the_noise_of_the_target_s_ids"

MUTATIONS = (
    Mutation(
        f"{_CORE}invert_token_map",
        "(vocab_size,), size, jnp.int32",
        "(vocab_size,), size - 1, jnp.int32",
        token_maps(f"{_ORACLE}[xla-0]"),
        "q outside the map is that of the last draft id, not 0",
    ),
    Mutation(
        f"{_CORE}invert_token_map",
        "none.at[index].min(",
        "none.at[index].set(",
        token_maps("test_the_lowest_draft_id_of_a_repeated_token_counts"),
        "of repeated ids any one counts, by the order of a processor's writes",
    ),
    Mutation(
        "specjax.processing.grammar.allowed_columns",
        "(columns >= 0) & ",
        "",
        grammars(_UNKNOWN),
        "a negative id of a map is allowed by a bit that is counted from the end",
    ),
    Mutation(
        "specjax.samplers.reference.request._pad_ragged",
        "jnp.minimum(num_tokens, counts)",
        "num_tokens",
        ragged("test_more_drafts_than_a_request_has_rows_are_not_read[xla]"),
        "a request whose num_tokens is above its count verifies the next one's drafts",
    ),
    Mutation(
        f"{_PALLAS}load_request.load_request",
        "jnp.minimum(arrays.num_tokens[b], capacity)",
        "arrays.num_tokens[b]",
        ragged("test_a_request_with_more_than_the_most_drafts_has_its_first_verified[interpret-0]"),
        "in the kernels a request without a place for drafts has those of num_tokens",
    ),
    Mutation(
        f"{_CORE}map_draft_ids",
        'jnp.take(token_map, jnp.maximum(draft_ids, 0), mode="clip")',
        "jnp.maximum(draft_ids, 0)",
        draft_vocabularies(_DRAWN),
        "the map of a proposal is the identity: offsets are lost",
    ),
    Mutation(
        f"{_CORE}map_draft_ids",
        "jnp.where(ids < 0, jnp",
        "jnp.where(ids < -1, jnp",
        draft_vocabularies(
            "test_an_id_below_0_that_only_a_device_knows_is_a_token_that_no_vocabulary_holds"
        ),
        "a drawn token of the id -1 ends the drafts",
    ),
    Mutation(
        "specjax.samplers.reference.request.DraftRow.kept_logits",
        "if self.draft_ids is not None",
        "if False",
        token_maps(f"{_ORACLE}[xla-0]"),
        "q of the drafted token, and inside a block, is read at the target's id",
    ),
    Mutation(
        "specjax.samplers.reference.request.DraftRow.kept_row",
        "self.row.take(self.draft_ids)",
        "self.row.take(jnp.arange(self.draft_ids.shape[0]))",
        token_maps(*(f"{_EQUAL}[xla-{method}]" for method in ("standard", "block", "rule"))),
        "the masses of a residual are without the map",
    ),
    Mutation(
        "specjax.samplers.drafts.gather_drafts",
        "token_map=cache.token_map",
        "token_map=None",
        token_maps("test_gathered_drafts_keep_their_map[xla]"),
        "gathered drafts lose their map",
    ),
    Mutation(
        f"{_PALLAS}load_request.load_drafted",
        "load_draft_ids(arrays, token_id)",
        "token_id",
        token_maps(f"{_EQUAL}[interpret-standard]", f"{_ORACLE}[interpret-1]"),
        "in the kernels q of the drafted token is read at the target's id",
    ),
    Mutation(
        f"{_PALLAS}residual._load_draft_columns",
        "load_draft_ids(arrays, column)",
        "column",
        token_maps(f"{_EQUAL}[interpret-standard]", f"{_EQUAL}[interpret-block]"),
        "in the kernels the residual is without the map",
    ),
    Mutation(
        f"{_PALLAS}draft_statistics.draft_statistics_kernel",
        "load_draft_ids(arrays, arrays.token_ids[at])",
        "arrays.token_ids[at]",
        token_maps(f"{_ORACLE}[interpret-0]"),
        "log q that no draft carries is that of another token",
    ),
    Mutation(
        f"{_PALLAS}load_request.load_draft_ids",
        "token_id < arrays.draft_ids.shape[0]",
        "token_id >= 0",
        why="ids past the vocabulary read what is past the inverse map",
        equivalent="p is 0 there, so that no such token is kept or drawn, whatever its q",
    ),
    Mutation(
        "specjax.processing.apply_sampling.apply_sampling_to_draft",
        "drafted_columns=columns",
        "drafted_columns=None",
        draft_vocabularies(f"{_PARAMETERS}[penalties]"),
        "penalties of tokens drafted before fall on other tokens",
    ),
    Mutation(
        f"{_VOCABULARY}take",
        "self.columns(words), words",
        "words, words",
        draft_vocabularies(f"{_PARAMETERS}[bad words]"),
        "another token than the last of a bad word is forbidden",
    ),
    Mutation(
        f"{_VOCABULARY}take",
        "take_mapped(bias, self.token_map, 0)",
        "bias[..., : self.token_map.shape[0]]",
        draft_vocabularies(f"{_PARAMETERS}[bias]"),
        "a bias falls on the first of the target's tokens",
    ),
    Mutation(
        f"{_VOCABULARY}take",
        "take_mapped(table, self.token_map, 0)",
        "table[..., : self.token_map.shape[0]]",
        draft_vocabularies(f"{_PARAMETERS}[penalties]"),
        "counts are those of the first of the target's tokens",
    ),
    Mutation(
        f"{_VOCABULARY}_take_mask",
        "take_mapped(allowed, self.token_map, False)",
        "allowed[..., : self.token_map.shape[0]]",
        draft_vocabularies(f"{_PARAMETERS}[mask]"),
        "a mask is that of the first of the target's tokens",
    ),
    Mutation(
        f"{_VOCABULARY}_take_mask",
        "self.token_map % _BITS_PER_WORD",
        "self.token_map // _BITS_PER_WORD",
        draft_vocabularies(f"{_PARAMETERS}[packed]"),
        "another bit of a packed mask is read",
    ),
    Mutation(
        "specjax.decode.propose._sample",
        "if vocabulary is not None and coupled:",
        "if coupled := False:",
        draft_vocabularies(_COUPLED),
        "coupled drafts are drawn with the noise of draft ids, and agree by chance",
    ),
)
