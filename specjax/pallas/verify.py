"""`rejection_sample` on the kernels: rows are reduced and judged, then requests are ended."""

from typing import Any

from specjax.pallas.draft_statistics import with_statistics
from specjax.pallas.inputs import Inputs, Plan
from specjax.pallas.resample import resample
from specjax.pallas.target_rows import accept_rows, reduce_rows
from specjax.pallas.tiles import is_small, pair_tile, row_tile, target_tile
from specjax.typing import Verification

__all__ = ["verify_rows"]


def verify_rows(
    inputs: Inputs, *, num_drafts: int, noise_dtype: Any, interpret: bool
) -> Verification:
    """Verifies a batch.

    Args:
      inputs: the call's arrays, as `Inputs` says.
      num_drafts: K, at least 0.
      noise_dtype: float32 or float64.
      interpret: run in Pallas' interpreter.

    Returns:
      `Verification`.
    """
    size, vocab_size = inputs.temperature.shape[0], inputs.target.shape[1]
    tile = target_tile(size, vocab_size)
    plan = Plan(size, num_drafts, noise_dtype, tile, is_small(size), interpret)
    if inputs.draft is not None and (inputs.logprobs is None or inputs.logsumexp is None):
        tile = row_tile(size * num_drafts, inputs.draft.shape[1])
        inputs = with_statistics(inputs, plan._replace(tile=tile))
    rows = (reduce_rows if plan.small else accept_rows)(inputs, plan)
    return resample(inputs, rows, plan._replace(tile=pair_tile(size, vocab_size)))
