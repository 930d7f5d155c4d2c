"""What became of each test, on disk as soon as it is known: a run that was killed goes on where it stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

BEGAN, PASSED, FAILED, SKIPPED = "began", "passed", "failed", "skipped"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a test last. reason: of a failure, or why it was skipped. One that only began did not end."""

    test: str
    outcome: str
    seconds: float = 0.0
    reason: str = ""


def read(path: Path) -> dict[str, Outcome]:
    """Return what is known of each test. A last line that was cut off half-way is left out."""
    found: dict[str, Outcome] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            one = Outcome(**json.loads(line))
        except (ValueError, TypeError):
            continue
        found[one.test] = one
    return found


class Recorder:
    """A plugin of pytest: adds a line for each test that begins or ends, and runs none again that passed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reports: list[pytest.TestReport] = []
        self._began = 0.0

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what passed; what failed or did not end comes after what was never begun."""
        known = read(self._path)
        passed = [item for item in items if (one := known.get(item.nodeid)) and one.outcome == PASSED]
        if passed:
            config.hook.pytest_deselected(items=passed)
            items[:] = [item for item in items if item not in passed]
        items.sort(key=lambda item: item.nodeid in known)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Say that it is under way."""
        self._reports.clear()
        self._began = time.monotonic()
        self._write(Outcome(nodeid, BEGAN))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember what setup, test and teardown came to."""
        self._reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Say how it ended."""
        self._write(ended(nodeid, self._reports, time.monotonic() - self._began))

    def _write(self, outcome: Outcome) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")


def ended(test: str, reports: Sequence[pytest.TestReport], seconds: float) -> Outcome:
    """Return what the phases of a test come to together."""
    for report in reports:
        if report.failed:
            return Outcome(test, FAILED, seconds, _reason(report))
    for report in reports:
        if report.skipped:
            return Outcome(test, SKIPPED, seconds, _reason(report))
    return Outcome(test, PASSED, seconds)


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # file, line and reason of a skip
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else report.longreprtext).partition("\n")[0]
