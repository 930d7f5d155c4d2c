"""What Ray Serve does for a simulated cluster: the set of replicas that it sees, leases, and autoscaling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from cluster.config import ClusterConfig, scaling_settings
from cluster.lifecycle.autoscaling_policy import Scaler, read_stats, replica_stats
from cluster.lifecycle.leases import ReplicaWatch
from cluster.lifecycle.serve_autoscaling import REPORT_SECONDS
from cluster.simulator.lives import BLOCK, BLOCKS, ReplicaLife, RouterLife
from cluster.wire.link import Announcement, LinkAddress

LOOK_SECONDS = 0.25  # after which Serve's router looks again who is there


class Membership:
    """Serve's set of replicas, of which it tells routers. called: what to do when a lease call finds none."""

    def __init__(self, called: Callable[[], None] = lambda: None) -> None:
        self.called = called
        self._serving: dict[str, ReplicaLife] = {}
        self._watches: list[tuple[RouterLife, ReplicaWatch]] = []
        self._changed: list[asyncio.Future[None]] = []

    @property
    def members(self) -> list[ReplicaLife]:
        """Replicas that serve and are not to go."""
        return list(self._serving.values())

    def add(self, life: ReplicaLife) -> None:
        """Have a replica serve."""
        self._serving[life.name] = life
        self._tell()

    def remove(self, life: ReplicaLife) -> None:
        """Have a replica serve no more."""
        self._serving.pop(life.name, None)
        self._tell()

    def watch(self, router: RouterLife, watch: ReplicaWatch) -> None:
        """Tell a router of the set, now and whenever it changes."""
        if all(one is not watch for _, one in self._watches):
            self._watches.append((router, watch))
            router.process.call(watch.members_changed, frozenset(self._serving))

    def forget(self, router: RouterLife) -> None:
        """Tell a router nothing more."""
        self._watches = [one for one in self._watches if one[0] is not router]

    def wake(self) -> None:
        """Wake all that wait for a change."""
        waiting, self._changed = self._changed, []
        for one in waiting:
            _end(one)

    async def changed_or(self, seconds: float) -> None:
        """Wait until something changed, or so long."""
        loop = asyncio.get_running_loop()
        change: asyncio.Future[None] = loop.create_future()
        self._changed.append(change)
        timer = loop.call_later(seconds, _end, change)
        try:
            await change
        finally:
            timer.cancel()

    def _tell(self) -> None:
        ids = frozenset(self._serving)
        for router, watch in self._watches:
            router.process.call(watch.members_changed, ids)
        self.wake()


@dataclass
class LeaseHandle:
    """A router's handle of the replica deployment, as far as `ReplicaDirectory` uses one."""

    membership: Membership
    router: RouterLife
    deployment_name: str = "replicas"

    def options(self, stream: bool) -> LeaseHandle:
        """Return the handle of a method that streams."""
        return self

    @property
    def lease(self) -> LeaseHandle:
        """The method."""
        return self

    def remote(self, router_id: str, node: str, watch: ReplicaWatch) -> Lease:
        """Call it."""
        return Lease(self.membership, self.router, watch)


class Lease:
    """The stream that answers a lease call: the replica's announcement, then nothing until it ends."""

    def __init__(self, membership: Membership, router: RouterLife, watch: ReplicaWatch) -> None:
        self._membership = membership
        self._router = router
        self._watch = watch
        self._life: ReplicaLife | None = None

    def __aiter__(self) -> Lease:
        return self

    async def __anext__(self) -> Announcement:
        if self._life is not None:
            await self._life.over.wait()
            raise RuntimeError("the replica has ended")
        serve = self._membership
        serve.watch(self._router, self._watch)
        while True:
            fresh = [life for life in serve.members if life.name not in self._watch.known]
            # Serve asks those it chooses from how much they have to do, and takes none that does not answer.
            self._life = next((life for life in fresh if life.process.runs), None)
            if self._life is not None:
                address = LinkAddress(self._life.name, 1, "")
                return Announcement(self._life.name, address, {}, BLOCKS * BLOCK, (1,))
            if not serve.members:
                serve.called()
            await serve.changed_or(LOOK_SECONDS)

    def cancel(self) -> None:
        """Give it back."""


class Autoscaler:
    """What Serve's controller does with our policy: asks replicas for their load and says how many there should be.

    later: does something later. go_to: starts replicas or has some go, until there are so many.
    """

    def __init__(
        self,
        config: ClusterConfig,
        membership: Membership,
        later: Callable[[float, Callable[[], None]], None],
        go_to: Callable[[int], None],
        now: Callable[[], float],
    ) -> None:
        settings = scaling_settings(config)
        if settings is None:
            raise ValueError("a deployment of a fixed number of replicas is not scaled: give max_replicas")
        self.settings = settings
        self.target = config.replicas
        self._scaler = Scaler(settings)
        self._seats = config.max_num_seqs
        self._membership = membership
        self._later = later
        self._go_to = go_to
        self._now = now
        membership.called = self._called
        later(REPORT_SECONDS, self._look)

    @property
    def at_rest(self) -> bool:
        """Whether there are no more replicas than there must be."""
        return self.target == self.settings.min_replicas

    def _look(self) -> None:
        self._later(REPORT_SECONDS, self._look)
        members = self._membership.members
        metrics: dict[str, dict[str, Any]] = {}
        reporting = [life for life in members if life.process.runs]
        for life in reporting:
            core = life.core
            for name, value in replica_stats(core.stats, self._seats, core.prefill_wait, core.queue).items():
                metrics.setdefault(name, {})[life.name] = [SimpleNamespace(value=value)]
        missing = len(members) - len(reporting)
        self.target = self._scaler.decide(self._now(), self.target, *read_stats(metrics), missing)
        self._go_to(self.target)

    def _called(self) -> None:
        """A call waits for a first replica: Serve starts one itself."""
        if self.target == 0:
            self.target = 1
            self._go_to(1)


def _end(change: asyncio.Future[None]) -> None:
    if not change.done():
        change.set_result(None)
