"""Reading the prompts: chunks of one size, through one program whatever their length."""

import functools
import inspect
import itertools
from collections.abc import Iterator
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from specjax.config import SpeculativeConfig
from specjax.core.noise import fold_in_rows
from specjax.decode.choose_k import init_history
from specjax.decode.draft_next import propose_draft
from specjax.decode.drafters import Drafter
from specjax.decode.logprobs import empty_logprobs
from specjax.decode.metrics import init_metrics
from specjax.decode.state_and_info import DecodeState, Settings
from specjax.decode.target_rows import apply_model, fill_rows, rows_of, take_at
from specjax.draft import Draft
from specjax.implementation import Implementation
from specjax.mesh import pvary_like
from specjax.model import Model
from specjax.processing.sampling_params import SamplingParams, split_sampling
from specjax.processing.token_counts import TokenCounts, count_committed

__all__ = [
    "LoweredProgram",
    "begin_compilation",
    "prefill_and_run",
    "prefill_program",
    "run_prefill",
]

_STATIC = ("config", "implementation", "chunk_size")
_NOT_TRACED = get_opaque_trace_state(convention="flax")
# cuBLAS multiplies chunks as fast as the kernels that XLA would compile and time for each product.
_GPU_OPTIONS = {"xla_gpu_enable_triton_gemm": False}


class LoweredProgram(NamedTuple):
    """A program that is being compiled.

    Attributes:
      lowered: `jax.stages.Lowered`.
      compilation: a future of `jax.stages.Compiled`.
    """

    lowered: Any
    compilation: futures.Future[Any]


def prefill_and_run(run: Any, target: Model, drafter: Drafter | None, **arguments: Any) -> Any:
    """Returns `run` of the state that `run_prefill` returns: two programs, compiled at once.

    XLA compiles each on one core, for longer than it takes to trace and lower both. Traced, they
    are part of the caller's program.

    Args:
      run: a jitted function of target, drafter, state and the options of a step.
      target: as in `init`.
      drafter: as in `init`.
      **arguments: of `run_prefill`.
    """
    # JAX gives what was compiled here to the call that comes. That call compiles again what
    # failed, and says why.
    programs = _begin_compilation(run, target, drafter, arguments)
    futures.wait(program.compilation for program in programs[:1])
    state = prefill_program()(target, drafter, **arguments)
    futures.wait(program.compilation for program in programs[1:])
    return run(target, drafter, state, **_step_options(arguments))


def _begin_compilation(
    run: Any, target: Model, drafter: Drafter | None, arguments: dict[str, Any]
) -> tuple[LoweredProgram, ...]:
    """Begins to compile `run_prefill` and `run`, if this is the first call of its kind."""
    data = {name: value for name, value in arguments.items() if name not in _STATIC}
    leaves, structure = jax.tree.flatten((target, drafter, data))
    # Of arrays that the caller has placed, the state's placement is known after the prefill alone.
    if any(isinstance(leaf, jax.core.Tracer) or _is_placed(leaf) for leaf in leaves):
        return ()
    if jax.config.values["jax_disable_jit"]:
        return ()
    static = tuple(arguments[name] for name in _STATIC)
    types = tuple(map(jax.typeof, leaves))
    if next(_count_calls(run, structure, types, static, jax.dtypes.canonicalize_dtype(float))):
        return ()
    return begin_compilation(run, target, drafter, arguments)


@functools.lru_cache(maxsize=64)
def _count_calls(*kind: Any) -> Iterator[int]:
    """Returns a counter of the calls of a kind, which models are part of: old kinds are dropped."""
    return itertools.count()


def begin_compilation(
    run: Any, target: Model, drafter: Drafter | None, arguments: dict[str, Any]
) -> tuple[LoweredProgram, LoweredProgram]:
    """Returns `run_prefill` and `run`, which are being compiled.

    The first is compiled, or read from a cache, while Python traces the second.
    """
    pool = futures.ThreadPoolExecutor(2)
    try:
        lowered = prefill_program().lower(target, drafter, **arguments)
        prefill = LoweredProgram(lowered, pool.submit(lowered.compile))
        state = run_prefill.eval_shape(target, drafter, **arguments)
        lowered = run.lower(target, drafter, state, **_step_options(arguments))
        return prefill, LoweredProgram(lowered, pool.submit(lowered.compile))
    finally:
        pool.shutdown(wait=False)


def prefill_program() -> Any:
    """Returns `run_prefill`; on a GPU, as a program of its own, one that compiles in less time."""
    # JAX refuses options for a function that is traced into another program.
    is_traced = get_opaque_trace_state(convention="flax") != _NOT_TRACED
    return run_prefill if is_traced or jax.default_backend() != "gpu" else _gpu_prefill()


@functools.cache
def _gpu_prefill() -> Any:
    function = inspect.unwrap(run_prefill)
    return jax.jit(function, static_argnames=(*_STATIC, "with_rows"), compiler_options=_GPU_OPTIONS)


def _step_options(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: arguments[name] for name in ("config", "implementation")}


def _is_placed(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.committed


@functools.partial(jax.jit, static_argnames=(*_STATIC, "with_rows"))
def run_prefill(
    target: Model,
    drafter: Drafter | None,
    *,
    prompt: jax.Array,
    lengths: jax.Array,
    settings: Settings,
    config: SpeculativeConfig,
    implementation: Implementation | None,
    chunk_size: int,
    with_rows: bool = False,
) -> Any:
    """Returns a state that has read the prompts but for their last token, and drafted nothing.

    The first step feeds the last token of each prompt, so that verification stands in the step's
    program alone.

    Args:
      target: as in `init`.
      drafter: as in `init`.
      prompt: i32[B, S], the buffers' size S; what follows a prompt is ignored.
      lengths: i32[B].
      settings: keys [B] or (), temperature [B] or ().
      config: a compile key.
      implementation: a resolved one if the caller named one, else None.
      chunk_size: most tokens of a request that the models read at once.
      with_rows: whether the target reads the last tokens, too, for a first step that has a program
        of its own for what follows.

    Returns:
      `DecodeState`; with rows, that and the `TargetRows` of the first step.
    """
    size, width = prompt.shape
    settings = settings._replace(
        keys=settings.keys if settings.keys.shape else fold_in_rows(settings.keys, size),
        temperature=jnp.broadcast_to(settings.temperature, (size,)),
    )
    index = jnp.arange(width, dtype=jnp.int32)[None]
    token_ids = jnp.where(index < lengths[:, None], prompt, -1)
    cache = target.init_cache(size, width)
    drafter_state = None if drafter is None else drafter.init(drafter.params, size, width)
    taps = () if drafter is None else drafter.taps
    last = _zeros_like(_hidden_like(target, cache, size, 1, taps)) if with_rows else None
    states = (cache, drafter_state, last)
    cache, drafter_state, last = _read(
        target, drafter, prompt, lengths, states, min(chunk_size, width)
    )
    k = 0 if drafter is None else config.num_speculative_tokens
    like, _ = _hidden_like(target, cache, size, k + 1)
    hidden = jnp.zeros((size, *like.shape[2:]), like.dtype)
    counts = _count_prompt(target, settings, token_ids, lengths, hidden)
    none_drafted = jnp.zeros((size,), jnp.int32)
    draft = Draft(jnp.zeros((size, 0), jnp.int32))
    if drafter is not None:
        operands = (drafter_state, token_ids, lengths, counts, hidden, settings, none_drafted)
        options = {"config": config, "implementation": implementation}
        draft, _ = propose_draft.eval_shape(drafter, *operands, **options)
        draft = _zeros_like(draft)
    state = DecodeState(
        token_ids=token_ids,
        lengths=lengths,
        logprobs=jnp.zeros(token_ids.shape, jnp.float32),
        origins=jnp.zeros(token_ids.shape, jnp.int8),
        finish=jnp.zeros((size,), jnp.int8),
        draft=draft._replace(num_tokens=none_drafted),
        target_cache=cache,
        drafter_state=drafter_state,
        metrics=init_metrics(size, k),
        settings=settings,
        counts=counts,
        top_logprobs=empty_logprobs(settings.logprobs, token_ids.shape),
        draft_history=None if settings.k_by_rate is None else init_history(lengths),
    )
    if last is None:
        return state
    return state, fill_rows(rows_of(target, state, implementation, *last), state)


def _zeros_like(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _hidden_like(
    target: Model, cache: Any, size: int, num_rows: int, taps: tuple[int, ...] = ()
) -> tuple[Any, Any]:
    """Returns shapes and dtypes of hidden states [B, num_rows, D] and of the features of taps."""
    rows = jnp.zeros((size, num_rows), jnp.int32)
    hidden, features, _ = apply_model.eval_shape(target, rows, rows, cache, taps)
    return hidden, features


def _read(
    target: Model,
    drafter: Drafter | None,
    prompt: jax.Array,
    lengths: jax.Array,
    states: tuple[Any, Any, Any],
    chunk_size: int,
) -> tuple[Any, Any, Any]:
    """Returns the target's cache, the drafter's state, and the last tokens' states and features.

    Args:
      target: reads the last tokens only if their hidden states are wanted.
      drafter: reads all tokens but the last.
      prompt: i32[B, S].
      lengths: i32[B].
      states: what is returned, before; None for states and features that are not wanted.
      chunk_size: tokens of a request that are read at once.
    """
    offsets = jnp.arange(chunk_size, dtype=jnp.int32)[None]
    prompt = jnp.pad(prompt, ((0, 0), (0, -prompt.shape[1] % chunk_size)))
    num_read = lengths - 1 if states[2] is None else lengths
    taps = () if drafter is None else drafter.taps

    def read(carry: Any) -> Any:
        done, cache, drafter_state, last = carry
        ids = jax.lax.dynamic_slice_in_dim(prompt, done, chunk_size, axis=1)
        inside = done + offsets < num_read[:, None]
        ids, positions = jnp.where(inside, ids, 0), jnp.where(inside, done + offsets, -1)
        *outputs, cache = apply_model(target, ids, positions, cache, taps)
        if last is not None:
            index = (lengths - 1 - done)[:, None]
            take = functools.partial(_take_column, index=index, offsets=offsets)
            last = jax.tree.map(take, tuple(outputs), last)
            positions = jnp.where(offsets < index, positions, -1)
        if drafter is not None:
            features = outputs[bool(taps)] if drafter.reads_features else None
            drafter_state = drafter.extend(drafter.params, drafter_state, ids, positions, features)
        carry_out = (done + jnp.int32(chunk_size), cache, drafter_state, last)
        return pvary_like(carry_out, carry)

    start = (jnp.int32(0), *states)
    start = pvary_like(start, start, prompt, lengths, target, drafter)
    end = jnp.max(num_read)
    return jax.lax.while_loop(lambda carry: carry[0] < end, read, start)[1:]


def _take_column(
    rows: jax.Array, last: jax.Array, *, index: jax.Array, offsets: jax.Array
) -> jax.Array:
    """Returns column `index` i32[B, 1] of rows [B, C, ...] where a request has it, else `last`."""
    found = take_at(rows, jnp.clip(index[:, 0], 0, rows.shape[1] - 1))[:, None]
    is_here = jnp.any(offsets == index, axis=1)
    return jnp.where(is_here[:, None, None], found, last)


def _count_prompt(
    target: Model,
    settings: Settings,
    token_ids: jax.Array,
    lengths: jax.Array,
    hidden: jax.Array,
) -> TokenCounts | None:
    """Returns the counts of the prompt that the penalties read, None without penalties."""
    rules, _ = split_sampling(settings.sampling or SamplingParams())
    if not rules.penalties:
        return None
    vocab_size = jax.eval_shape(target.logits, target.params, hidden).shape[-1]
    counts = count_committed(token_ids, lengths, lengths, vocab_size)
    return counts if rules.repetition_penalty is not None else counts._replace(prompt=None)
