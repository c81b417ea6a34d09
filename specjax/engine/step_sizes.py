"""Steps over fewer slots than an engine has, for the times when few of them hold a request.

    sizes      rising numbers of slots, the last of which is B
    chosen     i32[n], the slots of a step: n is the smallest size >= the occupied slots

A step of n < B slots, compiled once for each size:

    gather     arrays of the requests    [B, ...] -> [n, ...]
    step       `step_slots` of n requests; the caches of all B slots stay where they are. The models
               get `specjax.types.Pieces`: request i of the step is row chosen[i] of the caches
    scatter    arrays of the requests    [n, ...] -> [B, ...]
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from specjax.checks import check_count
from specjax.decode.drafters import Models
from specjax.decode.options import StepOptions
from specjax.decode.state import DecodeState
from specjax.engine.slots import NO_BATCH_AXIS, PromptCaches, StepOutput, slot_axes, step_slots
from specjax.types import Pieces


def read_sizes(num_slots: int | Sequence[int]) -> tuple[int, ...]:
    """Returns the sizes of an engine's steps, of which the last is B.

    Args:
      num_slots: as in `Engine`, unchecked.

    Raises:
      ValueError: if the sizes are not rising Python ints >= 1.

    Example:
      >>> read_sizes(64), read_sizes((8, 64))
      ((64,), (8, 64))
    """
    given = tuple(num_slots) if isinstance(num_slots, list | tuple | range) else (num_slots,)
    why = "the requests decoded at once, or rising sizes of steps such as (8, 64)"
    sizes = tuple(check_count("num_slots", n, 1, why) for n in given)
    if not sizes or sizes != tuple(sorted(set(sizes))):
        raise ValueError(
            f"num_slots is {num_slots!r}; it needs rising sizes of steps, the last of which is the "
            "number of slots, such as (8, 64)."
        )
    return sizes


def check_reads_rows(models: Models, sizes: tuple[int, ...]) -> None:
    """Refuses several sizes if a model cannot read chosen rows of its cache."""
    for name, one in zip(("target", "drafter"), models, strict=True):
        if len(sizes) > 1 and one is not None and not one.reads_pieces:
            raise ValueError(
                f"num_slots is {sizes}, and the {name} has reads_pieces=False; a step over fewer "
                f"slots needs models that read some rows of a cache. Set num_slots={sizes[-1]}."
            )


def choose_slots(occupants: Sequence[object | None], sizes: tuple[int, ...]) -> np.ndarray:
    """Returns the slots of a step, i32[n]: all, or the occupied ones and then empty ones.

    Args:
      occupants: for each of B slots its request, or None.
      sizes: from `read_sizes`; the smallest that holds the occupied slots is n.

    Example:
      >>> choose_slots([None, "a", None, "b"], (2, 4)), choose_slots("abc", (2, 3))
      (array([1, 3], dtype=int32), array([0, 1, 2], dtype=int32))
    """
    is_empty = [occupant is None for occupant in occupants]
    size = next(n for n in sizes if n >= is_empty.count(False))
    # A stable sort: occupied slots stay in their order.
    order = range(size) if size == len(is_empty) else np.argsort(is_empty, kind="stable")
    return np.asarray(order[:size], np.int32)


def step_chosen(
    models: Models,
    slots: DecodeState,
    allowed: jax.Array | None,
    chosen: np.ndarray,
    *,
    options: StepOptions,
) -> tuple[DecodeState, StepOutput]:
    """Returns the slots after a step of those chosen, and its output of n rows in their order.

    Args:
      models: as in `Engine`.
      slots: the state before.
      allowed: of all slots, as in `step_slots`.
      chosen: from `choose_slots`.
      options: as in `run_step`.
    """
    if len(chosen) == len(slots.lengths):
        return step_slots(models, slots, allowed, options=options)
    return step_some_slots(models, slots, allowed, chosen, options=options)


@functools.partial(jax.jit, static_argnames="options", donate_argnames="slots")
def step_some_slots(
    models: Models,
    slots: DecodeState,
    allowed: jax.Array | None,
    chosen: jax.Array,
    *,
    options: StepOptions,
) -> tuple[DecodeState, StepOutput]:
    """Returns the results of `step_chosen` for fewer than all slots."""
    leaves, structure = jax.tree.flatten(slots)
    caches = PromptCaches(slots.target_cache, slots.drafter_state)
    axes = slot_axes(slots, jax.tree.map(lambda _: NO_BATCH_AXIS, caches))

    def gather(leaf: jax.Array, axis: int) -> jax.Array:
        return leaf if axis == NO_BATCH_AXIS else leaf[chosen]

    def scatter(leaf: jax.Array, new: jax.Array, axis: int) -> jax.Array:
        return new if axis == NO_BATCH_AXIS else leaf.at[chosen].set(new, unique_indices=True)

    some = jax.tree.unflatten(structure, map(gather, leaves, axes))
    masks = None if allowed is None else allowed[chosen]
    some, output = step_slots(_on_rows(models, chosen), some, masks, options=options)
    after = map(scatter, leaves, jax.tree.leaves(some), axes)
    return jax.tree.unflatten(structure, after), output


def _on_rows(models: Models, rows: jax.Array) -> Models:
    """Returns models for which request i is row rows[i] of caches with more rows.

    Their parameters are pairs of the models' own and the rows.
    """
    target, drafter = models
    target = dataclasses.replace(
        target,
        params=(target.params, rows),
        apply=_bind(target.apply, 2),
        logits=_bind(target.logits),
        apply_with_taps=target.apply_with_taps and _bind(target.apply_with_taps, 2),
        split_logits=target.split_logits and _bind(target.split_logits),
    )
    drafter = drafter and dataclasses.replace(
        drafter,
        params=(drafter.params, rows),
        extend=_bind(drafter.extend, 0),
        propose=_bind(drafter.propose, 0),
    )
    return Models(target, drafter)


@functools.lru_cache(maxsize=64)
def _bind(function: Callable[..., Any], cache: int | None = None) -> Callable[..., Any]:
    """Returns the function with (parameters, rows) as its first argument, and `Pieces` as cache.

    Args:
      function: of parameters and operands.
      cache: which operand is the cache, or None.
    """

    def run(params: tuple[Any, jax.Array], *operands: Any, **options: Any) -> Any:
        own, rows = params
        given = list(operands)
        if cache is not None:
            given[cache] = Pieces(given[cache], rows)
        return function(own, *given, **options)

    return run
