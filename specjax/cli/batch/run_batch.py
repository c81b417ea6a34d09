"""Decodes a file of prompts through an engine, and appends a line as each request ends."""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
import os
import time
from collections import deque
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.cli.arguments import SAMPLING_OPTIONS
from specjax.cli.batch.output_file import OutputFile
from specjax.cli.batch.read_lines import FIELDS, Encode, PromptLine, read_lines
from specjax.cli.folders.pair_memory import report_memory
from specjax.cli.json_report import is_exact, list_logprobs
from specjax.cli.model_pair import (
    ModelPair,
    count_grammar,
    describe_configs,
    encode_text,
    load_pair,
    read_grammar,
    render_chat,
    with_trained_k,
)
from specjax.cli.option_table import suggest
from specjax.config import SpeculativeConfig
from specjax.decode.drafters import Drafter
from specjax.decode.logprobs import TopLogprobs
from specjax.decode.options import LoopOptions
from specjax.engine.engine import Engine
from specjax.engine.request import FinishReason, Request
from specjax.file_io import read_file
from specjax.processing.grammar import Grammar
from specjax.processing.sampling_params import SamplingParams
from specjax.types import Model

_MAX_BYTES = 2**32
# A device or a pipe has no size and may have no end.
_MAX_BYTES_OF_STREAM = 2**28
# Buffers are rounded up to a multiple, so that another file may find its programs in the cache.
_LENGTH_STEP = 128
_SHOWN_PROBLEMS = 5
# Requests per slot; more than one, so that prompts are read before a slot is empty.
_ROUNDS_AHEAD = 2


class BatchJob(NamedTuple):
    """A file of prompts, a pair and how it decodes.

    Attributes:
      pair: of models, with the options of the command, for the lines that do not set them.
      target: the target.
      drafter: proposes tokens, or None.
      lines: of the input.
      output: the file of results.
      hashes: of the requests, by the numbers of their lines.
      grammar: of every text, or the one that counts the tokens of each, or None.
      encode: returns the tokens of a conversation, for lines with later turns.
      most_counted: the tokens that the second counts, 0 without it.
      date: that chat templates wrote into prompts, in ISO 8601, or None.
    """

    pair: ModelPair
    target: Model
    drafter: Drafter | None
    lines: list[PromptLine]
    output: OutputFile
    hashes: dict[int, str]
    grammar: Grammar | None = None
    encode: Encode = lambda prompt: []
    most_counted: int = 0
    date: str | None = None

    @property
    def options(self) -> argparse.Namespace:
        """Options of the command."""
        return self.pair.options


class _Clock:
    """The local time of a run, or of the earlier run that it continues.

    Args:
      first: the time of that earlier run, or None.

    Attributes:
      date: in ISO 8601 once this or the earlier run has read the time; None before.
    """

    def __init__(self, first: datetime.datetime | None) -> None:
        self._now = first or datetime.datetime.now().replace(microsecond=0)
        self.date = None if first is None else first.isoformat()

    def strftime(self, form: str) -> str:
        self.date = self._now.isoformat()
        return self._now.strftime(form)


def read_batch(pair: ModelPair, terminal: Any, exit_stack: contextlib.ExitStack) -> BatchJob:
    """Returns the job that the pair's options describe; the weights are read last.

    The output is locked until `exit_stack` closes.

    Raises:
      ValueError: for malformed lines, unless they are skipped; it names them by number. Also if the
        output has lines of other prompts or options, or another run writes to it. Also if it is not
        a regular file, or cannot be written.
    """
    pair, options = with_trained_k(pair), pair.options
    output = exit_stack.enter_context(OutputFile(options.output))
    clock = _Clock(output.date)
    warnings: list[str] = []

    def encode(prompt: Any) -> list[int]:
        is_chat = options.chat or not isinstance(prompt, str)
        if is_chat:
            alone = [{"role": "user", "content": prompt}]
            messages = alone if isinstance(prompt, str) else prompt
            prompt = render_chat(pair, messages, strftime_now=clock.strftime)
        ids, warning = encode_text(pair.tokenizer, prompt, chat=is_chat)
        warnings.extend([warning] if warning else [])
        return ids

    lines = _read_input(options, encode, terminal)
    if warnings:
        terminal.print_warning(f"{options.input}, {len(warnings)} of its lines: {warnings[0]}")
    grammar = read_grammar(pair)
    if options.json_schema is not None and any("min_tokens" in line.values for line in lines):
        raise ValueError("a line sets min_tokens, and --json-schema alone says where a text ends.")
    hashes = {line.number: _hash(pair, line, grammar) for line in lines}
    _prepare_output(options, output, hashes, terminal)
    most_counted = 0
    if options.json_schema is None:
        counts = [line.values.get("min_tokens", options.min_tokens or 0) for line in lines]
        grammar = count_grammar(pair, max(counts, default=0))
        most_counted = len(grammar.next_states) - 1 if grammar else 0
    if lines:
        size = {"num_requests": options.num_slots, "max_length": _capacity(pair, lines, encode)}
        report_memory(pair, terminal, **size)
    job = BatchJob(pair, *load_pair(pair), lines, output, hashes, grammar, date=clock.date)
    return job._replace(most_counted=most_counted, encode=encode)


def _read_input(options: argparse.Namespace, encode: Encode, terminal: Any) -> list[PromptLine]:
    """Returns the lines of the input; refuses malformed ones, or names those that are skipped."""
    unknown = [name for name in options.fields or () if name not in FIELDS]
    if unknown:
        hint = suggest(unknown[0], FIELDS)
        raise ValueError(
            f"--fields names {unknown[0]}, which is none of {', '.join(FIELDS)}.{hint}"
        )
    limit = _MAX_BYTES if os.path.isfile(options.input) else _MAX_BYTES_OF_STREAM
    lines, problems = read_lines(read_file(options.input, limit), encode, options.fields)
    if problems:
        shown = " ".join(problems[:_SHOWN_PROBLEMS])
        more = len(problems) - _SHOWN_PROBLEMS
        shown += f" And {more} more." if more > 0 else ""
        if not options.skip_malformed:
            raise ValueError(f"{options.input}: {shown} --skip-malformed leaves such lines out.")
        terminal.print_warning(f"{options.input}: {len(problems)} left out. {shown}")
    return lines


def _prepare_output(
    options: argparse.Namespace, output: OutputFile, hashes: dict[int, str], terminal: Any
) -> None:
    """Refuses an output of other requests; makes it ready for lines that it does not have."""
    for number, digest in hashes.items():
        if output.done.get(number, digest) != digest:
            raise ValueError(
                f"{options.output} has an output of line {number} of another prompt or with other "
                "options; name another --output, or remove it."
            )
    # Nothing is written to a file that has every line, which may be read-only.
    if not hashes or hashes.keys() - output.done.keys():
        output.prepare()
        if not output.is_locked:
            terminal.print_warning(
                f"{options.output} cannot be locked here; start no other run with this --output."
            )


def run_batch(job: BatchJob, terminal: Any) -> None:
    """Decodes the lines that the output lacks; lines with the most new tokens come first.

    A long text that began last would decode alone at the end.

    Raises:
      ValueError: if the output cannot be written.
    """
    if not job.lines:
        terminal.print_note(f"{job.options.input} has no line to decode.")
        return
    lines = [line for line in job.lines if line.number not in job.output.done]
    if not lines:
        terminal.print_note(f"{job.options.output} has every line already.")
        return
    lines.sort(key=functools.partial(_most_new_tokens, job.options), reverse=True)
    with terminal.spinner("compiling"):
        engine = _make_engine(job)
    num_turns = sum(1 + len(line.later_turns) for line in lines)
    with terminal.progress_bar(num_turns) as advance:
        _decode(job, engine, deque(lines), advance, terminal)


def _hash(pair: ModelPair, line: PromptLine, grammar: Grammar | None) -> str:
    """Returns a hash of all inputs of a request's tokens, except weights and shapes."""
    options, changed = pair.options, _changed_fields(pair.config)
    names = ("max_new_tokens", "temperature", "seed", "logprobs", *SAMPLING_OPTIONS)
    common = {name: getattr(options, name) for name in names}
    if options.min_tokens:
        common["min_tokens"] = options.min_tokens
    line_inputs = [line.number, line.token_ids, _stop(options, line), line.values]
    line_inputs += [line.later_turns] if line.later_turns else []
    # A rule's functions have no name that outlives a process; the option does.
    inputs = [describe_configs(pair), changed, options.rule, common, line_inputs]
    if options.json_schema is not None:
        assert grammar is not None
        tables = b"".join(np.asarray(table).tobytes() for table in grammar)
        inputs.append(hashlib.sha256(tables).hexdigest())
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def _changed_fields(config: SpeculativeConfig) -> dict[str, str]:
    """Returns the fields that are not at their defaults, so that a new field changes no hash.

    A rule is left out.

    Example:
      >>> _changed_fields(SpeculativeConfig(num_speculative_tokens=3))
      {'num_speculative_tokens': '3'}
    """
    fields = [field for field in dataclasses.fields(config) if field.name != "rule"]
    values = ((field, getattr(config, field.name)) for field in fields)
    return {field.name: repr(value) for field, value in values if value != field.default}


def _stop(options: argparse.Namespace, line: PromptLine) -> tuple[str, ...]:
    return options.stop if line.stop is None else line.stop


def _value(job: BatchJob, line: PromptLine, name: str) -> Any:
    return line.values.get(name, getattr(job.options, name))


def _make_engine(job: BatchJob) -> Engine:
    """Returns an engine with the fields that any line sets, and room for the longest text."""
    values = {name: getattr(job.options, name) for name in SAMPLING_OPTIONS}
    used = {name for name, value in values.items() if value is not None}
    used |= {name for line in job.lines for name in line.values if name in values}
    defaults = {x: SAMPLING_OPTIONS[x].off if values[x] is None else values[x] for x in used}
    return Engine(
        job.target,
        job.drafter,
        num_slots=job.options.num_slots,
        options=LoopOptions(
            max_length=_capacity(job.pair, job.lines, job.encode),
            num_logprobs=job.options.logprobs,
        ),
        sampling=SamplingParams(**defaults, grammar=job.grammar),
        config=job.pair.config,
        tokenizer=job.pair.tokenizer,
        max_waiting=_ROUNDS_AHEAD * job.options.num_slots,
    )


def _capacity(pair: ModelPair, lines: list[PromptLine], encode: Encode) -> int:
    """Returns the tokens of a slot: the longest text of a line that the target takes."""
    most: int = pair.target_config.max_position_embeddings
    lengths = [_longest_text(pair.options, line, encode) for line in lines]
    longest = max((length for length in lengths if length <= most), default=_LENGTH_STEP)
    return min(most, -(-longest // _LENGTH_STEP) * _LENGTH_STEP)


def _longest_text(options: argparse.Namespace, line: PromptLine, encode: Encode) -> int:
    """Returns the most tokens of a line's prompt and text, or of its whole conversation."""
    most = _most_new_tokens(options, line)
    while line.later_turns:
        line = line.next_turn({"text": ""}, encode)
    return len(line.token_ids) + most


def _most_new_tokens(options: argparse.Namespace, line: PromptLine) -> int:
    """Returns the most tokens of a line's text, or of all its answers."""
    num_new = line.values.get("max_new_tokens", options.max_new_tokens)
    return (1 + len(line.later_turns)) * int(num_new)


def _submit(job: BatchJob, engine: Engine, line: PromptLine) -> Request:
    sampling = {name: line.values[name] for name in SAMPLING_OPTIONS if name in line.values}
    if job.most_counted:
        sampling["grammar_state"] = job.most_counted - (_value(job, line, "min_tokens") or 0)
    seed, key = line.values.get("seed"), None
    if seed is None:
        # JAX_DEFAULT_PRNG_IMPL may name another implementation, which noise is not defined for.
        key = jax.random.key(job.options.seed, impl="threefry2x32")
        key = jax.random.fold_in(key, line.number)
    return engine.submit(
        np.array(line.token_ids, np.int32),
        key=key,
        seed=seed,
        max_new_tokens=_value(job, line, "max_new_tokens"),
        temperature=_value(job, line, "temperature"),
        eos_token_ids=job.pair.target_config.eos_token_ids,
        sampling=SamplingParams(**sampling),
        stop=_stop(job.options, line),
    )


def _decode(
    job: BatchJob, engine: Engine, lines: deque[PromptLine], advance: Any, terminal: Any
) -> None:
    running: dict[int, tuple[PromptLine, Request]] = {}
    num_requests = num_tokens = num_emitted = num_steps = 0
    begin = time.perf_counter()

    def describe() -> str:
        rate = num_tokens / (time.perf_counter() - begin)
        per_step = f", {num_emitted / num_steps:.2f} tokens per step" if num_steps else ""
        return f"{rate:.0f} tokens/s{per_step}"

    advance(describe())
    while lines or running:
        while lines and len(running) < _ROUNDS_AHEAD * engine.num_slots:
            line = lines.popleft()
            running[line.number] = line, _submit(job, engine, line)
        engine.step()
        for line, request in [pair for pair in running.values() if pair[1].finish_reason]:
            if line.later_turns and request.finish_reason != FinishReason.REFUSED:
                line = line.next_turn(_describe_turn(request), job.encode)
                running[line.number] = line, _submit(job, engine, line)
            else:
                job.output.append(_output_of(job, line, request))
                del running[line.number]
            num_requests += 1
            num_tokens += len(request.token_ids)
            if request.metrics is not None:
                num_steps += int(request.metrics.num_steps)
                num_emitted += int(request.metrics.num_emitted)
            advance(describe())
    terminal.print_note(
        f"{num_requests} requests, {num_tokens} tokens, {describe()}, "
        f"{engine.occupancy:.0%} of the slots in use"
    )


def _error_of(job: BatchJob, line: PromptLine, request: Request) -> str | None:
    """Returns a request's error; for a refused length it names the target's limit.

    The engine would name its own limit, which depends on the other lines.
    """
    num_new, num_prompt = _value(job, line, "max_new_tokens"), len(line.token_ids)
    most = job.pair.target_config.max_position_embeddings
    if request.finish_reason != FinishReason.REFUSED or num_prompt + num_new <= most:
        return request.error
    return (
        f"the prompt has {num_prompt} tokens and may get {num_new} new ones; together they may be "
        f"at most {most}, the target's max_position_embeddings."
    )


def _describe_turn(request: Request) -> dict[str, Any]:
    """Returns an answer of a conversation."""
    names = ("text", "token_ids", "finish_reason")
    return {name: getattr(request, name) for name in names}


def _output_of(job: BatchJob, line: PromptLine, request: Request) -> dict[str, Any]:
    """Returns a line of the output."""
    listed = None
    if job.options.logprobs is not None:
        columns: Any = map(np.array, zip(*request.top_logprobs, strict=True))
        top = TopLogprobs(*columns) if request.top_logprobs else None
        listed = [] if top is None else list_logprobs(job.pair.tokenizer, request.token_ids, top)
    metrics = {} if request.metrics is None else request.metrics._asdict()
    turns = [*line.answers, _describe_turn(request)] if line.messages else []
    return {
        "line": line.number,
        "id": line.id,
        "text": request.text,
        "token_ids": request.token_ids,
        "finish_reason": request.finish_reason,
        "error": _error_of(job, line, request),
        "num_prompt_tokens": len(line.token_ids),
        "logprobs": listed,
        "metrics": {name: count.tolist() for name, count in metrics.items()},
        "exact": is_exact(job.drafter, job.pair.config, _value(job, line, "temperature")),
        "date": job.date,
        **({"turns": turns} if turns else {}),
        "request_hash": job.hashes[line.number],
    }
