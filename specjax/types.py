"""The types of calls: a draft, a sample, what a step emits, a language model.

Axes: `B` requests, `K` most drafted tokens per request and step, `N` drafted tokens of all requests
laid end to end, `S` slots of a draft cache, `V_d` draft vocabulary, `D` most nodes on a path, `L`
tokens of each request, `E` hidden, `V` vocabulary, `A` taps.
"""

import dataclasses
import json
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.export

_FIELDS_OF_Q = ("logits", "temperature", "logprobs", "logsumexp", "cutoff", "rows", "token_map")


@dataclasses.dataclass(frozen=True)
class _DraftMethods:
    """Copies of a `Draft` or `RaggedDraft` with other fields."""

    def replace(self, **fields: Any) -> Self:
        """Returns the draft with other values of some fields."""
        return dataclasses.replace(self, **fields)

    def without_q(self) -> Self:
        """Returns the draft's tokens and their numbers alone, which coupled sampling reads."""
        return self.replace(**dict.fromkeys(_FIELDS_OF_Q), on_target_stream=False)


@dataclasses.dataclass(frozen=True)
class Draft(_DraftMethods):
    """Drafted tokens of a batch and the logits that they were sampled from; a pytree.

    Attributes:
      token_ids: i32[B, K]. A -1 ends the drafted tokens of a request. Drawn on `Stream.draft(i)`,
        or with a key that no call of this library gets: its verification's key gives biased text.
      logits: [S, K, V_d] in bf16, f16 or f32, raw draft logits, with S = B unless
        `rows` is given. None means one-hot drafts everywhere.
      temperature: f32[B], at which the tokens were sampled. None is the request's own
        temperature. 0 is greedy: q is one-hot, and the logits are not read.
      logprobs: f32[B, K], log q(token) at that temperature and cutoff. Computed when None.
      logsumexp: f32[B, K], of the kept logits over that temperature. Computed when None.
      cutoff: f32[B, K], q is zero on logits below it. None keeps every logit.
      num_tokens: i32[B]. None is K; 0 is no drafts; -1 is an inactive request, of which
        nothing is read and for which nothing is emitted. The decode loop knows itself which
        requests are inactive, and reads a drafter's -1 as 0.
      rows: i32[B], request b's logits are `logits[rows[b]]`. Reordering a batch moves no
        logits. None is b.
      token_map: i32[V_d], the target's id of every column of `logits`, of a draft that knows some
        of the target's tokens; `token_ids` are the target's ids. q is 0 at tokens that the map does
        not hold. None is the same ids. Repeated ids bias the output: a map on the host is checked.
      on_target_stream: a Python bool, static: the tokens were drawn with the target's own noise, on
        `Stream.TARGET`, as `propose` draws for `rules.coupled`. Every rule but that and
        `rules.synthetic` refuses such a draft, because its output would be biased.

    Example:
      >>> draft = specjax.Draft(jnp.array([[3, 1]]))
      >>> draft.replace(num_tokens=jnp.array([1])).num_tokens
      Array([1], dtype=int32)
    """

    token_ids: jax.Array
    logits: jax.Array | None = None
    temperature: jax.Array | None = None
    logprobs: jax.Array | None = None
    logsumexp: jax.Array | None = None
    cutoff: jax.Array | None = None
    num_tokens: jax.Array | None = None
    rows: jax.Array | None = None
    token_map: jax.Array | None = None
    on_target_stream: bool = False


@dataclasses.dataclass(frozen=True)
class RaggedDraft(_DraftMethods):
    """Drafted tokens of all requests laid end to end; a pytree.

    Request r owns drafted rows ``cu[r]:cu[r + 1]`` and target rows
    ``cu[r] + r : cu[r + 1] + r + 1``, with ``cu = cu_num_draft_tokens``, cumulative counts. The row
    after its `num_tokens` drafts decides the bonus. Rows past ``cu[B]`` are padding and change
    nothing. The emitted tokens equal those of the padded form, `Draft`.

    Attributes:
      token_ids: i32[N]. A -1 ends the drafted tokens of a request.
      cu_num_draft_tokens: i32[B + 1], cumulative counts from 0, at most N; or i32[B] without the 0,
        like vLLM's. Others are refused where the host reads them without a transfer.
      max_draft_tokens: K, a Python int, static: the width of a result. A request with more has
        only its first K verified.
      logits: [S, V_d] in bf16, f16 or f32, raw draft logits, with S = N unless `rows` is given.
        None means one-hot drafts everywhere. For probabilities pass their log, at temperature 1.
      temperature: f32[B], as in `Draft`, as is every field below.
      logprobs: f32[N], or None.
      logsumexp: f32[N], or None.
      cutoff: f32[N], or None.
      num_tokens: i32[B]. None takes all of `cu_num_draft_tokens`; -1 is an inactive request.
      rows: i32[N], token n's logits are `logits[rows[n]]`. None is n.
      token_map: i32[V_d], or None.
      on_target_stream: a Python bool, static.

    Example:
      >>> draft = specjax.RaggedDraft(  # two drafts, then one
      ...     jnp.array([3, 1, 4]), jnp.array([0, 2, 3]), max_draft_tokens=2)
      >>> step = specjax.rejection_sample(
      ...     draft, jnp.zeros((5, 8)), keys=jax.random.key(0), positions=0)
      >>> step.token_ids.shape
      (2, 3)
    """

    token_ids: jax.Array
    cu_num_draft_tokens: jax.Array
    max_draft_tokens: int
    logits: jax.Array | None = None
    temperature: jax.Array | None = None
    logprobs: jax.Array | None = None
    logsumexp: jax.Array | None = None
    cutoff: jax.Array | None = None
    num_tokens: jax.Array | None = None
    rows: jax.Array | None = None
    token_map: jax.Array | None = None
    on_target_stream: bool = False


def _register(kind: type, *static: str) -> None:
    """Makes a dataclass a pytree, whose `static` fields JSON can hold, and lets it be exported."""
    names = [field.name for field in dataclasses.fields(kind)]
    jax.tree_util.register_dataclass(
        kind, data_fields=[n for n in names if n not in static], meta_fields=list(static)
    )
    jax.export.register_pytree_node_serialization(
        kind,
        serialized_name=f"specjax.{kind.__name__}",
        serialize_auxdata=lambda values: json.dumps(values).encode(),
        deserialize_auxdata=lambda text: tuple(json.loads(text)),
    )


_register(Draft, "on_target_stream")
_register(RaggedDraft, "max_draft_tokens", "on_target_stream")


@dataclasses.dataclass(frozen=True)
class TreeDraft:
    """Trees of drafted tokens below the last committed ones; a pytree.

    Attributes:
      token_ids: i32[B, N], N >= 0. A -1 is padding, and so are all nodes below it. Whether a node
        is padding may not depend on its own token. An id outside [0, V) is rejected.
      parents: i32[B, N], the node above, or -1 for the root; parents come before children. A node
        with ``parents[v] >= v`` or below -1 is padding.
      max_depth: a Python int in [1, 1024], static. Nodes deeper than that are padding.
      logits: [B, N + 1, V_d], raw, in the target's order of rows: v's children were drawn from row
        v + 1, before siblings were removed. The children of a row that is not a distribution are
        one-hot. None is one-hot everywhere.
      temperature: f32, [B] or scalar, that the nodes were sampled at. None is the request's own.
        0 is one-hot.
      cutoff: f32[B, N + 1], q is zero on draft logits below it. None keeps all.

    Example:
      >>> tree = specjax.TreeDraft(  # two candidates for the next token
      ...     jnp.array([[0, 1]]), jnp.array([[-1, -1]]), max_depth=1)
      >>> tree.replace(max_depth=2).max_depth
      2
    """

    token_ids: jax.Array
    parents: jax.Array
    max_depth: int
    logits: jax.Array | None = None
    temperature: Any = None
    cutoff: jax.Array | None = None

    def replace(self, **fields: Any) -> "TreeDraft":
        """Returns the trees with other values of some fields."""
        return dataclasses.replace(self, **fields)


_register(TreeDraft, "max_depth")


class Sample(NamedTuple):
    """One token per row and its statistics.

    Attributes:
      token_ids: i32[B], -1 where the row or its temperature is invalid.
      logprobs: f32[B], log-probability of the token at the row's temperature and
        cutoff (at temperature 1 for greedy rows).
      logsumexp: f32[B], of the kept logits over the temperature.
    """

    token_ids: jax.Array
    logprobs: jax.Array
    logsumexp: jax.Array


jax.export.register_namedtuple_serialization(Sample, serialized_name="specjax.Sample")


class Verification(NamedTuple):
    """The tokens that one speculative step emits.

    Attributes:
      token_ids: i32[B, K + 1], the emitted tokens, padded with -1.
      num_accepted: i32[B], accepted drafted tokens.
      num_emitted: i32[B], `num_accepted` and the recovered or bonus token; without that token
        where the target row that decides it is invalid.
      logprobs: f32[B, K + 1], log p of each emitted token (greedy requests at temperature 1, or 0
        with `greedy_logprobs=False`), 0 at padding.
    """

    token_ids: jax.Array
    num_accepted: jax.Array
    num_emitted: jax.Array
    logprobs: jax.Array


jax.export.register_namedtuple_serialization(Verification, serialized_name="specjax.Verification")


class TreeVerification(NamedTuple):
    """The tokens that one speculative step of drafted trees emits, and their path.

    Attributes:
      token_ids: i32[B, D + 1], the emitted tokens, padded with -1.
      num_accepted: i32[B], accepted nodes.
      num_emitted: i32[B], `num_accepted` and the token after them; without that token where the
        target row that decides it is invalid.
      logprobs: f32[B, D + 1], log p of each emitted token (greedy requests at temperature 1), 0 at
        padding.
      nodes: i32[B, D], the accepted nodes from the root's child on, padded with -1: the rows of a
        cache that stay.
    """

    token_ids: jax.Array
    num_accepted: jax.Array
    num_emitted: jax.Array
    logprobs: jax.Array
    nodes: jax.Array


jax.export.register_namedtuple_serialization(
    TreeVerification, serialized_name="specjax.TreeVerification"
)


class Pieces(NamedTuple):
    """The cache of a call on P pieces of texts, of which several may be of one text.

    A step over some slots of an engine has one piece of each: the tokens that it feeds.

    Attributes:
      cache: of R texts: a target's cache, or a drafter's state.
      rows: i32[P], the text that each piece continues. The pieces of a text come in order, next to
        one another. Each is full, but for the last; a piece without a token is of no text.
    """

    cache: Any
    rows: jax.Array


@dataclasses.dataclass(frozen=True)
class Model:
    """A language model: parameters and pure functions.

    It is a pytree whose leaves are the parameters, so that they are arguments of every compiled
    function and never constants. The functions are static: two models with equal functions share
    one compilation.

    Attributes:
      params: a pytree of arrays.
      init_cache: `(batch_size, max_length) -> cache`, a pytree indexed by position. A cache of
        a smaller `max_length` is the beginning of a larger one, leaf by leaf.
      apply: `(params, token_ids[B, L], positions[B, L], cache) ->
        (hidden[B, L, E], cache)`. Position -1 is padding: it writes nothing. Nor does a position
        past the cache, which only a draft model is given, near a text's end. Each token attends to
        the cached slots up to and including its own position, so that a smaller length rewinds the
        cache after a rejection.
      logits: `(params, hidden[..., E]) -> logits[..., V]`, apart from `apply` so that
        a prefill computes none.
      max_length: most tokens of a text that its positions take, or None.
      apply_with_taps: `(params, token_ids, positions, cache, taps) -> (hidden,
        features[B, L, A * E], cache)`, for drafters that read states from inside the model.
        `taps` are A static ints. Tap k is the residual stream after k layers, before any norm; tap
        0 is the embeddings. The states of the taps stand next to one another in `features`. None
        is a model that hands out none.
      placement: the `devices.placement.Placement` of a model that lies over devices, or None.
      split_logits: `logits` without a gather, of a model with its vocabulary over the `model` axis
        of its placement: [..., N * W] of N devices' W tokens each, N * W >= V, those past V
        padding. Or None.
      reads_pieces: whether `apply` and `apply_with_taps` take `Pieces` for a cache, too. They then
        return the cache in it. A piece's bits may not depend on the other texts' pieces.
      row_invariant: whether the bits of a token's logits depend on its text alone: on no other
        request, on no later token, and on no number of tokens that `apply` is given. The loop and
        the engine then verify by sums of one order, too.
    """

    params: Any
    init_cache: Callable[[int, int], Any]
    apply: Callable[[Any, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
    logits: Callable[[Any, jax.Array], jax.Array]
    max_length: int | None = None
    apply_with_taps: Callable[..., tuple[jax.Array, jax.Array, Any]] | None = None
    placement: Any = None
    split_logits: Callable[[Any, jax.Array], jax.Array] | None = None
    reads_pieces: bool = False
    row_invariant: bool = False


jax.tree_util.register_dataclass(
    Model,
    data_fields=["params"],
    meta_fields=[field.name for field in dataclasses.fields(Model) if field.name != "params"],
)
