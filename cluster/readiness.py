"""What `/ready` says: whether a request that comes now is served, and by which replicas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cluster.announcement import Announcement
from cluster.dispatcher import Dispatcher


def ready_body(dispatcher: Dispatcher, announcements: Iterable[Announcement]) -> dict[str, Any]:
    """Return `ready` and `replicas`, those of `announcements` that take requests now.

    Lease and link of a replica end one after the other: one that holds only one of the two is on its way out.
    """
    taking = {view.replica_id for view in dispatcher.replicas() if view.ready}
    replicas = [announcement.public() for announcement in announcements if announcement.replica_id in taking]
    return {"ready": dispatcher.ready and bool(replicas), "replicas": replicas}
