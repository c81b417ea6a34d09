r"""Tokens per step that block verification gains over the standard rule on the pair, by K and T.

python -m benchmarks.pair.block_gain --out benchmarks/results/pair_block_gain.json

Both rules emit texts of the target's distribution. Given such a text, only the drafts decide where
its steps begin, and they are summed exactly. A step that has accepted i tokens accepts the next
token x of the text with probability

    standard  min(1, q(x) / p(x))
    block     min(1, q(x) / (rho_i p(x)))        rho_0 = 1    rho_{i+1} = min(1, rho_i p(x) / q(x))

(`specjax.theory.rates_given_text`), since all drafts that agree with a text so far and are accepted
have the mass prod min(p, q), or rho_i prod q. So one text serves every K and both rules. `generate`
then counts its own steps.
"""

import argparse
import functools
import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from benchmarks.pair.heldout import HELDOUT, Pair, batches, logits_of, read_pair
from benchmarks.record import environment, save
from specjax.models import pretrained_folder

METHODS = ("standard", "block")


def acceptance_given_text(log_ratios: np.ndarray, k: int, method: str) -> np.ndarray:
    """P(token s + i is accepted) in a step that begins at token s and accepted i, [..., N - K, K].

    Args:
      log_ratios: f64[..., N], log p - log q of each token of a text after the tokens before it.
      k: K, most drafted tokens of a step.
      method: "standard" or "block".
    """
    steps = np.lib.stride_tricks.sliding_window_view(log_ratios[..., :-1], k, axis=-1)
    return specjax.theory.rates_given_text(steps, method)


def steps_and_tokens(chances: np.ndarray) -> np.ndarray:
    """Expected steps that begin within a text, and tokens they emit, [..., 2].

    Args:
      chances: f64[..., S, K], of `acceptance_given_text`.
    """
    reached = np.cumprod(chances, axis=-1)
    lengths = specjax.theory.acceptance_lengths(reached)[..., -1]
    emits = -np.diff(reached, axis=-1, prepend=1, append=0)  # Of 1 to K + 1 tokens.
    num_starts, most = emits.shape[-2:]
    begins = np.zeros((*emits.shape[:-2], num_starts + most))
    begins[..., 0] = 1
    for s in range(num_starts):
        begins[..., s + 1 : s + 1 + most] += begins[..., s, None] * emits[..., s, :]
    begins = begins[..., :num_starts]
    return np.stack([begins.sum(-1), (begins * lengths).sum(-1)], axis=-1)


@functools.partial(jax.jit, static_argnames="first")
def log_ratios_of(
    models: tuple[specjax.Model, specjax.Model],
    token_ids: jax.Array,
    temperature: jax.Array,
    *,
    first: int,
) -> jax.Array:
    """log p - log q, f32[B, L - first], of tokens `first` to L - 1."""
    logprobs = []
    for model in models:
        logits = logits_of(model, token_ids[:, :-1])[:, first - 1 :] / temperature
        rows = jax.nn.log_softmax(logits, axis=-1)
        logprobs.append(jnp.take_along_axis(rows, token_ids[:, first:, None], -1)[..., 0])
    return logprobs[0] - logprobs[1]


def keys_of(seed: int, temperature: float, numbers: np.ndarray) -> jax.Array:
    """One key per text."""
    key = jax.random.fold_in(jax.random.key(seed), round(1e6 * temperature))
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.asarray(numbers))


def texts_of(
    pair: Pair, prompts: np.ndarray, temperature: float, args: argparse.Namespace
) -> np.ndarray:
    """log p - log q, f64[P, N], of the tokens after each prompt, which the target wrote."""
    context = prompts.shape[1]
    length = args.new_tokens + max(args.num_speculative_tokens)
    numbered = np.concatenate([prompts, np.arange(len(prompts))[:, None]], axis=1)
    parts = []
    for piece, count in batches(numbered, args.batch, f"texts, T = {temperature:g}"):
        # Coupled, the text is that of plain decoding, in fewer steps.
        text = specjax.generate(
            pair.target,
            specjax.model_drafter(pair.draft),
            (piece[:, :-1], np.full(len(piece), context, np.int32)),
            keys=keys_of(args.seed, temperature, piece[:, -1]),
            config=specjax.SpeculativeConfig(rejection_sample_method="coupled"),
            max_new_tokens=length,
            temperature=temperature,
        ).token_ids[:, : context + length]
        models = (pair.target, pair.draft)
        parts.append(log_ratios_of(models, text, jnp.float32(temperature), first=context)[:count])
    return np.concatenate([np.asarray(part, np.float64) for part in parts])


def counted(
    pair: Pair, prompts: np.ndarray, temperature: float, k: int, args: argparse.Namespace
) -> np.ndarray:
    """Steps and tokens that `generate` counts, f64[2, P, 2], by method."""
    numbered = np.concatenate([prompts, np.arange(len(prompts))[:, None]], axis=1)
    by_method = []
    for method in METHODS:
        config = specjax.SpeculativeConfig(num_speculative_tokens=k, rejection_sample_method=method)
        parts = []
        for piece, count in batches(numbered, args.batch, f"{method}, K = {k}"):
            metrics = specjax.generate(
                pair.target,
                specjax.model_drafter(pair.draft),
                (piece[:, :-1], np.full(len(piece), prompts.shape[1], np.int32)),
                # Keys of their own, so that these texts are others.
                keys=keys_of(args.seed + 1, temperature, piece[:, -1]),
                config=config,
                max_new_tokens=args.new_tokens,
                temperature=temperature,
            ).metrics
            parts.append(np.stack([metrics.num_steps, metrics.num_emitted], axis=-1)[:count])
        by_method.append(np.concatenate(parts))
    return np.array(by_method, np.float64)


def record_of(sums: np.ndarray, files: np.ndarray) -> dict[str, Any]:
    """Tokens per step by method and their gain, with standard errors over files.

    Args:
      sums: f64[2, P, 2], steps and tokens of each text, by method.
      files: i32[P], the file of each text; texts of one file resemble each other.
    """
    record: dict[str, Any] = {}
    deviations = []
    for method, of_method in zip(METHODS, sums, strict=True):
        steps, tokens = (np.bincount(files, weights=of_method[:, i]) for i in range(2))
        ratio = float(tokens.sum() / steps.sum())
        # Relative: the sum over files is 0.
        deviations.append(tokens / tokens.sum() - steps / steps.sum())
        record |= {method: ratio, f"{method}_error": ratio * _error(deviations[-1])}
    gain = record["block"] / record["standard"]
    error = gain * _error(deviations[1] - deviations[0])
    return record | {"gain": gain - 1, "gain_error": error}


def _error(deviations: np.ndarray) -> float:
    """Standard error of a sum of independent terms, of those terms."""
    return math.sqrt(len(deviations) * deviations.var(ddof=1))


def prompts_of(pair: Pair, args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """i32[P, context] windows of the held-out files, spread over each, and i32[P] their files."""
    windows, files = [], []
    for number, row in enumerate(pair.heldout.rows[: args.files]):
        room = len(row) // args.context
        for start in sorted({i * room // args.prompts for i in range(args.prompts) if room}):
            windows.append(row[start * args.context : (start + 1) * args.context])
            files.append(number)
    return np.stack(windows), np.unique(files, return_inverse=True)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--target", type=pathlib.Path, default=pretrained_folder("target"))
    add("--draft", type=pathlib.Path, default=pretrained_folder("draft"))
    add("--heldout", type=pathlib.Path, default=HELDOUT, help="archive of held-out files")
    add("--temperatures", type=float, nargs="+", default=[0.4, 0.7, 1.0])
    add("--num-speculative-tokens", type=int, nargs="+", default=list(range(1, 9)))
    add("--counted", type=int, nargs="*", default=[4], help="K of the decodes counted")
    add("--counted-texts", type=int, default=256, help="how many of the prompts those decode")
    add("--files", type=int, help="default: all that are long enough")
    add("--prompts", type=int, default=20, help="of each file at most")
    add("--context", type=int, default=128, help="tokens of a prompt")
    add("--new-tokens", type=int, default=128, help="tokens after it")
    add("--batch", type=int, default=128)
    add("--seed", type=int, default=0)
    add("--out", type=pathlib.Path, help="write the JSON there")
    args = parser.parse_args()

    pair = read_pair(args)
    prompts, files = prompts_of(pair, args)
    sections: dict[str, list[dict[str, Any]]] = {"expected": [], "counted": []}

    def note(section: str, temperature: float, k: int, sums: np.ndarray, files: np.ndarray) -> None:
        record = {"temperature": temperature, "K": k, **record_of(sums, files)}
        sections[section].append(record)
        print(section, json.dumps(record), flush=True)

    for temperature in args.temperatures:
        log_ratios = texts_of(pair, prompts, temperature, args)
        for k in args.num_speculative_tokens:
            text = log_ratios[:, : args.new_tokens + k]
            sums = [steps_and_tokens(acceptance_given_text(text, k, m)) for m in METHODS]
            note("expected", temperature, k, np.stack(sums), files)
    some = np.unique(np.linspace(0, len(files) - 1, args.counted_texts).astype(int))
    for temperature in args.temperatures:
        for k in args.counted:
            sums = counted(pair, prompts[some], temperature, k, args)
            note("counted", temperature, k, sums, files[some])
    names = ("prompts", "context", "new_tokens", "seed")
    inputs = {name: getattr(args, name) for name in names}
    inputs |= {"files": int(files.max()) + 1, "texts": len(files), "counted_texts": len(some)}
    where = environment()
    result = {"environment": where, "inputs": inputs, **sections}
    save(args.out, result)


if __name__ == "__main__":
    main()
