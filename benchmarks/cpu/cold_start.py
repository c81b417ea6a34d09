"""Times the command in processes of its own: to the first text, to the end, and in its parts.

python -m benchmarks.cpu.cold_start --against ../before --out benchmarks/results/cpu_cold_start.json

`--against` names a checkout of another version, whose processes alternate with ours. Every round
begins with empty compilation caches, and with modules that are compiled to bytecode. The model has
random weights and the shapes of a Llama of 135M parameters; its tokenizer has a word for every
token.
"""

import argparse
import compileall
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from benchmarks import record

SIZES = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
SMALL = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
EVENTS = {
    "trace": "/jax/core/compile/jaxpr_trace_duration",
    "lowering": "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "compilation": "/jax/core/compile/backend_compile_duration",
}
CACHED = "/jax/compilation_cache/cache_hits"
# The child writes when each event ended and how long it took, as it ends.
CHILD = """
import atexit, importlib.util, json, sys, time
import jax
events = []
def record(event, seconds=0.0, **_):
    events.append((event, time.time() - seconds, time.time()))
jax.monitoring.register_event_duration_secs_listener(record)
jax.monitoring.register_event_listener(record)
path = sys.argv.pop(1)
atexit.register(lambda: json.dump(events, open(path, "w")))
# As the script of an installation does. Older versions begin with the package.
if importlib.util.find_spec("_specjax_command"):
    from _specjax_command import main
else:
    from specjax.cli import main
sys.exit(main())
"""


class Contender(NamedTuple):
    """A process: the version's folder, options, and number of tokens of the prompt.

    Attributes:
      tree: the checkout that it runs.
      cache: name of its compilation cache, which a round's first process of this name fills.
      options: of the command.
      num_prompt_tokens: length of the prompt.
    """

    tree: pathlib.Path
    cache: str
    options: tuple[str, ...]
    num_prompt_tokens: int


def contenders(against: pathlib.Path | None) -> dict[str, Contender]:
    """The processes of a round, in their order."""
    here, shown = pathlib.Path(__file__).parents[2], ("--max-new-tokens", "48")
    ours = {
        "now": Contender(here, "now", shown, 60),
        "now, again": Contender(here, "now", shown, 60),
        "now, another prompt": Contender(here, "now", ("--max-new-tokens", "41"), 23),
    }
    if against is None:
        return ours
    return ours | {
        "before, --no-baseline": Contender(against, "before", (*shown, "--no-baseline"), 60),
        "before": Contender(against, "before, compared", shown, 60),
    }


def write_model(folder: pathlib.Path, smoke: bool) -> None:
    """Writes a random Llama whose tokenizer has a word for every token."""
    import tokenizers

    from specjax.models import TransformerConfig, build, save

    config = TransformerConfig(**(SIZES | (SMALL if smoke else {})))
    words = {f"w{i}": i for i in range(config.vocab_size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    save(folder, build(config).params, config, tokenizer)


def run(
    contender: Contender, model: pathlib.Path, caches: pathlib.Path, number: int
) -> dict[str, Any]:
    """What one process took.

    Args:
      contender: what it runs.
      model: the model's folder.
      caches: folder of the round's compilation caches.
      number: of the round, which the seed follows.
    """
    events = caches / "events.json"
    prompt = " ".join(f"w{7 * i % 500}" for i in range(contender.num_prompt_tokens))
    options = ["--target", str(model), "--draft", "ngram", "--seed", str(number)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environ |= {"PYTHONPATH": str(contender.tree), "JAX_PLATFORMS": "cpu"}
    environ |= {"XDG_CACHE_HOME": str(caches / contender.cache)}
    start = time.perf_counter()
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", CHILD, str(events)),
            *("generate", prompt, *options, *contender.options),
        ],
        cwd=contender.tree,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    text = os.read(process.stdout.fileno(), 1)
    first = time.perf_counter() - start
    text += process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    end = time.perf_counter() - start
    if process.returncode or not text.strip():
        raise RuntimeError(f"{contender} ended with {process.returncode} and wrote {text!r}")
    spent = json.loads(events.read_text(encoding="utf-8"))
    return {
        "first_text_s": first,
        "end_s": end,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "num_programs": sum(event == EVENTS["compilation"] for event, _, _ in spent),
        "num_cached": sum(event == CACHED for event, _, _ in spent),
        **{
            f"{name}_s": length_of_union(
                (begun, ended) for event, begun, ended in spent if event == key
            )
            for name, key in EVENTS.items()
        },
    }


def length_of_union(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds within at least one span: traces lie in one another, compilations next to another."""
    total, last = 0.0, -float("inf")
    for begun, ended in sorted(spans):
        total += max(ended - max(begun, last), 0.0)
        last = max(last, ended)
    return total


def medians(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Median of each figure over the rounds."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def report(cases: dict[str, Any]) -> None:
    """Prints what the JSON holds, and the ratios to the other version."""
    for name, case in cases.items():
        median = case["median"]
        seconds = ", ".join(
            f"{part.replace('_', ' ')} {median[part + '_s']:.2f}"
            for part in ("first_text", "end", "trace", "lowering", "compilation", "cpu")
        )
        counted = f"{median['num_programs']:g} programs, {median['num_cached']:g} of them cached"
        print(f"{name}: {seconds} s, {counted}")
    for name in set(cases) & {"before, --no-baseline", "before"}:
        for part in ("first_text_s", "end_s"):
            ratio = cases["now"]["median"][part] / cases[name]["median"][part]
            print(f"now over {name}, {part}: {ratio:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=pathlib.Path, help="a checkout of another version")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, help="the JSON")
    parser.add_argument("--smoke", action="store_true", help="rehearse: a tiny model, no file")
    args = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {}
    processes = contenders(args.against and args.against.resolve())
    for tree in {contender.tree for contender in processes.values()}:
        # An installation has compiled it.
        compileall.compile_dir(tree / "specjax", quiet=1)
    with tempfile.TemporaryDirectory() as folder:
        model = pathlib.Path(folder) / "model"
        write_model(model, args.smoke)
        for number in range(1 if args.smoke else args.rounds):
            with tempfile.TemporaryDirectory() as caches:
                for name, contender in processes.items():
                    measured = run(contender, model, pathlib.Path(caches), number)
                    runs.setdefault(name, []).append(measured)
    cases = {name: {"median": medians(each), "runs": each} for name, each in runs.items()}
    report(cases)
    result = {"environment": record.environment(), "sizes": SIZES, "cases": cases}
    record.save(None if args.smoke else args.out, result)


if __name__ == "__main__":
    main()
