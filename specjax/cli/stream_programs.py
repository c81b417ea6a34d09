"""The programs that stream a text, compiled next to one another and before they are needed.

    begin -> chunk -> ... -> chunk -> commit -> draft -> rows -> commit -> draft -> rows -> ...

`specjax.step` is one program. Here its parts are programs of their own: a text begins once those
that read the prompt and commit are compiled, on as many cores. A step that drafts nothing computes
and verifies one row, without asking the device. They write into the buffers of the state that they
are given. On a CPU all layers of a model share a program (`specjax.cli.by_layer`).
"""

import contextlib
import functools
import inspect
import os
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax
import numpy as np

from specjax.cli.by_layer import LoweredParts, lower_by_layer
from specjax.cli.program_store import ProgramStore
from specjax.config import SpeculativeConfig
from specjax.decode.capacity import explain_out_of_memory
from specjax.decode.compile.compiler_options import prefill_options, small_program_options
from specjax.decode.draft_step import draft_budget, run_draft
from specjax.decode.drafters import Drafter
from specjax.decode.options import StaticOptions, StepOptions
from specjax.decode.prefill import begin_prefill, read_prompt_chunk
from specjax.decode.state import DecodeState, RequestBatch
from specjax.decode.step import commit_emitted, extend_drafter, verify_pending
from specjax.decode.target_step import TargetRows, count_rows, gather_row, score_draft
from specjax.implementation import Implementation
from specjax.types import Draft, Model

__all__ = ["StreamPrograms"]

# Options that are no operands of a compiled program.
_STATIC = ("config", "implementation", "chunk_size", "k", "taps")


def _jit(function: Callable[..., Any], *donated: str) -> Any:
    static = [name for name in inspect.signature(function).parameters if name in _STATIC]
    return jax.jit(function, static_argnames=static, donate_argnames=donated)


def _commit_rows(
    drafter: Drafter | None,
    state: DecodeState,
    rows: TargetRows,
    *,
    config: SpeculativeConfig,
    implementation: Implementation | None,
) -> tuple[DecodeState, jax.Array]:
    """Verifies and commits a step, and decides how many tokens the next one drafts.

    Args:
      drafter: as in `run_step`.
      state: before the step; the target's cache is not read.
      rows: from `score_draft`; the first alone if nothing was drafted.
      config: as in `run_step`.
      implementation: as in `run_step`.

    Returns:
      The state without a draft, where `num_tokens` is the budget of each request, and the hidden
      states [B, D] that decided the last tokens.
    """
    options, pending = StepOptions(config, implementation), state.draft
    if rows.hidden.shape[1] < count_rows(state):
        none = Draft(pending.token_ids[:, :0], num_tokens=pending.num_tokens)
        state = state._replace(draft=none)
    info = verify_pending(state, rows, options)
    after = commit_emitted(state, rows, info)
    after = extend_drafter(drafter, state, after, rows)
    num_tokens = draft_budget(drafter, after, config)
    after = after._replace(draft=pending.replace(num_tokens=num_tokens))
    return after, gather_row(rows.hidden, info.verification.num_accepted)


def _draft_tokens(
    drafter: Drafter,
    state: DecodeState,
    hidden: jax.Array,
    *,
    config: SpeculativeConfig,
    implementation: Implementation | None,
) -> DecodeState:
    """Runs the drafter on what `_commit_rows` returned."""
    return run_draft(drafter, state, hidden, StepOptions(config, implementation))


_BEGIN = _jit(begin_prefill)
_CHUNK = _jit(read_prompt_chunk, "state")
_ROWS = _jit(score_draft, "cache")
_COMMIT = _jit(_commit_rows, "state")
_DRAFT = _jit(_draft_tokens, "state")


class StreamPrograms:
    """The programs of texts of one kind. Those of the first token begin to be compiled at once.

    Args:
      target: the model; only the shapes of its weights are read.
      drafter: the drafter, or None for plain decoding.
      requests: of `run_prefill`; all prompts end in the same chunk.
      options: of `run_prefill`.
      store: where programs of this kind are kept, or None.

    Attributes:
      seconds_waited: for compilations.
      compiles_at_calls: of models on a mesh: where a state lies is known once it is computed.
    """

    def __init__(
        self,
        target: Model,
        drafter: Drafter | None,
        requests: RequestBatch,
        options: StaticOptions,
        store: ProgramStore | None = None,
    ) -> None:
        self.seconds_waited = 0.0
        self._target, self._drafter = _shapes_of(target), _shapes_of(drafter)
        self.compiles_at_calls = target.placement is not None
        self._requests, self._store = requests, store
        self._implementation: dict[str, Any] = {"implementation": options.implementation}
        self._chunk: dict[str, Any] = {"chunk_size": options.chunk_size, **self._implementation}
        self._options: dict[str, Any] = {"config": options.config, **self._implementation}
        self._k = 0 if drafter is None else options.config.num_speculative_tokens
        self._has_draft_model = drafter is not None and bool(jax.tree.leaves(drafter.params))
        # How many drafted tokens the steps feed in which nothing was drafted.
        self._plain_k = 0 if options.config.adaptive_k else self._k
        workers = min(max(os.cpu_count() or 1, 3), 6)
        self._pool = futures.ThreadPoolExecutor(workers)
        self._programs: dict[str, futures.Future[Callable[..., Any] | None]] = {}
        # Of programs that XLA is not to compile yet.
        self._lowered: dict[str, LoweredParts] = {}
        # From the last commit: drafts are made of it when the next step begins.
        self._hidden: Any = None
        # From the prompt: what the first step commits.
        self._first_rows: Any = None
        for name in ("begin", "chunk", "commit 0"):
            self._begin(name)
        if workers > 4:
            # Fewer cores have enough to do until the first token is there.
            self._begin_all()

    def lower_steps(self) -> None:
        """Traces and lowers what a second token needs: Python's part, while weights are read."""
        name = f"rows {self._plain_k}"
        is_kept = self._store is not None and name in self._store
        if name not in self._programs and not is_kept:
            self._lowered[name] = lower_by_layer(self._trace(name))

    def begin_steps(self) -> None:
        """Begins to compile what a second token needs."""
        self._begin_step(self._plain_k)

    def _begin_all(self) -> None:
        self.begin_steps()
        self._begin("draft")
        self._begin_step(self._k)

    def _begin_step(self, k: int) -> None:
        self._begin(f"rows {k}")
        self._begin(f"commit {k}")

    def _begin(self, name: str, may_read: bool = True) -> None:
        is_late = self.compiles_at_calls or jax.config.values["jax_disable_jit"]
        if name in self._programs or is_late:
            return
        if name == "draft" and self._drafter is None:
            return
        if may_read and self._store is not None and name in self._store:
            self._programs[name] = self._pool.submit(self._store.load, name)
        else:
            # Traced and lowered by this thread, whose settings of JAX may be its own.
            lowered = self._lowered.pop(name, None) or lower_by_layer(self._trace(name))
            self._programs[name] = self._pool.submit(self._compile, name, lowered)

    def _compile(self, name: str, lowered: LoweredParts) -> Callable[..., Any]:
        # A drafter without parameters looks tokens up.
        is_small = name in ("begin", "commit 0") or (name == "draft" and not self._has_draft_model)
        options = prefill_options() if name == "chunk" else None
        program = lowered.compile(small_program_options() if is_small else options)
        if self._store is not None:
            self._store.save(name, program)
        return program.run

    def _trace(self, name: str) -> jax.stages.Traced:
        """Returns a program traced for the shapes of its operands."""
        kind, _, k = name.partition(" ")
        if kind == "begin":
            return _BEGIN.trace(self._target, self._drafter, self._requests, **self._options)
        if kind == "chunk":
            operands = (self._drafter, self._begun_shapes, np.int32(0))
            return _CHUNK.trace(self._target, *operands, **self._chunk)
        if kind == "rows":
            return _ROWS.trace(self._target, *self._rows_shapes, **self._rows_options(int(k)))
        if kind == "commit":
            rows = self._rows_of(int(k))
            return _COMMIT.trace(self._drafter, self._rows_shapes[0], rows, **self._options)
        operands = (self._drafter, self._rows_shapes[0], self._rows_of(0))
        state, hidden = _COMMIT.eval_shape(*operands, **self._options)
        return _DRAFT.trace(self._drafter, state, hidden, **self._options)

    def _rows_of(self, k: int) -> Any:
        """The rows that are committed with k drafted tokens."""
        if not k:
            return self._prompt_shapes[1]
        shapes = (self._target, *self._rows_shapes)
        return _ROWS.eval_shape(*shapes, **self._rows_options(k))[1]

    def _rows_options(self, k: int) -> dict[str, Any]:
        taps = () if self._drafter is None else self._drafter.taps
        return {"k": k, "taps": taps, **self._implementation}

    @functools.cached_property
    def _begun_shapes(self) -> Any:
        return _BEGIN.eval_shape(self._target, self._drafter, self._requests, **self._options)

    @functools.cached_property
    def _prompt_shapes(self) -> Any:
        """The state that has read a prompt, and its rows."""
        operands = (self._drafter, self._begun_shapes, np.int32(0))
        return _CHUNK.eval_shape(self._target, *operands, **self._chunk)

    @functools.cached_property
    def _rows_shapes(self) -> tuple[Any, Any]:
        """That state, and its cache."""
        return _without_cache(self._prompt_shapes[0])

    def wait_for_prompt(self) -> None:
        """Waits for the programs that read the prompt."""
        self._wait("begin", "chunk")

    def wait_for_first_token(self) -> None:
        """Waits for the program that commits it."""
        self._wait("commit 0")

    def warm_up(self, target: Model, drafter: Drafter | None) -> None:
        """Compiles all programs and runs each on a state that is dropped.

        A program takes longer when it runs first.
        """
        self._begin_all()
        state = self.step(target, drafter, self.read_prompt(target, drafter))
        for k in {self._plain_k, self._k}:
            hidden, self._hidden = self._hidden, None
            if drafter is not None:
                state = self._run_draft(drafter, state, hidden)
            state = self._commit(drafter, *self._compute_rows(target, state, k))

    def _wait(self, *names: str) -> None:
        start = time.perf_counter()
        for name in names:
            if name in self._programs and not self._programs[name].done():
                futures.wait([self._programs[name]])
        self.seconds_waited += time.perf_counter() - start

    def _call(self, name: str, function: Any, *args: Any, **options: Any) -> Any:
        self._begin(name)
        if name not in self._programs:
            return function(*args, **options)
        self._wait(name)
        program = self._programs[name].result()
        if program is None:
            # The file that was kept cannot be read.
            del self._programs[name]
            self._begin(name, may_read=False)
            self._wait(name)
            program = self._programs[name].result()
        assert program is not None
        return program(*args, **{name: options[name] for name in options if name not in _STATIC})

    def read_prompt(self, target: Model, drafter: Drafter | None) -> DecodeState:
        """Returns the state that has read the prompt; the first step takes its last row."""
        with self._explain_out_of_memory(target, drafter):
            state = self._call("begin", _BEGIN, target, drafter, self._requests, **self._options)
            last, size = int(np.max(self._requests.lengths)), self._chunk["chunk_size"]
            for done in np.arange(0, last, size, dtype=np.int32):
                operands = (target, drafter, state, done)
                state, rows = self._call("chunk", _CHUNK, *operands, **self._chunk)
            self._first_rows = jax.block_until_ready(rows)
            return state

    def draft(self, drafter: Drafter | None, state: DecodeState) -> DecodeState:
        """Returns the state with the drafts of the next step, which would draft them itself."""
        hidden, self._hidden = self._hidden, None
        if drafter is None or hidden is None or not _drafts(state):
            return state
        return self._run_draft(drafter, state, hidden)

    def _run_draft(self, drafter: Drafter, state: DecodeState, hidden: Any) -> DecodeState:
        state, cache = _without_cache(state)
        state = self._call("draft", _DRAFT, drafter, state, hidden, **self._options)
        return state._replace(target_cache=cache)

    def step(self, target: Model, drafter: Drafter | None, state: DecodeState) -> DecodeState:
        """Returns the state after a step; the state that was given is used up.

        A step drafts first, so that a text need not wait for what follows its last token.
        """
        with self._explain_out_of_memory(target, drafter):
            state = self.draft(drafter, state)
            rows, self._first_rows = self._first_rows, None
            if rows is None:
                k = self._k if _drafts(state) else self._plain_k
                self._begin_step(k)
                state, rows = self._compute_rows(target, state, k)
            state = self._commit(drafter, state, rows)
            if _drafts(state):
                self._begin("draft")
                # A model drafts whenever it is asked, a lookup may find nothing in a whole text.
                if self._has_draft_model:
                    self._begin_step(self._k)
            return jax.block_until_ready(state)

    def _explain_out_of_memory(
        self, target: Model, drafter: Drafter | None
    ) -> contextlib.AbstractContextManager[None]:
        return explain_out_of_memory(target, drafter, *self._requests.token_ids.shape)

    def _compute_rows(self, target: Model, state: DecodeState, k: int) -> tuple[DecodeState, Any]:
        state, cache = _without_cache(state)
        operands = (target, state, cache)
        cache, rows = self._call(f"rows {k}", _ROWS, *operands, **self._rows_options(k))
        return state._replace(target_cache=cache), rows

    def _commit(self, drafter: Drafter | None, state: DecodeState, rows: Any) -> DecodeState:
        state, cache = _without_cache(state)
        name = f"commit {rows.hidden.shape[1] - 1}"
        operands = (drafter, state, rows)
        state, self._hidden = self._call(name, _COMMIT, *operands, **self._options)
        return state._replace(target_cache=cache)


def _without_cache(state: DecodeState) -> tuple[DecodeState, Any]:
    """Returns a state without the target's cache, and the cache."""
    return state._replace(target_cache=None), state.target_cache


def _shapes_of(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _drafts(state: DecodeState) -> bool:
    return bool(np.max(np.asarray(state.draft.num_tokens)) > 0)
