"""One step of verification, number by number: three kinds of request in one batch.

python examples/verify_one_step.py --seed 2
"""

import argparse

import jax
import jax.numpy as jnp

import specjax

WORDS = ("the", "cat", "dog", "sat", "ran", ".")
KINDS = ("random, drawn drafts", "random, one-hot drafts", "greedy")
K = 3


def coin(key: jax.Array, position: int, index: int) -> float:
    """The coin that judges drafted token `index` at `position`: a function of its address alone."""
    address = jax.random.fold_in(jax.random.fold_in(key, position), specjax.Stream.accept(index))
    return (float(jax.random.bits(address)) + 0.5) / 2**32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=2)
    seed = parser.parse_args().seed

    size, vocab_size = len(KINDS), len(WORDS)
    rng = jax.random.key(seed)
    draft_logits = jax.random.normal(jax.random.fold_in(rng, 0), (size, K, vocab_size))
    change = jax.random.normal(jax.random.fold_in(rng, 1), (size, K + 1, vocab_size))
    target_logits = jnp.pad(draft_logits, ((0, 0), (0, 1), (0, 0))) + change

    # A key per request and the absolute position of the first drafted token: all the randomness.
    keys = jax.vmap(jax.random.key)(jnp.arange(size) + 100 * seed)
    positions = jnp.array([5, 9, 7])
    temperature = jnp.array([1.0, 1.0, 0.0])
    # 1 is drawn from softmax(draft_logits); 0 is chosen: all of q is on the drafted token.
    draft_temperature = jnp.array([1.0, 0.0, 0.0])

    drafted = [
        specjax.gumbel_sample(
            draft_logits[:, i],
            keys=keys,
            positions=positions + i,
            stream=specjax.Stream.draft(i),
            temperature=draft_temperature,
        ).token_ids
        for i in range(K)
    ]
    draft = specjax.Draft(
        token_ids=jnp.stack(drafted, axis=1), logits=draft_logits, temperature=draft_temperature
    )
    outcome = specjax.rejection_sample(
        draft, target_logits, keys=keys, positions=positions, temperature=temperature
    )

    p, q = jax.nn.softmax(target_logits), jax.nn.softmax(draft_logits)
    for b, kind in enumerate(KINDS):
        print(f"\nRequest {b}: {kind}; the first drafted token stands at position {positions[b]}")
        num_accepted = int(outcome.num_accepted[b])
        for i in range(min(num_accepted + 1, K)):
            x = int(draft.token_ids[b, i])
            if temperature[b] == 0:
                best = int(jnp.argmax(target_logits[b, i]))
                accepted = x == best
                why = f"the target's likeliest is {WORDS[best]!r}"
            else:
                law = float(q[b, i, x]) if draft_temperature[b] > 0 else 1.0
                ratio = float(p[b, i, x]) / law
                u = coin(keys[b], int(positions[b]) + i, i)
                accepted = u < ratio
                why = f"p {p[b, i, x]:.3f} / q {law:.3f} = {ratio:.3f}, coin {u:.3f}"
            print(f"  {WORDS[x]!r:6} {why}: {'accepted' if accepted else 'rejected'}")
            assert accepted == (i < num_accepted)
        token = WORDS[int(outcome.token_ids[b, num_accepted])]
        if num_accepted == K:
            print(f"  all accepted, so the target adds a bonus token: {token!r}")
            continue
        print(f"  recovered instead: {token!r}")
        if temperature[b] > 0:
            row, x = p[b, num_accepted], draft.token_ids[b, num_accepted]
            one_hot = jax.nn.one_hot(x, vocab_size)
            spent = q[b, num_accepted] if draft_temperature[b] > 0 else one_hot
            left = jnp.maximum(row - spent, 0)
            residual = left / left.sum()
            shares = ", ".join(f"{w} {r:.2f}" for w, r in zip(WORDS, residual, strict=True) if r)
            print(f"  drawn from norm(max(p - q, 0)): {shares}")
            assert token in shares

    emitted = [[WORDS[i] for i in row] for row in specjax.unpad(outcome.token_ids)]
    print("\nEmitted in this step:")
    for b, (words, count) in enumerate(zip(emitted, outcome.num_emitted.tolist(), strict=True)):
        print(f"  request {b}: {' '.join(words)}  ({count} from one pass of the target)")


if __name__ == "__main__":
    main()
