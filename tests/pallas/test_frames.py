"""A reader who follows a call to its kernel passes few functions of the package."""

import pathlib
import traceback

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

import specjax
from specjax.models import TransformerConfig, build

pytestmark = pytest.mark.once

PACKAGE = str(pathlib.Path(specjax.__file__).parent)
MOST_FRAMES = 7
SMALL, LARGE, K, VOCAB = 3, 18, 2, 301


class Entered(Exception):
    """A kernel's body was entered."""


def make_draft(*lead):
    """A sampled draft without statistics, which more kernels serve than any other."""
    return specjax.Draft(jnp.zeros(lead, jnp.int32), jnp.zeros((*lead, VOCAB)))


def sample(b):
    return specjax.gumbel_sample(
        jnp.zeros((b, VOCAB)),
        keys=jax.random.key(0),
        positions=0,
        stream=0,
        implementation="interpret",
    )


def verify(b):
    return specjax.rejection_sample(
        make_draft(b, K),
        jnp.zeros((b, K + 1, VOCAB)),
        keys=jax.random.key(0),
        positions=0,
        implementation="interpret",
    )


def verify_ragged(b):
    return specjax.rejection_sample_ragged(
        make_draft(b * K),
        jnp.zeros((b * (K + 1), VOCAB)),
        cu_num_draft_tokens=K * jnp.arange(b + 1),
        max_draft_tokens=K,
        keys=jax.random.key(0),
        positions=0,
        implementation="interpret",
    )


def couple(b):
    return specjax.coupled_sample(
        jnp.zeros((b, K), jnp.int32),
        jnp.zeros((b, K + 1, VOCAB)),
        keys=jax.random.key(0),
        positions=0,
        implementation="interpret",
    )


def cut(b):
    return specjax.logit_cutoff(
        jnp.zeros((b, VOCAB)), temperature=1.0, top_k=3, top_p=0.5, implementation="interpret"
    )


def decode(b):
    config = TransformerConfig(64, 128, 128, 1, 2, 1, 16)
    model = build(config, implementation="interpret")
    ids = jnp.zeros((b, 1), jnp.int32)
    return model.apply(model.params, ids, ids, model.init_cache(b, 80))


def frames_to_kernel(call, number, monkeypatch):
    """Names of the package's functions between a call and kernel `number`; None past the last."""
    program_id, entered = pl.program_id, []

    def enter(axis):
        entered.append(axis)
        if len(entered) > number:
            raise Entered
        return program_id(axis)

    with monkeypatch.context() as patch:
        patch.setattr(pl, "program_id", enter)
        jax.clear_caches()
        try:
            jax.eval_shape(call)
        except Entered as error:
            stack = traceback.extract_tb(error.__traceback__)
            names = [each.name for each in stack if each.filename.startswith(PACKAGE)]
            return names[1 : names.index("launch") + 1]
    return None


@pytest.mark.parametrize(
    ("call", "size", "num_kernels"),
    [
        (sample, SMALL, 2),
        (verify, SMALL, 3),
        (verify, LARGE, 4),
        (verify_ragged, SMALL, 3),
        (verify_ragged, LARGE, 4),
        (couple, SMALL, 2),
        (cut, SMALL, 2),
    ],
)
def test_few_frames_stand_between_a_call_and_each_of_its_kernels(
    call, size, num_kernels, monkeypatch
):
    for number in range(num_kernels):
        names = frames_to_kernel(lambda: call(size), number, monkeypatch)
        assert names is not None, f"{call.__name__} entered {number} kernels."
        assert len(names) <= MOST_FRAMES, names
    assert frames_to_kernel(lambda: call(size), num_kernels, monkeypatch) is None


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_few_frames_stand_between_a_decode_step_and_each_of_its_kernels(size, monkeypatch):
    # The products, norms and attention of one layer, and the first and last norm.
    for number in range(9):
        names = frames_to_kernel(lambda: decode(size), number, monkeypatch)
        assert names is not None, f"{number} kernels were entered."
        assert len(names[names.index("decode_step") :]) <= MOST_FRAMES, names
    assert frames_to_kernel(lambda: decode(size), 9, monkeypatch) is None
