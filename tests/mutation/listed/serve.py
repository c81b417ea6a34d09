"""Wrong versions of the server in OpenAI's protocol."""

from ..mutation import Mutation
from .tests import server_parameters, server_routes, token_scores

_SERVE = "specjax.contrib.serve."
_REFUSED = "test_a_completion_refuses_what_it_does_not_do_by_name"

MUTATIONS = (
    Mutation(
        f"{_SERVE}fields.read_fields",
        "if item is not None",
        "if True",
        server_parameters("test_null_is_absent_at_every_depth"),
        "null is a value",
    ),
    Mutation(
        f"{_SERVE}fields.number",
        "and not isinstance(value, bool)",
        "",
        server_parameters(f"{_REFUSED}[n-True]"),
        "true is the number 1",
    ),
    Mutation(
        f"{_SERVE}parameters._parameters",
        "max(1, len(prompts)) * num_samples",
        "max(len(prompts), num_samples)",
        server_parameters("test_prompts_times_n_are_limited_together"),
        "prompts and n are limited apart",
    ),
    Mutation(
        f"{_SERVE}errors.error_headers",
        'return {"x-should-retry": "false"}',
        "return {}",
        server_parameters("test_only_a_full_queue_asks_a_client_to_come_again"),
        "clients send again what was refused",
    ),
    Mutation(
        f"{_SERVE}token_scores._by_text",
        "max(logprob, values.get(text, -math.inf))",
        "logprob",
        token_scores(
            "test_a_token_has_the_same_float_in_both_places_and_equal_texts_keep_the_larger"
        ),
        "of tokens with one text the last value stays",
    ),
    Mutation(
        f"{_SERVE}token_scores._score",
        "own if i == token_id else _finite(x)",
        "_finite(x)",
        token_scores(
            "test_a_token_has_the_same_float_in_both_places_and_equal_texts_keep_the_larger"
        ),
        "a token has another float among the likely ones",
    ),
    Mutation(
        f"{_SERVE}token_texts.Offsets.take",
        "len(self._decoder.decode(self._bytes[token_id]))",
        "len(self._bytes[token_id].decode(errors='replace'))",
        token_scores("test_offsets_count_the_characters_that_begin_before_a_token"),
        "each part of a character counts as one",
    ),
    Mutation(
        f"{_SERVE}service.Choice.part",
        "self._prompt_scores() + scores",
        "scores",
        server_routes("test_echo_lists_the_prompt_as_a_forward_scores_it"),
        "the prompt's tokens are missing in its echo",
    ),
    Mutation(
        f"{_SERVE}answers._usage",
        "choices[::num_samples]",
        "choices",
        server_routes(
            "test_every_form_of_a_prompt_gives_the_same_texts_with_an_index_over_prompts_times_n"
        ),
        "a prompt counts once for each of its samples",
    ),
    Mutation(
        f"{_SERVE}app._KeyCheck._lets_in",
        "hmac.compare_digest(header, self._header)",
        "self._header.startswith(header)",
        server_routes("test_a_key_is_asked_for"),
        "the beginning of a key is enough",
    ),
)
