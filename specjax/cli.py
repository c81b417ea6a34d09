"""The `specjax` command: a prompt and two models are read, then streamed and measured."""

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import platform
import signal
import sys
from typing import Any, NoReturn

import jax

from specjax.config import SpeculativeConfig
from specjax.drafters import model_drafter, ngram_drafter
from specjax.options import read_options, read_sampling_options
from specjax.session import Job, Run, compile_stream, measure, report, stream
from specjax.typing import Drafter

__all__ = ["main"]

_EXTRA = ("flax", "safetensors", "tokenizers", "rich", "jinja2")


def _read_prompt(options: argparse.Namespace) -> str:
    given, file = options.prompt, options.prompt_file
    if file is not None:
        source, data = file, pathlib.Path(file).read_bytes()
    elif given not in (None, "-"):
        source, data = "the prompt", given.encode(errors="surrogateescape")
    elif given is None and sys.stdin.isatty():
        raise ValueError(
            "no prompt came; give one as an argument, with --prompt-file, or on standard input."
        )
    else:
        source, data = "standard input", _read_stdin()
    try:
        text: str = data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{source} is not UTF-8 text.") from None
    if not text:
        raise ValueError("the prompt is empty; a model needs something to continue.")
    return text


def _read_stdin() -> bytes:
    try:
        return sys.stdin.buffer.read()
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard input") from None


def _encode(tokenizer: Any, made: Any, text: str, options: argparse.Namespace) -> list[int]:
    """The prompt's tokens, for which the target has room."""
    max_new_tokens = options.max_new_tokens
    try:
        # A chat template has written the tokens that begin a text.
        ids: list[int] = tokenizer.encode(text, add_special_tokens=not options.chat).ids
    except Exception as error:  # The library raises a bare Exception.
        raise ValueError(f"the target's tokenizer cannot read the prompt ({error}).") from None
    longest = made.max_position_embeddings
    if not ids:
        raise ValueError("the prompt is empty in the target's tokens.")
    if len(ids) + max_new_tokens > longest:
        raise ValueError(
            f"the prompt has {len(ids)} tokens and --max-new-tokens is {max_new_tokens}; "
            f"the target has room for {longest} together."
        )
    if max(ids) >= made.vocab_size:
        raise ValueError(
            f"the prompt has token {max(ids)}, and config.json of the target a vocabulary of "
            f"{made.vocab_size}; tokenizer.json belongs to another model."
        )
    return ids


def _check_draft(choice: Any, folder: Any, words: dict[str, int]) -> None:
    """Refuses a draft model that does not have the target's tokens."""
    from specjax import models

    models.load_config(choice)
    # The heads may be padded to different sizes; what they have in common is what is spoken.
    own = models.load_tokenizer(choice).get_vocab()
    if own != words:
        raise ValueError(
            f"the draft {choice} and the target {folder} have different vocabularies "
            f"({len(own)} and {len(words)} tokens); a draft needs the target's tokenizer, token "
            "for token."
        )


def _job(options: argparse.Namespace, config: SpeculativeConfig, text: str, terminal: Any) -> Job:
    # Last what takes long: what can be refused is refused before weights are read.
    with terminal.working("reading the folders"):
        from specjax import models

        embedded = options.target is None
        folder = models.pretrained_folder("target") if embedded else options.target
        choice, draft = options.draft, options.draft
        if draft is None:
            choice = models.pretrained_folder("draft") if embedded else "ngram"
            draft = "embedded" if embedded else "ngram"
        made, tokenizer = models.load_config(folder), models.load_tokenizer(folder)
        if options.chat:
            text = models.chat_prompt(folder, [{"role": "user", "content": text}])
        if (options.logprobs or 0) > made.vocab_size:
            raise ValueError(
                f"--logprobs is {options.logprobs}; the target has {made.vocab_size} tokens."
            )
        ids = _encode(tokenizer, made, text, options)
        if choice not in ("ngram", "none"):
            _check_draft(choice, folder, tokenizer.get_vocab())
    # With a bar of their own, if they take long.
    drafter: Drafter | None = None
    if choice == "ngram":
        drafter = ngram_drafter()
    elif choice != "none":
        drafter = model_drafter(models.load(choice)[0])
    return Job(
        f"target {'embedded' if embedded else folder} · draft {draft}",
        models.load(folder)[0],
        drafter,
        tokenizer,
        text,
        ids,
        config=config,
        key=jax.random.key(options.seed),
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        eos_token_ids=made.eos_token_ids,
        sampling=read_sampling_options(options),
        num_logprobs=options.logprobs,
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
    if not os.access(folder, os.W_OK):
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _prepare(argv: list[str] | None, scope: contextlib.ExitStack) -> tuple[Any, Job, Any]:
    """Options, job, and the terminal it is shown on; all that can be refused is refused here."""
    options, config = read_options(argv)
    text = _read_prompt(options)
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)} is missing; pip install 'specjax[flax]'.")
    from specjax.terminal import Terminal

    terminal = Terminal()
    if options.use_fp64_gumbel:
        scope.enter_context(jax.enable_x64(True))
    _keep_compilations()
    return options, _job(options, config, text, terminal), terminal


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


def _run(argv: list[str] | None) -> int:
    with contextlib.ExitStack() as scope:
        try:
            options, job, terminal = _prepare(argv, scope)
        except (ValueError, OSError, RuntimeError) as error:
            return _say(error, 2)
        try:
            run = _generate(options, job, terminal)
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            return _say(error, 1)
    if run.finish == "invalid_logits":
        return _say(ValueError("the target's logits turned invalid."), 1)
    return 0


def _say(error: Exception, code: int) -> int:
    said = str(error) or "there is not enough memory."
    if isinstance(error, OSError) and error.filename is not None:
        said = f"{error.filename} cannot be read: {error.strerror}."
    elif isinstance(error, RuntimeError):
        # JAX says the rest in pages.
        said = said.split("\n")[0]
    print("specjax:", " ".join(said.split()), file=sys.stderr)
    return code


def _quit(*_: Any) -> NoReturn:
    # At once: an exception that passes through a compilation can crash the process.
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h\n")
    os._exit(130)


def _open_streams() -> None:
    """A process may be started without standard streams: then they are empty."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Args:
      argv: arguments; None is those of the process.

    Returns:
      The exit code: 0, 1 when the target's logits turned invalid or the output could not be
      written, 2 for what was refused, in a sentence on standard error, 130 when interrupted,
      141 when nobody reads the output any more.
    """
    _open_streams()
    if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _quit)
    try:
        try:
            return _run(argv)
        finally:
            # Here, where a failure is still ours, rather than at Python's end.
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        # Python flushes once more at its end, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 141
        return _say(ValueError(f"the output cannot be written: {error.strerror}."), 1)
