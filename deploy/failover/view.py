"""The demonstration on a terminal of 80 columns and up, and as plain lines for everything else."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deploy.failover.board import Board, ReplicaSeen, StreamState
from deploy.status.view import STYLES

TITLE = "[bold]Squadron[/]  kill anything; every token survives"
BAR = 16
TAIL = 22  # characters of an answer's end
SLOW, STILL = 0.3, 1.5  # seconds without a token that are worth a colour


def screen(board: Board, now: float) -> RenderableType:
    """Return the whole picture at `now`."""
    style = "red" if board.failed else "green"
    return Panel(
        Group(_head(board, now), Text(), _replicas(board), Text(), _streams(board, now), *_events(board)),
        title=TITLE,
        border_style=style,
        padding=(0, 1),
        width=80,
    )


def line(board: Board, now: float) -> str:
    """Return one line that says how things are."""
    ready = sum(replica.state == "ready" for replica in board.replicas)
    longest = max(stream.gap(now) for stream in board.streams)
    return (
        f"{now - board.began:6.1f} s  {len(board.kills)} kills, {ready} replicas ready, {board.exact} exact, "
        f"{board.migrations} moved, {board.failed} failed, longest gap now {longest:.1f} s"
    )


def _head(board: Board, now: float) -> Text:
    wanted = "" if board.wanted_kills is None else f" of {board.wanted_kills}"
    failed = "bold red" if board.failed else "dim"
    return Text.assemble(
        (f"{now - board.began:.0f} s   ", "dim"),
        (f"{len(board.kills)}{wanted} kills", "bold"),
        "   ",
        (f"{board.exact} exact", "bold green"),
        "   ",
        (f"{board.migrations} moved", "cyan"),
        "   ",
        (f"{board.failed} failed", failed),
        (f"   pauses up to {board.worst_gap:.1f} s", "dim"),
    )


def _replicas(board: Board) -> RenderableType:
    shown = Table.grid(padding=(0, 2, 0, 0))
    for replica in board.replicas:
        shown.add_row(*_replica(replica))
    last = board.kills[-1] if board.kills else None
    if last is not None and last.back is None:
        shown.add_row(
            Text(last.name, style="strike dim"), Text("killed", style="bold red"), f"pid {last.pid}", "", ""
        )
    return shown


def _replica(replica: ReplicaSeen) -> tuple[RenderableType, ...]:
    state = Text(replica.state, style=STYLES.get(replica.state, ""))
    pid = f"pid {replica.pids[0]}" if replica.pids and replica.state == "ready" else ""
    running = f"{replica.running} running" if replica.state == "ready" else ""
    return replica.name or "-", state, pid, running, Text(replica.detail, style="dim")


def _streams(board: Board, now: float) -> RenderableType:
    shown = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    shown.add_column("", justify="right")
    shown.add_column("answer under way", no_wrap=True)
    shown.add_column("", no_wrap=True, width=TAIL)
    for name in ("gap", "worst", "exact"):
        shown.add_column(name, justify="right", no_wrap=True)
    for stream in board.streams:
        shown.add_row(*_stream(stream, now))
    return shown


def _stream(stream: StreamState, now: float) -> tuple[RenderableType, ...]:
    share = len(stream.tokens) / len(stream.reference) if stream.reference else 0.0
    full = min(BAR, round(share * BAR))
    colour = "green" if stream.matches else "red"
    mark = "  ✓" if stream.matches else "  ✗"
    bar = Text.assemble(("━" * full, colour), ("─" * (BAR - full), "bright_black"), (mark, colour))
    tail = Text(stream.error or _visible(stream.text[-TAIL:]), style="red" if stream.error else "dim")
    count = (
        Text(str(stream.exact), style="green") if not stream.failed else Text(f"-{stream.failed}", style="bold red")
    )
    return str(stream.number + 1), bar, tail, _seconds(stream.gap(now)), _seconds(stream.worst_gap), count


def _seconds(gap: float) -> Text:
    colour = "dim" if gap < SLOW else "yellow" if gap < STILL else "bold red"
    return Text(f"{gap * 1000:.0f} ms" if gap < 1 else f"{gap:.1f} s", style=colour)


def _visible(text: str) -> str:
    return "".join("↵" if character == "\n" else character if character.isprintable() else "·" for character in text)


def _events(board: Board) -> list[RenderableType]:
    if not board.events:
        return []
    return [Text(), *(_event(event) for event in board.events)]


def _event(event: str) -> Text:
    return Text(event, style="bold" if "kill -9" in event else "dim", overflow="ellipsis", no_wrap=True)
