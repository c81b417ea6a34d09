"""specjax, by samples: one batch of many requests, whose draws are independent."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from benchmarks.peers.inputs import MIXED, ROWS, Array, Kind, Outcomes, Rows, count_outcomes
from benchmarks.peers.measure import measure

NAME = "specjax"
CALL = "rejection_sample"
BATCH = 2**19
RULES = {
    "standard": specjax.rules.standard(),
    "block": specjax.rules.block(),
    "coupled": specjax.rules.coupled(),
}


def num_batches(num_kinds: int) -> int:
    """How many calls give a kind half a million requests or more; sixteen million on a GPU."""
    return 32 * num_kinds if jax.default_backend() == "gpu" else min(2 * num_kinds, 6)


def version() -> str:
    return f"specjax {specjax.__version__}, jax {jax.__version__}"


def fill(values: Array, dtype: Any) -> jax.Array:
    """An array of one value for each kind of request, the kinds in turn over the batch."""
    return jnp.asarray(np.resize(np.asarray(values), BATCH), dtype)


def make_step(
    rows: Rows, kinds: list[Kind], drafting: str, rule: Any
) -> Callable[[jax.Array], jax.Array]:
    """A function of a key: the tokens of a step of a batch that has these kinds in turn."""
    temperature = fill([kind.temperature for kind in kinds], jnp.float32)
    # Greedy requests draft as the others of the batch do.
    of_draft = jnp.where(temperature == 0, 1.0, temperature) if drafting == "sampled" else 0.0
    draft_temperature = jnp.broadcast_to(jnp.float32(of_draft), temperature.shape)
    k = rows.k
    num_tokens = fill([k if x.num_tokens is None else x.num_tokens for x in kinds], jnp.int32)
    top_p = jnp.array([kind.top_p for kind in kinds], jnp.float32)
    each = jnp.arange(BATCH) % len(kinds)
    target = jnp.broadcast_to(rows.target, (BATCH, *rows.target.shape))
    logits = jnp.broadcast_to(rows.draft, (BATCH, *rows.draft.shape))
    cutoff = specjax.logit_cutoff(
        jnp.broadcast_to(rows.target, (len(kinds), *rows.target.shape)),
        temperature=temperature[: len(kinds)],
        top_p=top_p,
    )[each]

    # Arguments: XLA would fold constants of this size as it compiles.
    @jax.jit
    def run(key: jax.Array, logits: jax.Array, target: jax.Array, cutoff: jax.Array) -> jax.Array:
        keys = jax.random.split(key, BATCH)
        samples = [
            specjax.gumbel_sample(
                logits[:, i],
                keys=keys,
                positions=i,
                stream=specjax.Stream.draft(i),
                temperature=draft_temperature,
            )
            for i in range(k)
        ]
        token_ids, logprobs, lse = (jnp.stack(x, axis=1) for x in zip(*samples, strict=True))
        draft = specjax.Draft(
            token_ids,
            logits,
            temperature=draft_temperature,
            logprobs=logprobs,
            logsumexp=lse,
            num_tokens=num_tokens,
        )
        return specjax.rejection_sample(
            draft,
            target,
            keys=keys,
            positions=0,
            temperature=temperature,
            cutoff=cutoff,
            rule=rule,
        ).token_ids

    return functools.partial(run, logits=logits, target=target, cutoff=cutoff)


def count_steps(
    step: Callable[[jax.Array], jax.Array], rows: Rows, num_kinds: int
) -> list[Outcomes]:
    """The outcomes of each kind over all batches."""
    counts: list[Any] = [0.0] * num_kinds
    for number in range(num_batches(num_kinds)):
        tokens = np.asarray(step(jax.random.key(number)))
        for kind in range(num_kinds):
            counts[kind] = counts[kind] + count_outcomes(tokens[kind::num_kinds], rows.vocab_size)
    return counts


def cases() -> Iterator[dict[str, Any]]:
    usual = ROWS["usual"]()
    one = {
        ("standard", "sampled"): Kind(),
        ("standard", "sampled, T = 0.7"): Kind(0.7),
        ("standard", "sampled, T = 0.7, top-p 0.8"): Kind(0.7, 0.8),
        ("standard", "argmax"): Kind(),
        ("standard", "argmax, T = 0.7, top-p 0.8"): Kind(0.7, 0.8),
        ("standard", "greedy"): Kind(0.0),
        ("block", "sampled"): Kind(),
        ("block", "sampled, T = 0.7, top-p 0.8"): Kind(0.7, 0.8),
        ("coupled", "sampled"): Kind(),
    }
    for (rule, case), kind in one.items():
        drafting = "sampled" if case.startswith("sampled") else "argmax"
        step = make_step(usual, [kind], drafting, RULES[rule])
        [outcomes] = count_steps(step, usual, 1)
        number = int(outcomes.sum())
        call = f"{CALL}, {rule}"
        yield measure(case, call, outcomes, usual, kind, size="usual", num_samples=number)
    drafts = ("sampled", "argmax") if jax.default_backend() == "gpu" else ("sampled",)
    for drafting in drafts:
        step = make_step(usual, list(MIXED.values()), drafting, RULES["standard"])
        counts = count_steps(step, usual, len(MIXED))
        for (name, kind), outcomes in zip(MIXED.items(), counts, strict=True):
            yield measure(
                f"mixed batch, {drafting} drafts: {name}",
                f"{CALL}, standard",
                outcomes,
                usual,
                kind,
                size="usual",
                num_samples=int(outcomes.sum()),
            )
