"""What `/ready` says: whether requests that come now are served, for which models, and by which replicas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cluster.announcement import Announcement
from cluster.dispatcher import Dispatcher


def ready_body(dispatcher: Dispatcher, announcements: Iterable[Announcement]) -> dict[str, Any]:
    """Return `ready` and `replicas` of one model: those of `announcements` that take requests now.

    Lease and link of a replica end one after the other: one that holds only one of the two is on its way out.
    """
    taking = {view.replica_id for view in dispatcher.replicas() if view.ready}
    replicas = [announcement.public() for announcement in announcements if announcement.replica_id in taking]
    return {"ready": dispatcher.ready and bool(replicas), "replicas": replicas}


def app_ready_body(bodies: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return the body for all models, given each one's id and `ready_body`.

    The app is ready when any model is: a dead one must not have its router taken out from before the others.
    """
    return {
        "ready": any(body["ready"] for _, body in bodies),
        "models": {name: body["ready"] for name, body in bodies},
        "replicas": [{**replica, "model": name} for name, body in bodies for replica in body["replicas"]],
    }
