"""The watcher of the chaos tests sees what is wrong: each rule is broken once, and the sums that hold pass."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tests.chaos.invariants import Invariants, alive, broken_sums, grown, scrape, unsettled
from tests.cluster.cluster_lab import until
from tests.openai_app import serving

NOBODY = 2**22 + 1  # above every process id that Linux gives

IDLE = """\
# HELP squadron_requests_accepted_total Requests
squadron_requests_accepted_total{model_name="demo"} 9.0
squadron_requests_ended_total{model_name="demo",outcome="completed"} 7.0
squadron_requests_ended_total{model_name="demo",outcome="aborted"} 2.0
squadron_requests_live{model_name="demo"} 0.0
squadron_misplaced_rows_total{model_name="demo"} 0.0
squadron_kv_blocks{replica="a",state="free"} 60.0
squadron_kv_blocks{replica="a",state="cached"} 40.0
squadron_kv_blocks{replica="a",state="held"} 0.0
squadron_num_requests_running{replica="a"} 0.0
squadron_num_requests_waiting{replica="a"} 0.0
process_open_fds 12.0
"""
BUSY = (
    IDLE.replace('accepted_total{model_name="demo"} 9', 'accepted_total{model_name="demo"} 10')
    .replace('live{model_name="demo"} 0', 'live{model_name="demo"} 1')
    .replace('running{replica="a"} 0', 'running{replica="a"} 1')
    .replace('state="held"} 0', 'state="held"} 10')
)


def test_a_scrape_has_our_names_labels_and_values_and_no_others() -> None:
    found = scrape(IDLE)
    assert len(found) == 7
    assert found["squadron_requests_ended_total"][("model_name", "demo"), ("outcome", "aborted")] == 2.0
    assert sum(found["squadron_requests_ended_total"].values()) == 9.0
    assert scrape("squadron_plain 3\nsquadron_small 1e-3") == {
        "squadron_plain": {(): 3.0},
        "squadron_small": {(): 1e-3},
    }


@pytest.mark.parametrize("text", [IDLE, BUSY], ids=["idle", "busy"])
def test_sums_that_hold_are_let_pass(text: str) -> None:
    assert broken_sums(scrape(text)) == []


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('accepted_total{model_name="demo"} 9', 'accepted_total{model_name="demo"} 10', "10 requests were accepted"),
        ('outcome="completed"} 7', 'outcome="completed"} 8', "10 ended"),
        ('live{model_name="demo"} 0', 'live{model_name="demo"} 1', "1 live"),
        ('rows_total{model_name="demo"} 0', 'rows_total{model_name="demo"} 1', "wrong place"),
        ('state="held"} 0', 'state="held"} -1', "-1 blocks: (('replica', 'a'), ('state', 'held'))"),
        ('state="cached"} 40', 'state="cached"} -1', "-1 blocks"),
    ],
)
def test_sums_that_do_not_hold_are_told(old: str, new: str, told: str) -> None:
    assert old in IDLE
    (broken,) = broken_sums(scrape(IDLE.replace(old, new)))
    assert told in broken


def test_an_idle_service_is_settled_and_what_it_still_holds_is_told() -> None:
    assert unsettled(scrape(IDLE)) == []
    told = " ".join(unsettled(scrape(BUSY)))
    assert "requests_live: 1" in told
    assert "num_requests_running: 1" in told
    assert "10 blocks are held" in told
    assert unsettled(scrape(IDLE.replace('waiting{replica="a"} 0', 'waiting{replica="a"} 2')))


def test_descriptors_that_are_kept_and_processes_that_live_are_told() -> None:
    assert grown({1: 10, 2: 10, 3: 10}, {1: 18, 2: 19, 4: 99}) == ["process 2 has 19 descriptors, 10 before"]
    assert alive([NOBODY]) == []
    assert str(os.getpid()) in alive([os.getpid()])[0]


class Told:
    """A server that says what a test has it say."""

    def __init__(self) -> None:
        self.metrics = IDLE
        self.status = 200
        self.ready: dict[str, Any] = {"ready": True, "replicas": [{"pids": [os.getpid()]}]}
        self.app = Starlette(routes=[Route("/metrics", self._metrics), Route("/ready", self._ready)])

    async def watched(self, change: Callable[[Told], object]) -> None:
        """Be watched before and after a change."""
        async with serving(self.app) as url, Invariants(url, period=0.001, quiet=0.3) as invariants:
            await looked_at(invariants)
            change(self)
            await looked_at(invariants)

    def _metrics(self, _: Request) -> Response:
        return PlainTextResponse(self.metrics, self.status)

    def _ready(self, _: Request) -> Response:
        return JSONResponse(self.ready, 200 if self.ready["ready"] else 503)


async def looked_at(invariants: Invariants) -> None:
    """Wait for two looks: the second one began after this was called."""
    seen = invariants.samples + len(invariants.missed)
    await until(lambda: invariants.samples + len(invariants.missed) >= seen + 2)


async def test_what_is_as_it_must_be_is_let_pass() -> None:
    await Told().watched(lambda _: None)


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("/metrics answers 500", {"status": 500}),
        ("10 requests were accepted", {"metrics": IDLE.replace("} 9.0", "} 10.0")}),
        ("left over after 0.3 s of quiet: .*requests_live: 1", {"metrics": BUSY}),
        ("ready without a replica", {"ready": {"ready": True, "replicas": []}}),
        ("/ready answers 200 with", {"ready": {"ready": 1, "replicas": [{"pids": [os.getpid()]}]}}),
        ("left over after 0.3 s of quiet: .*process", {"ready": {"ready": True, "replicas": [{"pids": [NOBODY]}]}}),
    ],
)
async def test_what_is_not_fails_the_test_that_watches(words: str, changes: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match=words):
        await Told().watched(lambda told: vars(told).update(changes))


async def test_figures_that_are_never_told_fail_the_test_that_watches() -> None:
    told = Told()
    told.metrics = "\n".join(line for line in IDLE.splitlines() if "misplaced" not in line)
    with pytest.raises(AssertionError, match=r"said nothing of .*misplaced_rows_total"):
        await told.watched(lambda _: None)
