"""A report as a table for a terminal of 80 columns and up, and as plain lines for everything else."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deploy.status.report import Condition, ReplicaLine, Report

STYLES = {
    "ready": "green",
    "starting": "yellow",
    "pending": "yellow",
    "draining": "cyan",
    "stalled": "red",
    "crash-looping": "bold red",
}
HEADS = {
    Condition.READY: ("READY", "bold green"),
    Condition.NOT_READY: ("NOT READY", "bold red"),
    Condition.UNREACHABLE: ("UNREACHABLE", "bold red"),
}
BAR = 6  # columns of the KV cache's bar


def table(report: Report) -> RenderableType:
    """Return the report for a terminal."""
    word, style = HEADS[report.condition]
    version = f"squadron {report.version}" if report.version else ""
    head = Text.assemble((word, style), f"  {', '.join(report.models)}  ", (f"{report.address}  {version}", "dim"))
    parts: list[RenderableType] = [head]
    if report.known:
        parts.append(Text(_summary(report), style="dim"))
    if report.replicas:
        parts.append(_replicas(report.replicas))
        reasons = {replica.reason: replica.name for replica in report.replicas if replica.reason}
        parts += [Text(f"{name or 'pending'}: {reason}", style="red") for reason, name in reasons.items()]
    if report.notice:
        parts.append(Text(report.notice, style="yellow"))
    return Group(*parts)


def lines(report: Report) -> list[str]:
    """Return the report as one line for the server and one for each replica, `name=value` after the first words."""
    word = HEADS[report.condition][0].lower().replace(" ", "-")
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
    words = [replica.phase.replace("_", " ")] if replica.phase else []
    if replica.state == "stalled" and replica.seconds is not None:
        words.append(f"its engine has not moved for {replica.seconds:.0f} s")
    elif replica.state == "pending" and not replica.failed_starts:
        words.append("waits for a process, or for room")
    elif replica.seconds is not None and replica.state == "starting":
        words.append(f"for {replica.seconds:.0f} s")
    if replica.failed_starts:
        words.append(f"{replica.failed_starts} failed starts")
    if replica.next_try is not None:
        words.append(f"next try in {replica.next_try:.0f} s")
    return ", ".join(words)


def _summary(report: Report) -> str:
    parts = [f"app {report.app} {report.app_status}"]
    if report.routers is not None:
        parts.append(f"{report.routers} router{'' if report.routers == 1 else 's'}")
    parts.append(f"{report.running} running, {report.waiting + (report.queued or 0)} waiting")
    if report.migrations:
        parts.append(f"{report.migrations} moved")
    return " · ".join(parts)


def _replicas(replicas: tuple[ReplicaLine, ...]) -> Table:
    several = len({replica.model for replica in replicas}) > 1
    shown = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    shown.add_column("Replica", no_wrap=True)
    if several:
        shown.add_column("Model", no_wrap=True)
    shown.add_column("State", no_wrap=True)
    for name in ("Run", "Wait"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("KV cache", no_wrap=True)
    shown.add_column("", overflow="fold")
    for replica in replicas:
        cells: list[RenderableType] = [replica.name or "-"]
        cells += [replica.model] if several else []
        shown.add_row(
            *cells,
            Text(replica.state, STYLES.get(replica.state, "")),
            *_figures(replica),
            Text(detail(replica), style="dim"),
        )
    return shown


def _figures(replica: ReplicaLine) -> tuple[str, str, RenderableType]:
    if replica.kv_usage is None:
        return "", "", ""
    return str(replica.running or 0), str(replica.waiting or 0), share_bar(replica.kv_usage)


def share_bar(share: float) -> Text:
    """Return a bar of `BAR` columns with a share (0 to 1), and the share beside it."""
    full = round(share * BAR)
    return Text.assemble(("━" * full, "magenta"), ("─" * (BAR - full), "bright_black"), f" {share:4.0%}")


def _plain(replica: ReplicaLine) -> str:
    values = {
        "model": replica.model,
        "phase": replica.phase.replace(" ", "-"),
        "seconds": None if replica.seconds is None else f"{replica.seconds:.0f}",
        "running": replica.running,
        "waiting": replica.waiting,
        "kv": None if replica.kv_usage is None else f"{replica.kv_usage:.0%}",
        "failed_starts": replica.failed_starts or None,
        "next_try": None if replica.next_try is None else f"{replica.next_try:.0f}s",
        "reason": replica.reason,
    }
    return " ".join(["replica", replica.name or "-", replica.state, *pairs(values)])


def pairs(values: Mapping[str, object]) -> list[str]:
    """Return `name=value` of those that say something, in quotes where there is a space."""
    return [f"{name}={_quoted(str(value))}" for name, value in values.items() if value not in (None, "")]


def _quoted(value: str) -> str:
    return f'"{value}"' if " " in value else value
