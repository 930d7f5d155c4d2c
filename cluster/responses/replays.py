"""How this router gives out answers of others: it makes their frames again, of a bounded number at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Message

from cluster.accounts.tenant_bytes import TenantBytes
from cluster.admission.tenants import Tenancy, Visit
from cluster.errors import ApiError
from cluster.responses.copies import Copies
from cluster.responses.following import Following
from cluster.responses.making import Maker
from cluster.responses.record import Record, kept_of
from cluster.responses.view import AnswerView
from cluster.token_source import CallContext

MOST = 512  # at a time; a tenant has at most as many as are left to others
MOST_BYTES = 256 << 20  # of all their frames and tokens; tenants have equal shares of it


class Replays:
    """Used on one event loop. maker: whose endpoints make the frames, and which runs them.

    begun, refused: since the router started.
    """

    def __init__(self, tenancy: Tenancy, copies: Copies, maker: Maker) -> None:
        self.begun = self.refused = 0
        self._tenancy = tenancy
        self._copies = copies
        self._maker = maker
        self._bytes = TenantBytes(MOST_BYTES)
        self._running: Counter[str] = Counter()  # by tenant
        self._sizes: dict[AnswerView, int] = {}  # bytes that each takes

    @property
    def num_running(self) -> int:
        """How many run now."""
        return self._running.total()

    @property
    def num_bytes(self) -> int:
        """Bytes that these take."""
        return self._bytes.num_bytes

    @asynccontextmanager
    async def of(self, record: Record) -> AsyncIterator[AnswerView]:
        """Have the frames of an answer while the block runs. Raises `ApiError` (`overloaded`)."""
        tenant = record.head.tenant
        if self._running[tenant] >= MOST - self.num_running or not self._bytes.make_room(tenant, record.size):
            raise self._refusal()
        kept = kept_of(record.head)
        view = AnswerView(record.head, record.log(kept), current=False)  # raises where notes cannot be read
        self.begun += 1
        self._running[tenant] += 1
        Following(record, self._copies, kept, view.catch_up)
        self._weigh(view, tenant, record.size)  # now: many may begin before the first of them runs
        task = self._maker.spawn(self._make(record, view))
        try:
            yield view
        finally:
            self._running[tenant] -= 1
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._weigh(view, tenant, 0)
            del self._sizes[view]

    def _weigh(self, view: AnswerView, tenant: str, size: int) -> None:
        """Take note of what a replay takes now."""
        self._bytes.take(tenant, size - self._sizes.get(view, 0))
        self._sizes[view] = size

    async def _make(self, record: Record, view: AnswerView) -> None:
        context = CallContext(continues=True)
        tenant = record.head.tenant
        visit = Visit(self._tenancy, self._tenancy.holder(tenant), None, context, charged=True)

        async def send(message: Message) -> None:
            await view.send(message)
            self._weigh(view, tenant, record.size + view.size)
            if not (view.over or self._bytes.make_room(tenant, 0)):
                view.finish(error=self._refusal())  # the answer itself goes on where it is made
                making.cancel()

        endpoint = self._maker.endpoints[record.head.path]
        scope = view.scope(tenant=visit.tenant, visit=visit)
        making = asyncio.ensure_future(endpoint(scope, view.receive(), send))
        try:
            await making
        finally:
            making.cancel()
            view.finish()

    def _refusal(self) -> ApiError:
        self.refused += 1
        most = f"of {MOST}, and of {self._bytes.most >> 20} MiB, which tenants share"
        message = (
            f"this router gives out as many answers of other routers to this tenant as it may ({most}); try later"
        )
        return ApiError("overloaded", message)
