r"""The tokens of a row that the cutoff and the masks keep: the support of what is sampled.

kept_tokens      public: the sets of rows, checked arguments
kept_logprobs    public: log-probabilities of new logits over sets that were recorded
list_kept        implements `kept_tokens`; each step that lists kept sets calls it

A token is kept if `mask_below_cutoff` leaves its logit above -inf, as in every sampler. So ties
with the cutoff are kept. A row of V tokens becomes at most M ids without a sort:

    kept bits       V          packed into W = ceil(V / 32) words, bit i of word w: token 32 w + i
    set bits        W          counted in each word, and summed up to its end
    slot j          M          the word in which kept token j lies, by 1 + log2(W) comparisons
    id of slot j    M          the bit of that rank in the word, by five halvings

The logits are read twice, for the largest one and for the bits: 2 V numbers of a row. W + M numbers
are written.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from specjax.checks import (
    as_array,
    check_count,
    check_num_listed,
    check_shape,
    parse_array,
    parse_optional,
    parse_rows,
)
from specjax.core.logsumexp import mask_below_cutoff
from specjax.core.temperature import parse_temperature, spread_over_rows

_BITS_PER_WORD = 32


class KeptTokens(NamedTuple):
    """The tokens that may be sampled from each row; its log-probabilities are normalized over them.

    Attributes:
      num_kept: i32[...], size of the set. V says that nothing was cut, 1 that the row is greedy or
        keeps one token, 0 that there is no row.
      token_ids: i32[..., M], the M lowest ids of the set, ascending, then -1. All are -1 where
        nothing was cut. Where `num_kept` is above M, ids are missing.
      mask: u32[..., ceil(V / 32)], the whole set in the words of `SamplingParams.allowed`, or None.
    """

    num_kept: jax.Array
    token_ids: jax.Array
    mask: jax.Array | None = None

    def is_complete(self) -> jax.Array:
        """Returns whether `num_kept` and `token_ids` determine the whole set, bool[...]."""
        return (self.num_kept <= self.token_ids.shape[-1]) | (self.token_ids[..., 0] < 0)

    def to_csr(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the sets as compressed sparse rows on the host, without padding.

        Returns:
          row_starts i64[N + 1] and token_ids i32[row_starts[-1]] of the N rows in order. The ids of
          row r are token_ids[row_starts[r] : row_starts[r + 1]]. There are none where nothing was
          cut, or where there is no row; `num_kept` tells these apart.

        Raises:
          ValueError: for a set of more than M tokens without a mask.

        Example:
          >>> logits = jnp.array([[3.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
          >>> kept = specjax.kept_tokens(logits, 2, cutoff=jnp.array([2.0, -jnp.inf]))
          >>> [array.tolist() for array in kept.to_csr()]
          [[0, 2, 2], [0, 2]]
        """
        num_slots = self.token_ids.shape[-1]
        num_kept = np.asarray(self.num_kept).reshape(-1)
        ids = np.asarray(self.token_ids).reshape(-1, num_slots)
        is_whole = (num_kept <= num_slots) | (ids[:, 0] < 0)
        if self.mask is None and not is_whole.all():
            raise ValueError(
                f"a set has {num_kept[~is_whole].max()} kept tokens and {num_slots} ids are "
                "listed; list as many as the largest set has, or ask for masks."
            )
        rows = [row[row >= 0] for row in ids]
        if self.mask is not None:
            words = np.asarray(self.mask).reshape(len(rows), self.mask.shape[-1]).astype("<u4")
            for row in np.flatnonzero(~is_whole):
                bits = np.unpackbits(words[row].view(np.uint8), bitorder="little")
                rows[row] = np.flatnonzero(bits).astype(np.int32)
        row_starts = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        return row_starts, np.concatenate([np.zeros(0, np.int32), *rows])


def check_max_kept(name: str, max_kept: Any, vocab_size: int | None = None) -> int:
    """Returns M, or refuses a value that is no integer from 1 to V."""
    count = check_count(name, max_kept, 1, "the ids listed of each set")
    if vocab_size is not None:
        check_num_listed(name, count, vocab_size)
    return count


def kept_tokens(
    logits: jax.Array,
    max_kept: int,
    *,
    temperature: Any = 1.0,
    cutoff: Any = None,
    with_mask: bool = False,
) -> KeptTokens:
    r"""Returns the tokens of each row that may be sampled, at most M of them as ids.

    .. math:: \{v : x_v > -\infty,\ x_v \ge \text{cutoff}\}, \quad
      \{\arg\max x\} \text{ where the row is greedy}

    A trainer needs the sets themselves. Other hardware rounds logits otherwise, so by the same
    cutoff and temperature other tokens would lie at the edge.

    Args:
      logits: [..., V], bf16, f16 or f32, after bias, penalties and masks. -inf is cut.
      max_kept: M, the most ids listed of a row, a Python int in [1, V].
      temperature: f32, scalar, [...] or its first axis alone, as in the samplers.
      cutoff: f32[...], from `logit_cutoff`; logits that tie with it are kept. None keeps all.
      with_mask: whether `KeptTokens.mask` has the whole sets.

    Returns:
      `KeptTokens`. A row that no sampler takes has `num_kept` 0: NaN, +inf, -inf everywhere, or an
      invalid temperature.

    Raises:
      ValueError: for wrong shapes or dtypes, or M outside [1, V].

    Example:
      >>> logits = jnp.log(jnp.array([[0.1, 0.5, 0.15, 0.25]]))
      >>> cutoff = specjax.logit_cutoff(logits, temperature=1.0, top_p=0.8)
      >>> kept = specjax.kept_tokens(logits, 3, cutoff=cutoff)
      >>> kept.num_kept.tolist(), kept.token_ids.tolist()
      ([3], [[1, 2, 3]])
    """
    logits = parse_rows(logits)
    leading = logits.shape[:-1]
    max_kept = check_max_kept("max_kept", max_kept, logits.shape[-1])
    temperature = parse_array("temperature", temperature, jnp.float32, (), leading, leading[:1])
    cutoff = parse_optional("cutoff", cutoff, jnp.float32, leading)
    return list_kept(logits, temperature, cutoff, max_kept=max_kept, with_mask=with_mask)


@functools.partial(jax.jit, static_argnames=("max_kept", "with_mask"))
def list_kept(
    logits: jax.Array,
    temperature: jax.Array,
    cutoff: jax.Array | None,
    *,
    max_kept: int,
    with_mask: bool = False,
) -> KeptTokens:
    """Implements `kept_tokens` for checked arrays."""
    leading, vocab_size = logits.shape[:-1], logits.shape[-1]
    parsed = parse_temperature(spread_over_rows(temperature, leading))
    if cutoff is None:
        cutoff = jnp.full(leading, -jnp.inf, jnp.float32)
    largest = jnp.max(mask_below_cutoff(logits, cutoff[..., None]), axis=-1)
    # A greedy row keeps the lowest id among those that tie with its largest logit.
    cutoff = jnp.where(parsed.greedy, largest, cutoff)
    is_kept = mask_below_cutoff(logits, cutoff[..., None]) > -jnp.inf
    is_kept &= (parsed.valid & jnp.isfinite(largest))[..., None]
    words = _pack_bits(is_kept)
    counts = jax.lax.population_count(words).astype(jnp.int32)
    ends = jnp.cumsum(counts, axis=-1)
    num_kept = jnp.where(parsed.greedy, jnp.minimum(ends[..., -1], 1), ends[..., -1])

    slots = _iota((*leading, max_kept))
    word_of_slot = _first_above(ends, slots)
    word, end, count = (
        jnp.take_along_axis(x, word_of_slot, axis=-1, mode="promise_in_bounds")
        for x in (words, ends, counts)
    )
    ids = word_of_slot * _BITS_PER_WORD + _nth_set_bit(word, slots - (end - count))
    is_listed = (slots < num_kept[..., None]) & (num_kept != vocab_size)[..., None]
    mask = None
    if with_mask:
        mask = jnp.where(parsed.greedy[..., None], _one_hot_words(words, ids[..., :1]), words)
    return KeptTokens(num_kept, jnp.where(is_listed, ids, jnp.int32(-1)), mask)


def empty_kept(shape: tuple[int, ...], max_kept: int) -> KeptTokens:
    """Returns `KeptTokens` of a batch's buffers before the first token."""
    num_kept = jnp.zeros(shape, jnp.int32)
    return KeptTokens(num_kept, jnp.full((*shape, max_kept), -1, jnp.int32))


def kept_logprobs(
    logits: jax.Array, token_ids: Any, kept: KeptTokens, *, temperature: Any = 1.0
) -> jax.Array:
    r"""Returns log-probabilities of tokens by new logits, over the sets of their draws.

    With logits :math:`x`, temperature :math:`t` and the recorded set :math:`S` of a row:

    .. math:: \log \pi(v) = x_v / t - \log \sum_{w \in S} e^{x_w / t}

    This is :math:`\log \pi` of an importance ratio :math:`\pi / \mu`, where :math:`\log \mu` is
    `Generation.logprobs` of a draw with a cutoff. If :math:`\pi` were normalized over all tokens,
    the ratio would not be 1 for equal parameters. The result is differentiable in `logits`; a row
    with one kept token has gradient 0.

    Args:
      logits: [..., V], bf16, f16 or f32, by the new parameters, after the bias and the penalties
        of the texts.
      token_ids: i32[...], the tokens drawn; -1 is padding.
      kept: `KeptTokens` [...], as `generate` or an engine lists them.
      temperature: f32, scalar, [...] or its first axis alone, of the texts' draws.

    Returns:
      f32[...]: 0 at padding and -inf for a token outside its set, such as an id >= V, both without
        a gradient. NaN where a set has more than M tokens and no mask.

    Raises:
      ValueError: for wrong shapes or dtypes.

    Example:
      >>> logits = jnp.log(jnp.array([[0.1, 0.5, 0.15, 0.25]]))
      >>> kept = specjax.kept_tokens(logits, 2, cutoff=jnp.log(jnp.array([0.25])))
      >>> logprobs = specjax.kept_logprobs(logits, jnp.array([1]), kept)
      >>> jnp.exp(logprobs).tolist(), 0.5 / (0.5 + 0.25)
      ([0.666...], 0.666...)

    References:
      Schulman et al., 2017, arXiv:1707.06347, for the ratio.
    """
    logits = parse_rows(logits)
    leading, vocab_size = logits.shape[:-1], logits.shape[-1]
    token_ids = parse_array("token_ids", token_ids, jnp.int32, leading)
    num_kept = parse_array("kept.num_kept", kept.num_kept, jnp.int32, leading)
    ids = as_array("kept.token_ids", kept.token_ids)
    check_shape("kept.token_ids", ids, (*leading, ids.shape[-1]))
    mask = kept.mask
    if mask is not None:
        mask = as_array("kept.mask", mask)
        check_shape("kept.mask", mask, (*leading, -(-vocab_size // _BITS_PER_WORD)))
    temperature = parse_array("temperature", temperature, jnp.float32, (), leading, leading[:1])
    scale = parse_temperature(spread_over_rows(temperature, leading)).scale
    scores = logits.astype(jnp.float32) * scale[..., None]
    return _normalize_over(scores, token_ids, KeptTokens(num_kept, ids, mask))


def _normalize_over(scores: jax.Array, token_ids: jax.Array, kept: KeptTokens) -> jax.Array:
    """Returns log-probabilities f32[...] of scores [..., V] over kept sets; see `kept_logprobs`."""
    is_row = (token_ids >= 0) & (kept.num_kept > 0)
    is_uncut = kept.token_ids[..., 0] < 0
    by_ids = kept.is_complete() & ~is_uncut
    listed = kept.token_ids
    # Every branch of a row that another one decides is finite: or its gradient would be NaN.
    own = jnp.take_along_axis(scores, jnp.maximum(listed, 0), axis=-1)
    own = jnp.where(by_ids[..., None], jnp.where(listed >= 0, own, -jnp.inf), 0)
    in_set = jnp.any(listed == token_ids[..., None], axis=-1)
    in_whole = jnp.ones(scores.shape, bool)
    if kept.mask is not None:
        in_whole = _unpack_bits(kept.mask, scores.shape[-1]) | is_uncut[..., None]
    whole = jnp.where(in_whole & ~by_ids[..., None] & is_row[..., None], scores, -jnp.inf)
    # So that no row is empty: that of `by_ids` is not read.
    whole = jnp.where((by_ids | ~is_row)[..., None], 0, whole)
    # The last id stands for one past the vocabulary, which is no member.
    index = jnp.clip(token_ids, 0, scores.shape[-1] - 1)[..., None]
    in_whole = jnp.take_along_axis(in_whole, index, axis=-1)[..., 0] & (token_ids == index[..., 0])
    logsumexp = jax.nn.logsumexp
    log_sum = jnp.where(by_ids, logsumexp(own, axis=-1), logsumexp(whole, axis=-1))
    score = jnp.take_along_axis(scores, index, axis=-1)[..., 0]
    is_member = jnp.where(by_ids, in_set, in_whole) & is_row
    logprobs = jnp.where(is_member, score - log_sum, -jnp.inf)
    if kept.mask is None:
        logprobs = jnp.where(is_uncut | by_ids, logprobs, jnp.nan)
    return jnp.where(is_row, logprobs, jnp.float32(0))


# Bits ---------------------------------------------------------------------------------------------


def _iota(shape: tuple[int, ...]) -> jax.Array:
    """Returns indices i32 of a shape along its last axis."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)


def _pack_bits(bits: jax.Array) -> jax.Array:
    """Returns bool [..., V] as words u32[..., ceil(V / 32)], as in `SamplingParams.allowed`."""
    spare = -bits.shape[-1] % _BITS_PER_WORD
    bits = jnp.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, spare)])
    bits = bits.reshape(*bits.shape[:-1], bits.shape[-1] // _BITS_PER_WORD, _BITS_PER_WORD)
    values = jnp.left_shift(jnp.uint32(1), _iota(bits.shape).astype(jnp.uint32))
    return jnp.sum(jnp.where(bits, values, jnp.uint32(0)), axis=-1, dtype=jnp.uint32)


def _unpack_bits(words: jax.Array, vocab_size: int) -> jax.Array:
    """Returns words of 32 tokens as bool [..., V]."""
    shifts = _iota((*words.shape, _BITS_PER_WORD)).astype(words.dtype)
    bits = (words[..., None] >> shifts) & jnp.ones((), words.dtype)
    bits = (bits != 0).reshape(*words.shape[:-1], words.shape[-1] * _BITS_PER_WORD)
    return bits[..., :vocab_size]


def _one_hot_words(words: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Returns words with the bits of one token alone; `token_ids` are i32[..., 1]."""
    index = _iota(words.shape)
    bit = jnp.left_shift(jnp.uint32(1), (token_ids % _BITS_PER_WORD).astype(jnp.uint32))
    return jnp.where(index == token_ids // _BITS_PER_WORD, words & bit, jnp.uint32(0))


def _first_above(ends: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the first index at which ascending `ends` i32[..., W] exceed targets i32[..., M].

    Returns:
      i32[..., M], in [0, W - 1].
    """
    width = ends.shape[-1]
    low, high = jnp.zeros_like(targets), jnp.full_like(targets, width - 1)
    for _ in range((width - 1).bit_length()):
        middle = (low + high) // 2
        reached = jnp.take_along_axis(ends, middle, axis=-1, mode="promise_in_bounds")
        is_above = reached > targets
        low, high = jnp.where(is_above, low, middle + 1), jnp.where(is_above, middle, high)
        low = jnp.minimum(low, high)
    return low


def _nth_set_bit(words: jax.Array, ranks: jax.Array) -> jax.Array:
    """Returns the position i32 of the set bit of each rank, 0 for the lowest, in u32 words."""
    position = jnp.zeros(words.shape, jnp.int32)
    for half in (16, 8, 4, 2, 1):
        low_half = words & jnp.uint32((1 << half) - 1)
        num_low = jax.lax.population_count(low_half).astype(jnp.int32)
        is_high = ranks >= num_low
        ranks = jnp.where(is_high, ranks - num_low, ranks)
        words = jnp.where(is_high, words >> half, low_half)
        position += jnp.where(is_high, jnp.int32(half), 0)
    return position


jax.export.register_namedtuple_serialization(KeptTokens, serialized_name="specjax.KeptTokens")
