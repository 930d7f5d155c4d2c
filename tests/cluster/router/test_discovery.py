"""Lease calls through Serve's own routing loop: a call that is given up while a replica is asked stops nobody.

And the notice that a replica gets of its end.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from ray.serve._private.common import RequestMetadata
from ray.serve.request_router import PendingRequest

from cluster.lifecycle.leases import LeaseRequestRouter, ReplicaWatch

MANY = 100  # times that nobody asks in vain while only one call is there


class Router(LeaseRequestRouter):
    """The request router of a handle, without Serve around it. asked: how often it was asked for candidates."""

    def __init__(self, *names: str) -> None:
        replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in names]
        self._replicas: Any = {replica.replica_id.unique_id: replica for replica in replicas}
        self._replicas_list: Any = replicas
        self.num_routing_tasks_in_backoff = 0
        self.num_routing_tasks_in_backoff_gauge: Any = SimpleNamespace(set=lambda _: None)
        self.asked = 0
        self.initialize_state()

    def _ids(self) -> frozenset[str]:
        return frozenset(self._replicas)

    async def choose_replicas(self, *args: Any, **kwargs: Any) -> Any:
        self.asked += 1
        assert self.asked < MANY, "Serve's loop asks again and again without a pause"
        return await super().choose_replicas(*args, **kwargs)


def lease_call(*known: str) -> PendingRequest:
    watch = ReplicaWatch(asyncio.get_running_loop(), lambda _: None)
    watch.known.update(known)
    return PendingRequest([], {"watch": watch}, RequestMetadata("1", "1"))


def names(candidates: Any) -> list[str]:
    return [replica.replica_id.unique_id for replica in candidates]


async def test_a_lease_call_goes_to_a_replica_that_its_router_does_not_know() -> None:
    router, call = Router("a", "b"), lease_call("a")
    async for candidates in router._choose_replicas_with_backoff(call):
        assert names(candidates) == ["b"]
        break


async def test_a_call_that_is_given_up_while_a_replica_is_asked_ends() -> None:
    router, call = Router("a"), lease_call()
    turns = 0
    async for _ in router._choose_replicas_with_backoff(call):
        if call.future.done():  # as Serve does
            break
        turns += 1
        call.future.cancel()  # its replica was too slow to say whether it takes it, and the caller lost patience
    assert turns == 1


async def test_a_call_that_is_given_up_while_nobody_is_unknown_ends() -> None:
    router, call = Router("a"), lease_call("a")
    asyncio.get_running_loop().call_later(0.05, call.future.cancel)
    async for _ in router._choose_replicas_with_backoff(call):
        assert call.future.done()
        break
