"""The copies that a router has of its kept answers on replicas, and how it finds those that other routers have."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from weakref import WeakKeyDictionary

import msgspec

from cluster.errors import ApiError
from cluster.responses.copies import SETTLES
from cluster.responses.deletions import Deletions
from cluster.responses.record import Head, Record, pack_end, pack_head, unpack_end, unpack_head
from cluster.router.dispatcher import CopyMessage, Dispatcher
from cluster.router.replica_handle import ReplicaHandle
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
from cluster.wire.codec import Up
from cluster.wire.link import MessageTooLargeError

NUM_COPIES = 2  # replicas that have an answer, beside the router that makes it
PAUSE = 0.05  # seconds in which what is new of an answer is gathered
LOOK = 0.5  # seconds between two looks at whether the replicas that have copies are there
PATIENCE = 2.0  # seconds for a replica to answer, beyond those that it is asked to wait
MOST_AT_ONCE = 1 << 20  # bytes of notes in one message
LARGEST_HEAD = 6 << 20  # bytes of a request that is copied
CLAIMS, CLAIM_AGAIN = 8, 0.25  # tries to be the only router that goes on with an answer, and seconds between two
CALM = 15.0  # seconds after a loss of replicas in which routers may have yet to copy to those that came
FETCHES = 2  # of a replica at a time: what it sends must fit in what may wait on its link
log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Copied:
    """One record. homes: notes that each replica has, by its link. ended: the end was told there.

    full: replicas that had no room for it.
    """

    record: Record
    homes: dict[ReplicaHandle, int] = field(default_factory=dict)
    ended: set[ReplicaHandle] = field(default_factory=set)
    full: set[ReplicaHandle] = field(default_factory=set)


@dataclass(slots=True, frozen=True, eq=False)
class _Found:
    """What a replica has. owned: it is linked to the router that made it. rival: as of `Fetched`."""

    replica: ReplicaHandle
    record: Record
    owned: bool
    rival: str


class AnswerCopies:
    """Implements `cluster.responses.copies.Copies`. Used on one event loop.

    models: the dispatchers of the app's models; any replica of any model may have a copy. retention: seconds for
    which they keep an answer after its end.
    """

    def __init__(self, models: Sequence[Dispatcher], retention: float) -> None:
        self._models = models
        self._retention = retention
        for one in models:
            one.hold_copies(self._on_message, self._on_linked)
        self._tickets = count()
        self._asked: dict[tuple[int, str], asyncio.Future[Fetched]] = {}
        self._records: dict[str, _Copied] = {}
        self._deletions = Deletions()
        self._dirty: set[str] = set()
        self._fetches: WeakKeyDictionary[ReplicaHandle, asyncio.Semaphore] = WeakKeyDictionary()
        self._timer: asyncio.TimerHandle | None = None
        self._looked_at: list[ReplicaHandle] = []
        self._since: dict[ReplicaHandle, float] = {}  # when each replica was first seen here
        self._lost: dict[str, float] = {}  # when replicas were missed: Serve has those leave, too, that died
        self._orphaned: Callable[[str], None] = lambda _: None
        self._superseded: Callable[[str, int, bool], None] = lambda *_: None
        self._followed: Callable[[str], None] = lambda _: None

    def listen(
        self,
        orphaned: Callable[[str], None],
        superseded: Callable[[str, int, bool], None],
        followed: Callable[[str], None],
    ) -> None:
        """See `Copies.listen`."""
        self._orphaned, self._superseded, self._followed = orphaned, superseded, followed

    def put(self, record: Record) -> None:
        """See `Copies.put`."""
        if self._is_deleted(record):
            asyncio.get_running_loop().call_soon(self._superseded, record.head.name, record.epoch, False)
            return
        copied = self._records.get(record.head.name)
        if copied is None or copied.record is not record:
            self._records[record.head.name] = _Copied(record)
        self._dirty.add(record.head.name)
        self._flush_after(PAUSE)

    async def settle(self, record: Record) -> bool:
        """See `Copies.settle`."""
        copied = self._records.get(record.head.name)
        if copied is None:
            return True
        self._copy(copied)
        told = [home for home, known in copied.homes.items() if known >= 0]
        async with aclosing(self._told(told, record.head, len(record.notes), 0.0)) as answers:
            async for found in answers:
                if found.name:
                    return True
        return not told and bool(self._linked())  # none of them has room, or the request is too large

    async def fetch(self, name: str, tenant: str | None) -> Record | None:
        """See `Copies.fetch`. All replicas are asked: one may have fallen behind whose router could not reach it."""
        all_heard, found = await self._found(name, tenant)
        if not (found or all_heard or (tenant is not None and self._deletions.knows_name(tenant, name))):
            message = "not every replica could be asked for what is kept of it; ask again"
            raise ApiError("no_replica", message, retry_after=1)
        return _latest(found)

    async def orphan(self, name: str) -> Record | None:
        """See `Copies.orphan`. Where two routers claim it at once, each at a replica, the first of them waits."""
        for _ in range(CLAIMS):
            _, found = await self._found(name, None, claims=True)
            latest = _latest(found)
            if latest is None:
                return None
            if any(one.owned for one in found if one.record.version == latest.version):
                self._take_back(name, [one for one in found if one.record.version < latest.version])
                break
            rivals = {one.rival for one in found} - {""}
            if not rivals:
                return latest
            if "first" in rivals:
                break
            await asyncio.sleep(CLAIM_AGAIN)
        self.disclaim(name)
        return None

    def _take_back(self, name: str, former: Sequence[_Found]) -> None:
        """Have copies dropped that are of former routers."""
        for one in former:
            old = one.record
            self._send(one.replica, Forget(name, old.head.tenant, old.epoch, old.owner))

    def disclaim(self, name: str) -> None:
        """See `Copies.disclaim`."""
        for replica in self._linked():
            self._send(replica, Disclaim(name))

    async def _found(self, name: str, tenant: str | None, claims: bool = False) -> tuple[bool, list[_Found]]:
        """Return whether all replicas have answered, and what they have. claims: as of `Fetch`."""
        asked, may_be_blank = self._linked(), self._may_be_blank()
        answers = await asyncio.gather(*[self._fetch_from(one, name, tenant, claims) for one in asked])
        whole = bool(asked) and all(model.reaches_all for model in self._models)
        all_heard = whole and not may_be_blank and all(heard for heard, _ in answers)
        return all_heard, [one for _, one in answers if one is not None]

    def _may_be_blank(self) -> bool:
        """Whether all replicas that had copies may just have died, and those that are there have none yet."""
        now, linked = asyncio.get_running_loop().time(), self._linked()
        there = {one.replica_id for one in linked}
        gone = {one.replica_id: one.gone_at for one in self._since if one not in linked}
        self._lost = {name: at for name, at in (self._lost | gone).items() if now - at < CALM}
        self._lost = {name: at for name, at in self._lost.items() if name not in there}
        self._since = {one: self._since.get(one, now) for one in linked}
        stayed = sum(now - since >= CALM for since in self._since.values())
        return len(self._lost) >= min(NUM_COPIES, len(self._lost) + stayed) > 0

    async def news(self, record: Record, known: int, wait: float) -> Record | None:
        """See `Copies.news`. The first replica that has some is believed."""
        none: Record | None = None
        async with aclosing(self._told(self._linked(), record.head, known, wait)) as answers:
            async for found in answers:
                if not found.name:
                    continue
                news = Record(record.head, list(found.notes), unpack_end(found.end), found.epoch, owner=found.owner)
                if news.version > record.version:
                    return news
                if news.version == record.version:  # else it is of an earlier router
                    if news.notes or news.end is not None:
                        return news
                    none = news
        return none

    async def _told(
        self, replicas: Sequence[ReplicaHandle], head: Head, known: int, wait: float
    ) -> AsyncGenerator[Fetched, None]:
        """Ask replicas at once; yields what each of them says as it comes."""
        asks = [asyncio.create_task(self._ask(one, head.name, head.tenant, known, wait)) for one in replicas]
        try:
            for ask in asyncio.as_completed(asks):
                if (found := await ask) is not None:
                    yield found
        finally:
            for one in asks:
                one.cancel()

    async def forget(self, head: Head) -> None:
        """See `Copies.forget`. Copies that cannot be reached now are dropped when they can (`Deletions`)."""
        self._learn((Deletion(head.name, head.tenant, head.born, self._retention),))
        until = asyncio.get_running_loop().time() + PATIENCE
        while (linked := self._linked()) or not all(model.reaches_all for model in self._models):
            async with aclosing(self._told(linked, head, 0, 0.0)) as answers:
                async for _ in answers:
                    return  # who answers has read what was sent before
            if asyncio.get_running_loop().time() >= until:
                raise ApiError("no_replica", "no replica could be told of the deletion yet", retry_after=1)
            await asyncio.sleep(SETTLES)

    def _learn(self, told: Sequence[Deletion], source: ReplicaHandle | None = None) -> None:
        """Drop what was deleted, and pass on what is new. source: that told it, None = it was deleted here."""
        new = self._deletions.learn(told, asyncio.get_running_loop().time())
        for one in new:
            copied = self._records.get(one.name)
            if copied is not None and self._is_deleted(copied.record):
                self._superseded(one.name, copied.record.epoch, False)
        for replica in self._linked() if new else ():
            if replica is not source:
                self._send(replica, Deleted(new))

    def _is_deleted(self, record: Record) -> bool:
        head = record.head
        return self._deletions.knows(head.tenant, head.name, head.born)

    def _on_linked(self, replica: ReplicaHandle) -> None:
        """Tell a replica that may have been cut off what was deleted or taken over meanwhile."""
        self._may_be_blank()  # it takes note of who is there
        for said in self._deletions.told(asyncio.get_running_loop().time()):
            self._send(replica, said)
        for name, copied in list(self._records.items()):
            head, epoch = copied.record.head, copied.record.epoch
            if epoch and copied.homes:
                self._send(replica, Forget(name, head.tenant, epoch - 1, None, head.born))
        if self._records:
            self._flush_after(PAUSE)  # it may take copies that have too few

    def drop(self, name: str) -> None:
        """See `Copies.drop`."""
        copied = self._records.pop(name, None)
        self._dirty.discard(name)
        if copied is not None and copied.record.end is None:
            for home in copied.homes:
                self._send(home, Forget(name, copied.record.head.tenant, copied.record.epoch))

    def _on_message(self, replica: ReplicaHandle, message: CopyMessage) -> None:
        """Take in what a replica says of copies; an answer that comes too late is dropped."""
        match message:
            case Fetched():
                answer = self._asked.pop((message.ticket, replica.replica_id), None)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case Orphaned(name=name):
                if (copied := self._records.get(name)) is None:
                    self._orphaned(name)
                else:  # the link of this router to it was another one when it got its copy
                    copied.homes[replica] = -1
                    copied.ended.discard(replica)
                    self._copy(copied)
            case Superseded(name=name, full=True):
                if (copied := self._records.get(name)) is not None:
                    copied.homes.pop(replica, None)
                    copied.full.add(replica)
                    self._dirty.add(name)
                    self._flush_after(PAUSE)
            case Deleted(deletions=told):
                self._learn(told, replica)
            case Followed(name=name):
                self._followed(name)
            case Superseded(name=name, epoch=epoch):
                self._superseded(name, epoch, True)

    def close(self) -> None:
        """Copy nothing more."""
        if self._timer is not None:
            self._timer.cancel()

    async def _fetch_from(
        self, replica: ReplicaHandle, name: str, tenant: str | None, claims: bool
    ) -> tuple[bool, _Found | None]:
        """Return whether a replica answers, and what it has."""
        notes: list[bytes] = []
        head, version = None, (-1, "")
        while True:
            async with self._fetches.setdefault(replica, asyncio.Semaphore(FETCHES)):
                found = await self._ask(replica, name, tenant, len(notes), 0.0, claims)
            if found is None or not found.name:
                return found is not None, None
            if (found.epoch, found.owner) != version:  # what it had is not kept any more: from the first note on
                version, head = (found.epoch, found.owner), None
                if notes:
                    notes = []
                    continue
            try:
                head = head or unpack_head(found.head)
                end = unpack_end(found.end)
            except msgspec.MsgspecError as error:  # of a router of another version
                log.warning("a copy of answer %s cannot be read: %s", name, error)
                return True, None
            notes += found.notes
            if not found.more:
                ended_at = None if end is None else asyncio.get_running_loop().time() - found.age
                record = Record(head, notes, end, found.epoch, owner=found.owner, ended_at=ended_at)
                if found.left is not None:
                    record.deadline = asyncio.get_running_loop().time() + found.left
                found_here = _Found(replica, record, found.owned, found.rival)
                return True, None if self._is_deleted(record) else found_here

    async def _ask(
        self, replica: ReplicaHandle, name: str, tenant: str | None, known: int, wait: float, claims: bool = False
    ) -> Fetched | None:
        """Return what a replica says, None where it says nothing in time, or is not linked any more."""
        if replica not in self._linked():
            return None
        key = next(self._tickets), replica.replica_id
        answer = self._asked[key] = asyncio.get_running_loop().create_future()
        self._send(replica, Fetch(key[0], name, tenant, known, wait, claims))
        try:
            async with asyncio.timeout(wait + PATIENCE):
                return await answer
        except TimeoutError:
            return None
        finally:
            self._asked.pop(key, None)

    def _linked(self) -> list[ReplicaHandle]:
        return [replica for model in self._models for replica in model.linked]

    def _send(self, replica: ReplicaHandle, message: Up) -> None:
        model = next((one for one in self._models if replica in one.linked), None)
        if model is not None:
            model.send(replica, message)

    def _flush_after(self, seconds: float) -> None:
        at = asyncio.get_running_loop().time() + seconds
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at, self._flush)

    def _flush(self) -> None:
        self._timer = None
        linked = self._linked()
        if linked != self._looked_at:  # whoever is gone or new may leave answers with too few copies
            self._looked_at = linked
            self._dirty.update(self._records)
        dirty, self._dirty = self._dirty, set()
        for name in dirty:
            if (copied := self._records.get(name)) is not None:
                self._copy(copied)
        if self._records:
            self._flush_after(PAUSE if self._dirty else LOOK)

    def _copy(self, copied: _Copied) -> None:
        """Tell the replicas that are to have a record what they do not have of it yet."""
        record, linked = copied.record, self._linked()
        copied.homes = {home: told for home, told in copied.homes.items() if home in linked}
        copied.ended &= set(copied.homes)
        copied.full &= set(linked)
        name = record.head.name
        for replica in sorted(linked, key=lambda one: (one.draining, _rank(name, one))):
            if len([home for home in copied.homes if not home.draining]) >= NUM_COPIES:
                break
            if replica not in copied.full:
                copied.homes.setdefault(replica, -1)
        for home in list(copied.homes):
            self._tell(copied, home)

    def _tell(self, copied: _Copied, home: ReplicaHandle) -> None:
        record, told = copied.record, copied.homes[home]
        head = pack_head(record.head) if told < 0 else b""
        if len(head) > LARGEST_HEAD:
            log.warning("the request of answer %s is too large: no replica has a copy", record.head.name)
            return
        told, now = max(told, 0), asyncio.get_running_loop().time()
        while True:
            notes, size = list[bytes](), 0
            for note in record.notes[told:]:
                if notes and size + len(note) > MOST_AT_ONCE:
                    break
                notes.append(note)
                size += len(note)
            last = told + len(notes) == len(record.notes)
            end = pack_end(record.end) if last else b""
            if not (head or notes or (end and home not in copied.ended)):
                return
            age = 0.0 if not end or record.ended_at is None else now - record.ended_at
            said = Keep(
                record.head.name,
                record.epoch,
                record.head.tenant,
                head,
                record.head.born,
                told,
                tuple(notes),
                end,
                self._retention,
                max(0.0, age),
                None if record.deadline is None else max(0.0, record.deadline - now),
            )
            try:
                self._send(home, said)
            except MessageTooLargeError:
                log.warning("a note of answer %s is too large to be copied", record.head.name)
                return
            head, told = b"", told + len(notes)
            copied.homes[home] = told
            if end:
                copied.ended.add(home)
            if last:
                return


def _latest(found: list[_Found]) -> Record | None:
    """Return what counts of all that was found."""
    records = [one.record for one in found]
    return max(records, key=lambda one: (one.version, one.end is not None, len(one.notes)), default=None)


def _rank(name: str, replica: ReplicaHandle) -> bytes:
    return blake2b(f"{name}/{replica.replica_id}".encode(), digest_size=8).digest()
