"""A small run of every kernel, for compute-sanitizer: `run_kernels.py [implementation]`."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax import Draft, RaggedDraft, Stream, rules
from specjax.models import TransformerConfig, build


def run(batch_size, k, vocab_size, implementation):
    """Sampling, and verification of every form, of one small batch."""
    rng = np.random.default_rng(0)
    keys = jax.vmap(jax.random.key)(jnp.arange(batch_size))
    options = dict(
        keys=keys,
        positions=0,
        temperature=rng.choice([0.0, 1.0, 1.0], batch_size).astype(np.float32),
        options=specjax.Options(implementation=implementation),
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
    carried = recomputed.replace(
        logprobs=jnp.take_along_axis(logq, ids[..., None], axis=-1)[..., 0],
        logsumexp=jax.nn.logsumexp(jnp.asarray(draft_logits), axis=-1),
    )
    for draft in (one_hot, recomputed, carried):
        yield specjax.rejection_sample(draft, target, **options)
    yield specjax.rejection_sample(one_hot, target, rule=rules.coupled(), **options)
    rule = rules.synthetic(np.full(k, 0.6))
    yield specjax.rejection_sample(carried, target, rule=rule, **options)
    flat = jax.tree.map(lambda x: x.reshape(batch_size * k, *x.shape[2:]), carried)
    ends = k * np.arange(batch_size + 1)
    ragged = RaggedDraft(cu_num_draft_tokens=ends, max_draft_tokens=k, **vars(flat))
    rows = target.reshape(batch_size * (k + 1), vocab_size)
    yield specjax.rejection_sample(ragged, rows, **options)


def cutoffs(rows, vocab_size, implementation):
    """Cutoffs of rows of which few tokens are kept, and most."""
    logits = 3 * jax.random.normal(jax.random.key(1), (rows, vocab_size), jnp.bfloat16)
    for filters in (dict(top_k=50), dict(top_p=0.9), dict(top_k=20, top_p=0.5, min_p=0.1)):
        for temperature in (0.7, 30.0):
            yield specjax.logit_cutoff(
                logits, temperature=temperature, implementation=implementation, **filters
            )


def decode(batch_size):
    """Returns hidden states of two tokens after a prompt: products, sums, gates, attention."""
    config = TransformerConfig(
        vocab_size=64,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=False,
    )
    model, length = build(config, seed=0), 150
    apply, cache = jax.jit(model.apply), model.init_cache(batch_size, 256)
    for place in (np.arange(length), length + np.arange(2)):
        positions = jnp.asarray(np.tile(place, (batch_size, 1)), jnp.int32)
        hidden, cache = apply(model.params, positions % config.vocab_size, positions, cache)
    return hidden


def main():
    implementation = sys.argv[1] if len(sys.argv) > 1 else "triton"
    for batch_size, k, vocab_size in [(3, 2, 5001), (20, 2, 5001)]:
        for done in run(batch_size, k, vocab_size, implementation):
            emitted = np.asarray(done.token_ids)
            assert emitted.max() < vocab_size
            assert np.all(emitted.reshape(batch_size, -1)[:, 0] >= 0)
    for cutoff in cutoffs(3, 20001, implementation):
        assert np.isfinite(np.asarray(cutoff)).all()
    for batch_size in (1, 5):
        assert np.isfinite(np.asarray(decode(batch_size), np.float32)).all()
    print("every kernel ran")


if __name__ == "__main__":
    main()
