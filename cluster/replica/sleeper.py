"""A replica's part in orders to sleep and to wake: it carries out the latest one, and says how far it is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from cluster.replica.engine_thread import Engine, Rested
from cluster.sleep_orders import KEEP, SleepOrder
from cluster.wire.parts import SleepState
from cluster.wire.translation import clipped

logger = logging.getLogger(__name__)


class Sleeper:
    """Used on one event loop. tell: called with each new state. quiet: returns when no request runs here."""

    def __init__(
        self, engine: Engine, quiet: Callable[[], Awaitable[None]], tell: Callable[[SleepState], None]
    ) -> None:
        self.state = SleepState()
        self._engine = engine
        self._quiet = quiet
        self._tell = tell
        self._order = SleepOrder()
        self._task: asyncio.Task[None] | None = None
        self._at_it = False  # the engine falls asleep, or wakes up

    @property
    def is_asleep(self) -> bool:
        """Whether a part of the engine sleeps, or is about to, so that it computes nothing."""
        return self._at_it or bool(self.state.asleep)

    def obey(self, order: SleepOrder) -> None:
        """Carry out an order, in the place of one that is still waited with."""
        if order.ticket == self._order.ticket:
            return
        self._order = order
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.get_running_loop().create_task(self._carry_out(order))

    def close(self) -> None:
        """Carry out nothing more."""
        if self._task is not None:
            self._task.cancel()

    async def _carry_out(self, order: SleepOrder) -> None:
        if order.asleep and not self.is_asleep and order.mode != KEEP:
            await self._quiet()
        self._at_it = bool(order.asleep) or self.is_asleep
        done: asyncio.Future[Rested] = asyncio.get_running_loop().create_future()
        # The engine is at it whatever comes meanwhile: the next order goes into its queue behind this one.
        self._engine.rest(order.level, order.asleep, partial(_tell, done))
        level, asleep, released, failed = await done
        if failed:
            logger.error("an order to sleep or to wake could not be carried out: %s", failed)
        else:
            logger.info("%s", f"asleep at level {level}: {', '.join(asleep)}" if asleep else "awake")
        self._at_it = False
        self.state = SleepState(order.ticket, order.number, level, asleep, released, clipped(failed))
        self._tell(self.state)


def _tell(done: asyncio.Future[Rested], rested: Rested) -> None:
    if not done.done():  # nobody waits for it any more where another order came
        done.set_result(rested)
