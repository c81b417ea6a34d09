"""What a loop lists of each token is one value: in a state's buffers, or step by step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.decode import token_info


@pytest.mark.parametrize("num_logprobs", [None, 3])
def test_a_config_travels_through_an_export(num_logprobs):
    asked = token_info.check_token_info(specjax.LoopOptions(num_logprobs=num_logprobs))

    def run(asked, x):
        return x * (3 if asked is None else asked.logprobs.num), asked

    exported = jax.export.export(jax.jit(run))(asked, jnp.ones(2))
    again = jax.export.deserialize(exported.serialize())
    tripled, back = again.call(asked, jnp.ones(2))
    assert back == asked
    np.testing.assert_array_equal(tripled, 3)
