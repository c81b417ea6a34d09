"""Small wrong versions of the library, and the tests that see each of them.

    python -m tests.mutation [names] [--again]

applies the mutations whose dotted name begins with one of the names, one at a time, to a copy of
the tree, runs the tests that are named with each, and writes `table.md`. `listed` holds the
mutations; `mutation` finds what they change; `run` makes the copies. No ordinary run of the tests
does this, only `tests/repo/test_mutation_tool.py`, which checks that the lists fit the sources.
"""
