"""What a request's processing owes, from its definitions: NumPy, float64, token by token.

Imports nothing that it judges. A row is told everything that stands before it.
"""

import numpy as np


def process(
    row,
    prompt,
    generated,
    *,
    bias=None,
    repetition_penalty=None,
    frequency_penalty=None,
    presence_penalty=None,
    allowed=None,
    bad_words=(),
):
    """One row of logits after its prompt and what was generated, drafted tokens included."""
    x = np.asarray(row).astype(np.float64)
    if bias is not None:
        x = x + np.asarray(bias, np.float64)
    for v in range(len(x)):
        count = list(generated).count(v)
        if repetition_penalty is not None and (count or v in prompt):
            x[v] = x[v] / repetition_penalty if x[v] > 0 else x[v] * repetition_penalty
        x[v] -= (frequency_penalty or 0.0) * count
        x[v] -= (presence_penalty or 0.0) * (count > 0)
        if allowed is not None and not allowed[v]:
            x[v] = -np.inf
    past = [*prompt, *generated]
    for word in bad_words:
        *before, last = word
        ends = len(before) <= len(past) and past[len(past) - len(before) :] == before
        if ends and last < len(x):
            x[last] = -np.inf
    return x


def pack(allowed):
    """Bit v % 32 of word v // 32, as uint32."""
    allowed = np.asarray(allowed)
    words = np.zeros((*allowed.shape[:-1], -(-allowed.shape[-1] // 32)), np.uint32)
    for v in range(allowed.shape[-1]):
        words[..., v // 32] |= allowed[..., v].astype(np.uint32) << np.uint32(v % 32)
    return words


def truncate(row, temperature, *, top_k=None, top_p=None, min_p=None):
    """Probabilities of one processed row after temperature, top-k, top-p and min-p, in this order.

    Ties at an edge are kept, and the likeliest token always is.
    """
    x = np.asarray(row, np.float64)
    p = np.exp((x - x.max()) / temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if top_k is not None:
        p = np.where(p >= p[order[min(top_k, len(p)) - 1]], p, 0.0)
        p /= p.sum()
    if top_p is not None:
        reached = np.cumsum(p[order])
        assert np.abs(reached - top_p).min() > 1e-4, "float32 may decide this edge otherwise"
        p = np.where(p >= p[order[np.argmax(reached >= top_p)]], p, 0.0)
    if min_p is not None:
        p = np.where(p >= min_p * p.max(), p, 0.0)
    return p / p.sum()
