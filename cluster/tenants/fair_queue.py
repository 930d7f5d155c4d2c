"""Whose turn it is: start-time fair queueing over tenants, weighted by tokens. Pure bookkeeping, nothing waits here.

Each tenant has a line of its own. A tenant's next turn has a start tag: the virtual time, or the tenant's own finish
tag where that is later; the smallest start tag goes first, virtual time follows it, and the tenant's finish tag moves
on by what the turn costs. So of any two tenants that wait all the time, each gets the same tokens, give or take one
turn; a tenant that comes anew is behind at most one turn of each other one; and a tenant alone gets everything.
Within a tenant the smaller priority goes first, then who came first.
Source: Goyal, Vin, Cheng, "Start-time Fair Queuing", SIGCOMM 1996.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heappushpop
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass(slots=True)
class _Line(Generic[T]):
    """What waits of one priority -> its cost, in order of arrival. work: of all of it, in tokens."""

    items: dict[T, tuple[int, int]] = field(default_factory=dict)  # (cost, work)
    work: int = 0

    def add(self, item: T, cost: int, work: int) -> None:
        self.items[item] = cost, work
        self.work += work

    def take(self, item: T) -> int:
        cost, work = self.items.pop(item)
        self.work -= work
        return cost


@dataclass(slots=True)
class _Flow(Generic[T]):
    """One tenant. lines: by priority, none empty. finish: its finish tag, in tokens."""

    lines: dict[int, _Line[T]] = field(default_factory=dict)
    finish: int = 0
    size: int = 0

    def add(self, item: T, cost: int, priority: int, work: int) -> None:
        line = self.lines.get(priority)
        if line is None:
            line = self.lines[priority] = _Line()
        line.add(item, cost, work)
        self.size += 1

    def first(self) -> tuple[int, T]:
        priority = min(self.lines)
        return priority, next(iter(self.lines[priority].items))

    def take(self, priority: int, item: T) -> int:
        line = self.lines[priority]
        cost = line.take(item)
        self.size -= 1
        if not line.items:
            del self.lines[priority]
        return cost

    def priority_of(self, item: T) -> int:
        for priority, line in self.lines.items():
            if item in line.items:
                return priority
        raise KeyError(item)

    def work(self, priority: int | None = None) -> int:
        """Tokens of work of what waits, of `priority` and what goes before it only."""
        return sum(line.work for level, line in self.lines.items() if priority is None or level <= priority)


class FairQueue(Generic[T]):
    """Items wait in the line of their tenant; each stands in it once. Costs are whole tokens, at least 1."""

    def __init__(self) -> None:
        self._flows: dict[str, _Flow[T]] = {}
        # (start tag, number, tenant), one for each tenant that waits. A tag may be out of date: too small, never
        # too large, since a tenant's finish tag only moves on.
        self._turns: list[tuple[int, int, str]] = []
        self._now = 0
        self._number = 0
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def length(self, tenant: str) -> int:
        """Items of one tenant that wait."""
        flow = self._flows.get(tenant)
        return flow.size if flow is not None else 0

    def lengths(self) -> dict[str, int]:
        """Return how many items of each tenant wait, of those that have any."""
        return {tenant: self._flows[tenant].size for _, _, tenant in self._turns}

    @property
    def work(self) -> int:
        """Tokens of work of all that waits."""
        return sum(self._flows[tenant].work() for _, _, tenant in self._turns)

    def work_ahead(self, tenant: str, priority: int, work: int) -> int:
        """Return the tokens of work that go before a newcomer of `tenant` that brings `work`.

        All that stands before it in its own line; and of each other tenant as much as this one gets meanwhile.
        """
        flow = self._flows.get(tenant)
        own = flow.work(priority) if flow is not None else 0
        others = [self._flows[name].work() for _, _, name in self._turns if name != tenant]
        return own + sum(min(other, own + work) for other in others)

    def oldest(self) -> list[T]:
        """Return the first of each line of each tenant: among them is the one that waits longest."""
        lines = [line for _, _, tenant in self._turns for line in self._flows[tenant].lines.values()]
        return [next(iter(line.items)) for line in lines]

    def last(self, tenant: str) -> tuple[int, T]:
        """Return the priority and the item of a tenant that would be served last of all its own."""
        flow = self._flows[tenant]
        priority = max(flow.lines)
        return priority, next(reversed(flow.lines[priority].items))

    def push(self, tenant: str, item: T, cost: int, priority: int = 0, work: int | None = None) -> None:
        """Let an item wait behind those of its tenant that are as urgent. work: tokens, `cost` unless given."""
        flow = self._flow(tenant)
        if not flow.size:
            self._add_turn(max(self._now, flow.finish), tenant)
        flow.add(item, cost, priority, cost if work is None else work)
        self._waiting += 1

    def pop(self) -> T:
        """Return whose turn it is; raises `IndexError` when nobody waits."""
        start, number, tenant = heappop(self._turns)
        while start < self._flows[tenant].finish:
            late = (self._flows[tenant].finish, number, tenant)
            start, number, tenant = heappushpop(self._turns, late)
        flow = self._flows[tenant]
        priority, item = flow.first()
        self._take(flow, start, flow.take(priority, item))
        self._waiting -= 1
        if flow.size:
            self._add_turn(flow.finish, tenant)
        return item

    def pass_by(self, tenant: str, cost: int) -> None:
        """Note a turn of a tenant that need not wait, since nobody does."""
        flow = self._flow(tenant)
        self._take(flow, max(self._now, flow.finish), cost)

    def remove(self, tenant: str, item: T) -> None:
        """Let an item leave that waits no longer for its turn; raises `KeyError` when it is not here."""
        flow = self._flows[tenant]
        flow.take(flow.priority_of(item), item)
        self._waiting -= 1
        if not flow.size:
            self._turns = [turn for turn in self._turns if turn[2] != tenant]
            heapify(self._turns)

    def charge(self, tenant: str, tokens: int) -> None:
        """Add to what a tenant's turns have cost, once that is known."""
        flow = self._flows.get(tenant)
        if flow is not None:
            flow.finish += tokens

    def forget(self) -> None:
        """Begin anew, when nothing waits or runs: nobody is owed anything then. Raises `ValueError` otherwise."""
        if self._waiting:
            raise ValueError(f"{self._waiting} items wait")
        self._flows.clear()
        self._now = 0

    def _flow(self, tenant: str) -> _Flow[T]:
        flow = self._flows.get(tenant)
        if flow is None:
            flow = self._flows[tenant] = _Flow()
        return flow

    def _take(self, flow: _Flow[T], start: int, cost: int) -> None:
        self._now = max(self._now, start)
        flow.finish = start + cost

    def _add_turn(self, start: int, tenant: str) -> None:
        self._number += 1
        heappush(self._turns, (start, self._number, tenant))
