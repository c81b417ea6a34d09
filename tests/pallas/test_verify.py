"""The kernels of verification in Pallas' interpreter, by both schedules: the reference's tokens.

The battery of the other files runs on "interpret" too, each file by the schedule that its batch
calls for. Here small batches and large ones go both ways, in tiles that rows do not divide into.
"""

import contextlib
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from test_ragged import ragged_case, run_ragged
from verify_cases import (
    library,
    make_keys,
    mixed_case,
    run,
    sample_tokens,
    sampled_case,
    with_statistics,
)

from specjax.implementation import Implementation
from specjax.pallas.kernel_config import KernelConfig, Tile

pytestmark = pytest.mark.interpret

BATCH, K, VOCAB = 32, 3, 1025
# Of what is called in parts, over devices or in a loop.
FEW = 8
RATES = np.random.default_rng(2).choice([0.0, 0.4, 0.8, 1.0], (BATCH, K)).astype(np.float32)


def one_hot_case():
    case = mixed_case(1, BATCH, K, 300)
    for name in ("draft_logits", "draft_cutoff", "draft_temperature", "rows"):
        del case[name]
    return case


def synthetic(case):
    return case | dict(conditional_rates=RATES)


def invalid_case(vocab_size):
    """NaN, +inf and -inf rows wherever a request has rows, and huge ones."""
    case = mixed_case(3, BATCH, K, vocab_size)
    target, draft = case["target_logits"], case["draft_logits"]
    for b in range(BATCH):
        columns = slice(None) if b % 4 > 1 else b * 37 % vocab_size
        target[b, b % (K + 1), columns] = (np.nan, np.inf, -np.inf, 3e38)[b % 4]
        draft[b, b % K, columns] = (np.inf, np.nan, -np.inf, -3e38)[b % 4]
    # A greedy request's draft is the very place of its +inf.
    greedy = np.arange(1, BATCH, 4)
    case["temperature"][greedy] = 0
    case["token_ids"][greedy, np.minimum(greedy % (K + 1), K - 1)] = greedy * 37 % vocab_size
    return case


def long_case():
    """Drafts so alike their target that many of 32 are kept, narrow, with statistics."""
    case = mixed_case(9, BATCH // 2, 32, 600)
    case["num_tokens"][::2] = 32
    own = case["draft_logits"][case["rows"]]
    case["target_logits"][:, :32] = own + np.float32(0.1) * case["target_logits"][:, :32]
    case = with_statistics(case)
    for name, dtype in [("target_logits", jnp.bfloat16), ("draft_logits", jnp.float16)]:
        case[name] = case[name].astype(dtype)
    return case


def random_case():
    """Every request is random and has all its drafts, one in three chosen; logits lie below 0."""
    case, rng = sampled_case(11, BATCH, K, VOCAB), np.random.default_rng(11)
    case["temperature"] = rng.choice([0.6, 1.0, 1.7], BATCH).astype(np.float32)
    case["draft_temperature"] = rng.choice([0.0, 0.8, 1.2], BATCH).astype(np.float32)
    case["token_ids"] = sample_tokens(rng, case["draft_logits"], case["draft_temperature"])
    case["target_logits"] -= np.float32(30)
    case["draft_logits"] -= np.float32(20)
    case["cutoff"] = rng.choice([-np.inf, -31.5], (BATCH, K + 1)).astype(np.float32)
    case["draft_cutoff"] = rng.choice([-np.inf, -21.0], (BATCH, K)).astype(np.float32)
    return case


def greedy_case():
    """Requests that keep their argmax up to any row, in rows of several tiles."""
    case = sampled_case(10, BATCH, K, VOCAB)
    case["temperature"][:] = 0
    # What stands where no token is drafted.
    case["target_logits"][:, K, 0] = 50
    best = np.argmax(case["target_logits"][:, :K], axis=-1)
    ends = np.arange(K) == (np.arange(BATCH) % (K + 1))[:, None]
    return case | dict(token_ids=np.where(ends, (best + 1) % VOCAB, best).astype(np.int32))


# Each shape, dtype and set of options is a program of its own, of two seconds: kinds of cases share
# one, and one that needs its own also stands for a size, of 1, 5, 127, 300 and 600 tokens.
CASES = {
    "V = 1025": lambda: mixed_case(VOCAB, BATCH, K, VOCAB),
    "random": random_case,
    "greedy": greedy_case,
    "invalid rows": lambda: invalid_case(VOCAB),
    "one-hot": one_hot_case,
    "synthetic": lambda: synthetic(mixed_case(2, BATCH, K, 127)),
    "synthetic, invalid rows": lambda: synthetic(invalid_case(127)),
    "33 rows, narrow logits, statistics carried": long_case,
    "a draft of more tokens": lambda: mixed_case(6, BATCH, 1, 5, draft_vocab=420),
    "no drafts": lambda: mixed_case(7, BATCH, 0, 1),
    "float64 noise, a draft of fewer tokens": lambda: mixed_case(
        8, BATCH, 2, VOCAB, draft_vocab=1024
    ),
}


def noise_of(name):
    """The dtype of the noise, and a context that it needs."""
    if "float64 noise" in name:
        return jnp.float64, jax.enable_x64(True)
    return jnp.float32, contextlib.nullcontext()


@functools.cache
def reference(name):
    noise_dtype, context = noise_of(name)
    with context:
        return jax.device_get(run(library("xla", noise_dtype), CASES[name]()))


@pytest.fixture(scope="module")
def schedule(request):
    """The kernels by the schedule of a small batch and of a large one, whatever the batch."""
    config = KernelConfig(
        row=Tile(512 if request.param else 256, 4),
        target=Tile(512 if request.param else 256, 4),
        residual=Tile(256 if request.param else 128, 4),
        max_small_programs=10**6 if request.param else 0,
    )
    return Implementation("interpret", (config,))


def check_equal(ours, theirs):
    """Every token and count; log-probabilities to a rounding or two."""
    chex.assert_trees_all_equal(jax.device_get(ours[:3]), jax.device_get(theirs[:3]))
    np.testing.assert_allclose(
        np.asarray(ours.logprobs), np.asarray(theirs.logprobs), atol=2e-6, rtol=2e-7
    )


SCHEDULES = [
    pytest.param(True, id="small"),
    pytest.param(False, id="large", marks=pytest.mark.checks),
]
# Programs of the large schedule that one case alone needs are left to `make checks`.
SHARE_A_PROGRAM = ("V = 1025", "random", "greedy", "invalid rows")


@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        *(pytest.param(True, name, id=f"small-{name}") for name in CASES),
        *(pytest.param(False, name, id=f"large-{name}") for name in SHARE_A_PROGRAM),
        *(
            pytest.param(False, name, id=f"large-{name}", marks=pytest.mark.checks)
            for name in CASES
            if name not in SHARE_A_PROGRAM
        ),
    ],
    indirect=["schedule"],
)
def test_verification_emits_the_reference_s_tokens(schedule, name):
    noise_dtype, context = noise_of(name)
    theirs = reference(name)
    with context:
        ours = run(library(schedule, noise_dtype), CASES[name]())
    check_equal(ours, theirs)
    if name != "no drafts":
        assert len(set(theirs.num_accepted.tolist())) > 1 + 2 * ("33 rows" in name)


@functools.cache
def ragged_reference():
    _, ragged, cu = ragged_case(1)
    return jax.device_get(run_ragged(ragged, cu, "xla"))


@pytest.mark.parametrize("schedule", SCHEDULES, indirect=True)
def test_ragged_verification_emits_the_reference_s_tokens(schedule):
    _, ragged, cu = ragged_case(1)
    theirs = ragged_reference()
    check_equal(run_ragged(ragged, cu, schedule), theirs)


def first_rows(case, size):
    """The first requests of a case, whose draft rows are theirs alone."""
    few = {name: value[:size] for name, value in case.items() if name != "draft_logits"}
    few["draft_logits"] = case["draft_logits"][few["rows"]]
    return few | {"rows": np.arange(size, dtype=np.int32)}


@pytest.mark.parametrize("schedule", SCHEDULES, indirect=True)
def test_both_schedules_emit_the_same_bits_for_the_same_request(schedule):
    """32 requests and the first 8 of them run in different tiles and programs, and agree."""
    case, keys = mixed_case(0, BATCH, K, VOCAB), make_keys(BATCH)
    whole = run(library(schedule), case, keys)
    some = run(library(schedule), first_rows(case, FEW), keys[:FEW])
    check_equal(some, jax.tree.map(lambda x: x[:FEW], whole))


# The small one's way through transformations, and through a scan, is in test_transforms.
@pytest.mark.checks
@pytest.mark.parametrize("schedule", [False], ids=["large"], indirect=True)
def test_vmap_inside_a_while_loop_changes_nothing(schedule):
    cases = [sampled_case(seed, FEW, K, VOCAB) for seed in range(2)]
    keys = make_keys(FEW)
    plain = [run(library(schedule), case, keys) for case in cases]
    stacked = {name: jnp.stack([case[name] for case in cases]) for name in cases[0]}

    def call(case):
        return run(library(schedule), case, keys)

    def body(state):
        """The cases in one order, then in the other: the loop leaves what the last gave."""
        i, _ = state
        return i + 1, jax.vmap(call)(jax.tree.map(lambda x: jnp.roll(x, i, axis=0), stacked))

    start = 0, jax.tree.map(lambda x: np.zeros((2, *x.shape), x.dtype), plain[0])
    _, looped = jax.lax.while_loop(lambda state: state[0] < 2, body, start)
    for i, one in enumerate(reversed(plain)):
        check_equal(jax.tree.map(lambda x, i=i: x[i], looped), one)


@pytest.mark.checks
@pytest.mark.parametrize("schedule", [False], ids=["large"], indirect=True)
def test_shards_of_a_batch_emit_what_the_batch_does(schedule):
    """Inside shard_map; its check of what varies knows nothing of Pallas' interpreter."""
    mesh = jax.make_mesh((4,), ("batch",), axis_types=(AxisType.Auto,))
    case, keys = sampled_case(3, FEW, K, VOCAB), make_keys(FEW)
    plain = run(library(schedule), case, keys)
    # A device's rows are its own.
    case = {name: jnp.asarray(x) for name, x in case.items()} | {"rows": jnp.arange(FEW) % 2}

    def call(case, keys):
        return run(library(schedule), case, keys)

    spec = PartitionSpec("batch")
    mapped = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    check_equal(jax.jit(mapped)(case, keys), plain)
