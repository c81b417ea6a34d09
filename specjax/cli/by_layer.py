"""Cuts a function at its layers: one program for all of them, which the host runs one by one.

    embed -> layer -> layer -> ... -> layer -> norm, logits

XLA inlines an inner `jit` at every call, and on a CPU compiles each copy: a decode step of 30
layers takes 4 s of processor time, one layer 0.2 s. Run from the host, the step takes no longer: a
launch takes 10 us, a layer of that model 900.
"""

import collections
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun

__all__ = ["CompiledParts", "LoweredParts", "Part", "Plan", "cut_at_layers", "lower_by_layer"]

# An inner function of smaller operands is not worth a launch: it may be `jnp.where`.
_LEAST_BYTES = 2**20


class Part(NamedTuple):
    """A run of one program.

    Attributes:
      program: its number.
      inputs: slots of its operands.
      outputs: slots of its results.
      dead: slots that no later part reads.
    """

    program: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dead: tuple[int, ...]


class Plan(NamedTuple):
    """In which order programs run, and what is handed from one to another.

    Attributes:
      num_slots: arrays that there are; the function's own operands are the first.
      parts: in their order.
      outputs: slots of the function's results.
    """

    num_slots: int
    parts: tuple[Part, ...]
    outputs: tuple[int, ...]


class CompiledParts(NamedTuple):
    """A function as compiled programs.

    Attributes:
      lowered: what each program was compiled from; None if it was read.
      programs: functions of arrays.
      plan: how they make the function; None if the function is one program.
      structure: of the function's result.
    """

    lowered: Sequence[jax.stages.Lowered] | None
    programs: Sequence[Callable[..., Any]]
    plan: Plan | None
    structure: Any

    def run(self, *args: Any, **named: Any) -> Any:
        """Returns the function's result; static arguments are left out."""
        if self.plan is None:
            return self.programs[0](*args, **named)
        num_slots, parts, outputs = self.plan
        slots = jax.tree.leaves((args, named))
        slots += [None] * (num_slots - len(slots))
        for program, inputs, made, dead in parts:
            results = self.programs[program](*[slots[i] for i in inputs])
            for i in dead:
                slots[i] = None
            for i, result in zip(made, results, strict=True):
                slots[i] = result
        return jax.tree.unflatten(self.structure, [slots[i] for i in outputs])


class LoweredParts(NamedTuple):
    """A function as lowered programs; attributes as in `CompiledParts`."""

    lowered: Sequence[jax.stages.Lowered]
    plan: Plan | None
    structure: Any

    def compile(self, compiler_options: dict[str, str | bool] | None = None) -> CompiledParts:
        """Compiles each program, with options of XLA."""
        programs = [each.compile(compiler_options=compiler_options) for each in self.lowered]
        return CompiledParts(self.lowered, programs, self.plan, self.structure)


def lower_by_layer(traced: jax.stages.Traced) -> LoweredParts:
    """Returns a lowered function, on a CPU cut at its layers.

    Args:
      traced: what `jax.jit(function).trace` returns.
    """
    cut = cut_at_layers(traced) if jax.default_backend() == "cpu" else None
    lowered, plan = ([traced.lower()], None) if cut is None else cut
    return LoweredParts(lowered, plan, jax.tree.structure(traced.out_info))


def cut_at_layers(traced: jax.stages.Traced) -> tuple[list[jax.stages.Lowered], Plan] | None:
    """Returns a function's programs, lowered, and their plan; None if it calls no layer twice.

    A layer is an inner `jit` that is called more than once, with operands of a MiB or more. A
    program gives away the operands that are read by it last, if one of its results can take their
    place: those that another program has made, and those that the function gives away.

    Args:
      traced: what `jax.jit(function).trace` returns.
    """
    closed = traced.jaxpr
    layers = _find_layers(closed.jaxpr)
    if not layers or closed.consts or closed.jaxpr.effects:
        return None
    atoms: dict[Any, Any] = {}
    equations = list(_inline(closed.jaxpr, atoms, layers))
    results = [_resolve(atom, atoms) for atom in closed.jaxpr.outvars]
    if not all(isinstance(atom, Var) for atom in results):
        return None
    calls = list(_make_calls(equations, layers, results, closed.jaxpr.debug_info))
    donated = [info.donated for info in jax.tree.leaves(traced.args_info)]
    owned = {v for v, given in zip(closed.jaxpr.invars, donated, strict=True) if given}
    return _plan(calls, closed.jaxpr.invars, results, owned)


class _Call(NamedTuple):
    """A program to run: its function, and variables of operands and results."""

    function: ClosedJaxpr
    inputs: list[Var]
    outputs: list[Var]


def _find_layers(jaxpr: Jaxpr) -> set[int]:
    """Returns the ids of inner functions that are layers."""
    num_uses: collections.Counter[int] = collections.Counter()

    def count(jaxpr: Jaxpr) -> None:
        for equation in jaxpr.eqns:
            inner = _inner(equation)
            if inner is not None:
                is_large = sum(map(_num_bytes, equation.invars)) >= _LEAST_BYTES
                num_uses[id(inner.jaxpr)] += is_large and not inner.consts
                count(inner.jaxpr)

    count(jaxpr)
    return {key for key, number in num_uses.items() if number > 1}


def _inner(equation: JaxprEqn) -> ClosedJaxpr | None:
    """Returns the function that an equation calls, None if it is no call of a `jit`."""
    return equation.params["jaxpr"] if equation.primitive.name in ("jit", "pjit") else None


def _num_bytes(atom: Any) -> int:
    return atom.aval.size * atom.aval.dtype.itemsize if hasattr(atom.aval, "size") else 0


def _variables(atoms: Sequence[Any]) -> list[Var]:
    """Returns the atoms that are no constants."""
    return [atom for atom in atoms if isinstance(atom, Var)]


def _resolve(atom: Any, atoms: dict[Any, Any]) -> Any:
    return atoms.get(atom, atom) if isinstance(atom, Var) else atom


def _inline(jaxpr: Jaxpr, atoms: dict[Any, Any], layers: set[int]) -> Iterator[JaxprEqn]:
    """Yields the equations of a function, with those of inner functions that call a layer.

    Args:
      jaxpr: the function.
      atoms: what stands for the variables of inner functions; it is added to.
      layers: from `_find_layers`.
    """
    for equation in jaxpr.eqns:
        inputs = [_resolve(atom, atoms) for atom in equation.invars]
        inner = _inner(equation)
        # The variables of one that is called twice would be written twice.
        if (
            inner is None
            or inner.consts
            or id(inner.jaxpr) in layers
            or id(inner.jaxpr) in atoms
            or not _find_layers_in(inner.jaxpr, layers)
        ):
            yield equation.replace(invars=inputs)
            continue
        atoms[id(inner.jaxpr)] = None
        atoms.update(zip(inner.jaxpr.invars, inputs, strict=True))
        yield from _inline(inner.jaxpr, atoms, layers)
        outputs = [_resolve(atom, atoms) for atom in inner.jaxpr.outvars]
        atoms.update(zip(equation.outvars, outputs, strict=True))


def _find_layers_in(jaxpr: Jaxpr, layers: set[int]) -> bool:
    inners = [inner for equation in jaxpr.eqns if (inner := _inner(equation)) is not None]
    return any(id(i.jaxpr) in layers or _find_layers_in(i.jaxpr, layers) for i in inners)


def _make_calls(
    equations: list[JaxprEqn], layers: set[int], results: list[Any], debug_info: Any
) -> Iterator[_Call]:
    """Yields a call of each layer, and one of what stands between two."""

    def layer_of(equation: JaxprEqn) -> ClosedJaxpr | None:
        inner = _inner(equation)
        are_arrays = all(isinstance(atom, Var) for atom in equation.invars)
        return inner if inner and id(inner.jaxpr) in layers and are_arrays else None

    last_read = {atom: len(equations) for atom in results}
    for number, equation in reversed(list(enumerate(equations))):
        for variable in _variables(equation.invars):
            last_read.setdefault(variable, number)
    numbered = enumerate(equations)
    for is_between, group in itertools.groupby(numbered, lambda each: layer_of(each[1]) is None):
        members = list(group)
        if not is_between:
            for _, equation in members:
                function = layer_of(equation)
                assert function is not None
                yield _Call(function, _variables(equation.invars), list(equation.outvars))
            continue
        end, inside = members[-1][0], [equation for _, equation in members]
        made = {v: None for equation in inside for v in equation.outvars}
        read = {v: None for equation in inside for v in _variables(equation.invars)}
        inputs = [v for v in read if v not in made]
        outputs = [v for v in made if last_read.get(v, -1) > end]
        jaxpr = Jaxpr((), inputs, outputs, inside, debug_info=debug_info)
        yield _Call(ClosedJaxpr(jaxpr, ()), inputs, outputs)


def _plan(
    calls: list[_Call], operands: list[Var], results: list[Var], owned: set[Var]
) -> tuple[list[jax.stages.Lowered], Plan]:
    last_read = {v: number for number, call in enumerate(calls) for v in call.inputs}
    last_read.update(dict.fromkeys(results, len(calls)))
    made_by = {v: call for call in calls for v in call.outputs}
    # What a function returns as it was given is no array of its own.
    owned = owned | {v for v, call in made_by.items() if not _returns_operand(call, v)}
    slots = {v: i for i, v in enumerate([*operands, *made_by])}
    programs: dict[int, int] = {}
    functions: list[ClosedJaxpr] = []
    may_take: list[set[int]] = []
    parts = []
    for number, call in enumerate(calls):
        program = programs.setdefault(id(call.function.jaxpr), len(programs))
        dead = [v for v in dict.fromkeys(call.inputs) if last_read[v] == number]
        taken = {
            i
            for i, v in enumerate(call.inputs)
            if v in owned and last_read[v] == number and call.inputs.count(v) == 1
        }
        if program == len(functions):
            functions.append(call.function)
            may_take.append(taken)
        may_take[program] &= taken
        at = [tuple(slots[v] for v in each) for each in (call.inputs, call.outputs, dead)]
        parts.append(Part(program, *at))
    lowered = [_lower(*each) for each in zip(functions, may_take, strict=True)]
    return lowered, Plan(len(slots), tuple(parts), tuple(slots[v] for v in results))


def _returns_operand(call: _Call, variable: Var) -> bool:
    jaxpr = call.function.jaxpr
    return jaxpr.outvars[call.outputs.index(variable)] in jaxpr.invars


def _lower(function: ClosedJaxpr, may_take: set[int]) -> jax.stages.Lowered:
    """Returns a program that gives away the operands whose place a result can take."""
    results = collections.Counter(str(aval) for aval in function.out_avals)
    donated = []
    for i, aval in enumerate(function.in_avals):
        if i in may_take and results[str(aval)]:
            results[str(aval)] -= 1
            donated.append(i)
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in function.in_avals]

    def run(*operands: Any) -> Any:
        return jaxpr_as_fun(function)(*operands)

    run.__name__ = function.jaxpr.debug_info.func_name
    return jax.jit(run, donate_argnums=donated).lower(*shapes)
