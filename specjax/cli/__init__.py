"""The `specjax` command: `generate` and `sweep`.

`command` parses and runs, `arguments` and `sweep_arguments` are the options, `model_pair` loads
target and draft, `generate` decodes and streams, `sweep` measures which number of drafted tokens is
best. Open `command` first.

No other room imports this one.
"""

from specjax.cli.command import main

__all__ = ["main"]
