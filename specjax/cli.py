"""The `specjax` command: what was asked, checked once, then streamed and measured."""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import os
import pathlib
import platform
import re
import signal
import sys
from typing import Any, NoReturn

import jax

from specjax.config import SpeculativeConfig
from specjax.drafters import model_drafter, ngram_drafter
from specjax.session import Job, Run, compile_stream, measure, report, stream
from specjax.typing import Model

__all__ = ["main"]

_EXTRA = ("flax", "safetensors", "tokenizers", "rich")
_CONFIG = dataclasses.fields(SpeculativeConfig)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; `specjax generate --help` lists the options.")


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} came; it needs numbers with commas between, like 0.8,0.6,0.4"
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="specjax", description="Speculative decoding in JAX.", allow_abbrev=False)
    found = importlib.metadata.distributions(name="specjax")
    version = next((one.version for one in found), "(not installed)")
    parser.add_argument("--version", action="version", version=f"specjax {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser(
        "generate",
        help="continue a prompt, and say what speculation gained",
        description="Continues a prompt with a draft model and a target model, streaming, and "
        "measures it against plain decoding. Compilations are kept in $XDG_CACHE_HOME/specjax "
        "(~/.cache/specjax), unless JAX_ENABLE_COMPILATION_CACHE=0.",
        allow_abbrev=False,
    )
    _add_models(command.add_argument_group("prompt and models"))
    _add_decoding(command.add_argument_group("decoding"))
    _add_speculation(command.add_argument_group("speculation"))
    return parser


def _add_models(group: Any) -> None:
    group.add_argument("prompt", nargs="?", help="text to continue; - or nothing: standard input")
    group.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a file")
    group.add_argument(
        "--target", metavar="DIR", help="Hugging Face folder of a Llama; default: the embedded one"
    )
    group.add_argument(
        "--draft",
        metavar="DIR|ngram|none",
        help="a folder with the target's vocabulary, prompt lookup, or plain decoding; default: "
        "the embedded draft, which fits the embedded target only, and ngram with --target",
    )


def _add_decoding(group: Any) -> None:
    group.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    group.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 is greedy; default: 0.8"
    )
    group.add_argument("--seed", type=int, default=0, help="default: 0")
    group.add_argument("--json", action="store_true", help="print one JSON object, and no stream")
    group.add_argument(
        "--no-baseline", action="store_true", help="do not measure plain decoding beside it"
    )


def _add_speculation(group: Any) -> None:
    words = {
        "num_speculative_tokens": (int, "K", "draft tokens per step, 1 to 32"),
        "rejection_sample_method": (str, "METHOD", "standard or synthetic"),
        "draft_sample_method": (str, "METHOD", "probabilistic or greedy"),
        "synthetic_acceptance_rate": (float, "R", "mean of the rates, in [0, 1]"),
        "synthetic_acceptance_rates": (_numbers, "R,R,...", "rates per position, K of them"),
        "synthetic_acceptance_length": (float, "L", "mean tokens per step, in [1, K + 1]"),
    }
    for field in _CONFIG:
        option = "--" + field.name.replace("_", "-")
        if field.name in words:
            read, metavar, text = words[field.name]
            if field.default is not None:
                text += f"; default: {field.default}"
            group.add_argument(option, type=read, default=field.default, metavar=metavar, help=text)
        else:
            group.add_argument(option, action="store_true", help="noise in float64")


def _check(options: argparse.Namespace) -> SpeculativeConfig:
    if not (math.isfinite(options.temperature) and options.temperature >= 0):
        raise ValueError(f"--temperature is {options.temperature}; it needs to be finite and >= 0.")
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens is {options.max_new_tokens}; it needs to be >= 1.")
    if not 0 <= options.seed < 2**32:
        raise ValueError(f"--seed is {options.seed}; it needs to be in [0, 2**32).")
    if options.draft == "none" and options.rejection_sample_method == "synthetic":
        raise ValueError(
            "--draft is none and --rejection-sample-method synthetic; there is nothing to accept "
            "without drafts."
        )
    fields = {field.name: getattr(options, field.name) for field in _CONFIG}
    try:
        return SpeculativeConfig(**fields)
    except ValueError as error:
        names = rf"\b(?:{'|'.join(fields)})\b"
        said = re.sub(names, lambda name: "--" + name[0].replace("_", "-"), str(error))
        raise ValueError(said) from None


def _read_prompt(options: argparse.Namespace) -> str:
    given, file = options.prompt, options.prompt_file
    if given is not None and file is not None:
        raise ValueError("a prompt and --prompt-file came; it needs to be one of them.")
    if file is not None:
        source, data = file, pathlib.Path(file).read_bytes()
    elif given not in (None, "-"):
        source, data = "the prompt", given.encode(errors="surrogateescape")
    elif given is None and sys.stdin.isatty():
        raise ValueError(
            "no prompt came; give one as an argument, with --prompt-file, or on standard input."
        )
    else:
        source, data = "standard input", sys.stdin.buffer.read()
    try:
        text: str = data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{source} is not UTF-8 text.") from None
    if not text:
        raise ValueError("the prompt is empty; a model needs something to continue.")
    return text


def _load(options: argparse.Namespace) -> tuple[Model, Any, Any, Any]:
    """The target, its configuration and tokenizer, and the drafter."""
    from specjax import models

    folder = options.target or models.pretrained_folder("target")
    target, config = models.load(folder)
    tokenizer = models.load_tokenizer(folder)
    choice = options.draft or ("ngram" if options.target else models.pretrained_folder("draft"))
    if choice in ("ngram", "none"):
        return target, config, tokenizer, ngram_drafter() if choice == "ngram" else None
    draft, small = models.load(choice)
    words = models.load_tokenizer(choice).get_vocab()
    if small.vocab_size != config.vocab_size or words != tokenizer.get_vocab():
        raise ValueError(
            f"the draft {choice} and the target {folder} have different vocabularies "
            f"({small.vocab_size} and {config.vocab_size} tokens); a draft needs the target's, "
            "token for token."
        )
    return target, config, tokenizer, model_drafter(draft)


def _job(options: argparse.Namespace, config: SpeculativeConfig, text: str) -> Job:
    target, made, tokenizer, drafter = _load(options)
    ids = tokenizer.encode(text).ids
    longest = made.max_position_embeddings
    if not ids:
        raise ValueError("the prompt is empty in the target's tokens.")
    if len(ids) + options.max_new_tokens > longest:
        raise ValueError(
            f"the prompt has {len(ids)} tokens and --max-new-tokens is {options.max_new_tokens}; "
            f"the target has room for {longest} together."
        )
    if max(ids) >= made.vocab_size:
        raise ValueError(
            f"the prompt has token {max(ids)}, and config.json of the target a vocabulary of "
            f"{made.vocab_size}; tokenizer.json belongs to another model."
        )
    draft = options.draft or ("ngram" if options.target else "embedded")
    return Job(
        f"target {options.target or 'embedded'} · draft {draft}",
        target,
        drafter,
        tokenizer,
        text,
        ids,
        config=config,
        key=jax.random.key(options.seed),
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        eos_token_ids=made.eos_token_ids,
    )


def _keep_compilations() -> None:
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    try:
        base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        # Apart for each machine: code compiled for one processor may be wrong on the next.
        folder = base / "specjax" / platform.node()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _prepare(options: argparse.Namespace, scope: contextlib.ExitStack) -> tuple[Any, Any]:
    """The job and the terminal it is shown on; all that can be refused is refused here."""
    config = _check(options)
    text = _read_prompt(options)
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)} is missing; pip install 'specjax[flax]'.")
    from specjax.terminal import Terminal

    terminal = Terminal()
    if options.use_fp64_gumbel:
        scope.enter_context(jax.enable_x64(True))
    _keep_compilations()
    with terminal.working("loading the models"):
        return _job(options, config, text), terminal


def _generate(options: argparse.Namespace, job: Job, terminal: Any) -> Run:
    baseline = not options.no_baseline
    if options.json:
        run, timings = measure(job, baseline=baseline)
        print(json.dumps(report(job, run, timings)))
        return run
    with terminal.working("compiling"):
        compile_seconds = compile_stream(job)
    terminal.begin(job)
    run, timings = stream(job, terminal.show)
    terminal.end()
    if baseline:
        with terminal.working("measuring against plain decoding"):
            run, timings = measure(job, baseline=True)
    timings = timings._replace(compile_seconds=timings.compile_seconds + compile_seconds)
    terminal.summary(job, run, timings)
    return run


def _quit(*_: Any) -> NoReturn:
    # At once: an exception that passes through a compilation can crash the process.
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h\n")
    os._exit(130)


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Args:
      argv: arguments; None is those of the process.

    Returns:
      The exit code: 0, 1 when the target's logits turned invalid, 2 for what was refused, in
      a sentence on standard error, 130 when interrupted.
    """
    if argv is None:
        signal.signal(signal.SIGINT, _quit)
    try:
        with contextlib.ExitStack() as scope:
            try:
                options = _parser().parse_args(argv)
                job, terminal = _prepare(options, scope)
            except (ValueError, OSError) as error:
                print(f"specjax: {_sentence(error)}", file=sys.stderr)
                return 2
            if _generate(options, job, terminal).finish == "invalid_logits":
                print("specjax: the target's logits turned invalid.", file=sys.stderr)
                return 1
            return 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Python flushes standard output once more at its end, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename} cannot be read: {error.strerror}."
    return " ".join(str(error).split())
