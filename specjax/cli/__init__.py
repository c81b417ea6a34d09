"""The `specjax` command: `generate`, `chat` and `sweep`.

Open `command` first: it parses the arguments and runs one of them.

| module | contents |
|---|---|
| `option_table` | options as tables: how each is parsed, its limits, its help text, close matches |
| `arguments`, `speculation_arguments` | the options and their checks |
| `prompts` | prompts from arguments, files and standard input |
| `folders` | names of the hub, defaults and memory: what is known before weights are read |
| `model_pair` | loads the target and the draft, encodes prompts, makes the grammar of a schema |
| `run_generate`, `generate` | reads one prompt's job; decodes and times it |
| `stream_programs`, `program_store` | what `generate` runs; what the next one reads |
| `chat` | answers the turns of a conversation, each from the caches of those before |
| `batch` | decodes a file of prompts through the engine |
| `sweep` | measures every number of drafted tokens, K = 0, 1, ..., and chooses the best |
| `json_report` | the object of `--json`, and whether a text is exact |
| `terminal`, `streams` | output on a terminal; standard streams, errors and exit codes |
| `processes` | models over the devices of one process, or of several |

No other package imports this one.
"""

from specjax.cli.command import main

__all__ = ["main"]
