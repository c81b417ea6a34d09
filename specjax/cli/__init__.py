"""The `specjax` command: `generate` and `sweep`.

Open `command` first: it parses the arguments and runs one of the two.

| module | what it holds |
|---|---|
| `arguments`, `speculation_arguments` | the options and their checks |
| `prompts` | prompts from arguments, files and standard input |
| `model_pair` | loads the target and the draft |
| `json_schema` | the grammar of a file with a JSON schema |
| `generate`, `token_text` | decodes one prompt, times it, makes text of tokens |
| `stream_programs`, `program_store` | what `generate` runs; what the next one reads |
| `batch` | decodes a file of prompts through the engine |
| `sweep` | measures every number of drafted tokens, K = 0, 1, ..., and chooses the best |
| `json_report` | the object of `--json`, and whether a text is exact |
| `terminal`, `streams` | output on a terminal; standard streams, errors and exit codes |
| `mesh_arguments`, `processes` | models over the devices of one process, or of several |

No other package imports this one.
"""

from specjax.cli.command import main

__all__ = ["main"]
