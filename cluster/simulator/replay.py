"""From the files that routers recorded (`--record-incidents`) to a history: who asked when, which links ended why.

What a record does not say is filled in: prompts of the same lengths, and faults that end links in the same way at the
same time. A replica that died is killed, one that was silent and came back is stopped, one that one router alone lost
is cut off from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec import DecodeError, json

from cluster.simulator.history import Arrive, Cut, Drain, EngineDies, Event, History, Kill, Partition, Stop
from cluster.simulator.lives import CONFIG, CONTEXT
from cluster.simulator.world import LINKED
from cluster.wire.link import CLOSED, DAMAGED, DRAINED, ENGINE_DEAD, LOST, SLOW_CONSUMER, STALLED
from engine.errors import ConfigError

TOGETHER = 1.0  # seconds within which several routers lose a replica of one cause
NEXT = 60.0  # seconds within which a new replica, or router, is taken for the successor of a lost one


@dataclass(slots=True)
class RouterRecord:
    """What one router recorded; times in seconds since 1970."""

    name: str
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def first(self) -> float:
        """When it began."""
        return float(self.events[0]["t"])

    @property
    def last(self) -> float:
        """When it last recorded something."""
        return float(self.events[-1]["t"])


@dataclass(slots=True)
class ReplicaRecord:
    """One life of a replica, over all routers. links: (router, from, until, code); until is None where it holds."""

    name: str
    links: list[tuple[int, float, float | None, str]] = field(default_factory=list)

    @property
    def first(self) -> float:
        """When a router first had a link to it."""
        return min(link[1] for link in self.links)

    def ends(self) -> list[tuple[int, float, str]]:
        """Return router, time and code of each link that ended."""
        return sorted(((router, end, code) for router, _, end, code in self.links if end is not None), key=_time)

    def next_link(self, router: int, after: float) -> float | None:
        """Return when a router had a link again."""
        return min((begin for one, begin, _, _ in self.links if one == router and begin >= after), default=None)


def read(paths: Iterable[Path]) -> list[RouterRecord]:
    """Read routers' files, those that were put aside (`.1`) included; raises `ConfigError` naming a bad one."""
    records: dict[str, RouterRecord] = {}
    for path in sorted(paths, key=lambda path: (path.name.removesuffix(".1"), not path.name.endswith(".1"))):
        router, ahead = "", 0.0  # by how much the time of day is ahead of the router's clock
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            try:
                told = json.decode(line)
                if told["what"] == "start":
                    router, ahead = told["router"], told["wall"] - told["t"]
                elif not router:
                    raise KeyError("start")
                told["t"] += ahead
            except (DecodeError, KeyError, TypeError) as error:
                if number > 1 and not line.endswith(b"}"):
                    break  # its router died while it wrote
                raise ConfigError(
                    f"{path}: line {number} is not of an incident's record; give files that --record-incidents has "
                    "written",
                    "replay",
                ) from error
            records.setdefault(router, RouterRecord(router)).events.append(told)
    if not records:
        raise ConfigError(
            "there is no record of an incident: give files that --record-incidents has written", "replay"
        )
    return sorted(records.values(), key=lambda record: record.first)


def history_of(records: Sequence[RouterRecord], seed: int = 0) -> History:
    """Return the history of an incident."""
    zero, end = records[0].first, max(record.last for record in records)
    router_slots, events = _routers(records, end)
    slots = {number: router_slots[number] for number in range(len(records))}
    replicas = _replicas(records)
    replica_slots = _replica_slots(replicas)
    for replica in replicas:
        events += _faults(replica, replicas, replica_slots, slots, len({*slots.values()}))
    events += [
        _arrival(told, ends, slots[number])
        for number, record in enumerate(records)
        for ends in [{told["request"]: told for told in record.events if told["what"] == "end"}]
        for told in record.events
        if told["what"] == "arrive"
    ]
    zero += LINKED
    moved = sorted((_at(event, event.at - zero) for event in events), key=lambda event: event.at)
    return History(seed, max(slots.values()) + 1, max(replica_slots.values(), default=0) + 1, tuple(moved))


def outcomes(records: Iterable[RouterRecord]) -> Counter[str]:
    """Return how many requests ended how, as the routers recorded it."""
    return Counter(told["outcome"] for record in records for told in record.events if told["what"] == "end")


def _routers(records: Sequence[RouterRecord], end: float) -> tuple[list[int], list[Event]]:
    """Return each router's place, and the deaths of those whose records end before the others'."""
    places: list[int] = []
    lasts: list[float] = []  # by place
    deaths: list[Event] = []
    for record in records:
        free = [place for place, last in enumerate(lasts) if last <= record.first <= last + NEXT]
        if free:
            place = free[0]
            deaths.append(Kill(lasts[place], f"router-{place}", max(0.05, record.first - lasts[place])))
            lasts[place] = record.last
        else:
            place = len(lasts)
            lasts.append(record.last)
        places.append(place)
    deaths += [
        Kill(last, f"router-{i}", None) for i, last in enumerate(lasts) if last < end - 2 * CONFIG.stall_timeout
    ]
    return places, deaths


def _replicas(records: Sequence[RouterRecord]) -> list[ReplicaRecord]:
    """Return the lives of replicas, in the order in which they were first seen."""
    found: dict[str, ReplicaRecord] = {}
    for number, record in enumerate(records):
        since: dict[str, float] = {}
        for told in record.events:
            name = told.get("replica", "")
            if told["what"] == "linked":
                since[name] = told["t"]
            elif told["what"] == "unlinked" and name in since:
                life = found.setdefault(name, ReplicaRecord(name))
                life.links.append((number, since.pop(name), told["t"], told["code"]))
        for name, begin in since.items():
            found.setdefault(name, ReplicaRecord(name)).links.append((number, begin, None, ""))
    return sorted(found.values(), key=lambda life: life.first)


def _replica_slots(replicas: Sequence[ReplicaRecord]) -> dict[str, int]:
    """Return each replica's place: that of one which was lost before, where there is one."""
    slots: dict[str, int] = {}
    ends: dict[int, float] = {}  # place -> when it was lost for good
    for life in replicas:
        free = [slot for slot, end in ends.items() if end <= life.first <= end + NEXT]
        slot = min(free, key=lambda one: ends[one]) if free else len({*slots.values()})
        slots[life.name] = slot
        ends.pop(slot, None)
        if all(until is not None for _, _, until, _ in life.links):
            ends[slot] = max(until for _, _, until, _ in life.links if until is not None)
    return slots


def _faults(
    life: ReplicaRecord,
    replicas: Sequence[ReplicaRecord],
    slots: Mapping[str, int],
    routers: Mapping[int, int],
    num_routers: int,
) -> list[Event]:
    """Return what ends the links of one life of a replica as they ended."""
    place, found, done = f"replica-{slots[life.name]}", list[Event](), float("-inf")
    successor = min(
        (other.first for other in replicas if slots[other.name] == slots[life.name] and other.first > life.first),
        default=None,
    )
    for router, end, code in life.ends():
        if end <= done:
            continue
        back = life.next_link(router, end)
        wait = 1e6 if successor is None else max(0.05, successor - end)
        together = {one for one, at, _ in life.ends() if abs(at - end) <= TOGETHER}
        alone = len({routers[one] for one in together}) < num_routers
        if code in (LOST, ENGINE_DEAD) and back is None and not alone:
            fault = EngineDies(end, place, wait) if code == ENGINE_DEAD else Kill(end, place, wait)
            found.append(fault)
            done = float("inf")
        elif code == DRAINED and back is None:
            found.append(Drain(end, place, wait))
            done = float("inf")
        elif code == STALLED:
            begin = end - CONFIG.stall_timeout
            seconds = (end + wait if back is None else back) - begin
            if alone:
                found.append(Partition(begin, f"router-{routers[router]}", place, min(seconds, 600.0)))
            else:
                found.append(Stop(begin, place, min(seconds, 600.0)))
                done = begin + seconds
        elif code in (LOST, DAMAGED, SLOW_CONSUMER, CLOSED) and back is not None:
            found.append(Cut(end, f"router-{routers[router]}", place))
    return found


def _arrival(told: Mapping[str, Any], ends: Mapping[int, Mapping[str, Any]], router: int) -> Arrive:
    end = ends.get(told["request"])
    outcome = "" if end is None else end["outcome"]
    drawn = -(-end["tokens"] // told["n"]) if end is not None and outcome == "completed" else 0
    prompt = min(told["prompt"], CONTEXT // 2)
    tokens = max(1, min(drawn or told["max_tokens"] or CONTEXT, CONTEXT // 2))
    leaves = round(end["t"] - told["t"], 4) if end is not None and outcome == "aborted" else None
    return Arrive(told["t"], told["seed"] % 2**60, prompt, tokens, told["n"], router, leaves=leaves)


def _at(event: Event, at: float) -> Event:
    return replace(event, at=max(0.0, round(at, 4)))


def _time(end: tuple[int, float, str]) -> float:
    return end[1]
