"""The lists of mutations fit the sources, the tests and the table; what a run says is read right.

The mutations themselves are run by `python -m tests.mutation`, which takes most of an hour.
"""

import collections

import pytest
from mutation.listed import MUTATIONS
from mutation.mutation import ROOT, Mutation, find_test, mutated_file, source_of
from mutation.operated import change_text, read_seen
from mutation.operators import changes
from mutation.run import verdict
from mutation.table import TABLE, counts, read_table

pytestmark = pytest.mark.once

COUNTED = [mutation for mutation in MUTATIONS if not mutation.equivalent]
# What a room says of itself, and sizes that change no token.
NO_CODE = ("pallas.__init__", "pallas.kernel_config", "models.decoder.pallas.__init__")
LISTED = (
    *(f"core.{name}" for name in ("acceptance", "residual", "noise", "gumbel_max", "bisection")),
    "core.truncation",
    *(f"samplers.{name}" for name in ("reference.verify", "reference.next_token", "drafts")),
    *(f"samplers.trees.{name}" for name in ("tree", "walk", "traverse", "siblings", "verify_tree")),
    *(f"decode.{name}" for name in ("propose", "drafters", "step", "commit")),
    *(f"decode.{name}" for name in ("metrics", "logprobs")),
    *(f"processing.{name}" for name in ("logit_rules", "logit_cutoff", "cutoff_xla", "grammar")),
    "theory.acceptance_rates",
    *(
        f"{room}.{path.stem}"
        for room in ("pallas", "models.decoder.pallas")
        for path in sorted((ROOT / "specjax" / room.replace(".", "/")).glob("*.py"))
        if f"{room}.{path.stem}" not in NO_CODE
    ),
)


def test_every_mutation_is_of_a_place_that_is_there_once_and_leaves_a_program():
    for mutation in MUTATIONS:
        path, text = mutated_file(ROOT, mutation)
        compile(text, str(path), "exec")


def test_every_mutation_names_tests_that_are_there_or_an_argument():
    for mutation in MUTATIONS:
        assert mutation.why, mutation
        assert bool(mutation.killed_by) != bool(mutation.equivalent), mutation
        for test in mutation.killed_by:
            find_test(ROOT, test)
    assert len(set(MUTATIONS)) == len(MUTATIONS)


@pytest.mark.parametrize("module", LISTED)
def test_every_module_that_decides_tokens_has_three_mutations(module):
    names = [*(m.function for m in COUNTED), *(row.function for row in read_seen())]
    assert sum(name.startswith(f"specjax.{module}.") for name in names) >= 3


def test_the_table_says_of_every_mutation_which_test_sees_it():
    """Where it does not, `python -m tests.mutation` writes it anew."""
    table = (ROOT / "tests" / "mutation" / TABLE).read_text()
    assert table.splitlines()[2].startswith(counts(MUTATIONS, len(read_seen())))
    for mutation, seen in read_table(table, MUTATIONS):
        if mutation.equivalent:
            assert seen.startswith("no test: ")
        else:
            named = [seen == test or seen.startswith(f"{test}[") for test in mutation.killed_by]
            assert any(named), f"{mutation.function}: {mutation.pattern!r} is {seen}"


def report(when, outcome, message="a message"):
    return ["tests/test_x.py::test_y[1]", when, outcome, message]


@pytest.mark.parametrize(
    ("status", "reports", "says"),
    [
        (1, [report("setup", "passed"), report("call", "failed")], "killed"),
        (0, [report("setup", "passed"), report("call", "passed")], "survived"),
        (1, [report("call", "failed", "NameError: name 'jnp' is not defined")], "broken"),
        # A fixture that fails, a test that is skipped, a module that cannot be imported.
        (1, [report("setup", "failed")], "broken"),
        (0, [report("setup", "skipped")], "broken"),
        (2, [], "broken"),
        (4, [report("call", "passed")], "broken"),
    ],
)
def test_only_a_test_that_fails_kills(status, reports, says):
    told = {"exit_status": status, "reports": reports, "output": ""}
    assert verdict(told, ["tests/test_x.py::test_y"]).verdict == says


@pytest.mark.parametrize(
    ("function", "pattern", "words"),
    [
        ("specjax.core.acceptance.accept", "u", "accept is defined 0 times"),
        ("specjax.core.acceptance.log_ratio", "target_logprob", "occurs 3 times"),
        ("specjax.core.acceptance.accept_greedy", "draft_logprob", "occurs 0 times"),
        ("elsewhere.accept_greedy", "u", "no module"),
    ],
)
def test_a_mutation_of_nothing_or_of_several_places_is_refused(function, pattern, words):
    with pytest.raises(LookupError, match=words):
        mutated_file(ROOT, Mutation(function, pattern, "token"))


def test_a_function_is_found_with_its_decorators_and_inside_others():
    path, first, last = source_of(ROOT, "specjax.core.noise.threefry2x32")
    lines = path.read_text().splitlines()[first:last]
    assert lines[0].startswith("@functools.partial(jax.jit")
    assert lines[-1] == "    return x0, x1"
    _, first, last = source_of(ROOT, "specjax.pallas.cutoff.queries.search_in_memory.sums_above")
    outer = source_of(ROOT, "specjax.pallas.cutoff.queries.search_in_memory")
    assert outer[1] < first < last < outer[2]


def changed(tmp_path, body):
    """The versions that operators make of a function, as expressions before and after."""
    path = tmp_path / "specjax" / "one.py"
    path.parent.mkdir()
    path.write_text(f"def f(a, b):\n    {body}\n")
    return {change_text(change) for change in changes(tmp_path, "specjax.one.f")}


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("return a < b", {"a < b -> a <= b", "a < b -> a > b"}),
        ("return a + b", {"a + b -> a - b", "a + b -> a", "a + b -> b"}),
        ("return a and b", {"a and b -> a or b", "a and b -> a", "a and b -> b"}),
        ("return not a", {"not a -> a"}),
        ("return a if b else f", {"a if b else f -> a", "a if b else f -> f"}),
        ("return [True, 7]", {"True -> False", "7 -> 0", "7 -> 1", "7 -> 6", "7 -> 8"}),
        ("return max(a, b)", {f"max(a, b) -> {x}" for x in ("min(a, b)", "a", "b")}),
        (
            "return np.where(a, b, f)",
            {f"np.where(a, b, f) -> {x}" for x in ("b", "f", "np.where(a, f, b)")},
        ),
        ("return f(a, b=b)", {"f(a, b=b) -> f(a)"}),
        ('raise ValueError(f"{a + b} is not {b}")', set()),
    ],
)
def test_operators_make_one_change_each(tmp_path, body, wanted):
    assert changed(tmp_path, body) == wanted


def test_operators_keep_the_rest_of_the_file_and_make_programs(tmp_path):
    changed(tmp_path, "return (a\n        + b)")
    for change in changes(tmp_path, "specjax.one.f"):
        compile(change.text, "one.py", "exec")
        assert change.text.startswith("def f(a, b):\n    return (")


def test_each_version_of_the_operators_table_is_made_once_and_names_tests_that_are_there():
    """A line whose change is not there any more has lost its function, or its expression."""
    seen = read_seen()
    made = {
        function: collections.Counter(change_text(change) for change in changes(ROOT, function))
        for function in {row.function for row in seen}
    }
    for row in seen:
        assert made[row.function][row.change] == 1, row
        assert row.tests, row
        for test in row.tests:
            find_test(ROOT, test)
    assert len({(row.function, row.change) for row in seen}) == len(seen)
