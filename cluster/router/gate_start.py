"""From settings to a dispatcher's times and the gate in front of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.admission.fair_gate import FairGate
from cluster.admission.gate_config import FairGateConfig
from cluster.admission.room import Room, RoomConfig
from cluster.config import ClusterConfig
from cluster.router.dispatch_config import ADMISSION_WAIT, DispatcherConfig
from cluster.router.dispatcher import Dispatcher
from cluster.token_source import TokenSource


def dispatcher_config(config: ClusterConfig) -> DispatcherConfig:
    """Return the times of one model's dispatcher."""
    start = config.cold_start_timeout
    return DispatcherConfig(
        stall_timeout=config.stall_timeout,
        progress_timeout=2 * config.step_timeout,
        admission_wait=start if config.scales_to_zero else ADMISSION_WAIT,
        # A replica in the place of a lost one takes as long to start as a first one.
        no_replica_timeout=start if config.no_replica_timeout is None else config.no_replica_timeout,
        routing_policy=config.routing_policy,
        stream_migration=config.stream_migration,
    )


def fair_gate(
    config: ClusterConfig,
    dispatcher: Dispatcher,
    source: TokenSource | None = None,
    routers: Callable[[], int] | None = None,
) -> FairGate:
    """Return the gate of one model on one router. source: what passes requests on to the dispatcher, if not itself.

    routers: how many share what the replicas hold, asked now and then; None = as many as there should be.

    Who comes while no replica is there hears so within `ADMISSION_WAIT`. Unless the model may have none while nobody
    asks: then those who come wait for one.
    """
    counters = dispatcher.counters
    sizes = RoomConfig(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.max_inflight,
        config.max_inflight_tokens,
    )
    clock = asyncio.get_running_loop().time
    room = Room(sizes, dispatcher.room, counters.outcomes.total, clock, routers or (lambda: config.routers))
    absent_wait = config.cold_start_timeout if config.scales_to_zero else ADMISSION_WAIT
    bounds = FairGateConfig(config.max_waiting_per_tenant, config.max_queue_wait, config.target_ttft, absent_wait)
    gate = FairGate(
        source or dispatcher,
        room.sequences,
        bounds,
        room.tokens,
        lambda: counters.tokens + counters.prefilled,
        lambda: dispatcher.has_replica,
    )
    dispatcher.watch_queue(gate.demand)
    gate.on_turned_away = dispatcher.turned_away
    return gate
