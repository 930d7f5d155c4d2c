"""How a kept answer is made: by the endpoint that makes all others, for a client that is not there."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message

from cluster.admission.tenants import Visit
from cluster.answer_log import AnswerLog
from cluster.errors import ApiError
from cluster.openai.response_output import CANCELLED
from cluster.responses.copies import SETTLES, Copies
from cluster.responses.record import Head, Record
from cluster.responses.shelf import GRACE, Owned, Shelf
from cluster.responses.view import AnswerView

NOTE_EVERY = 0.05  # seconds between two looks at what has come of an answer that runs
ABANDONED = "abandoned"
STOPS = (CANCELLED, ABANDONED, "overloaded", "answer_too_large")
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
log = logging.getLogger(__name__)


class Maker:
    """Makes answers, and has what is new of them kept and copied. Used on one event loop.

    endpoints: by path. stopped: how many answers were, by the error's code. spawn: runs what is done beside. clock:
    seconds since 1970.
    """

    def __init__(self, shelf: Shelf, copies: Copies, spawn: Spawn, clock: Callable[[], float]) -> None:
        self.stopped: Counter[str] = Counter()
        self.endpoints: Mapping[str, ASGIApp] = {}
        self._shelf = shelf
        self._copies = copies
        self.spawn = spawn
        self._clock = clock

    def run(self, one: Owned, answer_log: AnswerLog, visit: Visit) -> AnswerView:
        """Have an answer made from what its log has on; the visit is closed when it has ended."""
        view = one.view = AnswerView(one.record.head, answer_log)

        def accept() -> None:
            self._take_notes(one)
            self._copies.put(one.record)
            view.accept()

        one.kept.on_begun = accept
        self._shelf.put(one)
        one.task = self.spawn(self._make(one, view, visit))
        one.task.add_done_callback(lambda _: self._never_begun(one, view, visit))
        return view

    def stop(self, one: Owned, error: ApiError) -> None:
        """End an answer that runs with an error, which its readers see."""
        if one.task is not None and one.kept.stopped_by is None:
            self.stopped[error.code] += 1
            one.kept.stopped_by = error
            one.task.cancel()

    async def _make(self, one: Owned, view: AnswerView, visit: Visit) -> None:
        head = one.record.head

        async def send(message: Message) -> None:
            await view.send(message)
            if message.get("more_body"):  # else it is whole
                self._note(one)

        noting = self.spawn(self._note_steadily(one))
        try:
            await self.endpoints[head.path](view.scope(tenant=visit.tenant, visit=visit), view.receive(), send)
        except asyncio.CancelledError:
            if one.kept.stopped_by is None and not one.gone:  # this router stops: the copies are for another
                one.gone = True
                one.leave()
        finally:
            noting.cancel()
            self._ended(one, view)
            visit.leave()
            try:
                await self._known_elsewhere(one)
            except asyncio.CancelledError:
                if not one.known:  # nobody was told of it: the ingress asks another router
                    one.leave()
                raise
            finally:
                if one.taken:
                    visit.give_up(prompt=one.anew)
                await visit.close()

    async def _known_elsewhere(self, one: Owned) -> None:
        """Return once a replica has the end of an answer, or says that another router has gone on with it.

        One that was silent hears so only now, and charges nothing.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE):
                while not (one.gone or await self._copies.settle(one.record)):
                    await asyncio.sleep(SETTLES)
        one.known = True  # or nobody can know: who waits for its id waits no longer

    async def _note_steadily(self, one: Owned) -> None:
        """Keep what is new of an answer of which nothing is sent for long, such as one that is no stream."""
        while not one.gone:
            await asyncio.sleep(NOTE_EVERY)
            self._note(one)

    def _note(self, one: Owned) -> None:
        """Have what is new of an answer kept and copied; end it where it takes too much."""
        if not self._take_notes(one) or one.gone:
            return
        self._copies.put(one.record)
        if one.kept.stopped_by is None and (error := self._shelf.outgrown(one)) is not None:
            log.error("answer %s is ended: %s", one.record.head.name, error)
            one.outgrown = True
            self.stop(one, error)

    def _never_begun(self, one: Owned, view: AnswerView, visit: Visit) -> None:
        """End an answer whose task was cancelled before its first step."""
        if not view.over:
            one.gone = True
            self._ended(one, view)
            self.spawn(visit.close())

    def _ended(self, one: Owned, view: AnswerView) -> None:
        self._take_notes(one)
        head, at = one.record.head, one.kept.completed_at
        one.task, one.record.ended_at = None, asyncio.get_running_loop().time()
        if view.status == 200 and not one.gone:
            one.record.end = view.end(int(self._clock()) if at is None else at)
            if one.outgrown:
                _let_go_of_tokens(one)
            if self._shelf.get(head.name) is one:
                self._shelf.put(one)  # it ended last
                self._copies.put(one.record)
        elif not one.gone:
            if view.begun:
                self.spawn(self._forget(head))
            self._shelf.drop(one, "refused")
        view.finish(lost=one.gone and view.status in (0, 200))

    async def _forget(self, head: Head) -> None:
        with suppress(ApiError):  # nobody has heard of it
            await self._copies.forget(head)

    def _take_notes(self, one: Owned) -> bool:
        """Keep what is new of an answer; return whether there was something."""
        note = None if one.view is None else one.view.log.take()
        if note is not None:
            one.record.add(note)
        self._shelf.weigh(one)
        return note is not None


def _let_go_of_tokens(one: Owned) -> None:
    """Keep of an answer that took too much what was asked and how it ended; whoever reads it has its frames."""
    former = one.record
    record = Record(former.head, former.notes[:1], former.end, former.epoch + 1, ended_at=former.ended_at)
    one.record, one.view = record, None


def abandoned() -> ApiError:
    """Return what ends an answer that nobody waits for any more: the next request with its key goes on with it."""
    message = "the client of this answer has left and did not come back in time; send the request again with its key"
    return ApiError(ABANDONED, message, status=409, retryable=True)
