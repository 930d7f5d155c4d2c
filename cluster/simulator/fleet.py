"""The processes of a simulated cluster, and what starts and ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from random import Random
from typing import Any

from cluster.errors import ApiError
from cluster.ingress.gateway import GatewayApp
from cluster.lifecycle.leaving import LOOK_SECONDS
from cluster.openai.served_model import ServedModel
from cluster.router.directory import Connect
from cluster.router.sleeping import SleepingModel
from cluster.simulator.history import History, Sleep
from cluster.simulator.lives import ReplicaLife, RouterLife, Served, config_of, gateway
from cluster.simulator.network import LATENCY, NOBODY, Network
from cluster.simulator.process import SimulatedLoop, SimulatedProcess
from cluster.simulator.serve import Autoscaler, LeaseHandle, Membership, Orders
from cluster.simulator.sockets import Sockets
from cluster.wire.link import LinkAddress, OtherProtocolError, ReplicaLink
from engine.request import Request
from engine.worker.sleep import TAGS

NOTICE = 0.1  # seconds until Serve knows that a process is dead
STARTS_IN = 1.0  # seconds that a replica takes which the autoscaler asks for
GiveOrder = Callable[[SleepingModel], Coroutine[Any, Any, None]]
GRACE = 0.5  # seconds that a process has which has nothing to do any more and is to end
ORDER_AGAIN = 0.5  # seconds after which an operator gives an order again that nobody took
EVER = 1e9  # seconds
SPEECH = "protocol"  # in the name of a way: its two ends speak different ones
ABSENT = "absent"  # in the name of a place: the autoscaler wants no replica there


class Fleet:
    """All processes by the name of their place (`router-0`, `replica-1`, `holder`), one life at a time in each.

    record: folder where routers record their incidents; None = nowhere. model: what they serve over HTTP; None = they
    are asked without.
    downs: when a place, or a way between two, did not work: (from, until).
    """

    def __init__(
        self, history: History, loop: SimulatedLoop, record: str | None = None, model: ServedModel | None = None
    ) -> None:
        self.history = history
        self.loop = loop
        self.rng = Random(history.seed)
        self.model = model
        self.network = Network(loop)
        self.serve: Membership[ReplicaLife] = Membership()
        self.router_set: Membership[RouterLife] = Membership()
        self.orders = Orders()
        self.folder = 1  # version of the model that is there to be read
        loop.sockets = Sockets(self.network)
        self.routers: dict[str, RouterLife] = {}
        self.replicas: dict[str, ReplicaLife] = {}
        self.downs: dict[tuple[str, ...], list[tuple[float, float]]] = {}
        self.deaths = 0  # of replicas
        self.router_losses = 0
        self.replicas_left = self.routers_left = 0  # that died, or were to go
        self.skewed = history.updated > 0
        self.slept = False
        self.seeds: set[int] = set()  # of all that replicas have begun
        self.all_routers: list[RouterLife] = []
        self.autoscaler: Autoscaler | None = None
        self._poison = {one.seed for one in history.arrivals if one.poison}
        self._served = Served(history, config_of(history.seats, history.replicas, history.scaling), model, record)
        self._all_replicas: dict[str, ReplicaLife] = {}
        self._numbers: dict[str, int] = {}
        self._coming: set[str] = set()  # places for which the autoscaler has asked for a replica

    def begin(self) -> None:
        """Start what is there at first."""
        history = self.history
        for number in range(history.replicas):
            version = 2 if number >= history.replicas - history.updated else 1
            self.start_replica(f"replica-{number}", version)
        for number in range(history.routers):
            self.start_router(f"router-{number}")
        for slot in self.places[history.replicas :]:
            self.down((slot, ABSENT), EVER)
        if history.scaling is not None:
            config = self._served.config
            self.autoscaler = Autoscaler(config, self.serve, self.after, self._scale_to, lambda: self.loop.now)

    @property
    def places(self) -> list[str]:
        """All places in which there may be a replica."""
        return [f"replica-{number}" for number in range(self._served.config.most_replicas)]

    def new_process(self, slot: str) -> SimulatedProcess:
        """Return a new process, whose clock shows anything."""
        clocks = self.history.clocks
        ahead = Random(f"{self.history.seed}/{slot}").uniform(-clocks, clocks)
        return SimulatedProcess(slot, self.loop, self.rng.uniform(0, 1e5), ahead)

    def start_replica(self, slot: str, version: int = 1, protocol: int = 1) -> None:
        """Start a replica in a place and have Serve know it."""
        name, process = self._new_name(slot), self.new_process(slot)
        facts = self.history, version, protocol, self.rng.getrandbits(62)
        life = self.replicas[slot] = ReplicaLife(slot, name, process, *facts, self._begun, lambda: self.folder)
        self._all_replicas[life.name] = life
        self.orders.watch(process, life.core.obey)
        self._up((slot,))
        self._up((slot, ABSENT))
        for router in self.routers.values():
            self._note_speech(router, life)
        self.serve.add(life)

    def start_router(self, slot: str, protocol: int = 1) -> None:
        """Start a router in a place."""
        name, process = self._new_name(slot), self.new_process(slot)
        life = self.routers[slot] = RouterLife(
            slot,
            name,
            process,
            self._served,
            protocol,
            self.rng.getrandbits(32),
            self._leases,
            self._connecting,
            self.orders,
        )
        self.all_routers.append(life)
        for replica in self.replicas.values():
            self._note_speech(life, replica)
        self.serve.wake()
        if self.model is not None:
            self.orders.watch(process, life.sleeping.obey)
        if self.history.gateway:
            life.process.spawn(self._serve_gateways(life))

    def new_gateway(self, process: SimulatedProcess) -> GatewayApp:
        """Return the app of a gateway, in its process."""
        handle = LeaseHandle(self.router_set, process, "routers")
        return process.call(gateway, self._new_name(process.name), self._served.config, handle)

    def blind(self, seconds: float) -> None:
        """Have Serve learn nothing for a while, as its control store is lost."""
        for one in (self.serve, self.router_set, self.orders):
            one.blind = True
            self.after(seconds, self._see, one)

    def process(self, slot: str) -> SimulatedProcess | None:
        """Return what lives in a place now."""
        life = self.routers.get(slot) or self.replicas.get(slot)
        return None if life is None else life.process

    def down(self, names: tuple[str, ...], seconds: float) -> None:
        """Note that a place, or a way, does not work from now on."""
        now = self.loop.now
        self.downs.setdefault(names, []).append((now, now + seconds))

    def close_records(self) -> None:
        """Record nothing more: all is over."""
        for router in self.all_routers:
            if router.incidents is not None:
                router.incidents.close()

    def kill_replica(self, life: ReplicaLife, back: float | None, silently: bool = False) -> None:
        """End a replica, have Serve notice, and start another one."""
        if life.process.dead:
            return
        self.deaths += 1
        self.replicas_left += 1
        self.down((life.slot,), EVER)
        life.process.kill()
        self.network.died(life.process, silently)
        self.after(NOTICE, self._gone, life)
        self._replace(life, back, life.version, life.protocol)

    def engine_dies(self, life: ReplicaLife, back: float) -> None:
        """Have a replica's engine fail, and its process end a moment later."""
        if life.process.runs:
            life.process.call(life.core.on_dead, "the engine failed")
        self.after(0.05, self.kill_replica, life, back)

    def drain(self, life: ReplicaLife, back: float | None, version: int, protocol: int) -> None:
        """Have a replica go, and another one come."""
        if life.process.dead or life.drains:
            return
        self.skewed |= version != life.version
        self.down((life.slot,), EVER)  # until the other one is there
        self._let_leave(life, back, version, protocol)

    def kill_router(self, life: RouterLife, back: float | None, silently: bool) -> None:
        """End a router, have Serve notice, and start another one."""
        if life.process.dead:
            return
        self.router_losses += 1
        self.routers_left += 1
        life.killed = True
        self.down((life.slot,), EVER if back is None else back)
        self._end_router(life, silently)
        self.after(NOTICE, self._router_gone, life)
        if back is not None:
            self.after(max(back, NOTICE), self.start_router, life.slot, life.protocol)

    def let_go(self, life: RouterLife, protocol: int) -> None:
        """Have a router leave, as when its node is to end: its successor is there first."""
        if life.process.dead or life.leaves:
            return
        life.leaves = True
        self.routers_left += 1
        self.start_router(life.slot, protocol)
        life.process.spawn(self._let_go(life))

    def after(self, seconds: float, do: Callable[..., None], *args: Any) -> None:
        """Do something later, whoever is dead then."""
        self.loop.call_later(seconds, do, *args, context=NOBODY)

    def sleep(self, order: Sleep) -> None:
        """Have the model sleep for a while. What it wakes up with is what is in the folder then."""
        self.folder = order.version
        self.slept = True
        self._give(lambda sleeping: sleeping.sleep(order.level, order.mode))
        self.after(order.seconds, self._wake, order)

    def _wake(self, order: Sleep) -> None:
        if not self.orders.given:  # nobody took the order to sleep yet: an operator gives the other one after it
            self.after(ORDER_AGAIN, self._wake, order)
            return
        self.skewed |= order.level == 2 and order.version != 1
        for slot in self.replicas:  # another life may begin
            self.down((slot,), 0.0)
        self._give(lambda sleeping: sleeping.wake_up(TAGS))

    def _give(self, give: GiveOrder) -> None:
        """Give an order through some router, as often as it takes."""
        life = next((one for one in self.routers.values() if one.process.runs), None)
        if life is None:
            self.after(ORDER_AGAIN, self._give, give)
            return
        task = life.process.spawn(give(life.sleeping))
        task.add_done_callback(lambda done: self._given(done, give), context=NOBODY)

    def _given(self, done: asyncio.Task[None], give: GiveOrder) -> None:
        error = None if done.cancelled() else done.exception()
        if isinstance(error, ApiError) and error.status == 503:
            self.after(ORDER_AGAIN, self._give, give)
        elif error is not None and not isinstance(error, ApiError):
            raise error

    async def _serve_gateways(self, life: RouterLife) -> None:
        await life.listen()
        self.router_set.add(life)

    def _see(self, one: Membership[Any] | Orders) -> None:
        one.blind = False
        one.tell()

    def _new_name(self, slot: str) -> str:
        self._numbers[slot] = self._numbers.get(slot, 0) + 1
        return f"{slot}.{self._numbers[slot]}"

    def _leases(self, router: RouterLife) -> LeaseHandle:
        return LeaseHandle(self.serve, router.process)

    def _connecting(self, router: RouterLife) -> Connect:
        def connect(address: LinkAddress, router_id: str) -> Awaitable[ReplicaLink]:
            return self._connect(router, self._all_replicas[address.host], router_id)

        return connect

    async def _connect(self, router: RouterLife, replica: ReplicaLife, router_id: str) -> ReplicaLink:
        if router.protocol != replica.protocol and not replica.process.dead:
            await asyncio.sleep(2 * LATENCY)
            raise OtherProtocolError(f"the replica speaks protocol {replica.protocol}, the router {router.protocol}")
        ways = router.slot, replica.slot
        return await self.network.connect(router.process, replica.process, replica.core.serve, router_id, ways)

    def _note_speech(self, router: RouterLife, replica: ReplicaLife) -> None:
        """Note whether two places can speak with each other from now on."""
        names = router.slot, replica.slot, SPEECH
        self._up(names)
        if router.protocol != replica.protocol:
            self.down(names, EVER)

    def _up(self, names: tuple[str, ...]) -> None:
        """Note that a place, or a way, works again."""
        if names in self.downs:
            self.downs[names] = [(begin, min(end, self.loop.now)) for begin, end in self.downs[names]]

    def _begun(self, life: ReplicaLife, requests: list[Request]) -> None:
        """Take note of what a replica begins, and end it where that kills it."""
        self.seeds.update([request.seed for request in requests])
        if any(request.seed in self._poison for request in requests):
            self.after(0.001, self.kill_replica, life, 0.5)

    def _let_leave(self, life: ReplicaLife, back: float | None, version: int, protocol: int) -> None:
        life.drains = True
        self.replicas_left += 1
        life.process.call(life.core.drain)
        self.serve.remove(life)
        life.process.spawn(self._leave(life, back, version, protocol))

    async def _leave(self, life: ReplicaLife, back: float | None, version: int, protocol: int) -> None:
        await life.core.drained()
        await asyncio.sleep(GRACE)
        await life.core.close()
        self.after(0.0, self._left, life, back, version, protocol)

    def _left(self, life: ReplicaLife, back: float | None, version: int, protocol: int) -> None:
        if life.process.dead:
            return
        life.process.kill()
        self.network.died(life.process, silently=False)
        life.over.set()
        self._replace(life, back, version, protocol)

    def _replace(self, life: ReplicaLife, back: float | None, version: int, protocol: int) -> None:
        """Start another replica in the place of one. back: seconds until then; None = none comes."""
        if self.autoscaler is not None:
            self.after(NOTICE, self._scale_on)
        elif back is not None:
            self.after(back, self._succeed, life.slot, version, protocol)

    def _succeed(self, slot: str, version: int, protocol: int) -> None:
        if slot not in self.replicas or self.replicas[slot].process.dead:
            self.start_replica(slot, version, protocol)

    def _gone(self, life: ReplicaLife) -> None:
        life.over.set()
        self.serve.remove(life)

    async def _let_go(self, life: RouterLife) -> None:
        await asyncio.sleep(LOOK_SECONDS)
        if self.history.gateway:
            life.server.leave()
        if life.admission is not None:
            life.letting_go.let_go()
        self.router_set.remove(life)
        while life.exchanges or life.dispatcher.num_live or life.dispatcher.num_waiting or life.is_leased:
            await asyncio.sleep(NOTICE)
        while self.history.ingress and life.tenancy.num_open:  # the process charges for them as it ends
            await asyncio.sleep(NOTICE)
        await asyncio.sleep(GRACE)
        self.after(0.0, self._end_router, life, False)
        self.after(NOTICE, life.over.set)

    def _end_router(self, life: RouterLife, silently: bool) -> None:
        if not life.process.dead:
            life.process.kill()
            self.network.died(life.process, silently)
            self.serve.forget(life.process)
            if not self.history.gateway:
                life.over.set()
            self.router_set.remove(life)

    def _router_gone(self, life: RouterLife) -> None:
        life.over.set()
        if self.routers.get(life.slot) is life:
            del self.routers[life.slot]

    def _scale_on(self) -> None:
        if self.autoscaler is not None:
            self._scale_to(self.autoscaler.target)

    def _scale_to(self, count: int) -> None:
        """Start replicas in places that are free, or have some go."""
        members = [life for life in self.serve.members if not life.process.dead]
        for life in members[count:]:
            self.down((life.slot, ABSENT), EVER)
            self._let_leave(life, None, life.version, life.protocol)
        for slot in self.places:
            if len(members) + len(self._coming) >= count:
                return
            if slot not in self._coming and (slot not in self.replicas or self.replicas[slot].process.dead):
                self._coming.add(slot)
                self.after(STARTS_IN, self._came, slot)

    def _came(self, slot: str) -> None:
        self._coming.discard(slot)
        self._succeed(slot, 1, 1)
