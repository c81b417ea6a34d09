"""A function that is cut at its layers computes what it did, and compiles a layer once."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.cli.by_layer import cut_at_layers, lower_by_layer

SIZE = 512


@functools.partial(jax.jit, static_argnums=0)
def layer(scale, weight, x, entry):
    """Returns x and an entry of a cache, both of them new."""
    x = jnp.where(x > 0, x @ weight, -x) * scale
    return x, entry + x[:2]


@jax.jit
def model(weights, x, cache):
    y, entries = x * 2, []
    for number, (weight, entry) in enumerate(zip(weights, cache, strict=True)):
        y, entry = layer(1.0 if number < 3 else 0.5, weight, y, entry)
        entries.append(entry)
    return y.sum(), tuple(entries), x


def operands(size=SIZE):
    keys = jax.random.split(jax.random.key(0), 5)
    weights = [jax.random.normal(key, (size, size)) / size**0.5 for key in keys]
    return weights, jnp.arange(size, dtype=jnp.float32), tuple(jnp.zeros(2) + i for i in range(5))


def function(weights, x, cache):
    """A model in the middle of something else; `x` is returned as it was given."""
    total, cache, _ = model(weights, x + 1, cache)
    return {"cache": cache, "total": total / 3, "x": x}


def test_parts_give_what_the_function_gives():
    jitted = jax.jit(function, donate_argnames="cache")
    parts = lower_by_layer(jitted.trace(*operands())).compile()
    # What comes first, two kinds of layers, and what comes last.
    assert [part.program for part in parts.plan.parts] == [0, 1, 1, 1, 2, 2, 3]
    assert len(parts.programs) == 4
    weights, x, cache = operands()
    expected = jitted(*operands())
    result = parts.run(weights, x, cache=cache)
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    # Only what the function gives away is written over.
    assert all(entry.is_deleted() for entry in cache)
    assert not any(array.is_deleted() for array in (*weights, x))


def test_arrays_that_the_caller_keeps_are_not_written_over():
    parts = lower_by_layer(jax.jit(function).trace(*operands())).compile()
    given = operands()
    expected = jax.jit(function)(*given)
    for _ in range(2):
        jax.tree.map(np.testing.assert_array_equal, parts.run(*given), expected)


def test_an_operand_that_is_read_twice_stays_until_it_was_read():
    """Both by layers that give theirs away elsewhere, and by what comes after all layers."""

    def twice(weights, x):
        once = x + 1
        entry = jnp.zeros(2)
        first, _ = layer(1.0, weights[0], once, entry)
        second, entry = layer(1.0, weights[1], once, entry)
        third, _ = layer(1.0, weights[2], second, entry)
        return first + third + second

    weights, x, _ = operands()
    parts = lower_by_layer(jax.jit(twice).trace(weights, x)).compile()
    np.testing.assert_allclose(parts.run(weights, x), jax.jit(twice)(weights, x), rtol=1e-5)


@pytest.mark.parametrize("kind", ["small", "once"])
def test_a_function_without_large_layers_stays_whole(kind):
    weights, x, cache = operands(16 if kind == "small" else SIZE)
    given = (weights, x, cache) if kind == "small" else (weights[:1], x, cache[:1])
    assert cut_at_layers(jax.jit(function).trace(*given)) is None
    whole = lower_by_layer(jax.jit(function).trace(*given)).compile()
    jax.tree.map(np.testing.assert_array_equal, whole.run(*given), jax.jit(function)(*given))


def test_a_plan_can_be_kept():
    plan = lower_by_layer(jax.jit(function).trace(*operands())).compile().plan
    assert pickle.loads(pickle.dumps(plan)) == plan
