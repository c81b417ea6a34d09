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


def frames_to_kernels(call, monkeypatch):
    """Names of the package's functions between a call and each kernel that it enters."""
    program_id, entered = pl.program_id, []

    def enter(axis):
        """Called once by the body of each kernel."""
        frames = traceback.walk_stack(None)
        names = [f.f_code.co_name for f, _ in frames if f.f_code.co_filename.startswith(PACKAGE)]
        names.reverse()
        entered.append(names[1 : names.index("launch") + 1])
        return program_id(axis)

    monkeypatch.setattr(pl, "program_id", enter)
    jax.clear_caches()
    jax.eval_shape(call)
    return entered


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
    entered = frames_to_kernels(lambda: call(size), monkeypatch)
    assert len(entered) == num_kernels
    for names in entered:
        assert len(names) <= MOST_FRAMES, names


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_few_frames_stand_between_a_decode_step_and_each_of_its_kernels(size, monkeypatch):
    entered = frames_to_kernels(lambda: decode(size), monkeypatch)
    # The products, norms and attention of one layer, and the first and last norm.
    assert len(entered) == 9
    for names in entered:
        assert len(names[names.index("decode_step") :]) <= MOST_FRAMES, names
