"""What `/ready` says: whether requests that come now are served, for which models, and by which replicas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cluster.router.dispatcher import Dispatcher
from cluster.wire.announcement import Announcement

IN_VAIN = 60.0  # seconds that a model counts as not ready after a request waited in vain for its first replica


def ready_body(
    dispatcher: Dispatcher, announcements: Iterable[Announcement], cold_start: bool = False
) -> dict[str, Any]:
    """Return `ready` and `replicas` of one model: those of `announcements` that take requests now.

    Lease and link of a replica end one after the other: one that holds only one of the two is on its way out.
    cold_start: whether a request is served that comes while there is no replica, after it has waited for one. Then
    the model is `cold` and all the same ready, unless a request waited in vain a moment ago.
    """
    taking = {view.replica_id for view in dispatcher.replicas() if view.ready}
    replicas = [announcement.public() for announcement in announcements if announcement.replica_id in taking]
    ready = dispatcher.ready and bool(replicas)
    if not cold_start:
        return {"ready": ready, "replicas": replicas}
    cold = not ready and not dispatcher.closing
    serves = ready or (cold and dispatcher.given_up_ago > IN_VAIN)
    return {"ready": serves, "cold": cold, "replicas": replicas}


def app_ready_body(bodies: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return the body for all models, given each one's id and `ready_body`.

    The app is ready when any model is: a dead one must not have its router taken out from before the others.
    """
    return {
        "ready": any(body["ready"] for _, body in bodies),
        "models": {name: body["ready"] for name, body in bodies},
        "cold": [name for name, body in bodies if body.get("cold")],
        "replicas": [{**replica, "model": name} for name, body in bodies for replica in body["replicas"]],
    }
