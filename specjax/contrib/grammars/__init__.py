"""Grammars of texts, made on the host: `specjax.Grammar` of a JSON schema.

    schema -> pattern of bytes -> automaton of bytes -> automaton of tokens
    `json_schema`  `byte_pattern`  `byte_automaton`     `token_automaton`

`processing.token_bytes` reads the bytes of each token from a tokenizer. The last automaton runs on
the device, by `processing.grammar`: decoding with it needs no host. Some grammars have no small
automaton. For these `specjax.RowMasks` lets matchers on the host mask the rows of each step, and
`llguidance_matcher` makes such matchers. `min_tokens` makes a grammar that only counts.

Open `json_schema` first.
"""

from specjax.contrib.grammars.json_schema import json_schema_grammar
from specjax.contrib.grammars.llguidance_matcher import llguidance_matchers
from specjax.contrib.grammars.min_tokens import min_tokens_grammar
from specjax.processing.token_bytes import token_bytes

__all__ = ["json_schema_grammar", "llguidance_matchers", "min_tokens_grammar", "token_bytes"]
