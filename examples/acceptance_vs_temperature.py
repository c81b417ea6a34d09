"""Acceptance of the embedded pair against temperature: counted, and computed as sum min(p, q).

python examples/acceptance_vs_temperature.py --out acceptance_vs_temperature.png

All temperatures are requests of one batch: temperature is data.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import matplotlib.pyplot
import numpy as np

import specjax
from specjax.file_io import replace_file
from specjax.models import load, load_tokenizer, pretrained_folder

matplotlib.use("Agg")

TEMPERATURES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
PROMPTS = (
    "def fibonacci(n):\n",
    "import os\nimport sys\n\n\ndef main(",
    "class Stack:\n    def __init__(self):\n",
    "    for index, value in enumerate(",
    "    if not isinstance(value, str):\n        raise ",
    '    """Return the mean of the values.',
    "try:\n    import numpy as np\nexcept ",
    "    def __repr__(self):\n        return ",
)


@jax.jit
def overlaps(pair, token_ids: jax.Array, temperature: jax.Array) -> jax.Array:
    """sum min(p, q), [B, L], of the token after each place."""
    size, length = token_ids.shape
    places = jnp.broadcast_to(jnp.arange(length), (size, length))
    laws = []
    for model in pair:
        hidden, _ = model.apply(model.params, token_ids, places, model.init_cache(size, length))
        logits = model.logits(model.params, hidden)
        laws.append(jax.nn.softmax(logits / temperature[:, None, None]))
    return jnp.minimum(*laws).sum(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=pretrained_folder("target"))
    parser.add_argument("--draft", default=pretrained_folder("draft"))
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("acceptance_vs_temperature.png")
    )
    args = parser.parse_args()

    target, _ = load(args.target)
    draft, _ = load(args.draft)
    tokenizer = load_tokenizer(args.target)
    rows = [tokenizer.encode(text).ids for text in PROMPTS]
    prompts = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for prompt, row in zip(prompts, rows, strict=True):
        prompt[: len(row)] = row
    repeats = len(TEMPERATURES)
    lengths = np.tile(np.array([len(row) for row in rows], np.int32), repeats)
    temperature = np.repeat(np.array(TEMPERATURES, np.float32), len(rows))

    generation = specjax.generate(
        target,
        specjax.model_drafter(draft),
        (np.tile(prompts, (repeats, 1)), lengths),
        keys=jax.random.key(args.seed),
        config=specjax.SpeculativeConfig(num_speculative_tokens=args.num_speculative_tokens),
        max_new_tokens=args.max_new_tokens,
        temperature=temperature,
    )

    # A step begins behind a recovered or bonus token; with one place left nothing is drafted.
    origins = np.asarray(generation.origins)
    ends = (origins == specjax.Origin.RECOVERED) | (origins == specjax.Origin.BONUS)
    last = (lengths + args.max_new_tokens - 1)[:, None]
    ends &= np.arange(origins.shape[1]) + 1 < last
    token_ids = jnp.maximum(generation.token_ids, 0)
    overlap = np.where(ends, np.asarray(overlaps((target, draft), token_ids, temperature)), 0.0)

    def by_temperature(values) -> np.ndarray:
        return np.asarray(values).reshape(repeats, -1).sum(1)

    metrics = generation.metrics
    drafted = by_temperature(metrics.num_drafted[:, 0])
    accepted = by_temperature(metrics.num_accepted[:, 0]) / drafted
    expected = by_temperature(overlap.sum(1)) / by_temperature(ends.sum(1))
    per_step = by_temperature(metrics.num_emitted) / by_temperature(metrics.num_steps)
    errors = np.sqrt(np.maximum(expected * (1 - expected), 0) / drafted)

    print("temperature  first drafts  accepted  sum min(p, q)  tokens per step")
    for row in zip(TEMPERATURES, drafted, accepted, expected, per_step, strict=True):
        print("{:11.2f}  {:12d}  {:8.3f}  {:13.3f}  {:15.2f}".format(*row))
    distance = np.abs(accepted - expected) / np.maximum(errors, np.finfo(np.float32).eps)
    print(f"largest difference: {distance.max():.1f} standard errors")

    figure, (left, right) = matplotlib.pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    left.errorbar(TEMPERATURES, accepted, errors, fmt="o", capsize=3, label="accepted, counted")
    left.plot(TEMPERATURES, expected, label="mean of sum min(p, q) at the same places")
    left.set(xlabel="temperature", ylabel="acceptance of the first draft", ylim=(0, 1))
    left.legend()
    right.plot(TEMPERATURES, per_step, "o-")
    most = args.num_speculative_tokens + 1
    right.set(xlabel="temperature", ylabel="tokens per step", ylim=(1, most))
    with replace_file(args.out) as spare:
        figure.savefig(spare, dpi=120)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
