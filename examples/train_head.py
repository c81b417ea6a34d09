"""Trains the head that drafts from the embedded target's hidden state.

python examples/train_head.py --packages-from path/to/site-packages --out head
python examples/train_head.py --tiny          # a rehearsal, on Python's own library
"""

import argparse
import dataclasses
import json
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
from pair import corpus, judgement, losses, tokens, training

from specjax.file_io import replace_file
from specjax.models import (
    HeadConfig,
    TransformerConfig,
    build_head,
    load,
    load_tokenizer,
    pretrained_folder,
    save_head,
)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--target", type=pathlib.Path, default=pretrained_folder("target"))
    add("--from-archive", type=pathlib.Path, help="read the corpus from there")
    add("--packages", nargs="*", default=list(corpus.PACKAGES), help="distributions to read")
    add("--packages-from", help="a site-packages folder; default: this interpreter's")
    add("--heldout-per-thousand", type=int, default=13)
    add("--out", type=pathlib.Path, default=pathlib.Path("head"))
    add("--checkpoints", type=pathlib.Path, help="default: OUT/checkpoints")
    add("--minutes", type=float, default=15.0, help="of training, if no steps are given")
    add("--steps", type=int)
    add("--batch", type=int, default=4)
    add("--length", type=int, default=256, help="tokens of a sequence, and of the head's window")
    add("--proposal", type=int, default=3, help="drafts of a proposal in training")
    add("--peak-rate", type=float, default=1e-2)
    add("--steps-per-call", type=int, default=20)
    add("--dtype", choices=("bfloat16", "float32"), default="float32")
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


def head_of(target: TransformerConfig, window: int) -> HeadConfig:
    """A head whose layer has the sizes of the target's layers."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    names += ("head_dim", "rms_norm_eps", "rope_theta")
    return HeadConfig(**{name: getattr(target, name) for name in names}, window=window)


def begin(config: HeadConfig, target: tuple[TransformerConfig, Any], seed: int) -> Any:
    """The target's last layer and norm, reading the sum of token and state; little is random."""
    params, one = build_head(config, seed), jnp.eye(config.hidden_size)
    layers, norm = target[1]["layers"], target[1]["norm"]

    def copied(own: Any, other: Any) -> Any:
        """What a plain layer has of the target's, which may have biases and more norms."""
        if isinstance(own, dict):
            return {name: copied(own[name], other[name]) for name in own}
        return other + (target[0].norm_offset if other.ndim == 1 else 0.0)

    last = {"layer": layers[max(layers)], "norm": norm}
    mix = 0.5 * jnp.concatenate([one, 0 * one, one]) + 0.25 * params["mix"]
    return params | {name: copied(params[name], last[name]) for name in last} | {"mix": mix}


def main() -> None:
    """Gathers or reads the corpus, trains the head, writes it and says how good it is."""
    args, start = arguments(), time.perf_counter()
    target, target_config = load(args.target, "float32")
    config = head_of(target_config, args.length)
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
        optimizer="muon",
    )
    loss = losses.unrolled_distillation(config, target_config, recipe, args.proposal)
    params = begin(config, (target_config, target.params), args.seed)
    params, log = training.train(
        "head", None, recipe, loss, data, checkpoints, extra=target.params, params=params
    )
    save_head(args.out, params, config)
    # As it ships, rounded to bfloat16.
    params = training.cast(training.cast(params, "bfloat16"), "float32")
    exact = dataclasses.replace(recipe, dtype="float32")
    sides = (target_config, target.params), (config, params)
    rates = judgement.judge_head(*sides, rows, exact, args.proposal)
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
