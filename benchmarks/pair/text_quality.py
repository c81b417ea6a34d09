"""Says whether a generated text repeats its lines, and whether it is Python.

python -m benchmarks.pair.text_quality

Prints, by temperature, how many texts of the embedded target loop. Prompts are the beginnings of
the held-out files.
"""

import argparse
import ast
import pathlib
import warnings

import jax
import numpy as np

import specjax
from benchmarks.pair.heldout import HELDOUT, batches, read_heldout
from specjax.models import load, load_tokenizer, pretrained_folder

# A text loops if a smaller share of its lines is distinct.
LOOP = 0.5
# Lines at the end of a text that may be left out: of a statement that the limit cut.
MAX_UNFINISHED = 3
# What ends a docstring, or a block without a statement, that the limit cut.
ENDINGS = ("", '"""', "\n            pass")


def distinct_share(text: str) -> float:
    """Returns the share of distinct lines among those that are not blank; 1 without any."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return len(set(lines)) / len(lines) if lines else 1.0


def unfinished_lines(text: str) -> int | None:
    """Returns the number of lines at the end without which a text parses as Python, or None.

    At most `MAX_UNFINISHED` are left out, and a docstring that is open there is closed.
    """
    lines = text.split("\n")
    for number in range(min(MAX_UNFINISHED, len(lines) - 1) + 1):
        whole = "\n".join(lines[: len(lines) - number])
        if any(_parses(whole + ending) for ending in ENDINGS):
            return number
    return None


def _parses(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heldout", type=pathlib.Path, default=HELDOUT)
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0, 0.25, 0.4, 0.5, 0.7, 1]
    )
    parser.add_argument("--context", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--positions", type=int, nargs="+", default=[128, 256], help="new tokens")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder = pretrained_folder("target")
    (target, config), tokenizer = load(folder), load_tokenizer(folder)
    rows = read_heldout(args.heldout, folder, config.bos_token_id).rows
    prompts = np.stack([row[: args.context] for row in rows if len(row) >= args.context])
    numbered = np.concatenate([prompts, np.arange(len(prompts))[:, None]], axis=1)
    print(f"{len(prompts)} prompts, seed {args.seed}: texts of which fewer than half the lines are")
    print("distinct, and the mean share of distinct lines\n")
    titles = [f"{number} tokens loop | distinct" for number in args.positions]
    print(f"| temperature | {' | '.join(titles)} |\n|---|{'---|---|' * len(titles)}")
    for temperature in args.temperatures:
        key = jax.random.fold_in(jax.random.key(args.seed), round(1e6 * temperature))
        texts: list[list[int]] = []
        for piece, size in batches(numbered, args.batch, f"temperature {temperature:g}"):
            output = specjax.generate(
                target,
                None,
                (piece[:, :-1], np.full(len(piece), args.context, np.int32)),
                keys=jax.vmap(jax.random.fold_in, (None, 0))(key, piece[:, -1]),
                max_new_tokens=max(args.positions),
                temperature=temperature,
            )
            texts += np.asarray(output.token_ids)[:size, args.context :].tolist()
        cells = []
        for number in args.positions:
            shares = np.array([distinct_share(tokenizer.decode(ids[:number])) for ids in texts])
            cells.append(f"{np.mean(shares < LOOP):.0%} | {shares.mean():.2f}")
        print(f"| {temperature:g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
