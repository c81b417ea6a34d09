"""Prefill: the models read the prompts in chunks of one size, by one program for all lengths.

    run_prefill          the loop over all chunks, on the device
    read_prompt_chunk    one chunk of each prompt, for a host that loops
    read_chunk           tokens at any positions; both call it, and so does the engine

`run_requests` runs `run_prefill` and a decoding program, and XLA compiles both at the same time.
"""

import functools
import inspect
import itertools
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from specjax.core.noise import fold_in_rows
from specjax.decode.adaptive_k import init_history
from specjax.decode.capacity import explain_out_of_memory, pad_batch_to_mesh
from specjax.decode.compile.compiler_options import prefill_options
from specjax.decode.draft_step import propose_draft
from specjax.decode.drafters import Models, with_rows
from specjax.decode.kinds import Kinds
from specjax.decode.logprobs import TopLogprobs, empty_logprobs
from specjax.decode.metrics import init_metrics
from specjax.decode.options import StaticOptions, StepOptions
from specjax.decode.request_batch import check_prompt_ids
from specjax.decode.score import list_next_logprobs
from specjax.decode.state import DecodeState, RequestBatch
from specjax.decode.target_step import (
    TargetRows,
    apply_model,
    gather_row,
    score_hidden,
)
from specjax.decode.token_info import empty_token_info
from specjax.devices.placement import pvary_like, with_auto_axes
from specjax.processing.apply_sampling import count_prompt
from specjax.processing.grammar import start_states
from specjax.types import Draft, Model

_NOT_TRACED = get_opaque_trace_state(convention="flax")


def run_requests(
    run: Any, models: Models, requests: RequestBatch, kinds: Kinds, options: StaticOptions
) -> Any:
    """Returns the result of `run` after the prompts are checked and read.

    Args:
      run: `run_first_step` or a loop of steps, jitted: a function of models, what `run_prefill`
        returns, and the options of a step.
      models: the target, and a drafter or None.
      requests: from `request_batch.check_arguments`.
      kinds: of both.
      options: from `request_batch.check_arguments`.
    """
    check_prompt_ids(models.target, requests, options.step.num_rows(models.drafter))
    with explain_out_of_memory(models, *requests.token_ids.shape):
        filled = pad_batch_to_mesh(requests, models.target.placement)
        function = functools.partial(_prefill_and_run, run, kinds, options=options)
        return with_auto_axes(function, models.target.placement, models, filled, like=requests)


def _prefill_and_run(
    run: Any, kinds: Kinds, models: Models, requests: RequestBatch, *, options: StaticOptions
) -> Any:
    """Reads the prompts and runs `run` on the state: two programs, compiled at the same time.

    XLA compiles each program on one core, for longer than it takes to trace and lower both. So the
    two compilations run in threads, side by side. Under an outer trace, both are part of the
    caller's program.

    Args:
      run: as in `run_requests`.
      kinds: as in `run_requests`.
      models: as in `init_and_step.init`.
      requests: as in `run_prefill`.
      options: as in `run_prefill`.
    """
    # The calls below get what was compiled here from JAX. A program that failed is compiled again
    # by its call, which raises the error.
    compilations = _begin_compilation(run, kinds, models, requests, options)
    # A call before its compilation ends would compile the program once more. So each call waits for
    # its own, and the prompts are read while the second program is still compiled.
    futures.wait(compilations[:1])
    prefilled = _prefill_program()(models, requests, options=options)
    futures.wait(compilations[1:])
    return run(models, prefilled, options=options.step)


def _begin_compilation(
    run: Any, kinds: Kinds, models: Models, requests: RequestBatch, options: StaticOptions
) -> tuple[futures.Future[Any], ...]:
    """Begins to compile `run_prefill` and `run`, if no call had these shapes and options before."""
    # If inputs are sharded, the state's sharding is known only after prefill.
    can_move = all(kind.devices is not None and not kind.devices for kind in kinds)
    if not can_move or jax.config.values["jax_disable_jit"]:
        return ()
    # The dtype of a Python float, which `jax_enable_x64` changes, is part of what is compiled.
    if next(_count_calls(run, *kinds, options, jax.dtypes.canonicalize_dtype(float))):
        return ()
    return begin_compilation(run, models, requests, options)[1]


@functools.lru_cache(maxsize=64)
def _count_calls(*parts: Any) -> Iterator[int]:
    """Returns a counter of the calls with one `run`, kinds of models and requests, and options.

    Kinds refer to the models' functions. So only the 64 that were called last are kept; the next
    call of an older one compiles side by side again.
    """
    return itertools.count()


def begin_compilation(
    run: Any, models: Models, requests: RequestBatch, options: StaticOptions
) -> tuple[tuple[Any, Any], tuple[futures.Future[Any], futures.Future[Any]]]:
    """Returns `run_prefill` and `run` as they were lowered, and futures of the compiled programs.

    The first is compiled, or read from JAX's compilation cache, while Python traces the second. For
    a model on a mesh the second is traced afterwards: it needs the sharding of the first's output.
    """
    pool = futures.ThreadPoolExecutor(2)
    try:
        prefill = _prefill_program().lower(models, requests, options=options)
        compiled_prefill = pool.submit(prefill.compile)
        prefilled = run_prefill.eval_shape(models, requests, options=options)
        if models.target.placement is not None:
            shardings = compiled_prefill.result().output_shardings
            prefilled = jax.tree.map(
                lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                *(prefilled, shardings),
            )
        lowered = run.lower(models, prefilled, options=options.step)
        return (prefill, lowered), (compiled_prefill, pool.submit(lowered.compile))
    finally:
        pool.shutdown(wait=False)


def _prefill_program() -> Any:
    """Returns `run_prefill`; on a GPU one with XLA options that shorten its compilation.

    Inside another program it has no such options, because JAX refuses them there.
    """
    return run_prefill if is_traced() or prefill_options() is None else _gpu_prefill()


def is_traced() -> bool:
    """Returns whether the caller is traced into another program."""
    return bool(get_opaque_trace_state(convention="flax") != _NOT_TRACED)


@functools.cache
def _gpu_prefill() -> Any:
    function = inspect.unwrap(run_prefill)
    return jax.jit(function, static_argnames="options", compiler_options=prefill_options())


@functools.partial(jax.jit, static_argnames="options")
def run_prefill(models: Models, requests: RequestBatch, *, options: StaticOptions) -> Any:
    """Returns a state that has read the prompts and drafted nothing.

    The drafter reads all but the last token of each prompt. So does the target, unless
    `options.reads_last`. A last token that it has not read is fed by the first step, so that
    verification is compiled into the step's program alone.

    Args:
      models: as in `init_and_step.init`.
      requests: the prompts, each padded to S tokens, the capacity of the buffers.
      options: from `request_batch.check_arguments`.

    Returns:
      The state. With `options.reads_last` a pair: the state, and the target's outputs for the last
      tokens, as in `read_chunk`, [B, 1, ...].
    """
    state = begin_prefill(models, requests, options=options.step)
    (prompt, lengths, _), reads_last = requests, options.reads_last
    chunk_size = min(options.chunk_size, prompt.shape[1])
    padded = jnp.pad(prompt, ((0, 0), (0, -prompt.shape[1] % chunk_size)))

    def read_next(done: jax.Array, cache: Any, drafter_state: Any) -> Any:
        before = state._replace(target_cache=cache, drafter_state=drafter_state)
        return _read_chunk(models, before, padded, done, chunk_size, reads_last)

    def read(carry: Any) -> Any:
        done, *caches, last, listed = carry
        *caches, outputs = read_next(done, *caches)
        listed = _list_chunk(models.target, state, listed, outputs[0], done)
        if reads_last:
            index = lengths - 1 - done
            is_here = ((index >= 0) & (index < chunk_size))[:, None, None]
            last = jax.tree.map(
                lambda old, new: jnp.where(is_here, _gather_token(new, index), old), last, outputs
            )
        return pvary_like((done + jnp.int32(chunk_size), *caches, last, listed), carry)

    caches = (state.target_cache, state.drafter_state)
    last = jax.eval_shape(read_next, jnp.int32(0), *caches)[2] if reads_last else None
    last = jax.tree.map(lambda x: jnp.zeros((x.shape[0], 1, *x.shape[2:]), x.dtype), last)
    listed = _begin_listing(state, padded.shape[1]) if options.prompt_logprobs else None
    start = (jnp.int32(0), *caches, last, listed)
    # A loop's first carry must have the type of its later ones. Inside `shard_map` that includes
    # the mesh axes over which a value varies, which `pvary_like` marks.
    start = pvary_like(start, start, prompt, lengths, models)
    end = jnp.max(lengths if reads_last else lengths - 1)
    _, *caches, last, listed = jax.lax.while_loop(lambda carry: carry[0] < end, read, start)
    if listed is not None:
        listed = jax.tree.map(lambda buffer: buffer[:, : prompt.shape[1]], listed)
        state = state._replace(top_logprobs=listed)
    # Without copies, arrays of the caller would be leaves of the state, and could not be donated.
    state = jax.tree.map(jnp.copy, state._replace(target_cache=None, drafter_state=None))
    state = state._replace(target_cache=caches[0], drafter_state=caches[1])
    return (state, last) if reads_last else state


def _begin_listing(state: DecodeState, width: int) -> TopLogprobs | None:
    """Returns buffers [B, width + 1, ...] for the chunks of prompts that are padded to a width."""
    config = state.settings.token_info
    assert config is not None
    return empty_logprobs(config.logprobs, (state.lengths.shape[0], width + 1))


def _list_chunk(
    target: Model,
    state: DecodeState,
    listed: TopLogprobs | None,
    hidden: jax.Array,
    done: jax.Array,
) -> TopLogprobs | None:
    """Returns the buffers with `TopLogprobs` of the tokens after a chunk's.

    Args:
      target: as in `generate`.
      state: with the prompts, -1 after their ends.
      listed: from `_begin_listing`; None lists nothing.
      hidden: [B, C, D], of the tokens from `done` on.
      done: i32[], how many tokens were read before the chunk.
    """
    if listed is None:
        return None
    missing = listed.rank.shape[1] - state.token_ids.shape[1]
    padded = jnp.pad(state.token_ids, ((0, 0), (0, missing)), constant_values=-1)
    next_ids = jax.lax.dynamic_slice_in_dim(padded, done + 1, hidden.shape[1], axis=1)
    top = list_next_logprobs(target, hidden, next_ids, listed.token_ids.shape[2])
    return jax.tree.map(
        lambda buffer, new: jax.lax.dynamic_update_slice_in_dim(buffer, new, done + 1, axis=1),
        *(listed, top),
    )


def _gather_token(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Returns [B, 1, ...] of rows [B, C, ...], one token of each request; `index` is clipped."""
    return gather_row(rows, jnp.clip(index, 0, rows.shape[1] - 1))[:, None]


def begin_prefill(models: Models, requests: RequestBatch, *, options: StepOptions) -> DecodeState:
    """Returns a state that has read nothing; `options` are of a step, the rest as `run_prefill`."""
    prompt, lengths, settings = requests
    size, width = prompt.shape
    settings = settings._replace(
        keys=settings.keys if settings.keys.shape else fold_in_rows(settings.keys, size),
        temperature=jnp.broadcast_to(settings.temperature, (size,)),
    )
    token_ids = jnp.where(jnp.arange(width, dtype=jnp.int32)[None] < lengths[:, None], prompt, -1)
    target, drafter = models
    cache, drafter_state = models.init_caches(size, width)
    k = options.num_rows(drafter) - 1
    none_drafted = jnp.zeros((size,), jnp.int32)
    state = DecodeState(
        token_ids=token_ids,
        lengths=lengths,
        logprobs=jnp.zeros(token_ids.shape, jnp.float32),
        origins=jnp.zeros(token_ids.shape, jnp.int8),
        finish=jnp.zeros((size,), jnp.int8),
        draft=Draft(jnp.zeros((size, 0), jnp.int32), num_tokens=none_drafted),
        target_cache=cache,
        drafter_state=drafter_state,
        metrics=init_metrics(size, k),
        settings=settings,
        draft_history=init_history(settings.k_by_rate, lengths),
        **empty_token_info(settings.token_info, token_ids.shape)._asdict(),
    )
    # Traced for the shapes of its outputs alone.
    placeholder = jnp.zeros((size, k + 1), jnp.int32)
    like, *_ = apply_model.eval_shape(target, placeholder, placeholder, cache)
    hidden = jnp.zeros((size, *like.shape[2:]), like.dtype)
    vocab_size = jax.eval_shape(target.logits, target.params, hidden).shape[-1]
    counts = count_prompt(settings.sampling, token_ids, lengths, vocab_size)
    state = state._replace(counts=counts, grammar_state=start_states(settings.sampling, size))
    if drafter is None:
        return state
    text = (state.history, hidden, settings, none_drafted)
    draft, _ = propose_draft.eval_shape(drafter, drafter_state, *text, options=options)
    draft = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), draft)
    return state._replace(draft=draft.replace(num_tokens=none_drafted))


def read_prompt_chunk(
    models: Models,
    state: DecodeState,
    token_ids: jax.Array,
    positions: jax.Array,
    *,
    options: StepOptions,
) -> tuple[DecodeState, TargetRows]:
    """Returns the state after one chunk of each prompt, and the target's row of each last token.

    The target reads the last token of a prompt, too, as `run_prefill` does with `reads_last`. Its
    row gives the first generated token. The drafter reads all but the last.

    Args:
      models: as in `run_prefill`.
      state: from `begin_prefill` or this function.
      token_ids: i32[B, C], successive tokens of the prompts.
      positions: i32[B, C], those of the tokens, -1 past a prompt's end.
      options: of a step.

    Returns:
      The state, and one row per request. Rows of prompts whose last token is in another chunk are
      to be ignored.
    """
    caches = (state.target_cache, state.drafter_state)
    operands = (token_ids, positions, state.lengths[:, None] - 1)
    cache, drafter_state, outputs = read_chunk(models, *caches, *operands)
    index = state.lengths - 1 - positions[:, 0]
    hidden, features = jax.tree.map(lambda rows: _gather_token(rows, index), outputs)
    state = state._replace(target_cache=cache, drafter_state=drafter_state)
    return state, score_hidden(models.target, state, options.implementation, hidden, features)


def _read_chunk(
    models: Models,
    state: DecodeState,
    prompt: jax.Array,
    done: jax.Array,
    chunk_size: int,
    reads_last: bool = False,
) -> tuple[Any, Any, tuple[jax.Array, jax.Array | None]]:
    """Returns the results of `read_chunk` for `chunk_size` tokens of each prompt, from `done` on.

    Neither model reads the last token of a prompt; with `reads_last` the target does.
    """
    offsets = jnp.arange(chunk_size, dtype=jnp.int32)[None]
    ids = jax.lax.dynamic_slice_in_dim(prompt, done, chunk_size, axis=1)
    target_end = state.lengths if reads_last else state.lengths - 1
    inside = done + offsets < target_end[:, None]
    ids, positions = jnp.where(inside, ids, 0), jnp.where(inside, done + offsets, -1)
    drafter_end = state.lengths[:, None] - 1 if reads_last else None
    caches = (state.target_cache, state.drafter_state)
    return read_chunk(models, *caches, ids, positions, drafter_end)


def read_chunk(
    models: Models,
    cache: Any,
    drafter_state: Any,
    token_ids: jax.Array,
    positions: jax.Array,
    drafter_end: jax.Array | None = None,
    rows: jax.Array | None = None,
) -> tuple[Any, Any, tuple[jax.Array, jax.Array | None]]:
    """Returns both models' states after a chunk of tokens, and the target's outputs for them.

    Args:
      models: the target reads all tokens, and the drafter those before `drafter_end`.
      cache: the target's, before the chunk.
      drafter_state: the drafter's, before the chunk.
      token_ids: i32[B, C].
      positions: i32[B, C], -1 where there is no token.
      drafter_end: i32[B, 1], the first position that the drafter does not read; None reads all.
      rows: i32[B], the prompt of the caches' batch that each of B pieces continues, as in
        `specjax.types.Pieces`. Both models have to read pieces then. None is prompt b for tokens b.

    Returns:
      The target's cache, the drafter's state, and a pair of the target's outputs. These are hidden
      states [B, C, D], and features [B, C, A * D] of the drafter's A taps, or None without taps.
    """
    target, drafter = models
    operands = (token_ids, positions, with_rows(cache, rows), models.taps)
    hidden, features, cache = apply_model(target, *operands)
    if drafter is not None:
        if drafter_end is not None:
            positions = jnp.where(positions < drafter_end, positions, -1)
        # A drafter with taps reads the target's states after those layers. Another drafter of
        # features reads the states after the last layer.
        states = features if models.taps else hidden
        states = states if drafter.reads_features else None
        inputs = (with_rows(drafter_state, rows), token_ids, positions, states)
        drafter_state = drafter.extend(drafter.params, *inputs)
    return cache, drafter_state, (hidden, features)
