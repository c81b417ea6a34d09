"""A Python number that a caller gives, such as a rate or a length."""

import math
from typing import Any

import jax

__all__ = ["check_number", "to_float"]


def check_number(name: str, value: Any, low: float, high: float) -> float:
    """Returns a rate or a length as a float; refuses what is no number in [low, high]."""
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            f"{name} is a traced value; it needs to be a Python number, because the schedule is "
            "solved on the host. Compute the rates outside jit and pass them in as data."
        )
    number = to_float(value)
    if not low <= number <= high:
        raise ValueError(f"{name} is {value!r}; it needs to be a number in [{low}, {high}].")
    return number


def to_float(value: Any) -> float:
    """Returns a number as a float, and NaN for what is none."""
    try:
        return math.nan if isinstance(value, (str, bool)) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
