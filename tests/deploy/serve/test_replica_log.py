"""What the serve terminal says of replicas that are lost and come, and what it leaves out."""

from __future__ import annotations

import io

import httpx

from deploy.serve.output import DEATH_NOTICE, DeathFilter
from deploy.serve.replica_log import Listed, ReplicaLog, listed_replicas


def log_of(*names: str) -> tuple[ReplicaLog, list[str]]:
    lines: list[str] = []
    return ReplicaLog([{"id": name, "pids": [1, 2]} for name in names], len(names), lines.append, 120.0), lines


def test_a_lost_replica_and_the_one_in_its_place_are_a_line_each() -> None:
    log, lines = log_of("a", "b")
    for seen in ({"a": [1, 2], "b": [1, 2]}, {"b": [1, 2]}, {"b": [1, 2]}, {"b": [1, 2]}):
        log.compare(seen)
    assert lines == ["Replica a (pids 1, 2) is lost; what it ran goes on elsewhere, 1 of 2 left. Ray starts another."]
    log.compare({"b": [1, 2], "c": [7]})
    log.compare({"b": [1, 2], "c": [7]})
    assert lines[1:] == ["Replica c (pid 7) is ready: 2 of 2."]


def test_one_that_was_replaced_before_it_was_missed_is_not_said_to_be_waited_for() -> None:
    log, lines = log_of("a", "b")
    for _ in range(2):
        log.compare({"b": [1, 2], "c": [7]})
    assert lines == [
        "Replica c (pid 7) is ready: 2 of 2.",
        "Replica a (pids 1, 2) is lost; what it ran goes on elsewhere; another is ready already.",
    ]


def test_a_replica_that_autoscaling_takes_away_is_not_called_lost() -> None:
    lines: list[str] = []
    log = ReplicaLog([{"id": name, "pids": [1]} for name in "ab"], 4, lines.append, 120.0, scaled=True)
    log.compare({"b": [1]})
    log.compare({"b": [1]})
    assert lines == ["Replica a (pid 1) is gone; 1 of at most 4 left."]


def test_the_loss_of_the_last_replica_says_that_requests_wait() -> None:
    log, lines = log_of("a")
    log.compare({})
    log.compare({})
    assert len(lines) == 1
    assert "waits up to 120 s" in lines[0]


def test_one_router_that_does_not_know_a_replica_yet_makes_no_line() -> None:
    log, lines = log_of("a", "b")
    for _ in range(3):
        log.compare({"b": [1, 2]})
        log.compare({"a": [1, 2], "b": [1, 2]})
    assert lines == []


def test_a_sleep_is_no_loss_and_is_told_with_its_end() -> None:
    log, lines = log_of("a", "b")
    for _ in range(3):
        log.compare({}, ("a", "b"))
    assert lines == [f"Replica {name} (pids 1, 2) sleeps until POST /wake_up." for name in "ab"]
    log.compare({"a": [1, 2]}, ("b",))
    log.compare({"a": [1, 2], "b": [1, 2]})
    assert lines[2:] == [f"Replica {name} (pids 1, 2) is awake." for name in "ab"]


def test_a_replica_that_is_lost_asleep_and_the_one_in_its_place_are_told() -> None:
    log, lines = log_of("a", "b")
    log.compare({}, ("a", "b"))
    for _ in range(3):
        log.compare({}, ("b", "c"))
    assert lines[2:] == ["Replica a (pids 1, 2) is lost while it slept; Ray starts another, which sleeps, too."]
    log.compare({"b": [1, 2], "c": [7]})
    assert lines[3:] == ["Replica b (pids 1, 2) is awake.", "Replica c (pid 7) is ready: 2 of 2."]


def test_those_that_sleep_are_known_by_their_state() -> None:
    states = [{"id": "a", "state": "asleep"}, {"id": "b", "state": "ready"}]
    body = {"ready": False, "replicas": [{"id": "b", "pids": [3]}], "states": states}
    transport = httpx.MockTransport(lambda _: httpx.Response(503, json=body))
    with httpx.Client(base_url="http://server", transport=transport) as client:
        assert listed_replicas(client) == Listed([{"id": "b", "pids": [3]}], frozenset("a"))


def test_a_server_that_does_not_answer_lists_nothing() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.headers.get("broken"):
            raise httpx.ConnectError("nobody", request=request)
        return httpx.Response(503, json={"error": {"message": "busy"}})

    transport = httpx.MockTransport(answer)
    for headers in ({}, {"broken": "1"}):
        with httpx.Client(base_url="http://server", headers=headers, transport=transport) as client:
            assert listed_replicas(client) is None


def test_rays_notices_of_dead_workers_are_left_out_and_all_else_is_kept() -> None:
    below = io.StringIO()
    stream = DeathFilter(below)
    print("first", file=stream)
    print(f"(raylet) {DEATH_NOTICE} by an unexpected system error.", file=stream)
    print("(raylet) 1 worker killed due to memory pressure", file=stream)
    print("no end of line", end="", file=stream)
    assert below.getvalue() == "first\n(raylet) 1 worker killed due to memory pressure\n"
    stream.finish()
    assert below.getvalue().endswith("no end of line")
