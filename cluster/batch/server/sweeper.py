"""Removes what killed processes left, when a runner starts and every hour."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from cluster.batch.errors import BatchError, BusyError
from cluster.batch.ledger.epoch import Epoch
from cluster.batch.server.ids import BATCH_IDS
from cluster.batch.server.lease import sweep_signs
from cluster.batch.server.store import Store

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 3600.0


class Sweeper:
    """folder: of ledgers."""

    def __init__(self, store: Store, folder: Path) -> None:
        self._store = store
        self._folder = folder
        self._signs: dict[str, bytes | None] = {}  # of runners, as they were found the last time

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
        """Remove drafts that nobody writes, what runners that are gone showed, and ledgers of batches that ended."""
        self._store.sweep()
        sweep_signs(self._store.root, self._signs)
        for folder in self._folder.iterdir() if self._folder.exists() else ():
            if BATCH_IDS.fits(folder.name):
                self._sweep(folder)

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
