"""Who used the devices and the KV blocks: whole nanoseconds, so that all accounts add up to the time that passed."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.errors import IntegrityError
from engine.kv.block_manager import BlockManager
from engine.report import Ints
from engine.request import Sequence
from engine.scheduler.schedule import Index, Schedule
from engine.scheduler.tables import Tables

NANOS = 10**9
MAX_TENANTS = 64  # that have an account of their own
OTHERS = "other"  # the account of those who came later

Weights = NDArray[np.int64]


@dataclass(slots=True)
class Usage:
    """Nanoseconds of a device, and of a KV block."""

    device_ns: int = 0
    block_ns: int = 0


@dataclass(frozen=True, slots=True)
class Costs:
    """Usage since the engine was made: `total` = `idle` + all `tenants`, to the nanosecond.

    total: every device and every block (the null block excluded) for the time that passed.
    """

    total: Usage = field(default_factory=Usage)
    idle: Usage = field(default_factory=Usage)
    tenants: Mapping[str, Usage] = field(default_factory=dict)


@dataclass(slots=True)
class _Account:
    """One tenant's usage. due: the part of it that is not yet divided among its requests."""

    usage: Usage = field(default_factory=Usage)
    due: Usage = field(default_factory=Usage)


@dataclass(slots=True)
class _Share:
    """A tenant's part in the batch that runs."""

    account: _Account
    slots: Index  # [sequences]
    weights: Weights  # [2, sequences]  tokens computed in each step; tokens that the blocks of each can hold


class Ledger:
    """Charges the time of an engine. Used by its one thread; times are seconds on its clock.

    *Devices.* The seconds of a step, from its beginning until the model has run, are divided by the tokens that each
    sequence computed in it, those of prompts and of output alike (the service of VTC, "Fairness in Serving Large
    Language Models", OSDI 2024, with one weight for both). What is found in the prefix cache costs nothing, what is
    computed again after a preemption costs again. All other time is idle, the host's between two steps included.
    Where steps overlap, one begins when the one before it has run. What a step computes for a sequence whose end is
    reported already is nobody's: the others pay for it, and where there are none it is idle.

    *Blocks.* A tenant is charged for the blocks that it holds, a shared one once, as they are while the model runs
    and as they are when the next step begins for the time between the two. Blocks that are free or only cached are
    idle. A tenant's part is divided among its running sequences by the length of their block tables.

    Tenants are charged at every step, the rows of their sequences when the batch changes and whenever somebody asks,
    so that steps of an unchanging batch cost next to nothing. A sequence has its part (`Sequence.device_ns`,
    `block_ns`) once it has left its row and `settle` was called.
    """

    def __init__(self, devices: int, tables: Tables, blocks: BlockManager, now: float) -> None:
        self._devices = devices
        self._tables = tables
        self._blocks = blocks
        self._rows = np.zeros((2, tables.num_slots), np.int64)  # [2, S]  device and block nanoseconds of who is there
        self._left: list[tuple[Sequence, int]] = []  # and the slot that each had
        self._began = self._until = _nanos(now)
        self._accounts: dict[str, _Account] = {}
        self._idle = Usage()
        self._shares: list[_Share] = []
        self._tokens: Weights = np.zeros(0, np.int64)  # [shares]
        self._num_tokens = 0  # of all shares
        self._version = 0  # of the schedule that `_shares` are of
        self._running: list[Sequence] = []  # whose `_shares` they are

    def idle(self, now: float) -> None:
        """Note that no step ran since the last call of this or of `ran`."""
        self._idle.device_ns += self._devices * self._pass(now)

    def ran(
        self, schedule: Schedule, running: list[Sequence], slots: Index, now: float, left: Items[Sequence] = ()
    ) -> None:
        """Note that a step ran since the last call of this or of `idle`, before it makes anybody give blocks back.

        running / slots: all that hold blocks, and where. left: who left meanwhile, if their end is not reported yet.
        """
        if not schedule.version or schedule.version != self._version or running is not self._running or left:
            self.settle()
            self._version, self._running = schedule.version, running
            self._divide(schedule, running, slots)
        spent = self._devices * self._pass(now)
        if left:
            spent = self._charge_left(schedule, left, spent)
        if not self._num_tokens:
            self._idle.device_ns += spent
            return
        for share, part in zip(self._shares, split(spent, self._tokens).tolist(), strict=True):
            share.account.usage.device_ns += part
            share.account.due.device_ns += part

    def _charge_left(self, schedule: Schedule, left: Items[Sequence], spent: int) -> int:
        """Charge those who have left for their part of a step; return what is left of it for the others."""
        tokens = _tokens(schedule, list(left))
        weights = np.array([*tokens.tolist(), self._num_tokens], np.int64)
        parts = split(spent, weights).tolist() if tokens.any() else []
        for sequence, part in zip(left, parts, strict=False):
            self._account(sequence.request.tenant).usage.device_ns += part
            sequence.device_ns += part
        return parts[-1] if parts else spent

    def leaves(self, sequence: Sequence) -> None:
        """Note that a sequence is about to leave its row."""
        self._left.append((sequence, sequence.slot))

    def settle(self) -> None:
        """Divide what tenants were charged among their rows, and tell those that have left theirs."""
        devices, blocks = self._rows
        for share in self._shares:
            due, share.account.due = share.account.due, Usage()
            tokens, held = share.weights
            devices[share.slots] += split(due.device_ns, tokens)
            blocks[share.slots] += split(due.block_ns, held)
        for sequence, slot in self._left:
            sequence.device_ns += int(devices[slot])
            sequence.block_ns += int(blocks[slot])
            devices[slot] = blocks[slot] = 0
        self._left.clear()
        self._shares = []
        self._version = 0

    def costs(self, now: float | None) -> Costs:
        """Return all accounts until `now`; while a step runs (None) until the one before it had run."""
        if now is not None:
            self.idle(now)
        self.settle()
        tenants = {name: _copy(account.usage) for name, account in self._accounts.items()}
        return Costs(self._total(), _copy(self._idle), tenants)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless the accounts add up to the time that passed."""
        total, accounts = self._total(), [self._idle, *(account.usage for account in self._accounts.values())]
        charged = Usage(sum(one.device_ns for one in accounts), sum(one.block_ns for one in accounts))
        if charged != total or self._idle.block_ns < 0:
            raise IntegrityError(f"the ledger charged {charged} of {total}, {self._idle} of it idle")

    def _total(self) -> Usage:
        passed = self._until - self._began
        return Usage(self._devices * passed, (self._blocks.num_blocks - 1) * passed)

    def _pass(self, now: float) -> int:
        """Charge the blocks as they are held until `now`; return the nanoseconds that passed."""
        passed = _nanos(now) - self._until
        self._until += passed
        idle = self._blocks.num_blocks - 1
        for tenant, count in self._blocks.held.items():
            account = self._account(tenant)
            account.usage.block_ns += count * passed
            account.due.block_ns += count * passed
            idle -= count
        self._idle.block_ns += idle * passed
        return passed

    def _account(self, tenant: str) -> _Account:
        known = self._accounts.get(tenant)
        return known or self._accounts.setdefault(self._name(tenant), _Account())

    def _name(self, tenant: str) -> str:
        return tenant if tenant in self._accounts or len(self._accounts) < MAX_TENANTS else OTHERS

    def _divide(self, schedule: Schedule, running: list[Sequence], slots: Index) -> None:
        """Gather the batch by tenant."""
        weights = np.array([_tokens(schedule, running), self._tables.capacity[slots]], np.int64)
        if len(self._blocks.held) == 1:  # every sequence has a block of its own
            self._shares = [_Share(self._account(running[0].request.tenant), slots, weights)]
        else:
            rows: dict[str, list[int]] = {}
            for row, sequence in enumerate(running):
                rows.setdefault(self._name(sequence.request.tenant), []).append(row)
            self._shares = [_Share(self._account(name), slots[own], weights[:, own]) for name, own in rows.items()]
        self._tokens = np.array([share.weights[0].sum() for share in self._shares], np.int64)
        self._num_tokens = int(self._tokens.sum())


def split(amount: int, weights: Weights) -> Weights:
    """Return whole parts of `amount` in proportion to `weights` that add up to it. weights: [parts], not all 0.

    The first k parts together are what they should be, rounded down, for every k: each part is off by less than 1,
    as with largest remainders, without sorting them.
    """
    if len(weights) == 1:
        return np.array([amount], np.int64)
    if not amount:
        return np.zeros_like(weights)
    sums = weights.cumsum()
    total = int(sums[-1])
    # amount * sums might not fit; whole * sums and rest * sums do, since rest < total.
    whole, rest = divmod(amount, total)
    ends: Weights = whole * sums + rest * sums // total
    ends[1:] -= ends[:-1]
    return ends


def _tokens(schedule: Schedule, running: list[Sequence]) -> Ints:
    """Return the tokens that each of `running` computes in a step of `schedule`."""
    if schedule.sequences is running:
        return schedule.query_lens
    computed = dict(zip(schedule.sequences, schedule.query_lens.tolist(), strict=True))
    return np.array([computed.get(sequence, 0) for sequence in running], np.int32)


def _nanos(seconds: float) -> int:
    return round(seconds * NANOS)


def _copy(usage: Usage) -> Usage:
    return Usage(usage.device_ns, usage.block_ns)
