"""Who runs a server's batches where runners see no ledger of each other: shown by signs of life in the common place.

A ledger's epoch lets one driver at a time work on it. Behind a URL each machine has ledgers of its own, so that
runners on two of them could both work on one batch. There a runner shows life in the store; another one takes its
batches when it has seen none for `LEASE` seconds, and it stops by itself once it could not show any for `HOLD`.
All times are differences of this process's own clock, which is monotonic.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from itertools import count
from pathlib import Path
from secrets import token_hex

from cluster.batch.errors import BusyError, FencedError
from cluster.batch.ledger.epoch import boot_id
from cluster.batch.server.root import Root

logger = logging.getLogger(__name__)

SIGNS = "runners"
BEAT = 4.0  # seconds between two signs of life
HOLD = 20.0  # seconds since the last one that was kept, after which a runner stops
LEASE = 30.0  # seconds without one, after which another runner takes over; so much more that the first has stopped


class Lease:
    """One runner's right to the batches that it took. name: in their records.

    site: of its ledgers, by `ledger_site`: of two runners of one site, the ledgers' epochs decide who works. "" = all
    runners are of one site, and no sign is left.
    """

    def __init__(self, root: Root, site: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self.name = f"{site}.{token_hex(8)}"
        self._root = root
        self._site = site
        self._clock = clock
        self._signs = count()
        self._lock = threading.Lock()
        self._holders = 0
        self._beaten = -HOLD
        self._ended = threading.Event()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Show signs of life meanwhile. Blocks; raises `OSError` where the first cannot be kept."""
        if not self._site:
            yield
            return
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def check(self) -> None:
        """Raise `FencedError` when no sign of life was kept for so long that others may take over."""
        if self._site and self._clock() - self._beaten > HOLD:
            raise FencedError(f"no sign of life could be kept for {HOLD:g} s: another runner may take the batch over")

    async def outlive(self, holder: str) -> None:
        """Return when `holder` runs its batches no more; raises `BusyError` once it shows a sign of life."""
        if holder.rpartition(".")[0] == self._site:
            return
        sign, seen = f"{SIGNS}/{holder}", await asyncio.to_thread(self._root.read, f"{SIGNS}/{holder}")
        until = self._clock() + LEASE
        while seen is not None and self._clock() < until:
            await asyncio.sleep(BEAT / 4)
            if (now := await asyncio.to_thread(self._root.read, sign)) not in (None, seen):
                raise BusyError("the batch is run on another machine")
            seen = now
        await asyncio.to_thread(self._root.remove, sign)

    def beat(self) -> None:
        """Show a sign of life. Raises `OSError`."""
        began = self._clock()  # of which others count from when they see it, later
        self._root.write(f"{SIGNS}/{self.name}", f"{next(self._signs)}".encode())
        self._beaten = began

    def _enter(self) -> None:
        with self._lock:
            if self._clock() - self._beaten > BEAT:
                self.beat()
            self._holders += 1
            if self._holders == 1:
                self._ended = threading.Event()
                threading.Thread(target=self._beats, args=(self._ended,), name="lease", daemon=True).start()

    def _leave(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders:
                self._ended.set()

    def _beats(self, ended: threading.Event) -> None:
        while not ended.wait(BEAT):
            try:
                self.beat()
            except Exception as error:  # whatever a library for URLs raises
                logger.warning("no sign of life could be kept, another one follows: %s", error)


def ledger_site(folder: Path) -> str:
    """Return what distinguishes a folder of ledgers from those of other machines and containers; it must exist."""
    found = folder.stat()
    told = f"{socket.gethostname()} {boot_id()} {found.st_dev} {found.st_ino}"
    return blake2b(told.encode(), digest_size=8).hexdigest()


def sweep_signs(root: Root, seen: dict[str, bytes | None]) -> None:
    """Remove the signs of runners that showed none since `seen`, which is renewed."""
    before = dict(seen)
    seen.clear()
    for name in root.names(SIGNS):
        held = root.read(f"{SIGNS}/{name}")
        if name in before and before[name] == held:
            root.remove(f"{SIGNS}/{name}")
        else:
            seen[name] = held
