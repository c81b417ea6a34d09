"""A plugin of pytest that writes what became of each test, and which `specjax` was tested."""

import json
import os
import pathlib

_reports = []


def pytest_runtest_logreport(report):
    message = ""
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        message = (crash.message if crash else str(report.longrepr)).splitlines()[0]
    _reports.append((report.nodeid, report.when, report.outcome, message))


def pytest_sessionfinish(session, exitstatus):
    import specjax

    found = pathlib.Path(specjax.__file__).resolve()
    assert session.config.rootpath.resolve() in found.parents, f"{found} was tested instead."
    told = {"exit_status": int(exitstatus), "reports": _reports}
    pathlib.Path(os.environ["SPECJAX_MUTATION_OUTCOMES"]).write_text(json.dumps(told))
