"""Goldens: what the public calls give, held while their signatures and files move.

`python -m frozen.goldens` runs every scenario and says which records moved and how; `--write`
records them in `goldens.json`. `scenarios` and `refusals` are data. `calls` makes each call that
they name, and nothing else calls the library: a new signature is ported there alone.
"""
