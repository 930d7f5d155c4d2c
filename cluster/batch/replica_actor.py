"""A replica for one batch: a Ray actor of the driver's, so that Ray ends it with the driver, however that ends."""

from __future__ import annotations

import logging
from typing import Any

import ray

from cluster.config import resolve_config
from cluster.lifecycle.start_error import ReplicaStartError
from cluster.replica.group_start import start_group
from cluster.replica.host import ReplicaHost
from cluster.replica.orphans import watch_parent
from cluster.wire.announcement import Announcement
from engine.errors import SquadronError
from parallel.errors import ParallelError


class BatchReplica:
    """Sits in bundle 0 of its placement group. Raises `ReplicaStartError` where starting again would not help."""

    def __init__(self, replica_id: str, settings: dict[str, Any]) -> None:
        logging.basicConfig(level=logging.INFO)
        watch_parent()
        self._id = replica_id
        try:
            self._config = resolve_config(settings)
            self._group = start_group(self._config, replica_id=replica_id)
        except (SquadronError, ParallelError) as error:
            raise ReplicaStartError.of(error) from error

    async def announce(self, node: str) -> tuple[Announcement, str]:
        """Start to take requests; tell the driver on `node` how to reach this, and its own node. Called once."""
        self._host = ReplicaHost(self._id, self._config, self._group, lambda _: None)
        return await self._host.announce(node), ray.get_runtime_context().get_node_id()
