"""From settings to the gate in front of a dispatcher."""

from __future__ import annotations

import asyncio

from cluster.admission.room import UNBOUNDED, ReplicaRoom, Room, RoomConfig
from cluster.config import ClusterConfig
from cluster.dispatcher import Dispatcher
from cluster.generation import TokenSource
from cluster.tenants.fair_gate import FairGate
from cluster.tenants.gate_config import FairGateConfig


def fair_gate(config: ClusterConfig, dispatcher: Dispatcher, source: TokenSource | None = None) -> FairGate:
    """Return the gate of one model on one router. source: what passes requests on to the dispatcher, if not itself.

    Where no replica is ready nobody is held back: the dispatcher says at once what is wrong. Unless the model may
    have none while nobody asks: then those who come wait for one.
    """
    counters = dispatcher.counters
    sizes = RoomConfig(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.routers,
        config.max_inflight,
        config.max_inflight_tokens,
    )

    def present() -> ReplicaRoom | None:
        room = dispatcher.room()
        if room is None and config.scales_to_zero and not dispatcher.closing:
            return ReplicaRoom(1, UNBOUNDED)  # as much as the first replica will take may wait for it, the rest here
        return room

    room = Room(sizes, present, counters.outcomes.total, asyncio.get_running_loop().time)
    cold_wait = config.cold_start_timeout if config.scales_to_zero else None
    bounds = FairGateConfig(config.max_waiting_per_tenant, config.max_queue_wait, config.target_ttft, cold_wait)
    gate = FairGate(
        source or dispatcher,
        room.sequences,
        bounds,
        room.tokens,
        lambda: counters.tokens + counters.prefilled,
        lambda: dispatcher.ready,
    )
    dispatcher.watch_queue(gate.demand)
    gate.on_turned_away = dispatcher.turned_away
    return gate
