"""A history: who asks what, and what goes wrong when. Drawn from a seed, or written down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from cluster.admission.keys import Quota

FREE, LIMITED = "free", "limited"  # tenants, and their keys
# Of histories, those that go through the holder and HTTP; of these, whose holder is a gateway.
INGRESS_SHARE, GATEWAY_SHARE = 0.25, 0.6
ARRIVALS, FAULTS = 1.5, 2.0  # seconds from the beginning in which they come


@dataclass(frozen=True, slots=True)
class Arrive:
    """A client asks. seed: of its tokens. choices: `n`. router: which one, where there is no holder.

    stream: whether the answer is to come as it is made. pace: seconds that the client takes for each message.
    leaves: seconds after which it hangs up; None = it stays. poison: whether it kills every replica that computes it.
    timeout: seconds after which it wants no answer any more; None = it waits. Over HTTP alone: seeded: whether it
    says the seed; chat: whether it asks for a message; limited: whether it is of the tenant with a quota; kept: it
    has a response made in the background, and asks for it until it has ended; upload: it sends a file, which nobody
    may do twice for it.
    """

    at: float
    seed: int
    prompt: int = 8
    tokens: int = 12
    choices: int = 1
    router: int = 0
    stream: bool = True
    pace: float = 0.0
    leaves: float | None = None
    poison: bool = False
    timeout: float | None = None
    seeded: bool = True
    chat: bool = False
    limited: bool = False
    kept: bool = False
    upload: bool = False


@dataclass(frozen=True, slots=True)
class Delete:
    """A client wants the kept answer no more that is the `answer`th of all."""

    at: float
    answer: int


@dataclass(frozen=True, slots=True)
class Sleep:
    """The model sleeps for a while, over HTTP and on the real engine alone. version: that it wakes up with."""

    at: float
    seconds: float
    level: int = 1
    mode: str = "keep"
    version: int = 1


@dataclass(frozen=True, slots=True)
class Blind:
    """Serve learns nothing for a while: its control store is lost."""

    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Kill:
    """A process dies. back: seconds until another takes its place; None = none does. silently: with its machine."""

    at: float
    process: str
    back: float | None = 1.0
    silently: bool = False


@dataclass(frozen=True, slots=True)
class EngineDies:
    """The engine of a replica cannot go on; the replica says so and ends."""

    at: float
    process: str
    back: float = 1.0


@dataclass(frozen=True, slots=True)
class Stop:
    """A process does nothing for a while (SIGSTOP)."""

    at: float
    process: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Leap:
    """The clock of a process leaps forward."""

    at: float
    process: str
    seconds: float


@dataclass(frozen=True, slots=True)
class SetClock:
    """The time of day of a process jumps, forward or back; what it measures itself does not."""

    at: float
    process: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Cut:
    """The connections between a router and a replica, or the holder, break."""

    at: float
    router: str
    replica: str


@dataclass(frozen=True, slots=True)
class Partition:
    """Nothing gets through between a router and a replica, or the holder, for a while; then all of it comes."""

    at: float
    router: str
    replica: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Slow:
    """Frames between a router and a replica take so much longer for a while: others overtake them.

    Between a router and the holder each piece of a frame does.
    """

    at: float
    router: str
    replica: str
    delay: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Drain:
    """A replica is to go, and another comes. version / protocol: of the model, and of the links, of the other."""

    at: float
    process: str
    back: float = 0.5
    version: int = 1
    protocol: int = 1


@dataclass(frozen=True, slots=True)
class LetGo:
    """A router leaves, and lets go of its answers once its successor serves. protocol: of the successor's links."""

    at: float
    process: str
    protocol: int = 1


OfProcess = Kill | EngineDies | Stop | Leap | SetClock | Drain | LetGo
Event = Arrive | Delete | Sleep | Blind | OfProcess | Cut | Partition | Slow


@dataclass(frozen=True, slots=True)
class History:
    """seed: of all that is left to chance while it runs: choices of routers, ids, clocks.

    ingress: whether clients ask over HTTP, through the holder. real_engine: whether replicas run the real core.
    seats: sequences that a replica runs at once. updated: replicas, the last ones, that run another model at first.
    scaling: the least and most replicas, where there is an autoscaler. quota: of one of the two tenants that ask over
    HTTP; None = clients need no key. gateway: the holder is one of our own, not a proxy of Serve's. clocks: seconds
    by which the time of day of a process may be wrong.
    """

    seed: int
    routers: int
    replicas: int
    events: tuple[Event, ...]
    ingress: bool = False
    real_engine: bool = False
    seats: int = 256
    updated: int = 0
    scaling: tuple[int, int] | None = None
    quota: Quota | None = None
    gateway: bool = False
    clocks: float = 0.0

    @property
    def arrivals(self) -> list[Arrive]:
        """Those who ask."""
        return [event for event in self.events if isinstance(event, Arrive)]

    @property
    def scales_to_zero(self) -> bool:
        """Whether there may be no replica, without a fault."""
        return self.scaling is not None and self.scaling[0] == 0

    def without(self, events: set[int]) -> History:
        """Return the history without the events at these places."""
        return replace(self, events=tuple(one for i, one in enumerate(self.events) if i not in events))


def drawn(seed: int) -> History:
    """Return the history of a seed."""
    rng = Random(seed)
    ingress = rng.random() < INGRESS_SHARE
    gateway = ingress and rng.random() < GATEWAY_SHARE
    routers, replicas = rng.choice((1, 2, 2, 3) if ingress else (1, 1, 2)), rng.choice((1, 2, 2, 3, 4))
    events: list[Event] = [_arrival(rng, routers, number, ingress) for number in range(rng.randint(3, 8))]
    if gateway:
        events = [_by_gateway(rng, one) for one in events if isinstance(one, Arrive)]
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4, 6))):
        at = _moment(rng, events)
        draw = _fault_of_gateway if gateway and rng.random() < 0.4 else _fault
        events.append(draw(rng, at, routers, replicas, ingress))
    real_engine, seats = rng.random() < (0.2 if gateway else 0.05), rng.choice((256, 256, 3))
    updated = rng.randrange(replicas) if rng.random() < 0.2 and not real_engine else 0
    scaling, quota = None, None
    if rng.random() < 0.1:
        events.append(LetGo(_time(rng, FAULTS), f"router-{rng.randrange(routers)}"))
    elif not gateway and rng.random() < 0.06:
        events += _new_protocol(rng, routers, replicas)
    elif rng.random() < 0.05:
        scaling, seats = (rng.choice((0, 0, 1)), replicas + rng.choice((0, 1, 2))), 3
        events += _bursts(rng, routers, ingress)
    clocks = rng.choice((0.0, 60.0, 7200.0)) if gateway else 0.0
    if gateway:
        events += _of_gateway(rng, real_engine and scaling is None)
    if ingress and not clocks and rng.random() < 0.3:
        quota = Quota(rng.choice((None, 1, 3)), rng.choice((None, 30, 100)), rng.choice((None, 1, 2)))
        events = [replace(one, limited=rng.random() < 0.6) if isinstance(one, Arrive) else one for one in events]
    events.sort(key=lambda event: event.at)
    given = real_engine, seats, updated, scaling, quota, gateway, clocks
    return History(seed, routers, replicas, tuple(_deleting(rng, events)), ingress, *given)


def _by_gateway(rng: Random, asked: Arrive) -> Arrive:
    """Return what a client asks that comes to a gateway."""
    draw = rng.random()
    if draw < 0.3:
        tokens = rng.choice((1, 12, 60))
        return replace(asked, kept=True, tokens=tokens, choices=1, pace=0.0, leaves=None, seeded=True)
    return replace(asked, upload=True, leaves=None, poison=False, timeout=None) if draw < 0.36 else asked


def _of_gateway(rng: Random, real_engine: bool) -> list[Event]:
    """Return a sleep of the model, or nothing."""
    if real_engine and rng.random() < 0.6:
        level, mode = rng.choice((1, 2)), rng.choice(("keep", "wait", "abort"))
        return [Sleep(_time(rng, FAULTS), rng.choice((0.3, 2.0)), level, mode, rng.choice((1, level)))]
    if rng.random() < 0.9:
        return []
    pause = rng.uniform(0.8, 1.6)
    goes = [LetGo(round(0.2 + pause * i, 4), "router-0") for i in range(rng.randint(3, 8))]
    return [Arrive(0.1, rng.getrandbits(30), prompt=rng.choice((1000, 3900)), tokens=3, timeout=None), *goes]


def _deleting(rng: Random, events: list[Event]) -> list[Event]:
    """Return events with some kept answers deleted."""
    asked = [event for event in events if isinstance(event, Arrive)]
    deletes: list[Event] = [
        Delete(round(one.at + rng.choice((0.3, 1.5, 8.0)), 4), i)
        for i, one in enumerate(asked)
        if one.kept and rng.random() < 0.4
    ]
    return sorted([*events, *deletes], key=lambda event: event.at)


def _fault_of_gateway(rng: Random, at: float, routers: int, replicas: int, _: bool) -> Event:
    """Return what goes wrong between the gateway and a router, in what Serve knows, or with a clock."""
    router, seconds = f"router-{rng.randrange(routers)}", rng.choice((0.6, 4.0, 8.0, 60.0))
    either = rng.choice((router, f"replica-{rng.randrange(replicas)}"))
    makes: list[Callable[[], Event]] = [
        *2 * [lambda: Cut(at, router, "holder")],
        *3 * [lambda: Partition(at, router, "holder", seconds)],
        *2 * [lambda: Slow(at, router, "holder", rng.choice((0.005, 0.05)), rng.choice((0.6, 4.0)))],
        lambda: Blind(at, min(seconds, 8.0)),
        lambda: SetClock(at, either, rng.choice((-3600.0, 600.0, 7200.0))),
    ]
    return rng.choice(makes)()


def _new_protocol(rng: Random, routers: int, replicas: int) -> list[Event]:
    """Return an update, one copy after the other, to a version whose links speak another protocol."""
    first, pause = _time(rng, ARRIVALS), rng.choice((0.1, 1.0, 3.0))
    goes: list[Event] = [LetGo(first + pause * i, f"router-{i}", protocol=2) for i in range(routers)]
    goes += [Drain(first + pause * i, f"replica-{i}", protocol=2) for i in range(replicas)]
    return [replace(one, at=round(one.at + _time(rng, 0.3), 4)) for one in goes]


def _bursts(rng: Random, routers: int, ingress: bool) -> list[Event]:
    """Return arrivals that make an autoscaler act: more than fit at once, and one after it has let replicas go."""
    first = _time(rng, 6.0)
    burst: list[Arrive] = [_arrival(rng, routers, 1, ingress) for _ in range(rng.choice((4, 12, 24)))]
    late = _arrival(rng, routers, 1, ingress)
    return [*(replace(one, at=one.at + first) for one in burst), replace(late, at=late.at + rng.choice((15.0, 40.0)))]


def _time(rng: Random, end: float) -> float:
    return round(rng.uniform(0, end), 4)


def _arrival(rng: Random, routers: int, number: int, ingress: bool) -> Arrive:
    poison = number == 0 and rng.random() < 0.04
    return Arrive(
        _time(rng, ARRIVALS),
        rng.getrandbits(30),
        prompt=rng.choice((2, 8, 20, 60)),
        tokens=rng.choice((1, 3, 6, 12, 24)),
        choices=rng.choice((1, 1, 1, 1, 2)),
        router=rng.randrange(routers),
        stream=rng.random() < 0.8,
        pace=rng.choice((0.0, 0.0, 0.0, 0.05, 0.3)),
        leaves=_time(rng, 1.5) if rng.random() < 0.12 else None,
        poison=poison,
        timeout=rng.choice((0.3, 1.0, 4.0)) if rng.random() < 0.1 else None,
        seeded=not ingress or poison or rng.random() < 0.8,
        chat=ingress and rng.random() < 0.3,
    )


def _moment(rng: Random, events: list[Event]) -> float:
    """Return when a fault comes: most often while an answer is made."""
    if rng.random() < 0.3:
        return _time(rng, FAULTS)
    return round(rng.choice(events).at + _time(rng, 0.5), 4)


def _fault(rng: Random, at: float, routers: int, replicas: int, ingress: bool) -> Event:
    router, replica = f"router-{rng.randrange(routers)}", f"replica-{rng.randrange(replicas)}"
    either = rng.choice((router, replica))
    back = rng.choice((0.05, 0.5, 1.0, 3.0))
    seconds = rng.choice((0.1, 0.6, 2.0, 4.0, 8.0))
    died = rng.choice((replica, router)), back, rng.random() < 0.3
    held = "holder" if ingress else replica
    # Each as often as it stands here.
    makes: list[Callable[[], Event]] = [
        *5 * [lambda: Kill(at, *died)],
        *2 * [lambda: Stop(at, either, seconds)],
        lambda: Leap(at, either, rng.choice((0.5, 5.0, 40.0))),
        *3 * [lambda: Cut(at, router, replica)],
        *3 * [lambda: Partition(at, router, replica, seconds)],
        *2 * [lambda: Slow(at, router, replica, rng.choice((0.01, 0.1, 0.5)), seconds)],
        lambda: Drain(at, replica, back),
        lambda: Drain(at, replica, back, version=2),
        lambda: Kill(at, held, back),
        lambda: EngineDies(at, replica, back),
    ]
    return rng.choice(makes)()
