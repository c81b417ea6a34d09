"""The programs that stream a text, compiled next to one another and before they are needed.

    begin -> chunk -> ... -> chunk -> first -> draft -> rows -> commit -> draft -> rows -> ...

`specjax.step` is one program, which takes seconds to compile and drafts last. Here each part of a
step is a program, and a step drafts first: a text begins as soon as the programs that read the
prompt and commit its first token are compiled. A program writes into the buffers of its state.
"""

import contextlib
import functools
import os
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax
import numpy as np

from specjax.cli.program_store import ProgramStore
from specjax.decode.capacity import explain_out_of_memory
from specjax.decode.compile.compiler_options import prefill_options, small_program_options
from specjax.decode.draft_step import draft_budget, run_draft
from specjax.decode.drafters import Drafter, Models
from specjax.decode.options import StaticOptions, StepOptions
from specjax.decode.prefill import begin_prefill, read_prompt_chunk
from specjax.decode.state import DecodeState, RequestBatch
from specjax.decode.step import commit_emitted, compute_rows, extend_drafter, verify_pending
from specjax.decode.target_step import TargetRows, count_rows, gather_row
from specjax.types import Draft, Model

__all__ = ["StreamPrograms"]


def _commit_rows(
    drafter: Drafter | None, state: DecodeState, rows: TargetRows, *, options: StepOptions
) -> tuple[DecodeState, jax.Array]:
    """Verifies and commits a step, and decides how many tokens the next one drafts.

    Args:
      drafter: as in `run_step`.
      state: before the step.
      rows: of the last token and the draft; the first alone after a prompt.
      options: of the step.

    Returns:
      The state without a draft, where `num_tokens` is the budget of each request, and the hidden
      states [B, D] that decided the last tokens.
    """
    pending = state.draft
    if rows.hidden.shape[1] < count_rows(state):
        none = Draft(pending.token_ids[:, :0], num_tokens=pending.num_tokens)
        state = state._replace(draft=none)
    info = verify_pending(state, rows, options)
    after = commit_emitted(state, rows, info)
    after = extend_drafter(drafter, state, after, rows)
    num_tokens = draft_budget(drafter, after, options.config)
    after = after._replace(draft=pending.replace(num_tokens=num_tokens))
    return after, gather_row(rows.hidden, info.verification.num_accepted)


_jit_part = functools.partial(jax.jit, static_argnames="options", donate_argnames="state")
_FUNCTIONS = {
    "begin": jax.jit(begin_prefill, static_argnames="options"),
    "chunk": _jit_part(read_prompt_chunk),
    "first": _jit_part(_commit_rows),
    "draft": _jit_part(run_draft),
    "rows": _jit_part(compute_rows),
    "commit": _jit_part(_commit_rows),
}


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
        self.compiles_at_calls = target.placement is not None
        self._is_late = self.compiles_at_calls or jax.config.values["jax_disable_jit"]
        self._models, self._store = _shapes_of(Models(target, drafter)), store
        self._requests, self._chunk_size = requests, options.chunk_size
        self._options: dict[str, Any] = dict.fromkeys(_FUNCTIONS, options.step)
        self._options["chunk"] = options
        # The prompt's row, which the first step commits.
        self._first_rows: Any = None
        # From the last commit: the next step begins with drafts from it.
        self._hidden: Any = None
        self._pool = futures.ThreadPoolExecutor()
        self._programs: dict[str, futures.Future[Callable[..., Any] | None]] = {}
        # Programs that XLA is not to compile yet.
        self._lowered: dict[str, jax.stages.Lowered] = {}
        self._begin("begin", "chunk", "first")
        self._steps = ("rows", "commit") if drafter is None else ("draft", "rows", "commit")
        if (os.cpu_count() or 1) > 4:
            self._begin(*self._steps)
        # Fewer cores have enough to do until the first token is there, Python has not.
        for name in self._steps:
            if name not in self._programs and not self._is_late and not self._is_kept(name):
                self._lowered[name] = self._lower(name)

    def wait_for_prompt(self) -> None:
        """Waits for the programs that read the prompt."""
        self._wait("begin", "chunk")

    def warm_up(self, target: Model, drafter: Drafter | None) -> None:
        """Compiles all programs and runs each on a state that is dropped.

        A program takes longer when it runs first.
        """
        self._begin(*self._steps)
        state = self.step(target, drafter, self.read_prompt(target, drafter))
        self.step(target, drafter, state)

    def read_prompt(self, target: Model, drafter: Drafter | None) -> DecodeState:
        """Returns the state that has read the prompt; the first step takes its last row."""
        end = int(np.max(self._requests.lengths))
        with self._explain_out_of_memory(target, drafter):
            state = self._call("begin", Models(target, drafter), self._requests)
            for done in np.arange(0, end, self._chunk_size, dtype=np.int32):
                state, rows = self._call("chunk", Models(target, drafter), state, done)
            self._first_rows, self._hidden = jax.block_until_ready(rows), None
            return state

    def step(self, target: Model, drafter: Drafter | None, state: DecodeState) -> DecodeState:
        """Returns the state after a step; the state that was given is used up.

        A step drafts first, so that a text need not wait for what follows its last token.
        """
        name, rows, self._first_rows = "first", self._first_rows, None
        with self._explain_out_of_memory(target, drafter):
            if rows is None:
                self._begin(*self._steps)
                name, state = "commit", self.draft(drafter, state)
                state, rows = self._call("rows", Models(target, drafter), state)
            state, self._hidden = self._call(name, drafter, state, rows)
            return jax.block_until_ready(state)

    def draft(self, drafter: Drafter | None, state: DecodeState) -> DecodeState:
        """Returns the state with the drafts of the next step, which would draft them itself."""
        hidden, self._hidden = self._hidden, None
        if drafter is None or hidden is None or not np.any(np.asarray(state.draft.num_tokens) > 0):
            return state
        drafted: DecodeState = self._call("draft", drafter, state, hidden)
        return drafted

    def _explain_out_of_memory(
        self, target: Model, drafter: Drafter | None
    ) -> contextlib.AbstractContextManager[None]:
        return explain_out_of_memory(Models(target, drafter), *self._requests.token_ids.shape)

    def _call(self, name: str, *operands: Any) -> Any:
        self._begin(name)
        if name not in self._programs:
            return _FUNCTIONS[name](*operands, options=self._options[name])
        self._wait(name)
        program = self._programs[name].result()
        if program is None:
            # The file that was kept cannot be read.
            del self._programs[name]
            self._begin(name, may_read=False)
            self._wait(name)
            program = self._programs[name].result()
        assert program is not None
        return program(*operands)

    def _wait(self, *names: str) -> None:
        start = time.perf_counter()
        futures.wait([self._programs[name] for name in names if name in self._programs])
        self.seconds_waited += time.perf_counter() - start

    def _begin(self, *names: str, may_read: bool = True) -> None:
        """Begins to read or to compile programs that are not compiled when they are called."""
        for name in names:
            if name in self._programs or self._is_late:
                continue
            if may_read and self._store is not None and self._is_kept(name):
                self._programs[name] = self._pool.submit(self._store.load, name)
                continue
            # Traced and lowered by this thread, whose settings of JAX may be its own.
            lowered = self._lowered.pop(name, None) or self._lower(name)
            self._programs[name] = self._pool.submit(self._compile, name, lowered)

    def _is_kept(self, name: str) -> bool:
        return self._store is not None and name in self._store

    def _compile(self, name: str, lowered: jax.stages.Lowered) -> Callable[..., Any]:
        # A drafter without parameters looks tokens up.
        looks_up = not jax.tree.leaves(self._models.drafter and self._models.drafter.params)
        is_small = name in ("begin", "first", "commit") or (name == "draft" and looks_up)
        options = prefill_options() if name == "chunk" else None
        program = lowered.compile(small_program_options() if is_small else options)
        if self._store is not None:
            self._store.save(name, program)
        return program

    def _lower(self, name: str) -> jax.stages.Lowered:
        return _FUNCTIONS[name].lower(*self._operands(name), options=self._options[name])

    def _operands(self, name: str) -> tuple[Any, ...]:
        """Returns shapes of a program's operands, most of them results of the one before."""
        drafter = self._models.drafter
        if name == "begin":
            return self._models, self._requests
        if name == "chunk":
            return self._models, self._results("begin"), np.int32(0)
        if name == "first":
            return drafter, *self._results("chunk")
        if name == "commit":
            return drafter, *self._results("rows")
        state, hidden = self._results("first")
        if name == "draft":
            return drafter, state, hidden
        return self._models, state if drafter is None else self._results("draft")

    def _results(self, name: str) -> Any:
        return _FUNCTIONS[name].eval_shape(*self._operands(name), options=self._options[name])


def _shapes_of(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
