"""Removes what killed processes left, and files whose time is over, when a runner starts and every hour."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from cluster.batch.errors import BatchError, BusyError
from cluster.batch.ledger.epoch import Epoch
from cluster.batch.server.ids import BATCH_IDS
from cluster.batch.server.lease import sweep_signs
from cluster.batch.server.store import Store

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 3600.0


class Sweeper:
    """folder: of ledgers. time_of_day: seconds since 1970."""

    def __init__(self, store: Store, folder: Path, time_of_day: Callable[[], float] = time.time) -> None:
        self._store = store
        self._folder = folder
        self._signs: dict[str, bytes | None] = {}  # of runners, as they were found the last time
        self._time_of_day = time_of_day
        self._expired: set[str] = set()  # files whose time was over the last time

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            try:
                await asyncio.to_thread(self.sweep)
            except Exception:
                # Whatever a disk or a library for URLs raises: it is tried again.
                logger.exception("what killed processes left cannot be removed now")
            await asyncio.sleep(SWEEP_SECONDS)

    def sweep(self) -> None:
        """Remove what nobody writes, shows or needs any more: drafts, signs of runners, files, ledgers."""
        self._store.sweep()
        sweep_signs(self._store.root, self._signs)
        for folder in self._folder.iterdir() if self._folder.exists() else ():
            if BATCH_IDS.fits(folder.name):
                self._sweep(folder)
        self._sweep_files()

    def _sweep_files(self) -> None:
        """Those that were over the last time, too: a time of day that is wrong for a moment must delete nothing."""
        expired = self._store.files.expired(self._time_of_day())
        for one in expired:
            if one.id in self._expired:
                self._store.delete_expired(one)
        self._expired = {one.id for one in expired}

    def _sweep(self, folder: Path) -> None:
        try:
            if not self._is_needed(folder.name):
                Epoch(folder).remove_folder()
        except BusyError:
            return  # whoever ended it is about to
        except (BatchError, OSError) as error:
            logger.warning("the ledger %s stays until the next sweep, others go: %s", folder, error)

    def _is_needed(self, batch_id: str) -> bool:
        record = self._store.batches.read(batch_id)
        return record is not None and not record.ended
