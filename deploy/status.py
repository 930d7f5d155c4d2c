"""`squadron status`: what a server says of itself, read over HTTP alone, as a table, as plain lines or as JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deploy.cli.client import NO_SERVER, KeyRefusedError, NoAnswerError, ask, client_for, json_object, server_url
from deploy.cli.look import BAD, GOOD, console_for_reports, head, notice, pairs, plain_word, share_bar, show, table_of

WAITING = "squadron_tenant_requests_queued"
MIGRATIONS = "squadron_migrations_total"
FOR_ADMINS = "this key is shown no more than whether the server is ready: give that of an admin, or of --metrics-key"


class Condition(Enum):
    """How a server is; the value is the exit code of `squadron status`."""

    READY = 0
    NOT_READY = 1
    UNREACHABLE = 2
    KEY_REFUSED = 3

    @property
    def told(self) -> bool:
        """Whether a router of ours said how it is."""
        return self in (Condition.READY, Condition.NOT_READY)


@dataclass(frozen=True, slots=True)
class ReplicaLine:
    """One replica, as in `states` of /ready. share: of the phase that is done; like kv_usage 0 to 1.

    Figures are None where it does not serve.
    """

    name: str
    state: str
    model: str = ""
    phase: str = ""
    share: float | None = None
    seconds: float | None = None
    reason: str = ""
    failed_starts: int = 0
    next_try: float | None = None
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    sleep_level: int | None = None


@dataclass(frozen=True, slots=True)
class StatusReport:
    """One server. `notice`: what is wrong, in a sentence. queued: requests that wait in the router that answered."""

    address: str
    condition: Condition
    models: tuple[str, ...] = ()
    version: str = ""
    app: str = ""
    app_status: str = ""
    routers: int | None = None
    queued: int | None = None
    migrations: int | None = None
    replicas: tuple[ReplicaLine, ...] = ()
    notice: str = ""
    deployments: dict[str, Any] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Whether the server described itself to this key."""
        return bool(self.app or self.version or self.replicas)

    @property
    def running(self) -> int:
        """Sequences that run on all replicas."""
        return sum(replica.running or 0 for replica in self.replicas)

    @property
    def waiting(self) -> int:
        """Sequences that wait on all replicas."""
        return sum(replica.waiting or 0 for replica in self.replicas)

    def public(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return asdict(self) | {"condition": self.condition.name.lower()}


def read_report(address: str, ready: Mapping[str, Any], metrics: str) -> StatusReport:
    """Return the report of a server that answered with these bodies; `metrics` may be empty."""
    condition = Condition.READY if ready.get("ready") else Condition.NOT_READY
    if "states" not in ready and "replicas" not in ready:
        return StatusReport(address, condition, notice=FOR_ADMINS)
    app = ready.get("app") or {}
    deployments = dict(ready.get("deployments") or {})
    sums = _sums(metrics)
    return StatusReport(
        address=address,
        condition=condition,
        models=_models(ready),
        version=str(ready.get("version", "")),
        app=str(app.get("name", "")),
        app_status=str(app.get("status", "")),
        routers=_routers(deployments),
        queued=sums.get(WAITING),
        migrations=sums.get(MIGRATIONS),
        replicas=tuple(_line(state) for state in ready.get("states", [])),
        notice=str(ready.get("notice") or _asleep(ready) or app.get("reason") or ""),
        deployments=deployments,
    )


def _asleep(ready: Mapping[str, Any]) -> str:
    names = ready.get("asleep")
    return f"asleep: {', '.join(map(str, names))}; POST /wake_up wakes it" if names else ""


def _models(ready: Mapping[str, Any]) -> tuple[str, ...]:
    models = ready.get("models")
    return tuple(str(model) for model in models) if models else (str(ready.get("model", "")),)


def _routers(deployments: Mapping[str, Any]) -> int | None:
    router = deployments.get("Router")
    return None if router is None else int(router.get("counts", {}).get("RUNNING", 0))


def _line(state: Mapping[str, Any]) -> ReplicaLine:
    known = {name: state[name] for name in ReplicaLine.__slots__ if name in state and name != "name"}
    return ReplicaLine(name=str(state.get("id", "")), **known)


def _sums(metrics: str) -> dict[str, int]:
    sums: dict[str, int] = {}
    # The parser takes milliseconds for each of the many families: callers that ask five times a second would notice.
    wanted = [line for line in metrics.splitlines() if line.startswith((WAITING, MIGRATIONS))]
    for family in text_string_to_metric_families("\n".join(wanted)):
        for sample in family.samples:
            if sample.name in (WAITING, MIGRATIONS):
                sums[sample.name] = sums.get(sample.name, 0) + int(sample.value)
    return sums


STYLES = {
    "ready": "green",
    "starting": "yellow",
    "pending": "yellow",
    "asleep": "blue",
    "draining": "cyan",
    "stalled": "red",
    "crash-looping": "bold red",
}
HEADS = {
    Condition.READY: ("READY", GOOD),
    Condition.NOT_READY: ("NOT READY", BAD),
    Condition.UNREACHABLE: ("UNREACHABLE", BAD),
    Condition.KEY_REFUSED: ("KEY REFUSED", BAD),
}


def table(report: StatusReport) -> RenderableType:
    """Return the report for a terminal."""
    word, style = HEADS[report.condition]
    version = f"squadron {report.version}" if report.version else ""
    parts: list[RenderableType] = [head(word, style, report.address, version, title=", ".join(report.models))]
    if report.known:
        parts.append(Text(_summary(report), style="dim"))
    if report.replicas:
        parts.append(_replicas(report.replicas))
        reasons = {replica.reason: replica.name for replica in report.replicas if replica.reason}
        parts += [Text(f"{name or 'pending'}: {reason}", style="red") for reason, name in reasons.items()]
    if report.notice:
        parts.append(notice(report.notice))
    return Group(*parts)


def lines(report: StatusReport) -> list[str]:
    """Return the report as one line for the server and one for each replica, `name=value` after the first words."""
    word = plain_word(HEADS[report.condition][0])
    values = {
        "version": report.version,
        "app": report.app_status,
        "routers": report.routers,
        "running": report.running,
        "waiting": report.waiting,
        "queued": report.queued,
        "migrations": report.migrations,
        "notice": report.notice,
    }
    shown = values if report.known else {"notice": report.notice}
    first = " ".join([word, *filter(None, report.models), report.address, *pairs(shown)])
    return [first, *(_plain(replica) for replica in report.replicas)]


def detail(replica: ReplicaLine) -> str:
    """Return what there is to say of a replica beside its state, in words."""
    done = "" if replica.share is None else f" {replica.share:.0%}"
    words = [replica.phase.replace("_", " ") + done] if replica.phase else []
    if replica.state == "stalled" and replica.seconds is not None:
        words.append(f"its engine has not moved for {replica.seconds:.0f} s")
    elif replica.sleep_level:
        words.append(f"at level {replica.sleep_level}")
    elif replica.state == "pending" and not replica.failed_starts:
        words.append("waits for a process, or for room")
    elif replica.seconds is not None and replica.state == "starting":
        words.append(f"for {replica.seconds:.0f} s")
    if replica.failed_starts:
        words.append(f"{replica.failed_starts} failed starts")
    if replica.next_try is not None:
        words.append(f"next try in {replica.next_try:.0f} s")
    return ", ".join(words)


def _summary(report: StatusReport) -> str:
    parts = [f"app {report.app} {report.app_status}"]
    if report.routers is not None:
        parts.append(f"{report.routers} router{'' if report.routers == 1 else 's'}")
    parts.append(f"{report.running} running, {report.waiting + (report.queued or 0)} waiting")
    if report.migrations:
        parts.append(f"{report.migrations} moved")
    return " · ".join(parts)


def _replicas(replicas: tuple[ReplicaLine, ...]) -> Table:
    several = len({replica.model for replica in replicas}) > 1
    shown = table_of(("Replica", *(("Model",) if several else ()), "State"), ("Run", "Wait"))
    shown.add_column("KV cache", no_wrap=True)
    shown.add_column("", overflow="fold")
    for replica in replicas:
        cells: list[RenderableType] = [replica.name or "-"]
        cells += [replica.model] if several else []
        shown.add_row(
            *cells,
            Text(replica.state, STYLES.get(replica.state, "")),
            *_values(replica),
            Text(detail(replica), style="dim"),
        )
    return shown


def _values(replica: ReplicaLine) -> tuple[str, str, RenderableType]:
    if replica.kv_usage is None:
        return "", "", ""
    return str(replica.running or 0), str(replica.waiting or 0), share_bar(replica.kv_usage)


def _plain(replica: ReplicaLine) -> str:
    values = {
        "model": replica.model,
        "phase": replica.phase.replace(" ", "-"),
        "done": None if replica.share is None else f"{replica.share:.0%}",
        "seconds": None if replica.seconds is None else f"{replica.seconds:.0f}",
        "running": replica.running,
        "waiting": replica.waiting,
        "kv": None if replica.kv_usage is None else f"{replica.kv_usage:.0%}",
        "failed_starts": replica.failed_starts or None,
        "next_try": None if replica.next_try is None else f"{replica.next_try:.0f}s",
        "sleep_level": replica.sleep_level,
        "reason": replica.reason,
    }
    return " ".join(["replica", replica.name or "-", replica.state, *pairs(values)])


WATCH_SECONDS = 1.0


def fetch(client: httpx.Client) -> StatusReport:
    """Ask the server that `client` is for. A server that cannot be asked is a report too."""
    return fetch_with_metrics(client)[0]


def fetch_with_metrics(client: httpx.Client) -> tuple[StatusReport, str]:
    """Return `fetch`'s report, and the text of /metrics where a router of ours gave it whole, else ""."""
    address = str(client.base_url).rstrip("/")
    try:
        body = json_object(ask(client, "/ready"))
        metrics = ask(client, "/metrics")
    except KeyRefusedError as error:
        return StatusReport(address, Condition.KEY_REFUSED, notice=str(error)), ""
    except NoAnswerError as error:
        return _unreachable(address, str(error)), ""
    except ValueError:
        said = "Serve answers there, but no router of the app does yet"
        return StatusReport(address, Condition.NOT_READY, notice=said), ""
    if body is None or "ready" not in body:
        return _unreachable(address, NO_SERVER), ""
    text = metrics.text if metrics.status_code == 200 else ""
    report = read_report(address, body, text)
    return report, text if report.known else ""


def show_status(address: str, api_key: str | None, as_json: bool, watch: bool) -> int:
    """Print the report, until Ctrl-C if `watch`, and return the exit code: that of the last one."""
    console = console_for_reports()
    with client_for(server_url(address), api_key) as client:
        report = fetch(client)
        if not watch:
            _print(report, console, as_json)
            return report.condition.value
        try:
            return _watch(client, report, console, as_json)
        except KeyboardInterrupt:
            return fetch(client).condition.value


def _watch(client: httpx.Client, report: StatusReport, console: Console, as_json: bool) -> int:
    if as_json or not console.is_terminal:
        while True:
            _print(report, console, as_json)
            time.sleep(WATCH_SECONDS)
            report = fetch(client)
    with Live(table(report), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(WATCH_SECONDS)
            live.update(table(fetch(client)), refresh=True)


def _print(report: StatusReport, console: Console, as_json: bool) -> None:
    show(console, as_json, report.public(), table(report), lines(report))


def _unreachable(address: str, why: str) -> StatusReport:
    return StatusReport(address, Condition.UNREACHABLE, notice=why)
