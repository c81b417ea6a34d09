"""Runs `specjax generate` on one prompt: reads it and a pair, streams its text, reports."""

import argparse
import json
import pathlib
from concurrent import futures
from typing import Any

from specjax import models
from specjax.cli.arguments import parse_sampling_options
from specjax.cli.generate import GenerateJob, begin_programs, compare_with_plain, stream_text
from specjax.cli.json_report import json_report
from specjax.cli.model_pair import (
    ModelPair,
    describe_configs,
    encode_prompt,
    load_pair,
    pair_shapes,
    read_grammar,
    with_trained_k,
)
from specjax.cli.processes import check_same_inputs, collective_errors, is_rank_zero
from specjax.config import SpeculativeConfig
from specjax.processing.sampling_params import SamplingParams

__all__ = ["read_job", "run_job"]


def read_job(
    options: argparse.Namespace,
    config: SpeculativeConfig,
    pair: ModelPair,
    text: str,
    terminal: Any,
    folder: pathlib.Path | None,
) -> GenerateJob:
    """Returns the job that the options describe.

    Weights are read last, while Python traces the programs, and while XLA compiles them. No spinner
    is shown: a long load shows a progress bar.

    Raises:
      ValueError: for a prompt, a grammar or a K that the pair cannot take, and for processes with
        different inputs.
    """
    with collective_errors(options):
        if options.chat:
            text = models.chat_prompt(pair.folder, [{"role": "user", "content": text}])
        room: Any = {"num_new_tokens": options.max_new_tokens, "option": "--max-new-tokens"}
        ids, warning = encode_prompt(pair, text, chat=options.chat, **room)
        terminal.print_warning(warning)
        sampling, grammar = parse_sampling_options(options), read_grammar(options, pair)
        if grammar is not None:
            sampling = (sampling or SamplingParams())._replace(grammar=grammar)
        config = with_trained_k(config, options, pair)
    job = GenerateJob(options, pair, config, text, ids, sampling, folder)
    inputs = {"config": config, "prompt_ids": ids, "sampling": sampling}
    inputs |= {"models": describe_configs(pair), "tokenizer": pair.tokenizer}
    check_same_inputs(options, inputs)
    with futures.ThreadPoolExecutor(1) as pool:
        weights = pool.submit(load_pair, pair)
        shapes = pair_shapes(pair)
        if shapes is not None:
            target, drafter = shapes
            programs = begin_programs(job._replace(target=target, drafter=drafter))
            job = job._replace(programs=programs)
        target, drafter = weights.result()
        return job._replace(target=target, drafter=drafter)


def run_job(job: GenerateJob, terminal: Any) -> None:
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
