"""What verification reads of a request, as kernels find it: scalars, and where rows lie."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from specjax.core.acceptance import is_one_hot, num_valid_drafts
from specjax.core.logsumexp import LogNormalizer, normalizer_from_statistics
from specjax.core.noise import Words, fold_in
from specjax.core.temperature import Temperature, parse_temperature
from specjax.pallas.blocks import load_token
from specjax.pallas.launch import only, settled
from specjax.pallas.tiles import Tile, power_of_two

__all__ = [
    "DraftPlace",
    "DraftedToken",
    "Inputs",
    "Plan",
    "Request",
    "draft_place",
    "fetch",
    "read_drafted",
    "read_request",
]


class Inputs(NamedTuple):
    """The arrays of a call, or in a kernel the references to them.

    Token arrays are flat: request b's begin at `b * K`, or at `cu[b]` where `cu` is given.

    Attributes:
      target: [R, V].
      target_cutoff: f32[R], or None.
      draft: [M, V_d], or None where every draft is one-hot.
      token_ids: i32[B * K] or i32[N]; None where K is 0.
      logprobs: like `token_ids` f32, and `logsumexp`; None where `draft` is None.
      draft_cutoff: like `token_ids` f32, or None.
      draft_temperature: f32[B], None for the request's own.
      num_tokens: i32[B], or None.
      rows: i32[B], which request's rows of `draft` are meant, or with `cu` i32[N], which row;
        or None.
      cu: i32[B + 1], or None.
      key: u32[B, 2].
      position: i32[B].
      temperature: f32[B].
      rates: f32[B, K], or None.
      bonus_token_id: i32[B], or None.
    """

    target: Any
    target_cutoff: Any
    draft: Any
    token_ids: Any
    logprobs: Any
    logsumexp: Any
    draft_cutoff: Any
    draft_temperature: Any
    num_tokens: Any
    rows: Any
    cu: Any
    key: Any
    position: Any
    temperature: Any
    rates: Any
    bonus_token_id: Any


class Plan(NamedTuple):
    """What is known before a kernel is made.

    Attributes:
      size: B.
      num_drafts: K, at least 0.
      noise_dtype: float32 or float64.
      tile: how a row is cut.
      small: whether the batch leaves most of the GPU idle, so that its schedule is that of least
        latency.
      interpret: whether this is Pallas' interpreter.
    """

    size: int
    num_drafts: int
    noise_dtype: Any
    tile: Tile
    small: bool
    interpret: bool

    @property
    def num_rows(self) -> int:
        """Target rows of a request, at most."""
        return self.num_drafts + 1


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

    def address(self, inputs: Inputs, i: jax.Array, stream: Any, plan: Plan) -> Words:
        """The addresses of draws at the request's positions i."""
        first, second = inputs.key[self.b, 0], inputs.key[self.b, 1]
        key = jnp.broadcast_to(first, i.shape), jnp.broadcast_to(second, i.shape)
        at = settled(fold_in(key, inputs.position[self.b] + i), plan.interpret)
        return settled(fold_in(at, stream), plan.interpret)

    def cutoff(self, inputs: Inputs, i: jax.Array, wanted: jax.Array) -> jax.Array | None:
        """The cutoffs of the wanted ones of target rows i."""
        if inputs.target_cutoff is None:
            return None
        return fetch(inputs.target_cutoff, self.target_row + i, wanted)


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


def read_request(inputs: Inputs, b: jax.Array, plan: Plan) -> Request:
    """Reads what every program of a request needs."""
    k = plan.num_drafts
    scaling = parse_temperature(inputs.temperature[b])
    if inputs.cu is None:
        first, count = b * k, jnp.int32(k)
    else:
        # A wrong count must not lead outside the arrays: that would end the whole process.
        most = inputs.target.shape[0] - plan.size
        first, last = [jnp.clip(inputs.cu[place], 0, most) for place in (b, b + 1)]
        count = jnp.clip(last - first, 0, k)
    wanted = count if inputs.num_tokens is None else jnp.minimum(inputs.num_tokens[b], count)
    if inputs.token_ids is None:
        usable = jnp.maximum(wanted, jnp.int32(-1))
    else:
        lane = jax.lax.iota(jnp.int32, power_of_two(k))
        ids = plgpu.load(inputs.token_ids.at[first + lane], mask=lane < count, other=jnp.int32(-1))
        usable = num_valid_drafts(ids, wanted)
    return Request(b, first, first + b, usable, scaling, (usable >= 0) & scaling.valid)


def draft_place(
    inputs: Inputs, request: Request, i: jax.Array, wanted: jax.Array, plan: Plan
) -> DraftPlace:
    """Follows `rows` to drafted tokens i's rows."""
    place = request.first + i
    if inputs.rows is None:
        row = place
    elif inputs.cu is None:
        row = inputs.rows[request.b] * plan.num_drafts + i
    else:
        row = fetch(inputs.rows, place, wanted)
    if inputs.rows is not None:
        # Nor must a wrong row.
        row = jnp.clip(row, 0, inputs.draft.shape[0] - 1)
    given = inputs.temperature if inputs.draft_temperature is None else inputs.draft_temperature
    cutoff = None if inputs.draft_cutoff is None else fetch(inputs.draft_cutoff, place, wanted)
    return DraftPlace(row, parse_temperature(given[request.b]), cutoff)


def read_drafted(
    inputs: Inputs, request: Request, i: jax.Array, wanted: jax.Array, plan: Plan
) -> DraftedToken:
    """Reads the wanted ones of a request's drafted tokens i; `inputs` has drafts."""
    place = request.first + i
    token_id = fetch(inputs.token_ids, place, wanted)
    if inputs.draft is None:
        none = jnp.zeros_like(token_id, jnp.float32)
        where = DraftPlace(place, request.scaling, None)
        # True, of the places' shape.
        return DraftedToken(token_id, none, LogNormalizer(none, none), place >= 0, where)
    where = draft_place(inputs, request, i, wanted, plan)
    logit = load_token(inputs.draft, where.row, token_id, where.cutoff, wanted)
    logprob = fetch(inputs.logprobs, place, wanted)
    logsumexp = fetch(inputs.logsumexp, place, wanted)
    one_hot = is_one_hot(where.scaling, logprob, logsumexp)
    normalizer = normalizer_from_statistics(logit, logprob, logsumexp)
    return DraftedToken(token_id, jnp.where(one_hot, 0, logprob), normalizer, one_hot, where)
