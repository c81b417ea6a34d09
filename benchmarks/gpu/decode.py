"""Times decoding at real size on an NVIDIA GPU: forwards, speculative steps, tokens per second.

python -m benchmarks.gpu.decode --out benchmarks/results/h200_decode.json
"""

import collections
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import specjax
from benchmarks.gpu.inputs import BYTES_PER_US
from benchmarks.gpu.loop import Event, Loop, kernel_times, split_runs, trace
from benchmarks.record import environment, gpu_parser, parse_on_gpu, save
from benchmarks.spread import spread
from specjax.models import TransformerConfig, build
from specjax.models.decoder.rope import RopeScaling

# Llama 3.1 8B and Llama 3.2 1B, their sizes; the numbers are random.
TARGET = TransformerConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rope_theta=500000.0,
    rope_scaling=RopeScaling("llama3", 8.0),
    tie_word_embeddings=False,
    max_position_embeddings=131072,
    dtype="bfloat16",
)
DRAFT = dataclasses.replace(
    TARGET,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    head_dim=64,
    rope_scaling=RopeScaling("llama3", 32.0),
    tie_word_embeddings=True,
)
SMALL = dict(vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=1)
K, LENGTH = 5, 3.7


class Effort(NamedTuple):
    """Tokens of context and of room after it, iterations of a loop, and runs of it."""

    context: int = 1024
    room: int = 512
    iterations: int = 64
    runs: int = 9


class Timed:
    """A loop to time: compiled, and what its runs are given.

    Every run takes the caches of the one before and gives them back, in their own memory, as a loop
    that carries a state does.

    Args:
      loop: of caches and other arguments; gives a result, and the caches.
      caches: pytree of arrays, given away.
      arguments: the others.
      iterations: of the loop.
    """

    def __init__(
        self, loop: Callable[..., Any], caches: Any, arguments: Any, iterations: int
    ) -> None:
        self.caches, self.arguments = jax.block_until_ready((caches, arguments))
        lowered = jax.jit(loop, donate_argnums=0).lower(self.caches, *self.arguments)
        self.compiled, self.iterations = lowered.compile(), iterations

    def run(self) -> Any:
        """The result of one run."""
        result, self.caches = self.compiled(self.caches, *self.arguments)
        return result


def read_ms(model: specjax.Model, config: TransformerConfig) -> float:
    """Milliseconds to read the weights once, but for an embedding table that only looks up."""
    size = sum(x.nbytes for x in jax.tree.leaves(model.params))
    if not config.tie_word_embeddings:
        size -= model.params["embedding"].nbytes
    return size / BYTES_PER_US / 1e3


@functools.partial(jax.jit, static_argnums=(1, 2))
def prefill(model: specjax.Model, batch: int, effort: Effort) -> Any:
    """The cache after a context of random tokens."""
    ids = jax.random.randint(jax.random.key(1), (batch, effort.context), 0, 100, jnp.int32)
    place = jnp.broadcast_to(jnp.arange(effort.context, dtype=jnp.int32)[None], ids.shape)
    cache = model.init_cache(batch, effort.context + effort.room)
    return model.apply(model.params, ids, place, cache)[1]


def forward(model: specjax.Model, tokens: int, batch: int, effort: Effort) -> Timed:
    """Forwards of `tokens` tokens a request after a context, each given the argmax of the last."""

    def loop(cache: Any, model: specjax.Model, fed: jax.Array, lengths: jax.Array) -> Any:
        def step(i: jax.Array, carry: Any) -> Any:
            fed, cache = carry
            at = lengths[:, None] + i + jnp.arange(tokens, dtype=jnp.int32)
            hidden, cache = model.apply(model.params, fed, at, cache)
            logits = model.logits(model.params, hidden)
            return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache

        return jax.lax.fori_loop(0, effort.iterations, step, (fed, cache))

    fed = jnp.ones((batch, tokens), jnp.int32)
    lengths = jnp.full((batch,), effort.context, jnp.int32)
    return Timed(loop, prefill(model, batch, effort), (model, fed, lengths), effort.iterations)


def speculate(
    target: specjax.Model,
    drafter: specjax.Drafter | None,
    batch: int,
    effort: Effort,
    k: int = K,
    length: float = LENGTH,
    max_length: int | None = None,
) -> Timed:
    """Steps of the whole loop: drafts, target rows, verification, commit, cache.

    k, length: drafted tokens of a step and the mean number that it is to emit; not read without a
      drafter.
    max_length: of `LoopOptions`.
    """
    k = 0 if drafter is None else k
    config = None
    if drafter is not None:
        config = specjax.SpeculativeConfig(
            num_speculative_tokens=k,
            rejection_sample_method="synthetic",
            synthetic_acceptance_length=length,
        )
    prompt = jax.random.randint(jax.random.key(2), (batch, effort.context), 0, 100, jnp.int32)
    state = specjax.init(
        target,
        drafter,
        (prompt, jnp.full((batch,), effort.context, jnp.int32)),
        keys=jax.random.key(0),
        config=config,
        max_new_tokens=effort.iterations * (k + 1) + 2,
        options=specjax.LoopOptions(max_length=max_length),
    )
    return repeat_step(target, drafter, state, config, effort.iterations)


def repeat_step(
    target: specjax.Model,
    drafter: specjax.Drafter | None,
    state: specjax.DecodeState,
    config: specjax.SpeculativeConfig | None,
    iterations: int,
) -> Timed:
    """Steps from a state on, which is given away."""

    def loop(caches: Any, target: Any, drafter: Any, state: Any) -> Any:
        def step(_: Any, state: Any) -> Any:
            return specjax.step(target, drafter, state, config=config)[0]

        # What a run before has written after the prompt is written again.
        begun = state._replace(target_cache=caches[0], drafter_state=caches[1])
        done = jax.lax.fori_loop(0, iterations, step, begun)
        return done.lengths - state.lengths, (done.target_cache, done.drafter_state)

    caches = (state.target_cache, state.drafter_state)
    rest = state._replace(target_cache=None, drafter_state=None)
    return Timed(loop, caches, (target, drafter, rest), iterations)


def clock(timed: Timed, effort: Effort) -> tuple[dict[str, Any], Any]:
    """Milliseconds of an iteration by the host's clock over whole loops, and the last result."""
    jax.block_until_ready(timed.run())
    taken = []
    for _ in range(effort.runs):
        start = time.perf_counter()
        result = jax.block_until_ready(timed.run())
        taken.append(1e3 * (time.perf_counter() - start) / timed.iterations)
    figures = {name.replace("_us", "_ms"): value for name, value in spread(taken).items()}
    return figures, result


def profile(timed: Timed) -> dict[str, Any]:
    """Kernels of an iteration, the longest first, and how far apart iterations begin."""
    loop = Loop(timed.run, 1, timed.iterations, False)
    _, events, launches = trace(loop, [()])
    (run,) = split_runs(events)
    busy = kernel_times(events, timed.iterations, most=100)
    wall = (max(e.start + e.duration for e in run) - run[0].start) / 1e3 / timed.iterations
    per = {name: count / timed.iterations for name, count in launches.items()}
    apart = spread(between(run, timed.iterations))
    more = {"wall_us": wall, "num_events": len(run) / timed.iterations, "launches": per}
    return busy | more | {"between": apart}


def between(run: list[Event], iterations: int) -> list[float]:
    """Microseconds between a kernel that each iteration launches once, and the same in the next.

    Without what only a run's beginning costs.
    """
    times = collections.defaultdict(list)
    for event in run:
        times[event.name].append(event)
    once = [events for events in times.values() if len(events) == iterations]
    starts = [event.start / 1e3 for event in max(once, key=lambda each: each[0].duration)]
    return [later - sooner for sooner, later in itertools.pairwise(starts)]


def cases(
    target: specjax.Model, draft: specjax.Model, batch: int, effort: Effort
) -> Iterator[tuple[str, Timed]]:
    """What is timed at one batch size, one after the other: each holds a cache."""
    yield "target, 1 token", forward(target, 1, batch, effort)
    yield f"target, {K + 1} tokens", forward(target, K + 1, batch, effort)
    yield "draft, 1 token", forward(draft, 1, batch, effort)
    yield "plain step", speculate(target, None, batch, effort)
    yield "speculative step", speculate(target, specjax.model_drafter(draft), batch, effort)


def measure(
    timings: Iterable[tuple[str, Timed]], batch: int, effort: Effort, kept: list[Any]
) -> Iterator[dict[str, Any]]:
    """A record of each case; adds its program to `kept`.

    Where one was let go, each kernel of some that are built after it was seen to start 0.3 us
    later, which is 5 % of a draft's forward. A process that decodes has one and keeps it.
    """
    for name, timed in timings:
        kept.append(timed.compiled)
        figures, result = clock(timed, effort)
        record = {"case": name, "B": batch, "context": effort.context} | figures
        if "step" in name:
            emitted = float(jnp.mean(result.astype(jnp.float32))) / effort.iterations
            record |= {
                "tokens_per_step": emitted,
                "tokens_per_s": 1e3 * emitted / record["median_ms"],
            }
        if jax.default_backend() == "gpu":
            record["profile"] = profile(timed)
        yield record


def describe(record: dict[str, Any], floors: dict[str, float]) -> str:
    """One line of the printed table."""
    floor = floors[record["case"]]
    line = f"{record['case']:24} B={record['B']:<3}{record['median_ms']:9.3f} ms"
    line += f"  weights {floor:.3f} ({record['median_ms'] / floor:.2f} times)"
    if "profile" in record:
        busy = record["profile"]["kernels_us"] / 1e3
        line += f"  kernels {busy:.3f} in {record['profile']['num_events']:.0f}"
        line += f"  between {record['profile']['between']['median_us'] / 1e3:.3f}"
    if "tokens_per_s" in record:
        line += f"  {record['tokens_per_step']:.2f} tokens a step, {record['tokens_per_s']:.0f}/s"
    return line


def main() -> None:
    parser = gpu_parser(__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="batch sizes")
    args = parse_on_gpu(parser)
    sizes, effort = (TARGET, DRAFT), Effort()
    if args.smoke:
        sizes = tuple(dataclasses.replace(config, **SMALL) for config in sizes)
        effort = Effort(context=16, room=64, iterations=3, runs=2)
    target, draft = (build(config, seed=seed) for seed, config in enumerate(sizes))
    one, small = read_ms(target, sizes[0]), read_ms(draft, sizes[1])
    floors = {
        "target, 1 token": one,
        f"target, {K + 1} tokens": one,
        "draft, 1 token": small,
        "plain step": one,
        "speculative step": one + K * small,
    }
    kept: list[Any] = []
    for batch in args.batch:
        section: dict[str, Any] = {
            "environment": environment(),
            "read_ms": {"target": one, "draft": small},
            "cases": [],
        }
        for record in measure(cases(target, draft, batch, effort), batch, effort, kept):
            section["cases"].append(record)
            save(args.out, {f"B = {batch}": section})
            print(describe(record, floors), flush=True)


if __name__ == "__main__":
    main()
