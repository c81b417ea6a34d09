"""The PTX of the hash, evaluated here instruction by instruction."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.noise import threefry2x32
from specjax.pallas.threefry import threefry_ptx


def evaluate(ptx, operands):
    """Returns operand 0 after a block of `add`, `xor`, `shf.l.wrap` and `mov` on 32-bit words."""
    registers = {f"${i + 1}": np.asarray(value, np.uint32) for i, value in enumerate(operands)}
    declared = re.search(r"\.reg \.b32 ([^;]*);", ptx).group(1).split(", ")
    for name, targets in re.findall(
        r"(add\.u32|xor\.b32|shf\.l\.wrap\.b32|mov\.b32) ([^;]*);", ptx
    ):
        target, *sources = targets.split(", ")
        assert target in (*declared, "$0")
        x, *rest = [registers[s] if s in registers else np.uint32(int(s)) for s in sources]
        if name == "add.u32":
            registers[target] = x + rest[0]
        elif name == "xor.b32":
            registers[target] = x ^ rest[0]
        elif name == "mov.b32":
            registers[target] = x
        else:  # a funnel shift of the 64 bits (rest[0], x) to the left: its high word
            shift = rest[1] & np.uint32(31)
            registers[target] = (rest[0] << shift) | (x >> (np.uint32(32) - shift))
    return registers["$0"]


@pytest.mark.parametrize("index", [0, 1])
def test_the_ptx_computes_the_words_of_the_hash(index):
    operands = np.random.default_rng(index).integers(0, 2**32, (4, 1000), dtype=np.uint32)
    k0, k1, c0, c1 = map(jnp.asarray, operands)
    expected = threefry2x32((k0, k1), (c0, c1))[index]
    np.testing.assert_array_equal(evaluate(threefry_ptx(index), operands), expected)
