"""`block_rejection_sample` and its ragged form: the prefix of a draft is accepted as a whole."""

from typing import Any

import jax

from specjax.call_arrays import Options
from specjax.samplers.rejection_sample import check_verification, run_verification
from specjax.samplers.rejection_sample_ragged import (
    check_ragged_verification,
    run_ragged_verification,
)
from specjax.types import Draft, Verification

__all__ = ["block_rejection_sample", "block_rejection_sample_ragged"]


def block_rejection_sample(
    draft: Draft,
    target_logits: jax.Array,
    *,
    keys: jax.Array,
    positions: Any,
    temperature: Any = 1.0,
    cutoff: Any = None,
    bonus_token_ids: Any = None,
    greedy_logprobs: bool = True,
    options: Options = Options(),
) -> Verification:
    r"""Verifies drafted tokens exactly, and accepts at least as many as `rejection_sample`.

    The tokens of a draft are accepted together: a token that is likelier under the target than
    under the draft makes up for one before it that is not. With
    :math:`\rho_i = \min(1, \rho_{i-1} p(x_i) / q(x_i))` the longest prefix whose uniform lies
    below :math:`h_i = Z_i / (Z_i + 1 - \rho_i)`,
    :math:`Z_i = \sum \max(\rho_i p - q, 0)`, is accepted (:math:`h_K = \rho_K`), and the next
    token is drawn from :math:`\max(\rho_i p - q, 0) / Z_i`. No other rule that is exact for one
    drafted sequence accepts more on average. Greedy requests and those whose drafts are all one-hot
    follow `rejection_sample`, and so does K = 1, token for token.

    Every target row with a draft is read; `rejection_sample` stops at a rejection.

    Args:
      draft: as in `rejection_sample`, as is every argument below. Where the statistics of a draft
        row are not finite its token is one-hot.
      target_logits: [B, K + 1, V].
      keys: typed threefry keys, [B] or ().
      positions: i32, [B] or scalar.
      temperature: f32, [B] or scalar.
      cutoff: f32, [B, K + 1], or None.
      bonus_token_ids: i32, [B], or None.
      greedy_logprobs: bool, static; False leaves log-probabilities of greedy requests 0.
      options: as in `rejection_sample`.

    Returns:
      `Verification`. A target row that is not a distribution ends the drafts before it: if all of
      those are accepted, nothing more is emitted.

    Raises:
      ValueError: for wrong shapes, dtypes, keys or an unknown implementation.

    Example:
      >>> target_logits = jnp.log(jnp.array([[[0.1, 0.9], [0.5, 0.5]]]))
      >>> draft = specjax.Draft(jnp.array([[1]]), logits=target_logits[:, :1])
      >>> step = specjax.block_rejection_sample(
      ...     draft, target_logits, keys=jax.random.key(0), positions=0)
      >>> step.num_accepted, step.num_emitted
      (Array([1], dtype=int32), Array([2], dtype=int32))

    References:
      Sun et al., 2024, arXiv:2403.10444.
    """
    arrays, call_options = check_verification(
        draft,
        target_logits,
        keys=keys,
        positions=positions,
        temperature=temperature,
        cutoff=cutoff,
        bonus_token_ids=bonus_token_ids,
        greedy_logprobs=greedy_logprobs,
        options=options,
        method="block",
    )
    return run_verification(arrays, options=call_options)


def block_rejection_sample_ragged(
    draft: Draft,
    target_logits: jax.Array,
    *,
    cu_num_draft_tokens: jax.Array,
    max_draft_tokens: int,
    keys: jax.Array,
    positions: Any,
    temperature: Any = 1.0,
    cutoff: Any = None,
    bonus_token_ids: Any = None,
    greedy_logprobs: bool = True,
    options: Options = Options(),
) -> Verification:
    """Verifies drafted tokens laid end to end, as `block_rejection_sample` does.

    Args:
      draft: as in `rejection_sample_ragged`, as is every argument below.
      target_logits: [N + B, V].
      cu_num_draft_tokens: i32[B + 1], or i32[B].
      max_draft_tokens: K, a Python int.
      keys: typed threefry keys, [B] or ().
      positions: i32, [B] or scalar.
      temperature: f32, [B] or scalar.
      cutoff: f32, [N + B], or None.
      bonus_token_ids: i32, [B], or None.
      greedy_logprobs: bool, static; False leaves log-probabilities of greedy requests 0.
      options: as in `rejection_sample`.

    Returns:
      `Verification`, padded to K + 1 tokens.

    Raises:
      ValueError: for wrong shapes, dtypes, keys or an unknown implementation.

    Example:
      >>> target_logits = jnp.zeros((5, 8))
      >>> draft = specjax.Draft(jnp.array([3, 1, 4]))  # two drafts, then one
      >>> step = specjax.block_rejection_sample_ragged(
      ...     draft, target_logits, cu_num_draft_tokens=jnp.array([0, 2, 3]),
      ...     max_draft_tokens=2, keys=jax.random.key(0), positions=0)
      >>> step.token_ids.shape
      (2, 3)
    """
    arrays, call_options = check_ragged_verification(
        draft,
        target_logits,
        cu_num_draft_tokens=cu_num_draft_tokens,
        max_draft_tokens=max_draft_tokens,
        keys=keys,
        positions=positions,
        temperature=temperature,
        cutoff=cutoff,
        bonus_token_ids=bonus_token_ids,
        greedy_logprobs=greedy_logprobs,
        options=options,
        method="block",
    )
    return run_ragged_verification(arrays, options=call_options)
