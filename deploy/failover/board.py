"""What the demonstration has seen so far. Used on one event loop; the views only read it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

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
    """One replica as /ready told of it. pids: by rank."""

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
