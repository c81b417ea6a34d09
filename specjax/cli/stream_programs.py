"""The programs that stream a text, compiled next to one another and before they are needed.

    prompt -> rows -> commit -> draft -> rows -> commit -> draft -> ...

`specjax.step` is one program. Here its parts are programs of their own: a text begins once the
first three are compiled, on as many cores, and a step that drafts nothing computes one row without
asking the device. They write into the buffers of the state that they are given.
"""

import contextlib
import os
import time
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

__all__ = ["StreamPrograms"]

_STATIC = ("config", "implementation")
_ROWS = jax.jit(compute_rows, static_argnames=("k", "implementation"), donate_argnames="cache")
_COMMIT = jax.jit(commit_rows, static_argnames=_STATIC, donate_argnames="state")
_DRAFT = jax.jit(run_draft, static_argnames=_STATIC, donate_argnames="state")


class StreamPrograms:
    """The programs of texts of one kind. Those of the prompt begin to be compiled at once.

    Args:
      target: the model; only the shapes of its weights are read.
      drafter: the drafter, likewise, or None for plain decoding.
      arguments: of `run_prefill`.

    Attributes:
      seconds_waited: for compilations.
    """

    def __init__(self, target: Model, drafter: Drafter | None, arguments: dict[str, Any]) -> None:
        self.seconds_waited = 0.0
        self._arguments = arguments
        self._implementation = {"implementation": arguments["implementation"]}
        self._options = {"config": arguments["config"], **self._implementation}
        self._k = 0 if drafter is None else arguments["config"].num_speculative_tokens
        # How many drafted tokens the steps feed in which nothing was drafted.
        self._plain_k = 0 if arguments["settings"].k_by_rate is not None else self._k
        self._workers = min(max(os.cpu_count() or 1, 3), 5)
        self._pool = futures.ThreadPoolExecutor(self._workers)
        self._compilations: dict[Any, futures.Future[Any]] = {}
        # From the last commit: drafts are made of it when the next step begins.
        self._hidden: Any = None
        self._begin("prompt", prefill_program(), target, drafter, **arguments)
        shapes = run_prefill.eval_shape(target, drafter, **arguments)
        self._begin_rows(target, shapes, self._plain_k)
        state, cache = _without_cache(shapes)
        options = {"k": self._plain_k, **self._implementation}
        rows = _ROWS.eval_shape(target, state, cache, **options)[1]
        self._begin("commit", _COMMIT, drafter, state, rows, **self._options)
        self._draft_shapes = _COMMIT.eval_shape(drafter, state, rows, **self._options)
        if self._workers > 4:
            # Fewer cores have enough to do, and some texts draft nothing.
            self._begin_rows(target, shapes, self._k)
            self._begin_draft(drafter)

    def _begin(self, name: Any, program: Any, *args: Any, **options: Any) -> None:
        # JAX gives what is compiled here to the call that comes.
        if name not in self._compilations and not jax.config.values["jax_disable_jit"]:
            self._compilations[name] = self._pool.submit(program.lower(*args, **options).compile)

    def _begin_rows(self, target: Model, state: DecodeState, k: int) -> None:
        state, cache = _without_cache(state)
        self._begin(k, _ROWS, target, state, cache, k=k, **self._implementation)

    def _begin_draft(self, drafter: Drafter | None) -> None:
        if drafter is not None:
            state, _, hidden = self._draft_shapes
            self._begin("draft", _DRAFT, drafter, state, hidden, **self._options)

    def wait_for_prompt(self) -> None:
        """Waits for the program that reads the prompt."""
        self._wait("prompt")

    def wait_for_first_token(self) -> None:
        """Waits for the programs of a step without drafts."""
        self._wait(self._plain_k, "commit")

    def warm_up(self, target: Model, drafter: Drafter | None, state: DecodeState) -> DecodeState:
        """Returns the state after all programs are compiled and the rows of drafts ran once.

        A program takes longer when it runs first. What it writes, the next step writes anew.
        """
        self._begin_draft(drafter)
        state = self._compute_rows(target, state, self._k)[0]
        self._wait(*self._compilations)
        return state

    def _wait(self, *names: Any) -> None:
        # The call of a program that failed compiles it again, and says why.
        start, begun = time.perf_counter(), self._compilations
        futures.wait([begun[name] for name in names if name in begun])
        self.seconds_waited += time.perf_counter() - start

    def _call(self, name: Any, program: Any, *args: Any, **options: Any) -> Any:
        self._wait(name)
        return program(*args, **options)

    def read_prompt(self, target: Model, drafter: Drafter | None) -> DecodeState:
        """Returns the state that has read the prompt but for its last token."""
        with self._explain_out_of_memory(target):
            state = self._call("prompt", prefill_program(), target, drafter, **self._arguments)
            return jax.block_until_ready(state)

    def draft(self, drafter: Drafter | None, state: DecodeState) -> DecodeState:
        """Returns the state with the drafts of the next step, which would draft them itself."""
        hidden, self._hidden = self._hidden, None
        if drafter is None or hidden is None or not _drafts(state):
            return state
        state, cache = _without_cache(state)
        state = self._call("draft", _DRAFT, drafter, state, hidden, **self._options)
        return state._replace(target_cache=cache)

    def step(self, target: Model, drafter: Drafter | None, state: DecodeState) -> DecodeState:
        """Returns the state after a step; the state that was given is used up.

        A step drafts first, so that a text need not wait for what follows its last token.
        """
        with self._explain_out_of_memory(target):
            state = self.draft(drafter, state)
            k = self._k if _drafts(state) else self._plain_k
            state, rows = self._compute_rows(target, state, k)
            state, cache = _without_cache(state)
            operands = (drafter, state, rows)
            state, _, self._hidden = self._call("commit", _COMMIT, *operands, **self._options)
            if _drafts(state):
                self._begin_draft(drafter)
            return jax.block_until_ready(state._replace(target_cache=cache))

    def _explain_out_of_memory(self, target: Model) -> contextlib.AbstractContextManager[None]:
        return explain_out_of_memory(target.init_cache, *self._arguments["prompt"].shape)

    def _compute_rows(self, target: Model, state: DecodeState, k: int) -> tuple[DecodeState, Any]:
        self._begin_rows(target, state, k)
        state, cache = _without_cache(state)
        cache, rows = self._call(k, _ROWS, target, state, cache, k=k, **self._implementation)
        return state._replace(target_cache=cache), rows


def _without_cache(state: DecodeState) -> tuple[DecodeState, Any]:
    """Returns a state without the target's cache, and the cache."""
    return state._replace(target_cache=None), state.target_cache


def _drafts(state: DecodeState) -> bool:
    return bool(np.max(np.asarray(state.draft.num_tokens)) > 0)
