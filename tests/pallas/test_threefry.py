"""The PTX of the hash, evaluated here instruction by instruction."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.noise import threefry2x32
from specjax.pallas.threefry import threefry_ptx


def evaluate(ptx, operands):
    """Returns the words packed into operand 0 by a block of 32-bit `add`, `xor`, `shf.l.wrap`."""
    registers = {f"${i + 1}": np.asarray(value, np.uint32) for i, value in enumerate(operands)}
    declared = re.search(r"\.reg \.b32 ([^;]*);", ptx).group(1).split(", ")
    for name, operation in re.findall(r"(add\.u32|xor\.b32|shf\.l\.wrap\.b32) ([^;]*);", ptx):
        target, *sources = operation.split(", ")
        assert target in declared
        x, y, *shift = [
            registers[source] if source in registers else np.uint32(int(source))
            for source in sources
        ]
        if name == "add.u32":
            registers[target] = x + y
        elif name == "xor.b32":
            registers[target] = x ^ y
        else:  # a funnel shift of the 64 bits (y, x) to the left: its high word
            bits = shift[0] & np.uint32(31)
            registers[target] = (y << bits) | (x >> (np.uint32(32) - bits))
    low, high = re.search(r"mov\.b64 \$0, {(\w+), (\w+)};", ptx).groups()
    return registers[low], registers[high]


@pytest.mark.parametrize("index", [0, 1])
def test_the_ptx_computes_the_words_of_the_hash(index):
    operands = np.random.default_rng(index).integers(0, 2**32, (4, 1000), dtype=np.uint32)
    k0, k1, c0, c1 = map(jnp.asarray, operands)
    expected = threefry2x32((k0, k1), (c0, c1))[index]
    np.testing.assert_array_equal(evaluate(threefry_ptx(), operands)[index], expected)
