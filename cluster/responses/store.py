"""The answers that a router keeps: those it makes, those it has taken over, and the way to those of others.

An answer that is kept does not depend on its client: it is made by the endpoint that makes all others, for a client
that is not there (`AnswerView`). What is needed to make it again is copied to replicas (`Copies`). Where its router
is lost another one is told, and goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

from msgspec import structs
from starlette.types import ASGIApp

from cluster.admission.deadline import deadline_exceeded
from cluster.admission.tenants import Tenancy, Visit
from cluster.answer_log import AnswerFacts, AnswerLog
from cluster.errors import ApiError
from cluster.openai.response_output import response_cancelled
from cluster.responses.copies import SETTLES, Copies, NoCopies
from cluster.responses.making import Maker, abandoned
from cluster.responses.record import Head, Record, end_of, kept_of
from cluster.responses.replays import Replays
from cluster.responses.shelf import Owned, Shelf
from cluster.responses.view import AnswerView
from cluster.token_source import CallContext

SWEEP = 1.0  # seconds between two looks at whose time has come
log = logging.getLogger(__name__)


class ResponseStore:
    """Used on one event loop. retention: seconds for which an answer that has ended is kept.

    most_bytes: of all answers, None = `MOST_BYTES`; where they are reached the oldest that have ended go first, of
    the tenants beyond an equal share, and then nothing new of these is taken. clock: seconds since 1970.
    """

    def __init__(
        self,
        tenancy: Tenancy,
        retention: float,
        copies: Copies | None = None,
        most_bytes: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.retention = retention
        self.taken_over = self.refused = 0
        self._tenancy = tenancy
        self._copies: Copies = copies or NoCopies()
        self._clock = clock
        self.shelf = Shelf(self._copies, most_bytes)
        self.maker = Maker(self.shelf, self._copies, self._spawn, clock)
        self.replays = Replays(tenancy, self._copies, self.maker)
        self._adopting: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeping: asyncio.TimerHandle | None = None
        self._copies.listen(self._on_orphan, self._on_superseded, self._on_followed)

    def serve(self, endpoints: Mapping[str, ASGIApp]) -> None:
        """Make answers by these. endpoints: by path."""
        self.maker.endpoints = endpoints

    @asynccontextmanager
    async def joined(
        self,
        head: Head,
        visit: Visit,
        asked: AnswerLog,
        complete: Callable[[], Awaitable[bytes]] | None = None,
    ) -> AsyncIterator[tuple[Head, AnswerView]]:
        """Find the answer of this name, or begin it: then the visit is closed when it has ended.

        Yields once the request was accepted or refused. One that ended with an error which another try may spare is
        gone on with. asked: the log of the exchange, with the facts of an answer that another router has begun.
        complete: returns the body of one that is begun, None = that of the head. Raises `ApiError`: that of
        `complete`, 429 where there is no room, 400 (`idempotency_key_reused`) where the answer is to another body.
        """
        name, tenant = head.name, head.tenant
        record = None if self._own(name, tenant) else await self._seen(name, tenant, visit.deadline)
        if complete is not None and record is None and self._own(name, tenant) is None:
            head = structs.replace(head, body=await complete())
        await asked.until_heard()  # once begun it is made and charged, whichever router the ingress asks by now
        one = self._own(name, tenant)  # another request may have begun it meanwhile
        former = record if one is None else one.record
        if former is not None and former.head.asked != head.asked:
            raise key_reused()
        if former is not None and not _may_go_on(former):
            if not head.asked:  # no other request has this name: it is asked again, and counted where it is made
                visit.give_up(prompt=True)
            async with self._shown(former, one) as view:
                yield former.head, view
            return
        one = self._started(head, visit, asked.facts, former)
        with one.read():
            try:
                view = await self._accepted(one)
            except asyncio.CancelledError:
                if asked.is_let_go and not one.known:  # nobody was told of it: the ingress asks another router
                    one.leave()
                    self.shelf.drop(one, "superseded")
                raise
            yield one.record.head, view

    @asynccontextmanager
    async def found(self, name: str, tenant: str, by_id: bool = True) -> AsyncIterator[tuple[Head, AnswerView]]:
        """Find an answer of a tenant's, here or elsewhere, and its frames. Raises `ApiError` (404).

        by_id: whether its client names it; then one that is kept for its key alone is not found.
        """
        one = self._own(name, tenant)
        record = await self._copies.fetch(name, tenant) if one is None else one.record
        if record is None or (by_id and not record.head.by_id):
            raise not_kept(name, self.retention)
        async with self._shown(record, one) as view:
            yield record.head, view

    @asynccontextmanager
    async def _shown(self, record: Record, one: Owned | None) -> AsyncIterator[AnswerView]:
        """Have the frames of an answer, made again where there are none."""
        if one is not None and one.view is not None:
            with one.read():
                yield one.view
            return
        async with self.replays.of(record) as again:
            yield again

    async def cancel(self, name: str, tenant: str) -> None:
        """End a background answer, wherever it is made; one that has ended stays as it is.

        Raises `ApiError`: 404 where there is none, 400 where its client waits for it.
        """
        if not (await self.head_by_id(name, tenant)).background:
            message = f"response_id: {name[:100]!r} was not begun with background=true; delete it to end it"
            raise ApiError("invalid_value", message, param="response_id", status=400)
        one = await self._taken(name, tenant)
        if one.view is not None:
            while not (one.view.begun or one.view.over):
                await one.view.changed()
            self.maker.stop(one, response_cancelled())
            await one.view.whole()
            await self._copies.settle(one.record)  # who asks another router next hears of the end as well

    async def delete(self, name: str, tenant: str) -> None:
        """Keep an answer no more; one that runs is ended. Raises `ApiError`: 404, or 503 where nobody can be told."""
        head = await self.head_by_id(name, tenant)
        one = self._own(name, tenant)  # an orphan may have been taken over meanwhile
        if one is not None:
            self.shelf.drop(one, "deleted")
        await self._copies.forget(head)

    async def head_by_id(self, name: str, tenant: str) -> Head:
        """Return the head of an answer that its client names. Raises `ApiError` (404)."""
        one = self._own(name, tenant)
        record = await self._copies.fetch(name, tenant) if one is None else one.record
        if record is None or not record.head.by_id:
            raise not_kept(name, self.retention)
        return record.head

    def close(self) -> None:
        """End all that runs; the copies stay for another router."""
        for task in self._tasks:
            task.cancel()
        if self._sweeping is not None:
            self._sweeping.cancel()

    def _own(self, name: str, tenant: str) -> Owned | None:
        return self.shelf.get(name, tenant)

    # --- making answers

    def _started(self, head: Head, visit: Visit, facts: AnswerFacts | None, former: Record | None) -> Owned:
        """Begin an answer, or go on with a former one that failed."""
        try:
            self.shelf.make_room(head.tenant, len(head.body))
        except ApiError:
            self.refused += 1
            raise
        record = Record(head, deadline=visit.deadline)
        if former is not None:
            notes, epoch = list(former.notes), former.epoch + 1
            record = Record(former.head, notes, None, epoch, deadline=visit.deadline)
        if (present := self.shelf.get(head.name)) is not None:
            self.shelf.drop(present, "superseded")
        one = Owned(record, kept_of(head))
        answer_log = record.log(one.kept)
        answer_log.facts = answer_log.facts or facts
        visit.outlive()
        self._run(one, answer_log, visit)
        return one

    async def _accepted(self, one: Owned) -> AnswerView:
        """Return the frames of an answer once its request was accepted, and is known elsewhere, or refused.

        Nobody is told of one that this router alone knows: others would say that it is not there.
        """
        view = one.view
        if view is None:
            raise RuntimeError("an answer that was begun has no frames")
        while not (view.begun or view.over):
            await view.changed()
        try:
            async with asyncio.timeout_at(one.record.deadline):
                while view.begun and not (one.known or one.record.has_failed):
                    one.known = await self._copies.settle(one.record)
                    await asyncio.sleep(0.0 if one.known else SETTLES)
        except TimeoutError:
            await view.whole()  # its end is its deadline
        return view

    def _run(self, one: Owned, answer_log: AnswerLog, visit: Visit) -> AnswerView:
        self._sweep_later()
        return self.maker.run(one, answer_log, visit)

    # --- answers of others

    async def _taken(self, name: str, tenant: str) -> Owned:
        """Return an answer as one of this router's, which it becomes if it is another's."""
        if (one := self._own(name, tenant)) is not None:
            return one
        record = await self._copies.fetch(name, tenant)
        if record is None:
            raise not_kept(name, self.retention)
        return self._own(name, tenant) or await self._adopt(record)  # another taker may have it by now

    async def _seen(self, name: str, tenant: str | None, deadline: float | None) -> Record | None:
        """Return what others have of an answer, None also where nobody can be asked in time."""
        try:
            async with asyncio.timeout_at(deadline):
                return await self._copies.fetch(name, tenant)
        except (ApiError, TimeoutError) as error:
            log.info("nobody can be asked for answer %s: %s", name, error)
            return None

    def _on_orphan(self, name: str) -> None:
        if name not in self.shelf and name not in self._adopting:
            self._adopting.add(name)
            self._spawn(self._adopt_orphan(name)).add_done_callback(lambda _: self._adopting.discard(name))

    async def _adopt_orphan(self, name: str) -> None:
        record = await self._copies.orphan(name)
        if record is None:
            return
        try:
            if name not in self.shelf and self._may_adopt(record):
                log.info("answer %s: its router is lost, this one goes on with it", name)
                one = await self._adopt(record)
                while one.view is not None and not (one.view.begun or one.view.over):
                    await one.view.changed()
        finally:
            if name not in self.shelf:  # there is no room, or the request is refused here
                self._copies.disclaim(name)

    def _may_adopt(self, record: Record) -> bool:
        """Whether a lost router's answer has room; one that runs takes the place of those that have ended."""
        if record.end is not None:
            return self.shelf.has_room(record.size)
        try:
            self.shelf.make_room(record.head.tenant, record.size)
        except ApiError:
            return False
        return True

    async def _adopt(self, record: Record) -> Owned:
        """Make a record this router's own: go on with the answer, or keep it if it has ended.

        Returns what another taker has made of it meanwhile, where one has.
        """
        record.epoch, record.owner = record.epoch + 1, ""
        self.taken_over += 1
        head, one = record.head, Owned(record, kept_of(record.head))
        now, deadline = asyncio.get_running_loop().time(), record.deadline
        if record.end is None and deadline is not None and deadline <= now:
            record.end = end_of(deadline_exceeded(), self._clock())
        if record.end is not None:
            record.ended_at = now if record.ended_at is None else record.ended_at
            self.shelf.put(one)
            self._copies.put(record)
            self._sweep_later()
            return one
        answer_log = record.log(one.kept)
        context = CallContext(head.session, fingerprint=answer_log.fingerprint, continues=True)
        tenant = self._tenancy.holder(head.tenant)
        visit = await self._tenancy.visit(tenant, deadline, context, answer_log.facts is not None)
        if (present := self._own(head.name, head.tenant)) is not None:
            await visit.close()
            return present
        self._run(one, answer_log, visit)
        return one

    def _on_superseded(self, name: str, epoch: int, taken: bool) -> None:
        """Another router has the answer, or has dropped it: it is made here no more, and clients are given theirs."""
        one = self.shelf.get(name)
        if one is not None and one.record.epoch <= epoch:
            one.taken, one.anew = taken, taken and one.record.epoch == epoch
            self.shelf.drop(one, "superseded")

    def _on_followed(self, name: str) -> None:
        if (one := self.shelf.get(name)) is not None:
            one.read_at = asyncio.get_running_loop().time()

    # --- time

    def _sweep_later(self) -> None:
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(SWEEP, self._sweep)

    def _sweep(self) -> None:
        self._sweeping = None
        now = asyncio.get_running_loop().time()
        for one in self.shelf:
            ended_at = one.record.ended_at
            if one.task is None and ended_at is not None and now - ended_at >= self.retention:
                self.shelf.drop(one, "expired")
            elif one.is_abandoned(now):
                self.maker.stop(one, abandoned())
        if len(self.shelf):
            self._sweep_later()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _may_go_on(record: Record) -> bool:
    """Whether an answer ended with an error that another try may spare."""
    error = None if record.end is None else record.end.error()
    return error is not None and error.retryable


def key_reused() -> ApiError:
    """Return the error of a key that came with another body before."""
    message = "Idempotency-Key was sent with another body before; send the same body, or another key"
    return ApiError("idempotency_key_reused", message, param="Idempotency-Key", status=400)


def not_kept(name: str, retention: float) -> ApiError:
    """Return the error of an answer that nobody keeps, or that is another tenant's."""
    message = (
        f"Response with id {name[:100]!r} not found: it was not stored, was deleted, or ended more than "
        f"{retention:g} s ago (--response-retention)"  # OpenAI's and vLLM's first words, which clients look for
    )
    return ApiError("not_found", message, param="response_id")
