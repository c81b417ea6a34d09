"""Compares the tokens that specjax and other samplers emit with the target's distribution.

`inputs` has the rows, the kinds of request and the target's distribution; `measure` the record of a
case. One file for each peer computes the distribution of a step's outcomes: by enumeration if the
draws of its sampler can be given, else by samples. `python -m benchmarks.peers` runs those whose
packages are there; `make peers` installs them first.
"""
