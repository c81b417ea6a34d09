"""A grammar of texts of at least so many tokens: it counts, and allows an end only then."""

from collections.abc import Iterable

import numpy as np

from specjax.checks import check_count, parse_ids
from specjax.contrib.grammars.token_automaton import max_states
from specjax.processing.grammar import Grammar

_BITS_PER_WORD = 32


def min_tokens_grammar(
    min_tokens: int, vocab_size: int, eos_token_ids: int | Iterable[int]
) -> Grammar:
    """Returns a grammar of texts with `min_tokens` tokens or more before their end.

    State i follows i tokens, and the last state any more. Where `grammar_state` is `min_tokens` - m
    a text has at least m tokens, so that requests of a batch differ in m. Stop strings and
    `max_new_tokens` end a text all the same. The array of masks takes
    ``4 (min_tokens + 1) ceil(V / 32)`` bytes.

    Args:
      min_tokens: a Python int >= 0.
      vocab_size: V, the target's, padding included.
      eos_token_ids: the token or tokens that end a text. Pass equal ones to `generate`.

    Returns:
      `Grammar` of NumPy arrays; `jax.device_put` places it once.

    Raises:
      ValueError: if the array would take more than 512 MiB, or have more than 65536 rows.

    Example:
      >>> from specjax.markov_chain import markov_chain
      >>> grammar = specjax.contrib.grammars.min_tokens_grammar(2, 2, eos_token_ids=0)
      >>> output = specjax.generate(
      ...     markov_chain([[0.9, 0.1], [0.9, 0.1]]), None, [[1]], keys=jax.random.key(0),
      ...     max_new_tokens=5, temperature=0, eos_token_ids=0,
      ...     sampling=specjax.SamplingParams(grammar=grammar))
      >>> specjax.unpad(output.token_ids)
      [[1, 1, 1, 0]]
    """
    why = "the tokens before the first that may end a text"
    min_tokens = check_count("min_tokens", min_tokens, 0, why)
    num_states, most = min_tokens + 1, max_states(vocab_size)
    if num_states > most:
        raise ValueError(
            f"min_tokens is {min_tokens}; with {vocab_size} tokens of the vocabulary it needs to "
            f"be at most {most - 1}."
        )
    bits = np.ones((2, -(-vocab_size // _BITS_PER_WORD) * _BITS_PER_WORD), bool)
    ids = np.asarray(parse_ids("eos_token_ids", eos_token_ids))
    bits[0, ids[(ids >= 0) & (ids < vocab_size)]] = False
    going_on, ended = np.packbits(bits, axis=1, bitorder="little").view("<u4").astype(np.uint32)
    allowed = np.broadcast_to(going_on, (num_states, going_on.size)).copy()
    allowed[-1] = ended
    after = np.minimum(np.arange(num_states) + 1, min_tokens).astype(np.int32)
    return Grammar(after[:, None], np.zeros(vocab_size, np.int32), allowed)
