"""Times steps and prompts with `row_invariant` and without it, on an NVIDIA GPU.

python -m benchmarks.gpu.row_invariance --out benchmarks/results/h100_row_invariance.json

Four layers of Llama 3.1 8B with random weights. Times are scaled to 32 layers, without the head.
"""

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.decode import TARGET
from benchmarks.record import environment, gpu_parser, parse_on_gpu, save
from specjax.models import TransformerConfig, build
from specjax.types import Model

LAYERS, STEPS, RUNS = 4, 20, 3
# Requests, tokens of each, and the position of the first.
SHAPES = [(1, 1, 1100), (1, 4, 1100), (1, 8, 1100), (8, 4, 1100), (64, 1, 1100)]
SHAPES += [(32, 4, 1100), (64, 4, 1100), (1, 1024, 0)]
SMOKE = TransformerConfig(256, 64, 128, 1, 4, 2, 32, tie_word_embeddings=False)


def milliseconds(model: Model, shape: tuple[int, int, int], num_slots: int) -> float:
    """Returns the shortest of several runs' mean time of a step."""
    batch, tokens, start = shape
    positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32) + start, (batch, tokens))

    @functools.partial(jax.jit, donate_argnums=1)
    def steps(params: Any, carry: Any) -> Any:
        def step(_: Any, carry: Any) -> Any:
            cache, ids = carry
            hidden, cache = model.apply(params, ids, positions, cache)
            # No state is as large, which XLA does not know: the steps stay chained.
            return cache, ids + (hidden[:, :, 0] > 1e9).astype(jnp.int32)

        return jax.lax.fori_loop(0, STEPS, step, carry)

    carry = model.init_cache(batch, num_slots), jnp.ones((batch, tokens), jnp.int32)
    carry = jax.block_until_ready(steps(model.params, carry))
    times = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        carry = jax.block_until_ready(steps(model.params, carry))
        times.append(time.perf_counter() - begin)
    return min(times) / STEPS * 1e3


def main() -> None:
    parser = gpu_parser(__doc__)
    args = parse_on_gpu(parser)
    section: dict[str, Any] = {"environment": environment(), "cases": []}
    config = SMOKE if args.smoke else dataclasses.replace(TARGET, num_hidden_layers=LAYERS)
    default = build(config)
    invariant = build(config, default.params, row_invariant=True)
    scale = TARGET.num_hidden_layers / config.num_hidden_layers
    for shape in [(2, 2, 20)] if args.smoke else SHAPES:
        slots = 64 if args.smoke else 2048
        one, other = (milliseconds(model, shape, slots) * scale for model in (default, invariant))
        record = dict(zip(("B", "T", "position"), shape, strict=True))
        record |= {"default_ms": one, "row_invariant_ms": other, "ratio": other / one}
        section["cases"].append(record)
        save(args.out, {"row_invariance": section})
        name = f"B={shape[0]} T={shape[1]} at {shape[2]}"
        print(
            f"{name:20} {one:.2f} ms, row-invariant {other:.2f} ms, {other / one:.3f}", flush=True
        )


if __name__ == "__main__":
    main()
