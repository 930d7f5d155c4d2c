"""How the commands reach a server: its address, its key, and what it streams."""

from __future__ import annotations

from typing import Any

import httpx

from engine.errors import SquadronError

DONE = "[DONE]"  # data of the last event of a stream


def server_url(address: str) -> str:
    """Return the base URL for an address as people write it: without a scheme, with a `/` or `/v1` at its end."""
    url = address if "://" in address else f"http://{address}"
    return url.rstrip("/").removesuffix("/v1")


def key_headers(api_key: str | None) -> dict[str, str]:
    """Return the headers that carry the key."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def client_for(url: str, api_key: str | None) -> httpx.Client:
    """Return a client for a server of our own: never by way of the proxies that the environment names."""
    return httpx.Client(base_url=url, headers=key_headers(api_key), timeout=5.0, trust_env=False)


REFUSED_KEY = "it refuses the API key: give --api-key or SQUADRON_API_KEY"
NO_SERVER = "what answers there is no squadron server"


class NoAnswerError(SquadronError):
    """A server cannot be asked; the sentence says why and what to do."""


class KeyRefusedError(NoAnswerError):
    """A server answers, and not with this key."""


def ask(client: httpx.Client, path: str) -> httpx.Response:
    """Return the answer to a GET. Raises `NoAnswerError` where nobody answers, `KeyRefusedError` with no good key."""
    try:
        answer = client.get(path)
    except httpx.HTTPError as error:
        hint = "start one with `squadron serve demo`, or give its --url"
        raise NoAnswerError(f"no server answers there ({error or type(error).__name__}); {hint}") from error
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        raise KeyRefusedError(REFUSED_KEY)
    return answer


def json_object(answer: httpx.Response) -> dict[str, Any] | None:
    """Return the object that an answer holds, None where it is JSON of another kind.

    Raises `ValueError` where it is no JSON: that is a proxy's own.
    """
    body = answer.json()
    return body if isinstance(body, dict) else None


def event_data(line: str) -> str | None:
    """Return the data in a line of a server-sent event stream, None in any other line."""
    return line.removeprefix("data:").strip() if line.startswith("data:") else None


def is_guarded(client: httpx.Client) -> bool:
    """Whether what stands before the server informs clients of dead routers; True where that is not known."""
    try:
        body = client.get("/ready").json()
    except (httpx.HTTPError, ValueError):
        return True
    return not isinstance(body, dict) or body.get("guarded") is not False
