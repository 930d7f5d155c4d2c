"""What must hold of a simulated cluster: after every event, and when all is over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b
from itertools import chain

from cluster.admission.keys import OPEN, Tenant
from cluster.admission.quotas import MINUTE
from cluster.router.answer_copies import NUM_COPIES, PATIENCE
from cluster.simulator.answers import DELETED, GONE, LEFT, WHOLE, Answer, Scene
from cluster.simulator.clients import CUT, LOOK
from cluster.simulator.fleet import ABSENT, EVER, SPEECH
from cluster.simulator.history import FREE, LIMITED, Arrive, Kill, Leap, Partition, SetClock, Slow, Stop
from cluster.simulator.lives import ReplicaLife, RouterLife
from cluster.simulator.network import LATENCY
from cluster.sleep_orders import ASLEEP
from engine.errors import IntegrityError
from engine.scheduler.scheduler import DEADLINE_EXCEEDED

AT_ONCE = 0.3  # seconds after which what can run does
RECOVERY = 6.0  # seconds after a fault in which its traces may last: a silence is noticed, links are made again
UNAVAILABLE = frozenset({"no_replica", "replica_lost", "router_lost", "no_router", "overloaded"})
TENANTS = OPEN, Tenant(FREE), Tenant(LIMITED)
TAKES_NO_FILES = "batches_not_enabled"
OVER_QUOTA = "rate_limit_exceeded", "prompt_exceeds_quota"
CODES_OF_KEPT = "server_error", "rate_limit_exceeded"
ENDS = ASLEEP, "request_quarantined", "model_changed", *OVER_QUOTA
DEATHS_OF_POISON = 3  # `quarantine_deaths`, and `MOST_LOSSES` of routers


def after_event(world: Scene) -> None:
    """Check what must hold at any moment."""
    for replica in _replicas(world):
        world.violations += _owned(replica)
    for life in _routers(world):
        world.violations += _sums(life)
        if waits := _could_run(life):
            world.fleet.after(AT_ONCE, _look_again, world, life, waits)
        for replica in _replicas(world):
            world.violations += _beliefs(world, life, replica)


def _could_run(life: RouterLife) -> set[str]:
    """Return what waits in a router although there is a replica for it."""
    return life.process.call(_with_a_replica, life)


def _with_a_replica(life: RouterLife) -> set[str]:
    placement, selection = life.dispatcher._placement, life.dispatcher._replicas.selection
    waiting = placement._waiting.waiting()
    in_line = set[str]()
    if life.admission is not None and life.admission._inflight.has_room():
        in_line = {f"{queued.request.request_id} in line" for queued in life.admission._queue.items()}
    could = {live.request_id for i, live in enumerate(waiting) if selection._pool_for(live, len(waiting) - i)}
    return in_line | could


def _look_again(world: Scene, life: RouterLife, waited: set[str]) -> None:
    """Note what still waits although it could run then and can now."""
    if life.process.runs and (still := waited & _could_run(life)):
        world.violations.append(f"{life.name}: {sorted(still)} wait although a replica would take them")


def at_end(world: Scene) -> None:
    """Check every answer, and the accounts."""
    for life in world.fleet.replicas.values():
        world.violations += _costs(life)
    if world.history.ingress:
        world.violations += _quotas(world)
    for answer in world.answers:
        world.violations += [f"{answer.name}: {told}" for told in _wrong(world, answer)]


def left_over(world: Scene) -> list[str]:
    """Return what should be gone when every answer has ended."""
    left = [f"{one.name} runs {one.core.num_requests} requests" for one in _replicas(world) if one.core.num_requests]
    for life in _routers(world):
        waits = life.dispatcher.num_live + life.dispatcher.num_waiting
        if life.admission is not None:
            waits += life.admission.num_waiting + sum(life.tenancy.quotas.running(one) for one in TENANTS)
            waits += life.tenancy.num_open
        if waits:
            left.append(
                f"{life.name} has {waits} requests that live, wait, are counted as running, or have yet to be charged"
            )
    scaler = world.fleet.autoscaler
    if scaler is not None and not scaler.at_rest:
        left.append(f"the autoscaler asks for {scaler.target} replicas, and nobody asks anything")
    return left


def trace_of(world: Scene) -> str:
    """Return a digest of what every client got, and when."""
    digest = blake2b(digest_size=8)
    for answer in world.answers:
        digest.update(repr((answer.name, sorted(answer.tokens.items()), answer.ends, answer.ended)).encode())
        digest.update(answer.body)
    return digest.hexdigest()


def _routers(world: Scene) -> list[RouterLife]:
    return [life for life in world.fleet.all_routers if life.process.runs]


def _replicas(world: Scene) -> list[ReplicaLife]:
    return [life for life in world.fleet.replicas.values() if life.process.runs]


def _owned(life: ReplicaLife) -> list[str]:
    """What a replica runs is of routers that it has links to."""
    sessions = life.core._sessions._sessions.values()
    known = sum(len(session.runs) for session in sessions)
    if known != life.core.num_requests:
        return [
            f"{life.name} runs {life.core.num_requests} requests, {known} of them of routers that it is linked to"
        ]
    return []


def _sums(life: RouterLife) -> list[str]:
    """Every request that was accepted has ended once, or lives."""
    counters, live = life.dispatcher.counters, life.dispatcher.num_live
    ended = sum(counters.outcomes.values())
    if counters.accepted != ended + live:
        return [f"{life.name}: {counters.accepted} requests were accepted, {ended} ended and {live} live"]
    return []


def _costs(life: ReplicaLife) -> list[str]:
    """All time of a replica's device is charged to somebody, or idle."""
    try:
        life.core._engine._accounts.check_integrity()
    except IntegrityError as error:
        return [f"{life.name}: {error}"]
    return []


def _quotas(world: Scene) -> list[str]:
    """What every request took was charged once, to its tenant, and no quota was exceeded.

    A router that died, or that a gateway could not reach, may have charged what its successor charged again: nobody
    could ask it. One that died between the end of a stored answer and its charge has not.
    """
    wrong = []
    dead = [life for life in world.fleet.all_routers if life.killed or life.apart]
    for tenant in (OPEN.name,) if world.history.quota is None else (FREE, LIMITED):
        charged, by_the_dead = _charged(world.fleet.all_routers, tenant), _charged(dead, tenant)
        answers = [one for one in world.answers if tenant == OPEN.name or one.asked.limited == (tenant == LIMITED)]
        asked = [answer.asked for answer in answers]
        whole = [one.asked for one in answers if one.ends == [WHOLE] and not _lost_its_charge(world, one)]
        for name in charged:
            least, most = _due(world, whole, name), _due(world, asked, name) + by_the_dead[name]
            if not least <= charged[name] <= most:
                wrong.append(f"{charged[name]} {name} of {tenant} were charged in place of {least} to {most}")
    return wrong + [told for life in world.fleet.all_routers for told in _exceeded(world, life)]


def _lost_its_charge(world: Scene, answer: Answer) -> bool:
    """Whether the router of a stored answer may have died just as it had ended."""
    deaths = [begin for life in world.fleet.all_routers for begin, _ in world.fleet.downs.get((life.slot,), ())]
    return answer.asked.kept and any(answer.began <= death <= answer.ended + LOOK for death in deaths)


def _exceeded(world: Scene, life: RouterLife) -> list[str]:
    """Return where a router let through more than a tenant may have, or counted other than it charged."""
    quota, wrong = world.history.quota, []
    if quota is None:
        return []
    tokens, usage = 0, life.tenancy.quotas.used()
    for minute, used in usage.items():
        tokens += sum(amount for name, amount in used.items() if name.startswith("tokens"))
        requests = sum(amount for name, amount in used.items() if name.startswith("requests"))
        if quota.requests_per_minute is not None and requests > quota.requests_per_minute:
            wrong.append(f"{life.name} let {requests} requests through in minute {minute}")
    charged = _charged([life], LIMITED)
    due = charged["tokens of prompts"] + charged["tokens of output"]
    set_anew = any(isinstance(event, SetClock) for event in world.history.events)
    is_all = world.fleet.loop.now < MINUTE and not set_anew  # else some of it counts no more
    if quota.tokens_per_minute is not None and life.process.runs and is_all and tokens != due:
        wrong.append(f"{life.name} counts {tokens} tokens for the quota, and {due} for the bill")
    return wrong


def _charged(routers: Iterable[RouterLife], tenant: str) -> Counter[str]:
    """Return what these routers have charged a tenant."""
    counts = [one for life in routers for (_, name), one in life.tenancy.counts.items() if name == tenant]
    return Counter(
        {
            "requests": sum(one.requests["admitted"] for one in counts),
            "tokens of prompts": sum(one.prompt_tokens - one.taken_back for one in counts),
            "tokens of output": sum(one.output_tokens for one in counts),
        }
    )


def _due(world: Scene, asked: Iterable[Arrive], name: str) -> int:
    """Return what is to be charged for answers."""
    match name:
        case "requests":
            return len([*asked])
        case "tokens of prompts":
            return sum(map(world.prompt_tokens, asked))
        case _:
            return sum(one.tokens * one.choices for one in asked)


def _beliefs(world: Scene, router: RouterLife, replica: ReplicaLife) -> list[str]:
    """Where nothing is on its way, a replica runs what its router believes."""
    handle = router.dispatcher._replicas.get(replica.name)
    session = replica.core._sessions.get(router.name)
    if handle is None or session is None or handle.gone:
        return []
    connections = world.fleet.network.way(router.slot, replica.slot).connections
    if (
        not connections
        or not all(one.is_quiet for one in connections)
        or handle.incarnation != replica.core.incarnation
    ):
        return []
    believed, runs = set(handle.live), set(session.runs)
    if believed != runs:
        return [f"{router.name} believes that {replica.name} runs {sorted(believed)}, it runs {sorted(runs)}"]
    return []


def _wrong(world: Scene, answer: Answer) -> list[str]:
    """Return what is wrong with an answer."""
    wrong = []
    if len(answer.ends) != 1:
        return [f"it ended {len(answer.ends)} times: {answer.ends}"]
    end = answer.ends[0]
    expected = world.expected(answer.asked)
    if end == WHOLE and answer.asked.kept:
        if answer.text not in (texts := world.texts(answer.asked)):
            wrong.append(f"whole, with {answer.text!r} in place of {texts[:1]}")
    elif end == WHOLE:
        if answer.tokens not in expected:
            wrong.append(f"whole, with {answer.tokens} in place of {expected[:1]}")
    elif answer.tokens and not any(_begins(answer.tokens, one) for one in expected):
        wrong.append(f"ended as {end} after {answer.tokens} in place of {expected[:1]}")
    if told := _untimely(world, answer, end):
        wrong.append(told)
    if end not in (WHOLE, LEFT, GONE, DELETED) and not _explained(world, answer, end):
        wrong.append(f"ended as {end} ({answer.status}), which no fault explains")
    if answer.said_gone and not _copies_are_gone(world):
        wrong.append("its client wanted to delete it, and heard that it is not there")
    if end == LEFT and answer.asked.leaves is None:
        wrong.append("its client is said to have left, and has not")
    return wrong


def _untimely(world: Scene, answer: Answer, end: str) -> str:
    """Return what is wrong with when an answer ended whose client gave it a time; "" for nothing.

    Routers keep it by their clocks, and cannot while they stand still; a slow client holds its own answer up. Who
    would not come out of a line in time hears so at once.
    """
    timeout, took = answer.asked.timeout, answer.ended - answer.began
    if timeout is None or world.fleet.slept:
        return ""
    slow = any(isinstance(event, Slow) for event in world.history.events)
    if answer.asked.kept and (end in (WHOLE, DELETED) or slow or was_out(world, answer)):  # who asks is told later
        return ""
    leapt = any(isinstance(event, Leap) for event in world.history.events)
    others = [one for one in world.answers if one.began <= answer.began and answer.began <= (one.ended or EVER)]
    in_line = not answer.tokens and len(others) > world.history.seats
    if end == DEADLINE_EXCEEDED and took < 0.9 * timeout - LATENCY and not (leapt or in_line):
        return f"its deadline of {timeout} s ended it after {took:g} s"
    late = AT_ONCE + (_late_news(world) if answer.asked.kept else 0.0)
    if took > timeout + late and not (leapt or world.fleet.router_losses or answer.asked.pace):
        return f"it took {took:g} s, and had {timeout} s"
    return ""


def _late_news(world: Scene) -> float:
    """Return the seconds in which who looks for a kept answer hears of its end: silent replicas are waited for."""
    events = world.history.events
    silent = any(isinstance(one, Stop | Partition) or (isinstance(one, Kill) and one.silently) for one in events)
    return 2 * LOOK + (PATIENCE if silent else 0.0)


def _begins(tokens: dict[int, list[int]], whole: dict[int, list[int]]) -> bool:
    return all(tokens[choice] == whole.get(choice, [])[: len(tokens[choice])] for choice in tokens)


def _explained(world: Scene, answer: Answer, code: str) -> bool:
    """Whether a fault can have led to this end, or to one of those of which a kept answer tells this alone."""
    codes = (*UNAVAILABLE, *ENDS) if answer.asked.kept and code in CODES_OF_KEPT else (code,)
    return any(_can_end_as(world, answer, one) for one in codes)


def _can_end_as(world: Scene, answer: Answer, code: str) -> bool:
    fleet = world.fleet
    if code in UNAVAILABLE and (fleet.slept or was_out(world, answer) or _waited_by_a_leapt_clock(world, answer)):
        return True
    if code == "no_replica" and answer.asked.kept and world.history.scales_to_zero:
        return True  # where there is no replica a router knows its own answers alone, and asks for none
    explained = {
        ASLEEP: fleet.slept,
        DEADLINE_EXCEEDED: answer.asked.timeout is not None,
        TAKES_NO_FILES: answer.asked.upload,
        "not_found": answer.asked.kept and _copies_are_gone(world),
        "request_quarantined": answer.asked.poison or fleet.deaths >= DEATHS_OF_POISON,
        "router_lost": fleet.router_losses >= (1 if answer.asked.upload else DEATHS_OF_POISON),
        "model_changed": fleet.skewed,
        CUT: _was_cut(world),
    }
    return explained[code] if code in explained else _over_quota(world, answer, code)


def _was_cut(world: Scene) -> bool:
    """Whether a router may have been lost between two pieces of a body or an event, and no other came in time."""
    slow = any(isinstance(event, Slow) and event.replica == "holder" for event in world.history.events)
    return slow and world.fleet.router_losses > 0


def _copies_are_gone(world: Scene) -> bool:
    """Whether all who had a kept answer may be gone. One replica may have none yet, to which the way was cut."""
    fleet = world.fleet
    unreached = any(place in way[1:] for way in fleet.downs for place in fleet.places)
    copies = min(NUM_COPIES, world.history.replicas)
    return fleet.routers_left > 0 and fleet.replicas_left >= max(1, copies - unreached)


def _over_quota(world: Scene, answer: Answer, code: str) -> bool:
    """Whether a tenant's quota can have led to this end.

    What is asked again after the loss of a router that had said nothing counts once more.
    """
    quota, asked = world.history.quota, answer.asked
    if quota is None or not asked.limited or code not in OVER_QUOTA:
        return False
    if code == "prompt_exceeds_quota":
        return quota.tokens_per_minute is not None and world.prompt_tokens(asked) > quota.tokens_per_minute
    others = [one for one in world.answers if one.asked.limited and one is not answer and one.began <= answer.ended]
    at_once = [one for one in others if not one.ends or one.ended + RECOVERY >= answer.began]
    num_asked = len(others) + world.fleet.router_losses
    tokens = sum(world.prompt_tokens(one.asked) + one.asked.tokens * one.asked.choices for one in (*others, answer))
    return (
        (quota.max_concurrent is not None and len(at_once) >= quota.max_concurrent)
        or (quota.requests_per_minute is not None and num_asked >= quota.requests_per_minute)
        or (quota.tokens_per_minute is not None and tokens > quota.tokens_per_minute)
    )


def _waited_by_a_leapt_clock(world: Scene, answer: Answer) -> bool:
    """Whether a router's clock leapt, to which the way was slow: what waits there for a first link waits less."""
    events = world.history.events
    leapt = {event.process for event in events if isinstance(event, Leap)}
    slow = {event.router for event in events if isinstance(event, Slow)}
    return bool(leapt & slow) and (answer.router is None or answer.router.slot in leapt & slow)


def was_out(world: Scene, answer: Answer) -> bool:
    """Whether at some time there was no router for a request, or one that it may have come to had no replica."""
    downs, history = world.fleet.downs, world.history
    routers = [f"router-{i}" for i in range(history.routers)]
    mine = routers if answer.router is None else [answer.router.slot]
    places = [_union(downs, (one, ABSENT)) for one in world.fleet.places]
    ways = [
        [_union(downs, (one,), (router, one), (router, one, SPEECH)) for one in world.fleet.places] for router in mine
    ]
    routers_down = [_union(downs, (one,), (one, "holder")) for one in routers]
    spans = [*routers_down, *chain(*ways)]
    begins = {begin for one in spans for begin, _ in one if answer.began <= begin <= answer.ended}
    moments = {answer.began, *begins}
    if any(all(_covers(one, moment) for one in routers_down) for moment in moments):
        return True
    return any(
        # Where all are absent the autoscaler brings one in time; one at least was taken by a fault.
        all(_covers(down, moment) or _covers(absent, moment) for down, absent in zip(way, places, strict=True))
        and any(_covers(down, moment) for down in way)
        for way in ways
        for moment in moments
    )


def _union(
    downs: dict[tuple[str, ...], list[tuple[float, float]]], *names: tuple[str, ...]
) -> list[tuple[float, float]]:
    return [(begin, end + RECOVERY) for name in names for begin, end in downs.get(name, ())]


def _covers(spans: list[tuple[float, float]], moment: float) -> bool:
    return any(begin <= moment <= end for begin, end in spans)
