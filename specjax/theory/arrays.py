"""Arguments of the formulas: arrays of JAX stay, other values become float64 of NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# A row that was normalised in bfloat16 may be off by this.
_SUM_TOLERANCE = 1e-2


def as_floats(*values: Any) -> tuple[Any, ...]:
    """Returns a namespace, jax.numpy if any value is an array of JAX, and its floating arrays.

    Arrays of NumPy become float64, those of JAX its default floating dtype.
    """
    if any(isinstance(value, jax.Array) for value in values):
        return jnp, *(jnp.asarray(value, float) for value in values)
    return np, *(np.asarray(value, np.float64) for value in values)


def check_probabilities(**rows: Any) -> None:
    """Refuses rows [..., V] of unequal shapes, and rows that are no probabilities where known.

    Raises:
      ValueError: with the name of the argument.
    """
    (first, one), *other_rows = rows.items()
    for name, values in other_rows:
        if np.shape(values) != np.shape(one):
            raise ValueError(
                f"{name} has shape {np.shape(values)} and {first} {np.shape(one)}; both need to be "
                "[..., V], of one vocabulary."
            )
    for name, values in rows.items():
        if np.ndim(values) == 0 or np.shape(values)[-1] == 0:
            raise ValueError(f"{name} has shape {np.shape(values)}; it needs a last axis of V.")
        if isinstance(values, jax.core.Tracer):
            continue
        known = np.asarray(values, np.float64)
        sums = known.sum(-1)
        wrong = ~(known >= 0).all(-1) | ~(np.abs(sums - 1) <= _SUM_TOLERANCE)
        if wrong.any():
            row = known[wrong][0]
            raise ValueError(
                f"{name} has a row whose smallest entry is {row.min():g} and whose sum is "
                f"{row.sum():g}; it needs probabilities, which are >= 0 and sum to 1. Logits go "
                "through softmax first."
            )
