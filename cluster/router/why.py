"""What `/why/{id}` says: what a request waited for, in line for its tenant's turn, in routers, and on replicas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from cluster.accounts.flight_recorder import Wait
from cluster.admission.keys import Tenant
from cluster.errors import ApiError
from cluster.router.replica_handle import ReplicaHandle
from cluster.wire.codec import Up
from cluster.wire.parts import Waited
from cluster.wire.replica_messages import Explained
from cluster.wire.router_messages import Explain

LONGEST_NAME = 256
OF_ALL = frozenset({Wait.TURN, Wait.BLOCKS})  # their details count what others do, to the token
PATIENCE = 1.0  # seconds for replicas to answer
OF_A_ROUTER = frozenset({Wait.TURN, Wait.LET_IN, Wait.REPLICA, Wait.MIGRATION, Wait.SENT, Wait.DONE})


@dataclass(frozen=True, slots=True)
class ReportedEvent:
    """An event and its source: a replica's id, or "" for a router."""

    event: Waited
    replica: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is known of a request's waiting, the oldest first. silent: replicas that did not answer in time."""

    events: tuple[ReportedEvent, ...] = ()
    silent: tuple[str, ...] = ()


# (name of a request as its client knows it; the tenant it must belong to, None = any)
Ask = Callable[[str, str | None], Awaitable[Explanation]]


class Inquiries:
    """The questions under way. Used on one event loop. send: sends a message to a replica."""

    def __init__(self, send: Callable[[ReplicaHandle, Up], None]) -> None:
        self._send = send
        self._tickets = count()
        self._answers: dict[tuple[int, str], asyncio.Future[Sequence[Waited]]] = {}

    async def ask(
        self, replicas: Sequence[ReplicaHandle], name: str, tenant: str | None = None
    ) -> dict[str, Sequence[Waited] | None]:
        """Return what each replica knows of the request, None for one that does not answer within `PATIENCE`.

        tenant: the request must be this tenant's; None = any.
        """
        ticket, loop = next(self._tickets), asyncio.get_running_loop()
        asked = {replica.replica_id: loop.create_future() for replica in replicas}
        self._answers.update({(ticket, replica_id): answer for replica_id, answer in asked.items()})
        try:
            for replica in replicas:
                self._send(replica, Explain(ticket, name, tenant))
            if asked:
                await asyncio.wait(asked.values(), timeout=PATIENCE)
        finally:
            for replica_id in asked:
                self._answers.pop((ticket, replica_id), None)
        return {name: answer.result() if answer.done() else None for name, answer in asked.items()}

    def on_answer(self, replica: ReplicaHandle, message: Explained) -> None:
        """Take in a replica's answer; one that comes too late is dropped."""
        answer = self._answers.pop((message.ticket, replica.replica_id), None)
        if answer is not None and not answer.done():
            answer.set_result(message.events)


def explanation(own: Sequence[Waited], told: Mapping[str, Sequence[Waited] | None]) -> Explanation:
    """Put together what the router and the replicas know.

    A router sends with each attempt what went before, so of a request that another router took in, the
    last replica that ran it knows most.
    """
    answers = {replica: events for replica, events in told.items() if events is not None}
    stories = [[event for event in events if event.what in OF_A_ROUTER] for events in answers.values()]
    routers = own or max(stories, key=len, default=[])
    found = [ReportedEvent(event) for event in routers] + [
        ReportedEvent(event, replica)
        for replica, events in answers.items()
        for event in events
        if event.what not in OF_A_ROUTER
    ]
    found.sort(key=lambda one: -one.event.age)
    return Explanation(tuple(found), tuple(replica for replica, events in told.items() if events is None))


async def nothing_known(_name: str, _tenant: str | None) -> Explanation:
    """Explain nothing: for a model without replicas."""
    return Explanation()


async def why(
    models: Iterable[Ask], name: str, asker: Tenant, clock: Callable[[], float] = time.time
) -> dict[str, Any]:
    """Return the body for a request by the id that its answer bears. models: of each, what asks it.

    clock: seconds since 1970.

    Only an operator sees how much of others' work went before, and how many blocks are free.
    Raises `ApiError` (404) where nothing is known: it did not have to wait, or that was long ago, or there is none.
    One of another tenant looks the same.
    """
    if len(name) > LONGEST_NAME:
        raise ApiError("invalid_request", f"the id may have at most {LONGEST_NAME} characters", param="id")
    tenant = None if asker.sees_all else asker.name
    events: list[ReportedEvent] = []
    silent: list[str] = []
    for ask in models:
        found = await ask(name, tenant)
        events += found.events
        silent += found.silent
    if not events:
        unheard = f"; no answer from {', '.join(silent)}" if silent else ""
        lost = "it had to wait for nothing, or that was long ago, or on a replica that is lost"
        goes_by = "requests go by the `id` of their answer, such as chatcmpl-..."  # not by Serve's `x-request-id`
        raise ApiError("not_found", f"nothing is known of {name!r}: {lost}{unheard}; {goes_by}")
    now = clock()
    return {"id": name, "events": [_shown(one, now, asker) for one in events], "silent": silent}


def _shown(reported: ReportedEvent, now: float, asker: Tenant) -> dict[str, Any]:
    event = reported.event
    at = now - event.age
    detail = event.detail if asker.sees_all or event.what not in OF_ALL else ""
    return {"at": at, "age": event.age, "what": event.what, "detail": detail, "replica": reported.replica}
