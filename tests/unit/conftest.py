"""Fixtures of unit tests."""

import pytest

from tests.unit.quotas_lab import Clock, set_clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of day by which quotas go: the library's clock and ours."""
    return set_clock(monkeypatch)
