"""`Engine`: the public class, and the choices that it makes when it is made."""

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checks import check_count, check_flag
from specjax.config import SpeculativeConfig
from specjax.decode.adaptive_k import constant_k, k_by_rate, throughput_by_rate
from specjax.decode.capacity import pad_eos
from specjax.decode.drafters import Drafter, Models
from specjax.decode.matchers import Matcher, new_masks
from specjax.decode.options import LoopOptions, check_capacity, choose_chunk_size
from specjax.decode.request_batch import RequestArguments, check_arguments
from specjax.decode.state import Settings
from specjax.decode.token_info import for_host
from specjax.engine.programs import make_programs, warm_up
from specjax.engine.queue import PromptGroup
from specjax.engine.request import Request
from specjax.engine.scheduler import Scheduler
from specjax.engine.step_sizes import read_sizes
from specjax.engine.submission import (
    MAX_STOP_IDS,
    EngineLimits,
    SampleArguments,
    Submission,
    check_request,
    check_timeout,
    drop_batch_axis,
    make_request,
    make_submission,
    sample_indices,
)
from specjax.processing.sampling_params import SamplingParams
from specjax.types import Model


class Engine:
    """Decodes requests that come at any time, each in a slot of one compiled step.

    A request waits until a slot is empty, first come, first served. Its prompt is read in chunks
    between the steps of the others. Its tokens depend on its key, prompt and parameters, and on the
    models, `config` and the engine's shapes. They do not depend on its slot. They depend on
    other requests only if `k_by_load` is set, or at near-ties if steps have several sizes.

    The constructor compiles, and no request does. Any thread may submit, abort or preempt, and may
    run the engine by `step`, `run` or an iteration over a request. Threads that run it take turns,
    and the coroutines of one event loop share steps.

    Args:
      target: the model whose distribution the output follows.
      drafter: as in `generate`, or None. Ignored if adaptive K would always choose 0.
      num_slots: B, requests decoded at once, a Python int >= 1. Or rising sizes of steps such as
        (8, 32, B): a step then has the smallest size that holds the requests in slots. Each size is
        compiled, and the models need `reads_pieces`. Other requests may then change a text's last
        bits, and its tokens at near-ties, but not its distribution. With a target of
        `row_invariant=True` greedy and coupled texts keep their bits.
      options: `LoopOptions`. `max_length`, most tokens of a prompt and its text together, is
        needed, >= 2. `prefill_chunk_size` None is 512 on a GPU, else 128. A CPU reads up to 16
        waiting prompts together, a quarter of a chunk of each or more.
      sampling: `SamplingParams` of one request. Requests may set the fields that it has; its values
        are the defaults. None is no field.
      config: a `SpeculativeConfig`. None is the default one. With K = "auto", the step is as long
        as its longest draft, so K is at least the optimum at `usual_acceptance_rate`.
      tokenizer: with `decode(ids, skip_special_tokens)`, for text and stop strings; or None.
      max_waiting: most requests that wait for a slot, a Python int >= 1.
      k_by_load: with K = "auto", whether all slots draft the K that gives them together the most
        tokens per time. A request's draws then depend on the others, and still follow the target.
        Greedy and coupled requests get the same tokens either way.
      takes_matchers: whether requests may have a matcher on the host, as in `RowMasks`.
        While one of them is in a slot, the host reads a step before it dispatches the next.

    Attributes:
      slot_bytes: bytes that one slot takes, on all devices of a mesh together. `memory_needs`
        returns them, and the bytes of a step, before an engine is made.
      num_slots: B.
      max_length: S.

    Raises:
      ValueError: for arguments that `generate` refuses, a cache without an axis of requests, and
        several sizes of steps for models that read no pieces.
      MemoryError: if the device has no room for the slots, before anything is compiled where the
        device tells how much is free. The error names the bytes of a slot, a step and a chunk.

    Example:
      >>> from specjax.markov_chain import markov_chain
      >>> model = markov_chain([[0.1, 0.9], [0.8, 0.2]])
      >>> options = specjax.LoopOptions(max_length=16)
      >>> engine = specjax.Engine(model, None, num_slots=2, options=options)
      >>> requests = [
      ...     engine.submit([0, 1], key=jax.random.key(i), temperature=0, max_new_tokens=3 + i)
      ...     for i in range(3)]
      >>> engine.run()
      >>> [request.token_ids for request in requests]
      [[0, 1, 0], [0, 1, 0, 1], [0, 1, 0, 1, 0]]
      >>> [request.finish_reason for request in requests]
      ['length', 'length', 'length']
    """

    def __init__(
        self,
        target: Model,
        drafter: Drafter | None,
        *,
        num_slots: int | Sequence[int],
        options: LoopOptions,
        sampling: SamplingParams | None = None,
        config: SpeculativeConfig | None = None,
        tokenizer: Any = None,
        max_waiting: int = 4096,
        k_by_load: bool = False,
        takes_matchers: bool = False,
    ) -> None:
        step_sizes = read_sizes(num_slots)
        num_slots = step_sizes[-1]
        max_length = check_capacity(options, "the tokens that a slot holds")
        why = "the requests that wait for a slot"
        max_waiting = check_count("max_waiting", max_waiting, 1, why)
        keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), num_slots)
        drafter, config, k_by_rate = resolve_speculation(drafter, config, num_slots, k_by_load)
        # B requests of one token stand for those to come: their shapes and options are read.
        prompts = (np.zeros((num_slots, 1), np.int32), np.ones(num_slots, np.int32))
        arguments = RequestArguments(prompts, keys, max_new_tokens=1)
        requests, static = check_arguments(target, drafter, arguments, config, options)
        # Prompts are read one at a time, or by `PrefillBatch`: the default is that of one prompt.
        chunk_size = choose_chunk_size(options, 1)
        defaults = drop_batch_axis(sampling)
        num_rows = static.step.num_rows(drafter)
        # For adaptive K: a copy of the target's layers for half of K, besides those for 0 and K.
        step_options = dataclasses.replace(static.step, draft_buckets=(num_rows // 2,))
        programs = make_programs(
            Models(target, drafter),
            _settings_of_slots(requests.settings, defaults, k_by_rate),
            max_length=max_length,
            chunk_size=min(chunk_size, max_length),
            options=step_options,
            step_sizes=step_sizes,
            num_listed=_num_listed(requests.settings) if static.prompt_logprobs else None,
        )
        self.num_slots, self.max_length = num_slots, max_length
        self.slot_bytes, vocab_size = programs.needs.slot_bytes, programs.vocab_size
        shape = num_slots, num_rows, vocab_size
        all_allowed = all_allowed_masks(takes_matchers, defaults, shape)
        takes_matchers = all_allowed is not None
        limits = (max_length, vocab_size, defaults, tokenizer, takes_matchers)
        self._limits = EngineLimits(*limits, static.prompt_logprobs)
        # Any request will do: all have the same shapes.
        any_request = check_request(Submission([0, 0], keys[0]), self._limits)
        slots = warm_up(programs, target, any_request.settings, all_allowed)
        self._scheduler = Scheduler(programs, slots, all_allowed, max_waiting)

    def submit(
        self,
        prompt: Any,
        *,
        key: jax.Array | None = None,
        seed: int | None = None,
        max_new_tokens: int | None = None,
        temperature: Any = 1.0,
        eos_token_ids: Any = (),
        sampling: SamplingParams | None = None,
        stop: str | Iterable[str] | None = (),
        matcher: Matcher | None = None,
        prompt_logprobs: bool = False,
    ) -> Request:
        """Puts a request at the end of the queue.

        A prompt is refused if it is empty, too long for the engine, or has an id outside the
        target's vocabulary. Its request has ended as "refused", with a sentence in `error`.

        Args:
          prompt: a list of ids, or i32[P].
          key: a typed threefry key, (). The tokens follow from it; None if `seed` is given.
          seed: a Python int in [-2**63, 2**63), in place of `key`. The key's two words are the high
            and the low 32 bits of seed modulo 2**64. For seeds in [0, 2**32) it is
            `jax.random.key(seed, impl="threefry2x32")`.
          max_new_tokens: most tokens generated, a Python int >= 1. None is as many as
            `max_length` has room for.
          temperature: a number >= 0. Below 1e-5 the request is greedy.
          eos_token_ids: int, ints or i32[E], tokens that end the request; at most 16. They are
            committed.
          sampling: `SamplingParams` of this request: fields that the engine was made with.
          stop: strings that end the request. Its text ends before the first of them. None is none.
          matcher: a `Matcher` that has read nothing; it masks each next token. From now
            on it belongs to the request. `eos_token_ids` are the tokens by which it ends a text.
          prompt_logprobs: whether `Request.prompt_logprobs` are listed. The engine needs
            `LoopOptions(num_logprobs=n, prompt_logprobs=True)`.

        Returns:
          The `Request`, which the engine fills.

        Raises:
          ValueError: for an argument of another type, shape or range.
          queue.Full: if `max_waiting` requests wait.
          RuntimeError: if the engine is closed or drains, or has lost the device's arrays of its
            requests.

        Example:
          >>> from specjax.markov_chain import markov_chain
          >>> model = markov_chain([[0.1, 0.9], [0.8, 0.2]])
          >>> options = specjax.LoopOptions(max_length=16)
          >>> engine = specjax.Engine(model, None, num_slots=2, options=options)
          >>> request = engine.submit([0], key=jax.random.key(0), temperature=0, max_new_tokens=3)
          >>> [piece.token_ids for piece in request]
          [[1], [0], [1]]
          >>> engine.submit([7], key=jax.random.key(0)).error
          "the prompt has token 7; the target's vocabulary has 2 tokens."
        """
        submission = Submission(
            prompt,
            key,
            max_new_tokens,
            temperature,
            eos_token_ids,
            sampling,
            stop,
            matcher,
            seed,
            prompt_logprobs,
        )
        return self._enqueue(submission)[0]

    def submit_samples(
        self,
        num_samples: int,
        prompt: Any,
        **arguments: Unpack[SampleArguments],
    ) -> list[Request]:
        """Puts several requests of one prompt at the end of the queue; the prompt is read once.

        They take no `Matcher`, which reads one text: submit each such sample by itself.

        Args:
          num_samples: a Python int >= 1.
          prompt: as in `submit`.
          **arguments: those of `submit`, but for `matcher`. Sample i has the key
            `jax.random.fold_in(key, i)`. Log-probabilities of the prompt are computed once.

        Returns:
          The requests.

        Raises:
          ValueError: as `submit` does.
          queue.Full: if more than `max_waiting` requests would wait.

        Example:
          >>> from specjax.markov_chain import markov_chain
          >>> model = markov_chain([[0.5, 0.5], [0.5, 0.5]])
          >>> options = specjax.LoopOptions(max_length=8)
          >>> engine = specjax.Engine(model, None, num_slots=2, options=options)
          >>> samples = engine.submit_samples(4, [0], key=jax.random.key(0), max_new_tokens=5)
          >>> engine.run()
          >>> [len(sample.token_ids) for sample in samples]
          [5, 5, 5, 5]
        """
        submission = make_submission("Engine.submit_samples", prompt, arguments)
        return self._enqueue(submission, sample_indices(submission, num_samples))

    def _enqueue(
        self, submission: Submission, samples: Sequence[int] = (-1,), priority: int = 0
    ) -> list[Request]:
        """Returns a request for each sample index, and queues the requests that go on."""
        checked, queue = check_request(submission, self._limits), self._scheduler.queue
        queue.check_room(len(samples))
        requests = [make_request(checked, self._limits, self._scheduler) for _ in samples]
        pairs = zip(requests, samples, strict=True)
        if waiting := {one: sample for one, sample in pairs if one.finish_reason is None}:
            queue.put(PromptGroup(checked, waiting, priority))
        return requests

    def abort(self, request: Request) -> None:
        """Ends a request now, if it has not ended; its slot is empty from the next step on."""
        self._scheduler.abort(request)

    def preempt(self, request: Request, *, drops_cache: bool = False) -> bool:
        """Takes a request out of its slot and puts it first in the queue.

        The request goes on in the next empty slot, and its tokens stay the same.

        Args:
          request: one of this engine's.
          drops_cache: whether the target's cache of the request is dropped, and computed again from
            its tokens, chunk by chunk. A cache that is kept takes the memory of one more slot until
            the request goes on.

        Returns:
          Whether the request was in a slot.
        """
        self._scheduler.queue.check_open()
        return self._scheduler.preempt(request, drops_cache)

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """Ends all requests as "aborted", and frees the memory of the slots.

        `with engine:` closes the engine, too. Later calls of `submit`, `preempt`, `step` and `run`
        raise `RuntimeError`.

        Args:
          drain: whether the engine runs first until every request has ended. `submit` raises
            `RuntimeError` meanwhile.
          timeout: most seconds that it runs, a number > 0; None is without end.

        Raises:
          ValueError: for a timeout that is no number > 0.

        Example:
          >>> from specjax.markov_chain import markov_chain
          >>> model = markov_chain([[0.5, 0.5], [0.5, 0.5]])
          >>> options = specjax.LoopOptions(max_length=8)
          >>> with specjax.Engine(model, None, num_slots=2, options=options) as engine:
          ...     request = engine.submit([0], key=jax.random.key(0))
          >>> request.finish_reason
          'aborted'
        """
        seconds = check_timeout(timeout)
        if check_flag("drain", drain, ""):
            self._scheduler.queue.drain()
            end = time.monotonic() + seconds
            while not self.is_closed and self.step() and time.monotonic() < end:
                pass
        self._scheduler.close()

    @property
    def is_closed(self) -> bool:
        """Whether the engine is closed, by `close` or by an error."""
        return self._scheduler.queue.closed_reason is not None

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def step(self) -> bool:
        """Dispatches one step of the slots and reads the tokens of the step before.

        Returns:
          Whether another step is needed: whether a request has not ended.

        Raises:
          RuntimeError: while coroutines wait for a step, and once the engine is closed. Also if an
            error took the device's arrays of the requests: they end as "engine_error".
        """
        self._scheduler.queue.check_open()
        return self._scheduler.take_step()

    def run(self) -> None:
        """Steps until every request has ended."""
        while self.step():
            pass

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._scheduler.queue.waiting())

    @property
    def num_running(self) -> int:
        """Requests that had a slot and have not ended; some wait for their last step to be read."""
        return self._scheduler.num_running

    @property
    def num_steps(self) -> int:
        """Steps dispatched so far."""
        return self._scheduler.num_steps

    @property
    def occupancy(self) -> float:
        """Share of the slots that held a request, over all steps so far; 0 before the first."""
        num_slots = self._scheduler.num_steps * self.num_slots
        return self._scheduler.num_occupied / num_slots if num_slots else 0.0


def resolve_speculation(
    drafter: Drafter | None, config: SpeculativeConfig | None, num_slots: int, k_by_load: bool
) -> tuple[Drafter | None, SpeculativeConfig | None, Any]:
    """Returns the drafter and the config of an engine, and its `Settings.k_by_rate` or None.

    Where K is the same at every rate, the config returned has that fixed K. If that is 0, the
    drafter is None. A value that is no drafter or config is returned for `check_arguments`.

    Args:
      drafter: as in `Engine`, unchecked.
      config: as in `Engine`, unchecked.
      num_slots: B.
      k_by_load: as in `Engine`, unchecked.

    Raises:
      ValueError: for `k_by_load` without K = "auto" and a drafter.
    """
    is_by_load = check_flag("k_by_load", k_by_load)
    is_adaptive = isinstance(config, SpeculativeConfig) and config.adaptive_k
    if config is None or not is_adaptive or not isinstance(drafter, Drafter):
        if is_by_load:
            raise ValueError(
                "k_by_load is True, and num_speculative_tokens is no choice; it needs a drafter "
                'and SpeculativeConfig("auto", ...).'
            )
        return drafter, config, None
    config = config.for_batch_size(num_slots)
    table = throughput_by_rate(config) if is_by_load else k_by_rate(config, num_slots)
    k = constant_k(table)
    if k is None:
        return drafter, config, table
    if k == 0:
        return None, config, None
    fixed = dataclasses.replace(
        config, num_speculative_tokens=k, step_costs=None, usual_acceptance_rate=None
    )
    return drafter, fixed, None


def all_allowed_masks(
    takes_matchers: bool, defaults: SamplingParams | None, shape: tuple[int, int, int]
) -> np.ndarray | None:
    """Returns masks u32[B, K + 1, ceil(V / 32)] that allow every token.

    None if no request may have a matcher.

    Args:
      takes_matchers: as in `Engine`, unchecked.
      defaults: the engine's `sampling`, from `drop_batch_axis`.
      shape: B, K + 1 and V.

    Raises:
      ValueError: if requests may have masks of their own, too.
    """
    if not check_flag("takes_matchers", takes_matchers):
        return None
    if defaults is not None and defaults.allowed is not None:
        raise ValueError(
            "takes_matchers is True, and sampling.allowed is given; a matcher's masks would take "
            "its place, so an engine needs one of the two."
        )
    return new_masks(*shape)


def _num_listed(settings: Settings) -> int | None:
    """Returns how many tokens are listed of each token, a checked int; None if none is."""
    listed = None if settings.token_info is None else settings.token_info.logprobs
    return None if listed is None else listed.num


def _settings_of_slots(
    settings: Settings, defaults: SamplingParams | None, k_by_rate: Any
) -> Settings:
    """Returns settings of B equal requests, with room for each request's own stop ids and fields.

    Args:
      settings: of B requests, checked.
      defaults: the engine's `sampling`, from `drop_batch_axis`.
      k_by_rate: from `resolve_speculation`.
    """
    num_slots = settings.prompt_lengths.shape[0]

    def repeat(field: np.ndarray) -> jax.Array:
        return jnp.tile(field, (num_slots,) + (1,) * field.ndim)

    sampling = None
    if defaults is not None:
        # The slots share the grammar's tables.
        grammar = jax.tree.map(jnp.asarray, defaults.grammar)
        sampling = jax.tree.map(repeat, defaults._replace(grammar=None))._replace(grammar=grammar)
    no_stop_ids: Any = np.tile(pad_eos(np.zeros(0, np.int32), MAX_STOP_IDS), (num_slots, 1))
    return settings._replace(
        eos_token_ids=no_stop_ids,
        sampling=sampling,
        token_info=for_host(settings.token_info),
        k_by_rate=k_by_rate,
    )
