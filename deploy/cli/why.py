"""`squadron why`: asks a server what a request had to wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote

import httpx
from rich.console import Group, RenderableType
from rich.text import Text

from deploy.cli.client import NO_SERVER, KeyRefusedError, NoAnswerError, ask, client_for, json_object, server_url
from deploy.cli.look import BAD, GOOD, console_for_reports, head, notice, pairs, plain_word, show, table_of

FOUND, NOTHING, UNREACHABLE, KEY_REFUSED = 0, 1, 2, 3  # exit codes
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


HEADS = {
    FOUND: ("FOUND", GOOD),
    NOTHING: ("UNKNOWN", BAD),
    UNREACHABLE: ("UNREACHABLE", BAD),
    KEY_REFUSED: ("KEY REFUSED", BAD),
}


def show_why(address: str, api_key: str | None, request_id: str, as_json: bool) -> int:
    """Print what the request waited for and return the exit code: `FOUND` or what came instead."""
    with client_for(server_url(address), api_key) as client:
        code, body = _asked(client, request_id)
    where = server_url(address)
    show(
        console_for_reports(),
        as_json,
        body,
        _picture(code, where, request_id, body),
        lines(code, where, request_id, body),
    )
    return code


def _asked(client: httpx.Client, request_id: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code, and what is known or, as `notice`, why nothing is."""
    try:
        answer = ask(client, f"/why/{quote(request_id, safe='')}")
        body = json_object(answer)
    except NoAnswerError as error:
        return KEY_REFUSED if isinstance(error, KeyRefusedError) else UNREACHABLE, {"notice": str(error)}
    except ValueError:
        body = None
    if body is not None and answer.status_code == httpx.codes.OK:
        return FOUND, body
    refusal = None if body is None else body.get("error")
    if not isinstance(refusal, dict) or "message" not in refusal:
        return UNREACHABLE, {"notice": NO_SERVER}
    code = NOTHING if answer.status_code == httpx.codes.NOT_FOUND else UNREACHABLE
    return code, {"notice": str(refusal["message"])}


def _notice(body: Mapping[str, Any]) -> str:
    silent = ", ".join(body.get("silent", ()))
    return str(body.get("notice", "")) or (f"no answer from {silent}: there may be more" if silent else "")


def rows(events: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Return what to show of each event: when it began, how long it lasted, where, and what it was."""
    ends = [*(float(event["at"]) for event in events[1:]), None]
    shown = []
    for event, end in zip(events, ends, strict=False):
        began = float(event["at"])
        lasted = "" if end is None else f"{end - began:.3f} s"
        when = datetime.fromtimestamp(began).strftime("%H:%M:%S.%f")[:-3]
        what = WORDS.get(event["what"], str(event["what"]))
        shown.append((when, lasted, event["replica"] or "router", f"{what}: {event['detail']}".removesuffix(": ")))
    return shown


def lines(code: int, address: str, request_id: str, body: Mapping[str, Any]) -> list[str]:
    """Return a line for the request and one for each wait, `name=value` after the first words."""
    word = plain_word(HEADS[code][0])
    waits = [
        " ".join(["wait", where, *pairs({"from": when, "for": lasted.replace(" ", ""), "what": what})])
        for when, lasted, where, what in rows(body.get("events", ()))
    ]
    return [" ".join([word, request_id, address, *pairs({"notice": _notice(body)})]), *waits]


def _picture(code: int, address: str, request_id: str, body: Mapping[str, Any]) -> RenderableType:
    word, style = HEADS[code]
    parts: list[RenderableType] = [head(word, style, address, title=request_id)]
    if "events" in body:
        table = table_of(("From", "For", "At"), fold=True)
        for row in rows(body["events"]):
            table.add_row(*map(Text, row))
        parts.append(table)
    if said := _notice(body):
        parts.append(notice(said))
    return Group(*parts)
