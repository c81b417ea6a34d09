"""GRPO by google-tunix on a CPU, with rollouts decoded by specjax: a tiny policy learns a letter.

pip install 'specjax[tunix]'
python examples/tunix_grpo.py --drafter group_lookup
"""

import argparse
import functools

import jax
import numpy as np
import optax
from flax import nnx
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

from specjax import SpeculativeConfig
from specjax.contrib.tunix import SpecRollout

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class LetterTokenizer:
    """Token 0 is padding, 1 begins and 2 ends a text, and each letter has one of its own."""

    def encode(self, text):
        return [3 + LETTERS.index(letter) for letter in text]

    def decode(self, ids):
        return "".join(LETTERS[token - 3] for token in ids if token >= 3)

    def pad_id(self):
        return 0

    def bos_id(self):
        return 1

    def eos_id(self):
        return 2


def make_policy(seed=0):
    """Returns a random transformer of 2 layers; tunix begins the layers' products at 0."""
    sizes = dict(num_layers=2, embed_dim=32, hidden_dim=64, num_heads=4, head_dim=8, num_kv_heads=2)
    config = ModelConfig(vocab_size=3 + len(LETTERS), rope_theta=10_000, norm_eps=1e-6, **sizes)
    return Llama3(config, rngs=nnx.Rngs(seed))


def count_letter(prompts, completions, **options):
    """Returns the share of the letter that the prompt begins with."""
    pairs = zip(prompts, completions, strict=True)
    return [text.count(prompt[0]) / max(len(text), 1) for prompt, text in pairs]


def train(drafter, num_steps, num_generations=4, learning_rate=3e-2):
    """Returns each step's mean reward, and its tokens per step of decoding."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    rewards, lengths = [], []

    def reward(prompts, completions, **options):
        scores = count_letter(prompts, completions)
        metrics = cluster.rollout.metrics
        rewards.append(float(np.mean(scores)))
        lengths.append(float(metrics.mean_acceptance_length))
        return scores

    cluster = rl_cluster.RLCluster(
        actor=make_policy(),
        reference=make_policy(),
        tokenizer=LetterTokenizer(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(rl_cluster.Role, mesh),
            rollout_engine=functools.partial(
                SpecRollout, drafter=drafter, config=SpeculativeConfig(num_speculative_tokens=2)
            ),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(learning_rate),
                eval_every_n_steps=1000,
                max_steps=num_steps,
                pbar_description=None,
            ),
            rollout_config=RolloutConfig(
                max_prompt_length=8, max_tokens_to_generate=12, temperature=1.0
            ),
        ),
    )
    config = GRPOConfig(num_generations=num_generations, beta=0.0)
    learner = GRPOLearner(rl_cluster=cluster, algo_config=config, reward_fns=reward)
    prompts = [{"prompts": np.array(["abc", "abd"])} for _ in range(num_steps)]
    learner.train(prompts)
    return rewards, lengths


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafter", choices=("previous_policy", "group_lookup"))
    parser.add_argument("--num-steps", type=int, default=20)
    options = parser.parse_args()
    rewards, lengths = train(options.drafter, options.num_steps)
    for step, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        print(f"step {step:2}  reward {reward:.2f}  {length:.2f} tokens per step of decoding")


if __name__ == "__main__":
    main()
