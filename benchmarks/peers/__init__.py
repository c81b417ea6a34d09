"""Compares the tokens that specjax and other samplers emit with the target's distribution.

`inputs` has the rows, the kinds of request and the target's distribution; `measure` what a case
records. One file for each peer turns a step of it into the distribution of its outcomes: by
enumeration, where the draws of its sampler can be given, else by samples. `python -m
benchmarks.peers` runs those whose packages are there; `make peers` installs them first.
"""
