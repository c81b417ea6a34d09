"""Times calls of the public functions on a GPU, by name, at one shape."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from benchmarks.gpu.cases import CASES, PROGRAMS, Case, Program
from benchmarks.gpu.inputs import (
    BYTES_PER_US,
    Inputs,
    Shape,
    draw_keys,
    draw_rows,
    draw_sets,
    num_sets,
    with_coupled_tokens,
    with_tokens,
)
from benchmarks.gpu.loop import Loop, Lowered, compile_all, lower_loop, time_loop
from specjax import rules
from specjax.implementation import Implementation

# Without it a profiled program launches kernel by kernel what it otherwise launches as a graph.
GRAPHS = {"xla_enable_command_buffers_during_profiling": True}


class Options(NamedTuple):
    """What all calls of a loop share: f32[B], f32[B, K] or None, i32[B]."""

    temperature: jax.Array
    rates: jax.Array | None
    stream: jax.Array


# Kinds that verify drafted tokens, and their rules.
VERIFIED = {"verify": rules.standard, "block": rules.block, "couple": rules.coupled}


class Effort(NamedTuple):
    """How long to measure: runs per case, calls per run, and what "the kernels" are here."""

    runs: int = 7
    calls: int = 576
    most_sets: int = 48
    kernels: str = "triton"


# Plain JAX, which compiles in a third of the interpreter's time.
REHEARSAL = Effort(runs=2, calls=2, most_sets=2, kernels="xla")


def make_call(program: Program, kernels: str | Implementation) -> Callable[..., Any]:
    """The public function of a program as `lower_loop` wants it."""
    implementation, is_coupled = program.implementation or kernels, program.kind == "couple"

    def verify(inputs: Inputs, keys: Any, positions: Any, options: Options) -> Any:
        rule = VERIFIED[program.kind]
        step = specjax.rejection_sample(
            inputs.draft.without_q() if is_coupled else inputs.draft,
            inputs.target_logits,
            keys=keys,
            positions=positions,
            temperature=options.temperature,
            rule=rule() if options.rates is None else rules.synthetic(options.rates),
            greedy_logprobs=program.greedy_logprobs,
            options=specjax.Options(implementation=implementation),
        )
        # Coupled tokens were drawn for these positions. The counts are never negative, which XLA
        # does not know: what is added is 0, and the calls stay chained.
        after = positions + jnp.minimum(step.num_emitted, 0) if is_coupled else step.num_emitted
        return step, after

    def sample(rows: Any, keys: Any, positions: Any, options: Options) -> Any:
        scalars = program.kind == "sample with scalars"
        drawn = specjax.gumbel_sample(
            rows,
            keys=keys,
            positions=positions,
            stream=specjax.Stream.TARGET if scalars else options.stream,
            temperature=0.7 if scalars else options.temperature,
            options=specjax.Options(
                noise_dtype=jnp.dtype(program.noise), implementation=implementation
            ),
        )
        return drawn, drawn.token_ids

    def categorical(rows: Any, keys: Any, positions: Any, options: Options) -> Any:
        # No token is negative, which XLA does not know: the calls stay chained.
        temperature = options.temperature + jnp.minimum(positions, 0).astype(jnp.float32)
        token_ids = jax.random.categorical(keys[0], rows / temperature[:, None])
        return token_ids, token_ids.astype(jnp.int32)

    if program.kind in VERIFIED:
        return verify
    return categorical if program.kind == "categorical" else sample


class Bench:
    """The inputs of some cases at one shape."""

    def __init__(self, shape: Shape, names: list[str], effort: Effort) -> None:
        self.shape, self.effort = shape, effort
        self._rates: dict[str, np.ndarray] = {}
        kinds = {PROGRAMS[CASES[name].program].kind for name in names}
        verified, others = kinds & VERIFIED.keys(), kinds - VERIFIED.keys()
        # A call reads about three rows of each request.
        count = num_sets(shape, 3, effort.most_sets)
        self._logits = draw_sets(shape, count) if verified else []
        count = num_sets(shape, 1, effort.most_sets)
        self._rows = [draw_rows(seed, shape) for seed in range(count)] if others else []

    def lower(self, case: Case, kernels: str | Implementation | None = None) -> Lowered:
        """Lowers a case's program, by default for the kernels that the effort names."""
        program = PROGRAMS[case.program]
        sets = self._sets(case)
        # XLA compiles the reference anew for every call of an iteration.
        calls = len(sets) if program.implementation else max(12, len(sets))
        calls = min(calls, self.effort.calls)
        wanted = self.effort.calls // (4 if program.implementation else 1)
        iterations = max(1, math.ceil(wanted / calls))
        arguments = self._arguments(case, sets, calls, 0)
        x64 = jax.enable_x64(True) if program.noise == "float64" else contextlib.nullcontext()
        with x64:
            call = make_call(program, kernels or self.effort.kernels)
            loop = lower_loop(call, arguments, iterations)
        return Lowered(loop, calls, iterations, GRAPHS if program.graphs else None)

    def _sets(self, case: Case) -> list[Any]:
        program = PROGRAMS[case.program]
        if program.kind not in VERIFIED:
            return self._rows
        if program.kind == "couple":
            keys = draw_keys(0, len(self._logits), self.shape.B)
            kernels = self.effort.kernels
            return with_coupled_tokens(self._logits, keys, case.temperature, kernels)
        logits = self._logits[:4] if program.implementation else self._logits
        return with_tokens(logits, case.temperature, program.one_hot)

    def _arguments(self, case: Case, sets: list[Any], calls: int, run: int) -> tuple[Any, ...]:
        b, k = self.shape.B, self.shape.K
        rates = None
        if PROGRAMS[case.program].synthetic:
            known = self._rates.get(case.rates, 0.9)
            rates = jnp.broadcast_to(jnp.asarray(known, jnp.float32), (b, k))
        temperature = jnp.full((b,), case.temperature, jnp.float32)
        nowhere = jnp.zeros((b,), jnp.int32)
        options = Options(temperature, rates, nowhere)
        keys = draw_keys(run, calls, b)
        if PROGRAMS[case.program].kind == "couple":
            # Those that the tokens of each set were drawn by, in every run.
            own = draw_keys(0, len(sets), b)
            keys = [own[j % len(sets)] for j in range(calls)]
        return jax.block_until_ready((sets, keys, nowhere, options))

    def measure(self, name: str, loop: Loop) -> dict[str, Any]:
        """Measures a case."""
        case = CASES[name]
        program, sets = PROGRAMS[case.program], self._sets(case)
        runs = range(1, self.effort.runs + 1)
        arguments = [self._arguments(case, sets, loop.calls, run) for run in runs]
        figures, results = time_loop(loop, arguments)
        record = {"case": name, **self.shape._asdict(), "temperature": case.temperature}
        record |= {"implementation": program.implementation or self.effort.kernels}
        rows = 1.0
        if program.kind in VERIFIED:
            record |= acceptance([step for run in results for step in run], self.shape.K)
            self._rates[name] = np.array(record["conditional_rates"])
            # One row for every accepted draft and one more; where a sampled draft is rejected, its
            # own row and the target's again, because its normalizer was not known.
            again = 0 if program.one_hot or case.temperature == 0 else 2
            # A block reads each row with a draft, and for a residual two again, if not more. The
            # row after them decides where all are accepted.
            decided = record["mean_accepted"]
            if program.kind == "block":
                decided = self.shape.K - record["share_rejected"]
            rows += decided + again * record["share_rejected"]
        record["rows_that_decide"] = rows
        record["floor_us"] = rows * self.shape.row_bytes / BYTES_PER_US
        record["rotating_mb"] = sum(x.nbytes for x in jax.tree.leaves(sets)) / 1e6
        return record | figures


def measure_shape(
    shape: Shape, names: list[str], kinds: tuple[str, ...], effort: Effort
) -> Iterator[dict[str, Any]]:
    """A record of each case with each kind of rows, their programs compiled once, side by side.

    A case that fails leaves its error in the record, and the others go on.
    """
    loops: dict[str, Loop] = {}
    for rows in kinds:
        place = shape._replace(rows=rows)
        try:
            bench = Bench(place, names, effort)
            programs = {CASES[name].program: CASES[name] for name in names}
            loops = loops or compile_all((key, bench.lower(x)) for key, x in programs.items())
        except (RuntimeError, ValueError) as error:
            yield {"case": ", ".join(names), **place._asdict(), "error": str(error)}
            return
        for name in names:
            try:
                yield bench.measure(name, loops[CASES[name].program])
            except RuntimeError as error:
                yield {"case": name, **place._asdict(), "error": str(error)}
        del bench


def acceptance(steps: list[specjax.Verification], k: int) -> dict[str, Any]:
    """What the last calls of all runs accepted: mean, share rejected, rate of each position."""
    accepted = np.concatenate([np.asarray(step.num_accepted) for step in steps])
    tested = np.minimum(accepted + 1, k).sum()
    unconditional = [float((accepted > i).mean()) for i in range(k)]
    return {
        "mean_accepted": float(accepted.mean()),
        "match_rate": float(accepted.sum() / tested),
        "share_rejected": float((accepted < k).mean()),
        "conditional_rates": np.asarray(
            specjax.conditional_rates(jnp.asarray(unconditional, jnp.float32))
        ).tolist(),
    }
