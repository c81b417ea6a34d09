"""What the library computes is what it computed: hashes of traced programs, and tokens."""

import functools
import json

import jax
import jax.numpy as jnp
import pytest
from frozen.__main__ import RECORD, hash_case
from frozen.cases import ROOMS, cases
from frozen.digest import digest
from frozen.golden import golden
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from machine import has_gpu

FROZEN = json.loads(RECORD.read_text())
# The hashes are of one version's primitives, and of kernels for a GPU that JAX does not see.
recorded = pytest.mark.skipif(
    jax.__version__ != FROZEN["jax"] or has_gpu(),
    reason=f"the hashes are of jax {FROZEN['jax']} without a GPU",
)
pytestmark = [pytest.mark.once, pytest.mark.lenient]


@functools.cache
def every_case():
    """Name and case, made once: those of models hold parameters."""
    return list(cases())


def test_every_case_has_its_hash():
    assert [name for name, _ in every_case()] == list(FROZEN["hashes"])


@recorded
@pytest.mark.parametrize("room", ROOMS)
def test_programs_are_those_that_were_frozen(room):
    own = [(name, case) for name, case in every_case() if name.startswith(f"{room}: ")]
    assert own
    moved = [name for name, case in own if hash_case(case) != FROZEN["hashes"][name]]
    assert not moved, "of these another program is traced; `python -m frozen` lists all"


@pytest.mark.skipif(has_gpu(), reason="the tokens are those of a CPU")
def test_tokens_are_those_that_were_frozen():
    assert dict(golden()) == FROZEN["tokens"]


def add(x, y):
    return x + y


X = jnp.arange(6.0).reshape(2, 3)


@recorded  # A newer JAX names the parameters of a loop otherwise.
def test_a_hash_does_not_depend_on_names_or_on_functions_inside():
    def plain(x):
        scale = jnp.float32(2)
        return jax.lax.fori_loop(0, 3, lambda i, y: jnp.sin(y) * scale, x) + x

    def renamed(z):
        def other_name(number, w):
            return inner(w) * two

        inner, two = jax.jit(jnp.sin), jnp.float32(2)
        unused = jnp.cos(z)
        last = jax.lax.fori_loop(0, 3, other_name, z)
        return jax.jit(add)(last, jax.jit(lambda v: v)(z)) if unused is not None else z

    assert digest(plain, X) == digest(renamed, X) == digest(jax.jit(plain), X)


def test_a_hash_depends_on_operations_their_order_and_constants():
    functions = [
        lambda x: jnp.sum(jnp.sum(x, axis=0)),
        lambda x: jnp.sum(jnp.sum(x, axis=1)),
        lambda x: jnp.sum(jnp.max(x, axis=1)),
        lambda x: jnp.sum(jnp.sum(x + 1, axis=1)),
        lambda x: jnp.sum(jnp.sum(x + 2, axis=1)),
        lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sum, lambda y: jnp.sum(y * 2), x),
        lambda x: jax.lax.cond(x[0, 0] > 0, lambda y: jnp.sum(y * 2), jnp.sum, x),
    ]
    assert len({digest(function, X) for function in functions}) == len(functions)


def kernel_call(body, num_warps=4):
    def call(x):
        return pl.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(1,),
            compiler_params=plgpu.CompilerParams(num_warps=num_warps),
            interpret=True,
        )(x)

    return call


def test_a_kernel_is_hashed_by_its_body_and_its_launch():
    def body(x, out):
        out[0] = x[0]
        out[1] = x[1] * 2

    def same_by_another_name(source, to):
        to[0] = source[0]
        to[1] = jax.jit(lambda v: v * 2)(source[1])

    def in_another_order(x, out):
        out[1] = x[1] * 2
        out[0] = x[0]

    def another(x, out):
        out[0] = x[1]
        out[1] = x[1] * 2

    first = digest(kernel_call(body), X)
    others = [kernel_call(in_another_order), kernel_call(another), kernel_call(body, 8)]
    assert first not in {digest(each, X) for each in others}
    assert digest(kernel_call(same_by_another_name), X) == first
