"""How the commands talk to a server over HTTP."""

from __future__ import annotations

import httpx


def client_for(url: str, api_key: str | None) -> httpx.Client:
    """Return a client for the server at `url` that shows the key, if there is one."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.Client(base_url=url, headers=headers, timeout=5.0, trust_env=False)


def is_guarded(client: httpx.Client) -> bool:
    """Whether what stands before the server tells clients of dead routers; True where that is not known."""
    try:
        body = client.get("/ready").json()
    except (httpx.HTTPError, ValueError):
        return True
    return not isinstance(body, dict) or body.get("guarded") is not False
