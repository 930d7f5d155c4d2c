"""Where copies of kept answers are, as the router sees it that makes them: on replicas, which outlive it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from cluster.responses.record import Head, Record

SETTLES = 0.1  # seconds between two looks at whether there is a replica that takes a copy


class Copies(Protocol):
    """The copies of all answers of an app. Used on one event loop."""

    def put(self, record: Record) -> None:
        """Have what is new of a record copied soon; what is there of it is overwritten by a later epoch."""
        ...

    async def settle(self, record: Record) -> bool:
        """Return whether a copy of the record is somewhere else by now, or has no room anywhere."""
        ...

    async def fetch(self, name: str, tenant: str | None) -> Record | None:
        """Return what is kept of an answer, None where nobody has it. tenant: it must be this one's; None = any.

        Raises `ApiError` (`no_replica`) where nobody can be asked.
        """
        ...

    async def orphan(self, name: str) -> Record | None:
        """Return what is kept of an answer that is offered, None where a router has it: other copies are dropped.

        Who gets it has claimed it: it is offered to nobody else until it is `put`, or `disclaim`ed.
        """
        ...

    def disclaim(self, name: str) -> None:
        """Have an answer that was claimed offered to other routers."""
        ...

    async def news(self, record: Record, known: int, wait: float) -> Record | None:
        """Return what is kept of the same answer behind its first `known` notes, None where nobody has it.

        What is of another `version` is no older one, and all of it is to be fetched. wait: seconds to wait for news
        where there are none.
        """
        ...

    async def forget(self, head: Head) -> None:
        """Have all copies dropped, at once or when they can be reached, and whoever makes the answer stop.

        Returns once this is known somewhere else. Raises `ApiError` (`no_replica`) where no replica can be told for
        now: they are when they are linked again, if this router lives until then.
        """
        ...

    def drop(self, name: str) -> None:
        """Look after the copies of a record no more: those of one that runs go, others when their time has come."""
        ...

    def listen(
        self,
        orphaned: Callable[[str], None],
        superseded: Callable[[str, int, bool], None],
        followed: Callable[[str], None],
    ) -> None:
        """Have `orphaned` called with the name of an answer whose router is gone, for this one to go on with it.

        superseded: called with the name of an answer that another router has gone on with or dropped, the epoch up to
        which it is void, and whether another one goes on with it.
        followed: called with the name of an answer for which somebody waits at another router.
        """
        ...


class NoCopies:
    """For an app without replicas: nothing outlives its process."""

    def put(self, record: Record) -> None:
        """Copy nothing."""

    async def settle(self, record: Record) -> bool:
        """There is no room."""
        return True

    async def fetch(self, name: str, tenant: str | None) -> Record | None:
        """Know nothing."""
        return None

    async def orphan(self, name: str) -> Record | None:
        """Know nothing."""
        return None

    def disclaim(self, name: str) -> None:
        """Claim nothing."""

    async def news(self, record: Record, known: int, wait: float) -> Record | None:
        """Know nothing."""
        return None

    async def forget(self, head: Head) -> None:
        """Forget nothing."""

    def drop(self, name: str) -> None:
        """Drop nothing."""

    def listen(
        self,
        orphaned: Callable[[str], None],
        superseded: Callable[[str, int, bool], None],
        followed: Callable[[str], None],
    ) -> None:
        """Call nothing."""
