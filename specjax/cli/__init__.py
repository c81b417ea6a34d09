"""The `specjax` command: `generate` and `sweep`.

Open `command` first: it parses the arguments and runs one of the two.

| module | what it holds |
|---|---|
| `arguments`, `sweep_arguments` | the options and their checks |
| `prompts` | prompts from arguments, files and standard input |
| `model_pair` | loads the target and the draft |
| `generate`, `stream_programs`, `token_text` | decodes one prompt, times it, makes text of tokens |
| `sweep`, `sweep_measure` | measures every number of drafted tokens, K = 0, 1, ... |
| `sweep_inputs` | measures what K is chosen by: acceptance, and the costs of steps |
| `sweep_choice`, `sweep_report`, `sweep_plot` | chooses the best K and reports it |
| `terminal` | what appears on a terminal |

No other package imports this one.
"""

from specjax.cli.command import main

__all__ = ["main"]
