"""How good the pair is on text neither has seen: bits per byte, and the share both agree on."""

import functools
import lzma
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pair.tokens import windows
from pair.training import Recipe, logits_of
from specjax.models import (
    Eagle3Config,
    TransformerConfig,
    causal_taps,
    functions,
    unrolled_eagle3,
)

Side = tuple[TransformerConfig, Any]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _judge(
    target: TransformerConfig,
    draft: TransformerConfig,
    recipe: Recipe,
    params: Any,
    ids: jax.Array,
    judged: jax.Array,
) -> jax.Array:
    p = jax.nn.log_softmax(logits_of(target, params[0], ids[:, :-1], recipe))
    q = jax.nn.log_softmax(logits_of(draft, params[1], ids[:, :-1], recipe))

    def surprise(logprobs: jax.Array) -> jax.Array:
        chosen = jnp.take_along_axis(logprobs, ids[:, 1:, None], axis=-1)[..., 0]
        return -jnp.sum(jnp.where(judged, chosen, 0.0))

    overlap = jnp.sum(jnp.minimum(jnp.exp(p), jnp.exp(q)), axis=-1)
    agreed = jnp.where(judged, overlap, 0.0).sum()
    return jnp.stack([surprise(p), surprise(q), agreed, judged.sum().astype(jnp.float32)])


def judge(
    target: Side, draft: Side, rows: list[np.ndarray], texts: list[bytes], recipe: Recipe
) -> dict[str, float]:
    """Bits per byte of both models and of `xz -9`, and the mean of sum min(p, q).

    Args:
      target: configuration and parameters.
      draft: configuration and parameters.
      rows: the held-out texts' tokens.
      texts: the same texts, in bytes.
      recipe: gives length, batch and dtype.
    """
    ids, judged = windows(rows, recipe.length)
    sums = np.zeros(4)
    size = max(1, recipe.batch // 4)
    for start in range(0, len(ids), size):
        piece, mask = ids[start : start + size], judged[start : start + size]
        missing = size - len(piece)
        piece = np.pad(piece, ((0, missing), (0, 0)))
        mask = np.pad(mask, ((0, missing), (0, 0)))
        sums += np.asarray(
            _judge(target[0], draft[0], recipe, (target[1], draft[1]), piece, mask), np.float64
        )
    size_in_bytes = sum(map(len, texts))
    packed = len(lzma.compress(b"".join(texts), preset=9))
    return {
        "target_bits_per_byte": sums[0] / np.log(2) / size_in_bytes,
        "draft_bits_per_byte": sums[1] / np.log(2) / size_in_bytes,
        "xz_bits_per_byte": 8 * packed / size_in_bytes,
        "acceptance": sums[2] / sums[3],
        "heldout_files": float(len(texts)),
        "heldout_bytes": float(size_in_bytes),
        "heldout_tokens": sums[3],
    }


def judge_head(
    target: Side,
    head: Eagle3Config,
    params: Any,
    rows: list[np.ndarray],
    length: int,
    num_steps: int,
) -> list[float]:
    """Mean of sum min(p, q) for each draft of a proposal, those before it being the text's.

    Args:
      target: configuration and parameters.
      head: its configuration.
      params: of the head.
      rows: the held-out texts' tokens.
      length: tokens of a window.
      num_steps: drafts of a proposal.
    """

    @jax.jit
    def sums_of(sides: Any, ids: jax.Array, judged: jax.Array) -> jax.Array:
        """f32[2, num_steps]: sums of sum min(p, q) of each step, and of their number."""
        ids = ids[:, :-1]
        hidden, taps = causal_taps(target[0], sides[0], ids, head.taps)
        p = jax.nn.softmax(functions(target[0])[2](sides[0], hidden))
        tokens = sides[0]["embedding"][ids]
        states = unrolled_eagle3(head, sides[1], tokens, taps, num_steps)
        sums = []
        for step, state in enumerate(states):
            q = jax.nn.softmax(state[:, 1 : ids.shape[1] - step] @ sides[1]["head"].T)
            counts = judged[:, 1 + step :]
            overlap = jnp.minimum(p[:, 1 + step :], q).sum(-1)
            sums.append(jnp.stack([jnp.where(counts, overlap, 0.0).sum(), counts.sum()]))
        return jnp.stack(sums, axis=1)

    ids, judged = windows(rows, length)
    sums = np.zeros((2, num_steps))
    for start in range(0, len(ids), 8):
        piece, mask = ids[start : start + 8], judged[start : start + 8]
        missing = 8 - len(piece)
        piece, mask = (np.pad(a, ((0, missing), (0, 0))) for a in (piece, mask))
        sums += np.asarray(sums_of((target[1], params), piece, mask), np.float64)
    return list(sums[0] / sums[1])
