"""Copies of answers that routers make, on a replica: they outlive their router, and are offered to another one."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

from cluster.accounts.tenant_bytes import TenantBytes
from cluster.replica.runs import RouterSession
from cluster.responses.deletions import Deletions
from cluster.wire.answer_messages import (
    Deleted,
    Deletion,
    Disclaim,
    Fetch,
    Fetched,
    Followed,
    Forget,
    Keep,
    Orphaned,
    Superseded,
)

# Of all copies; tenants have equal shares. The oldest that have ended go first, then what grows is not kept here.
MOST_BYTES = 512 << 20
MOST_AT_ONCE = 1 << 20  # bytes of notes in one message
OF_NOTE = 64  # bytes that one takes beside its content
TURN = 0.25  # seconds between two looks at who waits, and what is to be offered or dropped
OFFER_AFTER = 4  # turns for a lost router to come back before its answers are offered to others
NO_OFFER = 1 << 30  # turns: longer than a replica drains
OFFER_AGAIN = 12  # turns for a router to claim one before it is offered to the next
CLAIM = 120  # turns for a router to begin with one that it has claimed
logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Copy:
    """One answer. owner: name of the router that makes it. session: its link, None while it has none.

    ended_at, deadline: on the event loop's clock. alone: turns without a session, over all its routers. claim: link
    of the router that is about to go on with it. turns: until it is offered, or its claim is over. told: its router
    knows that another one asks, since the last turn.
    """

    tenant: str
    head: bytes
    born: str
    epoch: int = 0
    owner: str = ""
    session: RouterSession | None = None
    notes: list[bytes] = field(default_factory=list)
    end: bytes = b""
    retention: float = 0.0
    ended_at: float = 0.0
    deadline: float | None = None
    alone: int = 0
    claim: RouterSession | None = None
    turns: int = 0
    told: bool = False
    offers: int = 0
    size: int = 0

    def release(self) -> None:
        """Have it offered to a router at the next turn."""
        self.claim, self.turns = None, 0


@dataclass(slots=True)
class _Waiting:
    """A `Fetch` that waits for news. turns: that it still waits."""

    session: RouterSession
    asked: Fetch
    turns: int


class AnswerKeeper:
    """Used on one event loop. sessions: the links that hold now, to whose routers answers may be offered."""

    def __init__(self, sessions: Callable[[], Sequence[RouterSession]], most_bytes: int = MOST_BYTES) -> None:
        self._sessions = sessions
        self._bytes = TenantBytes(most_bytes, self._evict)
        self._copies: dict[str, _Copy] = {}
        self._ended: defaultdict[str, dict[str, None]] = defaultdict(dict)  # names by tenant, the oldest first
        self._waiting: dict[str, list[_Waiting]] = {}
        self._deletions = Deletions()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._copies)

    def take(self, session: RouterSession, message: Keep | Fetch | Forget | Disclaim | Deleted) -> None:
        """Act on a router's message."""
        match message:
            case Keep():
                self._keep(session, message)
            case Fetch():
                self._fetch(session, message)
            case Forget():
                self._forget(session, message)
            case Deleted(deletions=told):
                self._learn(session, told)
            case Disclaim(name=name):
                copy = self._copies.get(name)
                if copy is not None and copy.claim is session:
                    copy.release()
        self._turn_later()

    def joined(self, session: RouterSession) -> None:
        """Tell a router that may have been cut off what was deleted meanwhile."""
        for said in self._deletions.told(asyncio.get_running_loop().time()):
            session.send(said)

    def left(self, session: RouterSession, drained: bool) -> None:
        """Take note that a link is over. drained: its router ended it as this replica is to go, and lives."""
        for copy in self._copies.values():
            if copy.session is session:
                copy.session, copy.turns, copy.offers = None, NO_OFFER if drained else OFFER_AFTER, 0
            elif copy.claim is session:
                copy.release()
        for name, waiting in list(self._waiting.items()):
            self._waiting[name] = [one for one in waiting if one.session is not session]

    def close(self) -> None:
        """Keep nothing more."""
        if self._timer is not None:
            self._timer.cancel()
        self._copies.clear()

    def _keep(self, session: RouterSession, said: Keep) -> None:
        if self._deletions.knows(said.tenant, said.name, said.born):
            return  # its router hears of it, or has
        copy = self._copies.get(said.name)
        if copy is None:
            if not said.head or said.first or not self._bytes.make_room(said.tenant, len(said.head)):
                session.send(Superseded(said.name, said.epoch, full=True))
                return
            copy = self._copies[said.name] = _Copy(said.tenant, said.head, said.born)
            self._count(copy, len(said.head))
        if (said.epoch, session.link.router_id) < (copy.epoch, copy.owner):
            session.send(Superseded(said.name, copy.epoch))
            return
        former = copy.session
        if former is not None and former is not session and copy.owner != session.link.router_id:
            former.send(Superseded(said.name, said.epoch))
        if (copy.epoch, copy.owner, copy.born) != (said.epoch, session.link.router_id, said.born):
            self._count(copy, -sum([len(note) + OF_NOTE for note in copy.notes]))
            copy.notes, copy.end = [], b""
            self._ended[copy.tenant].pop(said.name, None)
            copy.epoch, copy.owner = said.epoch, session.link.router_id
            self._count(copy, len(said.head) - len(copy.head))
            copy.head, copy.born = said.head, said.born  # of two that begin one under a key, each has its own
        copy.session, copy.claim = session, None
        if said.first <= len(copy.notes):
            new = said.notes[len(copy.notes) - said.first :]
            self._count(copy, sum([len(note) + OF_NOTE for note in new]))
            copy.notes += new
            if not self._bytes.make_room(copy.tenant, 0) or said.name not in self._copies:
                if said.name in self._copies:
                    self._drop(said.name)
                session.send(Superseded(said.name, said.epoch, full=True))
                return
            if said.end and not copy.end:
                copy.end, copy.ended_at = said.end, asyncio.get_running_loop().time() - said.age
                self._ended[copy.tenant][said.name] = None
        copy.retention = said.retention
        copy.deadline = None if said.left is None else asyncio.get_running_loop().time() + said.left
        self._tell(said.name, copy)

    def _fetch(self, session: RouterSession, asked: Fetch) -> None:
        copy = self._copies.get(asked.name)
        if copy is None or asked.tenant not in (None, copy.tenant):
            session.send(Fetched(asked.ticket))
            return
        if copy.session is None and copy.claim is None and asked.claims:
            copy.claim, copy.turns = session, CLAIM
        if copy.session not in (None, session) and not (copy.end or copy.told):
            copy.told = True
            copy.session.send(Followed(asked.name))
        if asked.wait and asked.known >= len(copy.notes) and not copy.end:
            waiting = _Waiting(session, asked, max(1, int(asked.wait / TURN)))
            self._waiting.setdefault(asked.name, []).append(waiting)
        else:
            self._answer(session, asked, copy)

    def _answer(self, session: RouterSession, asked: Fetch, copy: _Copy) -> None:
        notes, size = list[bytes](), 0
        for note in copy.notes[asked.known :]:
            if notes and size + len(note) > MOST_AT_ONCE:
                break
            notes.append(note)
            size += len(note)
        more = asked.known + len(notes) < len(copy.notes)
        head, end = b"" if asked.known else copy.head, b"" if more else copy.end
        now = asyncio.get_running_loop().time()
        said = Fetched(
            asked.ticket,
            asked.name,
            copy.epoch,
            head,
            tuple(notes),
            end,
            more,
            copy.owner,
            owned=copy.session is not None,
            age=max(0.0, now - copy.ended_at) if end else 0.0,
            rival=_rival(asked.name, copy.claim, session) if asked.claims else "",
            left=None if copy.deadline is None else max(0.0, copy.deadline - now),
        )
        session.send(said)

    def _tell(self, name: str, copy: _Copy) -> None:
        """Answer all who wait for news of an answer."""
        for one in self._waiting.pop(name, ()):
            self._answer(one.session, one.asked, copy)

    def _forget(self, session: RouterSession, said: Forget) -> None:
        copy = self._copies.get(said.name)
        if copy is None or copy.tenant != said.tenant:
            return
        if said.owner is None:
            if copy.epoch <= said.epoch and copy.born == said.born:
                if copy.session is not None:
                    copy.session.send(Superseded(said.name, said.epoch + 1))
                self._drop(said.name)
            return
        said_of = said.epoch, said.owner or session.link.router_id
        if copy.session in (None, session) and (copy.epoch, copy.owner) == said_of:
            self._drop(said.name)

    def _learn(self, session: RouterSession, told: Sequence[Deletion]) -> None:
        """Drop what was deleted, and pass on what is new."""
        new = self._deletions.learn(told, asyncio.get_running_loop().time())
        for one in new:
            copy = self._copies.get(one.name)
            if copy is not None and copy.born == one.born and copy.tenant == one.tenant:
                self._drop(one.name)
        for other in self._sessions() if new else ():
            if other is not session:
                other.send(Deleted(new))

    def _drop(self, name: str) -> None:
        copy = self._copies.pop(name)
        self._ended[copy.tenant].pop(name, None)
        self._bytes.give_back(copy.tenant, copy.size)
        for one in self._waiting.pop(name, ()):
            one.session.send(Fetched(one.asked.ticket))

    def _count(self, copy: _Copy, size: int) -> None:
        copy.size += size
        self._bytes.take(copy.tenant, size)

    def _evict(self, tenant: str) -> bool:
        oldest = next(iter(self._ended[tenant]), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def _turn_later(self) -> None:
        if self._timer is None and (self._copies or self._waiting):
            self._timer = asyncio.get_running_loop().call_later(TURN, self._turn)

    def _turn(self) -> None:
        self._timer, now = None, asyncio.get_running_loop().time()
        for name, copy in list(self._copies.items()):
            copy.told = False
            if copy.session is None:
                copy.alone, copy.turns = copy.alone + 1, copy.turns - 1
            age = now - copy.ended_at if copy.end else copy.alone * TURN
            if age > copy.retention:
                self._drop(name)
            elif copy.session is None and copy.turns <= 0:
                copy.claim = None
                self._offer(name, copy)
        for name, waiting in list(self._waiting.items()):
            copy_of = self._copies.get(name)
            for one in waiting:
                one.turns -= 1
                if one.turns <= 0 and copy_of is not None:
                    self._answer(one.session, one.asked, copy_of)
            left = [one for one in waiting if one.turns > 0]
            self._waiting[name] = left
            if not left:
                del self._waiting[name]
        self._turn_later()

    def _offer(self, name: str, copy: _Copy) -> None:
        """Ask a router to go on with an answer. All replicas ask the same one first, so that one alone takes it."""
        sessions = sorted(self._sessions(), key=lambda one: _rank(name, one.link.router_id))
        if sessions:
            sessions[copy.offers % len(sessions)].send(Orphaned(name))
            copy.offers += 1
            copy.turns = OFFER_AGAIN


def _rival(name: str, claim: RouterSession | None, session: RouterSession) -> Literal["", "first", "second"]:
    """Return which of two routers goes first that both claim an answer, "" where no other one than this does."""
    if claim is None or claim is session:
        return ""
    theirs, own = (_rank(name, one.link.router_id) for one in (claim, session))
    return "first" if theirs < own else "second"


def _rank(name: str, router_id: str) -> bytes:
    return blake2b(f"{name}/{router_id}".encode(), digest_size=8).digest()
