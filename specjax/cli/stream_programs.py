"""The programs that stream a text, compiled next to one another and before they are needed.

    begin -> chunk -> ... -> chunk -> first -> draft -> rows -> commit -> draft -> rows -> ...

`specjax.step` is one program, which takes seconds to compile and drafts last. Here each part of a
step is a program, and a step drafts first: a text begins as soon as the programs that read the
prompt and commit its first token are compiled. A program writes into the buffers of its state.
"""

import functools
import os
import pathlib
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.cli.program_store import read_programs, write_programs
from specjax.decode.capacity import explain_out_of_memory
from specjax.decode.compile.compiler_options import prefill_options, small_program_options
from specjax.decode.draft_step import draft_budget, run_draft
from specjax.decode.drafters import Drafter, Models
from specjax.decode.options import StaticOptions, StepOptions
from specjax.decode.prefill import begin_prefill, read_prompt_chunk
from specjax.decode.state import DecodeState, RequestBatch
from specjax.decode.step import compute_rows, verify_and_commit
from specjax.decode.target_step import TargetRows, gather_row
from specjax.engine.slots import PromptCaches
from specjax.types import Model


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
    after, info = verify_and_commit(drafter, state, rows, options)
    num_tokens = draft_budget(drafter, after, options.config)
    after = after._replace(draft=after.draft.replace(num_tokens=num_tokens))
    return after, gather_row(rows.hidden, info.verification.num_accepted)


def _resume_prefill(
    models: Models, requests: RequestBatch, caches: PromptCaches, *, options: StepOptions
) -> DecodeState:
    """Returns the state of `begin_prefill` with caches that hold the beginning of the prompts."""
    return begin_prefill(models, requests, options=options)._replace(**caches._asdict())


_jit_part = functools.partial(jax.jit, static_argnames="options", donate_argnames="state")
_FUNCTIONS = {
    "begin": jax.jit(begin_prefill, static_argnames="options"),
    "resume": jax.jit(_resume_prefill, static_argnames="options", donate_argnames="caches"),
    "chunk": _jit_part(read_prompt_chunk),
    "first": _jit_part(_commit_rows),
    "draft": _jit_part(run_draft),
    "rows": _jit_part(compute_rows),
    "commit": _jit_part(_commit_rows),
}
_copy = jax.jit(functools.partial(jax.tree.map, jnp.copy))


class StreamPrograms:
    """The programs of texts of one kind; compilation begins with the programs of the first token.

    Args:
      target: the model; only the shapes of its weights are read.
      drafter: the drafter, or None for plain decoding.
      requests: of `run_prefill`; all prompts end in the same chunk.
      options: of `run_prefill`.
      path: of the file that keeps programs of this kind, or None. It is written once all are
        compiled: a command that ends before that, or before its second step, keeps none.

    Attributes:
      seconds_waited: for compilations, and for the first call of a function without a program.
    """

    def __init__(
        self,
        target: Model,
        drafter: Drafter | None,
        requests: RequestBatch,
        options: StaticOptions,
        path: pathlib.Path | None = None,
    ) -> None:
        self.seconds_waited = 0.0
        self._requests, self._options = requests, options.step
        self._chunk_size = min(options.chunk_size, requests.token_ids.shape[1])
        # The prompt's row, which the first step commits.
        self._first_rows: Any = None
        # From the last commit: the next step begins with drafts from it.
        self._hidden: Any = None
        # As many at once as there are processors, those of the first token first.
        self._pool = futures.ThreadPoolExecutor(os.cpu_count())
        self._programs: dict[str, futures.Future[Callable[..., Any] | None]] = {}
        # Functions that load or compile the programs that nothing has begun yet.
        self._pending: dict[str, Callable[[], Callable[..., Any] | None]] = {}
        self._path: pathlib.Path | None = None
        # Functions without a program: their first call compiled them.
        self._called: set[str] = set()
        # Where a state lies on a mesh is known once it is computed.
        if target.placement is not None or jax.config.values["jax_disable_jit"]:
            return
        if path is not None:
            self._pending |= read_programs(path)
        # Few cores have enough to do until the first token is there.
        has_cores = not self._pending and (os.cpu_count() or 1) > 4
        if not self._pending:
            self._path = path
            self._lower_all(Models(target, drafter))
        self._begin(*_FUNCTIONS if has_cores else ("begin", "chunk", "first"))

    def _begin(self, *names: str) -> None:
        """Begins to load or compile programs; keeps all in the file once all are begun."""
        for name in names:
            if name in self._pending:
                self._programs[name] = self._pool.submit(self._pending.pop(name))
        if self._path is not None and not self._pending:
            self._pool.submit(self._keep, self._path)
            self._path = None

    def _lower_all(self, models: Models) -> None:
        """Lowers the programs, in the order in which a text needs them."""
        drafter = models.drafter
        # A drafter without parameters looks tokens up.
        looks_up = drafter is not None and not jax.tree.leaves(drafter.params)
        begun = self._lower("begin", models, self._requests, is_small=True)
        read = self._lower("chunk", models, begun, *self._chunk(0))
        state, hidden = self._lower("first", drafter, *read, is_small=True)
        if drafter is not None:
            state = self._lower("draft", drafter, state, hidden, is_small=looks_up)
        rows = self._lower("rows", models, state)
        self._lower("commit", drafter, *rows, is_small=True)

    def _lower(self, name: str, *operands: Any, is_small: bool = False) -> Any:
        """Lowers a program, to be compiled; returns the shapes of its results."""
        # Traced and lowered by this thread, whose settings of JAX may be its own.
        lowered = _FUNCTIONS[name].lower(*operands, options=self._options)
        options = prefill_options() if name == "chunk" else None
        options = small_program_options() if is_small else options
        self._pending[name] = functools.partial(lowered.compile, options)
        return lowered.out_info

    def _keep(self, path: pathlib.Path) -> None:
        write_programs(path, {name: program.result() for name, program in self._programs.items()})

    def wait_for_prompt(self) -> None:
        """Waits for the programs that read the prompt."""
        start = time.perf_counter()
        futures.wait([self._programs[name] for name in ("begin", "chunk") if self._programs])
        self.seconds_waited += time.perf_counter() - start

    def warm_up(self, target: Model, drafter: Drafter | None, state: DecodeState) -> None:
        """Waits for the programs of a step and runs them on a copy of the state.

        A program takes longer when it runs first.
        """
        hidden = self._hidden
        with explain_out_of_memory(Models(target, drafter), *self._requests.token_ids.shape):
            self.step(target, drafter, _copy(state))
        self._hidden = hidden

    def read_prompt(
        self,
        target: Model,
        drafter: Drafter | None,
        requests: RequestBatch | None = None,
        reused: tuple[int, PromptCaches] | None = None,
    ) -> DecodeState:
        """Returns the state that has read the prompt; the first step takes its last row.

        Args:
          target: the model.
          drafter: the drafter, or None.
          requests: of the shapes and options of those before; None takes those again.
          reused: how many tokens of the prompt need not be read, and caches that hold them, which
            are used up; or None.
        """
        if requests is not None:
            self._requests = requests
        end = int(np.max(self._requests.lengths))
        models = Models(target, drafter)
        with explain_out_of_memory(models, *self._requests.token_ids.shape):
            if reused is None:
                begin, state = 0, self._call("begin", models, self._requests)
            else:
                begin, caches = reused
                state = self._call("resume", models, self._requests, caches)
            for done in range(begin, end, self._chunk_size):
                state, rows = self._call("chunk", models, state, *self._chunk(done))
            self._first_rows, self._hidden = jax.block_until_ready(rows), None
            return state

    def _chunk(self, done: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of the prompts from `done` on, and their positions, two i32[B, C]."""
        prompt, lengths, _ = self._requests
        part = np.asarray(prompt)[:, done : done + self._chunk_size]
        ids = np.pad(part, ((0, 0), (0, self._chunk_size - part.shape[1])))
        index = np.arange(done, done + self._chunk_size, dtype=np.int32)[None]
        is_token = index < np.asarray(lengths)[:, None]
        return np.where(is_token, ids, 0), np.where(is_token, index, -1)

    def step(self, target: Model, drafter: Drafter | None, state: DecodeState) -> DecodeState:
        """Returns the state after a step; the state that was given is used up.

        A step drafts first, so that a text need not wait for what follows its last token.
        """
        name, rows, self._first_rows = "first", self._first_rows, None
        models = Models(target, drafter)
        with explain_out_of_memory(models, *self._requests.token_ids.shape):
            if rows is None:
                self._begin(*_FUNCTIONS)
                name, state = "commit", self.draft(drafter, state)
                state, rows = self._call("rows", models, state)
            state, self._hidden = self._call(name, drafter, state, rows)
            return jax.block_until_ready(state)

    def draft(self, drafter: Drafter | None, state: DecodeState) -> DecodeState:
        """Returns the state with the drafts of the next step, which would draft them itself."""
        hidden, self._hidden = self._hidden, None
        if drafter is None or hidden is None or not np.any(np.asarray(state.draft.num_tokens) > 0):
            return state
        drafted: DecodeState = self._call("draft", drafter, state, hidden)
        return drafted

    def _call(self, name: str, *operands: Any) -> Any:
        start = time.perf_counter()
        program = self._programs[name].result() if name in self._programs else None
        if program is not None:
            self.seconds_waited += time.perf_counter() - start
            return program(*operands)
        results = _FUNCTIONS[name](*operands, options=self._options)
        if name not in self._called:
            self._called.add(name)
            self.seconds_waited += time.perf_counter() - start
        return results
