"""Random whole requests beside 31 streams: none slows them by more than twice, changes them, or finds a 5xx.

A short form of what `make fuzz-http` does for an hour.
"""

from __future__ import annotations

import pytest

from tests.bench.fuzz_http import Fuzz
from tests.e2e.harness import App


@pytest.mark.timeout(300)
@pytest.mark.parametrize("requests", [20, pytest.param(80, marks=pytest.mark.long)])
async def test_no_request_is_felt_by_its_neighbours(demo_app: App, requests: int) -> None:
    report = await Fuzz(demo_app, seconds=240, seed=20).run(range(requests))
    assert report.problems == []
    assert len(report.paces) == requests
    assert report.answers["200"] > requests / 10
    assert sum(count for status, count in report.answers.items() if status.startswith("4")) > requests / 10
