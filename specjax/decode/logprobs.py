"""Log-probabilities: the likeliest tokens of a row of logits, and the rank of a given token.

top_logprobs         public: checked arguments
list_top_logprobs    what it does, and what each step does if log-probabilities are listed
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp

from specjax.checks import check_count, check_num_listed, parse_array, parse_optional, parse_rows
from specjax.core.gumbel_max import token_logprobs
from specjax.core.logsumexp import LogNormalizer, mask_below_cutoff, row_statistics_once
from specjax.core.subnormal import largest_equal
from specjax.core.temperature import parse_temperature, spread_over_rows
from specjax.devices.map_groups import map_groups
from specjax.devices.map_parts import map_parts
from specjax.devices.rows import logit_rows
from specjax.devices.vocabulary_split import VocabularySplit, parse_split


class TopLogprobs(NamedTuple):
    """The likeliest tokens of each row, and the rank of a given token.

    Attributes:
      token_ids: i32[..., n], likeliest first, ties by the lowest id; -1 once every token with a
        probability above 0 is listed.
      logprobs: f32[..., n], log-probabilities of `token_ids`; -inf where the id is -1.
      rank: i32[...], one more than the number of likelier tokens; 1 for the likeliest.
      logprob: f32[...], log-probability of the given token.
    """

    token_ids: jax.Array
    logprobs: jax.Array
    rank: jax.Array
    logprob: jax.Array


@dataclasses.dataclass(frozen=True)
class LogprobsConfig:
    """Log-probabilities that a decode loop lists.

    Attributes:
      num: likeliest tokens listed per generated token, >= 0.
      mode: "raw" for the model's distribution at temperature 1, "processed" for the one that was
        sampled from.
    """

    num: int
    mode: str


def check_logprobs_config(num: Any, mode: Any) -> LogprobsConfig | None:
    """Returns the config of `num_logprobs` and `logprobs_mode`, None if no tokens are listed."""
    if mode not in ("raw", "processed"):
        raise ValueError(f"logprobs_mode is {mode!r}; it needs to be 'raw' or 'processed'.")
    if num is None:
        return None
    why = "the likeliest tokens listed per generated token, or None"
    return LogprobsConfig(check_count("num_logprobs", num, 0, why), mode)


def top_logprobs(
    logits: jax.Array,
    token_ids: jax.Array,
    n: int,
    *,
    temperature: Any = 1.0,
    cutoff: Any = None,
    axis_name: str | None = None,
    vocab_size: int | None = None,
) -> TopLogprobs:
    r"""Returns the n likeliest tokens of each row, and the rank and logprob of a given one.

    With logits :math:`x`, temperature :math:`t` and the tokens at or above `cutoff`:

    .. math:: \log p(v) = x_v / t - \log \sum_{w: x_w \ge \text{cutoff}} e^{x_w / t}

    The defaults give the model's distribution. Processed logits with a request's temperature and
    cutoff give the distribution that was sampled from. Tokens of equal probability share the best
    rank among them; vLLM gives them the worst.

    Args:
      logits: [..., V], bf16, f16 or f32. -inf masks a token.
      token_ids: i32[...], the tokens to rank; -1 is padding.
      n: tokens listed, a Python int in [0, V].
      temperature: f32, scalar, [...] or its first axis alone. Below 1e-5 it counts as 1, as in
        every statistic of a greedy request.
      cutoff: f32[...]; logits below it have probability 0. None keeps all.
      axis_name: as in `Options`; the listing is then the same on each device.
      vocab_size: as in `Options`.

    Returns:
      `TopLogprobs`. Ids are -1, log-probabilities 0 and rank 0 where the token is -1, the
      temperature invalid, or the row invalid (NaN, +inf, or -inf everywhere).

    Raises:
      ValueError: for wrong shapes or dtypes, or n outside [0, V].

    Example:
      >>> logits = jnp.log(jnp.array([[0.125, 0.25, 0.5, 0.125]]))
      >>> top = specjax.top_logprobs(logits, jnp.array([0]), 2)
      >>> top.token_ids.tolist(), jnp.exp(top.logprobs).tolist(), top.rank.tolist()
      ([[2, 1]], [[0.5, 0.25]], [3])
    """
    logits = parse_rows(logits)
    n = check_count("n", n, 0, "the number of tokens listed")
    split = parse_split(axis_name, vocab_size, logits)
    leading = logits.shape[:-1]
    check_num_listed("n", n, logit_rows(logits, split).vocab_size)
    token_ids = parse_array("token_ids", token_ids, jnp.int32, leading)
    temperature = parse_array("temperature", temperature, jnp.float32, (), leading, leading[:1])
    cutoff = parse_optional("cutoff", cutoff, jnp.float32, leading)
    return list_top_logprobs(logits, token_ids, temperature, cutoff, n=n, split=split)


@functools.partial(jax.jit, static_argnames=("n", "split", "row_invariant"))
def list_top_logprobs(
    logits: jax.Array,
    token_ids: Any,
    temperature: Any,
    cutoff: Any,
    *,
    n: int,
    split: VocabularySplit | None = None,
    row_invariant: bool = False,
) -> TopLogprobs:
    """Implements `top_logprobs` for checked arrays.

    With `row_invariant`, of logits [B, T, V] of one device, a row's bits depend on no other row.
    """
    batch = (logits, token_ids, spread_over_rows(temperature, logits.shape[:-1]), cutoff)
    run = functools.partial(_top_logprobs, n=n, split=split)
    if row_invariant:
        # The cutoff is the last of them, and may be None.
        arrays = [array for array in batch if array is not None]
        # XLA inlines a loop over one group, and would fuse its operations with others.
        whole = jax.lax.optimization_barrier
        return map_groups(lambda *rows: whole(run(*whole(rows), *batch[len(rows) :])), *arrays)
    return map_parts(lambda batch: run(*batch), logits, split, [logits])(batch)


def empty_logprobs(config: LogprobsConfig | None, shape: tuple[int, ...]) -> TopLogprobs | None:
    """Returns `TopLogprobs` of a batch's buffers before the first token; None without a config."""
    if config is None:
        return None
    listed = (*shape, config.num)
    return TopLogprobs(
        token_ids=jnp.full(listed, -1, jnp.int32),
        logprobs=jnp.zeros(listed, jnp.float32),
        rank=jnp.zeros(shape, jnp.int32),
        logprob=jnp.zeros(shape, jnp.float32),
    )


def _top_logprobs(
    logits: jax.Array,
    token_ids: Any,
    temperature: jax.Array,
    cutoff: Any,
    *,
    n: int,
    split: VocabularySplit | None = None,
) -> TopLogprobs:
    scaling, rows = parse_temperature(temperature), logit_rows(logits, split, cutoff)
    row = row_statistics_once(rows.partials(scaling.scale), scaling.scale)
    valid = scaling.valid & row.valid & (token_ids >= 0)

    x = rows.take_each(token_ids)
    logits = rows.true_logits()
    masked = mask_below_cutoff(logits, None if cutoff is None else cutoff[..., None])
    # Subnormal numbers count as 0. `largest_equal` is the largest number that counts as equal to x.
    is_likelier = masked > largest_equal(x)[..., None]
    num_likelier = rows.merge(jnp.add, jnp.sum(is_likelier.astype(jnp.int32), axis=-1))
    best, ids = rows.top_k(logits if cutoff is None else masked.astype(logits.dtype), n)
    normalizers = LogNormalizer(row.normalizer.shift[..., None], row.normalizer.log_sum[..., None])
    logprobs = token_logprobs(best, normalizers, scaling.scale[..., None])
    zero = jnp.float32(0)
    listed = valid[..., None]
    return TopLogprobs(
        token_ids=jnp.where(listed & (best > -jnp.inf), ids, jnp.int32(-1)),
        logprobs=jnp.where(listed, logprobs, zero),
        rank=jnp.where(valid, num_likelier + 1, 0),
        logprob=jnp.where(valid, token_logprobs(x, row.normalizer, scaling.scale), zero),
    )


jax.export.register_namedtuple_serialization(TopLogprobs, serialized_name="specjax.TopLogprobs")
