"""The cost ledger: whatever runs, is preempted, shared or aborted, the accounts add up to the time that passed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.accounts.costs import MAX_TENANTS, NANOS, OTHERS, CostMeter, EngineUsage, split
from cluster.accounts.engine_accounts import EngineAccounts
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import IntegrityError, StepMemoryError
from engine.events import Began, BlocksTaken, Idle
from engine.request import Sequence
from tests.engine.engine_driver import EOS, VOCAB, request
from tests.fake_executor import FakeExecutor

START = 1234.5678901


class Metered:
    """An engine whose steps take as long as the test says, and who holds which blocks meanwhile, by tenant."""

    def __init__(self, num_blocks=64, devices=1, **shape):
        shape = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 16, "block_size": 4, **shape}
        self.now = START
        self.step_seconds = 0.0
        self.held = Counter()  # tenant -> block-nanoseconds, counted from the block tables
        self.idle = 0  # device-nanoseconds
        self.used = Counter()  # tenant -> [device, block] nanoseconds of ended sequences
        self.ended = {}
        self.cached = {}
        self.failures = []  # raised by the next steps, once their time is over
        self.devices, self.num_blocks = devices, num_blocks - 1
        executor = FakeExecutor(num_blocks, shape["block_size"], VOCAB, self.run_model, sleep=self.pass_seconds)
        config = EngineConfig("fake", tensor_parallel_size=devices, **shape)
        self.core = EngineCore(config, executor, (EOS,), VOCAB, num_blocks, clock=lambda: self.now)
        self.accounts = EngineAccounts(lambda: self.now)
        self.core.call_on_event(self.accounts.note)
        self.added = 0

    def run_model(self, inputs):
        if self.failures:
            self.now += self.step_seconds
            raise self.failures.pop()
        return self.step_seconds

    def pass_seconds(self, seconds):
        """Let time pass in which nobody takes or gives blocks."""
        running, _ = self.core._scheduler.running()
        tables = {}
        for sequence in running:
            tables.setdefault(sequence.request.tenant, set()).update(sequence.block_table)
        before = round(self.now * NANOS)
        self.now += seconds
        for tenant, blocks in tables.items():
            self.held[tenant] += len(blocks) * (round(self.now * NANOS) - before)

    def add(self, tenant, prompt, **params):
        self.added += 1
        self.core.add(replace(request(f"r{self.added}", prompt, **params), tenant=tenant, cache_salt=tenant.encode()))

    def step(self, seconds, gap=0.0):
        before = round(self.now * NANOS)
        self.pass_seconds(gap)
        self.idle += self.devices * (round(self.now * NANOS) - before)
        self.step_seconds = seconds
        report = self.core.step()
        self.core.check_integrity()
        self.accounts.check_integrity()
        for finish in report.finished:
            one = finish.sequence
            used = self.ended[one.request.request_id] = self.accounts.used(one)
            self.cached[one.request.request_id] = one.num_cached_tokens
            self.used[one.request.tenant, "device"] += used.device_ns
            self.used[one.request.tenant, "block"] += used.block_ns
        return report

    def costs(self):
        self.core.emit_time()
        return self.accounts.costs()


@given(
    st.integers(0, 2**63 - 1),
    st.lists(st.integers(0, 10**7), min_size=1, max_size=50).filter(any),
)
def test_parts_add_up_and_are_fair(amount, weights):
    parts = split(amount, np.array(weights)).tolist()
    assert sum(parts) == amount
    total = sum(weights)
    assert all(abs(part * total - amount * weight) < total for part, weight in zip(parts, weights, strict=True))


def test_step_is_shared_by_tokens_and_the_rest_is_idle():
    engine = Metered(num_blocks=11, devices=2)
    engine.add("a", 6, max_tokens=2, ignore_eos=True)
    engine.add("b", (9, 8), max_tokens=2, ignore_eos=True)
    engine.step(4.0, gap=3.0)  # 6 and 2 tokens, 2 blocks and 1
    engine.step(1.0, gap=0.5)  # a token each, on the same blocks
    engine.pass_seconds(2.0)
    costs = engine.costs()
    assert costs.tenants == {"a": EngineUsage(7 * NANOS, 11 * NANOS), "b": EngineUsage(3 * NANOS, 11 * NANOS // 2)}
    assert costs.idle == EngineUsage(11 * NANOS, 885 * NANOS // 10)
    assert costs.total == EngineUsage(21 * NANOS, 105 * NANOS)
    assert [(one.device_ns, one.block_ns) for one in engine.ended.values()] == [
        (7 * NANOS, 11 * NANOS),
        (3 * NANOS, 11 * NANOS // 2),
    ]


def test_shared_blocks_are_paid_for_once():
    engine = Metered()
    engine.add("a", 10, n=4, max_tokens=3, ignore_eos=True)
    engine.step(1.0)  # three blocks of the one prompt
    assert engine.costs().tenants["a"] == EngineUsage(NANOS, 3 * NANOS)
    engine.step(1.0)  # two of them shared, and the last one's three copies beside it
    assert engine.costs().tenants["a"] == EngineUsage(2 * NANOS, (3 + 2 + 4) * NANOS)


def test_what_the_prefix_cache_holds_costs_nothing():
    engine = Metered()
    for _ in range(2):
        engine.add("a", 12, max_tokens=1)
        engine.add("b", 1, max_tokens=1)
        engine.step(13.0)
    first, _, second, _ = engine.ended.values()
    assert (first.device_ns, engine.cached["r3"]) == (12 * NANOS, 8)
    assert second.device_ns == round(13 * NANOS * 4 / 5)
    before = engine.costs().idle.block_ns
    engine.pass_seconds(1.0)
    assert engine.costs().idle.block_ns - before == engine.num_blocks * NANOS, "cached blocks are idle"


def test_step_that_was_tried_twice_is_charged_to_those_that_ran():
    engine = Metered()
    engine.add("a", 4)
    engine.step(1.0)
    engine.add("b", 4)
    engine.failures = [StepMemoryError("no room")]
    engine.step(2.0)
    costs = engine.costs()
    assert engine.ended["r2"].device_ns == 0
    assert (costs.tenants["a"].device_ns, costs.idle.device_ns) == (5 * NANOS, 0)


def test_late_tenants_share_an_account():
    engine = Metered()
    for i in range(MAX_TENANTS + 3):
        engine.add(f"t{i}", 1, max_tokens=1)
        engine.step(1.0)
    engine.add("late", 3, max_tokens=1)
    engine.add("later", 1, max_tokens=1)
    engine.step(4.0)
    tenants = engine.costs().tenants
    assert len(tenants) == MAX_TENANTS + 1
    assert tenants[OTHERS].device_ns == 7 * NANOS
    assert [one.device_ns // NANOS for one in list(engine.ended.values())[-2:]] == [3, 1]


def test_time_that_nobody_is_charged_for_is_noticed():
    meter = CostMeter()
    meter.begin(Began(START, 1, 3))
    meter.idle(Idle(START + 1))
    meter.check_integrity()
    meter._idle.device_ns -= 1
    with pytest.raises(IntegrityError, match="was charged of"):
        meter.check_integrity()


def test_a_block_that_is_counted_for_another_payer_is_noticed():
    meter = CostMeter()
    sequence = Sequence(request("r", 2), 0, 2, 2)
    meter.begin(Began(START, 1, 8))
    meter.took(BlocksTaken((sequence,), (3,)))
    meter.check_integrity()
    meter.took(BlocksTaken((sequence,), (3,)))
    with pytest.raises(IntegrityError, match="payers hold"):
        meter.check_integrity()


seconds = st.floats(0, 5)
tenants = st.sampled_from(["a", "b", "c"])
adds = st.tuples(st.just("add"), tenants, st.integers(1, 24), st.integers(1, 12), st.integers(1, 3))
steps = st.tuples(st.just("step"), seconds, seconds)
aborts = st.tuples(st.just("abort"), st.integers(1, 12))


@settings(max_examples=150)
@given(
    shape=st.fixed_dictionaries({"devices": st.integers(1, 8), "num_blocks": st.integers(14, 30)}),
    caching=st.booleans(),
    actions=st.lists(adds | adds | steps | steps | steps | aborts, max_size=40),
    rest=st.lists(st.tuples(seconds, seconds), min_size=1, max_size=5),
)
def test_accounts_add_up_to_the_time_that_passed(shape, caching, actions, rest):
    engine = Metered(max_model_len=40, enable_prefix_caching=caching, **shape)
    for action in actions:
        match action:
            case ("add", tenant, prompt, tokens, n):
                engine.add(tenant, prompt, max_tokens=tokens, n=n, temperature=1.0, ignore_eos=True)
            case ("step", duration, gap):
                engine.step(duration, gap)
            case ("abort", number):
                engine.core.abort(f"r{number}")
    for i in range(5000):
        if not engine.core.has_unfinished:
            break
        engine.step(*rest[i % len(rest)])
    costs = engine.costs()
    assert costs.idle.device_ns == engine.idle, "what passed between steps"
    passed = round(engine.now * NANOS) - round(START * NANOS)
    assert costs.total == EngineUsage(shape["devices"] * passed, engine.num_blocks * passed)
    for name in ("device_ns", "block_ns"):
        accounts = [costs.idle, *costs.tenants.values()]
        assert sum(getattr(one, name) for one in accounts) == getattr(costs.total, name)
        assert all(getattr(one, name) >= 0 for one in accounts)
    for tenant, used in costs.tenants.items():
        due = engine.accounts._meter._accounts[tenant].due
        assert used.block_ns == engine.held[tenant], "the integral of the blocks in its tables"
        assert used.device_ns == engine.used[tenant, "device"]
        assert used.block_ns == engine.used[tenant, "block"] + due.block_ns
