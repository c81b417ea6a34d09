"""A policy gradient with tunix's transformers, with its ratio over the tokens kept by top-k.

pip install 'specjax[tunix]'
python examples/tunix_kept_tokens.py

The texts are drawn with top-k. With log-probabilities over all tokens the ratio of a policy to
itself would not be 1. `kept_logprobs` normalises over the sets of the rollout.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.rl import common
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix_grpo import LetterTokenizer, count_letter, make_policy

import specjax
from specjax.contrib.tunix import SpecRollout

NUM_TOKENS, TEMPERATURE, CLIP = 12, 0.9, 0.2
CONFIG = RolloutConfig(
    max_tokens_to_generate=NUM_TOKENS,
    max_prompt_length=8,
    temperature=TEMPERATURE,
    top_k=20,
    return_logprobs=True,
)


def logits_of(policy, prompt_tokens, tokens):
    """Returns the policy's logits [B, L, V] of the completions, divided by the temperature."""
    _, logits = common.compute_per_token_logps(
        *nnx.split(policy),
        prompt_tokens=prompt_tokens,
        completion_tokens=tokens,
        pad_id=LetterTokenizer().pad_id(),
        eos_id=LetterTokenizer().eos_id(),
        stop_gradient=False,
        return_logits=True,
        temperature=TEMPERATURE,
    )
    return logits


@nnx.value_and_grad(has_aux=True)
def loss(policy, batch):
    """Returns the clipped loss of PPO, and the ratios [B, L] of the policy to the rollout's."""
    logits = logits_of(policy, batch["prompt_tokens"], batch["tokens"])
    ids = jnp.where(batch["is_token"], batch["tokens"], -1)
    logprobs = specjax.kept_logprobs(logits, ids, batch["kept"])
    ratio = jnp.exp(logprobs - batch["old_logprobs"])
    advantages = batch["advantages"][:, None]
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages)
    return -jnp.mean(jnp.where(batch["is_token"], gain, 0)), ratio


@nnx.jit
def update(policy, optimizer, batch):
    """Takes a step of the optimizer; returns the ratios before it."""
    (_, ratio), gradients = loss(policy, batch)
    optimizer.update(policy, gradients)
    return ratio


def pad(rows, fill):
    """Returns ragged rows as an array [B, L], padded at the end."""
    padded = np.full((len(rows), NUM_TOKENS), fill, np.asarray(rows[0]).dtype)
    for out, row in zip(padded, rows, strict=True):
        out[: len(row)] = row
    return jnp.asarray(padded)


def train(num_steps, num_samples=16, learning_rate=2e-2):
    """Returns each step's mean reward, and how far its first ratios are from 1."""
    policy = make_policy()
    optimizer = nnx.Optimizer(policy, optax.adam(learning_rate), wrt=nnx.Param)
    rollout = SpecRollout(
        rollout_actor=policy,
        tokenizer=LetterTokenizer(),
        rollout_config=CONFIG,
        drafter="group_lookup",
        config=specjax.SpeculativeConfig(num_speculative_tokens=2),
        max_kept_tokens=CONFIG.top_k + 4,  # Ties with the last are kept, too.
    )
    prompts = ["abc"] * num_samples + ["abd"] * num_samples
    rewards, errors = [], []
    for _ in range(num_steps):
        output = rollout.generate(prompts, CONFIG)
        scores = np.array(count_letter(prompts, output.text), np.float32)
        tokens = pad(output.tokens, LetterTokenizer().pad_id())
        is_text = pad([np.ones(row.size, bool) for row in output.tokens], False)
        is_padding = tokens == LetterTokenizer().pad_id()
        batch = {
            "prompt_tokens": jnp.asarray(output.left_padded_prompt_tokens),
            "tokens": tokens,
            # tunix takes a generated padding token for padding: a text counts up to this token.
            "is_token": is_text & (jnp.cumsum(is_padding, axis=1) - is_padding == 0),
            "old_logprobs": pad(output.logprobs, 0.0),
            "kept": jax.tree.map(jnp.asarray, rollout.kept_tokens),
            "advantages": jnp.asarray((scores - scores.mean()) / (scores.std() + 1e-3)),
        }
        ratio = update(policy, optimizer, batch)
        rewards.append(float(scores.mean()))
        errors.append(float(jnp.max(jnp.abs(ratio - 1), where=batch["is_token"], initial=0)))
        update(policy, optimizer, batch)
    return rewards, errors


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-steps", type=int, default=20)
    rewards, errors = train(parser.parse_args().num_steps)
    for step, (reward, error) in enumerate(zip(rewards, errors, strict=True)):
        print(f"step {step:2}  reward {reward:.2f}  largest |ratio - 1| before it {error:.1e}")


if __name__ == "__main__":
    main()
