"""Top-k, top-p and min-p as one number per row: the smallest logit that is kept."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checks import as_array, check_logits, parse_array, parse_optional
from specjax.core.truncation import Filters
from specjax.implementation import Implementation, resolve_implementation, select
from specjax.mesh import pvary_like, shard_map_batch
from specjax.processing.cutoff_xla import cutoff_of_rows

__all__ = ["cutoff_shard", "find_cutoff", "logit_cutoff"]

# Counts of tokens are exact in f32 up to here.
_MOST_TOKENS = 2**24

_Batch = tuple[jax.Array, jax.Array, Filters]


def logit_cutoff(
    logits: jax.Array,
    *,
    temperature: Any,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    implementation: str | Implementation | None = None,
) -> jax.Array:
    r"""The smallest raw logit that top-k, top-p and min-p keep, in this order, without a sort.

    With :math:`p = \mathrm{softmax}(\text{logits} / \text{temperature})`: `top_k` keeps the k
    largest logits; `top_p` keeps of those, renormalised, the smallest set of the likeliest
    whose probability reaches `top_p`; `min_p` keeps :math:`p \ge \text{min_p} \max p`. Ties at
    an edge are kept, and the likeliest token always is. The samplers take the result as
    `cutoff` and keep what is not below it: one comparison per element, and no copy of the
    logits.

    Every number is data, and rows that ask for different things mix in one program. An
    argument of an array shape stands for the leading axes of `logits`: with logits
    [B, K + 1, V], a temperature [B] is each request's, [B, K + 1] each row's.

    Args:
      logits: [..., V], bf16, f16 or f32, raw. -inf masks a token: it is never kept.
      temperature: f32, scalar or the leading axes of `logits`, as given to the samplers.
        Greedy rows (below 1e-5) are not cut.
      top_k: i32, likewise. 0, negative, V and above keep all. None is no top-k.
      top_p: f32, likewise. 1 and above keep all, 0 and below the likeliest alone. None is
        no top-p.
      min_p: f32, likewise. 0 and below keep all, 1 and above the likeliest alone. None is
        no min-p.
      implementation: as in `gumbel_sample`.

    Returns:
      f32[...], the value of a logit of the row. -inf where nothing is cut: no filter asks, the
      row is greedy, its temperature invalid, or it is no law (NaN, +inf, -inf everywhere), which
      the samplers then see. +inf where `top_p` or `min_p` is NaN, so that the row is no law.
      Sums are float32: where a cumulative probability is within a few times 1e-6 of `top_p`,
      rounding decides.

    Raises:
      ValueError: for wrong shapes, dtypes or an unknown implementation.

    Example:
      >>> logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05], [0.4, 0.3, 0.2, 0.1]]))
      >>> cutoff = specjax.logit_cutoff(
      ...     logits, temperature=1.0, top_k=jnp.array([3, 0]), top_p=0.75)
      >>> logits >= cutoff[:, None]
      Array([[ True,  True, False, False],
             [ True,  True,  True, False]], dtype=bool)

    References:
      Fan et al., 2018, arXiv:1805.04833 (top-k); Holtzman et al., 2019, arXiv:1904.09751
      (top-p); Nguyen et al., 2024, arXiv:2407.01082 (min-p). The order is that of Hugging
      Face's `transformers`.
    """
    implementation = resolve_implementation(implementation)
    logits = as_array("logits", logits)
    if logits.ndim == 0:
        raise ValueError("logits has shape (); it needs [..., V], the vocabulary last.")
    check_logits("logits", logits, ", ".join("V" * logits.ndim))
    if logits.shape[-1] > _MOST_TOKENS:
        raise ValueError(
            f"logits has a vocabulary of {logits.shape[-1]}; it needs at most {_MOST_TOKENS}, up "
            "to where float32 counts."
        )
    leading = logits.shape[:-1]
    each = [leading[:axes] for axes in range(len(leading) + 1)]
    return find_cutoff(
        logits,
        parse_array("temperature", temperature, jnp.float32, *each),
        Filters(
            parse_optional("top_k", top_k, jnp.int32, *each),
            parse_optional("top_p", top_p, jnp.float32, *each),
            parse_optional("min_p", min_p, jnp.float32, *each),
        ),
        implementation=implementation,
    )


@functools.partial(jax.jit, static_argnames="implementation")
def find_cutoff(
    logits: jax.Array, temperature: jax.Array, filters: Filters, *, implementation: Implementation
) -> jax.Array:
    """Returns the cutoffs f32[...] of logits [..., V]: `logit_cutoff` on checked arrays.

    The temperature and the filters have leading axes of the logits, any number of them.
    """
    leading = logits.shape[:-1]
    if 0 in leading:
        return jnp.zeros(leading, jnp.float32)
    batch = _once_per_row(logits, temperature, filters)
    run = functools.partial(cutoff_shard, implementation=implementation)
    if not leading:
        return run(jax.tree.map(lambda x: x[None], batch), None)[0]
    return shard_map_batch(run, logits, check_vma=not implementation.interpret)(batch, None)


def _once_per_row(logits: jax.Array, temperature: jax.Array, filters: Filters) -> _Batch:
    leading = logits.shape[:-1]

    def each(value: jax.Array) -> jax.Array:
        value = value.reshape(*value.shape, *(1,) * (len(leading) - value.ndim))
        return jnp.broadcast_to(value, leading)

    return logits, each(temperature), jax.tree.map(each, filters)


def cutoff_shard(batch: _Batch, shared: None, *, implementation: Implementation) -> jax.Array:
    """Returns the cutoffs of a batch, or of one shard of it.

    Args:
      batch: logits [..., V], and temperatures and filters [...].
      shared: None, because no array is needed whole.
      implementation: a resolved one.

    Returns:
      f32[...].
    """
    logits, temperature, filters = pvary_like(batch, batch)
    filters = jax.tree.map(lambda x: x.reshape(-1), filters)
    rows = logits.reshape(-1, logits.shape[-1])
    cutoff = _searcher(implementation)(rows, temperature.reshape(-1), filters)
    return _refuse_nan(cutoff, filters).reshape(logits.shape[:-1])


def _searcher(implementation: Implementation) -> Callable[..., jax.Array]:
    """Returns the function of rows [R, V] that searches: the reference or the kernels."""
    if implementation.name == "xla":
        return cutoff_of_rows
    from specjax.pallas.cutoff import cutoff_rows

    kernels = functools.partial(cutoff_rows, implementation=implementation)
    return select(implementation, cutoff_of_rows, kernels)


def _refuse_nan(cutoff: jax.Array, filters: Filters) -> jax.Array:
    """+inf where a filter is NaN: nothing is kept, and the samplers see a row that is no law."""
    for value in (filters.top_p, filters.min_p):
        if value is not None:
            cutoff = jnp.where(jnp.isnan(value), jnp.inf, cutoff)
    return cutoff
