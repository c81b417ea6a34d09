"""What a loop lists of each token is one value: in a state's buffers, or step by step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.decode import token_info


@pytest.mark.parametrize("options", [{}, {"num_logprobs": 2, "max_kept_tokens": 4}])
def test_a_config_travels_through_an_export(options):
    config = specjax.SpeculativeConfig()
    asked = token_info.check_token_info(specjax.LoopOptions(**options), config)

    def run(asked, x):
        return x * (3 if asked is None else asked.max_kept - 1), asked

    exported = jax.export.export(jax.jit(run))(asked, jnp.ones(2))
    again = jax.export.deserialize(exported.serialize())
    tripled, back = again.call(asked, jnp.ones(2))
    assert back == asked
    np.testing.assert_array_equal(tripled, 3)
