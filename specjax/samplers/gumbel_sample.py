"""`gumbel_sample`: checks, the jitted body, and the choice of the implementation."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.call_arrays import SampleArrays
from specjax.call_options import CallOptions, Options, check_options
from specjax.checks import as_array, check_keys, check_logits, parse_array, parse_optional
from specjax.core.noise import Words, batch_addresses
from specjax.devices.map_parts import map_parts
from specjax.devices.placement import pvary_like
from specjax.devices.rows import LogitRows, logit_rows
from specjax.devices.vocabulary_split import parse_split
from specjax.implementation import choose_implementation
from specjax.samplers.batch import broadcast_requests, kernels_available
from specjax.types import Sample


def gumbel_sample(
    logits: jax.Array,
    *,
    keys: jax.Array,
    positions: Any,
    stream: Any,
    temperature: Any = 1.0,
    cutoff: Any = None,
    options: Options = Options(),
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
      options: `Options`, static: dtype of the noise, implementation, axis of a split vocabulary.

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
    check_options(options)
    logits = as_array("logits", logits)
    check_logits("logits", logits, "[B, V]")
    split = parse_split(options.axis_name, options.vocab_size, logits)
    size = logits.shape[0]
    each = ((), (size,))
    arrays = SampleArrays(
        logits,
        check_keys(keys, size),
        parse_array("positions", positions, jnp.int32, *each),
        parse_array("stream", stream, jnp.int32, *each),
        parse_array("temperature", temperature, jnp.float32, *each),
        parse_optional("cutoff", cutoff, jnp.float32, (size,)),
    )
    return sample_batch(arrays, options=CallOptions.from_options(options, split=split))


@functools.partial(jax.jit, static_argnames="options")
def sample_batch(arrays: SampleArrays, *, options: CallOptions) -> Sample:
    """Returns the `Sample` of `gumbel_sample` from checked arguments.

    Args:
      arrays: values for all rows or for each, keys typed.
      options: static.
    """
    size = arrays.logits.shape[0]
    if size == 0:
        empty = jnp.zeros((0,), jnp.float32)
        return Sample(empty.astype(jnp.int32), empty, empty)
    arrays = broadcast_requests(arrays, size)
    run = functools.partial(sample_shard, options=options)
    check_vma = not options.implementation.interpret
    placement = options.placement
    if placement is None:
        rows = arrays.logits
        return map_parts(run, rows, options.split, [rows], check_vma=check_vma)(arrays)
    # Each device draws for its own requests: GSPMD would bring a kernel all rows.
    requests = placement.spec()
    mapped = placement.map(run, (requests,), requests, check_vma)
    return jax.tree.map(lambda x: x[:size], mapped(jax.tree.map(placement.pad, arrays)))


def sample_shard(arrays: SampleArrays, *, options: CallOptions) -> Sample:
    """Draws a token for each row of a batch, or of one shard of it; neither checks nor shards.

    Args:
      arrays: every option once per row, keys as words.
      options: static.

    Returns:
      `Sample`.
    """
    arrays = pvary_like(arrays, arrays, without=options.axis_name)
    draw: Callable[[SampleArrays], Sample] = functools.partial(
        _sample_by_reference, options=options
    )
    if kernels_available(options, arrays.logits.shape[1]):
        from specjax.pallas.split.sample import choose_sampler

        draw = choose_implementation(options.implementation, draw, choose_sampler(options))
    return draw(arrays)


def _sample_by_reference(arrays: SampleArrays, options: CallOptions) -> Sample:
    keys = (arrays.keys[:, 0], arrays.keys[:, 1])
    at = batch_addresses(keys, arrays.positions, arrays.stream)
    rows = logit_rows(arrays.logits, options.split, arrays.cutoff)

    def one(row: LogitRows, at: Words, temperature: jax.Array) -> Sample:
        return row.sample(at, temperature, options.noise_dtype)

    return jax.vmap(one)(rows, at, arrays.temperature)
