"""An implementation that is named runs everything that a call does, and nothing chooses another.

Each public call that takes `implementation` is traced for a GPU that is not there, where None would
choose kernels: "xla" traces none, "triton" traces some.
"""

import dataclasses
import inspect
import tempfile

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import specjax
from specjax import models, rules
from specjax.markov_chain import markov_chain

pytestmark = pytest.mark.once

B, K, V = 2, 2, 256
KEYS = jax.random.split(jax.random.key(0), B)
ROWS = jnp.zeros((B, K + 1, V))
SAMPLING = specjax.SamplingParams(top_k=2)
DRAFT = specjax.Draft(jnp.zeros((B, K), jnp.int32), ROWS[:, :K])
RAGGED = specjax.RaggedDraft(
    jnp.zeros((B * K,), jnp.int32),
    K * jnp.arange(B + 1),
    max_draft_tokens=K,
    logits=jnp.zeros((B * K, V)),
)
CONFIG = models.TransformerConfig(
    V, 64, 128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=32
)
EAGLE3 = models.Eagle3Config(CONFIG, 64, V, taps=(0, 1))
LAYER = dataclasses.replace(CONFIG, qk_norm=True)
DFLASH = models.DFlashConfig(LAYER, V, taps=(0, 1), block_size=K + 1, mask_token_id=V - 1)
# Of `jax.nn.dot_product_attention`, over whole sequences: no kernel of ours has that choice.
OF_ATTENTION = {"causal_hidden", "causal_taps"}
# Made of what is traced here: `generate`, ahead of time or timed, and the functions of `build`.
AHEAD_OF_TIME = {"compile_generate", "load_shapes", "measure_step_costs"}
# Rows of a model, which chooses its own, and sums of XLA.
BY_ITS_MODEL = {"score"}
# Of shapes alone.
OF_SHAPES = {"memory_needs"}
# Over devices that are there: `test_split_model` runs and lowers its kernels by their names.
OVER_DEVICES = {"split_model"}
# In plain JAX alone: the names of kernels are refused.
WITHOUT_KERNELS = {"tree_rejection_sample"}


def run_step(model):
    """One decode step of a model, of plain JAX or kernels."""
    ids = jnp.zeros((B, 1), jnp.int32)
    return model.apply(model.params, ids, ids, model.init_cache(B, 64))[0]


def sample(name):
    return specjax.gumbel_sample(
        ROWS[:, 0], keys=KEYS, positions=0, stream=0, options=specjax.Options(implementation=name)
    )


def verify(name):
    """By every built-in rule, padded and end to end."""
    options = dict(keys=KEYS, positions=0, options=specjax.Options(implementation=name))
    return [
        specjax.rejection_sample(draft, rows, rule=rule, **options)
        for rule in (rules.standard(), rules.block(), rules.coupled())
        for draft, rows in ((DRAFT, ROWS), (RAGGED, ROWS.reshape(-1, V)))
    ]


def cut(name):
    return specjax.logit_cutoff(ROWS, temperature=1.0, top_k=2, implementation=name)


def apply_sampling(name):
    return specjax.apply_sampling(ROWS, SAMPLING, implementation=name)


def propose(name):
    return specjax.propose(
        lambda carry, ids, positions: (ROWS[:, 0], carry),
        (),
        jnp.zeros((B,), jnp.int32),
        specjax.DraftInputs(KEYS, positions=1, sampling=SAMPLING),
        num_tokens=K,
        options=specjax.Options(implementation=name),
    )


def arguments(name):
    """Arguments of `generate` and `init` with a draft model."""
    chain = markov_chain(jnp.full((V, V), 1 / V))
    given = chain, specjax.model_drafter(chain), [[0, 0], [0, 0, 0]]
    options = specjax.LoopOptions(implementation=name)
    return given, dict(keys=KEYS, max_new_tokens=2, sampling=SAMPLING, options=options)


def generate(name):
    given, options = arguments(name)
    return specjax.generate(*given, **options)


def init(name):
    given, options = arguments(name)
    return specjax.init(*given, **options)


def step(name):
    given, options = arguments(name)
    state = jax.eval_shape(lambda: specjax.init(*given, **options))
    state = jax.tree.map(
        lambda x: (
            jnp.broadcast_to(jax.random.key(0), x.shape)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            else jnp.zeros(x.shape, x.dtype)
        ),
        state,
    )
    return specjax.step(*given[:2], state, implementation=name)


def build(name):
    return run_step(models.build(CONFIG, implementation=name))


def functions(name):
    return run_step(specjax.Model(models.build(CONFIG).params, *models.functions(CONFIG, name)))


def load(name):
    # In float32 on any machine, so that one folder has one result.
    model, _ = models.load(models.pretrained_folder("draft"), "float32", implementation=name)
    return run_step(model)


def run_drafter(drafter):
    """A proposal whose own steps run what its drafter was made with, and its draws plain JAX."""
    ids = jnp.zeros((B, 4), jnp.int32)
    features = jnp.zeros((B, 4, 64 * max(1, len(drafter.taps))))
    state = drafter.init(drafter.params, B, 8)
    state = drafter.extend(drafter.params, state, ids, jnp.tile(jnp.arange(4), (B, 1)), features)
    return drafter.propose(
        drafter.params,
        state,
        ids,
        jnp.zeros((B, 64)),
        specjax.DraftInputs(KEYS, jnp.full((B,), 4), jnp.full((B,), K), jnp.ones((B,))),
        config=specjax.SpeculativeConfig(num_speculative_tokens=K),
        implementation="xla",
    )


def run_eagle3(name):
    head = models.build_eagle3(EAGLE3)
    target = models.build(CONFIG)
    return run_drafter(models.eagle3_drafter(target, EAGLE3, head, implementation=name))


def run_dflash(name):
    head = models.build_dflash(DFLASH)
    target = models.build(CONFIG)
    return run_drafter(models.dflash_drafter(target, DFLASH, head, implementation=name))


def run_loaded_drafters(name):
    """Proposals by each kind of folder; "xla" must be that of all of them."""
    target = models.build(CONFIG)
    with tempfile.TemporaryDirectory() as folder:
        # Weights are arrays, which newer JAX does not draw for a device that is not there.
        here = jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
        with jax.ensure_compile_time_eval(), here:
            models.save_eagle3(f"{folder}/eagle3", models.build_eagle3(EAGLE3), EAGLE3)
            models.save_dflash(f"{folder}/dflash", models.build_dflash(DFLASH), DFLASH)
        heads = [f"{folder}/{kind}" for kind in ("eagle3", "dflash")]
        folders = [models.pretrained_folder("draft"), *heads]
        loaded = [models.load_drafter(f, target, "float32", implementation=name) for f in folders]
    return [run_drafter(drafter) for drafter in loaded]


CALLS = {
    "gumbel_sample": sample,
    "rejection_sample": verify,
    "logit_cutoff": cut,
    "apply_sampling": apply_sampling,
    "propose": propose,
    "generate": generate,
    "init": init,
    "step": step,
    "build": build,
    "functions": functions,
    "load": load,
    "eagle3_drafter": run_eagle3,
    "dflash_drafter": run_dflash,
    "load_drafter": run_loaded_drafters,
}


def test_every_public_call_that_takes_an_implementation_is_traced_here():
    taking = {
        name
        for room in (specjax, models)
        for name in room.__all__
        if inspect.isfunction(inspect.unwrap(getattr(room, name)))
        and {"implementation", "options"} & {*inspect.signature(getattr(room, name)).parameters}
    }
    elsewhere = (
        OF_ATTENTION | AHEAD_OF_TIME | BY_ITS_MODEL | OF_SHAPES | OVER_DEVICES | WITHOUT_KERNELS
    )
    assert set(CALLS) == taking - elsewhere


def holds_a_kernel(jaxpr):
    """Whether a jaxpr or one that it calls launches a kernel; to print one takes longer."""
    for eqn in jaxpr.eqns:
        inner = [each for each in jax.tree.leaves(eqn.params) if hasattr(each, "eqns")]
        if eqn.primitive.name == "pallas_call" or any(map(holds_a_kernel, inner)):
            return True
    return False


@pytest.mark.lenient
@pytest.mark.parametrize("name", ["xla", "triton"])
@pytest.mark.parametrize("call", CALLS)
def test_a_named_implementation_is_that_of_everything_a_call_does(call, name):
    device = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=None)
    with jax.sharding.use_abstract_mesh(AbstractMesh((4,), ("batch",), abstract_device=device)):
        jaxpr = jax.make_jaxpr(lambda: CALLS[call](name))()
    assert holds_a_kernel(jaxpr) == (name == "triton")
