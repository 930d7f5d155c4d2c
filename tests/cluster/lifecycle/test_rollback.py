"""An update that fails is undone, once, whichever version the routers belong to that are left."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from cluster.app_config import parse_app
from cluster.lifecycle.app_status import AppState, DeploymentState
from cluster.lifecycle.rollback import ATTEMPTS, STALE, GoodVersion, Rollback, Undone
from engine.errors import CheckpointError

OLD = GoodVersion("/", args={"served_model_name": ["a", "b"]}, versions={"Router": "1"})
NEW = GoodVersion("/", config={"name": "squadron", "args": {"model": "other"}})
RUNNING = AppState("RUNNING", deployed_at=1.0)
DEPLOYING = AppState("DEPLOYING", deployed_at=2.0)
BAD = AppState("DEPLOY_FAILED", {"Replica": DeploymentState("DEPLOY_FAILED", reason="no weights")}, deployed_at=2.0)
AGAIN = AppState("RUNNING", deployed_at=3.0)
SECONDS = 2.0  # between two looks


@dataclass
class Memory:
    good: GoodVersion | None = None
    undone: Undone | None = None
    seen: float = 0.0

    def forget(self) -> None:
        self.good, self.undone, self.seen = None, None, 0.0


@dataclass
class Serve:
    """An app in Serve, its memory, and a clock. current: what serves, None for a router that is being replaced.

    refuses: how often `restore` finds the app deployed anew. fails: what deploying raises.
    """

    current: GoodVersion | None = OLD
    refuses: int = 0
    fails: Exception | None = None
    asked: int = 0
    restored: list[GoodVersion] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    now: float = 3600.0
    jump: float = 0.0  # of the time of day

    def version(self) -> GoodVersion | None:
        return self.current

    def restore(self, version: GoodVersion) -> bool:
        self.asked += 1
        if self.fails is not None:
            raise self.fails
        if self.asked <= self.refuses:
            return False
        self.restored.append(version)
        return True

    def router(self, *states: AppState) -> Rollback:
        """Return a router that has seen these states, one a look."""
        router = Rollback(self, self.memory, lambda: self.now + self.jump, lambda: self.now)
        self.show(router, *states)
        return router

    def show(self, router: Rollback, *states: AppState) -> None:
        for state in states:
            self.now += SECONDS
            router.observe(state)


def test_an_update_that_fails_is_undone_once_and_told_of() -> None:
    serve = Serve()
    router = serve.router(RUNNING, DEPLOYING, BAD, BAD, BAD, BAD)
    assert serve.restored == [OLD]
    assert router.notice == ""
    serve.show(router, AGAIN)
    assert router.notice == "an update failed and was rolled back at 1970-01-01 01:00:08 UTC: no weights"


def test_a_router_of_the_failed_version_undoes_it_where_no_other_is_left() -> None:
    serve = Serve()
    serve.router(RUNNING)
    serve.router(DEPLOYING, BAD, BAD)
    assert serve.restored == [OLD]
    told = serve.router(AGAIN)
    assert "no weights" in told.notice, "a router that came later tells of it too"


def test_several_routers_undo_an_update_once() -> None:
    serve = Serve()
    first, second = serve.router(RUNNING), serve.router(RUNNING)
    for _ in range(3):
        serve.show(first, BAD)
        serve.show(second, BAD)
    assert serve.restored == [OLD]


def test_a_failure_that_one_look_shows_is_not_acted_on() -> None:
    serve = Serve()
    serve.router(RUNNING, BAD, DEPLOYING, BAD, RUNNING)
    assert not serve.asked


def test_an_app_that_never_served_has_nothing_to_go_back_to() -> None:
    serve = Serve()
    serve.router(DEPLOYING, BAD, BAD, BAD)
    assert not serve.asked


def test_a_deleted_app_does_not_come_back() -> None:
    serve = Serve()
    serve.router(RUNNING, AppState("DELETING"))
    serve.router(DEPLOYING, BAD, BAD, BAD)
    serve.router(RUNNING)  # and where nobody saw it being deleted
    serve.now += STALE
    serve.router(DEPLOYING, BAD, BAD, BAD)
    assert not serve.asked


def test_an_update_may_take_long_to_fail() -> None:
    serve = Serve()
    serve.router(RUNNING)
    serve.router(*[DEPLOYING] * int(5 * STALE / SECONDS), BAD, BAD)
    assert serve.restored == [OLD]


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
def test_a_time_of_day_that_jumps_makes_no_app_a_deleted_one(jump: float) -> None:
    serve = Serve()
    serve.router(RUNNING)
    new = serve.router(DEPLOYING)
    serve.jump += jump  # and the routers of the old version are gone by now
    serve.show(new, *[DEPLOYING] * int(2 * STALE / SECONDS), BAD, BAD)
    assert serve.restored == [OLD]


@pytest.mark.parametrize("ahead", [-7200.0, 7200.0])
def test_a_router_whose_clock_is_another_nodes_knows_a_living_app(ahead: float) -> None:
    serve = Serve()
    old = serve.router(RUNNING)
    new = Rollback(serve, serve.memory, lambda: serve.now + ahead, lambda: serve.now)
    for _ in range(10):  # one beside the other
        serve.show(new, DEPLOYING)
        serve.show(old, DEPLOYING)
    serve.show(new, DEPLOYING, BAD, BAD)
    assert serve.restored == [OLD]


def test_a_router_that_is_being_replaced_does_not_call_its_version_good() -> None:
    serve = Serve()
    old = serve.router(RUNNING)
    serve.current = NEW
    serve.router(AGAIN)
    serve.current = None
    serve.show(old, AGAIN, AppState("DEPLOY_FAILED", deployed_at=4.0), AppState("DEPLOY_FAILED", deployed_at=4.0))
    assert serve.restored == [NEW]


def test_two_versions_that_both_fail_do_not_take_turns() -> None:
    serve = Serve()
    worse = AppState("DEPLOY_FAILED", BAD.deployments, deployed_at=3.0)
    router = serve.router(RUNNING, BAD, BAD, DEPLOYING, worse, worse, worse)
    assert serve.restored == [OLD]
    serve.show(router, AGAIN, *[AppState("DEPLOY_FAILED", BAD.deployments, deployed_at=4.0)] * 2)
    assert serve.restored == [OLD, OLD], "it served again in between"


def test_another_version_that_serves_ends_the_notice() -> None:
    serve = Serve()
    router = serve.router(RUNNING, BAD, BAD, AGAIN)
    assert router.notice
    serve.current = NEW
    serve.show(router, AppState("RUNNING", deployed_at=5.0))
    assert not router.notice


def test_what_is_deployed_by_a_user_meanwhile_is_left_alone_and_asking_ends() -> None:
    serve = Serve(refuses=100)
    serve.router(RUNNING, *[BAD] * 20)
    assert serve.asked == ATTEMPTS


def test_a_version_that_cannot_be_built_any_more_is_not_tried_for_ever() -> None:
    serve = Serve(fails=CheckpointError("model.safetensors is gone"))
    router = serve.router(RUNNING)
    for _ in range(20):
        with suppress(CheckpointError):
            serve.show(router, BAD)
    assert serve.asked == ATTEMPTS


def test_a_controller_that_is_away_for_long_does_not_end_the_rollback() -> None:
    serve = Serve(fails=ConnectionError("the controller is being restarted"))
    router = serve.router(RUNNING)
    for _ in range(3 * ATTEMPTS):
        with suppress(ConnectionError):
            serve.show(router, BAD)
    serve.fails = None
    serve.show(router, BAD)
    assert serve.restored == [OLD]


def test_an_update_that_serve_goes_on_with_is_left_to_it() -> None:
    serve = Serve()
    lost = DeploymentState("DEPLOY_FAILED", reason="A replica's health check failed.", goes_on=True)
    serve.router(RUNNING, *[AppState("DEPLOY_FAILED", {"Replica": lost}, deployed_at=2.0)] * 5)
    assert not serve.asked


def test_an_app_that_could_not_be_built_is_undone() -> None:
    serve = Serve()
    router = serve.router(RUNNING, *[AppState("DEPLOY_FAILED", reason="max_num_seqs is bad", deployed_at=2.0)] * 2)
    assert serve.restored == [OLD]
    serve.show(router, AGAIN)
    assert "max_num_seqs is bad" in router.notice


def test_a_version_that_wants_no_rollback_gets_none() -> None:
    serve = Serve(current=GoodVersion("/", action="pause"))
    serve.router(RUNNING, BAD, BAD, BAD)
    assert not serve.asked


@pytest.mark.parametrize(
    "args",
    [
        {"model": "demo", "served_model_name": "a,b", "replicas": 2},
        {"models": [{"model": "demo", "served_model_name": "a"}, {"model": "demo", "served_model_name": "b"}]},
    ],
)
def test_what_is_remembered_of_a_version_builds_it_again(args: dict) -> None:
    app = parse_app(args)
    kept = GoodVersion("/", args=app.settings()).as_kept()
    assert kept.as_kept() == kept
    assert parse_app(kept.args) == app
