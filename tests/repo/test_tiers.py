"""What `make quick` and `make kernels` take in CI, and that no test is left out of every target."""

import pathlib
import re
import xml.etree.ElementTree as xml
from typing import NamedTuple

import kernel_tests
import public_calls
import pytest
from slow_tests import KEPT_QUICK, name_of, name_of_case, read_list, seconds_of_case

pytestmark = pytest.mark.once

ROOT = pathlib.Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
# What `make test` left in CI, which runs it before these tests.
REPORT = ROOT / "build" / "ci" / "default.xml"
# Seconds of a processor. `make quick` may take 60, and about 6 of them are imports and collection,
# which no test counts. Alone in one process its tests took 43 to 48 on 2026-11-27. Of all of
# `make test` the kernels had a share of 0.21 by a clock that day.
QUICK_SECONDS, KERNEL_SHARE = 54, 0.25
_IN_KERNELS = re.compile(r"\[(.*-)?(interpret|triton)(-.*)?\]")


def quick_folders() -> tuple[str, ...]:
    [names] = re.findall(r"^QUICK = \$\(addprefix tests/,(.*)\)$", MAKEFILE, re.MULTILINE)
    return tuple(f"tests/{name}" for name in names.split())


def is_quick(name: str) -> bool:
    """Whether `make quick` runs a test, by its node id."""
    is_slow = name_of(name) in read_list()
    return name.startswith(quick_folders()) and not is_slow and not _IN_KERNELS.search(name)


def is_of_kernels(name: str) -> bool:
    """Whether a node id of `make test` is one of the kernels'."""
    return name.startswith("tests/pallas/") or bool(_IN_KERNELS.search(name))


def seconds_of(belongs) -> float:
    cases = xml.parse(REPORT).getroot().iter("testcase")
    return sum(seconds_of_case(case) for case in cases if belongs(name_of_case(case)))


def test_make_quick_takes_a_minute_of_a_processor_at_most():
    if not REPORT.exists():
        pytest.skip(f"{REPORT} is written by .ci/run")
    seconds = seconds_of(is_quick)
    assert seconds <= QUICK_SECONDS, (
        f"They took {seconds:.0f} s, more than {QUICK_SECONDS}: make tests cheaper, mark them "
        "`slow`, or list them by tests/support/slow_tests.py."
    )


def test_make_kernels_takes_a_quarter_of_make_test_at_most():
    if not REPORT.exists():
        pytest.skip(f"{REPORT} is written by .ci/run")
    share = seconds_of(is_of_kernels) / seconds_of(lambda name: True)
    assert share <= KERNEL_SHARE, (
        f"They took {share:.2f} of make test's seconds, more than {KERNEL_SHARE}: make tests "
        "cheaper, or mark them `checks`."
    )


def test_seconds_are_summed_over_the_cases_that_the_target_runs(monkeypatch, tmp_path):
    rows = {
        ("tests.core.test_noise", "test_cheap[xla]"): 1,
        ("tests.core.test_noise", "test_cheap[interpret-3]"): 20,
        ("tests.pallas.test_split", "test_kernel"): 300,
        ("tests.engine.test_engine", "test_engine"): 4000,
    }
    cases = "".join(
        f'<testcase classname="{folder}" name="{name}" time="9"><properties>'
        f'<property name="cpu_seconds" value="{seconds}"/></properties></testcase>'
        for (folder, name), seconds in rows.items()
    )
    report = tmp_path / "default.xml"
    report.write_text(f"<testsuite>{cases}</testsuite>")
    monkeypatch.setattr(f"{__name__}.REPORT", report)
    assert seconds_of(is_quick) == 1
    assert seconds_of(is_of_kernels) == 320


def quick_files():
    paths = [ROOT / name for name in quick_folders()]
    return [path for each in paths for path in ([each] if each.is_file() else each.rglob("*.py"))]


def test_make_quick_calls_every_public_function_and_class():
    names = public_calls.not_called(quick_files(), read_list())
    assert not names, f"No test of make quick calls {', '.join(names)}: add one of a few seconds."


def test_a_call_counts_where_a_quick_test_leads_to_it_and_expects_no_refusal(tmp_path, monkeypatch):
    path = tmp_path / "test_one.py"
    path.write_text("""
import pytest
import specjax
from specjax import generate as decode, step

VALUE = specjax.commit(1)

def helper():
    return decode(VALUE)

def test_quick():
    helper()
    with pytest.raises(ValueError):
        specjax.init()

@pytest.mark.parametrize("call", [lambda: specjax.unpad(1)])
def test_refusals(call):
    with pytest.raises(ValueError):
        call()

@pytest.mark.slow
def test_marked():
    step()

def test_listed():
    specjax.propose()
""")
    monkeypatch.setattr(public_calls, "TESTS", tmp_path / "tests")
    listed = {"test_one.py::test_listed"}
    assert list(public_calls.quick_tests(path, listed)) == ["test_quick", "test_refusals"]
    names = public_calls.not_called([path], listed)
    assert not {"specjax.generate", "specjax.commit", "specjax.Generation"} & set(names)
    assert {f"specjax.{name}" for name in ("init", "unpad", "step", "propose")} <= set(names)


def test_files_that_stay_quick_are_there_and_no_listed_test_is_of_one():
    assert all((ROOT / file).is_file() for file in KEPT_QUICK)
    assert not [name for name in read_list() if name.startswith(KEPT_QUICK)]


class Case(NamedTuple):
    """A case of a report as an item of pytest, with the kernels that it traced by its mark."""

    nodeid: str
    kernels: dict[str, str]

    @property
    def path(self):
        return ROOT / self.nodeid.partition("::")[0]

    def get_closest_marker(self, name):
        return self.kernels.get(name)


def cases_of_kernels():
    for case in xml.parse(REPORT).getroot().iter("testcase"):
        named = {one.get("name"): one.get("value") for one in case.iter("property")}
        kernels = {name: named[name] for name in ("interpret", "lowering") if name in named}
        if kernels:
            yield Case(name_of_case(case), kernels)


def kernels_of(module, modules_by_kernel):
    """Names of the kernels that lead to a module, or, of one that launches none, to its imports."""
    imported = kernel_tests.imports_of(kernel_tests.modules()[module])
    names = {name for name, found in modules_by_kernel.items() if module in found}
    return names or {name for name, found in modules_by_kernel.items() if imported & found}


def test_the_tests_of_each_kernel_file_run_one_of_its_kernels():
    """Those of make test alone are asked: of block and coupled sampling they lower a kernel."""
    if not REPORT.exists():
        pytest.skip(f"{REPORT} is written by .ci/run")
    cases, modules_by_kernel = list(cases_of_kernels()), kernel_tests.modules_of_kernels()
    left = []
    for module in kernel_tests.kernel_modules():
        traced = {
            kernel
            for case in kernel_tests.tests_of(module, cases)
            for kernels in case.kernels.values()
            for kernel in kernels.split()
        }
        if not traced & kernels_of(module, modules_by_kernel):
            left.append(module)
    assert not left, f"make kernels K=... runs no kernel of {', '.join(left)}."


def test_a_kernel_file_has_the_tests_that_name_it_or_else_those_of_its_importers():
    split, verify, lowered = (
        Case("tests/pallas/test_split.py::test_one", {"interpret": ""}),
        Case("tests/pallas/test_verify.py::test_one[interpret-small]", {"interpret": ""}),
        Case("tests/pallas/test_lowering.py::test_emit_tokens_lowers", {"lowering": ""}),
    )
    cases = [split, verify, lowered]
    assert kernel_tests.tests_of("specjax.pallas.split.proposals", cases) == [split]
    assert kernel_tests.tests_of("specjax.pallas.draft_statistics", cases) == [verify]
    assert kernel_tests.tests_of("specjax.pallas.emit_tokens", cases) == [lowered, verify]
    assert kernel_tests.kernel_modules("block/judge") == ["specjax.pallas.block.judge"]
    assert kernel_tests.kernel_modules("nothing") == []


def test_every_test_is_one_of_make_test_or_one_of_make_checks():
    """CI runs both: the tests of one mark, and all others but for folders that have the mark."""
    conftest = (ROOT / "conftest.py").read_text(encoding="utf-8")
    ignored = re.findall(r"--ignore=(\S+)", MAKEFILE)
    assert f'_CHECKS = ("{ignored[0]}/", "{ignored[1]}/")' in conftest
    assert len(ignored) == 2
    assert "-m 'not checks$(AND_MARKS)'" in MAKEFILE
    assert "-m 'checks$(AND_MARKS)'" in MAKEFILE
    pipeline = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert [pipeline.count(f"make {name} PYTHON=") for name in ("test", "checks")] == [2, 2]
