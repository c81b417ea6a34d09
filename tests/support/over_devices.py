"""Functions whose rows of logits lie over fake devices, and what travels in their programs."""

import math
import re

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

DEVICES = 4
WHOLE = PartitionSpec()
_COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|collective-permute|all-to-all|reduce-scatter)(?:-start)?\("
)


def pad(array, devices=DEVICES, fill=jnp.nan):
    """An array whose last axis is filled up to a multiple of the devices."""
    width = [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[-1] % devices)]
    return jnp.pad(array, width, constant_values=fill)


def split(array):
    """The specification of an array whose last axis lies over the devices."""
    return PartitionSpec(*(None,) * (array.ndim - 1), "model")


def mesh_of(devices=DEVICES, data=1, kind=AxisType.Auto):
    """A mesh whose axis "model" has some devices, next to an axis "data"."""
    used = jax.devices()[: data * devices]
    types = (kind,) * 2
    return jax.make_mesh((data, devices), ("data", "model"), axis_types=types, devices=used)


def over_devices(function, arrays, specs, devices=DEVICES, out_specs=WHOLE, data=1, **options):
    """The compiled program of a function whose arrays lie over devices, by `data`, as specs say."""
    mesh = mesh_of(devices, data)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out_specs, **options)
    return jax.jit(mapped).lower(*arrays).compile()


def num_messages(program):
    """How many collectives a program has."""
    return len(_COLLECTIVE.findall(program.as_text()))


def collectives(program):
    """The collectives of a program, each its kind and how many numbers it returns."""
    found = _COLLECTIVE.findall(program.as_text())
    shapes = [(kind, x) for result, kind in found for x in re.findall(r"\w+\[([\d,]*)\]", result)]
    return [(kind, math.prod(map(int, filter(None, x.split(","))))) for kind, x in shapes]


def most_numbers(program):
    """The kinds of collectives in a program, and the most numbers that one of them returns."""
    found = collectives(program)
    return {kind for kind, _ in found}, max(size for _, size in found)
