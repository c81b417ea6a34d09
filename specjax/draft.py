"""`Draft`: drafted tokens of a batch, and the logits that they were sampled from.

Axes: `B` requests, `K` most drafted tokens per request and step, `S` slots of a draft cache, `V_d`
draft vocabulary.
"""

from typing import NamedTuple

import jax
import jax.export

__all__ = ["Draft"]


class Draft(NamedTuple):
    """Drafted tokens of a batch and the logits that they were sampled from.

    Attributes:
      token_ids: i32[B, K]. A -1 ends the drafted tokens of a request.
      logits: [S, K, V_d] in bf16, f16 or f32, raw draft logits, with S = B unless
        `rows` is given. None means one-hot drafts everywhere.
      temperature: f32[B], at which the tokens were sampled. None is the request's own
        temperature. 0 is greedy: q is one-hot, and the logits are not read.
      logprobs: f32[B, K], log q(token) at that temperature and cutoff. Computed when None.
      logsumexp: f32[B, K], of the kept logits over that temperature. Computed when None.
      cutoff: f32[B, K], q is zero on logits below it. None keeps every logit.
      num_tokens: i32[B]. None is K; 0 is no drafts; -1 is an inactive request, of which
        nothing is read and for which nothing is emitted. The decode loop knows itself which
        requests are inactive, and reads a drafter's -1 as 0.
      rows: i32[B], request b's logits are `logits[rows[b]]`. Reordering a batch moves no
        logits. None is b.
      token_map: i32[V_d], the target's id of every column of `logits`, of a draft that knows some
        of the target's tokens; `token_ids` are the target's ids. q is 0 at tokens that the map does
        not hold. None is the same ids. Repeated ids bias the output: a map on the host is checked.
    """

    token_ids: jax.Array
    logits: jax.Array | None = None
    temperature: jax.Array | None = None
    logprobs: jax.Array | None = None
    logsumexp: jax.Array | None = None
    cutoff: jax.Array | None = None
    num_tokens: jax.Array | None = None
    rows: jax.Array | None = None
    token_map: jax.Array | None = None


jax.export.register_namedtuple_serialization(Draft, serialized_name="specjax.Draft")
