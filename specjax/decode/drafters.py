"""`Drafter`, and three that make one: a smaller model, prompt lookup, functions of whole prompts.

`models.heads` makes others. The loop calls `init` and `extend` in the prefill, then `propose` once
per step; `extend` too, where the drafter reads features or has missed tokens.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.checks import check_applied, check_model_logits
from specjax.config import SpeculativeConfig
from specjax.decode.propose import DraftInputs, propose_step
from specjax.implementation import Implementation
from specjax.types import Draft, Model, Pieces


@dataclasses.dataclass(frozen=True)
class Drafter:
    """A drafter: parameters and pure functions, a pytree like `Model`.

    Axes: `B` requests, `S` tokens that the buffers have room for, `C` tokens given at once, `E`
    hidden size of the target, `A` taps.

    Attributes:
      params: a pytree of arrays, possibly empty.
      init: `(params, batch_size, max_length) -> state` of a batch that has read no token.
      extend: `(params, state, token_ids[B, C], positions[B, C], features) -> state`. It reads
        tokens of the prompt at these positions, in chunks from left to right. Position -1 is no
        token. The last token of a prompt is never among them. Where K is "auto", it also reads the
        committed tokens that the drafter missed while it drafted none. The first column is then the
        token before them, at position -1.
      propose: `(params, state, token_ids[B, S], hidden[B, E], inputs, *, config, implementation) ->
        (Draft, state)`. `token_ids` holds the committed tokens. `hidden` is the target's hidden
        state that decided the last of them. `inputs` is a `DraftInputs`, which `specjax.propose`
        takes. Its `num_tokens` is at most r - 1 for a request with r tokens left. Where it is -1
        the state does not change: the request is inactive or, with K = "auto", drafts nothing.
        `config` is the static `SpeculativeConfig`. `implementation` is the loop's argument of this
        name, or None. The output is exact whatever a drafter reads of this. A drafter that samples
        as the target does is accepted most. The draft's own `num_tokens` may be smaller, None, or
        -1. For an active request -1 is 0: only the loop ends requests.
      reads_features: whether `extend` is given `features[B, C, E]`, the target's hidden states of
        these tokens, else None. It is then called after each step, too, with the tokens that the
        target has read and the step has committed.
      taps: A static ints; `features[B, C, A * E]` then come from `Model.apply_with_taps`.
      reads_pieces: whether `extend` and `propose` take `specjax.types.Pieces` for a state, too.
        They then return the state in it.
    """

    params: Any
    init: Callable[[Any, int, int], Any]
    extend: Callable[..., Any]
    propose: Callable[..., tuple[Draft, Any]]
    reads_features: bool = False
    taps: tuple[int, ...] = ()
    reads_pieces: bool = False


jax.tree_util.register_dataclass(
    Drafter,
    data_fields=["params"],
    meta_fields=["init", "extend", "propose", "reads_features", "taps", "reads_pieces"],
)


def model_drafter(model: Model) -> Drafter:
    """Returns a drafter that samples from a smaller model of the target's vocabulary.

    Every proposal first feeds the last two committed tokens. The draft model has not read the first
    of the two where all drafts of the last step were accepted.

    A request with r tokens left drafts at most min(K, r - 1): a step emits one token besides. With
    a fixed K the model draws K for it all the same. Up to K - 3 of their positions are past the
    text's end, and perhaps past its cache. The loop drops the tokens past the r - 1.

    Args:
      model: the draft `Model`.

    Returns:
      `Drafter` whose state is the model's cache.

    Example:
      >>> from specjax.markov_chain import markov_chain
      >>> model = markov_chain([[0.1, 0.9], [0.8, 0.2]])
      >>> output = specjax.generate(
      ...     model, specjax.model_drafter(model), [[0]], keys=jax.random.key(0), max_new_tokens=9)
      >>> float(output.metrics.draft_acceptance_rate)  # p = q: every draft is accepted
      1.0
    """
    functions = (model.init_cache, model.apply, model.logits, model.placement)
    init, extend, propose = _model_functions(*functions)
    return Drafter(model.params, init, extend, propose, reads_pieces=model.reads_pieces)


@functools.lru_cache(maxsize=64)
def _model_functions(init_cache: Any, apply: Any, logits: Any, placement: Any) -> Any:
    """Returns `init`, `extend` and `propose` of a drafter.

    They are the same objects for models of the same functions, so that these share programs.
    """

    def init(params: Any, batch_size: int, max_length: int) -> Any:
        return init_cache(batch_size, max_length)

    def read(params: Any, token_ids: jax.Array, positions: jax.Array, cache: Any) -> Any:
        outputs = apply(params, token_ids, positions, cache)
        check_applied("the draft model's apply", outputs, token_ids, cache)
        return outputs

    def extend(
        params: Any, cache: Any, token_ids: jax.Array, positions: jax.Array, features: Any
    ) -> Any:
        return read(params, token_ids, positions, cache)[1]

    def propose(
        params: Any,
        cache: Any,
        token_ids: jax.Array,
        hidden: jax.Array,
        inputs: DraftInputs,
        *,
        config: SpeculativeConfig,
        implementation: Implementation | None = None,
    ) -> tuple[Draft, Any]:
        positions, num_tokens = inputs.positions, inputs.num_tokens
        assert num_tokens is not None
        cache, rows = split_pieces(cache)

        def step(carry: Any, ids: jax.Array, index: jax.Array) -> tuple[jax.Array, Any]:
            """Feeds tokens i32[B] at positions i32[B]; in the first call those before, too."""
            cache, *previous = carry
            ids, index = ids[:, None], index[:, None]
            if previous:
                ids = jnp.concatenate([previous[0][:, None], ids], axis=1)
                index = jnp.concatenate([index - 1, index], axis=1)
            index = jnp.where(num_tokens[:, None] > 0, index, -1)
            hidden, cache = read(params, ids, index, with_rows(cache, rows))
            draft_logits = logits(params, hidden[:, -1])
            check_model_logits("the draft model's logits", draft_logits, hidden[:, -1])
            return draft_logits, (cache,)

        last, previous = _token_at(token_ids, positions - 1), _token_at(token_ids, positions - 2)
        drafts, (cache,) = propose_step(
            step,
            (cache, previous),
            last,
            inputs,
            config=config,
            implementation=implementation,
            placement=placement,
        )
        return drafts, cache

    return init, extend, propose


def _token_at(token_ids: jax.Array, index: jax.Array) -> jax.Array:
    """Returns `token_ids[b, index[b]]` of each request, i32[B]; indices are clipped to [0, S)."""
    index = jnp.clip(index, 0, token_ids.shape[1] - 1)
    return jnp.take_along_axis(token_ids, index[:, None], axis=1)[:, 0]


@functools.lru_cache(maxsize=64)
def ngram_drafter(max_ngram: int = 3, min_ngram: int = 1) -> Drafter:
    """Returns a drafter by prompt lookup: it drafts the tokens that followed the last ones before.

    The last n tokens are searched in the request's own prompt and output, n from `max_ngram` down
    to `min_ngram`. Where they occur more than once, the occurrence with the most tokens after it
    wins, counted up to K; the latest wins a tie. Drafts are one-hot.

    Args:
      max_ngram: longest suffix searched, a Python int >= min_ngram.
      min_ngram: shortest suffix searched, a Python int >= 1.

    Returns:
      `Drafter` without parameters or state.

    Raises:
      ValueError: if the range is empty or begins below 1.

    Example:
      >>> inputs = specjax.DraftInputs(
      ...     jax.random.key(0), positions=jnp.array([5]), num_tokens=jnp.array([2]))
      >>> draft, _ = specjax.ngram_drafter().propose(
      ...     (), (), jnp.array([[5, 6, 7, 5, 6, -1]]), None, inputs,
      ...     config=specjax.SpeculativeConfig(num_speculative_tokens=2))
      >>> draft.token_ids.tolist(), draft.num_tokens.tolist()
      ([[7, 5]], [2])

    References:
      Saxena, 2023, "Prompt lookup decoding".
    """
    if not 1 <= min_ngram <= max_ngram:
        raise ValueError(
            f"min_ngram is {min_ngram} and max_ngram {max_ngram}; 1 <= min_ngram <= max_ngram is "
            "needed."
        )

    def init(params: Any, batch_size: int, max_length: int) -> Any:
        return ()

    def extend(params: Any, state: Any, *chunk: Any) -> Any:
        return ()

    def propose(
        params: Any,
        state: Any,
        token_ids: jax.Array,
        hidden: jax.Array,
        inputs: DraftInputs,
        *,
        config: SpeculativeConfig,
        implementation: Implementation | None = None,
    ) -> tuple[Draft, Any]:
        k = config.num_speculative_tokens
        look_up = jax.vmap(lambda text, length: _look_up(text, length, k, max_ngram, min_ngram))
        ids, count = look_up(token_ids, inputs.positions)
        assert inputs.num_tokens is not None
        return Draft(ids, num_tokens=jnp.minimum(inputs.num_tokens, count)), ()

    return Drafter((), init, extend, propose, reads_pieces=True)


def _look_up(
    text: jax.Array, length: jax.Array, k: int, max_ngram: int, min_ngram: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens i32[k] that followed a text's last tokens before, and how many are drafts.

    Args:
      text: i32[S], one request's tokens.
      length: i32[], how many are committed.
      k: K.
      max_ngram: as in `ngram_drafter`.
      min_ngram: as in `ngram_drafter`.
    """
    index = jnp.arange(text.shape[0], dtype=jnp.int32)
    # Where the draft begins in the text, 0 for none. A longer suffix overwrites a shorter one.
    start = jnp.int32(0)
    for n in range(min_ngram, max_ngram + 1):
        matches = index < length - n
        for t in range(n):
            suffix_token = text[jnp.maximum(length - n + t, 0)]
            matches &= jnp.take(text, index + t, mode="clip") == suffix_token
        matches &= length > n
        num_after = jnp.minimum(length - index - n, k)
        # One integer orders occurrences by the tokens after them, then by their index.
        best = jnp.max(jnp.where(matches, num_after * text.shape[0] + index, -1))
        start = jnp.where(best >= 0, best % text.shape[0] + n, start)
    count = jnp.where(start > 0, jnp.minimum(length - start, k), 0)
    ids = jnp.take(text, start + jnp.arange(k, dtype=jnp.int32), mode="clip")
    return jnp.where(jnp.arange(k, dtype=jnp.int32) < count, ids, -1), count


def reads_chunks(state: Any) -> bool:
    """Returns whether a drafter of this state knows only the tokens that `extend` is given.

    A drafter of whole prompts and prompt lookup, which has no state, see all committed tokens in
    `propose`.
    """
    return not isinstance(state, _Prompts) and bool(jax.tree.leaves(state))


def split_pieces(state: Any) -> tuple[Any, jax.Array | None]:
    """Returns the state in `Pieces` and their rows, or a state by itself and None."""
    return (state.cache, state.rows) if isinstance(state, Pieces) else (state, None)


def with_rows(cache: Any, rows: jax.Array | None) -> Any:
    """Returns `Pieces` of a cache, or the cache itself if `rows` is None."""
    return cache if rows is None else Pieces(cache, rows)


class Models(NamedTuple):
    """The target and the drafter of a loop, which its programs take as one argument.

    Attributes:
      target: a `Model`.
      drafter: a `Drafter`, or None.
    """

    target: Model
    drafter: Drafter | None

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers of the target whose states the drafter reads."""
        return () if self.drafter is None else self.drafter.taps

    @property
    def reads_pieces(self) -> bool:
        """Whether both models take `specjax.types.Pieces`: some rows of a cache of more."""
        target, drafter = self
        return target.reads_pieces and (drafter is None or drafter.reads_pieces)

    def init_caches(self, batch_size: int, max_length: int) -> tuple[Any, Any]:
        """Returns the target's cache and the drafter's state of a batch that has read no token."""
        target, drafter = self
        cache = target.init_cache(batch_size, max_length)
        state = None if drafter is None else drafter.init(drafter.params, batch_size, max_length)
        return cache, state


class _Prompts(NamedTuple):
    """State of a drafter of whole prompts.

    Attributes:
      token_ids: i32[B, S], the tokens read so far, then 0.
      lengths: i32[B], how many were read.
      state: what the drafter's own `init` made of them.
    """

    token_ids: jax.Array
    lengths: jax.Array
    state: Any


def whole_prompt_drafter(
    params: Any,
    init: Callable[[Any, jax.Array, jax.Array, int], Any],
    propose: Callable[..., Any],
) -> Drafter:
    """Returns a drafter of whole prompts: its `init` gets all tokens read so far, none at first.

    `init` is called again after each chunk of the prompts.

    Args:
      params: a pytree of arrays, possibly empty.
      init: `(params, token_ids[B, S], lengths[B], max_length) -> state`, where S is `max_length`.
        Lengths begin at 0 and end before the last token of each prompt.
      propose: as in `Drafter`.

    Returns:
      `Drafter`.

    Example:
      >>> from specjax.markov_chain import markov_chain
      >>> def propose(params, state, token_ids, hidden, inputs, **options):
      ...     draft = specjax.Draft(jnp.ones((1, 4), jnp.int32), num_tokens=inputs.num_tokens)
      ...     return draft, state
      >>> drafter = specjax.whole_prompt_drafter((), lambda *prompts: (), propose)
      >>> output = specjax.generate(
      ...     markov_chain([[0.0, 1.0], [0.0, 1.0]]), drafter, [[0]],
      ...     keys=jax.random.key(0), max_new_tokens=7)
      >>> int(output.metrics.num_accepted.sum())
      4
    """
    return Drafter(params, *_whole_prompt_functions(init, propose))


@functools.lru_cache(maxsize=64)
def _whole_prompt_functions(init: Any, propose: Any) -> tuple[Any, Any, Any]:
    """Returns `init`, `extend` and `propose` of a `Drafter`, by a user's two functions.

    They are the same objects for the same functions, so that drafters share programs.
    """

    def empty(params: Any, batch_size: int, max_length: int) -> _Prompts:
        token_ids = jnp.zeros((batch_size, max_length), jnp.int32)
        lengths = jnp.zeros((batch_size,), jnp.int32)
        return _Prompts(token_ids, lengths, init(params, token_ids, lengths, max_length))

    def extend(
        params: Any, prompts: _Prompts, token_ids: jax.Array, positions: jax.Array, features: Any
    ) -> _Prompts:
        max_length = prompts.token_ids.shape[1]
        requests = jnp.arange(token_ids.shape[0], dtype=jnp.int32)[:, None]
        # Position -1, no token, writes the last of the S tokens, which no prompt reaches.
        token_ids = prompts.token_ids.at[requests, positions].set(token_ids)
        lengths = jnp.maximum(prompts.lengths, jnp.max(positions, axis=1) + 1)
        return _Prompts(token_ids, lengths, init(params, token_ids, lengths, max_length))

    def draft(params: Any, prompts: _Prompts, *inputs: Any, **options: Any) -> tuple[Any, _Prompts]:
        draft, state = propose(params, prompts.state, *inputs, **options)
        return draft, prompts._replace(state=state)

    return empty, extend, draft
