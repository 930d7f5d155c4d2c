"""The replica deployment: one tensor-parallel group, one scheduler, one report stream to each router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from cluster.config import resolve_config
from cluster.errors import ReplicaStartError
from cluster.lifecycle.autoscaling_policy import replica_stats
from cluster.lifecycle.control_store import StartRegister, living_actors, version_of
from cluster.lifecycle.leaving import NodeEnd, call_on_leaving, stop_flag
from cluster.lifecycle.node_drains import ends_soon
from cluster.lifecycle.sleep_book import StoredOrders, watch
from cluster.lifecycle.starts import Start
from cluster.replica.orphans import watch_raylet
from cluster.telemetry.logs import log_to_serve, rank_fields
from cluster.telemetry.publishing import show_to_dashboard
from cluster.wire.link import Announcement
from engine.device.machine import collector_paused
from engine.errors import SquadronError
from parallel.errors import ParallelError

if TYPE_CHECKING:
    from cluster.replica.host import ReplicaHost


class Replica:
    """Serve builds one per replica, in bundle 0 of its placement group. Everything in it ends with any rank of it.

    title: what errors call its model, "" where there is no other.
    """

    def __init__(self, settings: dict[str, Any], title: str = "") -> None:
        name = serve.get_replica_context().replica_id.unique_id
        log_to_serve(log_format=settings["log_format"], process=rank_fields(name, settings))
        watch_raylet()
        start = _start(name, settings)
        start.hold_back()
        with collector_paused():
            # Not with this module: who only deploys it has no use for torch, which takes a core for over a second.
            from cluster.replica.host import ReplicaHost, log_folder
            from cluster.replica.worker_group import start_group

        try:
            self._config = resolve_config(settings)
            group = start_group(self._config, start.phase, name)
            self._host = ReplicaHost(name, self._config, group, start.died, log_folder())
        except (SquadronError, ParallelError) as error:
            start.failed(str(error))
            raise ReplicaStartError.of(error, title) from error
        if self._config.metrics_compat is not None:
            show_to_dashboard()
        # The replica itself notifies routers at once: Serve's notice goes by way of its controller.
        notice = call_on_leaving(self._host.core.drain, stop_flag(), NodeEnd(partial(ends_soon, group.nodes)))
        if self._config.enable_sleep_mode:
            context = serve.get_replica_context()
            book = StoredOrders(context.app_name, context.deployment)
            watch(book, asyncio.get_running_loop(), self._host.core.obey)
        self._stop_notice = asyncio.get_running_loop().create_task(notice)
        start.ready()

    async def lease(self, router_id: str, node: str, watch: None = None) -> AsyncIterator[Announcement]:
        """See `ReplicaHost.lease`. `watch` is for the router's side (`cluster.router.directory`), and None here."""
        async for announcement in self._host.lease(router_id, node):
            yield announcement

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what the autoscaling policy goes by (called by Serve)."""
        core = self._host.core
        return replica_stats(core.stats, self._config.max_num_seqs, core.prefill_wait, core.queue)

    def __del__(self) -> None:
        """Export what would be lost (called by Serve when all streams have ended, also where `__init__` failed)."""
        host: ReplicaHost | None = getattr(self, "_host", None)
        if host is not None:
            host.close_traces()

    def check_health(self) -> None:
        """Raise `EngineDeadError` when the engine does not move (called by Serve)."""
        self._host.check_health()


def _start(replica_id: str, settings: dict[str, Any]) -> Start:
    context = serve.get_replica_context()
    register = StartRegister(context.app_name, context.deployment, version_of(settings))
    actor = ray.get_runtime_context().get_actor_name() or replica_id
    return Start(register, replica_id, actor, living_actors)
