"""What a request waited for: asked of all replicas, and put together with what the router knows itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from cluster.router.member import Member
from cluster.wire.message_parts import Waited
from cluster.wire.messages import Explain, Explained, Up
from engine.telemetry.flight import Wait

PATIENCE = 1.0  # seconds for replicas to answer
OF_A_ROUTER = frozenset({Wait.TURN, Wait.LET_IN, Wait.REPLICA, Wait.MIGRATION, Wait.SENT, Wait.DONE})


@dataclass(frozen=True, slots=True)
class Told:
    """An event, and who told it: a replica's id, or "" for a router."""

    event: Waited
    replica: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is known of a request's waiting, the oldest first. silent: replicas that did not answer in time."""

    events: tuple[Told, ...] = ()
    silent: tuple[str, ...] = ()


class Inquiries:
    """Those under way. Used on one event loop. send: tells a replica something."""

    def __init__(self, send: Callable[[Member, Up], None]) -> None:
        self._send = send
        self._tickets = count()
        self._answers: dict[tuple[int, str], asyncio.Future[Sequence[Waited]]] = {}

    async def ask(
        self, members: Sequence[Member], name: str, tenant: str | None = None
    ) -> dict[str, Sequence[Waited] | None]:
        """Return what each replica tells of the request, None for one that does not within `PATIENCE`.

        tenant: whose it must be, None = anybody's.
        """
        ticket, loop = next(self._tickets), asyncio.get_running_loop()
        asked = {member.replica_id: loop.create_future() for member in members}
        self._answers.update({(ticket, replica): answer for replica, answer in asked.items()})
        try:
            for member in members:
                self._send(member, Explain(ticket, name, tenant))
            if asked:
                await asyncio.wait(asked.values(), timeout=PATIENCE)
        finally:
            for replica in asked:
                self._answers.pop((ticket, replica), None)
        return {replica: answer.result() if answer.done() else None for replica, answer in asked.items()}

    def on_answer(self, member: Member, message: Explained) -> None:
        """Take in a replica's answer; one that comes too late is nobody's."""
        answer = self._answers.pop((message.ticket, member.replica_id), None)
        if answer is not None and not answer.done():
            answer.set_result(message.events)


def explanation(own: Sequence[Waited], told: Mapping[str, Sequence[Waited] | None]) -> Explanation:
    """Put together what the router knows and what replicas told.

    A router tells the replica with each attempt what went before, so of a request that another router took in, the
    last replica that ran it knows most.
    """
    answers = {replica: events for replica, events in told.items() if events is not None}
    stories = [[event for event in events if event.what in OF_A_ROUTER] for events in answers.values()]
    routers = own or max(stories, key=len, default=[])
    found = [Told(event) for event in routers] + [
        Told(event, replica)
        for replica, events in answers.items()
        for event in events
        if event.what not in OF_A_ROUTER
    ]
    found.sort(key=lambda one: -one.event.age)
    return Explanation(tuple(found), tuple(replica for replica, events in told.items() if events is None))


async def nothing_known(_name: str, _tenant: str | None) -> Explanation:
    """Explain nothing: for a model without replicas."""
    return Explanation()
