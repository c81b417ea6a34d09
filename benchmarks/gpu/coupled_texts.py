"""How many coupled texts part from plain decoding's on an NVIDIA GPU, by rounding of the rows.

python -m benchmarks.gpu.coupled_texts --out /tmp/coupled_texts.json

A forward of K + 1 tokens and one of a single token round the logits of a row otherwise. Where the
best two scores of a draw are that near, the texts part. The embedded pair decodes many requests,
each with keys of its own, with coupled drafts and without any.
"""

import argparse
import pathlib
import shlex
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import specjax
from benchmarks.gpu.verify import environment, save
from specjax.models import load, load_tokenizer, pretrained_folder

PAIR = ("target", "draft")
TEXTS = ("import numpy as np", "The model reads", "def main(", "In the year")


def texts(output: specjax.Generation) -> list[list[int]]:
    """The tokens of each request."""
    ids, lengths = np.asarray(output.token_ids), np.asarray(output.lengths)
    return [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)]


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """The index of the first token that differs, or None."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (one, other) in pairs if one != other), None)


def measure(
    dtype: str, k: int, requests: int, new_tokens: int, roles: tuple[str, str] = PAIR
) -> dict[str, Any]:
    """Counts the texts that part, and says after how many generated tokens they do."""
    target, draft = (load(pretrained_folder(role), dtype)[0] for role in roles)
    tokenizer = load_tokenizer(pretrained_folder("target"))
    rows = [tokenizer.encode(TEXTS[b % len(TEXTS)]).ids for b in range(requests)]
    keys = jax.vmap(jax.random.key)(np.arange(requests))
    options = dict(keys=keys, max_new_tokens=new_tokens, temperature=0.8)
    config = specjax.SpeculativeConfig(k, rejection_sample_method="coupled")
    drafter = specjax.model_drafter(draft)
    coupled = specjax.generate(target, drafter, rows, config=config, **options)
    plain = specjax.generate(target, None, rows, **options)
    found = [first_difference(*pair) for pair in zip(texts(coupled), texts(plain), strict=True)]
    places = sorted(i - len(x) for i, x in zip(found, rows, strict=True) if i is not None)
    return {
        "case": f"K={k} {dtype}",
        "requests": requests,
        "new_tokens": new_tokens,
        "texts_that_part": len(places),
        "share": len(places) / requests,
        "tokens_before_parting": places,
        "match_rate": float(coupled.metrics.draft_acceptance_rate),
        "mean_acceptance_length": float(coupled.metrics.mean_acceptance_length),
    }


def cases(smoke: bool) -> Iterator[dict[str, Any]]:
    """The records, of every dtype and K."""
    if smoke:
        # The draft model drafts for itself: its two layers compile faster than eight.
        yield measure("float32", 2, 2, 4, ("draft", "draft"))
        return
    for dtype in ("bfloat16", "float32"):
        for k in (1, 3, 5):
            yield measure(dtype, k, 256, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="the JSON; other sections there are kept")
    parser.add_argument("--smoke", action="store_true", help="rehearse: tiny, on a CPU, no file")
    args = parser.parse_args()
    if not args.smoke and jax.default_backend() != "gpu":
        sys.exit("JAX sees no GPU here; --smoke rehearses on a CPU.")
    command = shlex.join(["python", "-m", "benchmarks.gpu.coupled_texts", *sys.argv[1:]])
    section: dict[str, Any] = {"environment": environment() | {"command": command}, "cases": []}
    for record in cases(args.smoke):
        section["cases"].append(record)
        save(None if args.smoke else args.out, "texts", section)
        print(
            f"{record['case']:16} {record['texts_that_part']} of {record['requests']} texts part "
            f"in {record['new_tokens']} tokens; {record['mean_acceptance_length']:.2f} a step",
            flush=True,
        )


if __name__ == "__main__":
    main()
