"""Wrong versions of grammars: which state a row is in, what it allows, and the automata."""

from ..mutation import Mutation
from .tests import (
    byte_automata,
    grammar_laws,
    grammars,
    json_schemas,
    row_masks,
    text_streams,
    token_automata,
)

_GRAMMAR = "specjax.processing.grammar."
_MASKS = "specjax.decode.matchers.RowMasks."
_TEXT = "specjax.decode.matchers.MatchedText."
_LAW = "test_several_steps_follow_the_masked_target_jointly"
_HOST = "test_several_steps_with_masks_of_a_host_follow_the_masked_target_jointly"
_GO_BACK = "test_each_row_has_the_mask_after_the_tokens_before_it_and_the_matchers_go_back"
_FORMS = "test_masks_of_another_form_are_refused"
_GROWS = "test_the_states_of_a_string_grow_as_its_bound"
_LEADS = "test_every_token_leads_where_its_bytes_do_and_only_to_what_tokens_complete"
_OUTSIDE = "test_columns_outside_the_vocabulary_are_not_allowed_whatever_the_words_say"
_HANDED = "test_a_matcher_is_handed_tokens_of_the_vocabulary_alone"
_BYTES = "test_the_bytes_of_tokens_are_the_end_of_the_whole_text"
_ACCEPTS = "test_a_schema_accepts_its_compact_texts_and_no_others"

MUTATIONS = (
    Mutation(
        "specjax.processing.token_bytes._first_text",
        "return [index]",
        "return []",
        text_streams(_BYTES),
        "tokens lack the space that a decoder leaves out at the beginning of a text",
    ),
    Mutation(
        "specjax.processing.token_bytes._bytes_of",
        "if has_letters and",
        "if not has_letters and",
        text_streams(_BYTES),
        "a part of a character is the bytes of U+FFFD",
    ),
    Mutation(
        "specjax.contrib.grammars.byte_automaton._Edges.add",
        "known is None",
        "known is None or True",
        byte_automata(_GROWS),
        "the bytes with which characters end are added for each kind of character",
    ),
    Mutation(
        "specjax.contrib.grammars.byte_automaton._Edges._add_repeat",
        "(last, self.add(part, end))",
        "(end, self.add(part, end))",
        byte_automata(_GROWS),
        "an optional copy leads to every later one, and their number is squared",
    ),
    Mutation(
        "specjax.contrib.grammars.byte_automaton._Edges._add_members",
        "may_end = False",
        "may_end = True",
        json_schemas(f"{_ACCEPTS}[schema0-good0-bad0]"),
        "a text ends before a required property if another stands before it",
    ),
    Mutation(
        "specjax.contrib.grammars.json_schema._positive",
        "len(last) - 2)",
        "len(last) - 1)",
        json_schemas("test_two_bounds_of_an_integer_accept_what_is_between_them"),
        "an integer of as many digits as the greater bound is above it",
    ),
    Mutation(
        "specjax.contrib.grammars.token_automaton._Moves.add",
        "move.sources.tobytes() + move.targets.tobytes()",
        "move.targets.tobytes()",
        token_automata(_LEADS),
        "tokens that lead to the same states from others are one class",
    ),
    Mutation(
        "specjax.contrib.grammars.token_automaton.token_automaton",
        "np.append(np.flatnonzero(automaton.accepts), end)",
        "np.flatnonzero(automaton.accepts)",
        token_automata(_LEADS),
        "nothing follows the end-of-sequence token",
    ),
    Mutation(
        "specjax.contrib.grammars.token_automaton._masks",
        "_BITS_PER_WORD, num_classes - 1,",
        "_BITS_PER_WORD, num_classes - 2,",
        token_automata(_LEADS),
        "ids past the vocabulary are allowed where a text may end",
    ),
    Mutation(
        "specjax.contrib.grammars.json_schema._is_note",
        'key.startswith("x-")',
        'key.startswith("x")',
        json_schemas("test_a_note_says_nothing_about_a_text_and_a_property_may_have_its_name"),
        "a keyword that is no note is passed over",
    ),
    Mutation(
        "specjax.contrib.grammars.json_schema._compared",
        "digit + 1",
        "digit",
        json_schemas("test_a_lone_bound_of_an_integer_accepts_what_is_on_its_side"),
        "an integer below a bound is accepted if only its last digits are less",
    ),
    Mutation(
        "specjax.contrib.grammars.json_schema._Schemas._follow",
        "self._inside.append(key)",
        "self._inside.append(name)",
        json_schemas("test_a_reference_stands_for_the_definition_that_it_names"),
        "a definition inside itself is followed without end",
    ),
    Mutation(
        "specjax.decode.step.commit_emitted",
        "grammar_state, emitted, num_committed",
        "grammar_state, state.draft.token_ids, jnp.maximum(num_drafted, 0)",
        grammar_laws(_LAW),
        "the state after a step is that after all drafted tokens, accepted or not",
    ),
    Mutation(
        f"{_GRAMMAR}row_states",
        "(after, first_row,",
        "(jnp.concatenate([after[:, :1], after[:, :-1]], axis=1), first_row,",
        grammar_laws(_LAW),
        "a row has the mask of the state before the last drafted token",
    ),
    Mutation(
        f"{_GRAMMAR}row_states",
        "if drafted_token_ids is None:",
        "if num_rows > 1 or drafted_token_ids is None:",
        grammar_laws(_LAW),
        "every row of the target has the mask with which the draft began",
    ),
    Mutation(
        f"{_GRAMMAR}row_states",
        "(after, first_row,",
        "(after.at[:, -1].set(-1), first_row,",
        grammar_laws(_LAW),
        "the bonus row has no mask",
    ),
    Mutation(
        f"{_GRAMMAR}advance",
        "num_tokens[:, None]",
        "jnp.maximum(num_tokens[:, None] - 1, 0)",
        grammar_laws(_LAW),
        "the token after the accepted ones does not move the state",
    ),
    Mutation(
        f"{_GRAMMAR}allowed_columns",
        "(columns >= 0) & ",
        "",
        grammars(_OUTSIDE),
        "a draft's column without a token is allowed where the last word's bit is set",
    ),
    Mutation(
        f"{_GRAMMAR}allowed_columns",
        "(columns < grammar.token_classes.shape[0])",
        "True",
        grammars(_OUTSIDE),
        "a column past the vocabulary is allowed where the last word's bit is set",
    ),
    Mutation(
        f"{_GRAMMAR}allowed_columns",
        "if token_map is None else token_map",
        "if True else token_map",
        grammars("test_a_draft_of_another_vocabulary_is_masked_by_the_targets_ids"),
        "a draft's columns are masked as if they were the target's",
    ),
    Mutation(
        f"{_GRAMMAR}allowed_columns",
        'axis=0, mode="fill", fill_value=0)',
        'axis=0, mode="clip")',
        grammars("test_a_state_that_the_grammar_does_not_have_allows_nothing"),
        "a state that does not exist is the last one",
    ),
    Mutation(
        "specjax.contrib.grammars.token_automaton._keep_complete",
        "completes = _reached(targets, sources, end, end + 1)",
        "completes = np.ones(end + 1, bool)",
        json_schemas("test_a_token_after_which_no_text_can_be_completed_is_not_allowed"),
        "a token is allowed after which no text can be completed",
    ),
    Mutation(
        "specjax.contrib.grammars.byte_automaton._Edges._add_members",
        "(first, after_none)",
        "(first,)",
        json_schemas(f"{_ACCEPTS}[schema1-good1-bad1]"),
        "the first property that may be absent may not be",
    ),
    Mutation(
        f"{_TEXT}_is_token",
        "0 <= token",
        "-(2**31) <= token",
        row_masks(_HANDED),
        "a negative id is handed to a matcher, or read as the last token",
    ),
    Mutation(
        f"{_TEXT}_is_token",
        "< self._vocab_size",
        "<= self._vocab_size",
        row_masks(_HANDED),
        "the first id outside the vocabulary is handed to a matcher",
    ),
    Mutation(
        f"{_TEXT}fill",
        "not self._is_token(token) or ",
        "",
        row_masks(_HANDED),
        "any drafted id is handed to a matcher",
    ),
    Mutation(
        f"{_TEXT}fill",
        "rollback(num_read)",
        "rollback(num_read - 1)",
        row_masks(_GO_BACK),
        "a matcher is not taken back to the committed tokens",
    ),
    Mutation(
        f"{_TEXT}fill",
        "masks[i + 1 :]",
        "masks[i + 2 :]",
        grammar_laws(_HOST),
        "a row has the mask before the last drafted token, and the bonus row that of two before it",
    ),
    Mutation(
        f"{_TEXT}fill",
        "            masks[i + 1 :] = self.mask()",
        "            masks[i + 1 : -1] = self.mask()",
        grammar_laws(_HOST),
        "the bonus row has not its own mask",
    ),
    Mutation(
        f"{_MASKS}of_rows",
        "masks[b])",
        "masks[b, :1])",
        row_masks(_GO_BACK),
        "rows after a drafted token have no mask",
    ),
    Mutation(
        f"{_MASKS}of_rows",
        "np.any(prompts[size:] != prompts[size - 1])",
        "False",
        row_masks("test_copies_of_the_last_request_have_its_masks_and_others_are_refused"),
        "requests without a matcher get the masks of the last one that has one",
    ),
    Mutation(
        "specjax.processing.host_masks.with_row_masks",
        "return _with_masks(sampling, masks)",
        "return sampling",
        row_masks(_FORMS),
        "a step has the masks of the step before, with which its draft was drawn",
    ),
    Mutation(
        "specjax.processing.host_masks.draft_sampling",
        "sampling._replace(allowed=None)",
        "sampling._replace(allowed=sampling.allowed[:, 0])",
        grammar_laws("test_a_draft_that_the_grammar_masks_is_accepted_more"),
        "drafts are masked by what the first row of the step before allowed",
    ),
)
