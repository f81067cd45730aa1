# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that writes each outcome at once: what has run is known even if a later test ends the process."""

import json
import os
from collections.abc import Generator
from typing import Any

import pytest

from benchmarks.gpu_report import OUTCOMES


def _write(**outcome: Any) -> None:
    with open(os.environ[OUTCOMES], "a", encoding="utf-8") as file:
        file.write(json.dumps(outcome) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    """Writes that a test begins."""
    _write(test=nodeid, outcome="started")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Writes how a test ended, and on which row of the table of strategies it ran."""
    report = yield
    if report.when == "call" or not report.passed:
        row = getattr(item, "callspec", None) and item.callspec.params.get("strategy")
        place = report.longrepr if isinstance(report.longrepr, tuple) else ("", 0, report.longreprtext)
        text = place[2].removeprefix("Skipped: ")
        _write(test=report.nodeid, outcome=report.outcome, row=row, text=text)
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Writes why a file could not be read."""
    if report.failed:
        _write(test=report.nodeid, outcome="failed", row=None, text=report.longreprtext)
