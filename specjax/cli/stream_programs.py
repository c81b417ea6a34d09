"""The programs that stream a text, compiled next to one another and before they are needed.

    prompt -> commit -> draft -> rows -> commit -> draft -> rows -> ...

`specjax.step` is one program. Here its parts are programs of their own: a text begins once the
first two are compiled, on as many cores, and a step that drafts nothing computes one row without
asking the device. They write into the buffers of the state that they are given.
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

from specjax.decode.capacity import explain_out_of_memory
from specjax.decode.draft_next import run_draft
from specjax.decode.drafters import Drafter
from specjax.decode.loop import commit_rows
from specjax.decode.prefill import prefill_program, run_prefill
from specjax.decode.state_and_info import DecodeState
from specjax.decode.target_rows import compute_rows
from specjax.model import Model
from specjax.programs.program_store import ProgramStore

__all__ = ["StreamPrograms"]

_ROWS = jax.jit(
    compute_rows, static_argnames=("k", "implementation", "taps"), donate_argnames="cache"
)
_COMMIT = jax.jit(
    commit_rows, static_argnames=("config", "implementation"), donate_argnames="state"
)
_DRAFT = jax.jit(run_draft, static_argnames=("config", "implementation"), donate_argnames="state")

# Options that are no operands of a compiled program.
_STATIC = ("config", "implementation", "chunk_size", "with_rows", "k", "taps")


class StreamPrograms:
    """The programs of texts of one kind. Those of the first token begin to be compiled at once.

    Args:
      target: the model; only the shapes of its weights are read.
      drafter: the drafter, likewise, or None for plain decoding.
      arguments: of `run_prefill`.
      store: where programs of this kind are kept, or None.

    Attributes:
      seconds_waited: for compilations.
    """

    def __init__(
        self,
        target: Model,
        drafter: Drafter | None,
        arguments: dict[str, Any],
        store: ProgramStore | None = None,
    ) -> None:
        self.seconds_waited = 0.0
        self._target, self._drafter = _shapes_of(target), _shapes_of(drafter)
        self._arguments, self._store = arguments, store
        self._implementation = {"implementation": arguments["implementation"]}
        self._options = {"config": arguments["config"], **self._implementation}
        self._k = 0 if drafter is None else arguments["config"].num_speculative_tokens
        # How many drafted tokens the steps feed in which nothing was drafted.
        self._plain_k = 0 if arguments["settings"].k_by_rate is not None else self._k
        workers = min(max(os.cpu_count() or 1, 3), 5)
        self._pool = futures.ThreadPoolExecutor(workers)
        # Of each name: what runs a program that was read, None for the call that JAX compiles.
        self._programs: dict[str, futures.Future[Callable[..., Any] | None]] = {}
        # From the last commit: drafts are made of it when the next step begins.
        self._hidden: Any = None
        # From the prompt: what the first step commits.
        self._first_rows: Any = None
        self._begin("prompt")
        self._begin("commit")
        if workers > 4:
            # Fewer cores have enough to do until the first token is there.
            self.begin_steps()
            self._begin(f"rows {self._k}")
            self._begin("draft")

    def begin_steps(self) -> None:
        """Begins to compile what a second token needs."""
        self._begin(f"rows {self._plain_k}")

    def _begin(self, name: str) -> None:
        if name in self._programs or jax.config.values["jax_disable_jit"]:
            return
        if name == "draft" and self._drafter is None:
            return
        if self._store is not None and name in self._store:
            self._programs[name] = self._pool.submit(self._store.load, name)
        else:
            self._programs[name] = self._pool.submit(self._compile, name, self._lower(name))

    def _compile(self, name: str, lowered: jax.stages.Lowered) -> None:
        # JAX gives what is compiled here to the call that comes.
        compiled = lowered.compile()
        if self._store is not None:
            self._store.save(name, lowered, compiled)

    def _lower(self, name: str) -> jax.stages.Lowered:
        """Returns a program traced for the shapes of its operands."""
        if name == "prompt":
            arguments = self._arguments | {"with_rows": True}
            return prefill_program().lower(self._target, self._drafter, **arguments)
        if name == "commit":
            return _COMMIT.lower(self._drafter, *self._commit_shapes, **self._options)
        if name == "draft":
            state, _, hidden = _COMMIT.eval_shape(
                self._drafter, *self._commit_shapes, **self._options
            )
            return _DRAFT.lower(self._drafter, state, hidden, **self._options)
        return _ROWS.lower(self._target, *self._rows_shapes, **self._rows_options(name))

    def _rows_options(self, name: str) -> dict[str, Any]:
        taps = () if self._drafter is None else self._drafter.taps
        return {"k": int(name.removeprefix("rows ")), "taps": taps, **self._implementation}

    @functools.cached_property
    def _rows_shapes(self) -> tuple[Any, Any]:
        """The state that has read a prompt, and its cache."""
        return _without_cache(self._prompt_shapes[0])

    @functools.cached_property
    def _commit_shapes(self) -> tuple[Any, Any]:
        """That state, and rows."""
        return self._rows_shapes[0], self._prompt_shapes[1]

    @functools.cached_property
    def _prompt_shapes(self) -> Any:
        return run_prefill.eval_shape(
            self._target, self._drafter, **self._arguments, with_rows=True
        )

    def wait_for_prompt(self) -> None:
        """Waits for the program that reads the prompt."""
        self._wait("prompt")

    def wait_for_first_token(self) -> None:
        """Waits for the program that commits."""
        self._wait("commit")

    def warm_up(self, target: Model, drafter: Drafter | None) -> None:
        """Compiles all programs and runs each on a state that is dropped.

        A program takes longer when it runs first.
        """
        self.begin_steps()
        self._begin(f"rows {self._k}")
        self._begin("draft")
        state = self.step(target, drafter, self.read_prompt(target, drafter))
        hidden, self._hidden = self._hidden, None
        if drafter is not None:
            state = self._run_draft(drafter, state, hidden)
        for k in {self._plain_k, self._k}:
            state, _ = self._compute_rows(target, state, k)

    def _wait(self, *names: str) -> None:
        start, begun = time.perf_counter(), self._programs
        futures.wait([begun[name] for name in names if name in begun])
        self.seconds_waited += time.perf_counter() - start

    def _call(self, name: str, program: Any, *args: Any, **options: Any) -> Any:
        self._begin(name)
        self._wait(name)
        begun = self._programs.get(name)
        # The call of a program that failed compiles it again, and says why.
        stored = None if begun is None or begun.exception() else begun.result()
        if stored is None:
            return program(*args, **options)
        return stored(*args, **{name: options[name] for name in options if name not in _STATIC})

    def read_prompt(self, target: Model, drafter: Drafter | None) -> DecodeState:
        """Returns the state that has read the prompt but for its last token."""
        with self._explain_out_of_memory(target, drafter):
            arguments = self._arguments | {"with_rows": True}
            read = self._call("prompt", prefill_program(), target, drafter, **arguments)
            state, self._first_rows = jax.block_until_ready(read)
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
                state, rows = self._compute_rows(target, state, k)
            state, cache = _without_cache(state)
            operands = (drafter, state, rows)
            state, _, self._hidden = self._call("commit", _COMMIT, *operands, **self._options)
            if _drafts(state):
                self._begin("draft")
            return jax.block_until_ready(state._replace(target_cache=cache))

    def _explain_out_of_memory(
        self, target: Model, drafter: Drafter | None
    ) -> contextlib.AbstractContextManager[None]:
        return explain_out_of_memory(target, drafter, *self._arguments["prompt"].shape)

    def _compute_rows(self, target: Model, state: DecodeState, k: int) -> tuple[DecodeState, Any]:
        state, cache = _without_cache(state)
        name = f"rows {k}"
        cache, rows = self._call(name, _ROWS, target, state, cache, **self._rows_options(name))
        return state._replace(target_cache=cache), rows


def _without_cache(state: DecodeState) -> tuple[DecodeState, Any]:
    """Returns a state without the target's cache, and the cache."""
    return state._replace(target_cache=None), state.target_cache


def _shapes_of(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _drafts(state: DecodeState) -> bool:
    return bool(np.max(np.asarray(state.draft.num_tokens)) > 0)
