"""`squadron status`: asks a server how it is, once or again and again."""

from __future__ import annotations

import json
import time

import httpx
from rich.console import Console
from rich.live import Live

from deploy.cli.client import client_for, server_url
from deploy.status.report import Condition, Report, read_report
from deploy.status.view import lines, table

WATCH_SECONDS = 1.0


def fetch(client: httpx.Client) -> Report:
    """Ask the server that `client` is for. A server that cannot be asked is a report too."""
    return look(client)[0]


def look(client: httpx.Client) -> tuple[Report, str]:
    """Return `fetch`'s report, and the text of /metrics where a router of ours gave it whole, else ""."""
    address = str(client.base_url).rstrip("/")
    try:
        ready = client.get("/ready")
        if ready.status_code == 401:
            return _unreachable(address, "it refuses the API key: give --api-key or SQUADRON_API_KEY"), ""
        body = ready.json()
        metrics = client.get("/metrics")
    except httpx.HTTPError as error:
        hint = "start one with `squadron serve demo`, or give its --url"
        return _unreachable(address, f"no server answers there ({error or type(error).__name__}); {hint}"), ""
    except ValueError:
        notice = "Serve answers there, but no router of the app does yet"
        return Report(address, Condition.NOT_READY, notice=notice), ""
    if not isinstance(body, dict) or "ready" not in body:
        return _unreachable(address, "what answers there is no squadron server"), ""
    text = metrics.text if metrics.status_code == 200 else ""
    report = read_report(address, body, text)
    return report, text if report.known else ""


def show_status(address: str, api_key: str | None, as_json: bool, watch: bool) -> int:
    """Print the report, until Ctrl-C if `watch`, and return the exit code: that of the last one."""
    console = Console(highlight=False, soft_wrap=False)
    with client_for(server_url(address), api_key) as client:
        report = fetch(client)
        if not watch:
            _print(report, console, as_json)
            return report.condition.value
        try:
            return _watch(client, report, console, as_json)
        except KeyboardInterrupt:
            return fetch(client).condition.value


def _watch(client: httpx.Client, report: Report, console: Console, as_json: bool) -> int:
    if as_json or not console.is_terminal:
        while True:
            _print(report, console, as_json)
            time.sleep(WATCH_SECONDS)
            report = fetch(client)
    with Live(table(report), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(WATCH_SECONDS)
            live.update(table(fetch(client)), refresh=True)


def _print(report: Report, console: Console, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report.public()), flush=True)
    elif console.is_terminal:
        console.print(table(report))
    else:
        print("\n".join(lines(report)), flush=True)


def _unreachable(address: str, notice: str) -> Report:
    return Report(address, Condition.UNREACHABLE, notice=notice)
