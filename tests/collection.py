"""In which order tests run, in which worker, and what is said of those that did not run."""

from __future__ import annotations

import gc
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent


def pytest_collection() -> None:
    """Look for no garbage meanwhile: nearly all that is made stays until the end."""
    gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    """Begin elsewhere in each worker: what one has compiled, the others find compiled."""
    report = yield
    if collector.path == TESTS and isinstance(collector, pytest.Directory):
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
        begin = worker * len(report.result) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        report.result = [*report.result[begin:], *report.result[:begin]]
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run last what can be given to workers test by test, so that they end together."""
    items.sort(key=lambda item: (item.path.stem in SPREAD, item.path))


def pytest_collection_finish() -> None:
    """Never again look for garbage among what the imports and the collected tests left."""
    gc.enable()
    gc.freeze()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Let go of a module's garbage at its end: open connections hang on some of it."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name what was skipped, and why, with how many tests: nobody asks for what is not shown."""
    reasons = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", ()))
    if reasons:
        terminalreporter.write_sep("=", f"skipped: {reasons.total()}")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:5}  {reason}")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test, or a whole file of them, was skipped."""
    why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    whole = f"all of {report.nodeid}: " if isinstance(report, pytest.CollectReport) else ""
    return whole + why.removeprefix("Skipped: ")


SPREAD = ("test_pickle_zoo", "test_verify_mutation", "test_disk_faults")
"""Modules of many tests that share little: what evens out the workers at the end."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a module's tests in one worker, so that what they share is made once."""
    from xdist.scheduler import LoadScopeScheduling

    class Modules(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.partition("::")[0]
            return nodeid if Path(module).stem in SPREAD else module

    config.option.loadscopereorder = False  # it would begin with the modules of most tests
    return Modules(config, log) if config.getvalue("dist") == "load" else None
