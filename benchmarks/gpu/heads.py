"""Times decoding with trained draft heads at real size on an NVIDIA GPU, with random weights.

python -m benchmarks.gpu.heads --out benchmarks/results/h200_heads.json
"""

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import specjax
from benchmarks.gpu.decode import (
    SMALL,
    TARGET,
    Effort,
    Timed,
    describe,
    forward,
    measure,
    read_ms,
    speculate,
)
from benchmarks.gpu.inputs import BYTES_PER_US
from benchmarks.record import environment, gpu_parser, parse_on_gpu, save
from specjax.models import (
    DFlashConfig,
    Eagle3Config,
    TransformerConfig,
    build,
    build_dflash,
    build_eagle3,
    dflash_drafter,
    eagle3_drafter,
)

# Qwen3 8B; its sizes, as those of Llama 3.1 8B in `decode`.
QWEN3 = TransformerConfig(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=False,
    max_position_embeddings=40960,
    qk_norm=True,
    dtype="bfloat16",
)


class Step(NamedTuple):
    """A speculative step to time: requests, drafted tokens, tokens that it is to emit."""

    batch: int
    k: int
    length: float


SMOKE_STEPS = (Step(1, 2, 2.0),)


class Setup(NamedTuple):
    """A target with a head, what the head has to read, and which steps are timed.

    Attributes:
      target: model.
      config: of the target.
      drafter: of the head.
      once_bytes: weights that the head reads once per step.
      draft_bytes: weights that it reads for each drafted token.
      steps: to time.
    """

    target: specjax.Model
    config: TransformerConfig
    drafter: specjax.Drafter
    once_bytes: int
    draft_bytes: int
    steps: tuple[Step, ...]


def num_bytes(tree: Any) -> int:
    """Bytes of the arrays of a pytree."""
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def eagle3(smoke: bool) -> Setup:
    """Llama 3.1 8B and its EAGLE-3 head: three taps, 32000 draft tokens, the target's embeddings.

    Of what the last step committed only keys and values are needed, which are `fc` and one product
    of the layer; each draft reads all of the layer and the lm_head.
    """
    config, draft_vocab, taps = TARGET, 32000, (2, 16, 29)
    if smoke:
        config, draft_vocab, taps = dataclasses.replace(config, **SMALL), 320, (0, 1)
    layer = dataclasses.replace(config, num_hidden_layers=1)
    head = Eagle3Config(layer, config.hidden_size, draft_vocab, taps)
    target, params = build(config), build_eagle3(head, seed=1)
    # A part of the vocabulary, in no order.
    ids = jax.random.permutation(jax.random.key(2), config.vocab_size)[:draft_vocab]
    params["token_map"] = ids.astype(jnp.int32)
    return Setup(
        target,
        config,
        eagle3_drafter(target, head, params),
        once_bytes=num_bytes((params["fc"], params["layer"]["attention"]["qkv"])),
        draft_bytes=num_bytes((params["layer"], params["head"])),
        steps=SMOKE_STEPS if smoke else (Step(1, 5, 3.7), Step(1, 3, 3.0), Step(8, 5, 3.7)),
    )


def dflash(smoke: bool) -> Setup:
    """Qwen3 8B and a DFlash head of 5 layers, block 7, whose row of the last token drafts, too.

    The head reads what the last step committed, its keys and values alone, and drafts in one pass.
    """
    config, taps, layers = QWEN3, (2, 10, 18, 26, 34), 5
    if smoke:
        config, taps, layers = dataclasses.replace(config, **SMALL), (0, 1), 1
    layer = dataclasses.replace(config, num_hidden_layers=layers)
    head = DFlashConfig(
        layer,
        config.vocab_size,
        taps,
        block_size=2 if smoke else 7,
        mask_token_id=config.vocab_size - 1,
        sample_from_anchor=True,
    )
    target, params = build(config), build_dflash(head, seed=1)
    keys_and_values = 2 * config.num_key_value_heads * config.head_dim * config.hidden_size
    context = layers * keys_and_values * jnp.dtype(config.dtype).itemsize
    return Setup(
        target,
        config,
        dflash_drafter(target, head, params),
        once_bytes=num_bytes(params) + context + target.params["head"].nbytes,
        draft_bytes=0,
        steps=SMOKE_STEPS if smoke else (Step(1, 7, 4.6),),
    )


HEADS = {"Llama 3.1 8B, EAGLE-3": eagle3, "Qwen3 8B, DFlash": dflash}


def propose(setup: Setup, step: Step, effort: Effort) -> Timed:
    """Drafting alone: what the head does in a step, after a context."""
    config = specjax.SpeculativeConfig(num_speculative_tokens=step.k)
    drafter, width = setup.drafter, len(setup.drafter.taps) * setup.config.hidden_size
    size, room = (step.batch, step.k + 1), effort.context + effort.room
    state = drafter.init(drafter.params, step.batch, room)
    place = jnp.arange(step.k + 1, dtype=jnp.int32)[None]
    features = jax.random.normal(jax.random.key(3), (*size, width), setup.config.dtype)
    text = jax.random.randint(jax.random.key(4), (step.batch, room), 0, 100, jnp.int32)
    hidden = jnp.zeros((step.batch, setup.config.hidden_size), setup.config.dtype)
    keys = jax.random.split(jax.random.key(5), step.batch)

    def loop(state: Any, drafter: specjax.Drafter, features: Any, text: Any, keys: Any) -> Any:
        def run(i: jax.Array, carry: Any) -> Any:
            state, tokens = carry
            lengths = jnp.full((step.batch,), effort.context, jnp.int32) + i
            positions = lengths[:, None] + place
            # What is drafted is committed, so that no draft can be left out.
            fed = jnp.concatenate([tokens, tokens[:, :1]], axis=1)
            state = drafter.extend(drafter.params, state, fed, positions, features)
            inputs = specjax.DraftInputs(
                keys=keys,
                positions=lengths + step.k + 1,
                num_tokens=jnp.full((step.batch,), step.k, jnp.int32),
                temperature=jnp.ones((step.batch,)),
            )
            draft, state = drafter.propose(
                drafter.params, state, text, hidden, inputs, config=config, implementation=None
            )
            return state, draft.token_ids

        tokens = jnp.zeros((step.batch, step.k), jnp.int32)
        state, tokens = jax.lax.fori_loop(0, effort.iterations, run, (state, tokens))
        return tokens, state

    return Timed(loop, state, (drafter, features, text, keys), effort.iterations)


def cases(setup: Setup, step: Step, effort: Effort) -> Iterator[tuple[str, Timed, float]]:
    """Names, what is timed, and the milliseconds that its weights take to be read."""
    read = read_ms(setup.target, setup.config)
    drafts = (setup.once_bytes + step.k * setup.draft_bytes) / BYTES_PER_US / 1e3
    if step.k == setup.steps[0].k:
        rows = forward(setup.target, step.k + 1, step.batch, effort)
        yield f"target, {step.k + 1} tokens", rows, read
        yield f"drafts, K = {step.k}", propose(setup, step, effort), drafts
    options = {"k": step.k, "length": step.length}
    steps = speculate(setup.target, setup.drafter, step.batch, effort, **options)
    yield f"step, K = {step.k}", steps, read + drafts


def run(name: str, effort: Effort, args: argparse.Namespace, kept: list[Any]) -> None:
    """Measures one kind of head, and saves after every case."""
    setup = HEADS[name](args.smoke)
    section: dict[str, Any] = {"environment": environment(), "cases": []}
    for step in setup.steps:
        if step.batch not in args.batch:
            continue
        for case, timed, read in cases(setup, step, effort):
            (record,) = measure([(case, timed)], step.batch, effort, kept)
            record |= {"K": step.k, "read_ms": read}
            if "tokens_per_s" in record:
                # At the mean that was asked for; the run's own differs by its coins.
                length = step.length
                record |= {"length": length, "tokens_per_s": 1e3 * length / record["median_ms"]}
            section["cases"].append(record)
            save(args.out, {name: section})
            print(describe(record, {case: read}), flush=True)


def main() -> None:
    parser = gpu_parser(__doc__)
    parser.add_argument("--head", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="batch sizes")
    args = parse_on_gpu(parser)
    effort = Effort(context=16, room=64, iterations=3, runs=2) if args.smoke else Effort()
    kept: list[Any] = []
    for name in args.head:
        print(f"{name}:", flush=True)
        run(name, effort, args, kept)


if __name__ == "__main__":
    main()
