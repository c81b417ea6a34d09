"""Speculation in a loop of your own: a Flax linen model, `propose`, `rejection_sample`, `commit`.

python examples/your_own_loop.py
"""

import argparse
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

import specjax

VOCAB_SIZE, ROOM, K = 48, 40, 4


class Decoder(nn.Module):
    """A causal transformer of one layer, without a cache: it reads the whole row every time."""

    width: int = 32

    @nn.compact
    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """Logits [B, L, V] of the token after each place."""
        places = self.param("places", nn.initializers.normal(0.5), (ROOM, self.width))
        x = nn.Embed(VOCAB_SIZE, self.width, embedding_init=nn.initializers.normal(1.0))(token_ids)
        x = x + places[None, : token_ids.shape[1]]
        mask = nn.make_causal_mask(token_ids)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x), mask=mask)
        x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return 3 * nn.Dense(VOCAB_SIZE)(nn.LayerNorm()(x))


MODEL = Decoder()


def logits_at(params, token_ids: jax.Array, places: jax.Array) -> jax.Array:
    """Logits after the tokens at `places` [B, n]; later tokens are never read."""
    logits = MODEL.apply(params, jnp.maximum(token_ids, 0))
    return jnp.take_along_axis(logits, places[..., None], axis=1)


def draft_step(params, token_ids, fed, positions):
    """`step_fn` of `propose`; the carry is the row of tokens, where others keep a cache."""
    rows = jnp.arange(fed.shape[0])
    token_ids = token_ids.at[rows, positions].set(fed, mode="drop")
    return logits_at(params, token_ids, positions[:, None])[:, 0], token_ids


def through_probabilities(draft: specjax.Draft) -> specjax.Draft:
    """Makes this draft from probabilities, without logits."""
    warm = draft.temperature[:, None, None] > 0
    scale = jnp.where(warm, draft.temperature[:, None, None], 1)
    one_hot = jax.nn.one_hot(draft.token_ids, VOCAB_SIZE)
    probs = jnp.where(warm, jax.nn.softmax(draft.logits / scale), one_hot)
    return specjax.draft_from_probs(draft.token_ids, probs)


@functools.partial(jax.jit, static_argnames="as_probs")
def speculative_step(params, draft_params, token_ids, lengths, keys, temperature, *, as_probs):
    """One step of every request: draft, verify, commit."""
    rows = jnp.arange(token_ids.shape[0])
    draft, _ = specjax.propose(
        functools.partial(draft_step, draft_params),
        token_ids,
        token_ids[rows, lengths - 1],
        specjax.DraftInputs(keys, positions=lengths, temperature=temperature),
        num_tokens=K,
    )
    if as_probs:
        draft = through_probabilities(draft)
    # A full row is inactive; where fewer than K places are left, fewer drafts are judged.
    room = ROOM - lengths
    draft = draft.replace(num_tokens=jnp.where(room > 0, jnp.clip(room - 1, 0, K), -1))
    places = lengths[:, None] + jnp.arange(K)
    fed = token_ids.at[rows[:, None], places].set(draft.token_ids, mode="drop")
    judged = jnp.minimum(lengths[:, None] - 1 + jnp.arange(K + 1), ROOM - 1)
    outcome = specjax.rejection_sample(
        draft,
        logits_at(params, fed, judged),
        keys=keys,
        positions=lengths,
        temperature=temperature,
    )
    token_ids, lengths, _ = specjax.commit(token_ids, lengths, outcome)
    return token_ids, lengths, outcome


@jax.jit
def plain_step(params, token_ids, lengths):
    """Greedy decoding without a draft, one token at a time."""
    best = jnp.argmax(logits_at(params, token_ids, lengths[:, None] - 1)[:, 0], axis=-1)
    rows = jnp.arange(token_ids.shape[0])
    return token_ids.at[rows, lengths].set(best.astype(jnp.int32), mode="drop"), lengths + 1


def speculate(params, draft_params, prompts, lengths, keys, temperature, *, as_probs=False):
    """Tokens of full rows, steps taken, and drafted tokens accepted per request."""
    token_ids, steps, accepted = prompts, 0, jnp.zeros_like(lengths)
    while (lengths < ROOM).any():
        token_ids, lengths, outcome = speculative_step(
            params, draft_params, token_ids, lengths, keys, temperature, as_probs=as_probs
        )
        steps, accepted = steps + 1, accepted + outcome.num_accepted
    return token_ids, steps, accepted


@jax.jit
def make_inputs(key, lengths, noise):
    """Random prompts, a random target, and a draft whose weights lie `noise` away from it."""
    prompts = jax.random.randint(jax.random.fold_in(key, 0), (4, ROOM), 0, VOCAB_SIZE)
    params = MODEL.init(jax.random.fold_in(key, 1), prompts)
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.fold_in(key, 2), len(leaves))
    changed = [x + noise * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    prompts = jnp.where(jnp.arange(ROOM) < lengths[:, None], prompts, -1)
    return prompts, params, structure.unflatten(changed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", type=float, default=0.05, help="what sets the draft apart")
    args = parser.parse_args()

    temperature = jnp.array([0.0, 0.0, 0.5, 1.0])
    lengths = jnp.array([3, 5, 4, 2])
    prompts, params, draft_params = make_inputs(jax.random.key(args.seed), lengths, args.noise)
    keys = jax.vmap(jax.random.key)(jnp.arange(4) + 1000 * args.seed)

    tokens, steps, accepted = speculate(params, draft_params, prompts, lengths, keys, temperature)
    by_probs, *_ = speculate(
        params, draft_params, prompts, lengths, keys, temperature, as_probs=True
    )
    plain, plain_lengths, plain_steps = prompts, lengths, 0
    while (plain_lengths < ROOM).any():
        plain, plain_lengths = plain_step(params, plain, plain_lengths)
        plain_steps += 1

    for b in range(4):
        new = tokens[b, lengths[b] :].tolist()
        print(
            f"temperature {temperature[b]:.1f}: accepted {accepted[b]} of {len(new)} tokens: {new}"
        )
    print(f"{steps} steps instead of {plain_steps}")
    greedy = temperature == 0
    assert (tokens[greedy] == plain[greedy]).all()
    print("the greedy requests wrote what plain greedy decoding writes")
    assert (tokens == by_probs).all()
    print("with q as probabilities every request writes the same")


if __name__ == "__main__":
    main()
