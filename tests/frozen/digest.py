"""A hash of what a function computes, whatever its parts are called and wherever they stand.

The function is traced to a jaxpr. Each value is hashed by the operation that makes it, its static
parameters and the hashes of its operands; calls of inner functions are followed, not hashed. So
the hash of a function depends on no name, no order of independent operations, no value that is
computed twice or that nothing reads. What writes memory (a kernel's stores) is hashed in order.
"""

import hashlib
import re

import jax
import numpy as np
from jax.extend import core

# Parameters that hold a function's body: of calls that are followed.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
# Of kernels: what they are called, and what is told by the references that they are given.
_KERNEL_NAMES = ("jaxpr", "name", "name_and_src_info", "grid_mapping", "input_output_aliases")
_START = "start"


def digest(function, *args):
    """The hash of `function(*args)`, of arrays or their shapes."""
    closed = jax.make_jaxpr(function)(*args)
    inputs = [_hash("input", i, _type(v.aval)) for i, v in enumerate(closed.jaxpr.invars)]
    outputs, state = _follow(closed.jaxpr, _constants(closed.consts), inputs, _START)
    return _hash(*outputs, *(_type(v.aval) for v in closed.jaxpr.outvars), state)


def _hash(*parts):
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()


def _type(aval):
    inner = getattr(aval, "inner_aval", aval)
    return f"{getattr(inner, 'dtype', inner)}{getattr(inner, 'shape', '')}"


def _constant(value):
    """Constants are what they hold, wherever they come from."""
    if jax.dtypes.issubdtype(getattr(value, "dtype", np.float32), jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    value = np.asarray(value)
    return _hash("constant", value.dtype, value.shape, value.tobytes().hex())


def _constants(values):
    return [v if isinstance(v, str) else _constant(v) for v in values]


def _follow(jaxpr, constants, inputs, state):
    """Hashes of a jaxpr's outputs, and of all it has written."""
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *inputs], strict=True))

    def read(atom):
        return _constant(atom.val) if isinstance(atom, core.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        outputs, state = _equation(eqn, [read(atom) for atom in eqn.invars], state)
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars], state


def _body(jaxpr, inputs, state):
    if isinstance(jaxpr, core.ClosedJaxpr):
        return _follow(jaxpr.jaxpr, _constants(jaxpr.consts), inputs, state)
    return _follow(jaxpr, [], inputs, state)


def _equation(eqn, inputs, state):
    """Hashes of what one equation gives, and the state after it."""
    name, params = eqn.primitive.name, eqn.params
    if name in _CALLS:
        return _body(params[_CALLS[name]], inputs, state)
    if _is_identity(eqn):
        return inputs, state
    if name in _FOLLOWED:
        found, after = _FOLLOWED[name](eqn, inputs, state)
        return [_hash(found, i) for i in range(len(eqn.outvars))], after
    writes = not eqn.outvars or any(_is_write(effect) for effect in eqn.effects)
    reads = [state] if eqn.effects or writes else []
    found = _hash(name, _params(params), *inputs, *reads)
    return [_hash(found, i) for i in range(len(eqn.outvars))], found if writes else state


def _is_write(effect):
    return "read" not in type(effect).__name__.lower()


def _is_identity(eqn):
    """Whether an operation gives its operand, which wrapping and unwrapping functions adds."""
    if eqn.primitive.name not in ("convert_element_type", "broadcast_in_dim", "reshape"):
        return False
    return len(eqn.invars) == 1 and _type(eqn.invars[0].aval) == _type(eqn.outvars[0].aval)


def _scan(eqn, inputs, state):
    params = eqn.params
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    # Constants are known by what they are: their order follows from names and closures.
    carry = [_hash("carry", i) for i in range(last - first)]
    rows = [_hash("row", each) for each in inputs[last:]]
    outputs, after = _body(params["jaxpr"], [*inputs[:first], *carry, *rows], _START)
    rest = {k: params[k] for k in ("length", "reverse", "unroll")}
    found = _hash("scan", _params(rest), *inputs[first:last], *outputs, after, state)
    return _hash(found), state if after == _START else found


def _while(eqn, inputs, state):
    params = eqn.params
    first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    carry = [_hash("carry", i) for i in range(len(inputs) - last)]
    test, tested = _body(params["cond_jaxpr"], [*inputs[:first], *carry], _START)
    outputs, after = _body(params["body_jaxpr"], [*inputs[first:last], *carry], _START)
    found = _hash("while", *inputs[last:], *test, tested, *outputs, after, state)
    return found, state if after == tested == _START else found


def _cond(eqn, inputs, state):
    index, *operands = inputs
    branches = [_body(branch, operands, state) for branch in eqn.params["branches"]]
    platforms = _param(eqn.params.get("branches_platforms"))
    found = _hash("cond", index, platforms, *(_hash(*each, after) for each, after in branches))
    same = all(after == state for _, after in branches)
    return found, state if same else found


def _shard_map(eqn, inputs, state):
    outputs, after = _body(eqn.params["jaxpr"], inputs, state)
    return _hash("shard_map", _params(eqn.params, ("jaxpr",)), *outputs), after


def _pallas_call(eqn, inputs, state):
    params = eqn.params
    mapping = params["grid_mapping"]
    blocks = [str(x.block_shape) for x in mapping.block_mappings]
    references = [_hash("reference", each, inputs[:i].count(each)) for i, each in enumerate(inputs)]
    results = [_hash("result", i) for i in range(len(eqn.outvars))]
    aliases = sorted((references[i], j) for i, j in params["input_output_aliases"])
    _, after = _body(params["jaxpr"], [*references, *results], _START)
    rest = _params(params, _KERNEL_NAMES)
    return _hash("kernel", mapping.grid, blocks, aliases, rest, after), state


_FOLLOWED = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
    "pallas_call": _pallas_call,
}


def _params(params, without=()):
    """Static parameters by name, but for functions and what they are called."""
    kept = {k: v for k, v in params.items() if k not in (*without, "name", "debug_info")}
    return {k: _param(kept[k]) for k in sorted(kept)}


def _param(value):
    if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):
        jaxpr = getattr(value, "jaxpr", value)
        inputs = [_hash("operand", i, _type(v.aval)) for i, v in enumerate(jaxpr.invars)]
        outputs, state = _body(value, inputs, _START)
        return _hash(*outputs, state)
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return _constant(value)
    if isinstance(value, dict):
        return {str(k): _param(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_param(v) for v in value]
    if callable(value) and not isinstance(value, type):
        return "function"
    return re.sub(r" at 0x[0-9a-f]+", "", f"{value}")
