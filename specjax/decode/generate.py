"""Decoding with speculation: `generate` as a whole, `init` and `step` for streaming."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checks import check_count, check_keys, check_prompt, read_array, read_ids
from specjax.config import SpeculativeConfig
from specjax.decode.logprobs import LogprobsConfig, check_logprobs_config
from specjax.decode.loop import run_generate, run_init, run_step
from specjax.decode.state import DecodeState, Generation, Settings, StepInfo
from specjax.processing.sampling_params import SamplingParams, read_sampling
from specjax.typing import Drafter, Model

__all__ = ["generate", "init", "step"]


def init(
    target: Model,
    drafter: Drafter | None,
    prompt_token_ids: Any,
    prompt_lengths: Any,
    *,
    keys: jax.Array,
    config: SpeculativeConfig | None = None,
    max_new_tokens: int,
    temperature: Any = 1.0,
    eos_token_ids: Any = (),
    sampling: SamplingParams | None = None,
    num_logprobs: int | None = None,
    logprobs_mode: str = "raw",
) -> DecodeState:
    """Reads the prompts, draws the first token of each request and the first draft.

    Arguments are those of `generate`; `step` goes on from the state.

    Args:
      target: the model whose law the output follows.
      drafter: what proposes tokens, or None.
      prompt_token_ids: i32[B, L].
      prompt_lengths: i32[B], in [1, L].
      keys: typed threefry keys, [B] or ().
      config: a `SpeculativeConfig`; None is the default one.
      max_new_tokens: a Python int >= 1.
      temperature: f32, [B] or scalar.
      eos_token_ids: ints or i32[E].
      sampling: a `SamplingParams`, or None.
      num_logprobs: a Python int >= 0, or None.
      logprobs_mode: "raw" or "processed".

    Returns:
      `DecodeState` with one token generated.

    Raises:
      ValueError: for what `generate` refuses.

    Example:
      >>> model = specjax.Model(  # a Markov chain on two tokens
      ...     jnp.log(jnp.array([[0.1, 0.9], [0.8, 0.2]])),
      ...     init_cache=lambda batch_size, max_length: (),
      ...     apply=lambda params, token_ids, positions, cache: (token_ids[..., None], cache),
      ...     logits=lambda params, hidden: params[hidden[..., 0]])
      >>> state = specjax.init(
      ...     model, None, [[0]], [1], keys=jax.random.key(0), max_new_tokens=3, temperature=0)
      >>> state.token_ids.tolist(), state.lengths.tolist()
      ([[0, 1, -1, -1]], [2])
    """
    arguments = _read_arguments(
        target,
        drafter,
        prompt_token_ids,
        prompt_lengths,
        keys,
        config,
        max_new_tokens,
        temperature,
        eos_token_ids,
        sampling,
        check_logprobs_config(num_logprobs, logprobs_mode),
    )
    return run_init(target, drafter, **arguments)


def step(
    target: Model,
    drafter: Drafter | None,
    state: DecodeState,
    *,
    config: SpeculativeConfig | None = None,
) -> tuple[DecodeState, StepInfo]:
    """One speculative step of every request that has not ended.

    Args:
      target: as in `init`.
      drafter: as in `init`.
      state: from `init` or `step`.
      config: as in `init`.

    Returns:
      The next state, and what the step did.

    Example:
      >>> model = specjax.Model(  # a Markov chain on two tokens
      ...     jnp.log(jnp.array([[0.1, 0.9], [0.8, 0.2]])),
      ...     init_cache=lambda batch_size, max_length: (),
      ...     apply=lambda params, token_ids, positions, cache: (token_ids[..., None], cache),
      ...     logits=lambda params, hidden: params[hidden[..., 0]])
      >>> state = specjax.init(
      ...     model, None, [[0]], [1], keys=jax.random.key(0), max_new_tokens=3, temperature=0)
      >>> state, info = specjax.step(model, None, state)
      >>> state.token_ids.tolist(), info.verification.num_emitted.tolist()
      ([[0, 1, 0, -1]], [1])
    """
    config = SpeculativeConfig() if config is None else config
    return run_step(target, drafter, state, config=config.compile_key())


def generate(
    target: Model,
    drafter: Drafter | None,
    prompt_token_ids: Any,
    prompt_lengths: Any,
    *,
    keys: jax.Array,
    config: SpeculativeConfig | None = None,
    max_new_tokens: int,
    temperature: Any = 1.0,
    eos_token_ids: Any = (),
    sampling: SamplingParams | None = None,
    num_logprobs: int | None = None,
    logprobs_mode: str = "raw",
) -> Generation:
    """Generates with speculation; the output follows the target's law exactly.

    A request's tokens are a function of its own key, prompt, temperature and sampling
    parameters, of the models, `config` and `max_new_tokens`, never of the other requests. With
    temperature 0 they are those of plain greedy decoding, whatever drafts.

    Args:
      target: the model whose law the output follows.
      drafter: `model_drafter(model)`, `ngram_drafter()`, one of your own, or None for plain
        decoding through the same code.
      prompt_token_ids: i32[B, L], padded behind each prompt with anything. That they are of the
        target's vocabulary, and no longer than it was trained for, is the caller's to see to.
      prompt_lengths: i32[B], in [1, L].
      keys: typed threefry keys, [B] or (). With () each request folds in its index.
      config: a `SpeculativeConfig`; None is the default one.
      max_new_tokens: most tokens generated per request, a Python int >= 1.
      temperature: f32, [B] or scalar, >= 0; below 1e-5 the request is greedy.
      eos_token_ids: ints or i32[E], tokens that end a request; they are kept.
      sampling: truncation, penalties and masks, for all requests or for each, of the target
        and of a model that drafts alike: `SamplingParams`. Its values are data: only asking
        for another rule compiles anew. None is none.
      num_logprobs: likeliest tokens listed for every generated token, besides its own rank
        and log-probability, a Python int >= 0. None keeps none.
      logprobs_mode: those of the model's "raw" law, at temperature 1, or of the "processed"
        one that was sampled from, which `Generation.logprobs` are always of.

    Returns:
      `Generation` with buffers of L + max_new_tokens places. A request of which a row is
      no law, because nothing is allowed there or a penalty is invalid, ends as invalid.

    Raises:
      ValueError: for empty prompts, wrong shapes or keys, max_new_tokens < 1, more
        log-probabilities than tokens, or a drafter that takes no sampling parameters.

    Example:
      >>> model = specjax.Model(  # a Markov chain on two tokens
      ...     jnp.log(jnp.array([[0.1, 0.9], [0.8, 0.2]])),
      ...     init_cache=lambda batch_size, max_length: (),
      ...     apply=lambda params, token_ids, positions, cache: (token_ids[..., None], cache),
      ...     logits=lambda params, hidden: params[hidden[..., 0]])
      >>> output = specjax.generate(
      ...     model, specjax.ngram_drafter(), [[0]], [1], keys=jax.random.key(0),
      ...     max_new_tokens=5, temperature=0)
      >>> specjax.unpad(output.token_ids)
      [[0, 1, 0, 1, 0, 1]]
    """
    arguments = _read_arguments(
        target,
        drafter,
        prompt_token_ids,
        prompt_lengths,
        keys,
        config,
        max_new_tokens,
        temperature,
        eos_token_ids,
        sampling,
        check_logprobs_config(num_logprobs, logprobs_mode),
    )
    return run_generate(target, drafter, **arguments)


def _read_arguments(
    target: Model,
    drafter: Drafter | None,
    prompt_token_ids: Any,
    prompt_lengths: Any,
    keys: jax.Array,
    config: SpeculativeConfig | None,
    max_new_tokens: int,
    temperature: Any,
    eos_token_ids: Any,
    sampling: SamplingParams | None,
    logprobs: LogprobsConfig | None,
) -> dict[str, Any]:
    """The checked arguments of `run_init`."""
    config = SpeculativeConfig() if config is None else config
    _check_kinds(target, drafter, config)
    if isinstance(sampling, SamplingParams) and all(asked is None for asked in sampling):
        sampling = None
    if sampling is not None and drafter is not None:
        _check_takes_sampling(drafter)
    why = "because it sizes the buffers"
    max_new_tokens = check_count("max_new_tokens", max_new_tokens, 1, why)
    prompt, lengths = check_prompt(prompt_token_ids, prompt_lengths)
    size = prompt.shape[0]
    temperature = read_array("temperature", temperature, jnp.float32, (), (size,))
    settings = Settings(
        keys=check_keys(keys, size),
        temperature=temperature,
        max_lengths=lengths + max_new_tokens,
        eos_token_ids=read_ids("eos_token_ids", eos_token_ids),
        conditional_rates=None if drafter is None else config.conditional_rates(),
        sampling=None if sampling is None else read_sampling(sampling, size),
        logprobs=logprobs,
    )
    return {
        "prompt": prompt,
        "lengths": lengths,
        "settings": settings,
        "config": config.compile_key(),
        "max_length": prompt.shape[1] + max_new_tokens,
    }


def _check_takes_sampling(drafter: Drafter) -> None:
    taken = inspect.signature(drafter.propose).parameters.values()
    names = {parameter.name for parameter in taken}
    if not names >= {"sampling", "history"} and all(p.kind != p.VAR_KEYWORD for p in taken):
        raise ValueError(
            "drafter.propose takes no sampling and history, which it is given where sampling "
            "parameters are asked for; one that ignores them is exact, too."
        )


def _check_kinds(target: Any, drafter: Any, config: Any) -> None:
    if not isinstance(target, Model):
        raise ValueError(f"target is {type(target).__name__}; it needs a specjax.Model.")
    if drafter is not None and not isinstance(drafter, Drafter):
        raise ValueError(
            f"drafter is {type(drafter).__name__}; it needs specjax.model_drafter(model), "
            "specjax.ngram_drafter(), a specjax.Drafter of your own, or None."
        )
    if not isinstance(config, SpeculativeConfig):
        raise ValueError(
            f"config is {type(config).__name__}; it needs a specjax.SpeculativeConfig."
        )
