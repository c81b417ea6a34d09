"""The record of repeated runs of a GPU benchmark, for ours and vLLM's."""

from typing import Any

import numpy as np


def spread(values: list[float]) -> dict[str, Any]:
    """Median, quartiles and every value, in microseconds per call."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return {
        "median_us": float(middle),
        "quartiles_us": [float(low), float(high)],
        "runs_us": [round(value, 3) for value in values],
    }
