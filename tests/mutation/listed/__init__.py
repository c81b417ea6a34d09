"""The mutations, by what they are of: one file a topic."""

import importlib
import pathlib

from ..mutation import Mutation

# `tests` has names of tests that several topics share.
_TOPICS = sorted(
    path.stem
    for path in pathlib.Path(__file__).parent.glob("*.py")
    if path.stem not in ("__init__", "tests")
)

MUTATIONS: tuple[Mutation, ...] = tuple(
    mutation
    for topic in _TOPICS
    for mutation in importlib.import_module(f"{__name__}.{topic}").MUTATIONS
)
