"""The replicas of a batch: as many as asked for, each started anew when it ends, all gone with the driver.

A replica is a Ray actor that the driver owns, so that Ray ends it with the driver, however that ends.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict
from typing import Any

import psutil
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.batch.errors import BatchError
from cluster.config import ClusterConfig, resolve_config
from cluster.errors import ReplicaStartError, find_start_failure
from cluster.lifecycle.starts import SHORT_LIFE, pause
from cluster.replica.host import ReplicaHost
from cluster.replica.orphans import watch_raylet
from cluster.replica.worker_group import start_group
from cluster.router.dispatcher import Dispatcher
from cluster.wire.link import Announcement, LinkError
from cluster.wire.tcp import connect
from engine.errors import SquadronError
from parallel.errors import ParallelError

logger = logging.getLogger(__name__)
MAX_FAILED_STARTS = 5  # in a row, of one replica, after which the batch gives up
WAIT_LOG_SECONDS = 30.0
DRIVER = "batch"


class BatchReplica:
    """Sits in bundle 0 of its placement group. Raises `ReplicaStartError` where starting again would not help."""

    def __init__(self, replica_id: str, settings: dict[str, Any]) -> None:
        logging.basicConfig(level=logging.INFO)
        watch_raylet()
        self._id = replica_id
        try:
            self._config = resolve_config(settings)
            self._group = start_group(self._config, replica_id=replica_id)
        except (SquadronError, ParallelError) as error:
            raise ReplicaStartError.of(error) from error

    async def announce(self, node: str) -> tuple[Announcement, str]:
        """Start to take requests; return the address for a driver on `node`, and its own node. Called once."""
        self._host = ReplicaHost(self._id, self._config, self._group, lambda _: None)
        return await self._host.announce(node), ray.get_runtime_context().get_node_id()


class ReplicaPool:
    """Keeps `config.replicas` replicas linked to a dispatcher. Used on one event loop.

    bundles: resources of each rank of a replica.
    """

    def __init__(self, config: ClusterConfig, bundles: list[dict[str, float]], dispatcher: Dispatcher) -> None:
        self._config = config
        self._bundles = bundles
        self._dispatcher = dispatcher
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
            await self._until_room(number, place)
            while True:
                began, lives = self._loop.time(), lives + 1
                reason = await self._live(f"{DRIVER}-{number}-{lives}", place)
                failures = 0 if self._loop.time() - began > SHORT_LIFE and not reason else failures + 1
                if failures >= MAX_FAILED_STARTS:
                    why = reason or f"each ended within {SHORT_LIFE:g} s; --verbose shows its log"
                    raise BatchError(f"replica {number} could not be started {failures} times in a row: {why}")
                await asyncio.sleep(pause(failures))
        finally:
            remove_placement_group(place)

    async def _until_room(self, number: int, place: PlacementGroup) -> None:
        """Return when the cluster has room for a replica, and say now and then what is waited for."""
        ready = asyncio.wrap_future(place.ready().future())
        while not (await asyncio.wait([ready], timeout=WAIT_LOG_SECONDS))[0]:
            logger.warning("replica %d waits until the cluster has room for %s", number, self._bundles)
        await ready

    async def _live(self, name: str, place: PlacementGroup) -> str:
        """Start a replica and return when it has ended: why it did not come up, "" if it did."""
        actor = self._actor(name, place)
        process: psutil.Process | None = None
        try:
            announcement, node = await actor.announce.remote(self._node)
            process = _process(announcement.pids[0]) if node == self._node else None
            link = await connect(announcement.address, DRIVER)
        except (RayError, LinkError) as error:
            _raise_if_hopeless(error)
            return str(error).splitlines()[0]
        else:
            self._dispatcher.add_link(link)
            await link.wait_closed()
            logger.warning("replica %s has ended", name)
            return ""
        finally:
            _end(actor, process)

    def _actor(self, name: str, place: PlacementGroup) -> ActorHandle[Any]:
        bundle = self._bundles[0]
        options = ray.remote(BatchReplica).options(
            num_cpus=bundle.get("CPU", 0.0),
            num_gpus=bundle.get("GPU", 0.0),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(place, placement_group_bundle_index=0),
        )
        return options.remote(name, asdict(self._config))


def _end(actor: ActorHandle[Any], process: psutil.Process | None) -> None:
    """End a replica, also one that is stopped and hears nothing; its ranks, which it owns, end with it.

    process: its own, where it runs on this machine.
    """
    ray.kill(actor, no_restart=True)
    try:
        if process is not None:
            process.kill()  # psutil does not take another process that has its number by now for it
    except psutil.Error:
        return  # it is gone


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def _raise_if_hopeless(error: Exception) -> None:
    failure = find_start_failure(str(error))
    if failure is not None:
        raise BatchError(failure.message) from error
