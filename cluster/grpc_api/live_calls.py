"""The calls that run now, so that one call can end another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from cluster.errors import ApiError


@dataclass(frozen=True, slots=True)
class _LiveCall:
    tenant: str
    scope: asyncio.Timeout


class LiveCalls:
    """Calls by the request id that their first response told. Used on one event loop."""

    def __init__(self) -> None:
        self._calls: dict[str, _LiveCall] = {}

    def __len__(self) -> int:
        return len(self._calls)

    @asynccontextmanager
    async def running(self, request_id: str, tenant: str) -> AsyncGenerator[None, None]:
        """Hold a call while it runs; raises `ApiError` (`aborted`) inside its task when it is aborted.

        A timeout that is set to now ends whatever the call waits for, which costs nothing for each token.
        """
        try:
            async with asyncio.timeout(None) as scope:
                self._calls[request_id] = _LiveCall(tenant, scope)
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise ApiError("aborted", "the request was aborted by a call of Abort", status=499) from None
        finally:
            self._calls.pop(request_id, None)

    def abort(self, request_id: str, tenant: str) -> None:
        """End a call of `tenant`; raises `ApiError` (`not_found`), for those of others too."""
        call = self._calls.get(request_id)
        if call is None or call.tenant != tenant:
            message = f"no request {request_id[:100]!r} runs on this connection's router; it may have ended"
            raise ApiError("not_found", message, param="request_id")
        del self._calls[request_id]
        call.scope.reschedule(asyncio.get_running_loop().time())
