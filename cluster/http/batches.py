"""`/v1/batches`: requests that are answered within a day, as capacity is left.

Source: OpenAI API reference, "Batch".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.routing import Route

from cluster.batch.server.ids import BATCH_IDS
from cluster.batch.server.store import NewBatch
from cluster.http.batch_fields import (
    MOST_BATCHES,
    USUAL_BATCHES,
    BatchFields,
    BatchListFields,
    NoFields,
)
from cluster.http.exchange import read_body
from cluster.http.storage import ByMethod, Call, Stored, listed, page_asked, query_of
from cluster.openai.checking import checked_fields
from cluster.openai.off_loop import OffLoop
from cluster.openai.validation import parse_json


class BatchRoutes:
    """The routes around one store. max_body_bytes: of a request."""

    def __init__(self, stored: Stored, off_loop: OffLoop, max_body_bytes: int) -> None:
        self._stored = stored
        self._off_loop = off_loop
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[Route]:
        """Return them."""
        acts = {
            "/v1/batches": {"GET": self._list, "POST": self._create},
            "/v1/batches/{id}": {"GET": self._one},
            "/v1/batches/{id}/cancel": {"POST": self._cancel},
        }
        return [Route(path, ByMethod(self._stored, each), methods=list(each)) for path, each in acts.items()]

    async def _create(self, call: Call) -> None:
        asked = checked_fields(BatchFields, await self._fields(call))
        expiry = asked.output_expires_after
        seconds = None if expiry is None else expiry.seconds
        new = NewBatch(asked.input_file_id, asked.endpoint, asked.metadata, seconds)
        record = await self._stored.run(
            call.tenant, lambda store: store.create_batch(new, call.tenant, call.most_stored)
        )
        self._stored.opened().tell(record)
        await call.reply(record.shown())

    async def _list(self, call: Call) -> None:
        asked = query_of(call.scope, BatchListFields)
        page = page_asked(asked.limit, MOST_BATCHES, USUAL_BATCHES, asked.after, BATCH_IDS)
        found = await self._stored.run(call.tenant, lambda store: listed(store.batches.page(call.tenant, page)))
        await call.reply(found)

    async def _one(self, call: Call) -> None:
        record = await self._stored.run(call.tenant, lambda store: store.batch(call.id, call.tenant))
        await call.reply(record.shown())

    async def _cancel(self, call: Call) -> None:
        checked_fields(NoFields, await self._fields(call))
        record = await self._stored.run(call.tenant, lambda store: store.cancel_batch(call.id, call.tenant))
        await call.reply(record.shown())

    async def _fields(self, call: Call) -> Mapping[str, Any]:
        """Return the fields of a body; one that is empty has none."""
        body = await read_body(call.scope, call.receive, self._max_body_bytes, call.deadline)
        return await self._off_loop.run(len(body), lambda: parse_json(body), call.tenant) if body else {}
