"""The number of drafted tokens with the most tokens per second."""

from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.theory.arrays import as_floats


class BestK(NamedTuple):
    """The choice of `best_k`, and the speeds it compares.

    Attributes:
      k: i[...], the number of drafted tokens per step with the most tokens per second.
      tokens_per_second: [..., K + 1], of a step that drafts 0, 1, ..., K tokens.
    """

    k: Any
    tokens_per_second: Any


def best_k(lengths: Any, step_seconds: Any) -> BestK:
    r"""Returns how many tokens a step drafts best, given its tokens and its time for each number.

    :math:`\mathrm{argmax}_k\; L_k / t_k`, the smallest of equals

    Args:
      lengths: f32[..., K + 1] or f64, mean tokens L_k of a step that drafts k = 0, 1, ..., K
        tokens, as `acceptance_lengths` gives them. For a batch, L_k sums over its requests.
      step_seconds: f32[..., K + 1] or f64 > 0, seconds t_k of such a step. In another unit of time
        the speeds are per that unit. Leading axes broadcast with the ones of `lengths`.

    Returns:
      `BestK`, arrays of NumPy or of JAX as the arguments are.

    Raises:
      ValueError: if the last axes differ, or a time that is known is not a positive number.

    Example:
      >>> choice = best_k([1.0, 1.75, 2.25], [1.0, 1.25, 2.0])
      >>> int(choice.k), choice.tokens_per_second.tolist()
      (1, [1.0, 1.4, 1.125])

    References:
      Leviathan et al., 2023, arXiv:2211.17192, theorem 3.8: their improvement factor, where a
      drafted token costs c and drafts are accepted independently: t_k = 1 + c k.
    """
    sizes = [np.shape(values)[-1:] for values in (lengths, step_seconds)]
    if sizes[0] != sizes[1] or sizes[0] in ((), (0,)):
        raise ValueError(
            f"lengths has shape {np.shape(lengths)} and step_seconds {np.shape(step_seconds)}; "
            "both need a last axis of K + 1, for steps that draft 0, 1, ..., K tokens."
        )
    if not isinstance(step_seconds, jax.core.Tracer):
        seconds = np.asarray(step_seconds, np.float64)
        wrong = seconds[~((seconds > 0) & (seconds < np.inf))]
        if wrong.size:
            raise ValueError(f"step_seconds holds {wrong[0]}; a time needs to be positive.")
    xp, lengths, times = as_floats(lengths, step_seconds)
    lengths, times = xp.broadcast_arrays(lengths, times)
    speeds = lengths / times
    return BestK(xp.argmax(speeds, axis=-1), speeds)
