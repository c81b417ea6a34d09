"""`specjax sweep`: the fastest number K of drafted tokens per step for a pair.

Open `run_sweep` first: it loads the pair, calls the others and prints.

| module | contents |
|---|---|
| `measure` | the pair's acceptance, and times of a step for every K = 0, 1, ... |
| `choice` | the best K, and its certainty |
| `report` | tables and sentences, JSON and a plot |
| `plot_path` | whether the plot's file can be written; `arguments` asks |

`specjax.cli.command` alone imports the others.
"""
