"""Batches for `rejection_sample`, and the check of their verification against the oracle."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle

import specjax
from specjax import Draft, RaggedDraft, rules

BATCH, K, VOCAB = 64, 3, 300
DRAFT_FIELDS = {
    "draft_logits": "logits",
    "draft_temperature": "temperature",
    "draft_logprobs": "logprobs",
    "draft_logsumexp": "logsumexp",
    "draft_cutoff": "cutoff",
    "num_tokens": "num_tokens",
    "rows": "rows",
}


def make_keys(n, seed=0):
    return jax.random.split(jax.random.key(seed), n)


def sample_tokens(rng, logits, temperature):
    noise = rng.gumbel(size=logits.shape)
    scaled = logits / np.where(temperature > 0, temperature, 1.0)[:, None, None]
    return np.argmax(scaled + noise * (temperature > 0)[:, None, None], axis=-1).astype(np.int32)


def sampled_case(seed=0, batch_size=BATCH, k=K, vocab_size=VOCAB, draft_vocab=None):
    """Sampled drafts everywhere at temperature 1, nothing masked, absent or cut off."""
    rng = np.random.default_rng(seed)
    draft_vocab = draft_vocab or vocab_size
    wide = max(vocab_size, draft_vocab)
    base = 2 * rng.normal(size=(batch_size, k + 1, wide))
    other = base + 0.7 * rng.normal(size=base.shape)
    draft_logits = base[:, :k, :draft_vocab].astype(np.float32)
    return dict(
        token_ids=sample_tokens(rng, draft_logits, np.ones(batch_size)),
        target_logits=other[:, :, :vocab_size].astype(np.float32),
        positions=rng.integers(0, 10_000, batch_size).astype(np.int32),
        temperature=np.ones(batch_size, np.float32),
        cutoff=np.full((batch_size, k + 1), -np.inf, np.float32),
        bonus_token_ids=np.full(batch_size, -1, np.int32),
        draft_logits=draft_logits,
        draft_temperature=np.ones(batch_size, np.float32),
        draft_cutoff=np.full((batch_size, k), -np.inf, np.float32),
        num_tokens=np.full(batch_size, k, np.int32),
        rows=np.arange(batch_size, dtype=np.int32),
    )


def mixed_case(seed, *shape, **options):
    """Greedy and random requests, sampled and one-hot drafts, cutoffs, masks, ids of no token."""
    case = sampled_case(seed, *shape, **options)
    rng = np.random.default_rng([seed, 1])
    batch_size, k = case["token_ids"].shape
    vocab_size = case["target_logits"].shape[2]
    case["temperature"] = rng.choice([0.0, 1e-7, 0.6, 1.0, 1.0, 1.7], batch_size).astype(np.float32)
    same = rng.random(batch_size) < 0.6
    other = rng.choice([0.0, 0.8, 1.2], batch_size)
    case["draft_temperature"] = np.where(same, case["temperature"], other).astype(np.float32)
    case["token_ids"] = sample_tokens(rng, case["draft_logits"], case["draft_temperature"])
    replaced = rng.random((batch_size, k)) < 0.06
    unusable = rng.choice([-1, -7, vocab_size, vocab_size + 9, 2**31 - 1, 0], (batch_size, k))
    case["token_ids"] = np.where(replaced, unusable, case["token_ids"]).astype(np.int32)
    greedy = (case["temperature"] < 1e-5) & (rng.random(batch_size) < 0.7)
    argmax = np.argmax(case["target_logits"][:, :k], axis=-1)
    case["token_ids"] = np.where(greedy[:, None], argmax, case["token_ids"]).astype(np.int32)
    case["num_tokens"] = rng.choice([-1, 0, 1, k, k, k, k, k + 5], batch_size).astype(np.int32)
    case["cutoff"] = rng.choice([-np.inf, -1.5], (batch_size, k + 1)).astype(np.float32)
    case["draft_cutoff"] = rng.choice([-np.inf, -1.0], (batch_size, k)).astype(np.float32)
    rows = rng.permutation(batch_size).astype(np.int32)
    case["draft_logits"] = case["draft_logits"][np.argsort(rows)]
    case["rows"] = rows
    some = rng.random(batch_size) < 0.2
    case["bonus_token_ids"] = np.where(
        some, rng.integers(0, vocab_size + 5, batch_size), -1
    ).astype(np.int32)
    masked = rng.random(case["target_logits"].shape) < 0.1
    masked[case["bonus_token_ids"] >= 0] = False
    case["target_logits"] = np.where(masked, -np.inf, case["target_logits"]).astype(np.float32)
    return case


def with_statistics(case):
    """A case whose drafts carry the log-probabilities that `gumbel_sample` returns."""
    batch_size, k = case["token_ids"].shape
    logprobs = np.zeros((batch_size, k), np.float32)
    totals = np.zeros((batch_size, k), np.float32)
    for b in range(batch_size):
        scale = case["draft_temperature"][b]
        scale = np.float64(scale) if scale >= 1e-5 else 1.0
        for i in range(k):
            row = case["draft_logits"][case["rows"][b], i]
            w = oracle.kept(row, case["draft_cutoff"][b, i]) / scale
            totals[b, i] = total = oracle.logsumexp(w)
            x = case["token_ids"][b, i]
            logprobs[b, i] = w[x] - total if 0 <= x < len(w) else -np.inf
    return case | dict(draft_logprobs=logprobs, draft_logsumexp=totals)


def library(implementation, noise_dtype=jnp.float32):
    return functools.partial(
        specjax.rejection_sample,
        options=specjax.Options(noise_dtype=noise_dtype, implementation=implementation),
    )


def with_sizes(implementation, **sizes):
    """The implementation with other sizes of its kernels; plain JAX has none."""
    if implementation == "xla":
        return implementation
    [config] = implementation.configs
    return dataclasses.replace(implementation, configs=(dataclasses.replace(config, **sizes),))


def fields_of(case):
    fields = {DRAFT_FIELDS[k]: jnp.asarray(v) for k, v in case.items() if k in DRAFT_FIELDS}
    return fields | {"token_ids": jnp.asarray(case["token_ids"])}


def make_draft(case):
    return Draft(**fields_of(case))


def make_ragged_draft(case, cu, k=K):
    """The draft of a case whose token arrays are those of all requests end to end."""
    return RaggedDraft(cu_num_draft_tokens=cu, max_draft_tokens=k, **fields_of(case))


def run(verify, case, keys=None, **options):
    keys = make_keys(len(case["token_ids"])) if keys is None else keys
    rest = {
        name: jnp.asarray(value)
        for name, value in case.items()
        if name not in DRAFT_FIELDS and name not in ("token_ids", "target_logits")
    }
    if "conditional_rates" in rest:
        rest["rule"] = rules.synthetic(rest.pop("conditional_rates"))
    target_logits = jnp.asarray(case["target_logits"])
    return verify(make_draft(case), target_logits, keys=keys, **rest, **options)


def exact(case, keys=None, **options):
    keys = make_keys(len(case["token_ids"])) if keys is None else keys
    arguments = {k: v for k, v in case.items() if k != "draft_logprobs"}
    return oracle.verify(keys=np.asarray(jax.random.key_data(keys)), **arguments, **options)


def check_against_oracle(verify, case, keys=None, *, max_uncertain=0.1, noise=np.float32):
    """Tokens, counts and log-probabilities are the oracle's wherever rounding cannot decide."""
    result = run(verify, case, keys)
    expected = exact(case, keys, noise=noise)
    chex.assert_type([result.token_ids, result.num_accepted, result.num_emitted], jnp.int32)
    chex.assert_type(result.logprobs, jnp.float32)
    chex.assert_shape(result.token_ids, expected.token_ids.shape)
    certain = expected.certain
    assert np.mean(~certain) <= max_uncertain
    for name in ("num_accepted", "num_emitted", "token_ids"):
        ours = np.asarray(getattr(result, name))
        np.testing.assert_array_equal(ours[certain], getattr(expected, name)[certain], err_msg=name)
    np.testing.assert_allclose(
        np.asarray(result.logprobs)[certain], expected.logprobs[certain], atol=2e-4, rtol=1e-5
    )
    return result
