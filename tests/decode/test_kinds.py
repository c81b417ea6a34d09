"""The kind of a model is that of its parameters now, and keeps neither of them alive."""

import gc
import weakref

import bigrams
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.decode import kinds
from specjax.decode.kinds import kind_of, kind_of_model


def model(size):
    """A model of so many tokens, whose parameters are a dict."""
    return specjax.Model(
        {"w": jnp.eye(size), "scale": 1.5},
        lambda size, length: (),
        lambda params, ids, positions, cache: (params["w"][ids], cache),
        lambda params, hidden: hidden * params["scale"],
    )


def continuation(target, prompt):
    keys = bigrams.keys(1)
    output = specjax.generate(target, None, [prompt], keys=keys, max_new_tokens=2, temperature=0)
    return specjax.unpad(output.token_ids)


def test_parameters_that_were_exchanged_have_their_own_vocabulary():
    target = model(5)
    assert continuation(target, [4]) == [[4] * 3]
    target.params["w"] = jnp.eye(9)
    assert continuation(target, [8]) == [[8] * 3]
    target.params["w"] = jnp.eye(5)
    with pytest.raises(ValueError, match=r"it needs an id in \[0, 5\)"):
        continuation(target, [8])


def test_a_kind_is_found_again_only_after_a_leaf_is_another():
    target = model(5)
    first = kind_of_model(target)
    assert kind_of_model(target) is first is kind_of(target)
    target.params["w"] = np.eye(5, dtype=np.float32)
    assert kind_of_model(target) is not None
    target.params["more"] = jnp.zeros(2)
    assert kind_of_model(target) is kind_of(target) is not first
    assert kind_of_model(None) is kind_of(None)


def test_neither_a_model_nor_its_arrays_are_kept():
    gc.collect()  # Models of other tests go first.
    before, target = len(kinds._KINDS), model(5)
    kind_of_model(target)
    array = weakref.ref(target.params["w"])
    assert len(kinds._KINDS) == before + 1
    del target
    gc.collect()
    assert array() is None
    assert len(kinds._KINDS) == before
