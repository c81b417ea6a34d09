"""Grammars that a text follows, made on the host: `specjax.Grammar` of a JSON schema.

    schema -> pattern of bytes -> automaton of bytes -> automaton of tokens
    `json_schema`  `byte_pattern`  `byte_automaton`     `token_automaton`

`token_bytes` reads the bytes of each token from a tokenizer. The last automaton runs on the
device, by `specjax.processing.grammar`: decoding with it needs no host.

Open `json_schema` first. Imported by no other room.
"""

from specjax.grammars.json_schema import json_schema_grammar
from specjax.grammars.token_bytes import token_bytes

__all__ = ["json_schema_grammar", "token_bytes"]
