"""Tokens of small runs on a CPU in plain JAX, from inputs that NumPy draws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from frozen.cases import build_tiny, whole_decode
from specjax import Draft, RaggedDraft, SamplingParams, rules

BATCH, K, VOCAB = 8, 3, 700


def _inputs():
    rng = np.random.default_rng(0)
    draft = 2 * rng.normal(size=(BATCH, K, VOCAB)).astype(np.float32)
    target = np.pad(draft, ((0, 0), (0, 1), (0, 0)))
    target = target + rng.normal(size=target.shape).astype(np.float32)
    ids = np.argmax(draft + rng.gumbel(size=draft.shape), axis=-1).astype(np.int32)
    options = dict(
        keys=jax.vmap(jax.random.key)(jnp.arange(BATCH)),
        positions=jnp.arange(BATCH, dtype=jnp.int32) * 5,
        temperature=jnp.asarray([0.0, 0.5, 0.8, 1.0] * (BATCH // 4), jnp.float32),
        options=specjax.Options(implementation="xla"),
    )
    return jnp.asarray(ids), jnp.asarray(draft), jnp.asarray(target), options


def _calls():
    ids, draft, target, options = _inputs()
    yield "gumbel_sample", specjax.gumbel_sample(target[:, 0], stream=0, **options)
    verify = functools.partial(specjax.rejection_sample, target_logits=target, **options)
    yield "one-hot drafts", verify(Draft(ids))
    all_kept = jnp.full((BATCH, K + 1), -jnp.inf)
    yield "sampled drafts", verify(Draft(ids, draft), cutoff=all_kept)
    yield "synthetic acceptance", verify(Draft(ids), rule=rules.synthetic(jnp.full(K, 0.7)))
    temperature = options["temperature"]
    cutoff = specjax.logit_cutoff(
        target, temperature=temperature, top_k=20, top_p=0.9, implementation="xla"
    )
    yield "cutoffs", verify(Draft(ids, draft), cutoff=cutoff)
    yield (
        "requests laid end to end",
        specjax.rejection_sample(
            RaggedDraft(
                ids.reshape(-1),
                K * jnp.arange(BATCH + 1, dtype=jnp.int32),
                max_draft_tokens=K,
                logits=draft.reshape(-1, VOCAB),
            ),
            target.reshape(-1, VOCAB),
            **options,
        ),
    )


def _weights(seed):
    rng, shapes = np.random.default_rng(seed), jax.eval_shape(lambda: build_tiny().params)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.2, x.dtype), shapes)


def _decodes():
    prompts = jnp.array([[7, 8, 9, 10, 7, 8, 9], [11, 12, 13, -1, -1, -1, -1]], jnp.int32)
    keys = jax.vmap(jax.random.key)(jnp.arange(2))
    lengths, temperature = jnp.array([7, 3], jnp.int32), jnp.array([0.0, 0.9], jnp.float32)
    inputs = ([_weights(0), _weights(1)], prompts, lengths, keys, temperature)
    few = SamplingParams(
        top_k=jnp.array([5, 40], jnp.int32), repetition_penalty=jnp.array([1.2, 1.0], jnp.float32)
    )
    yield "generate, sampling parameters", whole_decode("model", *inputs, few)


def golden():
    """Tokens of every run by its name."""
    for name, done in (*_calls(), *_decodes()):
        yield name, np.asarray(done.token_ids).tolist()
