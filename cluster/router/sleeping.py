"""A router's part in orders to sleep and to wake: it gives them, refuses requests meanwhile, and knows who sleeps."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping
from typing import Any

from cluster.admission.admission_queue import AdmissionQueue
from cluster.errors import ApiError
from cluster.router.dispatcher import Dispatcher
from cluster.router.replica_handle import ReplicaHandle
from cluster.sleep_orders import ABORT, ASLEEP, OrderBook, SleepOrder
from engine.worker.sleep import KV_CACHE, TAGS

logger = logging.getLogger(__name__)
LOOK_AGAIN = 0.05  # seconds between two looks at how far the replicas are
OTHERS_SECONDS = 1.0  # after which all replicas have said what they have of other routers
PATIENCE = 600.0  # seconds that an order is waited for; it stays in force


class SleepingModel:
    """One model of a router. Used on one event loop.

    book: where its orders are kept, for all routers and replicas.
    """

    def __init__(self, model_id: str, dispatcher: Dispatcher, admission: AdmissionQueue, book: OrderBook) -> None:
        self.model_id = model_id
        self.order = SleepOrder()
        self._dispatcher = dispatcher
        self._admission = admission
        self._book = book
        self._turns_away: asyncio.Task[None] | None = None
        admission.refusal = self.refusal

    @property
    def is_sleeping(self) -> bool:
        """Whether it is to sleep, or a replica that is to be awake is not yet."""
        return bool(self.order.asleep) or any(replica.asleep for replica in self._dispatcher.linked)

    def levels(self) -> Mapping[str, int]:
        """Return the level at which each replica sleeps, 0 = it is awake."""
        return {one.replica_id: one.asleep for one in self._dispatcher.replicas()}

    def public(self) -> dict[str, Any]:
        """Return for JSON what was ordered, and of each replica what sleeps, and which memory is free."""
        replicas = {
            one.replica_id: {"level": one.sleep.level, "asleep": one.sleep.asleep, "released": one.sleep.released}
            for one in self._dispatcher.linked
        }
        return {"level": self.order.level, "asleep": self.order.asleep, "replicas": replicas}

    def refusal(self) -> ApiError | None:
        """Return the error of a request that comes now, None where it is taken."""
        if not self.order.asleep or self._is_woken_by_another():
            return None
        return self._error()

    def _is_woken_by_another(self) -> bool:
        """Whether the replicas are awake by an order that another router gave, and this one has yet to look at."""
        linked = self._dispatcher.linked
        return bool(linked) and all(one.sleep.number > self.order.number and not one.asleep for one in linked)

    def obey(self, order: SleepOrder) -> None:
        """Take in the order in force."""
        if order.ticket == self.order.ticket:
            return
        logger.info("model %s: %s", self.model_id, "is to sleep" if order.asleep else "is to be awake")
        begins = bool(order.asleep) and not self.order.asleep
        self.order = order
        if begins and order.mode == ABORT:
            self._admission.turn_away(self._error)
            self._dispatcher.end_all(self._error)
        if order.asleep and self._turns_away is None:
            self._turns_away = asyncio.get_running_loop().create_task(self._turn_away())

    async def sleep(self, level: int, mode: str) -> None:
        """Have all replicas sleep; returns when they do.

        Raises `ApiError`: `requests_running` (409) where some run and no `mode` says what is to become of them, and
        400 where it sleeps less deeply, or in part; 503 where a replica could not, and then all are woken again.
        """
        self.obey(await asyncio.to_thread(self._book.read))
        if self.order.asleep:
            if self.order.asleep == TAGS and level <= self.order.level:
                return
            parts = " and ".join(self.order.asleep)
            message = f"{parts} of {self.model_id} sleep at level {self.order.level}; POST /wake_up before"
            raise ApiError("invalid_value", message, param="level")
        if not mode and (running := await self._still_running()):
            message = (
                f"{running} requests of {self.model_id} run or wait: add mode=wait to let them finish first, "
                "mode=abort to end them, or mode=keep to go on with them after /wake_up"
            )
            raise ApiError("requests_running", message, param="mode", status=409)
        try:
            await self._give(self.order.sleeping(level, mode))
        except _FailedError as error:
            await self._write(self.order.waking(TAGS))
            message = f"replica {error.replica} cannot sleep, so {self.model_id} is woken again: {error.why}"
            raise ApiError("out_of_memory", message) from error

    async def wake_up(self, tags: Collection[str]) -> None:
        """Have these parts of all replicas be awake; returns when they are.

        Raises `ApiError` (503) where a replica could not wake up: it sleeps on, and may be woken again.
        """
        self.obey(await asyncio.to_thread(self._book.read))
        if not self.is_sleeping:
            return
        try:
            await self._give(self.order.waking(tags))
        except _FailedError as error:
            message = f"replica {error.replica} cannot wake up, POST /wake_up tries again: {error.why}"
            raise ApiError("out_of_memory", message) from error

    async def _give(self, order: SleepOrder) -> None:
        """Give an order, and wait until the replicas are done with it. Raises `_FailedError`.

        One that wakes up with other weights ends its links, and is done when it has new ones.
        """
        await self._write(order)
        until = time.monotonic() + PATIENCE
        while (waits := self._waits(order)) or not self._dispatcher.has_all_links:
            if self.order.ticket != order.ticket:
                raise ApiError("superseded", "another order to sleep or to wake came meanwhile", status=409)
            if time.monotonic() > until:
                names = ", ".join(one.replica_id for one in waits)
                raise ApiError("deadline_exceeded", f"the order stands, and is not carried out yet by {names}")
            await asyncio.sleep(LOOK_AGAIN)
        for one in self._dispatcher.linked:
            if one.sleep.failed:
                raise _FailedError(one)

    def _waits(self, order: SleepOrder) -> list[ReplicaHandle]:
        return [one for one in self._dispatcher.linked if one.sleep.ticket != order.ticket]

    async def _write(self, order: SleepOrder) -> None:
        await asyncio.to_thread(self._book.write, order)
        self.obey(order)

    async def _turn_away(self) -> None:
        """Refuse what still waits here once all replicas sleep: nothing can come of it."""
        while self.order.asleep:
            if all(replica.asleep for replica in self._dispatcher.linked):
                self._admission.turn_away(self._error)
                self._dispatcher.turn_away(self._error)
            await asyncio.sleep(LOOK_AGAIN)
        self._turns_away = None

    async def _still_running(self) -> int:
        """Return how many requests run or wait: 0 as soon as there is none. What other routers have is known late."""
        until = time.monotonic() + OTHERS_SECONDS
        while running := self._dispatcher.num_live + self._dispatcher.num_of_others + self._admission.num_waiting:
            if time.monotonic() > until:
                break
            await asyncio.sleep(LOOK_AGAIN)
        return running

    def _error(self) -> ApiError:
        parts = " and ".join(self.order.asleep).replace(KV_CACHE, "KV cache")
        message = f"the model {self.model_id!r} sleeps ({parts}, level {self.order.level}): POST /wake_up wakes it"
        return ApiError(ASLEEP, message, retry_after=5)


class _FailedError(Exception):
    """A replica could not carry out an order."""

    def __init__(self, replica: ReplicaHandle) -> None:
        super().__init__(replica.sleep.failed)
        self.replica, self.why = replica.replica_id, replica.sleep.failed
