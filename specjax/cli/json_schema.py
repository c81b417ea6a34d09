"""`--json-schema`: the schema of every text, as a grammar of the target's tokens."""

import argparse
import json

from specjax.cli.model_pair import ModelPair
from specjax.contrib.grammars import json_schema_grammar, token_bytes
from specjax.file_io import read_file
from specjax.processing.grammar import Grammar

__all__ = ["read_grammar"]

_MAX_BYTES = 2**24


def read_grammar(options: argparse.Namespace, pair: ModelPair) -> Grammar | None:
    """Returns the grammar of `--json-schema`, or None if it is not given.

    Raises:
      ValueError: if the file is not a JSON object, its schema is refused or nested too deeply, or
        no token ends a text.
      OSError: if it cannot be read.
    """
    if options.json_schema is None:
        return None
    try:
        return _read_grammar(options, pair)
    except RecursionError:
        raise ValueError(
            f"--json-schema {options.json_schema} is nested too deeply; it needs fewer levels."
        ) from None


def _read_grammar(options: argparse.Namespace, pair: ModelPair) -> Grammar:
    config = pair.target_config
    data = read_file(options.json_schema, _MAX_BYTES)
    try:
        schema = json.loads(data.decode())
    except ValueError as error:
        raise ValueError(f"--json-schema {options.json_schema} is not JSON: {error}.") from None
    if not isinstance(schema, dict):
        raise ValueError(f"--json-schema {options.json_schema} holds no JSON object.")
    if not config.eos_token_ids:
        raise ValueError(
            f"{pair.folder} names no end-of-sequence token, and a text of --json-schema has to end."
        )
    vocabulary = token_bytes(pair.tokenizer, config.vocab_size)
    return json_schema_grammar(schema, vocabulary, config.eos_token_ids)
