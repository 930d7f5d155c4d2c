"""What the demonstration has seen so far, and how it shows that: on a terminal of 80 columns, or as plain lines."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deploy.status import STYLES

MAX_EVENTS = 6


@dataclass(slots=True)
class StreamState:
    """One client. tokens, text: of the answer under way. reference: the undisturbed answer; empty until it is known.

    gap / worst_gap: seconds without anything new, the longest of its life. moved: answers that a kill went through.
    exact: answers that were the undisturbed one. error: why the last one failed.
    """

    number: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    reference: list[int] = field(default_factory=list)
    last_news: float = 0.0
    worst_gap: float = 0.0
    exact: int = 0
    failed: int = 0
    error: str = ""
    live: bool = False

    @property
    def matches(self) -> bool:
        """Whether all that has come so far is as in the undisturbed answer."""
        return self.tokens == self.reference[: len(self.tokens)]

    def begin(self) -> None:
        """Forget the answer before."""
        self.text, self.tokens, self.live = "", [], True

    def news(self, tokens: list[int], text: str, now: float) -> None:
        """Take in what came at `now`."""
        if self.tokens:
            self.worst_gap = max(self.worst_gap, now - self.last_news)
        self.tokens += tokens
        self.text += text
        self.last_news = now

    def gap(self, now: float) -> float:
        """Return the seconds since something came, 0 before the first of an answer."""
        return now - self.last_news if self.live and self.tokens else 0.0


@dataclass(frozen=True, slots=True)
class ReplicaSeen:
    """One replica as /ready showed it. pids: by rank."""

    name: str
    state: str
    pids: tuple[int, ...] = ()
    running: int = 0
    kv_usage: float = 0.0
    detail: str = ""


@dataclass(slots=True)
class Kill:
    """One kill. back: seconds until all replicas served again; None while they do not."""

    pid: int
    name: str
    at: float
    back: float | None = None


@dataclass(slots=True)
class Board:
    """Everything. began: when the first kill was possible, on the clock that all times here are of."""

    streams: list[StreamState]
    wanted_kills: int | None = None
    began: float = 0.0
    replicas: list[ReplicaSeen] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    migrations: int = 0
    events: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))

    @property
    def exact(self) -> int:
        """Answers that were the undisturbed ones."""
        return sum(stream.exact for stream in self.streams)

    @property
    def failed(self) -> int:
        """Answers that were not, or broke off."""
        return sum(stream.failed for stream in self.streams)

    @property
    def worst_gap(self) -> float:
        """The longest that any stream stood still."""
        return max(stream.worst_gap for stream in self.streams)

    @property
    def proven(self) -> bool:
        """Whether replicas were killed, as often as was wanted, and every answer was the undisturbed one."""
        return (
            bool(self.kills) and len(self.kills) >= (self.wanted_kills or 0) and bool(self.exact) and not self.failed
        )

    def summary(self) -> str:
        """Return the one line that stays."""
        kills = f"{len(self.kills)} kill{'' if len(self.kills) == 1 else 's'}"
        back = [kill.back for kill in self.kills if kill.back is not None]
        whole = f"; whole again after {max(back):.1f} s at most" if back else ""
        return (
            f"{kills}: {self.exact} answers exact, {self.failed} not; {self.migrations} moved to another replica, "
            f"longest pause of a stream {self.worst_gap:.1f} s{whole}."
        )


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
