"""An update that fails is undone by the routers of the version before it: once, by those that belong to it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from cluster.life.app_status import AppState, DeploymentState
from cluster.life.copy_version import replica_version, router_version
from cluster.life.rollback import ATTEMPTS, Rollback, Version
from engine.errors import CheckpointError

GOOD = Version("/", {"name": "squadron", "args": {"model": "demo"}})
RUNNING = AppState("RUNNING", deployed_at=1.0)
DEPLOYING = AppState("DEPLOYING", deployed_at=2.0)
BAD = AppState("DEPLOY_FAILED", {"Replica": DeploymentState("DEPLOY_FAILED", reason="no weights")}, deployed_at=2.0)


@dataclass
class Deployed:
    """An app in Serve. current: what `version` finds. refuses: how often `restore` finds the app deployed anew.

    fails: what deploying raises.
    """

    current: Version | None = GOOD
    refuses: int = 0
    fails: Exception | None = None
    asked: int = 0
    restored: list[Version] = field(default_factory=list)

    def version(self) -> Version | None:
        return self.current

    def restore(self, version: Version) -> bool:
        self.asked += 1
        if self.fails is not None:
            raise self.fails
        if self.asked <= self.refuses:
            return False
        self.restored.append(version)
        return True


def after(deployed: Deployed, *states: AppState) -> Rollback:
    rollback = Rollback(deployed, clock=lambda: 3723.0)
    for state in states:
        rollback.look(state)
    return rollback


def test_an_update_that_fails_is_undone_once_and_told_of() -> None:
    deployed = Deployed()
    rollback = after(deployed, RUNNING, DEPLOYING, BAD, BAD, BAD, BAD)
    assert deployed.restored == [GOOD]
    assert rollback.notice == ""
    rollback.look(AppState("RUNNING", deployed_at=3.0))
    assert rollback.notice == "an update failed and was rolled back at 01:02:03 UTC: no weights"


def test_a_failure_that_one_look_shows_is_not_acted_on() -> None:
    deployed = Deployed()
    after(deployed, RUNNING, BAD, DEPLOYING, BAD, RUNNING)
    assert not deployed.restored


def test_an_app_that_never_served_has_nothing_to_go_back_to() -> None:
    deployed = Deployed()
    after(deployed, DEPLOYING, BAD, BAD, BAD)
    assert not deployed.restored


def test_a_router_that_is_being_replaced_does_not_bring_its_version_back() -> None:
    deployed = Deployed(current=None)
    after(deployed, AppState("RUNNING", deployed_at=2.0), BAD, BAD, BAD)
    assert not deployed.restored


def test_two_versions_that_both_fail_do_not_take_turns() -> None:
    deployed = Deployed()
    again = AppState("DEPLOY_FAILED", BAD.deployments, deployed_at=3.0)
    rollback = after(deployed, RUNNING, BAD, BAD, DEPLOYING, again, again, again)
    assert deployed.restored == [GOOD]
    rollback.look(AppState("RUNNING", deployed_at=3.0))
    for _ in range(2):
        rollback.look(AppState("DEPLOY_FAILED", BAD.deployments, deployed_at=4.0))
    assert deployed.restored == [GOOD, GOOD], "it served again in between"


def test_what_is_deployed_by_a_user_meanwhile_is_left_alone_and_asking_ends() -> None:
    deployed = Deployed(refuses=100)
    after(deployed, RUNNING, *[BAD] * 20)
    assert deployed.asked == ATTEMPTS


def test_a_version_that_cannot_be_built_any_more_is_not_tried_for_ever() -> None:
    deployed = Deployed(fails=CheckpointError("model.safetensors is gone"))
    rollback = after(deployed, RUNNING)
    for _ in range(20):
        with suppress(CheckpointError):
            rollback.look(BAD)
    assert deployed.asked == ATTEMPTS


@pytest.mark.parametrize("name", ["replicas", "max_replicas", "routers", "max_surge_percent"])
def test_numbers_restart_no_replica(name: str) -> None:
    settings = {"model": "demo", "max_num_seqs": 8, name: 1}
    assert replica_version(settings, "w") == replica_version(settings | {name: 2}, "w")
    assert router_version(settings, "w") != router_version(settings | {name: 2}, "w")


def test_other_settings_and_other_weights_do() -> None:
    settings = {"model": "demo", "max_num_seqs": 8}
    assert replica_version(settings, "w") != replica_version(settings | {"max_num_seqs": 9}, "w")
    assert replica_version(settings, "w") != replica_version(settings, "other")
