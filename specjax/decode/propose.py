"""A draft model's proposal: K tokens, each sampled from the logits after the one before.

propose         public: checked arguments
propose_step    a step of the decode loop: by a config, for `model_drafter` and `models.heads`
_draft_tokens   what both do
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from specjax.call_arrays import SampleArrays
from specjax.call_options import CallOptions, Options, check_options, check_whole_rows
from specjax.checks import (
    as_array,
    check_count,
    check_draft_method,
    check_keys,
    check_logits,
    check_type,
    parse_array,
)
from specjax.config import SpeculativeConfig
from specjax.core.noise import Stream
from specjax.core.rule import COUPLED, STANDARD, VerificationRule, check_rule
from specjax.devices.placement import Placement, pvary_like
from specjax.implementation import Implementation
from specjax.processing.apply_sampling import apply_sampling_to_draft
from specjax.processing.draft_vocabulary import DraftVocabulary, read_vocabulary
from specjax.processing.history import History
from specjax.processing.logit_rules import RowContext
from specjax.processing.rule_checks import check_history
from specjax.processing.sampling_params import SamplingParams, read_draft_sampling
from specjax.samplers.gumbel_sample import sample_batch
from specjax.types import Draft, Sample

_StepFn = Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]]


class DraftInputs(NamedTuple):
    """The requests of a batch for a drafter: positions, keys, lengths, temperatures and sampling.

    Attributes:
      keys: typed threefry keys, [B] or ().
      positions: i32[B], absolute position of the first drafted token: the number of committed ones.
        For `propose` also a scalar.
      num_tokens: i32[B], most tokens that each request drafts; -1 for an inactive one. None is K.
      temperature: f32[B] >= 0; for `propose` also a scalar. Below 1e-5 the draft is the argmax.
      sampling: `SamplingParams` to draft by, or None. Those of the target make drafts likeliest to
        be accepted.
      history: `History` of the committed tokens, which penalties, bad words and grammars read; or
        None.
    """

    keys: jax.Array
    positions: Any
    num_tokens: jax.Array | None = None
    temperature: Any = 1.0
    sampling: SamplingParams | None = None
    history: History | None = None


def propose(
    step_fn: _StepFn,
    carry: Any,
    token_ids: jax.Array,
    inputs: DraftInputs,
    *,
    num_tokens: int,
    draft_sample_method: str = "probabilistic",
    rule: VerificationRule = STANDARD,
    token_map: Any = None,
    vocab_size: int | None = None,
    options: Options = Options(),
) -> tuple[Draft, Any]:
    r"""Drafts K tokens with a model, for a loop of your own; call it under `jax.jit`.

    .. math:: x_i \sim q_i = \mathrm{softmax}(\text{logits}_i / \text{temperature}),
      \quad i = 0, \dots, K - 1

    where the logits of row i follow the i tokens drafted before. Token i is sampled on
    ``Stream.draft(i)`` at position ``inputs.positions + i``; give `rejection_sample` the same keys
    and positions. The draft keeps the logits and statistics of every row, so that verification
    reduces no draft row again.

    Args:
      step_fn: ``(carry, token_ids[B], positions[B]) -> (logits[B, V_d], carry)``. It feeds one
        token per request at that absolute position and returns the logits of the next token. The
        first call may take a carry of another structure than it returns: then it is traced apart
        from the others.
      carry: pytree, for instance the draft model's cache.
      token_ids: i32[B], the last committed tokens, at ``inputs.positions - 1``.
      inputs: `DraftInputs`. Tokens drafted so far count in rules of its history, too. With
        `sampling` the draft keeps the processed logits and the cutoffs, and a bias or a mask is cut
        or padded to V_d.
      num_tokens: K, a Python int >= 1.
      draft_sample_method: "probabilistic" samples; "greedy" takes the argmax, which is verified
        as a one-hot draft, and keeps no logits.
      rule: the verification's. For `rules.coupled` the draft is drawn on ``Stream.TARGET``, with
        the target's own noise, and says so: it has tokens, the temperature and `on_target_stream`.
      token_map: i32[V_d], distinct ids of the target, one per column of the logits. `step_fn` is
        fed target ids, and `inputs` are by these. None is the column's own.
      vocab_size: V of the target, a Python int; with `token_map` alone.
      options: `Options` of the draws and the cutoffs, static. Its `axis_name` and `vocab_size` are
        None: rows of draft logits are whole.

    Returns:
      `Draft` with token arrays [B, K], and the carry. An invalid row gives -1, which ends the
      drafts of its request.

    Raises:
      ValueError: for an unknown method, K < 1, or what `gumbel_sample` refuses.

    Example:
      >>> table = jnp.log(jnp.array([[0.5, 0.5], [0.9, 0.1]]))
      >>> inputs = specjax.DraftInputs(jax.random.key(0), positions=1)
      >>> draft, _ = specjax.propose(
      ...     lambda carry, token_ids, positions: (table[token_ids], carry), (),
      ...     jnp.array([0, 1]), inputs, num_tokens=3)
      >>> draft.logits.shape
      (2, 3, 2)
    """
    check_draft_method(draft_sample_method)
    check_rule(rule)
    check_options(options)
    check_whole_rows(options, "a draft is drawn from whole rows of logits")
    return _draft_tokens(
        step_fn,
        carry,
        token_ids,
        inputs,
        num_tokens=num_tokens,
        draft_sample_method=draft_sample_method,
        rule=rule,
        vocabulary=read_vocabulary(token_map, vocab_size),
        options=CallOptions.from_options(options),
    )


def propose_step(
    step_fn: _StepFn,
    carry: Any,
    token_ids: jax.Array,
    inputs: DraftInputs,
    *,
    config: SpeculativeConfig,
    implementation: str | Implementation | None = None,
    token_map: Any = None,
    vocab_size: int | None = None,
    placement: Placement | None = None,
) -> tuple[Draft, Any]:
    """Returns the draft of one step of a decode loop: `propose` by a config.

    Args:
      step_fn: as in `propose`.
      carry: as in `propose`.
      token_ids: as in `propose`.
      inputs: of the loop. Where K is adaptive, no more tokens are drawn than its longest draft has.
      config: gives K, the methods and the dtype of the noise.
      implementation: as in `propose`.
      token_map: as in `propose`.
      vocab_size: as in `propose`.
      placement: of the draft model, or None.

    Returns:
      `Draft` with `inputs.num_tokens`, and the carry.
    """
    assert inputs.num_tokens is not None
    return _draft_tokens(
        step_fn,
        carry,
        token_ids,
        inputs,
        num_tokens=config.num_speculative_tokens,
        draft_sample_method=config.draft_sample_method,
        rule=COUPLED if config.draws_on_target_stream else STANDARD,
        vocabulary=read_vocabulary(token_map, vocab_size),
        options=CallOptions.from_options(
            Options(config.noise_dtype, implementation), placement=placement
        ),
        num_drawn=jnp.max(inputs.num_tokens) if config.adaptive_k else None,
    )


def _draft_tokens(
    step_fn: _StepFn,
    carry: Any,
    token_ids: jax.Array,
    inputs: DraftInputs,
    *,
    num_tokens: int,
    draft_sample_method: str,
    rule: VerificationRule,
    vocabulary: DraftVocabulary | None,
    options: CallOptions,
    num_drawn: jax.Array | None = None,
) -> tuple[Draft, Any]:
    """Implements `propose`; with `num_drawn`, i32[], only that many first tokens are drawn."""
    num_tokens = check_count("num_tokens", num_tokens, 1, "the draft tokens of a proposal")
    token_ids, positions, temperature = _check_batch(token_ids, inputs)
    size = token_ids.shape[0]
    greedy, coupled = draft_sample_method == "greedy", rule == COUPLED
    # A greedy draft is one-hot, and coupling verifies without q.
    has_no_q = greedy or coupled
    draft_temperature = jnp.zeros_like(temperature) if greedy else temperature
    rules, filters = read_draft_sampling(inputs.sampling, size, greedy)
    history = History() if inputs.history is None else inputs.history
    history = check_history(rules, history, size)
    if vocabulary is not None:
        rules, history = vocabulary.take(rules, history)
    keys = check_keys(inputs.keys, size)

    def draw(i: Any, carry: Any, token_ids: jax.Array, drafted: Any) -> tuple[Any, Any, Any]:
        """Draws token i, as `_draw_tokens` asks."""
        logits, carry = step_fn(carry, token_ids, positions + (i - 1))
        logits = as_array("logits", logits)
        check_logits("logits", logits, "[B, V_d]", size)
        logits, cutoff = apply_sampling_to_draft(
            logits,
            rules,
            filters,
            RowContext(history, drafted, jnp.asarray(i, jnp.int32)),
            temperature=draft_temperature,
            implementation=options.implementation,
            vocabulary=vocabulary,
        )
        stream = jnp.asarray(Stream.TARGET if coupled else Stream.draft(i), jnp.int32)
        arrays = SampleArrays(logits, keys, positions + i, stream, draft_temperature, cutoff)
        sample = _sample(arrays, options, vocabulary, coupled)
        outputs = [] if has_no_q else [logits, sample.logprobs, sample.logsumexp]
        outputs += [] if has_no_q or cutoff is None else [cutoff]
        # An invalid row gives -1, which ends the drafts; the model gets a token.
        return carry, jnp.maximum(sample.token_ids, 0), (sample.token_ids, *outputs)

    drawn, carry = _draw_tokens(draw, carry, token_ids, keys, num_tokens, num_drawn)
    if greedy:
        draft = Draft(drawn[0])
    elif coupled:
        draft = Draft(drawn[0], temperature=temperature, on_target_stream=True)
    else:
        cutoff = drawn[4] if len(drawn) > 4 else None
        draft = Draft(drawn[0], drawn[1], temperature, drawn[2], drawn[3], cutoff)
        draft = draft.replace(token_map=vocabulary and vocabulary.token_map)
    return draft.replace(num_tokens=inputs.num_tokens), carry


def _sample(
    arrays: SampleArrays, options: CallOptions, vocabulary: DraftVocabulary | None, coupled: bool
) -> Sample:
    """Returns a token drawn from the logits of each request, as an id of the target."""
    if vocabulary is not None and coupled:
        # A draw agrees with the target's only if it takes the noise of the target's ids.
        arrays = arrays._replace(logits=vocabulary.spread(arrays.logits))
    sample = sample_batch(arrays, options=options)
    if vocabulary is None or coupled:
        return sample
    return sample._replace(token_ids=vocabulary.token_ids(sample.token_ids))


def _check_batch(token_ids: Any, inputs: DraftInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the last tokens, positions and temperatures, each [B], or refuses them."""
    check_type("inputs", inputs, DraftInputs, "a specjax.DraftInputs")
    token_ids = jnp.asarray(as_array("token_ids", token_ids))
    if token_ids.ndim != 1:
        raise ValueError(
            f"token_ids has shape {token_ids.shape}; it needs [B], each request's last token."
        )
    each = ((), token_ids.shape)
    # Sums rather than broadcasts: they keep the sharding of the batch.
    zeros = jnp.zeros_like(token_ids, jnp.int32)
    positions = zeros + parse_array("positions", inputs.positions, jnp.int32, *each)
    temperature = parse_array("temperature", inputs.temperature, jnp.float32, *each)
    return token_ids, positions, zeros.astype(jnp.float32) + temperature


def _draw_tokens(
    draw: Callable[..., Any],
    carry: Any,
    token_ids: jax.Array,
    keys: jax.Array,
    num_tokens: int,
    num_drawn: Any = None,
) -> tuple[list[jax.Array], Any]:
    """Returns the outputs of K draws, and the carry after the last.

    If the first draw returns a carry of the type that it takes, all draws are one loop, and a draw
    is compiled once. Otherwise, and on a mesh, the first draw comes before the loop: there its
    outputs may be sharded otherwise than its inputs.

    Args:
      draw: ``(i, carry, token_ids, drafted) -> (carry, token_ids, outputs)``. It draws token i, a
        number or i32[], after the one before. `drafted` is the first output of the draws before,
        [B, K]; its values from index i on are not to be read. It may be None where i is 0.
      carry: pytree.
      token_ids: i32[B], the last committed tokens.
      keys: [B], of the mesh axes that outputs vary over inside `shard_map`.
      num_tokens: K, a Python int >= 1.
      num_drawn: i32[], how many are drawn, at least 1; None is all. Outputs of other indices are
        not to be read.

    Returns:
      Arrays [B, K, ...], one for each output, and the carry.
    """

    def first(carry: Any, token_ids: jax.Array) -> Any:
        """Draws once, and fills arrays [B, K, ...] with the outputs: later draws overwrite them."""
        carry, last, outputs = draw(0, carry, token_ids, None)
        return carry, last, [jnp.repeat(x[:, None], num_tokens, axis=1) for x in outputs]

    is_one_loop = False
    if not _is_sharded((carry, token_ids, keys)):
        types = jax.eval_shape(first, carry, token_ids)
        is_one_loop = _avals((carry, token_ids)) == _avals(types[:2])
    if is_one_loop:
        last, drawn = token_ids, [jnp.zeros(x.shape, x.dtype) for x in types[2]]
    else:
        carry, last, drawn = first(carry, token_ids)

    def body(i: jax.Array, state: Any) -> Any:
        carry, last, drawn = state
        carry, last, outputs = draw(i, carry, last, drawn[0])
        update = jax.lax.dynamic_update_index_in_dim
        drawn = [update(array, x, i, 1) for array, x in zip(drawn, outputs, strict=True)]
        return pvary_like((carry, last, drawn), state)

    start = (carry, last, drawn)
    begin, end = 0 if is_one_loop else 1, num_tokens if num_drawn is None else num_drawn
    carry, _, drawn = jax.lax.fori_loop(begin, end, body, pvary_like(start, start, keys))
    return drawn, carry


def _is_sharded(tree: Any) -> bool:
    """Returns whether arrays lie on a mesh, or inside one; True also if a leaf is no array."""
    leaves = jax.tree.leaves(tree)
    if not all(isinstance(x, (jax.Array, np.ndarray)) for x in leaves):
        return True
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in leaves)]
    return not all(mesh.empty for mesh in meshes)


def _avals(tree: Any) -> Any:
    """Returns the structure of a pytree, and the shapes and dtypes of its arrays."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(jnp.shape(x), jnp.result_type(x)) for x in leaves]


jax.export.register_namedtuple_serialization(DraftInputs, serialized_name="specjax.DraftInputs")
