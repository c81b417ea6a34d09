"""The cutoff of a row: the smallest logit that top-k, top-p and min-p keep."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checks import parse_array, parse_optional, parse_rows
from specjax.core.temperature import spread_over_rows
from specjax.core.truncation import Filters
from specjax.devices.map_parts import map_parts
from specjax.devices.placement import pvary_like
from specjax.devices.rows import logit_rows
from specjax.devices.vocabulary_split import VocabularySplit, axis_of, parse_split, plain_if_split
from specjax.implementation import Implementation, choose_implementation, resolve_implementation
from specjax.processing.cutoff_xla import cutoff_of_rows

# float32 counts tokens exactly up to here.
_MAX_TOKENS = 2**24

_Batch = tuple[jax.Array, jax.Array, Filters]


def logit_cutoff(
    logits: jax.Array,
    *,
    temperature: Any,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    implementation: str | Implementation | None = None,
    axis_name: str | None = None,
    vocab_size: int | None = None,
) -> jax.Array:
    r"""Returns the smallest logit of each row that top-k, top-p and min-p keep, without a sort.

    With :math:`p = \mathrm{softmax}(\text{logits} / \text{temperature})` the filters apply in this
    order:

    .. math:: \text{top_k}: \text{the k largest logits}, \quad
      \text{top_p}: \text{the fewest likeliest with } \sum p / Z \ge \text{top_p}, \quad
      \text{min_p}: p \ge \text{min_p} \max p

    where Z is the probability of what `top_k` keeps. Ties at an edge are kept, and so is the
    likeliest token always. The samplers take the result as `cutoff` and keep the logits that are
    not below it. That is one comparison per element, and no copy of the logits.

    Every number is data, so rows with different filters share one program. An argument with fewer
    axes than the rows holds for the leading axes of `logits`. With logits [B, K + 1, V], a
    temperature [B] is of each request and [B, K + 1] of each row.

    Args:
      logits: [..., V], bf16, f16 or f32, raw, V <= 2^24. -inf masks a token, which is never kept.
      temperature: f32, scalar or leading axes of `logits`, as given to the samplers. Greedy rows
        (below 1e-5) are not cut.
      top_k: i32, scalar or leading axes. 0, negative, V and above keep all. None is no top-k.
      top_p: f32, scalar or leading axes. 1 and above keep all, 0 and below the likeliest token
        alone. None is no top-p.
      min_p: f32, scalar or leading axes. 0 and below keep all, 1 and above the likeliest token
        alone. None is no min-p.
      implementation: as in `Options`.
      axis_name: as in `Options`; the cutoffs are then the same on each device.
      vocab_size: as in `Options`.

    Returns:
      f32[...], a logit of the row. -inf where nothing is cut: no filter is active, or the row is
      greedy or invalid. The samplers find an invalid row: NaN, +inf, -inf everywhere, or an invalid
      temperature. +inf where `top_p` or `min_p` is NaN, which makes the row invalid. Sums are
      float32: where a cumulative probability is within a few times 1e-6 of `top_p`, rounding
      decides.

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
    logits = parse_rows(logits)
    split = parse_split(axis_name, vocab_size, logits, implementation.name)
    num_tokens = logit_rows(logits, split).vocab_size
    if num_tokens > _MAX_TOKENS:
        raise ValueError(
            f"logits has a vocabulary of {num_tokens}; it needs at most {_MAX_TOKENS}, "
            "the most tokens that float32 counts exactly."
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
        split=split,
    )


@functools.partial(jax.jit, static_argnames=("implementation", "split"))
def find_cutoff(
    logits: jax.Array,
    temperature: jax.Array,
    filters: Filters,
    *,
    implementation: Implementation,
    split: VocabularySplit | None = None,
) -> jax.Array:
    """Returns the cutoffs f32[...] of logits [..., V]: `logit_cutoff` on checked arrays.

    The temperature and the filters have leading axes of the logits, any number of them.
    """
    leading = logits.shape[:-1]
    if 0 in leading:
        return jnp.zeros(leading, jnp.float32)
    spread = functools.partial(spread_over_rows, leading=leading)
    batch = (logits, spread(temperature), jax.tree.map(spread, filters))
    run = functools.partial(cutoff_shard, implementation=implementation, split=split)
    check_vma = not implementation.interpret
    return map_parts(run, logits, split, [logits], check_vma=check_vma)(batch)


def cutoff_shard(
    batch: _Batch, *, implementation: Implementation, split: VocabularySplit | None = None
) -> jax.Array:
    """Returns the cutoffs of a batch, or of one shard of it.

    Args:
      batch: logits [..., V], and temperatures and filters [...].
      implementation: a resolved one.
      split: of the vocabulary over devices, or None.

    Returns:
      f32[...].
    """
    logits, temperature, filters = pvary_like(batch, batch, without=axis_of(split))
    filters = jax.tree.map(lambda x: x.reshape(-1), filters)
    rows = logits.reshape(-1, logits.shape[-1])
    search: Callable[..., jax.Array] = functools.partial(cutoff_of_rows, split=split)
    if plain_if_split(implementation, split).name != "xla":
        from specjax.pallas.cutoff.rows import cutoff_rows

        kernels = functools.partial(cutoff_rows, implementation=implementation)
        search = choose_implementation(implementation, search, kernels)
    return search(rows, temperature.reshape(-1), filters).reshape(logits.shape[:-1])
