"""Starts that fail are held back longer and longer, told of, and forgotten once one succeeds.

A replica's reason for not starting travels through tracebacks as one line.
"""

from __future__ import annotations

import time
import traceback
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from ray.exceptions import RpcError

from cluster.errors import ReplicaStartError, StartFailure, find_start_failure
from cluster.lifecycle import control_store
from cluster.lifecycle import control_store as start_register
from cluster.lifecycle.app_status import AppPicture
from cluster.lifecycle.control_store import StartRegister, living_actors
from cluster.lifecycle.starts import LONGEST_PAUSE, Start, StartRecord, failed_before, failures_in_a_row, pause
from cluster.router.metrics import StartCollector
from cluster.router.readiness import OLD_SECONDS, replica_states
from engine.errors import CheckpointError, ConfigError


class Store:
    """A register in memory, and the world around it: which actors live, and what time it is."""

    def __init__(self) -> None:
        self.records: dict[str, StartRecord] = {}
        self.alive: set[str] = set()
        self.now = 1000.0
        self.slept: list[float] = []

    def put(self, record: StartRecord) -> None:
        self.records[record.replica_id] = record

    def of_version(self) -> list[StartRecord]:
        return list(self.records.values())

    def prune(self, alive: set[str], now: float) -> None:
        pass

    def start(self, name: str) -> Start:
        self.alive.add(name)
        return Start(self, name, name, lambda: self.alive, lambda: self.now, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def fail(self, name: str, reason: str = "no weights") -> None:
        start = self.start(name)
        start.hold_back()
        self.now += 2
        start.failed(reason)
        self.alive.discard(name)


def test_pauses_grow_and_end_somewhere() -> None:
    assert [pause(failures) for failures in range(6)] == [0, 0, 1, 2, 4, 8]
    assert pause(500) == LONGEST_PAUSE


def test_a_crash_loop_slows_down_and_tells_why_and_when() -> None:
    store = Store()
    for number in range(4):
        store.fail(f"r{number}")
    assert store.slept == [1, 2]
    seen: list[StartRecord] = []
    start = store.start("r4")
    store.sleep = lambda _: seen.append(store.records["r4"])  # type: ignore[method-assign]
    start._sleep = store.sleep
    start.hold_back()
    (state,) = replica_states([], [(seen[0], True)], 1, store.now)
    assert state.public() == {
        "id": "r4",
        "state": "crash-looping",
        "seconds": 0.0,
        "reason": "no weights",
        "failed_starts": 4,
        "next_try": 4.0,
    }


def test_share_of_a_phase_is_told_now_and_then_and_does_not_make_it_younger() -> None:
    store = Store()
    start = store.start("r")
    start.phase("weights")
    began = store.now
    told = []
    for seconds, share in ((0.5, 0.1), (1.0, 0.2), (1.5, 0.3), (2.5, 0.4)):
        store.now = began + seconds
        start.phase("weights", share)
        told.append(store.records["r"].share)
    assert told == [0.0, 0.2, 0.2, 0.4]
    (state,) = replica_states([], [(store.records["r"], True)], 1, store.now)
    assert state.public() == {"id": "r", "state": "starting", "seconds": 2.5, "phase": "weights", "share": 0.4}
    start.phase("kv blocks")
    assert store.records["r"].share == 0.0
    start.ready()
    store.now += 9
    start.phase("weights", 0.5)
    assert (store.records["r"].state, store.records["r"].phase) == ("ready", "")


def test_nobody_is_held_back_while_it_is_not_known_who_lives() -> None:
    store = Store()
    for number in range(4):
        store.fail(f"r{number}")
    store.slept.clear()
    start = Start(store, "r4", "r4", lambda: None, lambda: store.now, store.sleep)
    start.hold_back()
    start.phase("weights")
    assert (store.slept, store.records["r4"].state) == ([], "starting")


@pytest.mark.parametrize("error", [RpcError("no control store"), RuntimeError("gone"), AssertionError()])
def test_a_start_goes_on_and_keeps_its_error_without_the_control_store(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def gone(*_: Any, **__: Any) -> Any:
        raise error

    for name in ("_internal_kv_put", "_internal_kv_list", "_internal_kv_get", "_internal_kv_del"):
        monkeypatch.setattr(control_store.internal_kv, name, gone)
    monkeypatch.setattr(start_register, "list_named_actors", gone)
    assert living_actors() is None
    start = Start(StartRegister("app", "Replica"), "r", "r", living_actors)
    start.hold_back()
    start.failed("no weights")


def test_a_record_that_cannot_be_forgotten_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {b"app/Replica//old": msgspec.msgpack.encode(StartRecord("old", "old", 0.0, 0.0))}

    def gone(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no control store")

    monkeypatch.setattr(control_store.internal_kv, "_internal_kv_list", lambda *_, **__: list(kept))
    monkeypatch.setattr(control_store.internal_kv, "_internal_kv_get", lambda key, **_: kept[key])
    monkeypatch.setattr(control_store.internal_kv, "_internal_kv_del", gone)
    register = StartRegister("app", "Replica")
    register.prune(set(), 1e9)
    assert [record.replica_id for record in register.of_version()] == ["old"]


def test_one_that_was_killed_while_it_started_counts_and_its_phase_is_named() -> None:
    store = Store()
    start = store.start("a")
    start.hold_back()
    start.phase("weights")
    store.alive.clear()
    assert failures_in_a_row(store.of_version(), store.alive, store.now) == (
        1,
        "its process ended while it was starting (weights)",
    )


@pytest.mark.parametrize("later", [100, -3600], ids=["later", "by a clock behind"])
def test_a_good_start_ends_the_count(later: int) -> None:
    store = Store()
    store.fail("a")
    store.fail("b")
    good = store.start("c")
    good.hold_back()
    good.ready()
    store.alive.clear()
    store.now += later
    assert failures_in_a_row(store.of_version(), store.alive, store.now)[0] == 0


@pytest.mark.parametrize("ahead", [-3600, 3600])
def test_starts_count_in_their_order_whatever_the_clocks_of_their_nodes(ahead: int) -> None:
    store = Store()
    for at, act in ((ahead, "good"), (0, "fails"), (0, "fails"), (-ahead, "fails")):
        store.now += at
        if act == "fails":
            store.fail(f"r{len(store.records)}")
        else:
            good = store.start("good")
            good.hold_back()
            good.ready()
        store.now -= at
    assert failures_in_a_row(store.of_version(), store.alive, store.now)[0] == 3


def test_one_that_dies_as_soon_as_it_is_ready_has_failed_and_a_kill_later_on_has_not() -> None:
    store = Store()
    start = store.start("a")
    start.ready()
    store.now += 3
    start.died("rank 1 ended")
    store.alive.clear()
    assert failures_in_a_row(store.of_version(), store.alive, store.now) == (1, "rank 1 ended")
    other = store.start("b")
    other.ready()
    store.now += 60
    other.died("rank 1 ended")
    store.alive.clear()
    assert failures_in_a_row(store.of_version(), store.alive, store.now)[0] == 0


def test_replicas_that_fail_side_by_side_count_once() -> None:
    store = Store()
    starts = [store.start(f"r{number}") for number in range(8)]
    for start in starts:
        start.hold_back()
    for start in starts:
        start.failed("no weights")
    store.alive.clear()
    assert failures_in_a_row(store.of_version(), store.alive, store.now) == (1, "no weights")


def test_replicas_that_serve_wants_and_nobody_sees_are_pending() -> None:
    record = StartRecord("a", "a", 1000, 1001, "starting", "weights")
    states = replica_states([], [(record, True)], 3, 1004)
    assert [(state.state, state.phase, state.seconds) for state in states] == [
        ("starting", "weights", 3),
        ("pending", "", None),
        ("pending", "", None),
    ]


def test_a_replica_that_a_router_cannot_link_to_says_why() -> None:
    record = StartRecord("a", "a", 1000, 1001, "ready", "")
    (state,) = replica_states([], [(record, True)], 1, 1004, {"a": "it speaks link protocol 7"})
    assert (state.state, state.phase, state.reason) == ("starting", "linking", "it speaks link protocol 7")


def test_failures_are_told_while_starts_go_on_and_no_longer() -> None:
    store = Store()
    for number in range(3):
        store.fail(f"r{number}")
    given_up = [(record, False) for record in store.of_version()]
    assert failed_before(given_up) == 0
    start = store.start("r3")
    start.hold_back()
    assert failed_before([*given_up, (store.records["r3"], True)]) == 3
    start.failed("no weights")
    assert failed_before([*given_up, (store.records["r3"], True)]) == 4
    start.ready()
    assert failed_before([*given_up, (store.records["r3"], True)]) == 0


def test_figures_of_starts_are_by_model_and_none_while_ray_is_not_reached() -> None:
    record = StartRecord("a", "a", 1000, 1001, "waiting", failures=5)
    picture = AppPicture(None, {"Replica-one": [(record, True)], "Replica-two": []}, time.monotonic())
    seen: list[AppPicture | None] = [picture]
    models = [("one", "Replica-one"), ("two", "Replica-two"), ("three", "Replica-three")]
    collector = StartCollector(models, lambda: seen[0])

    def told() -> dict[str, float]:
        return {one.labels["model_name"]: one.value for family in collector.collect() for one in family.samples}

    assert told() == {"one": 5, "two": 0}
    for old in (None, replace(picture, seen=time.monotonic() - OLD_SECONDS)):
        seen[0] = old
        assert told() == {}


def status_of(error: Exception) -> str:
    """What Serve shows: the traceback as text, with words of its own before it."""
    try:
        raise ReplicaStartError.of(error) from error
    except ReplicaStartError as raised:
        return "The deployment failed to start 1 times in a row. Error:\n" + "".join(
            traceback.format_exception(raised)
        )


def test_the_reason_and_its_flag_are_found_in_a_traceback():
    error = ConfigError("the KV cache holds 32 tokens,\n fewer than max_model_len=64", "max_model_len")
    assert find_start_failure(status_of(error)) == StartFailure(
        "ConfigError", "max_model_len", "the KV cache holds 32 tokens, fewer than max_model_len=64"
    )


def test_an_error_without_a_flag_is_found_too():
    found = find_start_failure(status_of(CheckpointError("model.safetensors: truncated: at byte 7")))
    assert found == StartFailure("CheckpointError", "", "model.safetensors: truncated: at byte 7")


def test_other_tracebacks_and_source_lines_are_not_taken_for_a_reason():
    text = 'raise ReplicaStartError("squadron: ConfigError: port: no")\nRuntimeError: squadron: ConfigError: port: no'
    assert find_start_failure(text) is None
