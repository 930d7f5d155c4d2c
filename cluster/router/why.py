"""What `/why/{id}` says: what a request waited for, in line for its tenant's turn, in routers, and on replicas."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from cluster.admission.tenant import Tenant
from cluster.errors import ApiError
from cluster.router.inquiries import Told
from cluster.router.models.front import ModelFront
from cluster.wire.message_parts import Waited
from engine.telemetry.flight import Wait

LONGEST_NAME = 256
OF_ALL = frozenset({Wait.TURN, Wait.BLOCKS})  # their details count what others do, to the token


async def why(
    fronts: Iterable[ModelFront], name: str, asker: Tenant, clock: Callable[[], float] = time.time
) -> dict[str, Any]:
    """Return the body for a request by the id that its answer bears; clock: seconds since 1970.

    Who does not run the server is not told how much of others' work went before, nor how many blocks are free.
    Raises `ApiError` (404) where nothing is known: it did not have to wait, or that was long ago, or there is none.
    One of another tenant looks the same.
    """
    if len(name) > LONGEST_NAME:
        raise ApiError("invalid_request", f"the id may have at most {LONGEST_NAME} characters", param="id")
    tenant = None if asker.sees_all else asker.name
    events: list[Told] = []
    silent: list[str] = []
    for front in fronts:
        found = await front.explain(name, tenant)
        in_line = [Told(Waited(age, Wait.TURN, detail)) for age, detail in front.gate.waits_for(name, tenant)]
        events += [*found.events, *in_line]
        silent += found.silent
    if not events:
        unheard = f"; no answer from {', '.join(silent)}" if silent else ""
        lost = "it had to wait for nothing, or that was long ago, or on a replica that is lost"
        goes_by = "requests go by the `id` of their answer, such as chatcmpl-..."  # not by Serve's `x-request-id`
        raise ApiError("not_found", f"nothing is known of {name!r}: {lost}{unheard}; {goes_by}")
    now = clock()
    return {"id": name, "events": [_shown(told, now, asker) for told in events], "silent": silent}


def _shown(told: Told, now: float, asker: Tenant) -> dict[str, Any]:
    event = told.event
    at = now - event.age
    detail = event.detail if asker.sees_all or event.what not in OF_ALL else ""
    return {"at": at, "age": event.age, "what": event.what, "detail": detail, "replica": told.replica}
