"""Random whole requests beside 31 streams: none slows them by more than twice, changes them, or finds a 5xx.

A minute of what `make fuzz-http` does for an hour.
"""

from __future__ import annotations

import pytest

from tests.bench.fuzz_http import Fuzz
from tests.e2e.harness import App


@pytest.mark.timeout(300)
async def test_no_request_is_felt_by_its_neighbours(demo_app: App) -> None:
    report = await Fuzz(demo_app, seconds=60, seed=20).run()
    assert report.problems == []
    assert len(report.paces) > 20
    assert report.answers["200"] > 5
    assert sum(count for status, count in report.answers.items() if status.startswith("4")) > 5
