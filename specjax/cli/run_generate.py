"""Runs `specjax generate` on prompts: reads them and a pair, streams each text, reports."""

import json
import pathlib
from typing import Any

from specjax.cli.folders.pair_memory import report_memory
from specjax.cli.generate import (
    GenerateJob,
    begin_programs,
    compare_with_plain,
    load_models,
    stream_text,
)
from specjax.cli.json_report import json_report
from specjax.cli.model_pair import (
    ModelPair,
    describe_configs,
    encode_prompt,
    read_sampling,
    render_chat,
    with_trained_k,
)
from specjax.cli.processes import check_same_inputs, collective_errors, is_rank_zero
from specjax.decode.capacity import DEFAULT_CAPACITY


def read_jobs(
    pair: ModelPair, texts: list[str], terminal: Any, folder: pathlib.Path | None
) -> list[GenerateJob]:
    """Returns the job of each prompt; they share models and programs.

    Weights are read last, while Python traces the programs, and while XLA compiles them. No spinner
    is shown: a long load shows a progress bar.

    Raises:
      ValueError: for a prompt, a grammar or a K that the pair cannot take, and for processes with
        different inputs.
    """
    with collective_errors(pair.options):
        encoded = [_encode(pair, text, terminal) for text in texts]
        sampling, pair = read_sampling(pair), with_trained_k(pair)
        longest = max((ids for _, ids in encoded), key=len)
        job = GenerateJob(pair, "", longest, sampling, folder)
        report_memory(pair, terminal, num_requests=1, max_length=_capacity(job))
    if len(texts) > 1:
        job = job._replace(max_length=_capacity(job))
    inputs = {"models": describe_configs(pair), "config": pair.config, "sampling": sampling}
    inputs |= {"prompt_ids": [ids for _, ids in encoded], "tokenizer": pair.tokenizer}
    check_same_inputs(pair.options, inputs)
    job = load_models(job)
    if len(texts) > 1 and job.programs is None:
        job = job._replace(programs=begin_programs(job))
    return [job._replace(text=text, prompt_ids=ids) for text, ids in encoded]


def _encode(pair: ModelPair, text: str, terminal: Any) -> tuple[str, list[int]]:
    """Returns a prompt as the target is given it, text and tokens."""
    options = pair.options
    if options.chat:
        text = render_chat(pair, [{"role": "user", "content": text}])
    room: Any = {"num_new_tokens": options.max_new_tokens, "option": "--max-new-tokens"}
    ids, warning = encode_prompt(pair, text, chat=options.chat, **room)
    terminal.print_warning(warning)
    return text, ids


def _capacity(job: GenerateJob) -> int:
    """Returns tokens that the buffers of all prompts have room for, which share programs."""
    needed = len(job.prompt_ids) + job.options.max_new_tokens
    longest: int = job.pair.target_config.max_position_embeddings
    return min(longest, max(DEFAULT_CAPACITY, 1 << (needed - 1).bit_length()))


def run_jobs(jobs: list[GenerateJob], terminal: Any) -> None:
    """Runs one job after the other."""
    for job in jobs:
        _run_job(job, terminal)


def _run_job(job: GenerateJob, terminal: Any) -> None:
    """Decodes and prints a job's text and report; of several processes the first prints.

    Raises:
      FloatingPointError: if the target's logits turned invalid, after what was printed.
    """
    options, writes = job.options, is_rank_zero(job.options)
    streams = writes and not options.json
    shown = {"begin": terminal.print_prompt, "show": terminal.print_text} if streams else {}
    spinner = terminal.spinner
    result, timings = stream_text(job, spinner=spinner, warms_up=options.compare, **shown)
    if streams:
        terminal.end_line()
    if options.compare:
        timings = compare_with_plain(job, timings, spinner=spinner)
    if streams:
        terminal.print_summary(job, result, timings)
    elif writes:
        print(json.dumps(json_report(job, result, timings)))
    if result.finish == "invalid_logits":
        raise FloatingPointError("the target's logits turned invalid.")
