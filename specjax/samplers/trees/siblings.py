r"""Residual rows after rejected siblings, elementwise.

For a node, p and q are the rows of target and draft after it, and r is the rate at which it is
accepted. The rejection of a child with token x takes

    m = max(r p - q, 0)        Z = sum m
    p <- m / Z                 q <- q without x, / sum        r <- Z / (Z + 1 - r)

Rows are not stored. Two numbers of each rejected sibling are, and its step is computed again from
them. The steps run in order from the raw rows, with m in place of p: m is not divided by Z. If a
row of q is not a distribution, its children are one-hot: q is 1 at the child's token.

References:
  Weng et al., 2025, arXiv:2505.12398.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.core.gumbel_max import token_logprobs
from specjax.core.logsumexp import RowStatistics
from specjax.core.residual import MIN_RESIDUAL_MASS, residual_log_masses, residual_logprobs
from specjax.core.temperature import parse_temperature
from specjax.devices.placement import pvary_like
from specjax.devices.rows import LogitRows
from specjax.samplers.trees.tree import Tree, first_index


class TreeRows(NamedTuple):
    """A request's tree and its rows: those of every request, and statistics [N + 1] of its own.

    Attributes:
      tree: of the request.
      target: rows of target logits.
      draft: rows of draft logits.
      target_rows: statistics of the request's target rows.
      draft_rows: statistics of its draft rows. Children of one that is invalid are one-hot.
    """

    tree: Tree
    target: LogitRows
    draft: LogitRows
    target_rows: RowStatistics
    draft_rows: RowStatistics

    def target_logprobs(self, row: jax.Array, index: jax.Array) -> jax.Array:
        """Returns log p of tokens `index` by the raw row; -inf outside the vocabulary."""
        logits = self.target.row(self.tree.first_row + row).take(index)
        return _logprobs(logits, self.target_rows, row, self.tree.temperature)

    def draft_logprobs(self, row: jax.Array, index: jax.Array) -> jax.Array:
        """Returns log q of tokens `index` by the raw row; -inf outside the draft's vocabulary."""
        logits = self.draft.row(self.tree.first_row + row).take(index)
        return _logprobs(logits, self.draft_rows, row, self.tree.draft_temperature)


class Siblings(NamedTuple):
    """The steps of rejected nodes, each of which concerns the rows of its parent.

    Attributes:
      is_rejected: bool[N].
      is_empty: bool[N], whether the residual was empty, so that p is the target's row again.
      log_scale: f32[N], log of the factor r / Z of the m of earlier siblings.
      log_draft_mass: f32[N], log of the sum of q over tokens that no earlier sibling has taken.
    """

    is_rejected: jax.Array
    is_empty: jax.Array
    log_scale: jax.Array
    log_draft_mass: jax.Array


class ResidualRow(NamedTuple):
    """A row after its rejected children: r, Z, and the rest of q; [N + 1] of each for all rows.

    Attributes:
      log_rate: f32 <= 0, log r.
      log_mass: f32, log Z of the last rejected child; 0 before the first, or if it was empty.
      log_draft_mass: f32, log of the sum of q over tokens that no child has taken.
    """

    log_rate: jax.Array
    log_mass: jax.Array
    log_draft_mass: jax.Array


def row_statistics_of(
    rows: LogitRows, first_row: jax.Array, temperature: jax.Array, is_read: jax.Array
) -> RowStatistics:
    """Returns statistics [N + 1] of a request's rows; those of rows that are not read are 0.

    Args:
      rows: of every request.
      first_row: i32, the request's first.
      temperature: f32.
      is_read: bool[N + 1].
    """
    scale = parse_temperature(temperature).scale

    def reduce(v: jax.Array) -> RowStatistics:
        return rows.row(first_row + v).statistics(scale)[1]

    def one(v: jax.Array) -> RowStatistics:
        shape = jax.eval_shape(reduce, v)
        unread = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)
        unread = pvary_like(unread, rows, first_row, temperature, is_read)
        return jax.lax.cond(is_read[v], lambda: reduce(v), lambda: unread)

    index = jnp.arange(is_read.shape[0], dtype=jnp.int32)
    return jax.lax.map(one, pvary_like(index, rows, first_row, temperature, is_read))


def updated_rate(log_rate: jax.Array, mass: jax.Array) -> jax.Array:
    """Returns log of Z / (Z + 1 - r), at most log r: 0 where r is 1; -inf where only Z is 0."""
    total = mass - jnp.expm1(log_rate)
    rate = jnp.where(total > 0, jnp.log(mass) - jnp.log(total), jnp.float32(0))
    return jnp.minimum(rate, log_rate)


def child_logprobs(
    rows: TreeRows, siblings: Siblings, residual: ResidualRow, child: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns log p and log q of a child's token, f32[], after the siblings before it.

    Args:
      rows: a request's tree and its rows.
      siblings: the nodes rejected so far.
      residual: of the child's parent.
      child: i32.
    """
    row, token = rows.tree.parents[child] + 1, rows.tree.token_ids[child]
    m, q = _residual_after(rows, siblings, row, token)
    q = _divide(q, residual.log_draft_mass)
    return m - residual.log_mass, jnp.where(rows.draft_rows.valid[row], q, jnp.float32(0))


def log_weights(rows: TreeRows, siblings: Siblings, row: jax.Array, index: jax.Array) -> jax.Array:
    """Returns log m of tokens i32[M] after all rejected children of a row, f32[M]."""
    return _residual_after(rows, siblings, row, index)[0]


def reject_child(
    rows: TreeRows, siblings: Siblings, residual: ResidualRow, child: jax.Array
) -> tuple[Siblings, ResidualRow]:
    """Returns the siblings and the parent's row after the rejection of a child.

    Args:
      rows: a request's tree and its rows.
      siblings: the nodes rejected so far.
      residual: of the child's parent.
      child: i32.
    """
    tree = rows.tree
    row, token = tree.parents[child] + 1, tree.token_ids[child]
    is_sampled = rows.draft_rows.valid[row]
    index = jnp.arange(rows.target.vocab_size, dtype=jnp.int32)
    m, q = _residual_after(rows, siblings, row, index)
    q = _child_logprobs(q, index == token, residual.log_draft_mass, is_sampled)
    log_scale = residual.log_rate - residual.log_mass
    mass = jnp.sum(jnp.exp(residual_log_masses(m + log_scale, q)))
    least = jnp.float32(MIN_RESIDUAL_MASS) * jnp.exp(residual.log_rate)
    is_empty = mass <= jnp.where(is_sampled, least, jnp.float32(0))
    after = Siblings(
        is_rejected=siblings.is_rejected.at[child].set(True),
        is_empty=siblings.is_empty.at[child].set(is_empty),
        log_scale=siblings.log_scale.at[child].set(log_scale),
        log_draft_mass=siblings.log_draft_mass.at[child].set(residual.log_draft_mass),
    )
    index = jnp.arange(rows.draft.vocab_size, dtype=jnp.int32)
    taken = after.is_rejected & (tree.parents + 1 == row) & (tree.token_ids >= 0)
    taken_ids = jnp.where(taken, tree.token_ids, jnp.int32(rows.draft.vocab_size))
    q = rows.draft_logprobs(row, index).at[taken_ids].set(-jnp.inf, mode="drop")
    # A logsumexp: the first sibling may have all of q that a float32 holds.
    log_draft_mass = jax.nn.logsumexp(q)
    return after, ResidualRow(
        log_rate=updated_rate(residual.log_rate, mass),
        log_mass=jnp.where(is_empty, jnp.float32(0), jnp.log(mass)),
        log_draft_mass=jnp.where(is_sampled, log_draft_mass, jnp.float32(0)),
    )


def _residual_after(
    rows: TreeRows, siblings: Siblings, row: jax.Array, index: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns log m, and log q without the siblings' tokens, of tokens `index` of any shape."""
    tree, size = rows.tree, rows.tree.parents.shape[0]
    p, q = rows.target_logprobs(row, index), rows.draft_logprobs(row, index)
    is_step = siblings.is_rejected & (tree.parents + 1 == row)
    is_sampled = rows.draft_rows.valid[row]
    nodes = jnp.arange(size, dtype=jnp.int32)

    def step(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        child, m, q = state
        is_token = index == tree.token_ids[child]
        child_q = _child_logprobs(q, is_token, siblings.log_draft_mass[child], is_sampled)
        m = residual_logprobs(m + siblings.log_scale[child], child_q)
        m = jnp.where(siblings.is_empty[child], p, m)
        q = jnp.where(is_token, -jnp.inf, q)
        return pvary_like((first_index(is_step & (nodes > child)), m, q), state)

    start = pvary_like((first_index(is_step), p, q), rows, siblings)
    _, m, q = jax.lax.while_loop(lambda state: state[0] < size, step, start)
    return m, q


def _child_logprobs(
    q: jax.Array, is_token: jax.Array, log_draft_mass: jax.Array, is_sampled: jax.Array
) -> jax.Array:
    """Returns log q that a child was drawn from; a one-hot child has +inf at its token."""
    one_hot = jnp.where(is_token, jnp.float32(jnp.inf), jnp.float32(-jnp.inf))
    return jnp.where(is_sampled, _divide(q, log_draft_mass), one_hot)


def _divide(q: jax.Array, log_draft_mass: jax.Array) -> jax.Array:
    """Returns log of q / mass; 0 / 0 is 0."""
    return jnp.where(q == -jnp.inf, q, q - log_draft_mass)


def _logprobs(
    logits: jax.Array, rows: RowStatistics, row: jax.Array, temperature: jax.Array
) -> jax.Array:
    """Returns log-probabilities of kept logits of a row, by the statistics [N + 1] of all rows."""
    normalizer = jax.tree.map(lambda x: x[row], rows.normalizer)
    return token_logprobs(logits, normalizer, parse_temperature(temperature).scale)
