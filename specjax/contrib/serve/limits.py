"""`Limits`: the most that a request may ask for, checked before anything is allocated for it."""

from typing import NamedTuple


class Limits(NamedTuple):
    """Limits of a server.

    Attributes:
      max_length: S, most tokens of a prompt and its text together, that of the engine.
      vocab_size: V, of the target.
      max_logprobs: most likeliest tokens listed for each token; None lists none.
      max_body_bytes: of a request's body.
      max_choices: of a request, prompts x n.
      max_stop_characters: of its stop strings together.
      max_schema_bytes: of its JSON schema, written without spaces.
      max_messages: of a conversation.
      max_seconds: from a request's body to its last token, waiting included.
      max_body_seconds: until the body is there.
      chunk_seconds: between two chunks of a stream. Tokens of that time share a chunk, which
        leaves the processor to the engine.
    """

    max_length: int
    vocab_size: int
    max_logprobs: int | None = None
    max_body_bytes: int = 2**20
    max_choices: int = 128
    max_stop_characters: int = 4096
    max_schema_bytes: int = 2**15
    max_messages: int = 2048
    max_seconds: float = 600.0
    max_body_seconds: float = 30.0
    chunk_seconds: float = 0.03
