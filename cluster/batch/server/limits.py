"""What limits a server's batch: its completion window of 24 hours, and the quotas of its tenant.

The window is measured by a monotonic clock, since a time of day may jump: it is corrected, or a machine was
suspended. So while a runner lives it counts what passes; of the time between two runners the time of day tells, which
may be wrong, so that it leaves a batch `GRACE` at least. Rows wait where the quota of their tenant has no room.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable

import msgspec

from cluster.admission.keys import OPEN, Tenant
from cluster.admission.quotas import Quotas
from cluster.batch.ledger.records import RowDone
from cluster.batch.row_requests import Prepared
from cluster.batch.server.objects import BatchRecord
from cluster.batch.server.root import Root

logger = logging.getLogger(__name__)

USED = "used.json"
KEEP_SECONDS = 60.0  # between two times that it is kept
GRACE = 3600.0  # seconds that the time of day cannot take from a batch
PAUSE = 1.0  # seconds between two looks at a quota: what was used at routers is heard of once a second


class Used(msgspec.Struct, frozen=True):
    """at: seconds since 1970. seconds: that each batch had used by then."""

    at: float
    seconds: dict[str, float]


class CompletionWindows:
    """All batches that have not ended. Methods block. May be used from any thread.

    clock: never set, of this process. time_of_day: seconds since 1970.
    """

    def __init__(
        self,
        root: Root,
        clock: Callable[[], float] = time.monotonic,
        time_of_day: Callable[[], float] = time.time,
    ) -> None:
        self._root = root
        self._clock = clock
        self._time_of_day = time_of_day
        self._lock = threading.Lock()
        self._before: Used | None = None  # what was kept last, by this runner or one before
        self._began: dict[str, float] = {}
        self._looked: float | None = None
        self._kept_at = -KEEP_SECONDS

    def observe(self, unended: Iterable[BatchRecord]) -> None:
        """Take notice of all batches that have not ended; now and then keep what they have used."""
        with self._lock:
            self._began = {one.id: self._begin(one) for one in unended}
            self._looked = now = self._clock()
            if now - self._kept_at < KEEP_SECONDS:
                return
            self._kept_at = now
            used = self._before = Used(self._time_of_day(), {one: now - began for one, began in self._began.items()})
        try:
            self._root.write(USED, msgspec.json.encode(used))
        except Exception as error:  # whatever a library for URLs raises
            logger.warning("what batches have used of their time is not kept, and is the next time: %s", error)

    def is_over(self, record: BatchRecord) -> bool:
        """Whether a batch has used all of its time."""
        with self._lock:
            began = self._began[record.id] = self._begin(record)
        return self._clock() - began >= record.expires_at - record.created_at

    def _begin(self, record: BatchRecord) -> float:
        """Return when, by our clock, a batch began its time."""
        if record.id in self._began:
            return self._began[record.id]
        if self._before is None:
            self._before = self._read()
        if record.id in self._before.seconds:
            used, since = self._before.seconds[record.id], self._before.at
        elif self._looked is not None:
            return self._looked  # it was made since
        else:
            used, since = 0.0, record.created_at
        between = max(0.0, self._time_of_day() - since)
        most = record.expires_at - record.created_at - GRACE
        return self._clock() - max(used, min(used + between, most))

    def _read(self) -> Used:
        data = self._root.read(USED)
        try:
            return Used(0.0, {}) if data is None else msgspec.json.decode(data, type=Used)
        except msgspec.MsgspecError as error:
            logger.error("%s is damaged (%s): the time of day tells what batches have used", USED, error)
            return Used(0.0, {})


class RowQuotas:
    """All batches of one runner. holder: finds a tenant by its name; None where it has no valid key (any more).

    A row pays for its prompts and the output that it is likely to have. What it took beyond that is charged in the
    end, what it did not take is had by later rows: so in the end the tenant pays what was used.
    """

    def __init__(self, quotas: Quotas | None = None, holder: Callable[[str], Tenant | None] = lambda _: OPEN) -> None:
        self._quotas = quotas or Quotas()
        self._holder = holder
        self._spare: dict[str, int] = {}  # tokens that each tenant has paid, and not used

    def of(self, tenant: str) -> RowQuota:
        """Return what the rows of one batch of a tenant pay."""
        return RowQuota(self, tenant)

    async def take(self, name: str, prepared: Prepared, expected: int) -> str | None:
        """Charge a row that may begin now; else return what it has to wait for. Raises `ApiError`."""
        tenant = self._holder(name)
        if tenant is None:
            return f"a valid key of tenant {name}, which has none any more"
        quota = await self._quotas.row_waits_for(tenant, prepared.num_prompt_tokens)
        if quota is not None:
            return f"the quota {quota} of tenant {name}, half of which is for requests other than batches"
        spare = min(self._spare.get(name, 0), expected)
        self._keep(tenant, -spare)
        await self._quotas.use_row(tenant, expected - spare)
        return None

    async def settle(self, name: str, tokens: int) -> None:
        """Take note of so many tokens that were paid for and not used; fewer than 0 = used and not paid for."""
        tenant = self._holder(name)
        if tenant is None or tenant.quota.tokens_per_minute is None:
            self._spare.pop(name, None)
        elif tokens >= 0:
            self._keep(tenant, tokens)
        else:
            await self._quotas.use_output(tenant, -tokens)

    def _keep(self, tenant: Tenant, tokens: int) -> None:
        """At most half the quota of a minute: what was spared long ago lets nobody use more than all of it."""
        most = (tenant.quota.tokens_per_minute or 0) // 2
        self._spare[tenant.name] = min(most, self._spare.get(tenant.name, 0) + tokens)


class RowQuota:
    """See `BatchQuota`. waits_for: what the next row waits for, None where it waits for no quota."""

    def __init__(self, of: RowQuotas, tenant: str) -> None:
        self.waits_for: str | None = None
        self._of = of
        self._tenant = tenant

    async def pay(self, prepared: Prepared, expected: int) -> None:
        """Return when the row may begin; raises `ApiError` (`prompt_exceeds_quota`)."""
        try:
            while (waits_for := await self._of.take(self._tenant, prepared, expected)) is not None:
                self.waits_for = waits_for
                await asyncio.sleep(PAUSE)
        finally:
            self.waits_for = None

    async def settle(self, expected: int, done: RowDone) -> None:
        """Take note of what a row took that had paid for `expected`."""
        await self._of.settle(self._tenant, expected - done.prompt_tokens - done.output_tokens)
