"""A reader who follows a call to its kernel passes few functions of the package."""

import pathlib
import traceback

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

import specjax
from specjax import rules
from specjax.implementation import Implementation
from specjax.models import TransformerConfig, build
from specjax.pallas.kernel_config import KernelConfig

pytestmark = pytest.mark.once

PACKAGE = str(pathlib.Path(specjax.__file__).parent)
MAX_FRAMES = 7
SMALL, LARGE, K, VOCAB = 3, 18, 2, 301
# Batches of 18 requests take the schedule of large ones.
INTERPRETED = Implementation("interpret", (KernelConfig(max_small_programs=40),))


def make_draft(*lead):
    """A sampled draft without statistics, which more kernels serve than any other."""
    return specjax.Draft(jnp.zeros(lead, jnp.int32), jnp.zeros((*lead, VOCAB)))


OPTIONS = {
    "keys": jax.random.key(0),
    "positions": 0,
    "options": specjax.Options(implementation=INTERPRETED),
}


def sample(b):
    return specjax.gumbel_sample(jnp.zeros((b, VOCAB)), stream=0, **OPTIONS)


def padded(rule, **options):
    """A call of a padded batch."""
    options |= OPTIONS | {"rule": rule}
    return lambda b: specjax.rejection_sample(
        make_draft(b, K), jnp.zeros((b, K + 1, VOCAB)), **options
    )


def ragged(rule):
    """A call of as many requests, laid end to end."""

    def call(b):
        draft = specjax.RaggedDraft(
            make_tokens(b * K),
            K * jnp.arange(b + 1),
            max_draft_tokens=K,
            logits=jnp.zeros((b * K, VOCAB)),
        )
        rows = jnp.zeros((b * (K + 1), VOCAB))
        return specjax.rejection_sample(draft, rows, rule=rule, **OPTIONS)

    return call


def make_tokens(*lead):
    return jnp.zeros(lead, jnp.int32)


def put(*lead):
    """Rows whose vocabulary lies over two devices."""
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Explicit,))
    rows = jax.NamedSharding(mesh, jax.P(*(None,) * len(lead), "model"))
    return jax.device_put(jnp.zeros((*lead, 512)), rows)


def verify_split(b):
    zeros = jnp.zeros((b, K))
    draft = specjax.Draft(make_tokens(b, K), put(b, K), logprobs=zeros, logsumexp=zeros)
    return specjax.rejection_sample(draft, put(b, K + 1), **OPTIONS)


def couple_split(b):
    draft = specjax.Draft(make_tokens(b, K))
    return specjax.rejection_sample(draft, put(b, K + 1), rule=rules.coupled(), **OPTIONS)


def sample_split(b):
    return specjax.gumbel_sample(put(b), stream=0, **OPTIONS)


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


# A call, its requests and the kernels that it launches.
CASES = {
    "sample": (sample, SMALL, 2),
    "sample, split": (sample_split, SMALL, 2),
    "verify": (padded(rules.standard()), SMALL, 3),
    "verify, large": (padded(rules.standard()), LARGE, 4),
    "verify by a rule": (padded(rules.relaxed(3, 0.5)), SMALL, 4),
    "verify, few log-probabilities": (
        padded(rules.standard(), greedy_logprobs=False),
        LARGE,
        3,
    ),
    "verify, ragged": (ragged(rules.standard()), SMALL, 3),
    "verify, ragged and large": (ragged(rules.standard()), LARGE, 4),
    "verify, split": (verify_split, SMALL, 2),
    "block": (padded(rules.block()), SMALL, 5),
    "block, large": (padded(rules.block()), LARGE, 5),
    "block, ragged": (ragged(rules.block()), SMALL, 5),
    "couple": (padded(rules.coupled()), SMALL, 2),
    "couple, large": (padded(rules.coupled()), LARGE, 2),
    "couple, ragged": (ragged(rules.coupled()), SMALL, 2),
    "couple, ragged and large": (ragged(rules.coupled()), LARGE, 2),
    "couple, split": (couple_split, SMALL, 2),
    "cut": (cut, SMALL, 2),
}


@pytest.mark.parametrize(("call", "size", "num_kernels"), CASES.values(), ids=CASES)
def test_few_frames_stand_between_a_call_and_each_of_its_kernels(
    call, size, num_kernels, monkeypatch
):
    entered = frames_to_kernels(lambda: call(size), monkeypatch)
    assert len(entered) == num_kernels
    for names in entered:
        assert len(names) <= MAX_FRAMES, names


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_few_frames_stand_between_a_decode_step_and_each_of_its_kernels(size, monkeypatch):
    entered = frames_to_kernels(lambda: decode(size), monkeypatch)
    # The products, norms and attention of one layer, and the first and last norm. Before
    # `decode_step` stand the methods of the model, which choose it once.
    assert len(entered) == 9
    for names in entered:
        assert len(names[names.index("decode_step") :]) <= MAX_FRAMES, names
