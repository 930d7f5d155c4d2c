"""Rows of a server's batches are charged to the quotas of their tenants, and wait where these have no room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.admission.quotas import Quotas
from cluster.admission.tenant import OPEN, Tenant
from cluster.batch.ledger.records import RowDone
from cluster.batch.prepare import Prepared

PAUSE = 1.0  # seconds between two looks at a quota: what was used at routers is heard of once a second


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
    """See `cluster.batch.run.Quota`. waits_for: what the next row waits for, None where it waits for no quota."""

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
