"""Noise that a test chooses: every word of a request's draws is the first word of its key."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from specjax.core import noise


def replace_everywhere(monkeypatch, original, replacement):
    """Replaces a function of the library in each module that defines or imports it."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "specjax":
            for attribute, value in list(vars(module).items()):
                if value is original:
                    monkeypatch.setattr(module, attribute, replacement)


def draw_the_key(monkeypatch):
    """Makes the first word of a request's key every word that is drawn for it.

    Traces are kept by shape and outlive the patch: call the library in a shape of its own.
    """

    def words(at, index, dtype=jnp.uint32, threefry=None):
        return jnp.broadcast_to(at[0].astype(dtype), jnp.broadcast_shapes(at[0].shape, index.shape))

    replace_everywhere(monkeypatch, noise.fold_in, lambda key, data, threefry=None: key)
    replace_everywhere(monkeypatch, noise.batch_addresses, lambda key, positions, streams: key)
    replace_everywhere(monkeypatch, noise.random_bits, words)


def keys_of(words):
    """Keys that draw these words."""
    words = np.asarray(words, np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(np.stack([words, 0 * words], axis=-1)))
