"""Synthetic acceptance: its three options, the measured acceptance, and the speed there.

python examples/synthetic_acceptance.py

The acceptance is given, so the weights may be random: only their shapes cost time.
"""

import argparse
import dataclasses
import statistics
import time

import jax
import numpy as np

import specjax
from specjax.models import TransformerConfig, build

K = 4
TARGET = TransformerConfig(2048, 256, 736, 6, 4, 2, 64)
DRAFT = TransformerConfig(2048, 96, 256, 1, 2, 1, 48)


def synthetic(**form) -> specjax.SpeculativeConfig:
    return specjax.SpeculativeConfig(
        num_speculative_tokens=K, rejection_sample_method="synthetic", **form
    )


FORMS = {
    "synthetic_acceptance_rate = 0.6": synthetic(synthetic_acceptance_rate=0.6),
    "synthetic_acceptance_rates = (0.9, 0.7, 0.4, 0.1)": synthetic(
        synthetic_acceptance_rates=(0.9, 0.7, 0.4, 0.1)
    ),
    "synthetic_acceptance_length = 2.5": synthetic(synthetic_acceptance_length=2.5),
}


def measured_lengths(rates: jax.Array, num_requests: int, seed: int) -> np.ndarray:
    """Tokens emitted by one step of each of many requests with random drafts."""
    key = jax.random.key(seed)
    logits = jax.random.normal(jax.random.fold_in(key, 0), (num_requests, K + 1, 64))
    token_ids = jax.random.randint(jax.random.fold_in(key, 1), (num_requests, K), 0, 64)
    rule = specjax.rules.synthetic(rates)
    outcome = specjax.rejection_sample(
        specjax.Draft(token_ids), logits, keys=key, positions=0, rule=rule
    )
    return np.asarray(outcome.num_emitted)


def timed(pair, length: float, args: argparse.Namespace) -> tuple[float, float, int]:
    """Tokens per step, milliseconds per token and steps of a generation."""
    target, draft = pair
    prompt = np.zeros((1, 8), np.int32)
    seconds = []
    for number in range(1 + args.repeats):
        start = time.perf_counter()
        generation = specjax.generate(
            target,
            specjax.model_drafter(draft),
            (prompt, np.array([8], np.int32)),
            keys=jax.random.key(args.seed + number),
            config=synthetic(synthetic_acceptance_length=length),
            max_new_tokens=args.max_new_tokens,
        )
        jax.block_until_ready(generation)
        seconds.append(time.perf_counter() - start)
    metrics = generation.metrics
    per_token = 1e3 * statistics.median(seconds[1:]) / args.max_new_tokens
    return float(metrics.mean_acceptance_length), per_token, int(metrics.num_steps.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=6, help="of the target")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    for form, config in FORMS.items():
        rates = config.conditional_rates()
        lengths = measured_lengths(rates, args.requests, args.seed)
        expected = float(specjax.expected_acceptance_length(rates))
        error = lengths.std() / np.sqrt(len(lengths))
        unconditional = [float((lengths > i + 1).mean()) for i in range(K)]
        print(form)
        print(f"  conditional rates    {np.array2string(np.asarray(rates), precision=3)}")
        print(f"  unconditional rates  {np.array2string(np.cumprod(rates), precision=3)}")
        print(f"  measured             {np.array2string(np.array(unconditional), precision=3)}")
        print(
            f"  tokens per step      {expected:.3f} expected, {lengths.mean():.3f} +- {error:.3f}"
        )
        distance = abs(lengths.mean() - expected) / error if error else 0.0
        assert distance < 5, f"{distance:.1f} standard errors from what was asked for"

    print(
        "\nWhat an acceptance is worth, in generate, with a target and a draft of random weights:"
    )
    print("asked for  tokens per step  steps  ms per token")
    target = dataclasses.replace(TARGET, num_hidden_layers=args.layers)
    pair = build(target), build(DRAFT, seed=1)
    # One compilation serves all: the rates are data.
    for length in (1.0, 2.0, 3.0, 4.0, 5.0):
        per_step, per_token, steps = timed(pair, length, args)
        print(f"{length:9.1f}  {per_step:15.2f}  {steps:5d}  {per_token:12.2f}")


if __name__ == "__main__":
    main()
