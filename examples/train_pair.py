"""Trains the target and draft that ship with specjax, from nothing: corpus, tokenizer, models.

python examples/train_pair.py --archive corpus.tar.xz      # gathers the text, trains nothing
python examples/train_pair.py --from-archive corpus.tar.xz --out pair
"""

import argparse
import dataclasses
import json
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pair import corpus, judgement, losses, tokens, training

from specjax.file_io import replace_file
from specjax.models import TransformerConfig, save

TARGET = TransformerConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=736,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    bos_token_id=0,
    eos_token_ids=(0,),
)
DRAFT = dataclasses.replace(
    TARGET,
    hidden_size=160,
    intermediate_size=448,
    num_hidden_layers=2,
    num_attention_heads=5,
    num_key_value_heads=1,
    head_dim=32,
)
_TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
_TOKENIZER_BYTES = 60_000_000


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--archive", type=pathlib.Path, help="write the corpus there and stop")
    add("--heldout-archive", type=pathlib.Path, help="with --archive: the held-out side alone")
    add("--from-archive", type=pathlib.Path, help="read the corpus from there")
    add("--packages", nargs="*", default=list(corpus.PACKAGES), help="distributions to read")
    add("--packages-from", help="a site-packages folder; default: this interpreter's")
    add("--heldout-per-thousand", type=int, default=13)
    add("--out", type=pathlib.Path, default=pathlib.Path("pair"))
    add("--checkpoints", type=pathlib.Path, help="default: OUT/checkpoints")
    add("--minutes", type=float, default=6.0, help="of training, if no steps are given")
    add("--target-steps", type=int)
    add("--draft-steps", type=int)
    add("--batch", type=int, default=64)
    add("--length", type=int, default=1024)
    add("--steps-per-call", type=int, default=20)
    add("--attention", choices=("xla", "cudnn"), default="xla")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--tiny", action="store_true", help="a minute's rehearsal with toy sizes")
    add("--seed", type=int, default=0)
    return parser.parse_args()


def recipes(args: argparse.Namespace) -> tuple[training.Recipe, training.Recipe]:
    """How the target and the draft are trained."""
    target = training.Recipe(
        steps=args.target_steps,
        minutes=0.7 * args.minutes,
        batch=args.batch,
        length=args.length,
        peak_rate=2e-3,
        steps_per_call=args.steps_per_call,
        seed=args.seed,
        attention=args.attention,
        dtype=args.dtype,
    )
    draft = dataclasses.replace(
        target, steps=args.draft_steps, minutes=0.3 * args.minutes, peak_rate=3e-3
    )
    return target, dataclasses.replace(draft, seed=args.seed + 1)


def tokenized(
    texts: list[bytes], heldout: list[bytes], vocab_size: int, seed: int
) -> tuple[Any, jax.Array, list[np.ndarray]]:
    """The tokenizer, all training tokens in one row, and the held-out files' tokens."""
    order = np.random.default_rng(seed).permutation(len(texts))
    ends = np.cumsum([len(texts[i]) for i in order])
    sample = [texts[i] for i in order[: 1 + np.searchsorted(ends, _TOKENIZER_BYTES)]]
    tokenizer = tokens.train_tokenizer(sample, vocab_size)
    row = tokens.one_row(tokens.encode(tokenizer, texts), seed)
    size = sum(map(len, texts))
    print(f"{size} bytes are {row.size} tokens, {size / row.size:.2f} bytes each", flush=True)
    return tokenizer, jnp.asarray(row), tokens.encode(tokenizer, heldout)


def plot(path: pathlib.Path, curves: dict[str, list[tuple[int, float]]]) -> None:
    """The loss of both trainings over their steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    titles = {"target": "target: nats per token", "draft": "draft: distance to the target"}
    for axis, (name, curve) in zip(axes, curves.items(), strict=True):
        axis.plot(*zip(*curve, strict=True))
        axis.set(title=titles[name], xlabel="step", yscale="log")
    with replace_file(path) as spare:
        figure.savefig(spare, dpi=120)


def main() -> None:
    """Gathers or reads the corpus, trains the pair, writes it and says how good it is."""
    args, start = arguments(), time.perf_counter()
    if args.from_archive:
        gathered = corpus.read_archive(args.from_archive)
    else:
        per_thousand = args.heldout_per_thousand
        gathered = corpus.collect(args.packages, args.packages_from, per_thousand)
    if args.archive:
        corpus.write_archive(args.archive, gathered)
        if args.heldout_archive:
            corpus.write_archive(args.heldout_archive, gathered, ("heldout",))
        return
    target_config, draft_config = TARGET, DRAFT
    if args.tiny:
        target_config = dataclasses.replace(TARGET, vocab_size=512, **_TINY)
        draft_config = dataclasses.replace(DRAFT, vocab_size=512, **_TINY)
    heldout = corpus.texts_of(gathered, "heldout")
    tokenizer, data, rows = tokenized(
        corpus.texts_of(gathered, "train"), heldout, target_config.vocab_size, args.seed
    )
    print(f"corpus and tokens after {time.perf_counter() - start:.0f} s", flush=True)
    checkpoints = args.checkpoints or args.out / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    target_recipe, draft_recipe = recipes(args)
    loss = losses.next_token(target_config, target_recipe)
    target, target_log = training.train(
        "target", target_config, target_recipe, loss, data, checkpoints
    )
    save(args.out / "target", target, target_config, tokenizer)
    # The target as it ships, rounded to bfloat16, is what the draft must agree with.
    target = training.cast(training.cast(target, "bfloat16"), "float32")
    loss = losses.distillation(draft_config, target_config, draft_recipe)
    draft, draft_log = training.train(
        "draft", draft_config, draft_recipe, loss, data, checkpoints, extra=target
    )
    save(args.out / "draft", draft, draft_config, tokenizer)
    draft = training.cast(training.cast(draft, "bfloat16"), "float32")
    exact = dataclasses.replace(target_recipe, dtype="float32", attention="xla")
    result = judgement.judge((target_config, target), (draft_config, draft), rows, heldout, exact)
    plot(args.out / "training.png", {"target": target_log["curve"], "draft": draft_log["curve"]})
    device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
    report = {"device": device, "seed": args.seed, "seconds": time.perf_counter() - start}
    report |= {"target": target_log, "draft": draft_log, "heldout": result}
    text = json.dumps(report, indent=1) + "\n"
    with replace_file(args.out / "training.json") as spare:
        spare.write_text(text, encoding="utf-8")
    for name, value in result.items():
        print(f"{name:24} {value:.4f}")
    print(f"{'seconds':24} {time.perf_counter() - start:.0f}  on {device}")


if __name__ == "__main__":
    main()
