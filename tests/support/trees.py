"""A drafter of trees for a table model, and the decoding of texts with its trees, step by step."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax import Stream
from specjax.samplers.trees import tree

CHAIN = (-1, 0, 1, -2, -2, -2)
TWO_BY_TWO = (-1, -1, 0, 0, 1, 1)
PLAIN = (1.0, 1.0, -np.inf)


def one_address(parents):
    """Wrong: as `place_nodes`, but siblings and cousins are drawn with one noise."""
    depths, indices = tree.place_nodes(parents)
    return depths, jnp.where(depths < 0, indices, depths)


def draw_tree(logits_after, last, parents, places, keys, positions, temperature, cutoff):
    """Draws trees whose siblings are sampled without replacement.

    Args:
      logits_after: maps tokens [...] to the rows [..., V] of draft logits after them.
      last: i32[B], the last committed token.
      parents: i32[B, N].
      places: depths and indices of the nodes, i32[B, N].
      keys: [B].
      positions: i32[B].
      temperature: f32, of the draft.
      cutoff: f32, of the draft.

    Returns:
      Token ids i32[B, N], and the rows [B, N + 1, V] after the root and the nodes.
    """
    size, num_nodes = parents.shape
    depths, indices = places
    requests = jnp.arange(size)

    def draw(token_ids, v):
        parent = parents[:, v]
        above = token_ids[requests, jnp.maximum(parent, 0)]
        row = logits_after(jnp.where(parent < 0, last, above))
        is_sibling = (parents == parent[:, None]) & (jnp.arange(num_nodes)[None] < v)
        taken = jnp.where(is_sibling, token_ids, row.shape[1])
        sample = specjax.gumbel_sample(
            row.at[requests[:, None], taken].set(-jnp.inf, mode="drop"),
            keys=keys,
            positions=positions + depths[:, v],
            stream=Stream.draft(indices[:, v]),
            temperature=temperature,
            cutoff=jnp.broadcast_to(cutoff, (size,)),
            options=specjax.Options(implementation="xla"),
        )
        return token_ids.at[:, v].set(sample.token_ids), None

    token_ids, _ = jax.lax.scan(
        draw, jnp.full((size, num_nodes), -1, jnp.int32), jnp.arange(num_nodes)
    )
    after = jnp.concatenate([last[:, None], token_ids], axis=1)
    return token_ids, logits_after(jnp.maximum(after, 0))


@functools.partial(jax.jit, static_argnames=("verify", "one_hot"))
def _step(texts, lengths, parents, places, target, draft, keys, scales, *, verify, one_hot):
    """One step of every request: a tree is drawn and verified, and what it emits is appended."""
    requests = jnp.arange(texts.shape[0])
    last = texts[requests, lengths]
    temperature, draft_temperature, draft_cutoff = scales
    drawn_at = (draft_temperature, draft_cutoff)
    ids, rows = draw_tree(lambda x: draft[x], last, parents, places, keys, lengths, *drawn_at)
    after = jnp.maximum(jnp.concatenate([last[:, None], ids], axis=1), 0)
    options = {"temperature": temperature}
    if not one_hot:
        options |= {"draft_logits": rows, "draft_temperature": draft_temperature}
        options["draft_cutoff"] = jnp.full(rows.shape[:2], draft_cutoff)
    step = verify(ids, parents, target[after], max_depth=3, keys=keys, positions=lengths, **options)
    ends = lengths[:, None] + 1 + jnp.arange(4, dtype=jnp.int32)[None]
    ends = jnp.where(step.token_ids < 0, texts.shape[1], ends)
    texts = texts.at[requests[:, None], ends].set(step.token_ids, mode="drop")
    return texts, lengths + step.num_emitted


def decode(verify, target, draft, shapes, length, keys, *, place=None, one_hot=False, scales=PLAIN):
    """Texts [B, length] after token 0, by steps whose trees take turns among `shapes`.

    Args:
      verify: the function below, or another of its arguments.
      target: probabilities [V, V] of the next token by the last.
      draft: those of the draft.
      shapes: parents of the trees, of equal lengths.
      length: tokens of a text.
      keys: [B].
      place: says where nodes are drawn, by their parents; None is where they are to be.
      one_hot: whether the nodes are verified as one-hot.
      scales: the target's temperature, and the draft's temperature and cutoff.
    """
    size = keys.shape[0]
    with np.errstate(divide="ignore"):
        rows = [jnp.asarray(np.log(x), jnp.float32) for x in (target, draft)]
    texts = jnp.zeros((size, 12), jnp.int32)  # of any length, so that they share a program
    assert length + 4 < texts.shape[1]
    lengths = jnp.zeros((size,), jnp.int32)
    scales = [jnp.float32(x) for x in scales]
    options = dict(verify=verify, one_hot=one_hot)
    place = jax.jit(place or tree.place_nodes)
    for shape in itertools.cycle(shapes):
        parents = jnp.broadcast_to(jnp.asarray(shape, jnp.int32), (size, len(shape)))
        texts, lengths = _step(
            texts, lengths, parents, place(parents), *rows, keys, scales, **options
        )
        # A text that is long enough waits.
        lengths = jnp.minimum(lengths, length)
        if np.min(lengths) == length:
            return np.asarray(texts)[:, 1 : length + 1]


def verify(
    token_ids,
    parents,
    target_logits,
    *,
    max_depth,
    draft_logits=None,
    draft_temperature=None,
    draft_cutoff=None,
    **options,
):
    """Returns `specjax.tree_rejection_sample` of a tree's fields by their names."""
    tree = specjax.TreeDraft(
        token_ids, parents, max_depth, draft_logits, draft_temperature, draft_cutoff
    )
    return specjax.tree_rejection_sample(tree, target_logits, **options)
