"""`rejection_sample` on the kernels: rows are reduced and evaluated, then tokens are drawn."""

from specjax.call_arrays import CallOptions, VerifyArrays
from specjax.pallas.draft_statistics import add_draft_statistics
from specjax.pallas.emit_tokens import emit_tokens
from specjax.pallas.kernel_config import KernelConfig
from specjax.pallas.load_request import Plan
from specjax.pallas.target_rows import accept_rows, reduce_rows
from specjax.verification import Verification

__all__ = ["verify_rows"]


def verify_rows(arrays: VerifyArrays, options: CallOptions) -> Verification:
    """Verifies a batch.

    Args:
      arrays: flat rows of logits; one key, position and temperature per request.
      options: static.

    Returns:
      `Verification`.
    """
    config = options.implementation.config(KernelConfig)
    num_requests, vocab_size = arrays.temperature.shape[0], arrays.target_logits.shape[1]
    arrays = _flatten_drafts(arrays)
    plan = Plan(num_requests, options, config.target_tile(num_requests, vocab_size))
    has_statistics = arrays.draft_logprobs is not None and arrays.draft_logsumexp is not None
    if arrays.draft_logits is not None and not has_statistics:
        tile = config.reduce_tile(
            num_requests * options.max_draft_tokens, arrays.draft_logits.shape[1]
        )
        arrays = add_draft_statistics(arrays, plan._replace(tile=tile))
    rows = (reduce_rows if plan.is_small else accept_rows)(arrays, plan)
    tile = config.residual_tile(num_requests, vocab_size)
    return emit_tokens(arrays, rows, plan._replace(tile=tile))


def _flatten_drafts(arrays: VerifyArrays) -> VerifyArrays:
    """Returns the arrays with those of drafted tokens, [B, K], laid end to end."""
    names = ("token_ids", "draft_logprobs", "draft_logsumexp", "draft_cutoff")
    token_arrays = {name: getattr(arrays, name) for name in names}
    return arrays._replace(**{k: x.reshape(-1) for k, x in token_arrays.items() if x is not None})
