"""Fixtures of unit tests. What a bare machine lacks is imported only by the tests that use them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cluster.batch.server.store import Store
    from tests.cluster.admission.quotas_lab import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of day by which quotas go: the library's clock and ours."""
    from tests.cluster.admission.quotas_lab import set_clock

    return set_clock(monkeypatch)


@pytest.fixture(params=["directory", "url"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where a store keeps what it has."""
    import fsspec

    if request.param == "directory":
        yield str(tmp_path / "kept")
        return
    url = f"memory://kept-{tmp_path.name}"
    yield url
    files, path = fsspec.url_to_fs(url)
    if files.exists(path):
        files.rm(path, recursive=True)


@pytest.fixture
def store(place: str) -> Store:
    """A store there."""
    from cluster.batch.server.root import open_root
    from cluster.batch.server.store import Store

    return Store(open_root(place), 1 << 20)
