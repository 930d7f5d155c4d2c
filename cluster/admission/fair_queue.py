"""Whose turn it is: start-time fair queueing over tenants, weighted by tokens. Pure bookkeeping, nothing waits here.

Each tenant has a line of its own. A tenant's next turn has a start tag: the virtual time, or the tenant's own finish
tag where that is later; the smallest start tag goes first, virtual time follows it, and the tenant's finish tag moves
on by what the turn costs. So of any two tenants that wait all the time, each gets the same tokens, give or take one
turn; a tenant that comes anew is behind at most one turn of each other one; and a tenant alone gets everything.
Within a tenant the smaller priority goes first, then who came first.
Source: Goyal, Vin, Cheng, "Start-time Fair Queuing", SIGCOMM 1996.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass(slots=True)
class _Flow(Generic[T]):
    """One tenant. finish: its finish tag, in tokens. size: items that wait; work: theirs of all, in tokens.

    lines: by priority what waits -> its (cost, work, kind), in order of arrival; none empty. kinds: by priority and
    kind the same -> its number, in the order of arrival. levels: the priorities of the lines, smallest first; works:
    the work of each of them.
    """

    finish: int = 0
    size: int = 0
    work: int = 0
    lines: dict[int, OrderedDict[T, tuple[int, int, Hashable]]] = field(default_factory=dict)
    kinds: dict[int, dict[Hashable, OrderedDict[T, int]]] = field(default_factory=dict)
    levels: list[int] = field(default_factory=list)
    works: list[int] = field(default_factory=list)

    def add(self, item: T, cost: int, priority: int, work: int, kind: Hashable, number: int) -> None:
        at = bisect_left(self.levels, priority)
        if priority not in self.lines:
            self.lines[priority], self.kinds[priority] = OrderedDict(), {}
            self.levels.insert(at, priority)
            self.works.insert(at, 0)
        self.lines[priority][item] = cost, work, kind
        self.kinds[priority].setdefault(kind, OrderedDict())[item] = number
        self.works[at] += work
        self.work += work
        self.size += 1

    def first(self) -> tuple[int, T]:
        priority = self.levels[0]
        return priority, next(iter(self.lines[priority]))

    def first_of(self, may: Callable[[T], bool]) -> tuple[int, T] | None:
        """Ask for one of each kind: thousands may wait that may not go."""
        barred: set[Hashable] = set()
        for level in self.levels:
            found: tuple[int, T] | None = None
            for kind, line in self.kinds[level].items():
                if kind in barred:
                    continue
                item, number = next(iter(line.items()))
                if not may(item):
                    barred.add(kind)
                elif found is None or number < found[0]:
                    found = number, item
            if found is not None:
                return level, found[1]
        return None

    def take(self, priority: int, item: T) -> int:
        line, kinds = self.lines[priority], self.kinds[priority]
        cost, work, kind = line.pop(item)
        del kinds[kind][item]
        if not kinds[kind]:
            del kinds[kind]
        at = bisect_left(self.levels, priority)
        self.works[at] -= work
        self.work -= work
        self.size -= 1
        if not line:
            del self.lines[priority], self.kinds[priority], self.levels[at], self.works[at]
        return cost

    def work_before(self, priority: int) -> int:
        """Tokens of work that go before a newcomer of `priority`."""
        return sum(self.works[: bisect_right(self.levels, priority)])


class FairQueue(Generic[T]):
    """Items wait in the line of their tenant; each stands in it once. Costs are whole tokens, at least 1."""

    def __init__(self) -> None:
        self._flows: dict[str, _Flow[T]] = {}
        # (start tag, number, tenant), one for each tenant that waits. A tag may be out of date: too small, never
        # too large, since a tenant's finish tag only moves on.
        self._turns: list[tuple[int, int, str]] = []
        self._waiting: OrderedDict[T, None] = OrderedDict()  # in order of arrival
        self._now = 0
        self._number = 0
        self._work = 0

    def __len__(self) -> int:
        return len(self._waiting)

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
        return self._work

    def work_ahead(self, tenant: str, priority: int, work: int) -> int:
        """Return the tokens of work that go before a newcomer of `tenant` that brings `work`.

        All that stands before it in its own line; and of each other tenant as much as this one gets meanwhile.
        """
        flow = self._flows.get(tenant)
        own = flow.work_before(priority) if flow is not None else 0
        others = [self._flows[name].work for _, _, name in self._turns if name != tenant]
        return own + sum(min(other, own + work) for other in others)

    def items(self) -> list[T]:
        """Return what waits, in order of arrival."""
        return list(self._waiting)

    def oldest(self) -> T | None:
        """Return what has waited longest, None where nothing waits."""
        return next(iter(self._waiting), None)

    def last(self, tenant: str) -> tuple[int, T]:
        """Return the priority and the item of a tenant that would be served last of all its own."""
        flow = self._flows[tenant]
        priority = flow.levels[-1]
        return priority, next(reversed(flow.lines[priority]))

    def push(
        self,
        tenant: str,
        item: T,
        cost: int,
        priority: int = 0,
        work: int | None = None,
        kind: Hashable = None,
    ) -> None:
        """Let an item wait behind those of its tenant that are as urgent.

        work: tokens, `cost` unless given. kind: for `pop_of`, which all of a tenant's items of one kind may, or none.
        """
        flow = self._flow(tenant)
        if not flow.size:
            self._add_turn(max(self._now, flow.finish), tenant)
        before = flow.work
        self._number += 1
        flow.add(item, cost, priority, cost if work is None else work, kind, self._number)
        self._work += flow.work - before
        self._waiting[item] = None

    def peek(self) -> T:
        """Return the item whose turn it is until another comes or goes; raises `IndexError` when nothing waits."""
        _, tenant = self._first()
        return self._flows[tenant].first()[1]

    def pop(self) -> T:
        """Take out the item whose turn it is; raises `IndexError` when nothing waits."""
        start, tenant = self._first()
        heappop(self._turns)
        flow = self._flows[tenant]
        priority, item = flow.first()
        self._take(flow, start, self._leave(flow, priority, item))
        if flow.size:
            self._add_turn(flow.finish, tenant)
        return item

    def pop_of(self, may: Callable[[T], bool]) -> T | None:
        """Take out the first item of those that `may` go, None when none does.

        Who may not keeps its place; those of its tenant who may pass it by. `may` is asked once for each kind.
        """
        passed: list[tuple[int, int, str]] = []
        found = None
        while found is None and self._turns:
            start, tenant = self._first()
            turn = heappop(self._turns)
            flow = self._flows[tenant]
            found = flow.first_of(may)
            if found is None:
                passed.append(turn)
                continue
            self._take(flow, start, self._leave(flow, *found))
            if flow.size:
                self._add_turn(flow.finish, tenant)
        for turn in passed:
            heappush(self._turns, turn)
        return None if found is None else found[1]

    def pass_by(self, tenant: str, cost: int) -> None:
        """Charge a turn to a tenant that need not wait, since nothing waits."""
        flow = self._flow(tenant)
        self._take(flow, max(self._now, flow.finish), cost)

    def remove(self, tenant: str, item: T, priority: int = 0) -> None:
        """Let an item leave that waits no longer for its turn; raises `KeyError` when it is not here.

        priority: the one that it came with.
        """
        flow = self._flows[tenant]
        self._leave(flow, priority, item)
        if not flow.size:
            self._turns = [turn for turn in self._turns if turn[2] != tenant]
            heapify(self._turns)

    def charge(self, tenant: str, tokens: int) -> None:
        """Add to what a tenant's turns have cost, once that is known."""
        flow = self._flows.get(tenant)
        if flow is not None:
            flow.finish += tokens

    def forget(self) -> None:
        """Begin anew, when nothing waits or runs: no tenant has a claim then. Raises `ValueError` otherwise."""
        if self._waiting:
            raise ValueError(f"{len(self._waiting)} items wait")
        self._flows.clear()
        self._now = 0

    def _flow(self, tenant: str) -> _Flow[T]:
        flow = self._flows.get(tenant)
        if flow is None:
            flow = self._flows[tenant] = _Flow()
        return flow

    def _first(self) -> tuple[int, str]:
        """Return the smallest start tag, brought up to date, and its tenant."""
        start, number, tenant = self._turns[0]
        while start < self._flows[tenant].finish:
            heapreplace(self._turns, (self._flows[tenant].finish, number, tenant))
            start, number, tenant = self._turns[0]
        return start, tenant

    def _leave(self, flow: _Flow[T], priority: int, item: T) -> int:
        """Let an item go and return its cost."""
        before = flow.work
        cost = flow.take(priority, item)
        self._work -= before - flow.work
        del self._waiting[item]
        return cost

    def _take(self, flow: _Flow[T], start: int, cost: int) -> None:
        self._now = max(self._now, start)
        flow.finish = start + cost

    def _add_turn(self, start: int, tenant: str) -> None:
        self._number += 1
        heappush(self._turns, (start, self._number, tenant))
