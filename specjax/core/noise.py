"""Noise by address: a random number is a function of (key, position, stream, index) alone.

    address = fold_in(fold_in(key, position), stream)      one draw
    bits    = random_bits(address, index)                  those of `jax.random.bits`
    u       = uniform_from_bits(bits)                      in (0, 1)
    gumbel  = -log(-log1p(-u))                             in float32 or float64

The hash is written out here. Kernels pass their own form of it, `specjax.pallas.threefry`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Tokens per block of two-level sampling; part of the contract: another value draws
# other tokens. It divides the vocabularies of Llama, Qwen and Gemma 2.
SAMPLING_BLOCK = 128

# The levels of two-level sampling, each with noise of its own.
TOKEN_LEVEL = 0
BLOCK_LEVEL = 1

Words = tuple[jax.Array, jax.Array]
Hash = Callable[[Words, Words], Words]

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA


class Stream:
    """The independent noise streams of one position.

    Noise shared by a draft and the residual that replaces it biases the output: every purpose has
    its own stream.

    Example:
      >>> Stream.TARGET, Stream.accept(0), Stream.draft(0), Stream.accept(1)
      (0, 1, 2, 3)
    """

    TARGET = 0

    @staticmethod
    def accept(index: Any) -> Any:
        """Returns the stream of the acceptance test of drafted token `index` (int or i32)."""
        return 2 * index + 1

    @staticmethod
    def draft(index: Any) -> Any:
        """Returns the stream that drafted token `index` (int or i32) is sampled on."""
        return 2 * index + 2


@functools.partial(jax.jit, inline=True)  # traced once per shape: every draw hashes four times
def threefry2x32(key: Words, count: Words) -> Words:
    """Computes Threefry-2x32 with 20 rounds, the hash of `jax.random`'s default keys.

    Args:
      key: two u32 arrays.
      count: two u32 arrays that broadcast against the key's.

    Returns:
      Two u32 arrays of the broadcast shape.

    References:
      Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    schedule = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(PARITY))
    x0 = count[0] + schedule[0]
    x1 = count[1] + schedule[1]
    for i in range(5):
        for rotation in ROTATIONS[i % 2]:
            x0 = x0 + x1
            x1 = (x1 << jnp.uint32(rotation)) | (x1 >> jnp.uint32(32 - rotation))
            x1 = x0 ^ x1
        x0 = x0 + schedule[(i + 1) % 3]
        x1 = x1 + schedule[(i + 2) % 3] + jnp.uint32(i + 1)
    return x0, x1


def key_words(keys: jax.Array) -> Words:
    """Returns the two u32 words of typed threefry keys, each of the keys' shape."""
    data = jax.random.key_data(keys)
    return data[..., 0], data[..., 1]


def fold_in(key: Words, data: Any, threefry: Hash = threefry2x32) -> Words:
    """Returns `jax.random.fold_in` of words.

    Args:
      key: two u32 arrays.
      data: an int or an integer array of the key's shape.
      threefry: the hash.

    Returns:
      Two u32 arrays of the key's shape.
    """
    word = jnp.asarray(data).astype(jnp.uint32)
    word = jnp.broadcast_to(word, key[0].shape)
    return threefry(key, (jnp.zeros_like(word), word))


def address(key: Words, position: Any, stream: Any, threefry: Hash = threefry2x32) -> Words:
    """Returns the address of a draw: `fold_in(fold_in(key, position), stream)`.

    Args:
      key: the request's two u32 words.
      position: i32, the absolute position of the token the draw decides.
      stream: int or i32, one of `specjax.Stream`.
      threefry: the hash.

    Returns:
      Two u32 arrays of the key's shape.
    """
    return fold_in(fold_in(key, position, threefry), stream, threefry)


def batch_addresses(key: Words, positions: jax.Array, streams: jax.Array) -> Words:
    """Returns the `address` of each row of a batch, by `jax.random`.

    The hash of `jax.random` is a loop on a CPU. The unrolled hash, chained over arrays, compiles
    for seconds.

    Args:
      key: two u32[B].
      positions: i32[B].
      streams: i32[B].

    Returns:
      Two u32[B].
    """

    def one(words: jax.Array, position: jax.Array, stream: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.fold_in(jax.random.fold_in(key, position), stream)

    return key_words(jax.vmap(one)(jnp.stack(key, axis=-1), positions, streams))


def fold_in_rows(key: jax.Array, size: int) -> jax.Array:
    """Returns typed keys [size]: a single key with each row's index folded in."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(size, dtype=jnp.uint32))


def random_bits(
    at: Words, index: jax.Array, dtype: Any = jnp.uint32, threefry: Hash = threefry2x32
) -> jax.Array:
    """Returns word `index` of `jax.random.bits` at an address, for any length of the bits.

    Args:
      at: two u32 arrays, broadcast against `index`.
      index: u32, the index of the word.
      dtype: uint32 or uint64.
      threefry: the hash.

    Returns:
      Words of `dtype`, of the broadcast shape.
    """
    # jax.random.bits in its partitionable form hashes the 64-bit index of each word.
    high, low = threefry(at, (jnp.zeros_like(index), index))
    if dtype == jnp.uint32:
        return high ^ low
    return (high.astype(jnp.uint64) << jnp.uint64(32)) | low.astype(jnp.uint64)


def uniform_from_bits(bits: jax.Array) -> jax.Array:
    r"""Returns a uniform strictly inside (0, 1): f32 from 32 bits, f64 from 64 bits.

    .. math:: u_{32} = \min((b + 1/2)\, 2^{-32}, 1 - 2^{-24}) \qquad
              u_{64} = \min((\lfloor b / 2^{11} \rfloor + 1/2)\, 2^{-53}, 1 - 2^{-53})

    The clamp keeps the Gumbel of the largest word finite.
    """
    if bits.dtype == jnp.uint32:
        u = (bits.astype(jnp.float32) + jnp.float32(0.5)) * jnp.float32(2.0**-32)
        return jnp.minimum(u, jnp.float32(1 - 2.0**-24))
    r = (bits >> jnp.uint64(11)).astype(jnp.float64)
    u = (r + jnp.float64(0.5)) * jnp.float64(2.0**-53)
    return jnp.minimum(u, jnp.float64(1 - 2.0**-53))


def gumbel_from_uniform(u: jax.Array) -> jax.Array:
    """Returns a standard Gumbel, `-log(-log1p(-u))`.

    Small u, where floats are dense, give large Gumbels: the tail that decides rare tokens has full
    resolution.
    """
    return -jnp.log(-jnp.log1p(-u))


def uniform(
    at: Words, index: jax.Array, dtype: Any = jnp.float32, threefry: Hash = threefry2x32
) -> jax.Array:
    """Returns uniforms at an address; an acceptance test reads index 0 of `Stream.accept(i)`.

    Args:
      at: two u32 arrays, broadcast against `index`.
      index: u32.
      dtype: float32 or float64.
      threefry: the hash.

    Returns:
      Array of `dtype`, in (0, 1).
    """
    bits = jnp.uint64 if dtype == jnp.float64 else jnp.uint32
    return uniform_from_bits(random_bits(at, index, bits, threefry))


def uniform_at_once(at: Words, dtype: Any) -> jax.Array:
    """Returns `uniform` of index 0 where addresses are a batch of drafted tokens; no kernel's.

    A barrier parts the hash from the arithmetic. In one loop with the address's two hashes, LLVM's
    vectorizer in jaxlib 0.12 takes a time on a CPU that is exponential in their rounds.

    Args:
      at: two u32 arrays.
      dtype: float32 or float64.

    Returns:
      Array of `dtype`, in (0, 1).
    """
    bits = random_bits(at, jnp.uint32(0), jnp.uint64 if dtype == jnp.float64 else jnp.uint32)
    return uniform_from_bits(jax.lax.optimization_barrier(bits))


def gumbel(
    at: Words, level: int, index: jax.Array, dtype: Any = jnp.float32, threefry: Hash = threefry2x32
) -> jax.Array:
    """Returns the Gumbels of one level of two-level sampling at an address.

    Args:
      at: two u32 arrays of a shape that broadcasts against `index`.
      level: `TOKEN_LEVEL` for tokens, `BLOCK_LEVEL` for blocks of `SAMPLING_BLOCK` tokens.
      index: u32, the absolute vocabulary id of a token, the index of a block.
      dtype: float32 or float64.
      threefry: the hash.

    Returns:
      Array of `dtype`, finite.
    """
    return gumbel_from_uniform(uniform(fold_in(at, level, threefry), index, dtype, threefry))
