"""A team: the programs of a row that run at the same time, and search its cutoff together.

A search that reads a row of 131072 logits several times takes one program tens of microseconds. So
the search launch has several programs per row. The programs of a row that needs such a search form
its team. A team divides the row into shares of equal size. In each pass a member stores the sums
of its shares and waits for the other members. It then adds up the sums of all shares in one order.
So all members have the same bits, and take the same decisions without a message.

    member 0   shares 0, 4, 8, 12  --store--+                 +--> sums of 16 shares, next pivots
    member 1   shares 1, 5, 9, 13  --store--+-- all arrived --+--> the same
    member 2   shares 2, 6, 10, 14 --store--+                 +--> the same
    member 3   shares 3, 7, 11, 15 --store--+                 +--> the same

Why no member waits forever. A program joins when it runs. The team is closed before its first pass:
once all programs of the row have joined, or after a fixed number of polls. A program that comes
later ends. So members wait only for running programs, which wait only for each other; none waits
for a program that has not started. The result depends on neither the number of members nor their
order: every member would compute the same sum of a share.

Memory order: an arrival is an atomic addition with acquire-release order at GPU scope, after a
barrier of the program's threads (`launch.is_last_arrival`). A member reads the sums after an
addition that read the last arrival. Sums of consecutive passes go to two places in turn. A member
stores to a place again only after all members have arrived once more, and so have read it.

Reference: Xiao and Feng, 2010, IPDPS (barriers between the programs of a launch).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from specjax.pallas.kernel_config import KernelConfig
from specjax.pallas.launch import cond_or, output

# Shares of a row: sums are added up per share, so that results do not depend on the team's size.
NUM_SHARES = 16
# Places for the sums of a pass: two in turn, and one of the smallest logit.
_NUM_SLOTS = 3
# Added to `Counters.joined` by a program that closes the team: far more than there are programs.
_CLOSED = 1 << 16
# About ten microseconds. Programs of a launch that fits the GPU start within one.
_MAX_POLLS = 16


class Team(NamedTuple):
    """The team of a row, as one of its programs sees it.

    Attributes:
      rank: i32, the program's index among the members; `size` or more if it is no member.
      size: i32, the number of members.
    """

    rank: jax.Array
    size: jax.Array


class Counters(NamedTuple):
    """References to the counters of each row's team, i32[R], which only grow; 0 before the launch.

    Attributes:
      joined: programs that joined, and `_CLOSED` for each that closed the team.
      size: members of a closed team.
      arrived: arrivals, of all members in each pass.
    """

    joined: Any
    size: Any
    arrived: Any


class TeamMemory(NamedTuple):
    """References to the memory that the members of a row's team share.

    Attributes:
      counters: of all rows.
      sums: f32[R, slots, NUM_SHARES, P].
    """

    counters: Counters
    sums: Any


def counters_shape(num_rows: int) -> Counters:
    """Returns the shapes of `Counters`."""
    return Counters(*(output((num_rows,), jnp.int32) for _ in Counters._fields))


def sums_shape(num_rows: int, config: KernelConfig) -> Any:
    """Returns the shape of `TeamMemory.sums`."""
    return output((num_rows, _NUM_SLOTS, NUM_SHARES, config.num_pivots))


def form_team(counters: Counters, b: jax.Array, num_programs: int) -> Team:
    """Joins the team of row b, and waits until it is closed.

    Args:
      counters: of all rows.
      b: the row.
      num_programs: that may join.

    Returns:
      The team; its size is the same for all members.
    """
    ticket = plgpu.atomic_add(counters.joined, (b,), jnp.int32(1))

    def is_waiting(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        polls, joined = state
        return (joined < num_programs) & (polls < _MAX_POLLS)

    def poll(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return state[0] + 1, _read(counters.joined, b, state[1])

    _, joined = jax.lax.while_loop(is_waiting, poll, (jnp.int32(0), ticket + 1))

    def close_team() -> jax.Array:
        before = plgpu.atomic_add(counters.joined, (b,), jnp.int32(_CLOSED))
        # The first addition closes the team and fixes its size; later ones do not change it.
        size = jnp.where(before < _CLOSED, before, 0)
        known = jnp.maximum(plgpu.atomic_max(counters.size, (b,), size), size)
        return jax.lax.while_loop(
            lambda size: size == 0, lambda size: _read(counters.size, b, size), known
        )

    # If all programs have joined, the size is known without closing the team: num_programs.
    size = cond_or(joined != num_programs, close_team, joined)
    return Team(jnp.where(ticket < _CLOSED, ticket, size), size)


def _read(counter: Any, b: jax.Array, seen: jax.Array) -> jax.Array:
    """Returns the counter of row b; what was stored before it was counted is visible.

    Args:
      counter: a reference i32[R].
      b: the row.
      seen: i32, a lower bound of the counter.
    """
    return plgpu.atomic_max(counter, (b,), seen)


def reduce_shares(
    team: Team,
    memory: TeamMemory,
    b: jax.Array,
    slot: jax.Array,
    ask: Callable[[jax.Array], jax.Array],
    merge: Callable[[jax.Array], jax.Array],
    interpret: bool,
) -> jax.Array:
    """Returns the merged results f32[P] of a query on all shares; a member runs it on its own.

    Args:
      team: of row b.
      memory: of all teams.
      b: the row.
      slot: i32, where the results are stored.
      ask: the query, a function of a share's index i32; returns f32[P].
      merge: of results f32[NUM_SHARES, P].
      interpret: whether the kernel runs in Pallas' interpreter.
    """
    counters, sums = memory
    pivot = jax.lax.iota(jnp.int32, sums.shape[3])

    def store(number: jax.Array, _: None) -> None:
        share = team.rank + number * team.size
        plgpu.store(sums.at[b, slot, share, pivot], ask(share))

    num_member_shares = jax.lax.div(jnp.int32(NUM_SHARES - 1) - team.rank, team.size) + jnp.int32(1)
    jax.lax.fori_loop(jnp.int32(0), num_member_shares, store, None)
    _wait_for_all(counters, b, team, interpret)
    share = jax.lax.iota(jnp.int32, NUM_SHARES)
    return merge(plgpu.load(sums.at[b, slot, share[:, None], pivot[None]]))


def _wait_for_all(counters: Counters, b: jax.Array, team: Team, interpret: bool) -> None:
    """Waits until all members have arrived; their earlier stores are then visible."""
    if not interpret:
        plgpu.debug_barrier()
    # 1 as a computed value: the interpreter takes no literal inside a loop.
    before = plgpu.atomic_add(counters.arrived, (b,), jnp.minimum(team.size, 1))
    # A member's n-th arrival follows all (n-1)-th arrivals.
    wanted = (jax.lax.div(before, team.size) + 1) * team.size
    jax.lax.while_loop(
        lambda seen: seen < wanted, lambda seen: _read(counters.arrived, b, seen), before + 1
    )
