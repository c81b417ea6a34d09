"""`specjax sweep`: the fastest number K of drafted tokens per step for a pair.

Open `run_sweep` first: it loads the pair, calls the others and prints.

| module | what it holds |
|---|---|
| `arguments` | the options and their checks |
| `measure` | times of a step for every K = 0, 1, ..., at given acceptance |
| `inputs` | the data of the choice: the pair's acceptance, and the costs of steps |
| `choice` | the best K, and its certainty |
| `report`, `plot` | tables and sentences, JSON and a plot |

`specjax.cli.command` alone imports it, and `specjax.cli.arguments` its options.
"""
