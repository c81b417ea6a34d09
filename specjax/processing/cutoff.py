"""Top-k, top-p and min-p as one number per row: the smallest logit that is kept."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checks import as_array, check_logits, read_array, read_optional
from specjax.core.truncation import Filters
from specjax.implementation import by_implementation, read_implementation
from specjax.mesh import pvary_like, shard_map_batch
from specjax.processing.cutoff_xla import cutoff_of_rows

__all__ = ["find_cutoff", "logit_cutoff"]

# Counts of tokens are exact in f32 up to here.
_MOST_TOKENS = 2**24


def logit_cutoff(
    logits: jax.Array,
    *,
    temperature: Any,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    implementation: str | None = None,
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
    implementation = read_implementation(implementation)
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
        read_array("temperature", temperature, jnp.float32, *each),
        Filters(
            read_optional("top_k", top_k, jnp.int32, *each),
            read_optional("top_p", top_p, jnp.float32, *each),
            read_optional("min_p", min_p, jnp.float32, *each),
        ),
        implementation=implementation,
    )


@functools.partial(jax.jit, static_argnames=("implementation",))
def find_cutoff(
    logits: jax.Array, temperature: jax.Array, filters: Filters, *, implementation: str
) -> jax.Array:
    """Returns the cutoffs f32[...] of logits [..., V]: `logit_cutoff` on checked arrays.

    The temperature and the filters have leading axes of the logits, any number of them.
    """
    leading = logits.shape[:-1]
    if 0 in leading:
        return jnp.zeros(leading, jnp.float32)

    def each(value: jax.Array) -> jax.Array:
        value = value.reshape(*value.shape, *(1,) * (len(leading) - value.ndim))
        return jnp.broadcast_to(value, leading)

    def cut(batch: Any, _: Any) -> jax.Array:
        logits, temperature, filters = pvary_like(batch, batch)
        rows = (
            logits.reshape(-1, logits.shape[-1]),
            temperature.reshape(-1),
            jax.tree.map(lambda x: x.reshape(-1), filters),
        )
        cutoff = _cut_rows(implementation, *rows)
        return _refuse_nan(cutoff, rows[2]).reshape(logits.shape[:-1])

    batch = (logits, each(temperature), jax.tree.map(each, filters))
    if not leading:
        one = jax.tree.map(lambda x: x[None], batch)
        return cut(one, ())[0]
    check_vma = implementation != "interpret"
    return shard_map_batch(cut, logits, batch, (), check_vma)


def _cut_rows(
    implementation: str, logits: jax.Array, temperature: jax.Array, filters: Filters
) -> jax.Array:
    """The cutoffs f32[R] of rows [R, V], by the implementation that is to run."""

    def kernels(logits: Any, temperature: Any, filters: Filters, interpret: bool) -> jax.Array:
        from specjax.pallas.cutoff import cutoff_rows

        return cutoff_rows(logits, temperature, filters, interpret=interpret)

    return by_implementation(implementation, cutoff_of_rows, kernels, logits, temperature, filters)


def _refuse_nan(cutoff: jax.Array, filters: Filters) -> jax.Array:
    """+inf where a filter is NaN: nothing is kept, and the samplers see a row that is no law."""
    for value in (filters.top_p, filters.min_p):
        if value is not None:
            cutoff = jnp.where(jnp.isnan(value), jnp.inf, cutoff)
    return cutoff
