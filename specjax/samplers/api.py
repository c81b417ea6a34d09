"""The one door: refuses wrong calls, chooses the implementation, runs it jitted."""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.checks import (
    as_array,
    check_count,
    check_cumulative,
    check_draft,
    check_keys,
    check_logits,
    check_noise_dtype,
    read_array,
    read_optional,
    read_rates,
)
from specjax.implementation import read_implementation
from specjax.mesh import check_unsharded
from specjax.samplers.dispatch import (
    Options,
    run_gumbel_sample,
    run_rejection_sample,
    run_rejection_sample_ragged,
)
from specjax.typing import Draft, Sample, Verification

__all__ = ["gumbel_sample", "rejection_sample", "rejection_sample_ragged"]


def gumbel_sample(
    logits: jax.Array,
    *,
    keys: jax.Array,
    positions: Any,
    stream: Any,
    temperature: Any = 1.0,
    cutoff: Any = None,
    noise_dtype: Any = jnp.float32,
    implementation: str | None = None,
) -> Sample:
    r"""Draws one token per row by two-level Gumbel-max, with noise by address.

    The token is distributed as :math:`\mathrm{softmax}(\text{logits} / \text{temperature})`
    over the logits at or above `cutoff`. It is a function of the row and of (key, position,
    stream) alone.

    Args:
      logits: [B, V], bf16, f16 or f32, raw. -inf masks a token.
      keys: typed threefry keys, [B] or (). With () each row folds in its index. From
        integer seeds: ``jax.vmap(jax.random.key)(seeds)``.
      positions: i32, [B] or scalar, absolute position of the token to draw.
      stream: int or i32, a `Stream`: `Stream.TARGET` for plain sampling,
        ``Stream.draft(i)`` for drafted token i. No default: a draft drawn on the target's
        stream biases the output of verification.
      temperature: f32, [B] or scalar, >= 0. Below 1e-5 the row is greedy: its argmax, ties
        to the lowest id. Negative or not finite makes the row invalid.
      cutoff: f32, [B], logits below it are left out. None keeps all.
      noise_dtype: float32, or float64 where `jax_enable_x64` is on.
      implementation: None chooses at lowering: Triton kernels on an NVIDIA GPU of compute
        capability 8.0 or newer, plain JAX elsewhere. "xla" and "triton" name one of them,
        "interpret" the kernels in Pallas' interpreter, for tests.

    Returns:
      `Sample`; token -1 and log-probability 0 for a row with NaN or +inf, -inf
      everywhere, or an invalid temperature.

    Raises:
      ValueError: for wrong shapes, dtypes, keys or an unknown implementation.

    Example:
      >>> logits = jnp.log(jnp.array([[0.1, 0.2, 0.7], [0.5, 0.5, 0.0]]))
      >>> keys = jax.vmap(jax.random.key)(jnp.array([1, 2]))
      >>> sample = specjax.gumbel_sample(
      ...     logits, keys=keys, positions=0, stream=specjax.Stream.TARGET)
      >>> sample.token_ids.shape
      (2,)

    References:
      Gumbel-max in two levels: the maximum of a block's Gumbels is a Gumbel at its
      logsumexp, independent of which token attains it.
    """
    implementation = read_implementation(implementation)
    logits = as_array("logits", logits)
    check_logits("logits", logits, "[B, V]")
    size = logits.shape[0]
    each = ((), (size,))
    return run_gumbel_sample(
        logits,
        check_keys(keys, size),
        read_array("positions", positions, jnp.int32, *each),
        read_array("stream", stream, jnp.int32, *each),
        read_array("temperature", temperature, jnp.float32, *each),
        read_optional("cutoff", cutoff, jnp.float32, (size,)),
        noise_dtype=check_noise_dtype(noise_dtype),
        implementation=implementation,
    )


def rejection_sample(
    draft: Draft,
    target_logits: jax.Array,
    *,
    keys: jax.Array,
    positions: Any,
    temperature: Any = 1.0,
    cutoff: Any = None,
    conditional_rates: Any = None,
    bonus_token_ids: Any = None,
    noise_dtype: Any = jnp.float32,
    implementation: str | None = None,
) -> Verification:
    r"""Verifies drafted tokens so that what is emitted follows the target exactly.

    Drafted token x is kept with probability :math:`\min(1, p(x) / q(x))`; after the first
    that is not, one token is drawn from the residual
    :math:`\max(p - q, 0) / \sum \max(p - q, 0)`; if all are kept, a bonus token is drawn
    from the last target row. One-hot drafts have q = 1. Greedy requests keep the target's
    argmax and nothing else. All of these mix in one batch.

    Args:
      draft: `Draft` with token arrays [B, K], K >= 0, logits [S, K, V_d].
      target_logits: [B, K + 1, V], bf16, f16 or f32, raw. Row i decides drafted token i,
        the row after the last drafted token the bonus.
      keys: typed threefry keys, [B] or (). With () each request folds in its index; inside
        `shard_map` pass [B], because every shard counts its requests from 0.
      positions: i32, [B] or scalar: row i decides the token at absolute position
        ``positions + i``. Either a fixed key per request and true positions, or a fresh
        key per call and positions 0.
      temperature: f32, [B] or scalar, >= 0. Below 1e-5 the request is greedy. Negative or
        not finite makes the request invalid: it emits nothing.
      cutoff: f32, [B, K + 1], target logits below it are left out. None keeps all.
      conditional_rates: f32, [K] or [B, K] in [0, 1], makes the call synthetic: token i is
        kept with this probability whatever p and q say. See `geometric_rates`.
      bonus_token_ids: i32, [B], replaces the bonus token; outside [0, V) it is sampled. Its
        log-probability is -inf where the bonus row is no law.
      noise_dtype: float32, or float64 where `jax_enable_x64` is on.
      implementation: None chooses at lowering: Triton kernels on an NVIDIA GPU of compute
        capability 8.0 or newer, plain JAX elsewhere. "xla" and "triton" name one of them,
        "interpret" the kernels in Pallas' interpreter, for tests.

    Returns:
      `Verification`. A request emits `num_accepted + 1` tokens; without the last one
      where the target row that had to decide it holds NaN or +inf or is -inf everywhere.

    Raises:
      ValueError: for wrong shapes, dtypes, keys or an unknown implementation.

    Example:
      >>> target_logits = jnp.log(jnp.array([[[0.1, 0.9], [0.5, 0.5]]]))
      >>> draft = specjax.Draft(jnp.array([[1]]), logits=target_logits[:, :1])
      >>> step = specjax.rejection_sample(
      ...     draft, target_logits, keys=jax.random.key(0), positions=0)
      >>> step.num_accepted, step.num_emitted
      (Array([1], dtype=int32), Array([2], dtype=int32))

    References:
      Leviathan et al., 2023, arXiv:2211.17192; Chen et al., 2023, arXiv:2302.01318.
    """
    implementation = read_implementation(implementation)
    draft = check_draft(draft)
    size, k = draft.token_ids.shape
    target_logits = as_array("target_logits", target_logits)
    check_logits("target_logits", target_logits, "[B, K + 1, V]", size)
    if target_logits.shape[1] != k + 1:
        raise ValueError(
            f"target_logits has {target_logits.shape[1]} rows per request for {k} draft tokens; "
            f"it needs {k + 1}: one per draft and one for the bonus token."
        )
    return run_rejection_sample(
        draft,
        target_logits,
        read_optional("cutoff", cutoff, jnp.float32, (size, k + 1)),
        _read_options(size, k, keys, positions, temperature, conditional_rates, bonus_token_ids),
        noise_dtype=check_noise_dtype(noise_dtype),
        implementation=implementation,
    )


def rejection_sample_ragged(
    draft: Draft,
    target_logits: jax.Array,
    *,
    cu_num_draft_tokens: jax.Array,
    max_draft_tokens: int,
    keys: jax.Array,
    positions: Any,
    temperature: Any = 1.0,
    cutoff: Any = None,
    conditional_rates: Any = None,
    bonus_token_ids: Any = None,
    noise_dtype: Any = jnp.float32,
    implementation: str | None = None,
) -> Verification:
    r"""`rejection_sample` on drafted rows of all requests laid end to end.

    Request r owns drafted rows ``cu[r]:cu[r + 1]`` and target rows
    ``cu[r] + r : cu[r + 1] + r + 1``, the last its bonus row, with
    ``cu = cu_num_draft_tokens``. Rows past ``cu[B]`` are padding and touch nothing. The
    tokens are those of the padded form.

    Args:
      draft: `Draft` with `token_ids`, `logprobs`, `logsumexp`, `cutoff` [N], `logits`
        [S, V_d] with S = N unless `rows` i32[N] is given, `temperature` f32[B] and
        `num_tokens` i32[B] (None is what `cu_num_draft_tokens` says; -1 is inactive).
      target_logits: [N + B, V], bf16, f16 or f32, raw.
      cu_num_draft_tokens: i32[B + 1], from 0, non-decreasing, at most N.
      max_draft_tokens: K, a Python int; a request with more has only its first K verified.
      keys: as in `rejection_sample`; likewise every argument below.
      positions: i32, [B] or scalar.
      temperature: f32, [B] or scalar.
      cutoff: f32, [N + B], or None.
      conditional_rates: f32, [K] or [B, K], or None.
      bonus_token_ids: i32, [B], or None.
      noise_dtype: float32 or float64.
      implementation: as in `gumbel_sample`.

    Returns:
      `Verification`, padded to K + 1 tokens.

    Raises:
      ValueError: for wrong shapes, dtypes, keys or an unknown implementation.

    Example:
      >>> target_logits = jnp.zeros((5, 8))
      >>> draft = specjax.Draft(jnp.array([3, 1, 4]))  # two drafts, then one
      >>> step = specjax.rejection_sample_ragged(
      ...     draft, target_logits, cu_num_draft_tokens=jnp.array([0, 2, 3]),
      ...     max_draft_tokens=2, keys=jax.random.key(0), positions=0)
      >>> step.token_ids.shape
      (2, 3)
    """
    implementation = read_implementation(implementation)
    size = check_cumulative(cu_num_draft_tokens)
    why = "the most drafted tokens of any request, because it is the width of the result"
    max_draft_tokens = check_count("max_draft_tokens", max_draft_tokens, 0, why)
    target_logits = as_array("target_logits", target_logits)
    draft = check_draft(draft, ragged_batch_size=size)
    num_drafted = draft.token_ids.shape[0]
    check_logits("target_logits", target_logits, "[N + B, V]", num_drafted + size)
    for name, logits in (("target_logits", target_logits), ("draft.logits", draft.logits)):
        if logits is not None:
            check_unsharded(name, logits)
    return run_rejection_sample_ragged(
        draft,
        target_logits,
        read_array("cu_num_draft_tokens", cu_num_draft_tokens, jnp.int32, (size + 1,)),
        read_optional("cutoff", cutoff, jnp.float32, (num_drafted + size,)),
        _read_options(
            size,
            max_draft_tokens,
            keys,
            positions,
            temperature,
            conditional_rates,
            bonus_token_ids,
        ),
        max_draft_tokens=max_draft_tokens,
        noise_dtype=check_noise_dtype(noise_dtype),
        implementation=implementation,
    )


def _read_options(
    size: int,
    k: int,
    keys: Any,
    positions: Any,
    temperature: Any,
    conditional_rates: Any,
    bonus_token_ids: Any,
) -> Options:
    each = ((), (size,))
    return Options(
        keys=check_keys(keys, size),
        positions=read_array("positions", positions, jnp.int32, *each),
        temperature=read_array("temperature", temperature, jnp.float32, *each),
        conditional_rates=read_rates(conditional_rates, size, k),
        bonus_token_ids=read_optional("bonus_token_ids", bonus_token_ids, jnp.int32, (size,)),
    )
