"""Use of devices and KV blocks by tenant, in whole nanoseconds: all accounts add up to the time that passed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from engine.errors import IntegrityError
from engine.events import Began, BlocksTaken, Idle, Left, Ran, Shares
from engine.request import Sequence

NANOS = 10**9
MAX_TENANTS = 64  # that have an account of their own
OTHERS = "other"  # the account of all later ones

Weights = NDArray[np.int64]
Index = NDArray[np.intp]


@dataclass(slots=True)
class EngineUsage:
    """Nanoseconds of a device, and of a KV block."""

    device_ns: int = 0
    block_ns: int = 0


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """EngineUsage since the engine was made: `total` = `idle` + all `tenants`, to the nanosecond.

    total: every device and every block (the null block excluded) for the time that passed.
    """

    total: EngineUsage = field(default_factory=EngineUsage)
    idle: EngineUsage = field(default_factory=EngineUsage)
    tenants: Mapping[str, EngineUsage] = field(default_factory=dict)


@dataclass(slots=True)
class _Account:
    """One tenant's usage. due: the part of it that is not yet divided among its requests."""

    usage: EngineUsage = field(default_factory=EngineUsage)
    due: EngineUsage = field(default_factory=EngineUsage)


@dataclass(slots=True)
class _TenantShare:
    """A tenant's part in the batch that runs."""

    account: _Account
    slots: Index  # [sequences]
    weights: Weights  # [2, sequences]  tokens computed in each step; blocks that each holds


class CostMeter:
    """Charges the time of an engine. Used by its one thread; times are seconds on its clock.

    *Devices.* The seconds of a step, from its beginning until the model has run, are divided by the tokens that each
    sequence computed in it, those of prompts and of output alike (the service of VTC, "Fairness in Serving Large
    Language Models", OSDI 2024, with one weight for both). What is found in the prefix cache costs nothing, what is
    computed again after a preemption costs again. All other time is idle, the host's between two steps included.
    Where steps overlap, one begins when the one before it has run. What a step computes for a sequence whose end is
    reported already is charged to the others; where there are none it is idle.

    *Blocks.* A tenant is charged for the blocks that it holds, a shared one once (its first holder pays),
    as they are while the model runs and as they are when the next step begins for the time between the two. Blocks
    that are free or only cached are idle. A tenant's part is divided among its running sequences by the length of
    their block tables.

    Tenants are charged at every step, the slots of their sequences when the batch changes and when costs are read,
    so that steps of an unchanging batch cost next to nothing. A sequence has its part once it has left its slot and
    `settle` was called.
    """

    def __init__(self) -> None:
        self._devices = self._num_blocks = self._began = self._until = 0
        self._slots = np.zeros((2, 0), np.int64)  # [2, S]  device and block nanoseconds of its sequence
        self._left: list[tuple[Sequence, int]] = []  # and the slot that each had
        self._used: WeakKeyDictionary[Sequence, EngineUsage] = WeakKeyDictionary()
        self._accounts: dict[str, _Account] = {}
        self._payers: list[str | None] = []  # [blocks]  None of those that are not held
        self._held: Counter[str] = Counter()  # blocks by payer; those that hold none are left out
        self._idle = EngineUsage()
        self._batch: Shares | None = None  # as of the last step
        self._shares: list[_TenantShare] = []
        self._tokens: Weights = np.zeros(0, np.int64)  # [shares]
        self._num_tokens = 0  # of all shares

    def begin(self, event: Began) -> None:
        """Begin to charge."""
        self._devices, self._num_blocks = event.num_devices, event.num_blocks
        self._payers = [None] * (event.num_blocks + 1)
        self._began = self._until = _nanos(event.at)

    def took(self, event: BlocksTaken) -> None:
        """Note which tenants pay for blocks."""
        if not event.blocks:
            return
        payers = [sequence.request.tenant for sequence in event.sequences]
        if len(payers) == 1:
            payers *= len(event.blocks)
        for block, payer in zip(event.blocks, payers, strict=True):
            self._payers[block] = payer
        if len(set(payers)) == 1:
            self._held[payers[0]] += len(payers)
        else:
            self._held.update(payers)

    def left(self, event: Left) -> None:
        """Note that a sequence has left its slot, and that no tenant pays for the blocks it freed any more."""
        self._left.append((event.sequence, event.slot))
        freed = Counter(self._payers[block] for block in event.freed)
        for block in event.freed:
            self._payers[block] = None
        for payer, count in freed.items():
            if payer is None:
                raise IntegrityError(f"a block without a payer was freed: one of {event.freed}")
            self._held[payer] -= count
            if not self._held[payer]:
                del self._held[payer]

    def idle(self, event: Idle) -> None:
        """Charge time in which no step ran."""
        self._idle.device_ns += self._devices * self._pass(event.until)

    def ran(self, event: Ran) -> None:
        """Charge the time of a step."""
        if event.shares is not None:
            self.settle()
            self._batch = event.shares
        if not self._shares and self._batch is not None:
            self._divide(self._batch)
        spent = self._devices * self._pass(event.until)
        if event.left:
            spent = self._charge_left(event, spent)
        if not self._num_tokens:
            self._idle.device_ns += spent
            return
        parts = [spent] if len(self._shares) == 1 else split(spent, self._tokens).tolist()
        for share, part in zip(self._shares, parts, strict=True):
            share.account.usage.device_ns += part
            share.account.due.device_ns += part

    def settle(self) -> None:
        """Divide what tenants were charged among their slots, and move it to sequences that have left theirs."""
        devices, blocks = self._slots
        for share in self._shares:
            due, share.account.due = share.account.due, EngineUsage()
            tokens, held = share.weights
            devices[share.slots] += split(due.device_ns, tokens)
            blocks[share.slots] += split(due.block_ns, held)
        for sequence, slot in self._left:
            if slot < len(devices):
                used = self._usage(sequence)
                used.device_ns += int(devices[slot])
                used.block_ns += int(blocks[slot])
                devices[slot] = blocks[slot] = 0
        self._left.clear()
        self._shares = []

    def costs(self) -> EngineCosts:
        """Return all accounts until the last event that passed time."""
        self.settle()
        tenants = {name: _copy(account.usage) for name, account in self._accounts.items()}
        return EngineCosts(self._total(), _copy(self._idle), tenants)

    def used(self, sequence: Sequence) -> EngineUsage:
        """Return what a sequence has used, once that is settled. From any thread."""
        return self._used.get(sequence) or EngineUsage()

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless accounts add up to the time that passed, and payers to the blocks held."""
        total, accounts = self._total(), [self._idle, *(account.usage for account in self._accounts.values())]
        charged = EngineUsage(sum(one.device_ns for one in accounts), sum(one.block_ns for one in accounts))
        if charged != total or self._idle.block_ns < 0:
            raise IntegrityError(f"{charged} was charged of {total}, {self._idle} of it idle")
        if (held := dict(Counter(payer for payer in self._payers if payer is not None))) != dict(self._held):
            raise IntegrityError(f"payers hold {held} blocks, {dict(self._held)} are counted")

    def _charge_left(self, event: Ran, spent: int) -> int:
        """Charge sequences that have left for their part of a step; return the rest, for the others."""
        weights = np.array([*(tokens for _, tokens in event.left), self._num_tokens], np.int64)
        parts = split(spent, weights).tolist() if weights[:-1].any() else []
        for (sequence, _), part in zip(event.left, parts, strict=False):
            self._account(sequence.request.tenant).usage.device_ns += part
            self._usage(sequence).device_ns += part
        return parts[-1] if parts else spent

    def _usage(self, sequence: Sequence) -> EngineUsage:
        return self._used.setdefault(sequence, EngineUsage())

    def _total(self) -> EngineUsage:
        passed = self._until - self._began
        return EngineUsage(self._devices * passed, self._num_blocks * passed)

    def _pass(self, now: float) -> int:
        """Charge the blocks as they are held until `now`; return the nanoseconds that passed."""
        passed = _nanos(now) - self._until
        self._until += passed
        idle = self._num_blocks
        for tenant, count in self._held.items():
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

    def _divide(self, batch: Shares) -> None:
        """Gather the batch by tenant."""
        running, slots = batch.sequences, batch.slots
        missing = len(batch.num_blocks) - self._slots.shape[1]
        if missing:
            self._slots = np.pad(self._slots, ((0, 0), (0, missing)))
        weights = np.array([batch.num_tokens, batch.num_blocks[slots]], np.int64)
        if len(self._held) == 1:  # every sequence has a block of its own
            self._shares = [_TenantShare(self._account(running[0].request.tenant), slots, weights)]
        else:
            rows: dict[str, list[int]] = {}
            for row, sequence in enumerate(running):
                rows.setdefault(self._name(sequence.request.tenant), []).append(row)
            self._shares = [
                _TenantShare(self._account(name), slots[own], weights[:, own]) for name, own in rows.items()
            ]
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


def _nanos(seconds: float) -> int:
    return round(seconds * NANOS)


def _copy(usage: EngineUsage) -> EngineUsage:
    return EngineUsage(usage.device_ns, usage.block_ns)
