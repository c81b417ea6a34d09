"""Drafts a block from ready logits: all rows are known before the first draw.

Token i is drawn from row i, on `Stream.draft(i)` at its position. This noise does not depend on the
order of the rows, so one call draws all of them. If penalties, bad words or a grammar make a row
depend on earlier draws, the tokens are drawn one by one.
Axes: `B` requests, `K` drafted tokens, `V_d` draft vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.call_arrays import SampleArrays
from specjax.call_options import CallOptions
from specjax.checks import check_keys
from specjax.config import SpeculativeConfig
from specjax.core.noise import Stream, fold_in_rows
from specjax.decode.propose import DraftInputs, propose_step
from specjax.devices.placement import Placement
from specjax.implementation import Implementation, resolve_implementation
from specjax.processing.apply_sampling import apply_sampling_to_draft
from specjax.processing.draft_vocabulary import read_vocabulary
from specjax.processing.history import History
from specjax.processing.logit_rules import RowContext
from specjax.processing.sampling_params import read_draft_sampling, split_sampling
from specjax.samplers.gumbel_sample import sample_batch
from specjax.types import Draft


def sample_block(
    logits: jax.Array,
    inputs: DraftInputs,
    *,
    config: SpeculativeConfig,
    token_map: jax.Array | None = None,
    vocab_size: int | None = None,
    implementation: str | Implementation | None = None,
    placement: Placement | None = None,
) -> Draft:
    """Returns the draft of one step of a decode loop, whose q is the product of the rows.

    Args:
      logits: [B, K, V_d]; row i is for the token at `inputs.positions + i`.
      inputs: of the loop.
      config: gives K, the method and the dtype of the noise.
      token_map: i32[V_d], or None.
      vocab_size: V, only with a map.
      implementation: of the draws and the cutoffs.
      placement: of the model whose rows they are, or None.

    Example:
      >>> inputs = DraftInputs(
      ...     jax.random.key(0), jnp.array([5]), jnp.array([2]), temperature=jnp.zeros(1))
      >>> logits = jnp.array([[[0.0, 9.0], [9.0, 0.0]]])
      >>> draft = sample_block(logits, inputs, config=SpeculativeConfig(2))
      >>> draft.token_ids.tolist(), draft.logits.shape
      ([[1, 0]], (1, 2, 2))
    """
    options: dict[str, Any] = {"token_map": token_map, "vocab_size": vocab_size, "config": config}
    options |= {"implementation": implementation, "placement": placement}
    sampling = inputs.sampling
    if sampling is None or not split_sampling(sampling)[0].reads_drafted:
        return _draw_all(logits, inputs, **options).replace(num_tokens=inputs.num_tokens)

    def step(i: Any, token_ids: jax.Array, position: jax.Array) -> tuple[jax.Array, Any]:
        return jax.lax.dynamic_index_in_dim(logits, i, axis=1, keepdims=False), i + 1

    first = jnp.zeros_like(inputs.positions)
    return propose_step(step, jnp.int32(0), first, inputs, **options)[0]


def _draw_all(
    logits: jax.Array,
    inputs: DraftInputs,
    *,
    config: SpeculativeConfig,
    token_map: jax.Array | None,
    vocab_size: int | None,
    implementation: str | Implementation | None,
    placement: Placement | None,
) -> Draft:
    """Returns the draft of all rows by one call of the sampler."""
    (size, k, _), positions, temperature = logits.shape, inputs.positions, inputs.temperature
    greedy, coupled = config.draft_sample_method == "greedy", config.draws_on_target_stream
    resolved = resolve_implementation(implementation)
    options = CallOptions(config.noise_dtype, resolved, placement=placement)
    rules, filters = read_draft_sampling(inputs.sampling, size, greedy)
    vocabulary, history = read_vocabulary(token_map, vocab_size), History()
    if vocabulary is not None:
        rules, history = vocabulary.take(rules, history)
    draft_temperature = jnp.zeros_like(temperature) if greedy else temperature
    logits, cutoff = apply_sampling_to_draft(
        logits,
        rules,
        filters,
        RowContext(history, None, jnp.int32(0)),
        temperature=draft_temperature,
        implementation=options.implementation,
        vocabulary=vocabulary,
    )
    keys = check_keys(inputs.keys, size)
    keys = keys if keys.shape else fold_in_rows(keys, size)
    row = jnp.arange(k, dtype=jnp.int32)[None]
    stream = jnp.zeros_like(row) + Stream.TARGET if coupled else Stream.draft(row)

    def flat(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, (size, k)).reshape(-1)

    draw_logits = logits if vocabulary is None or not coupled else vocabulary.spread(logits)
    arrays = SampleArrays(
        draw_logits.reshape(size * k, -1),
        flat(keys[:, None]),
        flat(positions[:, None] + row),
        flat(stream),
        flat(draft_temperature[:, None]),
        None if cutoff is None else cutoff.reshape(-1),
    )
    sample = sample_batch(arrays, options=options)
    ids = sample.token_ids.reshape(size, k)
    if vocabulary is not None and not coupled:
        ids = vocabulary.token_ids(ids)
    # A greedy or a coupled draft has no q to keep.
    if greedy:
        return Draft(ids)
    if coupled:
        return Draft(ids, temperature=temperature, on_target_stream=True)
    logprobs, logsumexp = (x.reshape(size, k) for x in (sample.logprobs, sample.logsumexp))
    token_map = vocabulary and vocabulary.token_map
    return Draft(ids, logits, temperature, logprobs, logsumexp, cutoff, token_map=token_map)
