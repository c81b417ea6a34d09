"""Wrong versions of a conversation's kept caches, of least lengths, and of lines of other files."""

from ..mutation import Mutation
from .tests import command_options, conversations, line_formats

_BACK = "test_caches_go_back_to_where_another_conversation_begins_to_differ"

MUTATIONS = (
    Mutation(
        "specjax.cli.chat.prefix_cache.PrefixCache._restore",
        "jax.device_put(next(marked), x.sharding) if is_unindexed else x",
        "x",
        conversations(f"{_BACK}[head]"),
        "a head that goes back pairs the next token with the state of a later one",
    ),
    Mutation(
        "specjax.contrib.grammars.min_tokens.min_tokens_grammar",
        "allowed[-1] = ended",
        "allowed[0] = ended",
        command_options("test_a_grammar_of_least_lengths_changes_no_other_token[1]"),
        "a text may end at once, and never later",
    ),
    Mutation(
        "specjax.cli.batch.openai_lines.translate_line",
        "body[name] != off",
        "body[name] is None",
        line_formats("test_a_field_that_is_not_known_is_refused_with_those_that_are"),
        "a line that asks for several answers gets one",
    ),
)
