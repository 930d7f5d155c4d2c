"""`squadron why`: asks a server what a request had to wait for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.cli.client import client_for, server_url

FOUND, NOTHING, UNREACHABLE = 0, 1, 2  # exit codes
WORDS = {
    "turn": "waits for its tenant's turn",
    "let_in": "it is its turn",
    "replica": "waits for a replica",
    "migration": "goes on elsewhere",
    "sent": "is sent",
    "done": "done",
    "grammar": "waits for its grammar",
    "queue": "waits in the replica's queue",
    "budget": "waits for a step's token budget",
    "slots": "waits for a place in the batch",
    "blocks": "waits for KV blocks",
    "preemption": "preempted, waits to be computed again",
    "runs": "runs",
    "ended": "ended",
}


def show_why(address: str, api_key: str | None, request_id: str, as_json: bool) -> int:
    """Print what the request waited for and return the exit code: `FOUND`, `NOTHING` or `UNREACHABLE`."""
    console = Console(highlight=False, soft_wrap=True)
    with client_for(server_url(address), api_key) as client:
        try:
            answer = client.get(f"/why/{quote(request_id, safe='')}")
            body = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            console.print(
                f"no squadron server answers at {address} ({error or type(error).__name__}); give its --url"
            )
            return UNREACHABLE
    if answer.status_code != 200:
        console.print(Text(_refusal(body)))
        return NOTHING if answer.status_code == 404 else UNREACHABLE
    if as_json:
        print(json.dumps(body))
    else:
        _print(body, console)
    return FOUND


def lines(events: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Return what to show of each event: when it began, how long it lasted, where, and what it was."""
    ends = [float(event["at"]) for event in events[1:]]
    shown = []
    for event, end in zip(events, [*ends, None], strict=True):
        began = float(event["at"])
        lasted = "" if end is None else f"{end - began:.3f} s"
        when = datetime.fromtimestamp(began).strftime("%H:%M:%S.%f")[:-3]
        what = WORDS.get(event["what"], str(event["what"]))
        shown.append((when, lasted, event["replica"] or "router", f"{what}: {event['detail']}".removesuffix(": ")))
    return shown


def _print(body: Mapping[str, Any], console: Console) -> None:
    rows = lines(body["events"])
    if not console.is_terminal:
        for row in rows:
            print("\t".join(row))
    else:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("From", "For", "At", ""):
            table.add_column(name, no_wrap=bool(name), justify="right" if name == "For" else "left")
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)
    if body["silent"]:
        console.print(Text(f"no answer from {', '.join(body['silent'])}: there may be more"))


def _refusal(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error["message"]) if isinstance(error, dict) and "message" in error else "that is no squadron server"
