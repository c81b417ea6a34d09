"""`score`: log-probabilities of given texts, by forward passes over chunks of several texts.

    texts, longest first -> batches of B -> chunks [B, C] -> logits [B, C, V] -> `TopLogprobs`

    score                public: the batches, and a host's loop over the chunks of each
    list_next_logprobs   log-probabilities of the token after each row; the engine calls it, too

The row of token i gives the log-probability of token i + 1. So a text's last token is not read.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checks import check_count, check_model_logits, check_num_listed, check_type
from specjax.decode.capacity import (
    DEFAULT_CAPACITY,
    explain_out_of_memory,
    round_up_to_mesh,
)
from specjax.decode.drafters import Models
from specjax.decode.logprobs import (
    TopLogprobs,
    check_logprobs_config,
    list_top_logprobs,
)
from specjax.decode.options import LoopOptions, choose_chunk_size
from specjax.decode.request_batch import check_text_ids, parse_texts
from specjax.decode.target_step import apply_model, vocabulary_size
from specjax.devices.placement import with_auto_axes
from specjax.types import Model

# Texts that are read together by default.
_BATCH_SIZE = 8
# A row of a batch without a text.
_NO_TOKENS = np.zeros(0, np.int32)


class TextScores(NamedTuple):
    """The log-probabilities that `score` returns for one text of L tokens: NumPy arrays.

    Attributes:
      logprobs: f32[L], log-probability of each token after those before it, at temperature 1. NaN
        for the first token, and where the model's row is invalid (NaN, +inf, or -inf everywhere).
      is_argmax: bool[L], whether the token is greedy decoding's: the largest logit of its row, the
        lowest id among equals. False for the first token.
      top_logprobs: `TopLogprobs` [L, ...], the likeliest tokens at each position, and rank and
        log-probability of the text's token. For the first token ids are -1, other values 0. None if
        `LoopOptions.num_logprobs` is None.
    """

    logprobs: np.ndarray
    is_argmax: np.ndarray
    top_logprobs: TopLogprobs | None = None


def score(
    model: Model,
    texts: Any,
    *,
    batch_size: int | None = None,
    options: LoopOptions = LoopOptions(),
) -> list[TextScores]:
    r"""Returns the log-probabilities of all tokens of some texts.

    With the logits :math:`z` that the model returns after the tokens before :math:`x_i`:

    .. math:: \log p(x_i \mid x_{<i}) = z_{x_i} - \log \sum_v e^{z_v}

    at temperature 1, without sampling parameters. B texts of about one length are read together in
    chunks of C tokens. Logits [B, C, V] of one chunk are held at a time. N texts of at most L
    tokens get less than N C + B (L + C) tokens of padding.

    Args:
      model: a `Model`.
      texts: N lists of ids in [0, V), none of them empty. Or a tuple of arrays (ids, lengths), as
        prompts of `generate`. The host reads them, so they cannot be traced.
      batch_size: B, a Python int >= 1. Fewer texts are padded to it, so that any number of texts
        runs the same programs. None is the smaller of 8 and N.
      options: `LoopOptions`. `prefill_chunk_size` is C. Values depend on B and C by rounding alone,
        and with `Model.row_invariant` not at all. `num_logprobs` tokens are listed at each
        position. `max_length` is the capacity of a batch. None is the next power of two, at least
        128, that holds the batch's texts.

    Returns:
      A `TextScores` for each text, in the order of `texts`.

    Raises:
      ValueError: for texts that are empty or traced, or have ids outside [0, V). For texts that
        `options.max_length` or the model's positions do not hold. For more log-probabilities than
        tokens, and a `logprobs_mode` other than "raw".
      MemoryError: if the device has no room. The error names the bytes of a batch's caches.

    Example:
      >>> from specjax.markov_chain import markov_chain
      >>> model = markov_chain([[0.25, 0.75], [0.5, 0.5]])
      >>> text, one_token = specjax.score(model, [[0, 1, 1], [1]])
      >>> np.exp(text.logprobs).tolist(), text.is_argmax.tolist()
      ([nan, 0.75, 0.5], [False, True, False])
      >>> one_token.logprobs.tolist()
      [nan]

    References:
      Gao et al., 2023, doi:10.5281/zenodo.10256836, whose `loglikelihood` sums such values.
    """
    rows = parse_texts("texts", texts)
    batch_size, chunk_size = _check_sizes(model, len(rows), batch_size, options)
    # Longest first: what does not fit the device fails before time was spent on the others.
    order = sorted(range(len(rows)), key=lambda i: -rows[i].size)
    longest = [rows[i].size for i in order[::batch_size]]
    capacities = [_choose_capacity(size, options.max_length, model.max_length) for size in longest]
    sizes = (batch_size, min(chunk_size, capacities[0]), capacities[0])
    _check_vocabulary(model, rows, options.num_logprobs, sizes)
    scores: dict[int, TextScores] = {}
    for start, max_length in zip(range(0, len(rows), batch_size), capacities, strict=True):
        members = order[start : start + batch_size]
        batch = [rows[i] for i in members] + [_NO_TOKENS] * (batch_size - len(members))
        with explain_out_of_memory(Models(model, None), batch_size, max_length):
            size = min(chunk_size, max_length)
            operands = (model, batch, max_length, size, options.num_logprobs)
            top = with_auto_axes(_read_batch, model.placement, *operands, like=())
        for place, i in enumerate(members):
            scores[i] = _scores_of(rows[i], top, place, options.num_logprobs)
    return [scores[i] for i in range(len(rows))]


def _check_sizes(
    model: Model, num_texts: int, batch_size: int | None, options: LoopOptions
) -> tuple[int, int]:
    """Returns B and C of `score`, or refuses them or the options."""
    check_type("model", model, Model, "a specjax.Model")
    check_type("options", options, LoopOptions, "specjax.LoopOptions(...)")
    check_logprobs_config(options.num_logprobs, options.logprobs_mode)
    if options.logprobs_mode != "raw":
        raise ValueError(
            f"logprobs_mode is {options.logprobs_mode!r}; score samples nothing, so it needs 'raw'."
        )
    if batch_size is None:
        batch_size = min(_BATCH_SIZE, num_texts)
    batch_size = check_count("batch_size", batch_size, 1, "the texts that are read together")
    batch_size = round_up_to_mesh(batch_size, model.placement)
    return batch_size, choose_chunk_size(options, batch_size)


def _choose_capacity(longest: int, max_length: int | None, limit: int | None) -> int:
    """Returns S for texts of at most `longest` tokens, or refuses these."""
    if max_length is None:
        max_length = max(DEFAULT_CAPACITY, 1 << (longest - 1).bit_length())
        max_length = max_length if limit is None else min(max_length, limit)
    max_length = check_count("max_length", max_length, 1, "the tokens that caches have room for")
    if limit is not None and max_length > limit:
        raise ValueError(
            f"max_length is {max_length}, and the model takes texts of at most {limit} tokens."
        )
    if longest > max_length:
        cause = "the model takes" if max_length == limit else "max_length is"
        raise ValueError(f"texts has one of {longest} tokens, and {cause} {max_length}.")
    return max_length


def _check_vocabulary(
    model: Model, rows: list[np.ndarray], num_logprobs: int | None, sizes: tuple[int, int, int]
) -> None:
    """Refuses ids that the model does not have, and more listed tokens than it has.

    Args:
      model: as in `score`.
      rows: the texts.
      num_logprobs: as in `LoopOptions`.
      sizes: B, C and S of the first batch, whose trace the batch uses again.
    """
    vocab_size = vocabulary_size(model, *sizes)
    if num_logprobs is not None:
        check_num_listed("num_logprobs", num_logprobs, vocab_size)
    for i, row in enumerate(rows):
        check_text_ids(f"texts[{i}]", row, vocab_size)


def _read_batch(
    model: Model,
    texts: list[np.ndarray],
    max_length: int,
    chunk_size: int,
    num_logprobs: int | None,
) -> TopLogprobs:
    """Returns `TopLogprobs` [B, L, ...] of the tokens after the first; NumPy arrays.

    Entry i of a text is of its token i + 1. At least the likeliest token is listed.

    Args:
      model: as in `score`.
      texts: B texts, i32[L] each.
      max_length: S.
      chunk_size: C.
      num_logprobs: as in `LoopOptions`.
    """
    lengths = np.array([[text.size] for text in texts], np.int32)
    num_chunks = max(1, -(-(int(lengths.max()) - 1) // chunk_size))
    token_ids = np.full((len(texts), num_chunks * chunk_size + 1), -1, np.int32)
    for row, text in zip(token_ids, texts, strict=True):
        row[: text.size] = text
    run = functools.partial(_read_chunk, num_listed=max(1, num_logprobs or 0))
    cache = new_cache(model, size=len(texts), max_length=max_length)
    chunks = []
    for start in range(0, num_chunks * chunk_size, chunk_size):
        index = np.arange(start, start + chunk_size, dtype=np.int32)[None]
        positions = np.where(index < lengths - 1, index, np.int32(-1))
        next_ids = token_ids[:, start + 1 : start + chunk_size + 1]
        ids = np.where(positions < 0, 0, token_ids[:, start : start + chunk_size])
        cache, top = run(model, cache, ids, positions, next_ids)
        chunks.append(top)
    whole: TopLogprobs = jax.tree.map(
        lambda *values: np.concatenate(values, axis=1), *jax.device_get(chunks)
    )
    return whole


@functools.partial(jax.jit, static_argnames=("size", "max_length"))
def new_cache(model: Model, *, size: int, max_length: int) -> Any:
    """Returns a cache for B texts whose buffers can be donated."""
    # Copies: a buffer that two leaves share cannot be donated.
    return jax.tree.map(jnp.copy, model.init_cache(size, max_length))


@functools.partial(jax.jit, static_argnames="num_listed", donate_argnames="cache")
def _read_chunk(
    model: Model,
    cache: Any,
    token_ids: jax.Array,
    positions: jax.Array,
    next_ids: jax.Array,
    *,
    num_listed: int,
) -> tuple[Any, TopLogprobs]:
    """Returns the cache after a chunk i32[B, C] of each text, and `TopLogprobs` of `next_ids`."""
    hidden, _, cache = apply_model(model, token_ids, positions, cache)
    return cache, list_next_logprobs(model, hidden, next_ids, num_listed)


def list_next_logprobs(
    model: Model, hidden: jax.Array, next_ids: jax.Array, num_listed: int
) -> TopLogprobs:
    """Returns `TopLogprobs` [B, C, ...] of the tokens after each row, at temperature 1.

    Args:
      model: a `Model`.
      hidden: [B, C, D], hidden states that it returned.
      next_ids: i32[B, C], the token after each; -1 for a row that is not read.
      num_listed: number of likeliest tokens that are listed.
    """
    # So that XLA compiles the layers as it does where no logits follow: caches keep their bits.
    hidden = jax.lax.optimization_barrier(hidden)
    logits = model.logits(model.params, hidden)
    check_model_logits("target.logits", logits, hidden)
    check_num_listed("num_logprobs", num_listed, logits.shape[-1])
    rows = (logits, next_ids, jnp.float32(1), None)
    return list_top_logprobs(*rows, n=num_listed, row_invariant=model.row_invariant)


def _scores_of(
    text: np.ndarray, top: TopLogprobs, place: int, num_logprobs: int | None
) -> TextScores:
    """Returns the scores of a text i32[L], of which `top` has the tokens after the first.

    Args:
      text: the text.
      top: of its batch, from `_read_batch`.
      place: its index there.
      num_logprobs: as in `LoopOptions`.
    """

    def take(values: jax.Array, first: int) -> np.ndarray:
        taken = np.asarray(values)[place, : text.size - 1]
        return np.concatenate([np.full((1, *taken.shape[1:]), first, taken.dtype), taken])

    token_ids, logprobs = take(top.token_ids, -1), take(top.logprobs, 0)
    rank, logprob = take(top.rank, 0), take(top.logprob, 0)
    is_valid = rank > 0  # A rank of 0 is of no row, or of an invalid one.
    scores = TextScores(
        np.where(is_valid, logprob, np.float32(np.nan)), is_valid & (token_ids[:, 0] == text)
    )
    if num_logprobs is None:
        return scores
    listed: Any = (token_ids[:, :num_logprobs], logprobs[:, :num_logprobs], rank, logprob)
    return scores._replace(top_logprobs=TopLogprobs(*listed))
