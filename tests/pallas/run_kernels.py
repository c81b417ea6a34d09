"""A small run of every kernel, for compute-sanitizer: `run_kernels.py [implementation]`."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax import Draft, Stream


def run(batch_size, k, vocab_size, implementation):
    """Sampling, and verification of every form, of one small batch."""
    rng = np.random.default_rng(0)
    keys = jax.vmap(jax.random.key)(jnp.arange(batch_size))
    options = dict(
        keys=keys,
        positions=0,
        temperature=rng.choice([0.0, 1.0, 1.0], batch_size).astype(np.float32),
        implementation=implementation,
    )
    draft_logits = rng.normal(size=(batch_size, k, vocab_size)).astype(np.float32)
    target = np.pad(draft_logits, ((0, 0), (0, 1), (0, 0)))
    target = jnp.asarray(target + rng.normal(size=target.shape), jnp.bfloat16)
    yield specjax.gumbel_sample(target[:, 0], stream=Stream.TARGET, **options)
    ids = np.argmax(draft_logits + rng.gumbel(size=draft_logits.shape), axis=-1)
    ids = jnp.asarray(ids, jnp.int32)
    one_hot = Draft(ids)
    recomputed = Draft(ids, jnp.asarray(draft_logits, jnp.bfloat16))
    logq = jax.nn.log_softmax(jnp.asarray(draft_logits))
    carried = recomputed._replace(
        logprobs=jnp.take_along_axis(logq, ids[..., None], axis=-1)[..., 0],
        logsumexp=jax.nn.logsumexp(jnp.asarray(draft_logits), axis=-1),
    )
    for draft in (one_hot, recomputed, carried):
        yield specjax.rejection_sample(draft, target, **options)
    yield specjax.rejection_sample(carried, target, conditional_rates=np.full(k, 0.6), **options)
    flat = jax.tree.map(lambda x: x.reshape(batch_size * k, *x.shape[2:]), carried)
    yield specjax.rejection_sample_ragged(
        flat,
        target.reshape(batch_size * (k + 1), vocab_size),
        cu_num_draft_tokens=k * np.arange(batch_size + 1),
        max_draft_tokens=k,
        **options,
    )


def main():
    implementation = sys.argv[1] if len(sys.argv) > 1 else "triton"
    for batch_size, k, vocab_size in [(3, 2, 5001), (20, 2, 5001)]:
        for done in run(batch_size, k, vocab_size, implementation):
            emitted = np.asarray(done.token_ids)
            assert emitted.max() < vocab_size
            assert np.all(emitted.reshape(batch_size, -1)[:, 0] >= 0)
    print("every kernel ran")


if __name__ == "__main__":
    main()
