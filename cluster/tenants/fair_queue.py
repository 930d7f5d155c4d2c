"""Whose turn it is: start-time fair queueing over tenants, weighted by tokens. Pure bookkeeping, nothing waits here.

Each tenant has a line of its own. A tenant's next turn has a start tag: the virtual time, or the tenant's own finish
tag where that is later; the smallest start tag goes first, virtual time follows it, and the tenant's finish tag moves
on by what the turn costs. So of any two tenants that wait all the time, each gets the same tokens, give or take one
turn; a tenant that comes anew is behind at most one turn of each other one; and a tenant alone gets everything.
Source: Goyal, Vin, Cheng, "Start-time Fair Queuing", SIGCOMM 1996.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heappushpop
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass(slots=True)
class _Flow(Generic[T]):
    """One tenant. line: what waits -> its cost, in order of arrival. finish: its finish tag, in tokens."""

    line: dict[T, int] = field(default_factory=dict)
    finish: int = 0


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
        return len(flow.line) if flow is not None else 0

    def lengths(self) -> dict[str, int]:
        """Return how many items of each tenant wait, of those that have any."""
        return {tenant: len(self._flows[tenant].line) for _, _, tenant in self._turns}

    def push(self, tenant: str, item: T, cost: int) -> None:
        """Let an item wait at the end of its tenant's line."""
        flow = self._flow(tenant)
        if not flow.line:
            self._add_turn(max(self._now, flow.finish), tenant)
        flow.line[item] = cost
        self._waiting += 1

    def pop(self) -> T:
        """Return whose turn it is; raises `IndexError` when nobody waits."""
        start, number, tenant = heappop(self._turns)
        while start < self._flows[tenant].finish:
            late = (self._flows[tenant].finish, number, tenant)
            start, number, tenant = heappushpop(self._turns, late)
        flow = self._flows[tenant]
        item = next(iter(flow.line))
        self._take(flow, start, flow.line.pop(item))
        self._waiting -= 1
        if flow.line:
            self._add_turn(flow.finish, tenant)
        return item

    def pass_by(self, tenant: str, cost: int) -> None:
        """Note a turn of a tenant that need not wait, since nobody does."""
        flow = self._flow(tenant)
        self._take(flow, max(self._now, flow.finish), cost)

    def remove(self, tenant: str, item: T) -> None:
        """Let an item leave that waits no longer for its turn; raises `KeyError` when it is not here."""
        flow = self._flows[tenant]
        del flow.line[item]
        self._waiting -= 1
        if not flow.line:
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
