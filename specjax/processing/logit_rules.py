"""Bias, penalties and masks as arrays, which turn raw logits into processed logits."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.devices.map_parts import map_parts
from specjax.devices.rows import logit_rows
from specjax.devices.vocabulary_split import VocabularySplit
from specjax.processing.bad_words import forbid_words
from specjax.processing.grammar import Grammar, allowed_columns, row_states
from specjax.processing.history import History
from specjax.processing.sampling_params import FIELDS, SamplingParams


class RowContext(NamedTuple):
    """The tokens before each row, which penalties, bad words and a grammar read.

    Attributes:
      history: what is committed.
      drafted_token_ids: i32[B, D], the tokens drafted after it, or None.
      first_row: i32[]; row r comes after the first `first_row + r` drafted tokens.
      drafted_columns: i32[B, D], where the drafted tokens stand in the rows; None is at their ids.
      token_map: i32[V_d], the target's id of every column of the rows; None is the column's own.
      split: of the vocabulary over devices, or None.
    """

    history: History
    drafted_token_ids: jax.Array | None
    first_row: jax.Array
    drafted_columns: jax.Array | None = None
    token_map: jax.Array | None = None
    split: VocabularySplit | None = None

    def columns(self, token_ids: jax.Array, logits: jax.Array) -> jax.Array:
        """Returns where tokens stand in rows of logits, past the end those that do not."""
        return logit_rows(logits, self.split).columns(token_ids)


@jax.jit
def apply_rules(logits: jax.Array, rules: SamplingParams, context: RowContext) -> jax.Array:
    """Returns processed logits of raw ones [B, R, V] or [B, V]: `process_logits` unchecked."""
    rows = logits[:, None] if logits.ndim == 2 else logits
    grammar, rules = rules.grammar, rules._replace(grammar=None, grammar_state=None)
    is_shared = SamplingParams(
        *(
            rule is not None and rule.ndim == FIELDS[name].rank
            for name, rule in rules._asdict().items()
        )
    )
    whole_of_context = (name in ("first_row", "token_map") for name in RowContext._fields)
    whole = (False, is_shared._replace(grammar=True), *whole_of_context)
    counts = context.history.counts or ()
    over_vocabulary = (rows, rules.bias, rules.allowed, *counts)

    def process(batch: Any) -> jax.Array:
        logits, rules, *context = batch
        return _process(logits, rules, RowContext(*context))

    mapped = map_parts(
        process, rows, context.split, over_vocabulary, whole=whole, keeps_vocabulary=True
    )
    processed: jax.Array = mapped((rows, rules._replace(grammar=grammar), *context))
    return processed.reshape(logits.shape)


def _process(logits: jax.Array, rules: SamplingParams, context: RowContext) -> jax.Array:
    """Returns processed logits, by one elementwise pass and a scatter of bad words."""
    x = logits.astype(jnp.float32)
    if rules.bias is not None:
        x = x + rules.bias.reshape(-1, 1, logits.shape[-1])
    if rules.penalties:
        x = _apply_penalties(x, rules, context)
    if rules.allowed is not None:
        x = jnp.where(_unpack_mask(rules.allowed, logits.shape[-1]), x, -jnp.inf)
    if rules.grammar is not None:
        x = jnp.where(_follows_grammar(rules.grammar, context, x.shape), x, -jnp.inf)
    if rules.penalties:
        valid = jnp.bool_(True)
        for penalty in rules.penalties.values():
            valid &= jnp.isfinite(penalty)
        for name, penalty in rules.penalties.items():
            if FIELDS[name].is_positive:
                valid &= penalty > 0
        x = jnp.where(_per_request(valid), x, jnp.nan)
    x = x.astype(logits.dtype)
    if rules.bad_words is not None:
        columns = functools.partial(context.columns, logits=x)
        x = forbid_words(x, rules.bad_words, *context[:3], columns)
    return x


def _per_request(number: jax.Array) -> jax.Array:
    """Returns a number [] or [B] in a shape that broadcasts against [B, R, V]."""
    return number.reshape(-1, 1, 1)


def _apply_penalties(x: jax.Array, rules: SamplingParams, context: RowContext) -> jax.Array:
    """Applies the repetition, frequency and presence penalties to x f32[B, R, V]."""
    counts, drafted = context.history.counts, context.drafted_token_ids
    if context.drafted_columns is not None:
        drafted = context.drafted_columns
    assert counts is not None
    generated = counts.generated[:, None]
    if drafted is not None:
        drafted = context.columns(drafted, x)
        # Compared rather than counted: a table per row would be larger than the logits.
        token = jax.lax.broadcasted_iota(jnp.int32, (1, 1, x.shape[2]), 2)
        row = context.first_row + jax.lax.broadcasted_iota(jnp.int32, (1, x.shape[1], 1), 1)
        for i in range(drafted.shape[1]):
            is_drafted = (drafted[:, i, None, None] == token) & (row > i)
            generated = generated + is_drafted.astype(jnp.int32)
    prompt = None if counts.prompt is None else counts.prompt[:, None]
    for name, penalty in rules.penalties.items():
        x = PENALTIES[name](x, _per_request(penalty), generated, prompt)
    return x


def _repetition(
    x: jax.Array, penalty: jax.Array, generated: jax.Array, prompt: jax.Array | None
) -> jax.Array:
    """Divides a positive logit, and multiplies a negative one, of a token that occurs."""
    assert prompt is not None
    occurs = (generated > 0) | prompt
    return jnp.where(occurs, jnp.where(x > 0, x / penalty, x * penalty), x)


def _frequency(
    x: jax.Array, penalty: jax.Array, generated: jax.Array, prompt: jax.Array | None
) -> jax.Array:
    """Subtracts the penalty once per occurrence in the output."""
    return x - penalty * generated.astype(jnp.float32)


def _presence(
    x: jax.Array, penalty: jax.Array, generated: jax.Array, prompt: jax.Array | None
) -> jax.Array:
    """Subtracts the penalty once where the token occurs in the output."""
    return x - jnp.where(generated > 0, penalty, jnp.float32(0))


# In their order: (logits f32[B, R, V], penalty, generated i32, prompt bool) -> logits.
PENALTIES = {
    "repetition_penalty": _repetition,
    "frequency_penalty": _frequency,
    "presence_penalty": _presence,
}


def _follows_grammar(grammar: Grammar, context: RowContext, shape: tuple[int, ...]) -> jax.Array:
    """Returns the tokens that the grammar allows, bool of the shape [B, R, V]."""
    states = context.history.grammar_state
    assert states is not None
    drafted, first_row = context.drafted_token_ids, context.first_row
    states = row_states(grammar, states, drafted, first_row, shape[1])
    return allowed_columns(grammar, states, shape[2], context.token_map)


def _unpack_mask(allowed: jax.Array, vocab_size: int) -> jax.Array:
    """Returns a mask as bool that broadcasts against [B, R, V]."""
    if allowed.dtype != jnp.bool_:
        shift = jnp.arange(32, dtype=jnp.uint32).reshape(*(1,) * allowed.ndim, 32)
        bits = allowed[..., None] >> shift
        bits = (bits & jnp.uint32(1)) != 0
        allowed = bits.reshape(*allowed.shape[:-1], -1)[..., :vocab_size]
    return allowed if allowed.ndim == 3 else allowed.reshape(-1, 1, vocab_size)
