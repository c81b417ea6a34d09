"""The likeliest tokens of a row and their log-probabilities, and the rank of a given one."""

import dataclasses
import functools
import json
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp

from specjax.checks import as_array, check_count, check_logits, read_array
from specjax.core.gumbel_max import token_logprobs
from specjax.core.logsumexp import (
    LogNormalizer,
    block_partials,
    mask_below_cutoff,
    row_statistics_once,
)
from specjax.core.subnormal import flush_subnormals, largest_equal
from specjax.core.temperature import parse_temperature
from specjax.mesh import shard_map_batch

__all__ = [
    "LogprobsRequest",
    "TopLogprobs",
    "check_listed",
    "read_logprobs_request",
    "top_logprobs",
]


class TopLogprobs(NamedTuple):
    """The likeliest tokens of each row, and how a given token stands among all.

    Attributes:
      token_ids: i32[..., n], likeliest first, ties by the lowest id; -1 where no token of
        any probability is left.
      logprobs: f32[..., n], theirs; -inf where there is none.
      rank: i32[...], 1 for the likeliest: one more than the number of likelier tokens.
      logprob: f32[...], log-probability of the given token.
    """

    token_ids: jax.Array
    logprobs: jax.Array
    rank: jax.Array
    logprob: jax.Array


@dataclasses.dataclass(frozen=True)
class LogprobsRequest:
    """Which log-probabilities a loop keeps; static, and a pytree without leaves.

    Attributes:
      num: likeliest tokens listed per generated token, >= 0.
      mode: "raw", of the model's own law, or "processed", of the law that was sampled from.
    """

    num: int
    mode: str


def read_logprobs_request(num: Any, mode: Any) -> LogprobsRequest | None:
    """What `generate` is asked, or a refusal; None for None."""
    if mode not in ("raw", "processed"):
        raise ValueError(f"logprobs_mode is {mode!r}; it needs to be 'raw' or 'processed'.")
    if num is None:
        return None
    why = "the likeliest tokens listed per generated token, or None"
    return LogprobsRequest(check_count("num_logprobs", num, 0, why), mode)


def check_listed(name: str, num: int, vocab_size: int) -> None:
    """Refuses to list more tokens than there are."""
    if num > vocab_size:
        raise ValueError(
            f"{name} is {num} for a vocabulary of {vocab_size}; it needs at most that."
        )


def top_logprobs(
    logits: jax.Array,
    token_ids: jax.Array,
    n: int,
    *,
    temperature: Any = 1.0,
    cutoff: Any = None,
) -> TopLogprobs:
    r"""The n likeliest tokens of each row, and the rank and log-probability of a given one.

    :math:`\log p(v) = x_v / t - \log \sum_w e^{x_w / t}` over the logits at or above `cutoff`,
    computed for the chosen tokens alone. With the defaults it is the model's own law; with
    processed logits and a request's temperature and cutoff the law that was sampled from.
    Equal tokens share the best rank among them; vLLM gives them the worst.

    Args:
      logits: [..., V], bf16, f16 or f32.
      token_ids: i32[...], the tokens to rank; -1 is padding.
      n: tokens listed, a Python int in [0, V].
      temperature: f32, of the shape [...], of its first axis alone, or scalar. Below 1e-5
        it counts as 1, as in every statistic of a greedy request.
      cutoff: f32[...], logits below it have no probability. None keeps all.

    Returns:
      `TopLogprobs`. A row whose token is -1, that is no law (NaN, +inf, -inf everywhere) or
      has an invalid temperature gives -1, log-probabilities 0 and rank 0.

    Raises:
      ValueError: for wrong shapes or dtypes, or n outside [0, V].

    Example:
      >>> logits = jnp.log(jnp.array([[0.125, 0.25, 0.5, 0.125]]))
      >>> top = specjax.top_logprobs(logits, jnp.array([0]), 2)
      >>> top.token_ids.tolist(), jnp.exp(top.logprobs).tolist(), top.rank.tolist()
      ([[2, 1]], [[0.5, 0.25]], [3])
    """
    logits = as_array("logits", logits)
    n = check_count("n", n, 0, "the number of tokens listed")
    if logits.ndim == 0:
        raise ValueError("logits has shape (); it needs [..., V].")
    check_logits("logits", logits, ",".join(["..."] * logits.ndim))
    leading, vocab_size = logits.shape[:-1], logits.shape[-1]
    check_listed("n", n, vocab_size)
    token_ids = read_array("token_ids", token_ids, jnp.int32, leading)
    temperature = read_array("temperature", temperature, jnp.float32, (), leading, leading[:1])
    if cutoff is not None:
        cutoff = read_array("cutoff", cutoff, jnp.float32, leading)
    behind = (1,) * (len(leading) - temperature.ndim)
    temperature = jnp.broadcast_to(
        jnp.asarray(temperature).reshape(*temperature.shape, *behind), leading
    )
    return _run(logits, token_ids, temperature, cutoff, n=n)


def _largest(rows: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """The n largest of each row, in f32, and their ids.

    XLA's top-k lists 0.0 before -0.0: what counts as zero is made one zero first.
    """
    rows = flush_subnormals(rows.astype(jnp.float32)).astype(rows.dtype)

    def as_they_are(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        best, ids = jax.lax.top_k(rows, n)
        return best.astype(jnp.float32), ids.astype(jnp.int32)

    def copied(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        return as_they_are(rows.astype(jnp.float32))

    if rows.dtype == jnp.float32:
        return as_they_are(rows)
    # On a CPU, XLA sorts whole rows of anything but float32, a hundred times as long.
    found: tuple[jax.Array, jax.Array] = jax.lax.platform_dependent(
        rows, cpu=copied, default=as_they_are
    )
    return found


@functools.partial(jax.jit, static_argnames="n")
def _run(
    logits: jax.Array, token_ids: Any, temperature: jax.Array, cutoff: Any, *, n: int
) -> TopLogprobs:
    """`top_logprobs` on checked arguments, on each shard of the batch."""
    batch = (logits, token_ids, temperature, cutoff)
    if logits.ndim == 1:
        return _top(*batch, n=n)
    return shard_map_batch(lambda batch, _: _top(*batch, n=n), logits, batch, ())


def _top(
    logits: jax.Array, token_ids: Any, temperature: jax.Array, cutoff: Any, *, n: int
) -> TopLogprobs:
    scaling = parse_temperature(temperature)
    row = row_statistics_once(block_partials(logits, scaling.scale, cutoff), scaling.scale)
    valid = scaling.valid & row.valid & (token_ids >= 0)

    index = jnp.clip(token_ids, 0, logits.shape[-1] - 1)[..., None]
    x = mask_below_cutoff(jnp.take_along_axis(logits, index, axis=-1)[..., 0], cutoff)
    x = jnp.where(token_ids < logits.shape[-1], x, -jnp.inf)
    kept = mask_below_cutoff(logits, None if cutoff is None else cutoff[..., None])
    likelier = jnp.sum((kept > largest_equal(x)[..., None]).astype(jnp.int32), axis=-1)
    best, ids = _largest(logits if cutoff is None else kept.astype(logits.dtype), n)
    each = LogNormalizer(row.normalizer.shift[..., None], row.normalizer.log_sum[..., None])
    logprobs = token_logprobs(best, each, scaling.scale[..., None])
    zero, none = jnp.float32(0), jnp.int32(-1)
    listed = valid[..., None]
    return TopLogprobs(
        token_ids=jnp.where(listed & (best > -jnp.inf), ids, none),
        logprobs=jnp.where(listed, logprobs, zero),
        rank=jnp.where(valid, likelier + 1, 0),
        logprob=jnp.where(valid, token_logprobs(x, row.normalizer, scaling.scale), zero),
    )


jax.tree_util.register_dataclass(LogprobsRequest, data_fields=[], meta_fields=["num", "mode"])
jax.export.register_pytree_node_serialization(
    LogprobsRequest,
    serialized_name="specjax.LogprobsRequest",
    serialize_auxdata=lambda fields: json.dumps(fields).encode(),
    deserialize_auxdata=lambda data: tuple(json.loads(data)),
)
jax.export.register_namedtuple_serialization(TopLogprobs, serialized_name="specjax.TopLogprobs")
