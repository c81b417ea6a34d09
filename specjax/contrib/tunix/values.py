"""Values of tunix: prompts as padded tokens, sampling fields, texts as a rollout returns them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode.commit import Finish
from specjax.decode.generate import Generation
from specjax.processing.kept_tokens import KeptTokens
from specjax.processing.sampling_params import SamplingParams


class Prompts(NamedTuple):
    """Tokens of prompts, padded to one width.

    Attributes:
      token_ids: i32[B, P], padded at the end.
      lengths: i32[B].
      left_padded: i32[B, P], padded at the beginning, as in tunix.
    """

    token_ids: np.ndarray
    lengths: np.ndarray
    left_padded: np.ndarray


def read_prompts(tokenizer: Any, prompts: Sequence[str], width: int | None) -> Prompts:
    """Returns the tokens of prompts as tunix's sampler reads them.

    Each begins with one beginning-of-sequence token, if the tokenizer has it.

    Args:
      tokenizer: tunix's `TokenizerAdapter`.
      prompts: strings.
      width: P. None, or one that a prompt exceeds, is the next power of two that holds all.
    """
    bos = tokenizer.bos_id()
    begin = [bos] if bos else []
    ids = [tokenizer.dedup_bos_ids(begin + list(tokenizer.encode(text))) for text in prompts]
    lengths = np.array([len(row) for row in ids], np.int32)
    longest = int(lengths.max())
    if width is None or width < longest:
        width = 1 << (longest - 1).bit_length()
    token_ids = np.full((len(ids), width), tokenizer.pad_id(), np.int32)
    left_padded = token_ids.copy()
    for number, row in enumerate(ids):
        token_ids[number, : len(row)] = row
        left_padded[number, width - len(row) :] = row
    return Prompts(token_ids, lengths, left_padded)


def read_temperature(rollout_config: Any) -> float:
    """Returns the temperature; 0 is greedy, and so is `top_p` None in tunix's sampler."""
    return 0.0 if rollout_config.top_p is None else float(rollout_config.temperature)


def read_filters(rollout_config: Any) -> SamplingParams:
    """Returns top-k and top-p, those that filter anything."""
    top_k, top_p = rollout_config.top_k, rollout_config.top_p
    return SamplingParams(
        top_k=top_k if top_k and top_k > 0 else None,
        top_p=top_p if top_p is not None and top_p < 1 else None,
    )


def read_key(seed: Any) -> jax.Array:
    """Returns the key of a seed: an integer, a key of either kind, or None for 0."""
    if seed is None or not hasattr(seed, "dtype") or not seed.shape:
        if hasattr(seed, "dtype") and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
            key: jax.Array = seed
            return key
        return jax.random.key(int(seed or 0), impl="threefry2x32")
    return jax.random.wrap_key_data(jnp.asarray(seed), impl="threefry2x32")


def cut_texts(
    output: Generation, lengths: np.ndarray, eos: Sequence[int]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns tokens and log-probabilities of texts, without the token that ended each.

    Args:
      output: of `generate`, on the host.
      lengths: i32[B], of the prompts.
      eos: tokens that end a text.

    Raises:
      ValueError: if a text ended at logits that are not a distribution.
    """
    invalid = np.flatnonzero(output.finish == Finish.INVALID)
    if invalid.size:
        raise ValueError(
            f"the policy's logits of prompt {invalid[0]} have NaN, +inf or nothing finite; its "
            "parameters may have diverged."
        )
    tokens, logprobs = [], []
    for row, start in enumerate(lengths):
        text = np.asarray(output.token_ids)[row, start : output.lengths[row]]
        text = text[: int(np.argmax([*np.isin(text, eos), True]))]
        tokens.append(text)
        logprobs.append(np.asarray(output.logprobs)[row, start : start + text.size])
    return tokens, logprobs


def cut_kept(
    kept: KeptTokens | None, starts: np.ndarray, tokens: Sequence[np.ndarray], width: int
) -> KeptTokens | None:
    """Returns the kept sets of texts, right-padded as tunix pads completions; None of None.

    Args:
      kept: [B, S] of `generate`, on the host.
      starts: i32[B], lengths of the prompts.
      tokens: from `cut_texts`.
      width: L, most tokens of a text.

    Returns:
      `KeptTokens` [B, L] of NumPy arrays; `num_kept` is 0 after the end of a text.
    """
    if kept is None:
        return None
    num_kept = np.zeros((len(tokens), width), np.int32)
    token_ids = np.full((*num_kept.shape, kept.token_ids.shape[-1]), -1, np.int32)
    for row, (start, text) in enumerate(zip(starts, tokens, strict=True)):
        num_kept[row, : text.size] = kept.num_kept[row, start : start + text.size]
        token_ids[row, : text.size] = kept.token_ids[row, start : start + text.size]
    return KeptTokens._make([num_kept, token_ids, None])
