"""`generate`: whole texts with speculation, and `Generation`, what it returns."""

from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from specjax.config import SpeculativeConfig
from specjax.decode.drafters import Drafter, Models
from specjax.decode.kinds import kinds_of
from specjax.decode.logprobs import TopLogprobs
from specjax.decode.memory import check_memory
from specjax.decode.metrics import Metrics
from specjax.decode.options import LoopOptions, StepOptions
from specjax.decode.prefill import is_traced, run_requests
from specjax.decode.request_batch import RequestArguments, check_arguments
from specjax.decode.state import DecodeState
from specjax.decode.step import run_step
from specjax.decode.target_step import vocabulary_size
from specjax.devices.placement import pvary_like
from specjax.processing.kept_tokens import KeptTokens
from specjax.processing.sampling_params import SamplingParams
from specjax.types import Model


class Generation(NamedTuple):
    """The texts that `generate` returns: fields of `DecodeState` at the end of the loop.

    Attributes:
      token_ids: i32[B, S], prompts and generated tokens, then -1.
      lengths: i32[B], how many tokens each text has, its prompt's among them.
      logprobs: f32[B, S], log p of each generated token, 0 elsewhere.
      origins: i8[B, S], 0 for the prompt and padding, else one of `Origin`.
      finish: i8[B], one of `Finish`.
      metrics: `Metrics` of all steps.
      top_logprobs: `TopLogprobs` [B, S, ...] of the generated tokens and, if they are listed, of
        the prompts' after the first; -1 and 0 elsewhere. None if none are listed.
      kept_tokens: `KeptTokens` [B, S, ...] of the generated tokens, 0 and -1 elsewhere; None if
        none are listed.
    """

    token_ids: jax.Array
    lengths: jax.Array
    logprobs: jax.Array
    origins: jax.Array
    finish: jax.Array
    metrics: Metrics
    top_logprobs: TopLogprobs | None = None
    kept_tokens: KeptTokens | None = None


def generate(
    target: Model,
    drafter: Drafter | None,
    prompts: Any,
    *,
    keys: jax.Array,
    max_new_tokens: Any,
    temperature: Any = 1.0,
    eos_token_ids: Any = (),
    sampling: SamplingParams | None = None,
    config: SpeculativeConfig | None = None,
    options: LoopOptions = LoopOptions(),
) -> Generation:
    r"""Generates text with speculation; it follows the target's distribution exactly.

    .. math:: P(x_1, \dots, x_n) = \prod_i p_{\text{target}}(x_i \mid \text{prompt}, x_{<i})

    for any drafter, at the request's temperature and sampling parameters. The tokens of a request
    are a function of its own key, prompt, temperature and sampling parameters, of the models,
    `config` and `max_new_tokens`. They do not depend on the other requests. At temperature 0 they
    are the tokens of plain greedy decoding.

    Args:
      target: the model whose distribution the output follows.
      drafter: `model_drafter(model)`, `ngram_drafter()`, a `Drafter` of your own, or None for
        plain decoding by this loop.
      prompts: B lists of ids in [0, V), such as `[[1, 2, 3], [4]]`, none of them empty. Or a tuple
        of arrays (ids, lengths): i32[B, L], padded at the end with any ids, and i32[B] in [1, L].
        Ids are checked where this call reads them: not traced, nor on several devices.
      keys: typed threefry keys, [B] or (). With () each request folds in its index.
      max_new_tokens: most tokens generated per request, int or i32[B], >= 1.
      temperature: f32, [B] or scalar, >= 0. Below 1e-5 the request is greedy. Negative or not
        finite makes it invalid.
      eos_token_ids: int, ints or i32[E], tokens that end a request. They are committed.
      sampling: `SamplingParams` of the target; a draft model samples by them too. Their values are
        data: only a rule that is added or taken away compiles anew. None is no rule.
      config: a `SpeculativeConfig`. None is the default one.
      options: `LoopOptions`: the capacity of the buffers, the chunks of prompts, the
        log-probabilities that are listed, and the implementation.

    Returns:
      `Generation` with buffers of S tokens. A request ends as
      `Finish.INVALID` at an invalid row: NaN, +inf, nothing allowed, or an invalid penalty.

    Raises:
      ValueError: for empty prompts, ids outside [0, V), wrong shapes or keys, max_new_tokens < 1.
        For texts that `options.max_length` or the target's positions do not hold. For more
        log-probabilities than tokens, or an unknown implementation. For a kept set of more tokens
        than `options.max_kept_tokens`, after the texts are made. Under an outer `jit`, if
        `max_new_tokens` is traced and `options.max_length` is None. For a model's function that
        returns other shapes or dtypes than `Model` names.
      MemoryError: if the device has no room, before anything is compiled where the device tells
        how much is free. The error names the bytes of a request and what to lower.

    Example:
      >>> from specjax.markov_chain import markov_chain
      >>> model = markov_chain([[0.1, 0.9], [0.8, 0.2]])
      >>> output = specjax.generate(
      ...     model, specjax.ngram_drafter(), [[0]], keys=jax.random.key(0), max_new_tokens=5,
      ...     temperature=0)
      >>> specjax.unpad(output.token_ids)
      [[0, 1, 0, 1, 0, 1]]

    References:
      Leviathan et al., 2023, arXiv:2211.17192; Chen et al., 2023, arXiv:2302.01318.
    """
    arguments = RequestArguments(
        prompts, keys, max_new_tokens, temperature, eos_token_ids, sampling
    )
    requests, static = check_arguments(target, drafter, arguments, config, options)
    models = Models(target, drafter)
    kinds = kinds_of(models, requests)
    check_memory(kinds, static)
    # A donated state is overwritten in place. Within another program nothing can be donated.
    run = _traced_loop if is_traced() else loop_in_place
    generation, _ = run_requests(run, models, requests, kinds, static)
    if generation.kept_tokens is not None:
        size, max_length = requests.token_ids.shape
        num_rows = static.step.num_rows(drafter)
        check_kept_sets(generation, vocabulary_size(target, size, num_rows, max_length))
    return take_first_requests(generation, requests.lengths.shape[0])


def take_first_requests(generation: Generation, size: int) -> Generation:
    """Returns the texts of the first `size` requests, without those that pad the batch."""
    if generation.lengths.shape[0] == size:
        return generation
    return jax.tree.map(lambda x: x[:size], generation)


def check_kept_sets(generation: Generation, vocab_size: int) -> None:
    """Refuses texts of which a kept set has more tokens than are listed.

    They are not checked where they are traced, or lie on devices of several processes.
    """
    kept = generation.kept_tokens
    if kept is None or isinstance(kept.num_kept, jax.core.Tracer):
        return
    if not kept.num_kept.is_fully_addressable:
        return
    num_kept, max_kept = np.asarray(kept.num_kept), kept.token_ids.shape[-1]
    largest = int(np.max(num_kept, where=num_kept < vocab_size, initial=0))
    if largest > max_kept:
        raise ValueError(
            f"max_kept_tokens is {max_kept}, and a token was drawn from {largest} kept ones; it "
            f"needs at least {largest}. Or cut more, by top_k for one, or use an Engine, which "
            "gives masks of such sets."
        )


def run_loop(
    models: Models, state: DecodeState, *, options: StepOptions
) -> tuple[Generation, DecodeState]:
    """Takes steps until every request has ended; returns the texts, and the state without them.

    The state is an output, too, so that its caches take the memory of a donated one.
    """

    def take_step(state: DecodeState) -> DecodeState:
        after, _ = run_step(models, state, options=options)
        return pvary_like(after, state)

    start = pvary_like(state, state, models)
    state = jax.lax.while_loop(lambda state: jnp.any(state.finish == 0), take_step, start)
    generation = Generation(*(getattr(state, name) for name in Generation._fields))
    without_texts: dict[str, Any] = dict.fromkeys(Generation._fields)
    return generation, state._replace(**without_texts)


_traced_loop = jax.jit(run_loop, static_argnames="options")
loop_in_place = jax.jit(run_loop, static_argnames="options", donate_argnames="state")


jax.export.register_namedtuple_serialization(Generation, serialized_name="specjax.Generation")
