"""Orders to sleep, kept in Ray's control store, where every router and replica looks for them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

import msgspec
from typing_extensions import override

from cluster.errors import ApiError
from cluster.lifecycle import control_store
from cluster.sleep_orders import OrderBook, SleepOrder

logger = logging.getLogger(__name__)
LOOK_SECONDS = 0.5  # between two looks at the order, by each router and replica


class StoredOrders(OrderBook):
    """The order of one deployment of one app. It outlives all processes of the app, as long as Ray's head does."""

    def __init__(self, app: str, deployment: str) -> None:
        self._key = f"/{app}/sleep/{deployment}"

    @override
    def read(self) -> SleepOrder:
        """Return the order in force; raises `ApiError` (503)."""
        try:
            value = control_store.get(self._key)
            return SleepOrder() if value is None else msgspec.msgpack.decode(value, type=SleepOrder)
        except control_store.FAILURES as error:
            raise _silent(error) from error

    @override
    def write(self, order: SleepOrder) -> None:
        """Keep an order; raises `ApiError` (503)."""
        try:
            control_store.put(self._key, msgspec.msgpack.encode(order))
        except control_store.FAILURES as error:
            raise _silent(error) from error


def _silent(error: Exception) -> ApiError:
    return ApiError("internal_error", f"Ray's control store does not answer: {error!r}", status=503)


def watch(book: OrderBook, loop: asyncio.AbstractEventLoop, obey: Callable[[SleepOrder], None]) -> None:
    """Have `obey` called on `loop` with each new order of `book`, for as long as the loop lives.

    In a thread of its own: while Ray's head is gone its calls block. What was ordered before stays in force then.
    """
    threading.Thread(target=_look, args=(book, loop, obey), name="sleep-orders", daemon=True).start()


def _look(book: OrderBook, loop: asyncio.AbstractEventLoop, obey: Callable[[SleepOrder], None]) -> None:
    known, failing = SleepOrder(), False
    while not loop.is_closed():
        try:
            order = book.read()
        except ApiError as error:
            if not failing:
                logger.warning("orders to sleep or to wake cannot be read: %s", error)
            failing = True
        else:
            failing = False
            if order != known:
                known = order
                try:
                    loop.call_soon_threadsafe(obey, order)
                except RuntimeError:  # the loop was closed since
                    return
        time.sleep(LOOK_SECONDS)
