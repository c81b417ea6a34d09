"""A conversation: its messages, and answers that continue the caches of the turns before.

A turn's tokens are those that its whole conversation would have as one prompt. So an answer does
not depend on what the caches hold; they decide only how many tokens are read again.
"""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import jax

from specjax.cli.chat.prefix_cache import PrefixCache
from specjax.cli.generate import (
    GenerateJob,
    GenerateResult,
    Spinner,
    Timings,
    begin_programs,
    check_job,
    stream_steps,
)
from specjax.cli.model_pair import check_vocabulary, encode_text, render_chat
from specjax.decode.drafters import Models


class Answer(NamedTuple):
    """An answer and its counts.

    Attributes:
      result: text, tokens, why it ended, metrics.
      timings: of its steps.
      num_prompt_tokens: of the whole conversation, up to where the answer begins.
      num_read_tokens: of those, the ones that the models read; the caches held the others.
    """

    result: GenerateResult
    timings: Timings
    num_prompt_tokens: int
    num_read_tokens: int


def choose_capacity(job: GenerateJob, num_tokens: int) -> int:
    """Returns the next power of two, at least twice an answer, that the target's positions take."""
    wanted = max(num_tokens, 2 * job.options.max_new_tokens)
    longest: int = job.pair.target_config.max_position_embeddings
    return min(longest, 1 << (wanted - 1).bit_length())


class Conversation:
    """The messages of a conversation, and the caches of its last turn.

    Args:
      job: with models, programs and their `max_length`; its prompt is not read.

    Attributes:
      messages: those after the system message.
      num_answers: answers so far. Answer n, from 1, is drawn with the key `fold_in(key, n)`.
    """

    def __init__(self, job: GenerateJob) -> None:
        self._job, self._prefix = job, PrefixCache(Models(*job.models))
        self.messages: list[dict[str, str]] = []
        self.num_answers = 0

    def ask(
        self,
        text: str,
        *,
        spinner: Spinner = contextlib.nullcontext,
        show: Callable[[str, int], None] = lambda *_: None,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> Answer:
        """Adds a message and its answer to the conversation.

        Args:
          text: the user's message.
          spinner: as in `generate.stream_text`.
          show: as in `generate.stream_text`.
          is_interrupted: as in `generate.stream_steps`; the answer so far is kept.

        Raises:
          ValueError: if the template refuses the conversation, or it is too long. It is then as
            before.
          FloatingPointError: if the target's logits turned invalid. So is it then.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        job = self._with_prompt(messages)
        with spinner("compiling"):
            programs = self._job.programs
            if programs is None:
                programs = begin_programs(job)
                self._job = self._job._replace(programs=programs)
            programs.wait_for_prompt()
        requests, _ = check_job(job)
        self.num_answers += 1
        keys = jax.random.fold_in(job.key, self.num_answers)[None]
        requests = requests._replace(settings=requests.settings._replace(keys=keys))
        assert job.max_length is not None
        reused = self._prefix.take(job.prompt_ids, job.max_length)
        num_reused = 0 if reused is None else reused[0]
        with spinner("reading the prompt"):
            state = programs.read_prompt(*job.models, requests, reused)
            self._prefix.mark(state)
        with spinner("compiling"):
            state = programs.step(*job.models, state)
        steps = stream_steps(job, programs, state, show=show, is_interrupted=is_interrupted)
        result, timings, state = steps
        if result.finish == "invalid_logits":
            raise FloatingPointError("the target's logits turned invalid.")
        self._prefix.keep(state)
        self.messages = [*messages, {"role": "assistant", "content": result.text}]
        return Answer(result, timings, len(job.prompt_ids), len(job.prompt_ids) - num_reused)

    def reset(self) -> None:
        """Removes all messages but the system message."""
        self.messages = []

    def set_system(self, system: str | None) -> None:
        """Sets the system message of all messages, also of those before; None removes it.

        Raises:
          ValueError: if the template refuses it. It is then as before.
        """
        pair = self._job.pair.with_options(system=system)
        messages = [*self.messages, {"role": "user", "content": "Hello."}]
        render_chat(pair, messages)
        self._job = self._job._replace(pair=pair)

    def _with_prompt(self, messages: list[dict[str, str]]) -> GenerateJob:
        """Returns the job of a turn; its buffers have room for the longest answer that fits."""
        job = self._job
        text = render_chat(job.pair, messages)
        ids, _ = encode_text(job.pair.tokenizer, text, chat=True)
        if not ids:
            raise ValueError("the chat template writes no text for the conversation.")
        check_vocabulary(job.pair, ids)
        longest = job.pair.target_config.max_position_embeddings
        if len(ids) >= longest:
            raise ValueError(
                f"the conversation has {len(ids)} tokens, and the target takes texts of at most "
                f"{longest}; /reset begins a new one."
            )
        num_new = min(job.options.max_new_tokens, longest - len(ids))
        assert job.max_length is not None
        if len(ids) + num_new > job.max_length:
            capacity = choose_capacity(job, len(ids) + num_new)
            self._job = job = job._replace(max_length=capacity, programs=None)
        pair = job.pair.with_options(max_new_tokens=num_new)
        return job._replace(pair=pair, text=text, prompt_ids=ids)
