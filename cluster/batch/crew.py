"""The replicas of a batch: as many as asked for, each started anew when it ends, all gone with the driver."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.announcement import Announcement
from cluster.batch.errors import BatchError
from cluster.batch.replica_actor import BatchReplica
from cluster.config import ClusterConfig
from cluster.dispatcher import Dispatcher
from cluster.life.starts import SHORT_LIFE, pause
from cluster.link import LinkError
from cluster.links.tcp import connect
from cluster.start_error import find_start_failure

logger = logging.getLogger(__name__)

MAX_FAILED_STARTS = 5  # in a row, of one replica, after which the batch gives up
DRIVER = "batch"


class Crew:
    """Keeps `config.replicas` replicas linked to a dispatcher. Used on one event loop; `close` it.

    bundles: resources of each rank of a replica. on_ready: told of each replica that came up.
    """

    def __init__(
        self,
        config: ClusterConfig,
        bundles: list[dict[str, float]],
        dispatcher: Dispatcher,
        on_ready: Callable[[Announcement], None] = lambda _: None,
    ) -> None:
        self._config = config
        self._bundles = bundles
        self._dispatcher = dispatcher
        self._on_ready = on_ready
        self._node = ray.get_runtime_context().get_node_id()
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Keep the replicas up until cancelled. Raises `BatchError` when one cannot be started."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._config.replicas):
                group.create_task(self._keep(number))

    async def _keep(self, number: int) -> None:
        place = placement_group(self._bundles, strategy="PACK")
        lives = failures = 0
        try:
            await place.ready()
            while True:
                began, lives = self._loop.time(), lives + 1
                reason = await self._live(f"{DRIVER}-{number}-{lives}", place)
                failures = 0 if self._loop.time() - began > SHORT_LIFE and not reason else failures + 1
                if failures >= MAX_FAILED_STARTS:
                    raise BatchError(f"replica {number} could not be started {failures} times in a row: {reason}")
                await asyncio.sleep(pause(failures))
        finally:
            remove_placement_group(place)

    async def _live(self, name: str, place: PlacementGroup) -> str:
        """Start a replica and return when it has ended: why it did not come up, "" if it did."""
        actor = self._actor(name, place)
        pids: tuple[int, ...] = ()
        try:
            announcement = await actor.announce.remote(self._node)
            pids = announcement.pids
            link = await connect(announcement.address, DRIVER)
        except (RayError, LinkError) as error:
            _raise_if_hopeless(error)
            return str(error).splitlines()[0]
        else:
            self._dispatcher.add_link(link)
            self._on_ready(announcement)
            await link.wait_closed()
            logger.warning("replica %s has ended", name)
            return ""
        finally:
            self._end(actor, pids)

    def _actor(self, name: str, place: PlacementGroup) -> ActorHandle[Any]:
        bundle = self._bundles[0]
        options = ray.remote(BatchReplica).options(
            num_cpus=bundle.get("CPU", 0.0),
            num_gpus=bundle.get("GPU", 0.0),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(place, placement_group_bundle_index=0),
        )
        return options.remote(name, asdict(self._config))

    def _end(self, actor: ActorHandle[Any], pids: tuple[int, ...]) -> None:
        """End a replica and its ranks, also one that is stopped and hears nothing."""
        ray.kill(actor, no_restart=True)
        for pid in pids if self._config.link_host is None else ():
            _kill_ray_worker(pid)


def _raise_if_hopeless(error: Exception) -> None:
    failure = find_start_failure(str(error))
    if failure is not None:
        raise BatchError(failure.message) from error


def _kill_ray_worker(pid: int) -> None:
    """Kill a process if it is one of Ray's on this machine: pids of other nodes mean something else here."""
    try:
        with open(f"/proc/{pid}/comm", encoding="ascii") as name:
            ours = name.read().startswith("ray::")
        if ours:
            os.kill(pid, signal.SIGKILL)
    except OSError:
        return  # it is gone
