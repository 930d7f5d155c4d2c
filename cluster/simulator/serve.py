"""What Ray Serve does for a simulated cluster: the set of replicas that it sees, leases, and autoscaling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Generic, Protocol, TypeVar

from cluster.config import ClusterConfig, scaling_settings
from cluster.errors import ApiError
from cluster.lifecycle.autoscaling_policy import Scaler, read_stats, replica_stats
from cluster.lifecycle.leases import ReplicaWatch
from cluster.lifecycle.serve_autoscaling import REPORT_SECONDS
from cluster.simulator.lives import ReplicaLife
from cluster.simulator.process import SimulatedProcess
from cluster.sleep_orders import OrderBook, SleepOrder

LOOK_SECONDS = 0.25  # after which Serve's router looks again who is there


class Member(Protocol):
    """A life of a copy of a deployment. over: its process has ended, and Serve knows it."""

    name: str
    process: SimulatedProcess
    over: asyncio.Event

    @property
    def announcement(self) -> Any:
        """What a lease of it says first."""


M = TypeVar("M", bound=Member)


class Membership(Generic[M]):
    """Serve's set of copies of a deployment, of which it tells those who lease them.

    called: what to do when a lease call finds none. blind: Serve knows nothing new, as its control store is lost.
    """

    def __init__(self, called: Callable[[], None] = lambda: None) -> None:
        self.called = called
        self.blind = False
        self._serving: dict[str, M] = {}
        self._known: dict[str, M] = {}  # of these, those that Serve knows of
        self._watches: list[tuple[SimulatedProcess, ReplicaWatch]] = []
        self._changed: list[asyncio.Future[None]] = []

    @property
    def members(self) -> list[M]:
        """Copies that serve and are not to go, for all that Serve knows."""
        return list(self._known.values())

    def add(self, life: M) -> None:
        """Have a copy serve."""
        self._serving[life.name] = life
        self.tell()

    def remove(self, life: M) -> None:
        """Have a copy serve no more."""
        self._serving.pop(life.name, None)
        self.tell()

    def watch(self, caller: SimulatedProcess, watch: ReplicaWatch) -> None:
        """Tell a caller of the set, now and whenever it changes."""
        if all(one is not watch for _, one in self._watches):
            self._watches.append((caller, watch))
            caller.call(watch.members_changed, frozenset(self._known))

    def forget(self, caller: SimulatedProcess) -> None:
        """Tell a caller nothing more."""
        self._watches = [one for one in self._watches if one[0] is not caller]

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

    def tell(self) -> None:
        """Have all callers know who is there."""
        if self.blind:
            return
        self._known = dict(self._serving)
        ids = frozenset(self._known)
        for caller, watch in self._watches:
            caller.call(watch.members_changed, ids)
        self.wake()


class Orders(OrderBook):
    """The order to sleep or to wake, in the control store. watched: called with each. blind: as of `Membership`."""

    def __init__(self) -> None:
        self.blind = False
        self.watched: list[tuple[SimulatedProcess, Callable[[SleepOrder], None]]] = []
        self._order = SleepOrder()

    @property
    def given(self) -> bool:
        """Whether there was any order so far."""
        return bool(self._order.ticket)

    def read(self) -> SleepOrder:
        """See `OrderBook.read`."""
        if self.blind:
            raise ApiError("internal_error", "the control store does not answer", status=503)
        return self._order

    def write(self, order: SleepOrder) -> None:
        """See `OrderBook.write`."""
        self.read()
        self._order = order
        self.tell()

    def watch(self, process: SimulatedProcess, obey: Callable[[SleepOrder], None]) -> None:
        """Tell a process of the order, now and whenever another one is given."""
        self.watched.append((process, obey))
        self.tell()

    def tell(self) -> None:
        """Have all who watch know the order in force."""
        loop = asyncio.get_running_loop()
        for process, obey in self.watched if not self.blind and self._order.ticket else ():
            loop.call_soon(obey, self._order, context=process.context.copy())


@dataclass
class LeaseHandle:
    """A caller's handle of a deployment, as far as its register of copies uses one."""

    membership: Membership[Any]
    caller: SimulatedProcess
    deployment_name: str = "replicas"

    def options(self, stream: bool) -> LeaseHandle:
        """Return the handle of a method that streams."""
        return self

    @property
    def lease(self) -> LeaseHandle:
        """The method."""
        return self

    def remote(self, caller_id: str, node: str, watch: ReplicaWatch) -> Lease:
        """Call it."""
        return Lease(self.membership, self.caller, watch)


class Lease:
    """The stream that answers a lease call: the copy's announcement, then nothing until it ends."""

    def __init__(self, membership: Membership[Any], caller: SimulatedProcess, watch: ReplicaWatch) -> None:
        self._membership = membership
        self._caller = caller
        self._watch = watch
        self._life: Member | None = None

    def __aiter__(self) -> Lease:
        return self

    async def __anext__(self) -> Any:
        if self._life is not None:
            await self._life.over.wait()
            raise RuntimeError("the copy has ended")
        serve = self._membership
        serve.watch(self._caller, self._watch)
        while True:
            fresh = [life for life in serve.members if life.name not in self._watch.known]
            # Serve asks those it chooses from how much they have to do, and takes none that does not answer.
            self._life = next((life for life in fresh if life.process.runs), None)
            if self._life is not None:
                return self._life.announcement
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
        membership: Membership[ReplicaLife],
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
