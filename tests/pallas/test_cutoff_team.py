"""Wide rows, which the programs of a team search together.

Pallas' interpreter runs one program after another, so that the first is a team of its own. Larger
teams are tested there member by member, from memory as the others would leave it, and as they are
on a GPU.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle_cutoff
import pytest
from gpu_cases import KERNELS, pick

import specjax
from specjax.implementation import Implementation
from specjax.pallas.cutoff import team as teams
from specjax.pallas.kernel_config import KernelConfig, Tile
from specjax.pallas.launch import launch, output

VOCAB = 5000
# A row is wide as soon as 20 of its sub-blocks are to be read again.
SMALL = dict(row=Tile(256, 4), row_search=Tile(256, 4), num_register_logits=64, max_reread=20)
FILTERS = {
    "top_k": [0, 900, 0, 3000, 0, 4999],
    "top_p": [0.9, 1.0, 0.97, 0.8, 0.999, 0.5],
    "min_p": [0.0, 0.0, 0.01, 0.0, 0.02, 0.0],
    "temperature": [1.0, 1.0, 30.0, 1.0, 3.0, 2.0],
}


def wide_rows(num_rows, vocab_size, dtype, seed=0):
    """Rows of which most filters keep thousands: normal, with ties, masked, ranked, far below 0."""
    rng = np.random.default_rng(seed)
    x = (3 * rng.normal(size=(num_rows, vocab_size))).astype(np.float32)
    x[1::5] = np.round(x[1::5])
    x[2::5] = np.where(rng.random(x[2::5].shape) < 0.2, -1e4, x[2::5])
    x[3::5] = -1.3 * np.log1p(
        rng.permuted(np.broadcast_to(np.arange(vocab_size), x[3::5].shape), axis=1)
    )
    x[4::5] -= 300
    return jnp.asarray(x, dtype)


def cut(rows, name, **config):
    """The cutoffs of rows, with filters that change from row to row."""
    each = {key: np.resize(np.asarray(value), len(rows)) for key, value in FILTERS.items()}
    options = {
        key: jnp.asarray(value, jnp.int32 if key == "top_k" else jnp.float32)
        for key, value in each.items()
    }
    implementation = Implementation(name, (KernelConfig(**config),))
    found = specjax.logit_cutoff(rows, implementation=implementation, **options)
    return np.asarray(found), each


def check(rows, found, each):
    """Each cutoff is the sort's."""
    rows = np.asarray(rows).astype(np.float32)
    sure = [
        oracle_cutoff.check(row, cutoff, **{name: value[r] for name, value in each.items()})
        for r, (row, cutoff) in enumerate(zip(rows, found, strict=True))
    ]
    assert np.mean(sure) > 0.5


@pytest.mark.once
@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_wide_rows_have_the_cutoffs_of_a_sort(dtype):
    rows = wide_rows(6, VOCAB, dtype)
    found, each = cut(rows, "interpret", num_search_programs=2, **SMALL)
    check(rows, found, each)
    if dtype != jnp.float32:
        return
    # And where the buffer is too small for a row that is not wide, which one program then reads, in
    # one step of three chunks per share.
    config = SMALL | dict(max_reread=1000, num_buffered_logits=100, row_search=Tile(512, 4))
    np.testing.assert_array_equal(cut(rows, "interpret", num_search_programs=1, **config)[0], found)


class Memory(NamedTuple):
    counters: teams.Counters
    sums: Any
    own: Any  # i32[2], the rank of the program that runs and the size of its team


class Left(NamedTuple):
    counters: teams.Counters
    sums: Any
    result: Any


@functools.partial(jax.jit, static_argnums=(0, 2))
def run_one(program, memory, num_results):
    """What one program leaves in memory, and its results i32 or f32."""
    return launch(
        program,
        memory,
        Left(memory.counters, memory.sums, output((num_results,))),
        num_programs=1,
        num_warps=4,
        interpret=True,
    )


def empty_memory(**counters):
    values = {name: counters.get(name, 0) for name in teams.Counters._fields}
    counts = teams.Counters(**{name: np.array([x], np.int32) for name, x in values.items()})
    sums = np.full(teams.sums_shape(1, KernelConfig()).shape, np.nan, np.float32)
    return Memory(counts, sums, np.zeros(2, np.int32))


def join(memory, out):
    team = teams.form_team(out.counters, jnp.int32(0), 4)
    out.result[0] = team.rank.astype(jnp.float32)
    out.result[1] = team.size.astype(jnp.float32)


def ask(memory, out):
    """Asks for shares of pivots as a member of a team in which all others have arrived."""
    num_pivots = KernelConfig().num_pivots
    rank, size = memory.own[0], memory.own[1]
    out.counters.arrived[0] = size - 1
    pivot = jax.lax.iota(jnp.int32, num_pivots)
    out.result[pivot] = teams.reduce_shares(
        teams.Team(rank, size),
        teams.TeamMemory(out.counters, out.sums),
        jnp.int32(0),
        jnp.int32(2),
        lambda share: (share * num_pivots + pivot).astype(jnp.float32) * 0.1,
        lambda parts: jnp.sum(parts, axis=0),
        interpret=True,
    )


@pytest.mark.once
@pytest.mark.interpret
@pytest.mark.parametrize(
    ("before", "rank", "size"),
    [
        ({"joined": 3}, 3, 4),
        # None of the others comes.
        ({}, 0, 1),
        ({"joined": 1}, 1, 2),
        # It was closed before: by one that saw two, and by one that saw all.
        ({"joined": 2 + teams._CLOSED, "size": 2}, 2, 2),
        ({"joined": 3 + 2 * teams._CLOSED, "size": 3}, 3, 3),
    ],
)
def test_a_team_has_those_who_joined_before_it_was_closed(before, rank, size):
    left = run_one(join, empty_memory(**before), 2)
    np.testing.assert_array_equal(left.result, [rank, size])
    if size < 4:
        # A program that joins later finds the team closed, and of the same size.
        later = run_one(join, Memory(left.counters, left.sums, np.zeros(2, np.int32)), 2)
        np.testing.assert_array_equal(later.result, [size, size])


@pytest.mark.once
@pytest.mark.interpret
def test_members_ask_each_share_once_and_know_the_same():
    num_pivots = KernelConfig().num_pivots
    merged = {}
    for size in (1, 3, 16):
        memory = empty_memory()
        for rank in range(size):
            own = np.array([rank, size], np.int32)
            left = run_one(ask, memory._replace(own=own), num_pivots)
            # None but the last knows all that it adds up.
            assert np.all(np.isnan(left.result)) == (rank < size - 1)
            memory = Memory(left.counters, left.sums, own)
        merged[size] = np.asarray(left.result)
    index = np.arange(teams.NUM_SHARES)[:, None] * num_pivots + np.arange(num_pivots)
    np.testing.assert_allclose(merged[1], 0.1 * index.sum(axis=0), rtol=1e-6)
    for size in merged:
        np.testing.assert_array_equal(merged[size], merged[1])


# 8 rows have teams of 16, and 64 of 2; the last two launch more programs than a GPU runs at once.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_rows", "dtype", "num_programs"),
    [
        (8, jnp.bfloat16, None),
        (8, jnp.float32, None),
        (64, jnp.bfloat16, None),
        (64, jnp.bfloat16, 16),
        (200, jnp.float16, 5),
    ],
)
def test_teams_on_a_gpu_find_what_one_program_finds(num_rows, dtype, num_programs):
    rows = wide_rows(pick(num_rows, 5), pick(131072, VOCAB), dtype)
    config = {} if num_programs is None else {"num_search_programs": num_programs}
    found, each = cut(rows, KERNELS, **config)
    check(rows, found, each)
    alone, _ = cut(rows, KERNELS, num_search_programs=1)
    np.testing.assert_array_equal(found, alone)
    for _ in range(pick(20, 1)):
        np.testing.assert_array_equal(cut(rows, KERNELS, **config)[0], found)
