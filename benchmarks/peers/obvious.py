"""The obvious twenty lines of JAX, right and with each of the usual mistakes, by samples."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers.inputs import ROWS, Kind, Rows, count_outcomes
from benchmarks.peers.measure import measure

NAME = "obvious JAX"
BATCH, BATCHES = 2**19, 2


class Mistakes(NamedTuple):
    """The mistake of a version; the right one has none."""

    residual_is_target: bool = False
    argmax_with_softmax: bool = False
    key_is_used_twice: bool = False
    drafts_share_the_key: bool = False
    bonus_from_last_draft_row: bool = False
    temperature_on_one_side: bool = False
    epsilon: float = 0.0
    num_accepted_is_the_sum: bool = False
    shortest_of_the_batch: bool = False


# Each with the drafts and the temperature that show it.
MISTAKES = {
    "none": (Mistakes(), Kind()),
    "the rejected token is replaced by a draw from p, not from max(p - q, 0)": (
        Mistakes(residual_is_target=True),
        Kind(),
    ),
    "argmax drafts are verified with q = softmax(draft logits)": (
        Mistakes(argmax_with_softmax=True),
        Kind(),
    ),
    "drafts and verification draw with one key": (Mistakes(drafts_share_the_key=True), Kind()),
    "the uniform and the residual draw with one key": (Mistakes(key_is_used_twice=True), Kind()),
    "the bonus token is drawn from row K - 1": (
        Mistakes(bonus_from_last_draft_row=True),
        Kind(),
    ),
    "p has the temperature 0.7, q has none": (Mistakes(temperature_on_one_side=True), Kind(0.7)),
    "p / (q + 0.01)": (Mistakes(epsilon=0.01), Kind()),
    "accepted tokens are summed, not counted up to the first rejection": (
        Mistakes(num_accepted_is_the_sum=True),
        Kind(),
    ),
    "two requests advance by the fewer accepted tokens, and both draw the residual there": (
        Mistakes(shortest_of_the_batch=True),
        Kind(),
    ),
}


def version() -> str:
    return f"jax {jax.__version__}"


def make_step(rows: Rows, kind: Kind, wrong: Mistakes) -> Callable[[jax.Array], jax.Array]:
    """A function of a key: tokens i32[K + 1] of one request's step, -1 after the emitted ones."""
    k = rows.k
    log_p = jax.nn.log_softmax(rows.target / kind.temperature)
    scale = 1.0 if wrong.temperature_on_one_side else kind.temperature
    log_q = jax.nn.log_softmax(rows.draft / kind.temperature)
    log_q_known = jax.nn.log_softmax(rows.draft / scale)

    def propose(key: jax.Array) -> jax.Array:
        argmax = jnp.argmax(log_q, axis=-1)
        return argmax if wrong.argmax_with_softmax else jax.random.categorical(key, log_q)

    def accept(key: jax.Array, drafted: jax.Array) -> jax.Array:
        at = jnp.arange(k), drafted
        ratio = jnp.exp(log_p[at]) / (jnp.exp(log_q_known[at]) + wrong.epsilon)
        accepted = (jax.random.uniform(key, (k,)) < ratio).astype(jnp.int32)
        return accepted.sum() if wrong.num_accepted_is_the_sum else jnp.cumprod(accepted).sum()

    def finish(key: jax.Array, drafted: jax.Array, n: jax.Array) -> jax.Array:
        q = jnp.exp(log_q_known)[jnp.minimum(n, k - 1)]
        residual = jnp.log(jnp.maximum(jnp.exp(log_p[n]) - q, 0))
        residual = log_p[n] if wrong.residual_is_target else residual
        bonus = log_p[k - 1 if wrong.bonus_from_last_draft_row else k]
        token = jax.random.categorical(key, jnp.where(n == k, bonus, residual))
        place = jnp.arange(k + 1)
        drafted = jnp.append(drafted, -1)
        return jnp.where(place < n, drafted, jnp.where(place == n, token, -1))

    def keys_of(key: jax.Array) -> jax.Array:
        draft, uniform, last = jax.random.split(key, 3)
        uniform = draft if wrong.drafts_share_the_key else uniform
        last = draft if wrong.drafts_share_the_key else last
        last = uniform if wrong.key_is_used_twice else last
        return jnp.stack([draft, uniform, last])

    def step(key: jax.Array) -> jax.Array:
        keys = keys_of(key)
        drafted = propose(keys[0])
        n = accept(keys[1], drafted)
        if wrong.shortest_of_the_batch:
            others = keys_of(jax.random.fold_in(key, 1))
            n = jnp.minimum(n, accept(others[1], propose(others[0])))
        return finish(keys[2], drafted, n)

    return step


def cases() -> Iterator[dict[str, Any]]:
    for size, make in ROWS.items():
        rows = make()
        for mistake, (wrong, kind) in MISTAKES.items():
            step = jax.jit(jax.vmap(make_step(rows, kind, wrong)))
            counts = 0.0
            for number in range(BATCHES):
                tokens = step(jax.random.split(jax.random.key(number), BATCH))
                counts = counts + count_outcomes(np.asarray(tokens), rows.vocab_size)
            drafts = "argmax" if wrong.argmax_with_softmax else "sampled"
            yield measure(
                f"{drafts}, mistake: {mistake}",
                "20 lines",
                counts,
                rows,
                kind,
                size=size,
                num_samples=BATCH * BATCHES,
            )
