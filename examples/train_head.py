"""Trains an EAGLE-3 head, which drafts from the embedded target's hidden states.

python examples/train_pair.py --archive corpus.tar.xz     # gathers the text
python examples/train_head.py --from-archive corpus.tar.xz --out head
python examples/train_head.py --tiny                      # a rehearsal, on Python's own library
"""

import argparse
import json
import pathlib
import time

import jax
import jax.numpy as jnp
from pair import corpus, heads, judgement, losses, tokens, training

from specjax.file_io import replace_file
from specjax.models import load, load_tokenizer, pretrained_folder, save_eagle3


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--taps", type=int, nargs="+", default=[2, 4, 5], help="layers before each tap")
    add("--target", type=pathlib.Path, default=pretrained_folder("target"))
    add("--from-archive", type=pathlib.Path, help="read the corpus from there")
    add("--packages", nargs="*", default=list(corpus.PACKAGES), help="distributions to read")
    add("--packages-from", help="a site-packages folder; default: this interpreter's")
    add("--heldout-per-thousand", type=int, default=13)
    add("--out", type=pathlib.Path, default=pathlib.Path("head"))
    add("--checkpoints", type=pathlib.Path, help="default: OUT/checkpoints")
    add("--minutes", type=float, default=3.0, help="of training, if no steps are given")
    add("--steps", type=int)
    add("--batch", type=int, default=32)
    add("--length", type=int, default=512, help="tokens of a sequence")
    add("--proposal", type=int, default=4, help="drafts of a proposal in training")
    add("--peak-rate", type=float, default=5e-3)
    add("--optimizer", choices=("muon", "adamw"), default="muon")
    add("--steps-per-call", type=int, default=20)
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--tiny", action="store_true", help="few steps on little text")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.tiny:
        args.packages, args.minutes = [], 0.1
        args.batch, args.length, args.steps_per_call = 2, 64, 5
    return args


def texts_of(args: argparse.Namespace) -> tuple[list[bytes], list[bytes]]:
    """The training side of the corpus and its held-out side."""
    if args.from_archive:
        gathered = corpus.read_archive(args.from_archive)
    else:
        per_thousand = args.heldout_per_thousand
        gathered = corpus.collect(args.packages, args.packages_from, per_thousand)
    train, heldout = (corpus.texts_of(gathered, side) for side in ("train", "heldout"))
    return (train[::20], heldout[:2]) if args.tiny else (train, heldout)


def main() -> None:
    """Gathers or reads the corpus, trains the head, writes it and says how good it is."""
    args, start = arguments(), time.perf_counter()
    target, target_config = load(args.target, "float32")
    head = heads.head_config(target_config, tuple(args.taps))
    train, heldout = texts_of(args)
    tokenizer = load_tokenizer(args.target)
    data = jnp.asarray(tokens.one_row(tokens.encode(tokenizer, train), args.seed))
    rows = tokens.encode(tokenizer, heldout[::4])
    print(f"{data.size} tokens after {time.perf_counter() - start:.0f} s", flush=True)
    checkpoints = args.checkpoints or args.out / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    recipe = training.Recipe(
        steps=args.steps,
        minutes=args.minutes,
        batch=args.batch,
        length=args.length,
        peak_rate=args.peak_rate,
        steps_per_call=args.steps_per_call,
        seed=args.seed,
        attention="xla",
        dtype=args.dtype,
        optimizer=args.optimizer,
    )
    loss = losses.unrolled_distillation(head, recipe, target_config, args.proposal)
    params = heads.first_params(head, target_config, target.params, args.seed)
    params, log = training.train(
        "head", None, recipe, loss, data, checkpoints, extra=target.params, params=params
    )
    save_eagle3(args.out, params, head)
    # As it ships, rounded to bfloat16.
    params = training.cast(training.cast(params, "bfloat16"), "float32")
    side = (target_config, target.params)
    rates = judgement.judge_head(side, head, params, rows, args.length, args.proposal)
    device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
    report = {"device": device, "seed": args.seed, "seconds": time.perf_counter() - start}
    report |= {"head": log, "heldout": {"acceptance": rates}}
    text = json.dumps(report, indent=1) + "\n"
    with replace_file(args.out / "training.json") as spare:
        spare.write_text(text, encoding="utf-8")
    for step, value in enumerate(rates):
        print(f"draft {step}: sum min(p, q) {value:.4f}, given that those before it were kept")
    print(f"{time.perf_counter() - start:.0f} seconds on {device}")


if __name__ == "__main__":
    main()
