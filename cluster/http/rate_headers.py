"""The `x-ratelimit-` headers as OpenAI sends them, and as its clients read them."""

from __future__ import annotations

import math

from cluster.admission.quotas import RateState, RateStates


def rate_headers(rates: RateStates) -> list[tuple[bytes, bytes]]:
    """Return limit, remaining and reset for the limits that the tenant has; source: OpenAI's rate limit guide."""
    headers: list[tuple[bytes, bytes]] = []
    for kind, state in (("requests", rates.requests), ("tokens", rates.tokens)):
        if state is not None:
            headers += _headers(kind, state)
    return headers


def duration(seconds: float) -> str:
    """Return a time as OpenAI writes it: `0s`, `20ms`, `7.66s`, `2m59.5s`."""
    if seconds < 1:
        millis = math.ceil(seconds * 1000)
        return f"{millis}ms" if millis else "0s"
    hundredths = math.ceil(seconds * 100)
    minutes, rest = divmod(hundredths, 6000)
    return f"{minutes}m{rest / 100:g}s" if minutes else f"{rest / 100:g}s"


def _headers(kind: str, state: RateState) -> list[tuple[bytes, bytes]]:
    values = {"limit": str(state.limit), "remaining": str(state.remaining), "reset": duration(state.reset)}
    return [(f"x-ratelimit-{name}-{kind}".encode(), value.encode()) for name, value in values.items()]
