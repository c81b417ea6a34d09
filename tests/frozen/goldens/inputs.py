"""Batches, models and drafters of the goldens, all drawn by NumPy: no JAX changes them."""

import dataclasses
import functools
import zlib

import automata
import bigrams
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import specjax
from specjax import models

BATCH, K, VOCAB, DRAFT_VOCAB = 6, 3, 50, 30
RAGGED = np.array([3, 0, 2, 3, 1, 3], np.int32)  # Drafted tokens of each request, end to end.
TEMPERATURE = np.array([0.0, 0.6, 1.0, 1.0, 1.4, 0.8], np.float32)
PROMPTS = ([1, 2, 3, 1, 2, 3, 1], [4], [0, 2, 4, 0, 2])
CYCLES = ([0, 1, 2, 3, 0, 1], [5, 6, 7, 4, 5, 6], [10, 11, 8, 9])


def keys_of(size, seed=0):
    return jax.random.split(jax.random.key(seed), size)


def padded(prompts):
    """Token ids [B, L], filled up with -1, and lengths."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    ids = np.full((len(prompts), lengths.max()), -1, np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    return ids, lengths


@functools.cache
def batch(seed=0, vocab=VOCAB):
    """Logits of a target and a draft like it, drafted tokens, and what else a call may be given."""
    rng = np.random.default_rng(seed)
    draft = 4 * rng.normal(size=(BATCH, K, vocab)).astype(np.float32)
    target = np.pad(draft, ((0, 0), (0, 1), (0, 0)))
    target = target + rng.normal(size=target.shape).astype(np.float32)
    scaled = draft / np.where(TEMPERATURE > 0, TEMPERATURE, 1e-3)[:, None, None]
    ids = np.argmax(scaled + rng.gumbel(size=draft.shape), axis=-1).astype(np.int32)
    ids[3, 1] = -1  # The drafts of one request end early.
    masked = target.copy()
    masked[rng.random(target.shape) < 0.1] = -np.inf
    return {
        "token_ids": ids,
        "draft_logits": draft,
        "target_logits": target,
        "masked_logits": masked,
        "cutoff": rng.choice([-np.inf, -1.5], (BATCH, K + 1)).astype(np.float32),
        "draft_cutoff": rng.choice([-np.inf, -1.0], (BATCH, K)).astype(np.float32),
        "bonus_token_ids": np.array([-1, 7, -1, -1, 3, -1], np.int32),
        "num_tokens": np.array([3, 3, 1, 3, -1, 0], np.int32),
        "rows": np.array([2, 0, 1, 5, 3, 4], np.int32),
    }


def end_to_end(rows, extra=0):
    """The rows [B, K + extra, ...] that requests of `RAGGED` drafts have, laid end to end."""
    return np.concatenate([x[: n + extra] for x, n in zip(rows, RAGGED, strict=True)])


def draft_of(kind, arrays, is_ragged=False):
    """Fields of a draft: "one-hot", "sampled", "everything", or "mapped" from fewer tokens."""
    lay = end_to_end if is_ragged else lambda rows: rows
    ids, logits = arrays["token_ids"], arrays["draft_logits"]
    if kind == "one-hot":
        likeliest = np.argmax(arrays["target_logits"][:, :K], axis=-1).astype(np.int32)
        return {"token_ids": lay(np.where(np.arange(K) < 2, likeliest, ids))}
    if kind == "mapped":
        token_map = np.random.default_rng(4).permutation(logits.shape[-1])[:DRAFT_VOCAB]
        ids = token_map[np.argmax(logits[..., token_map], axis=-1)].astype(np.int32)
        logits, token_map = logits[..., token_map], token_map.astype(np.int32)
        return {"token_ids": lay(ids), "logits": lay(logits), "token_map": token_map}
    draft = {"token_ids": lay(ids), "logits": lay(logits), "temperature": TEMPERATURE}
    if kind == "everything":
        rows, number = np.arange(len(lay(ids)))[::-1].astype(np.int32), arrays["num_tokens"]
        draft |= {"logits": draft["logits"][np.argsort(rows)], "rows": rows, "num_tokens": number}
        draft["cutoff"] = lay(arrays["draft_cutoff"])
        draft |= _statistics(lay, ids, logits, arrays["draft_cutoff"])
    return draft


def _statistics(lay, ids, logits, cutoff):
    scale = np.where(TEMPERATURE < 1e-5, 1, TEMPERATURE)[:, None]
    kept = np.where(logits >= cutoff[..., None], logits.astype(np.float64), -np.inf)
    total = np.log(np.exp(kept / scale[..., None]).sum(-1))
    own = np.take_along_axis(kept, np.maximum(ids, 0)[..., None], axis=-1)[..., 0]
    found = {"logprobs": own / scale - total, "logsumexp": total}
    return {name: lay(x.astype(np.float32)) for name, x in found.items()}


@functools.cache
def tables(vocab):
    """Parameters of a target and of a draft, tables of the last two tokens."""
    return bigrams.pair(vocab, seed=1)


def fill(shapes, seed, scale):
    """Weights by the name of each leaf; vectors are about 1."""

    def draw(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        drawn = np.random.default_rng([seed, zlib.crc32(name.encode())]).normal(size=leaf.shape)
        drawn = 1 + 0.1 * drawn if len(leaf.shape) == 1 else scale * drawn
        return jnp.asarray(drawn.astype(np.float32))

    return jax.tree_util.tree_map_with_path(draw, shapes)


TINY = models.TransformerConfig(160, 32, 48, 1, 4, 2, 8)
HEADED = models.TransformerConfig(48, 24, 40, 4, 4, 2, 6)
LAYER = dataclasses.replace(HEADED, num_hidden_layers=1, qk_norm=True)
EAGLE3 = models.Eagle3Config(LAYER, 24, 30, taps=(0, 1, 3))
DFLASH = models.DFlashConfig(LAYER, 48, taps=(0, 1, 3), block_size=5, mask_token_id=46)


@functools.cache
def weights(config, seed):
    shapes = jax.eval_shape(lambda: models.build(config).params)
    return fill(shapes, seed, 0.3 if config is TINY else 0.2)


def model_of(name, seed=0, mesh=None):
    """A model: tables of some tokens ("5", "24", "cyclic", "invalid"), or a decoder.

    In "cyclic" four tokens mostly follow one another, so that prompt lookup finds what follows.
    """
    if name == "cyclic":
        tokens, table = np.arange(24), tables(24)[seed].copy()
        table[:, tokens, tokens - tokens % 4 + (tokens + 1) % 4] += 4.5
        return bigrams.model(table)
    if name == "invalid":
        table = tables(24)[seed].copy()
        table[:, 5] = np.nan
        return bigrams.model(table)
    if name.isdigit():
        return bigrams.model(tables(int(name))[seed])
    config = {"tiny": TINY, "headed": HEADED}[name]
    params = weights(config, 0)
    if seed:  # A draft like its target.
        params = jax.tree.map(lambda x, y: x + 0.2 * y, params, weights(config, seed))
    if mesh is None:
        return models.build(config, params)
    return models.split_model(config, params, mesh=mesh_of(mesh))


def mesh_of(shape):
    devices, types = jax.devices()[: shape[0] * shape[1]], (AxisType.Auto,) * 2
    return jax.make_mesh(shape, ("data", "model"), types, devices=devices)


def drafter_of(name, model, target, mesh=None):
    """A drafter by its name in the scenarios, for a target."""
    if name is None:
        return None
    if name == "model":
        return specjax.model_drafter(model_of(model, 1, mesh))
    if name == "n-gram":
        return specjax.ngram_drafter(2)
    if name == "whole prompt":
        return specjax.whole_prompt_drafter((), _read_successors, _propose_successors)
    if name == "EAGLE-3":
        shapes = jax.eval_shape(lambda: models.build_eagle3(EAGLE3))
        token_map = np.sort(np.random.default_rng(1).permutation(48)[:30]).astype(np.int32)
        params = fill(shapes, 2, 0.2) | {"token_map": jnp.asarray(token_map)}
        return models.eagle3_drafter(target, EAGLE3, params)
    assert name == "DFlash"
    shapes = jax.eval_shape(lambda: models.build_dflash(DFLASH))
    return models.dflash_drafter(target, DFLASH, fill(shapes, 3, 0.2))


def _read_successors(params, token_ids, lengths, max_length):
    """Of each token, the one that followed it last in the prompt; -1 where none did."""
    size, requests = token_ids.shape[0], jnp.arange(token_ids.shape[0], dtype=jnp.int32)

    def read(i, found):
        token = jnp.where(i + 1 < lengths, token_ids[:, i], 200)
        return found.at[requests, token].set(token_ids[:, i + 1], mode="drop")

    return jax.lax.fori_loop(0, max_length - 1, read, jnp.full((size, 200), -1, jnp.int32))


def _propose_successors(params, state, token_ids, hidden, inputs, *, config, **_):
    requests = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
    token, drafted = token_ids[requests, inputs.positions - 1], []
    for _ in range(config.num_speculative_tokens):
        token = jnp.where(token < 0, -1, state[requests, jnp.maximum(token, 0)])
        drafted.append(token)
    return specjax.Draft(jnp.stack(drafted, axis=1), num_tokens=inputs.num_tokens), state


def grammar_of(vocab=automata.V):
    return specjax.Grammar(*automata.tables(vocab))


def matcher_of():
    """A matcher of the grammar that has read nothing."""
    return automata.Matcher(0)


def row_masks(lengths, states=(0, None, 2)):
    """Masks of every step's rows, from matchers of the grammar."""
    matchers = [None if state is None else automata.Matcher(state) for state in states]
    return specjax.RowMasks(matchers, lengths, automata.V)


def tree_of(seed=0):
    """Trees of six nodes: a chain, pairs, and one with padding; rows after each of them."""
    rng = np.random.default_rng(seed)
    shapes = [(-1, 0, 1, -2, -2, -2), (-1, -1, 0, 0, 1, 1), (-1, 0, 0, 1, 1, 2)]
    parents = np.array([shapes[b % 3] for b in range(BATCH)], np.int32)
    draft = 4 * rng.normal(size=(BATCH, 7, VOCAB)).astype(np.float32)
    target = draft + rng.normal(size=draft.shape).astype(np.float32)
    ids = np.full(parents.shape, -1, np.int32)
    for b, shape in enumerate(parents):
        for v, parent in enumerate(shape):
            if parent >= -1:
                row = draft[b, parent + 1] + rng.gumbel(size=VOCAB)
                row[ids[b, :v][shape[:v] == parent]] = -np.inf
                ids[b, v] = np.argmax(row)
    cutoff = rng.choice([-np.inf, -1.0], (BATCH, 7)).astype(np.float32)
    tree = {"token_ids": ids, "parents": parents, "draft_logits": draft, "draft_cutoff": cutoff}
    return tree, target
