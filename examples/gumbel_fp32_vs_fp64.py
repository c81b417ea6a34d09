r"""Gumbel noise in float32 and float64, flat and in two levels: time, and the error of its tail.

python examples/gumbel_fp32_vs_fp64.py --out gumbel_fp32_vs_fp64.png

The error is computed from the arithmetic itself, without samples. One likely token competes with
V - 1 rare ones of equal probability. For many values of the likely token's noise, bisection over
the random words counts those with which a rare token wins. That gives the sampler's distribution,
with all rounding. The error is its total variation from the requested distribution.

On a GPU it also times both noises on the kernels, call after call in one jitted loop.
"""

import argparse
import functools
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot
import numpy as np

import specjax
from specjax.core.noise import SAMPLING_BLOCK, gumbel_from_uniform, key_words, uniform_from_bits
from specjax.core.noise import gumbel as gumbel_at
from specjax.file_io import replace_file

matplotlib.use("Agg")
jax.config.update("jax_enable_x64", True)


class Noise(NamedTuple):
    """Gumbels as a function of `bits` random bits, `rising` with them or falling."""

    bits: int
    rising: bool
    dtype: type
    gumbel: Callable[[jax.Array], jax.Array]


def default_gumbel(words: jax.Array) -> jax.Array:
    """What `jax.random.gumbel` makes of the 23 bits that it uses."""
    u = words.astype(jnp.float32) * jnp.float32(2.0**-23)
    return -jnp.log(-jnp.log(jnp.maximum(u, jnp.finfo(jnp.float32).tiny)))


NOISES = {
    "FP32": Noise(
        32,
        False,
        jnp.float32,
        lambda words: gumbel_from_uniform(uniform_from_bits(words.astype(jnp.uint32))),
    ),
    "FP64": Noise(
        53,
        False,
        jnp.float64,
        lambda words: gumbel_from_uniform(uniform_from_bits(words.astype(jnp.uint64) << 11)),
    ),
    "jax.random.gumbel": Noise(23, True, jnp.float32, default_gumbel),
}
SCHEMES = {
    "flat, jax.random.gumbel": ("jax.random.gumbel", 1),
    "flat FP32": ("FP32", 1),
    "flat FP64": ("FP64", 1),
    "two-level FP32": ("FP32", 2),
    "two-level FP64": ("FP64", 2),
}


@functools.partial(jax.jit, static_argnames=("name", "num_nodes"))
def win_error(name: str, num_rare: jax.Array, ratio: jax.Array, num_nodes: int) -> jax.Array:
    """How far P(some rare token wins) is from the truth, f64.

    Each of `num_rare` tokens is `ratio` times as likely as the one that they stand against.
    """
    noise = NOISES[name]
    size = 2**noise.bits
    # Both sides of the comparison, in the arithmetic of the sampler.
    node_words = ((jnp.arange(num_nodes) + 0.5) * (size / num_nodes)).astype(jnp.int64)
    likely = noise.gumbel(node_words)
    weight = jnp.log(ratio).astype(noise.dtype)

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) // 2
        wins = weight + noise.gumbel(middle) > likely
        # Falling noise: words below `low` win. Rising: words from `high` on.
        up = wins != noise.rising
        return jnp.where(up, middle + 1, low), jnp.where(up, high, middle)

    bounds = (jnp.zeros_like(node_words), jnp.full_like(node_words, size))
    edge, _ = jax.lax.fori_loop(0, noise.bits + 1, halve, bounds)
    winning = (size - edge if noise.rising else edge) / size
    # The truth at the same quantiles of the likely token's noise: u ** ratio is P(it stays).
    u = (node_words + 0.5) / size
    log_stays = (jnp.log(u) if noise.rising else jnp.log1p(-u)) * ratio
    measured = -jnp.expm1(num_rare * jnp.log1p(-winning))
    return jnp.mean(measured + jnp.expm1(num_rare * log_stays))


def total_variation(scheme: str, vocab_size: int, rare: float, num_nodes: int) -> float:
    """Total variation of a sampler from the requested distribution; each rare token has `rare`."""
    name, levels = SCHEMES[scheme]
    likely = 1 - (vocab_size - 1) * rare

    def error(count: int, ratio: float) -> float:
        return float(win_error(name, float(count), ratio, num_nodes))

    if levels == 1:
        return abs(error(vocab_size - 1, rare / likely))
    # Blocks first: the likely token's against the others. Then its block's own rare tokens.
    block = SAMPLING_BLOCK
    mass = likely + (block - 1) * rare
    lost_blocks = error(vocab_size // block - 1, block * rare / mass)
    lost_inside = error(block - 1, rare / likely)
    inside = (block - 1) * rare / mass
    elsewhere = lost_blocks
    beside = (mass - lost_blocks) * (inside + lost_inside) - mass * inside
    return 0.5 * (abs(elsewhere) + abs(beside) + abs(elsewhere + beside))


def check_default() -> None:
    """`default_gumbel` is `jax.random.gumbel`, bit for bit."""
    key = jax.random.key(3)
    words = jax.random.bits(key, (1000,), jnp.uint32) >> 9
    same = default_gumbel(words) == jax.random.gumbel(key, (1000,), jnp.float32)
    assert bool(same.all()), "this version of JAX makes its Gumbels in another way"


@functools.partial(jax.jit, static_argnames="dtype")
def flat_sample(keys: jax.Array, logits: jax.Array, dtype: type) -> jax.Array:
    """A Gumbel for every token."""
    index = jnp.arange(logits.shape[1], dtype=jnp.uint32)
    noise = jax.vmap(lambda key: gumbel_at(key_words(key), 0, index, dtype))(keys)
    return jnp.argmax(logits.astype(dtype) + noise, axis=1)


@jax.jit
def default_sample(key: jax.Array, logits: jax.Array) -> jax.Array:
    return jax.random.categorical(key, logits)


def time_samplers(vocab_size: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of each scheme for 8 rows, in interleaved rounds."""
    logits = 3 * jax.random.normal(jax.random.key(0), (8, vocab_size), jnp.float32)
    keys = jax.random.split(jax.random.key(1), 8)

    def two_level(dtype: type) -> Callable[[], jax.Array]:
        return lambda: (
            specjax.gumbel_sample(
                logits,
                keys=keys,
                positions=0,
                stream=specjax.Stream.TARGET,
                options=specjax.Options(noise_dtype=dtype),
            ).token_ids
        )

    calls = {
        "flat, jax.random.gumbel": lambda: default_sample(keys[0], logits),
        "flat FP32": lambda: flat_sample(keys, logits, jnp.float32),
        "flat FP64": lambda: flat_sample(keys, logits, jnp.float64),
        "two-level FP32": two_level(jnp.float32),
        "two-level FP64": two_level(jnp.float64),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call().block_until_ready()
            # The first round compiles.
            seconds[name] += [time.perf_counter() - start] if number else []
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


def time_kernels(vocab_size: int, rounds: int) -> dict[str, float]:
    """Median microseconds of `gumbel_sample` on the GPU's kernels, 64 rows of bf16, by noise.

    The host's clock over a jitted loop of calls on rows that rotate beyond the L2 cache. Each
    call takes its positions from the tokens before it, so that XLA removes none.
    """
    size, turns = 64, 12
    draw = jax.jit(lambda key: 3 * jax.random.normal(key, (size, vocab_size), jnp.bfloat16))
    rows = [draw(key) for key in jax.random.split(jax.random.key(0), 8)]
    keys = jax.random.split(jax.random.key(1), size)
    zeros = jnp.zeros(size, jnp.int32)
    temperature = jnp.ones(size, jnp.float32)

    @functools.partial(jax.jit, static_argnames="dtype")
    def loop(rows, positions, streams, temperature, dtype):
        def turn(_, positions):
            for logits in rows:
                positions = specjax.gumbel_sample(
                    logits,
                    keys=keys,
                    positions=positions,
                    stream=streams,
                    temperature=temperature,
                    options=specjax.Options(noise_dtype=dtype),
                ).token_ids
            return positions

        return jax.lax.fori_loop(0, turns, turn, positions)

    seconds: dict[str, list[float]] = {"FP32": [], "FP64": []}
    for number in range(rounds + 1):
        for name, dtype in (("FP32", jnp.float32), ("FP64", jnp.float64)):
            start = time.perf_counter()
            loop(rows, zeros, zeros, temperature, dtype).block_until_ready()
            # The first round compiles.
            seconds[name] += [time.perf_counter() - start] if number else []
    calls = turns * len(rows)
    return {name: 1e6 * statistics.median(values) / calls for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="FP32 and FP64 Gumbel noise: time and tail error")
    parser.add_argument("--vocab-size", type=int, default=131072)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--nodes", type=int, default=2**13, help="values of the likely token's noise"
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gumbel_fp32_vs_fp64.png"))
    args = parser.parse_args()

    check_default()
    times = time_samplers(args.vocab_size, args.rounds)
    # The rare tokens' share of the mass, all of them together.
    shares = 2.0 ** -np.arange(1.0, 41.0)
    errors = {
        scheme: [
            total_variation(scheme, args.vocab_size, share / (args.vocab_size - 1), args.nodes)
            for share in shares
        ]
        for scheme in SCHEMES
    }
    print(f"V = {args.vocab_size}, 8 rows, {jax.devices()[0].device_kind}, jax {jax.__version__}")
    print(f"{'':26}{'ms':>8}  worst total variation")
    for scheme, values in errors.items():
        print(f"{scheme:26}{times[scheme]:8.2f}  {max(values):.1e}")
    if jax.default_backend() == "gpu":
        kernels = time_kernels(args.vocab_size, args.rounds)
        fp32, fp64 = kernels["FP32"], kernels["FP64"]
        print(f"\non the GPU's kernels, 64 rows of bf16: {fp32:.1f} us with FP32 noise,")
        print(f"{fp64:.1f} us with FP64, {fp64 / fp32:.2f} times that")

    figure, (left, right) = matplotlib.pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for scheme, values in errors.items():
        left.loglog(shares, np.maximum(values, 1e-18), label=scheme)
    left.set(xlabel="mass of all rare tokens together", ylabel="total variation")
    figure.legend(loc="outside upper center", ncols=5, fontsize=8)
    right.barh(list(times), list(times.values()))
    right.set(xlabel="ms for 8 rows", xscale="log")
    right.xaxis.set_minor_formatter("")
    with replace_file(args.out) as spare:
        figure.savefig(spare, dpi=120)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
