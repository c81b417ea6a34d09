"""What verification reads of a request, as kernels find it: scalars, and where rows lie."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from specjax.arrays import CallOptions, VerifyArrays
from specjax.core.acceptance import is_one_hot, num_valid_drafts
from specjax.core.logsumexp import LogNormalizer, normalizer_from_statistics
from specjax.core.noise import Words, fold_in
from specjax.core.temperature import Temperature, parse_temperature
from specjax.pallas.blocks import load_token
from specjax.pallas.launch import only, settled
from specjax.pallas.tiles import KernelConfig, Tile, power_of_two

__all__ = [
    "DraftPlace",
    "DraftedToken",
    "Plan",
    "Request",
    "draft_place",
    "fetch",
    "read_drafted",
    "read_request",
]


class Plan(NamedTuple):
    """What is known before a kernel is made.

    Attributes:
      size: B.
      options: of the call.
      tile: how a row is cut.
    """

    size: int
    options: CallOptions
    tile: Tile

    @property
    def num_drafts(self) -> int:
        """K, at least 0."""
        return self.options.num_drafts

    @property
    def num_rows(self) -> int:
        """Target rows of a request, at most."""
        return self.num_drafts + 1

    @property
    def noise_dtype(self) -> Any:
        """float32 or float64."""
        return self.options.noise_dtype

    @property
    def interpret(self) -> bool:
        """Whether the kernels run in Pallas' interpreter."""
        return self.options.implementation.interpret

    @property
    def config(self) -> KernelConfig:
        """Sizes of the kernels."""
        return self.options.implementation.config(KernelConfig)

    @property
    def small(self) -> bool:
        """Whether the schedule is that of least latency, as a small batch needs it."""
        return self.config.is_small(self.size)


class Request(NamedTuple):
    """One request: scalars.

    Attributes:
      b: i32, its index.
      first: i32, where its token arrays begin.
      target_row: i32, its first target row.
      num_tokens: i32, usable drafted tokens, -1 for an inactive request.
      scaling: the target's temperature.
      active: bool, it emits anything.
    """

    b: jax.Array
    first: jax.Array
    target_row: jax.Array
    num_tokens: jax.Array
    scaling: Temperature
    active: jax.Array

    def address(self, arrays: VerifyArrays, i: jax.Array, stream: Any, plan: Plan) -> Words:
        """The addresses of draws at the request's positions i."""
        first, second = arrays.keys[self.b, 0], arrays.keys[self.b, 1]
        key = jnp.broadcast_to(first, i.shape), jnp.broadcast_to(second, i.shape)
        at = settled(fold_in(key, arrays.positions[self.b] + i), plan.interpret)
        return settled(fold_in(at, stream), plan.interpret)

    def cutoff(self, arrays: VerifyArrays, i: jax.Array, wanted: jax.Array) -> jax.Array | None:
        """The cutoffs of the wanted ones of target rows i."""
        if arrays.target_cutoff is None:
            return None
        return fetch(arrays.target_cutoff, self.target_row + i, wanted)


class DraftPlace(NamedTuple):
    """Where drafted tokens' rows of draft logits lie, and how they are read."""

    row: jax.Array
    scaling: Temperature
    cutoff: jax.Array | None


class DraftedToken(NamedTuple):
    """Drafted tokens: their ids, log q of them (0 where one-hot), and the law of their rows."""

    token_id: jax.Array
    logprob: jax.Array
    normalizer: LogNormalizer
    one_hot: jax.Array
    place: DraftPlace

    def only(self, chosen: jax.Array) -> "DraftedToken":
        """The chosen one of several."""
        cutoff = self.place.cutoff
        return DraftedToken(
            only(self.token_id, chosen),
            only(self.logprob, chosen),
            LogNormalizer(*[only(x, chosen) for x in self.normalizer]),
            only(self.one_hot.astype(jnp.int32), chosen) != 0,
            self.place._replace(
                row=only(self.place.row, chosen),
                cutoff=None if cutoff is None else only(cutoff, chosen),
            ),
        )


def fetch(values: Any, index: Any, wanted: jax.Array) -> jax.Array:
    """The wanted elements of a reference, 0 for the others."""
    return plgpu.load(values.at[index], mask=wanted, other=jnp.zeros((), values.dtype))


def read_request(arrays: VerifyArrays, b: jax.Array, plan: Plan) -> Request:
    """Reads what every program of a request needs."""
    k = plan.num_drafts
    scaling = parse_temperature(arrays.temperature[b])
    if arrays.cu_num_draft_tokens is None:
        first, count = b * k, jnp.int32(k)
    else:
        # A wrong count must not lead outside the arrays: that would end the whole process.
        most = arrays.target_logits.shape[0] - plan.size
        first, last = [jnp.clip(arrays.cu_num_draft_tokens[place], 0, most) for place in (b, b + 1)]
        count = jnp.clip(last - first, 0, k)
    wanted = count if arrays.num_tokens is None else jnp.minimum(arrays.num_tokens[b], count)
    if arrays.token_ids is None:
        usable = jnp.maximum(wanted, jnp.int32(-1))
    else:
        lane = jax.lax.iota(jnp.int32, power_of_two(k))
        ids = plgpu.load(arrays.token_ids.at[first + lane], mask=lane < count, other=jnp.int32(-1))
        usable = num_valid_drafts(ids, wanted)
    return Request(b, first, first + b, usable, scaling, (usable >= 0) & scaling.valid)


def draft_place(
    arrays: VerifyArrays, request: Request, i: jax.Array, wanted: jax.Array, plan: Plan
) -> DraftPlace:
    """Follows `rows` to drafted tokens i's rows."""
    place = request.first + i
    if arrays.draft_rows is None:
        row = place
    elif arrays.cu_num_draft_tokens is None:
        row = arrays.draft_rows[request.b] * plan.num_drafts + i
    else:
        row = fetch(arrays.draft_rows, place, wanted)
    if arrays.draft_rows is not None:
        # Nor must a wrong row.
        row = jnp.clip(row, 0, arrays.draft_logits.shape[0] - 1)
    given = arrays.temperature if arrays.draft_temperature is None else arrays.draft_temperature
    cutoff = None if arrays.draft_cutoff is None else fetch(arrays.draft_cutoff, place, wanted)
    return DraftPlace(row, parse_temperature(given[request.b]), cutoff)


def read_drafted(
    arrays: VerifyArrays, request: Request, i: jax.Array, wanted: jax.Array, plan: Plan
) -> DraftedToken:
    """Reads the wanted ones of a request's drafted tokens i; `arrays` has drafts."""
    place = request.first + i
    token_id = fetch(arrays.token_ids, place, wanted)
    if arrays.draft_logits is None:
        none = jnp.zeros_like(token_id, jnp.float32)
        where = DraftPlace(place, request.scaling, None)
        # True, of the places' shape.
        return DraftedToken(token_id, none, LogNormalizer(none, none), place >= 0, where)
    where = draft_place(arrays, request, i, wanted, plan)
    logit = load_token(arrays.draft_logits, where.row, token_id, where.cutoff, wanted)
    logprob = fetch(arrays.draft_logprobs, place, wanted)
    logsumexp = fetch(arrays.draft_logsumexp, place, wanted)
    one_hot = is_one_hot(where.scaling, logprob, logsumexp)
    normalizer = normalizer_from_statistics(logit, logprob, logsumexp)
    return DraftedToken(token_id, jnp.where(one_hot, 0, logprob), normalizer, one_hot, where)
