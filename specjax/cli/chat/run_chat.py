"""Runs `specjax chat`: reads messages and commands, and prints answers."""

import contextlib
import importlib
import pathlib
import sys
from typing import Any

from specjax.cli.chat.conversation import Answer, Conversation, choose_capacity
from specjax.cli.folders.pair_memory import report_memory
from specjax.cli.generate import GenerateJob, begin_programs, load_models
from specjax.cli.json_report import metrics_json
from specjax.cli.model_pair import (
    ModelPair,
    read_sampling,
    render_chat,
    with_trained_k,
)
from specjax.cli.option_table import suggest
from specjax.cli.streams import catch_interrupt, raise_on_interrupt

_COMMANDS = {
    "/reset": "forget the messages, keep the system message",
    "/system": "TEXT: set the system message; without TEXT: remove it",
    "/help": "list the commands",
    "/exit": "end the conversation, as ^D does",
}
_QUOTES = '"""'
_HINT = '/help lists the commands; ^C ends an answer, ^D the conversation; """ begins several lines'


def read_chat(pair: ModelPair, terminal: Any, folder: pathlib.Path | None) -> GenerateJob:
    """Returns the job of a conversation; weights are read while its programs are compiled.

    Raises:
      ValueError: for a folder without a chat template, a template that refuses `--system`, and a K
        that the pair cannot take.
    """
    pair = with_trained_k(pair)
    job = GenerateJob(pair, "", [0], read_sampling(pair), folder)
    render_chat(pair, [{"role": "user", "content": "Hello."}])
    capacity = choose_capacity(job, 1)
    job = job._replace(max_length=capacity)
    most = pair.target_config.max_position_embeddings - 1
    pair.options.max_new_tokens = min(pair.options.max_new_tokens, most)
    report_memory(pair, terminal, num_requests=1, max_length=capacity)
    job = load_models(job)
    # Compiled while the first message is written.
    return job if job.programs is not None else job._replace(programs=begin_programs(job))


def run_chat(job: GenerateJob, terminal: Any) -> None:
    """Answers messages until the input ends.

    Raises:
      ValueError: for a message that is refused, unless a person may write another.
      FloatingPointError: if the target's logits turned invalid, also unless that.
      MemoryError: if the device has no room for the conversation.
    """
    conversation = Conversation(job)
    is_person = sys.stdin.isatty()
    terminal.print_heading(job)
    if is_person:
        terminal.print_note(_HINT)
        with contextlib.suppress(ImportError):  # `input` then edits lines and keeps a history.
            importlib.import_module("readline")
    while (message := _read_message(is_person, terminal)) is not None:
        if not message.strip():
            continue
        try:
            if message.startswith("/"):
                if _run_command(message, conversation, terminal):
                    return
                continue
            _answer(conversation, message, terminal)
        except (ValueError, FloatingPointError) as error:
            if not is_person:
                raise
            terminal.print_note(f"specjax: {error}")


def _answer(conversation: Conversation, message: str, terminal: Any) -> None:
    with catch_interrupt() as is_interrupted:
        show = {"show": terminal.print_text, "is_interrupted": is_interrupted}
        answer = conversation.ask(message, spinner=terminal.spinner, **show)
    terminal.end_line()
    terminal.print_report(_describe(answer))


def _describe(answer: Answer) -> str:
    """Returns the line of counts after an answer."""
    result, rate = answer.result, answer.timings.tokens_per_second
    num_tokens = len(result.token_ids)
    unit = "token" if num_tokens == 1 else "tokens"
    parts = [f"{num_tokens} {unit}, ended by {result.finish.replace('_', ' ')}"]
    if rate is not None:
        parts.append(f"{rate:.1f} tokens/s")
    length = metrics_json(result)["mean_acceptance_length"]
    if length is not None:
        parts.append(f"{length:.2f} tokens per step")
    parts.append(f"read {answer.num_read_tokens} of {answer.num_prompt_tokens} prompt tokens")
    return " · ".join(parts)


def _run_command(message: str, conversation: Conversation, terminal: Any) -> bool:
    """Runs a command such as /reset, and returns whether the conversation ends."""
    name, _, text = message.partition(" ")
    name, text = name.strip(), text.strip()
    if name == "/reset":
        conversation.reset()
    elif name == "/system":
        conversation.set_system(text or None)
    elif name == "/help":
        for command, meaning in _COMMANDS.items():
            terminal.print_note(f"{command}  {meaning}")
    elif name != "/exit":
        hint = suggest(name, _COMMANDS)
        raise ValueError(f"{name} is no command; there are {', '.join(_COMMANDS)}.{hint}")
    return name == "/exit"


def _read_message(is_person: bool, terminal: Any) -> str | None:
    '''Returns the next message, a line or the lines between two """; None at the end.'''
    line = _read_line(">>> ", is_person, terminal)
    if line is None or not line.startswith(_QUOTES):
        return line
    lines = [line.removeprefix(_QUOTES)]
    while not lines[-1].endswith(_QUOTES):
        line = _read_line("... ", is_person, terminal)
        if line is None:
            return None
        lines.append(line)
    return "\n".join(lines).removesuffix(_QUOTES).strip("\n")


def _read_line(prompt: str, is_person: bool, terminal: Any) -> str | None:
    """Returns a line of standard input; None at its end. Raises a `ValueError` if it is no text."""
    if not is_person:
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError:
            raise ValueError("standard input is not UTF-8 text.") from None
        return line.removesuffix("\n") if line else None
    with raise_on_interrupt():
        while True:
            try:
                return input(prompt)
            except EOFError:
                return None
            except KeyboardInterrupt:
                terminal.print_note("\n^D or /exit ends the conversation")
