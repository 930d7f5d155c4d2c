"""Every test of what calls say runs twice: against a router's own server, and through a gateway."""

from __future__ import annotations

import pytest

from tests.grpc_client import carrier


@pytest.fixture(params=[False, True], ids=["router", "gateway"])
def carried(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether calls come by way of a gateway."""
    monkeypatch.setattr(carrier, "gateway", request.param)
    return bool(request.param)
