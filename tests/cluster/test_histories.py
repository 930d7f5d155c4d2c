"""Whole clusters in virtual time, under faults drawn from seeds: what clients get, what routers and replicas hold."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from cluster.admission.admission_queue import AdmissionQueue
from cluster.admission.deadline import DeadlineTimers
from cluster.admission.keys import KeyRing, Quota, Tenant
from cluster.admission.quotas import Quotas
from cluster.answer_log import AnswerLog
from cluster.config import ServedModelConfig
from cluster.errors import ApiError
from cluster.ingress.attempt import Attempt
from cluster.lifecycle.autoscaling_policy import Scaler
from cluster.replica.sessions import RouterSessions
from cluster.router.placement import Placement
from cluster.router.quarantine import Blame
from cluster.router.replica_handle import ReplicaHandle
from cluster.router.token_log import TokenLog
from cluster.simulator.history import Arrive, History, Kill, drawn
from cluster.simulator.process import SimulatedLoop, SimulatedProcess
from cluster.wire.link import ENGINE_DEAD, LOST
from tests.cluster.failed_histories import FAILED
from tests.simulator.fuzz import Tally, tallies
from tests.simulator.histories import run
from tests.simulator.shrink import as_test, shrunk

FRESH_SECONDS = 60.0
MUTANT_SEEDS = 1500  # histories in which a fault of the product must show


def test_fresh_histories() -> None:
    """One minute of seeds that nobody has run."""
    first, total = secrets.randbits(40), Tally()
    for tally in tallies(first, None, FRESH_SECONDS, processes=1):
        total.add(tally)
        if total.failed:
            break
    for seed, violations in total.failed.items():
        shortest = shrunk(drawn(seed), lambda one: bool(run(one).violations), most_runs=200)
        pytest.fail(f"python -m tests.simulator --seed {seed}\n{violations}\n{as_test(shortest)}")
    assert total.streams > 100
    assert 0 < total.over_http < total.histories


@pytest.mark.parametrize("showed", FAILED)
def test_a_history_that_failed_once(showed: str) -> None:
    assert run(FAILED[showed]).violations == ()


def test_a_history_is_the_same_whenever_it_is_run() -> None:
    """Whatever hashes and addresses are in the process that runs it."""
    seeds = range(15)
    code = (
        "from cluster.simulator.history import drawn\nfrom tests.simulator.histories import run\n"
        "for seed in range(15): print(run(drawn(seed)).trace)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": "7"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert told.stdout.split() == [run(drawn(seed)).trace for seed in seeds]


def forgets_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    resume = TokenLog.resume
    monkeypatch.setattr(
        TokenLog,
        "resume",
        lambda log: {choice: tokens[:-1] for choice, tokens in (resume(log) or {}).items()} or None,
    )


def passes_on_what_the_client_has(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Attempt.__init__

    def forgetful(attempt: Attempt, *args: Any) -> None:
        made(attempt, *args)
        attempt._behind = 0

    monkeypatch.setattr(Attempt, "__init__", forgetful)


def loses_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of an answer does not get the facts: the next router draws with a seed of its own."""
    take = AnswerLog.take

    def lossy(log: AnswerLog) -> bytes | None:
        log._untold = None
        return take(log)

    monkeypatch.setattr(AnswerLog, "take", lossy)


def keeps_runs_of_lost_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = RouterSessions.__init__

    def keeping(sessions: RouterSessions, *args: Any) -> None:
        begin(sessions, *args)
        sessions._abort = lambda _: None

    monkeypatch.setattr(RouterSessions, "__init__", keeping)


def moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Placement, "move", lambda *_: None)


def mixes_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplicaHandle, "can_continue", lambda *_: True)


def looks_again_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Placement, "place_waiting", lambda _: None)


def lets_nobody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who stands in line stays there although others have left."""
    monkeypatch.setattr(AdmissionQueue, "_let_in", lambda _: None)


def charges_what_another_router_charges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that stood still charges for answers that its successor gave."""
    monkeypatch.setattr(AnswerLog, "may_be_elsewhere", False)


def keeps_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeadlineTimers, "watch", lambda *_: None)


def believes_that_a_broken_connection_is_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Blame.link_ended
    monkeypatch.setattr(
        Blame,
        "link_ended",
        lambda blame, replica, code: ended(blame, replica, ENGINE_DEAD if code == LOST else code),
    )


def lets_more_in_than_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the limits are, a request more is let in."""
    enter = Quotas.enter

    async def generous(quotas: Quotas, tenant: Tenant, continues: bool = False) -> None:
        try:
            await enter(quotas, tenant, continues)
        except ApiError:
            quotas._note(f"requests/{tenant.name}", 1)
            quotas._running[tenant.name] = quotas.running(tenant) + 1

    monkeypatch.setattr(Quotas, "enter", generous)


def refuses_who_has_no_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    keyed = KeyRing.tenant_of
    monkeypatch.setattr(KeyRing, "tenant_of", lambda ring, key: replace(keyed(ring, key), quota=Quota(1)))


def counts_no_output_for_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(quotas: Quotas, tenant: Tenant, tokens: int) -> None:
        """Bill it, and let the next request in all the same."""

    monkeypatch.setattr(Quotas, "use_output", nothing)


def keeps_replicas_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scaler, "_chosen", lambda _, target: target)


def waits_for_no_first_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes while the autoscaler has let all replicas go is refused, as where replicas are always there."""
    monkeypatch.setattr(ServedModelConfig, "scales_to_zero", False)


def counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    note = ReplicaHandle.read

    def doubled(replica: ReplicaHandle, report: Any, counters: Any) -> Any:
        counters.accepted += bool(report.finishes)
        return note(replica, report, counters)

    monkeypatch.setattr(ReplicaHandle, "read", doubled)


MUTANTS_OF_THE_INGRESS: list[Callable[[pytest.MonkeyPatch], None]] = [
    passes_on_what_the_client_has,
    loses_a_note,
    lets_nobody_in,
    charges_what_another_router_charges,
    lets_more_in_than_the_quota,
    refuses_who_has_no_quota,
    counts_no_output_for_the_quota,
]
MUTANTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    *MUTANTS_OF_THE_INGRESS,
    forgets_a_token,
    keeps_runs_of_lost_routers,
    moves_nothing,
    mixes_models,
    looks_again_late,
    keeps_no_deadline,
    keeps_replicas_for_nobody,
    waits_for_no_first_replica,
    believes_that_a_broken_connection_is_a_death,
    counts_twice,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_fault_of_the_product_is_seen(mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch) -> None:
    mutant(monkeypatch)
    over_http = mutant in MUTANTS_OF_THE_INGRESS
    histories = (
        history
        for history in chain(FAILED.values(), map(drawn, range(MUTANT_SEEDS)))
        if history.ingress or not over_http
    )
    assert any(run(history).violations for history in histories)


def test_a_failing_history_is_made_short() -> None:
    """What is left is what it takes: here two clients and a kill."""

    def fails(history: History) -> bool:
        return len(history.arrivals) >= 2 and any(isinstance(event, Kill) for event in history.events)

    seed = next(seed for seed in range(100) if fails(drawn(seed)))
    short = shrunk(drawn(seed), fails)
    assert len(short.events) == 3
    written: dict[str, Any] = {}
    exec(as_test(short), {"History": History, "Arrive": Arrive, "Kill": Kill, "run": run}, written)
    (test,) = written.values()
    test()


def test_a_stopped_process_does_what_became_due_when_it_goes_on_and_a_dead_one_nothing() -> None:
    loop = SimulatedLoop()
    one, other = SimulatedProcess("one", loop, 50.0), SimulatedProcess("other", loop)
    told: list[tuple[str, float]] = []

    def tell(name: str) -> None:
        told.append((name, loop.time()))

    one.call(loop.call_later, 1.0, tell, "one")
    other.call(loop.call_later, 1.0, tell, "other")
    loop.call_later(0.5, one.stop)
    loop.call_later(0.5, other.kill)
    loop.call_later(3.0, one.go_on)
    loop.call_later(4.0, loop.stop)
    loop.run_forever()
    assert told == [("one", 53.0)]
    one.call(loop.call_later, 9.0, tell, "leapt")
    one.leap(8.0)
    loop.call_later(2.0, loop.stop)
    loop.run_forever()
    assert told[-1] == ("leapt", 50.0 + 4.0 + 8.0 + 1.0)
    loop.close()
