"""Texts, log-probabilities and training by google-tunix are what they are without speculation.

Without google-tunix there is nothing to compare with; `make tunix` installs it, and
SPECJAX_TUNIX_TEST makes its absence a failure.
"""

import functools
import importlib.util
import itertools
import os
import re
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import compilations
from flax import nnx
from scripts import ROOT, run_script

import specjax
from specjax.contrib.tunix import SpecRollout, tunix_model
from specjax.models import Eagle3Config, TransformerConfig, eagle3_drafter
from specjax.models.heads.eagle3 import build_eagle3

if importlib.util.find_spec("tunix"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import qwix
        from tunix.generate.sampler import CacheConfig, Sampler
        from tunix.models.gemma import model as gemma
        from tunix.models.llama3 import model as llama3
        from tunix.models.qwen3 import model as qwen3
        from tunix.rl.rollout.base_rollout import RolloutConfig
elif "SPECJAX_TUNIX_TEST" in os.environ:
    raise ModuleNotFoundError("google-tunix is needed here: make tunix.")
else:
    pytest.skip("google-tunix is not installed: make tunix", allow_module_level=True)

pytestmark = [pytest.mark.lenient, pytest.mark.filterwarnings("ignore")]

VOCAB = 29
SIZES = dict(num_layers=2, embed_dim=16, hidden_dim=24, num_heads=4, head_dim=8, num_kv_heads=2)
FAMILIES = ("qwen3", "qwen3_tied", "llama3", "gemma", "gemma2")


class LetterTokenizer:
    """Token 0 is padding, 1 begins and 2 ends a text; "a" is 3."""

    def encode(self, text):
        return [ord(letter) - ord("a") + 3 for letter in text]

    def decode(self, ids):
        return "".join(chr(token - 3 + ord("a")) for token in ids)

    def pad_id(self):
        return 0

    def bos_id(self):
        return 1

    def eos_id(self):
        return 2


def randomise(transformer, seed, scale=0.3):
    """Returns the transformer with noise added to all of its arrays: tunix begins many at 0."""
    graphdef, state = nnx.split(transformer)
    leaves, treedef = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    leaves = [
        leaf + scale * jax.random.normal(key, leaf.shape, leaf.dtype)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))


@functools.cache
def transformer_of(family, seed=0, vocab_size=VOCAB):
    rngs = nnx.Rngs(0)
    if family in ("gemma", "gemma2"):
        # A window of 4 tokens, soft caps and norms after the layers are Gemma 2's.
        is_second = family == "gemma2"
        kinds = (gemma.AttentionType.LOCAL_SLIDING, gemma.AttentionType.GLOBAL)
        config = gemma.ModelConfig(
            num_embed=vocab_size,
            final_logit_softcap=30.0 if is_second else None,
            attn_logits_soft_cap=50.0 if is_second else None,
            use_post_attn_norm=is_second,
            use_post_ffw_norm=is_second,
            attention_types=kinds if is_second else kinds[1:] * 2,
            sliding_window_size=4 if is_second else None,
            **SIZES,
        )
        return randomise(gemma.Gemma(config, rngs=rngs), seed)
    config = dict(vocab_size=vocab_size, rope_theta=10_000, norm_eps=1e-6, **SIZES)
    if family == "llama3":
        return randomise(llama3.Llama3(llama3.ModelConfig(**config), rngs=rngs), seed)
    config = qwen3.ModelConfig(use_tied_embedding=family == "qwen3_tied", **config)
    return randomise(qwen3.Qwen3(config, rngs=rngs), seed)


def causal_logits(transformer, token_ids):
    """Returns tunix's logits [B, L, V] of whole texts, without a cache."""
    size, width = token_ids.shape
    positions = jnp.broadcast_to(jnp.arange(width), (size, width))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (size, width, width))
    return np.asarray(transformer(token_ids, positions, None, mask)[0])


def before_padding(rows, others):
    """Returns rows as far as those of tunix have no padding in them, which it masks as padding."""
    cut = []
    for row, other in zip(rows, others, strict=True):
        cut.append(row[: [*other, 0].index(0) + 1])
    return cut


def make_rollout(transformer, *, num_tokens=2, method="standard", **options):
    config = specjax.SpeculativeConfig(num_tokens, rejection_sample_method=method)
    return SpecRollout(
        rollout_actor=transformer,
        tokenizer=LetterTokenizer(),
        rollout_config=RolloutConfig(temperature=0.7),
        config=config,
        **options,
    )


# The model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_ragged_chunks_are_those_of_whole_texts(family):
    transformer = transformer_of(family)
    model = tunix_model(transformer)
    ids = jax.random.randint(jax.random.key(3), (2, 9), 0, VOCAB)
    want = causal_logits(transformer, ids)
    apply, cache = jax.jit(model.apply), model.init_cache(2, 9)
    got = np.full_like(want, np.nan)
    # Padding before, after and instead of tokens, drafts that are written over, and the last slots.
    for positions in (
        [[0, 1, 2, 3], [-1, 0, 1, -1]],
        [[4, 5, 6, -1], [-1, -1, -1, -1]],
        [[5, 6, 7, -1], [2, 3, 4, 5]],
        [[8, -1, -1, -1], [6, 7, 8, -1]],
    ):
        positions = jnp.array(positions)
        tokens = jnp.take_along_axis(ids, jnp.maximum(positions, 0), axis=1)
        if positions[0, 0] == 4:
            tokens = tokens.at[0, 1:].set(7)
        hidden, cache = apply(model.params, tokens, positions, cache)
        logits = model.logits(model.params, hidden)
        for row, column in np.argwhere(np.asarray(positions) >= 0):
            got[row, positions[row, column]] = logits[row, column]
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_a_call_of_more_tokens_than_a_chunk_is_read_in_chunks():
    transformer = transformer_of("llama3")
    model = tunix_model(transformer)
    ids = jax.random.randint(jax.random.key(3), (2, 150), 0, VOCAB)
    positions = jnp.stack([jnp.arange(150), jnp.arange(150) - 20]).clip(-1)
    tokens = jnp.stack([ids[0], jnp.roll(ids[1], 20)])
    cache = model.init_cache(2, 150)
    hidden, features, _ = model.apply_with_taps(model.params, tokens, positions, cache, (0, 2))
    want = causal_logits(transformer, ids)
    got = model.logits(model.params, hidden)
    np.testing.assert_allclose(got[0], want[0], atol=5e-5)
    np.testing.assert_allclose(got[1, 20:], want[1, :130], atol=5e-5)
    size = SIZES["embed_dim"]
    table = transformer.embedder.input_embedding.get_value()
    np.testing.assert_array_equal(features[..., :size], table[tokens])
    normed = transformer.final_norm(features[..., size:])
    np.testing.assert_allclose(normed[0], hidden[0], atol=1e-6)


@pytest.mark.parametrize("family", ["gemma2"])
def test_a_request_has_the_tokens_that_it_gets_alone(family):
    model = tunix_model(transformer_of(family))
    drafter = specjax.model_drafter(tunix_model(transformer_of(family, seed=1)))
    prompts = jax.random.randint(jax.random.key(5), (3, 6), 0, VOCAB)
    lengths, keys = np.array([6, 1, 4]), jax.random.split(jax.random.key(6), 3)
    generate = functools.partial(specjax.generate, model, drafter, max_new_tokens=16)
    together = generate((prompts, lengths), keys=keys)
    assert together.metrics.num_accepted.sum() > 0
    for row in range(3):
        one = slice(row, row + 1)
        alone = generate((prompts[one], lengths[one]), keys=keys[one])
        assert specjax.unpad(alone.token_ids)[0] == specjax.unpad(together.token_ids)[row]


def test_models_of_one_config_share_programs_and_arrays_are_not_copied():
    one, other = (transformer_of("qwen3", seed=seed) for seed in (0, 1))
    model = tunix_model(one)
    assert model.params["embedding"] is one.embedder.input_embedding.get_value()
    assert jax.tree.structure(model) == jax.tree.structure(tunix_model(other))
    assert jax.tree.structure(model) != jax.tree.structure(tunix_model(transformer_of("llama3")))


def test_other_transformers_are_refused():
    with pytest.raises(ValueError, match="transformer is Linear; it needs to be one of tunix's"):
        tunix_model(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    config = dict(vocab_size=8, rope_theta=10_000, norm_eps=1e-6, **SIZES)
    flash = qwen3.Qwen3(qwen3.ModelConfig(use_flash_attention=True, **config), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="config has use_flash_attention=True"):
        tunix_model(flash)
    policy = transformer_of("qwen3")
    provider = qwix.LoraProvider(module_path="lm_head", rank=2, alpha=2.0)
    inputs = policy.get_model_input()
    with pytest.raises(ValueError, match="LoRA on its embedding or lm_head"):
        tunix_model(qwix.apply_lora_to_model(policy, provider, rngs=nnx.Rngs(1), **inputs))


# Rollouts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["group_lookup", "previous_policy"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_that_of_tunix_sampler(family, drafter):
    transformer = transformer_of(family)
    # To Gemma 2, tunix's sampler counts padding before a prompt as tokens of the window.
    prompts = ["abcdefg", "hijklmn"] if family == "gemma2" else ["abcdefg", "b", "xyz", "xyz"]
    config = dict(max_tokens_to_generate=12, max_prompt_length=8, temperature=0.0, top_p=1.0)
    layout = {name: SIZES[name] for name in ("num_layers", "num_kv_heads", "head_dim")}
    sampler = Sampler(transformer, LetterTokenizer(), CacheConfig(cache_size=32, **layout))
    want = sampler(prompts, 12, max_prompt_length=8, return_logprobs=True)
    rollout = make_rollout(transformer, drafter=drafter)
    got = rollout.generate(prompts, RolloutConfig(return_logprobs=True, **config))
    tokens = [row.tolist() for row in want.tokens]
    assert before_padding([row.tolist() for row in got.tokens], tokens) == before_padding(
        tokens, tokens
    )
    assert sum(map(len, before_padding(tokens, tokens))) > 12
    assert got.text == [LetterTokenizer().decode(row.tolist()) for row in got.tokens]
    np.testing.assert_array_equal(got.left_padded_prompt_tokens, want.padded_prompt_tokens)
    for row in zip(before_padding(got.logprobs, tokens), want.logprobs, strict=True):
        np.testing.assert_allclose(row[0], row[1][: row[0].size], atol=1e-4)
    if drafter == "previous_policy":
        assert float(rollout.metrics.draft_acceptance_rate) == 1


@pytest.mark.parametrize("drafter", [None, "group_lookup", "previous_policy"])
def test_sampled_logprobs_are_those_of_the_policy_and_new_parameters_compile_nothing(drafter):
    rollout = make_rollout(transformer_of("qwen3"), drafter=drafter)
    config = RolloutConfig(
        max_tokens_to_generate=12, max_prompt_length=8, temperature=0.7, return_logprobs=True
    )
    prompts = ["abcd", "xy"] * 4

    def compare():
        output = rollout.generate(prompts, config)
        completions = np.zeros((len(prompts), 12), np.int32)
        for row, tokens in zip(completions, output.tokens, strict=True):
            row[: tokens.size] = tokens
        prompt_tokens = jnp.asarray(output.left_padded_prompt_tokens)
        want = rollout.get_per_token_logps(prompt_tokens, jnp.asarray(completions))
        tokens = [row.tolist() for row in output.tokens]
        got = before_padding(output.logprobs, tokens)
        for row, one in zip(np.asarray(want), got, strict=True):
            np.testing.assert_allclose(one, row[: one.size], atol=1e-4)
        return output.tokens, completions.tolist()

    first = compare()[1]
    assert compare()[1] != first
    new = nnx.state(randomise(transformer_of("qwen3"), seed=9, scale=0.03), nnx.Param)
    with compilations() as compiled:
        rollout.update_params(new, (nnx.Param,))
        compare()
        rollout.update_params(nnx.to_pure_dict(new))
    assert not compiled
    if drafter == "previous_policy":
        assert 0.3 < float(rollout.metrics.draft_acceptance_rate) < 1


def test_a_policy_that_its_trainer_shares_is_read_anew_and_another_is_left_alone():
    shared = randomise(transformer_of("llama3"), seed=0, scale=0.0)
    rollout = make_rollout(shared)
    config = RolloutConfig(max_tokens_to_generate=8, temperature=0.0)
    assert rollout.model() is shared
    rollout.update_params(nnx.state(shared))
    assert rollout.model() is shared
    other = transformer_of("llama3", seed=4)
    want = make_rollout(other).generate(["abc"], config).text
    assert rollout.generate(["abc"], config).text != want
    nnx.update(shared, nnx.state(other))
    assert rollout.generate(["abc"], config).text == want
    rollout.update_params(nnx.state(transformer_of("llama3", seed=5)))
    assert rollout.model() is not shared
    assert make_rollout(shared).generate(["abc"], config).text == want


def test_parameters_of_lora_are_taken_alone():
    provider = qwix.LoraProvider(module_path=".*(q_proj|up_proj)", rank=2, alpha=2.0)
    base = transformer_of("qwen3")
    policy = qwix.apply_lora_to_model(base, provider, rngs=nnx.Rngs(1), **base.get_model_input())
    rollout = make_rollout(policy, drafter="previous_policy")
    config = RolloutConfig(max_tokens_to_generate=8, max_prompt_length=4, temperature=0.0)
    before = rollout.generate(["abc"], config).text
    assert before == make_rollout(base).generate(["abc"], config).text
    lora = nnx.state(policy, nnx.LoRAParam)
    assert 0 < len(jax.tree.leaves(lora)) < len(jax.tree.leaves(nnx.state(policy)))
    changed = jax.tree.map(lambda leaf: leaf + 0.5, lora)
    ids = jnp.array([[1, 3, 4, 5]])
    rollout.update_params(changed, (nnx.LoRAParam,))
    after = rollout.generate(["abc"], config).text
    assert after != before
    nnx.update(policy, changed)
    assert make_rollout(policy).generate(["abc"], config).text == after
    model, positions = tunix_model(policy), jnp.arange(4)[None]
    hidden, _ = model.apply(model.params, ids, positions, model.init_cache(1, 4))
    want = causal_logits(policy, ids)
    np.testing.assert_allclose(model.logits(model.params, hidden), want, atol=2e-5)


def test_logprobs_are_of_the_filtered_distribution():
    transformer = transformer_of("gemma")
    rollout = make_rollout(transformer, drafter="group_lookup")
    config = RolloutConfig(
        max_tokens_to_generate=8, temperature=0.7, top_k=3, top_p=0.9, return_logprobs=True
    )
    output = rollout.generate(["abc", "abc"], config)
    for tokens, logprobs in zip(output.tokens, output.logprobs, strict=True):
        text = np.array([1, 3, 4, 5, *tokens])
        logits = causal_logits(transformer, text[None])[0, 3:-1] / 0.7
        for row, token, logprob in zip(logits, tokens, logprobs, strict=True):
            kept = np.sort(np.argsort(-row)[:3])
            probs = np.asarray(jax.nn.softmax(row[kept]))
            order = np.argsort(-probs)
            kept = kept[order[np.cumsum(probs[order]) - probs[order] < 0.9]]
            want = jax.nn.log_softmax(row[kept])[np.flatnonzero(kept == token)[0]]
            np.testing.assert_allclose(logprob, want, atol=1e-4)


def test_a_head_on_the_policy_drafts_and_new_parameters_compile_nothing():
    layer = TransformerConfig(VOCAB, 16, 24, 1, 4, 2, 8)
    head = Eagle3Config(layer, 16, VOCAB, taps=(0, 1, 2))
    params = build_eagle3(head)
    policy, other = transformer_of("llama3"), transformer_of("llama3", seed=4)
    rollout = make_rollout(policy, drafter=lambda target: eagle3_drafter(target, head, params))
    plain = make_rollout(policy)
    config = RolloutConfig(max_tokens_to_generate=8, max_prompt_length=4, temperature=0.0)
    prompts = ["abc", "x"]
    assert rollout.generate(prompts, config).text == plain.generate(prompts, config).text
    assert rollout.metrics.num_drafted.sum() > 0
    with compilations() as compiled:
        rollout.update_params(nnx.state(other))
        after = rollout.generate(prompts, config).text
    assert not compiled
    plain.update_params(nnx.state(other))
    assert plain.generate(prompts, config).text == after


def joint_counts(rollout, config, num_calls, size):
    counts = np.zeros((4, 4, 4))
    for _ in range(num_calls):
        for tokens in rollout.generate(["a"] * size, config).tokens:
            counts[tuple(tokens)] += 1
    return counts.reshape(-1)


@pytest.fixture(scope="module")
def small_policy():
    """A policy of 4 tokens, and the probability of each text of 3."""
    policy = transformer_of("llama3", vocab_size=4)
    texts = jnp.array(list(itertools.product(range(4), repeat=3)))
    prompt = jnp.broadcast_to(jnp.array([1, 3]), (64, 2))
    logits = causal_logits(policy, jnp.concatenate([prompt, texts], axis=1))[:, 1:-1]
    logprobs = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    each = np.take_along_axis(logprobs, np.asarray(texts)[..., None], axis=-1)
    return policy, np.exp(each.sum(axis=(1, 2)))


@pytest.mark.parametrize(
    ("drafter", "method", "num_calls", "size"),
    [
        ("previous_policy", "standard", 3, 2048),
        ("group_lookup", "standard", 96, 64),
        ("previous_policy", "synthetic", 3, 2048),
    ],
)
def test_texts_follow_the_policy_jointly(small_policy, drafter, method, num_calls, size):
    policy, probs = small_policy
    # No token ends a text, so that all have 3.
    config = RolloutConfig(
        max_tokens_to_generate=3, max_prompt_length=2, temperature=1.0, eos_tokens=[100]
    )
    rollout = make_rollout(randomise(policy, seed=8, scale=0.2), drafter=drafter)
    rates = (1.0, 1.0) if method == "synthetic" else None
    rollout._config = specjax.SpeculativeConfig(
        2, rejection_sample_method=method, synthetic_acceptance_rates=rates
    )
    rollout.generate(["a"] * size, config)
    rollout.update_params(nnx.state(policy))
    counts = joint_counts(rollout, config, num_calls, size)
    assert rollout.metrics.num_accepted.sum() > 0
    expected = probs * counts.sum()
    z = (((counts - expected) ** 2 / expected).sum() - 63) / np.sqrt(2 * 63)
    # Drafts that are all accepted follow the policy before, and are seen by as much.
    assert z > 20 if method == "synthetic" else abs(z) < 4


# Training ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["group_lookup"])
def test_grpo_learns_with_the_rollouts_of_the_example(monkeypatch, drafter):
    monkeypatch.syspath_prepend(ROOT / "examples")
    example = importlib.import_module("tunix_grpo")
    monkeypatch.delitem(sys.modules, "tunix_grpo")
    rewards, lengths = example.train(drafter, 12)
    assert len(rewards) == 12
    assert np.mean(rewards[-3:]) > 3 * np.mean(rewards[:3])
    assert np.mean(lengths[-3:]) > 1.2


def test_ratios_over_kept_sets_are_1_before_an_update_and_a_policy_learns(monkeypatch):
    """The example's texts are drawn with top-k; over all tokens the ratios would be far from 1."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    example = importlib.import_module("tunix_kept_tokens")
    for name in ("tunix_kept_tokens", "tunix_grpo"):
        monkeypatch.delitem(sys.modules, name)
    rewards, errors = example.train(10)
    assert max(errors) < 1e-4
    assert np.mean(rewards[-3:]) > 3 * np.mean(rewards[:3])


def test_the_document_runs_with_tunix(monkeypatch, tmp_path):
    text = (ROOT / "docs" / "models" / "tunix.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    script = tmp_path / "tunix_page.py"
    script.write_text("\n".join(blocks))
    assert sum("tunix" in block for block in blocks) == 1
    run_script(monkeypatch, script, cwd=tmp_path)
