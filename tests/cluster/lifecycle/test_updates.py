"""What an update starts before it stops anything, and when a new router may take over.

Among how many routers the replicas are shared, by what Serve says of them.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from dataclasses import replace

import pytest

from cluster.app_config import AppConfig
from cluster.config import ClusterConfig
from cluster.deployments.router_host import OtherRouters
from cluster.errors import ReplicaStartError
from cluster.lifecycle import app_status, updates
from cluster.lifecycle.app_status import AppPicture, AppState, AppWatch, DeploymentState, one_line
from cluster.lifecycle.updates import ONE_MORE, StartupWait, UpdateFailedError, fits
from cluster.resources import app_resources
from cluster.router.readiness import OLD_SECONDS
from engine.errors import CheckpointError


def test_an_update_starts_one_copy_more_than_there_are() -> None:
    assert {math.ceil(ONE_MORE * copies / 100) for copies in range(1, 101)} == {1}


def test_room_is_for_a_replica_of_each_model_and_a_router() -> None:
    one = ClusterConfig("demo", tensor_parallel_size=2, cpus_per_worker=1.0)
    other = replace(one, replicas=5, tensor_parallel_size=1, cpus_per_worker=0.5)
    needed = app_resources(AppConfig((one, other)), lambda _: False).one_more
    assert needed == {"CPU": 2.75}
    assert fits(needed, {"CPU": 2.75, "GPU": 8.0})
    assert not fits(needed, {"CPU": 2.5})
    assert not fits(needed, {})
    assert not fits(app_resources(AppConfig((one,)), lambda _: True).one_more, {"CPU": 64.0, "GPU": 1.0})


class Router:
    """A start that waits: what it is asked, and what it sends on."""

    def __init__(self, answers: list) -> None:
        self.ready, self.models, self.asked = 0, 1, 0
        self.answers = answers
        self.sent: list[dict] = []

    def others(self) -> int:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def run(self) -> None:
        async def app(scope, receive, send) -> None:
            await send({"type": "lifespan.startup.complete"})

        async def send(message) -> None:
            self.sent.append(message)

        await StartupWait(app, lambda: (self.ready, self.models), self.others)({"type": "lifespan"}, None, send)


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "READY_POLL_SECONDS", 0.01)
    monkeypatch.setattr(updates, "ASK_SECONDS", 0.01)
    monkeypatch.setattr(updates, "PATIENCE", 0.1)


async def test_a_new_router_waits_while_an_old_one_serves() -> None:
    router = Router([1])
    start = asyncio.create_task(router.run())
    await asyncio.sleep(0.05)
    assert not router.sent
    router.ready = 1
    await asyncio.wait_for(start, 5)
    assert router.sent == [{"type": "lifespan.startup.complete"}]


async def test_serve_is_asked_less_often_than_links_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "ASK_SECONDS", 60.0)
    router = Router([1])
    start = asyncio.create_task(router.run())
    await asyncio.sleep(0.1)
    router.ready = 1
    await asyncio.wait_for(start, 5)
    assert router.asked == 1


async def test_a_router_that_is_alone_starts_at_once() -> None:
    router = Router([0])
    await asyncio.wait_for(router.run(), 5)
    assert router.sent == [{"type": "lifespan.startup.complete"}]


async def test_a_router_of_a_version_whose_replicas_fail_does_not_take_over() -> None:
    router = Router([1, UpdateFailedError("the new version does not start: no weights")])
    await asyncio.wait_for(router.run(), 5)
    assert router.sent == [
        {"type": "lifespan.startup.failed", "message": "the new version does not start: no weights"}
    ]


async def test_one_model_that_does_not_start_keeps_a_router_from_no_other() -> None:
    router = Router([UpdateFailedError("the new version does not start")])
    router.ready, router.models = 1, 2
    await asyncio.wait_for(router.run(), 5)
    assert router.sent == [{"type": "lifespan.startup.complete"}]


async def test_a_router_that_comes_back_beside_a_failed_update_finds_the_old_replicas() -> None:
    router = Router([UpdateFailedError("the new version does not start")])
    start = asyncio.create_task(router.run())
    await asyncio.sleep(0.02)
    router.ready = 1
    await asyncio.wait_for(start, 5)
    assert router.sent == [{"type": "lifespan.startup.complete"}]


def test_whatever_a_look_at_the_app_raises_the_next_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_status, "PROBE_SECONDS", 0.001)
    looks = iter([KeyError("a status of a newer Ray"), RuntimeError("no control store"), AppPicture(None, seen=7.0)])
    done = threading.Event()

    def see() -> AppPicture:
        look = next(looks, None)
        if look is None:
            done.set()
            threading.Event().wait()  # for good: the thread ends with the process
            raise AssertionError
        if isinstance(look, Exception):
            raise look
        return look

    watch = AppWatch(see)
    watch.start()
    assert done.wait(5)
    assert watch.picture == AppPicture(None, seen=7.0)


def test_without_the_control_store_a_look_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_status, "app_state", lambda _: None)
    monkeypatch.setattr(app_status, "living_actors", lambda: None)
    with pytest.raises(ConnectionError, match="which actors live"):
        app_status.probe_app("app")


def test_a_status_message_is_told_in_one_line() -> None:
    error = ReplicaStartError.of(CheckpointError("model.safetensors: truncated"))
    status = f"A replica failed. Error:\nTraceback:\n  File\nx.{type(error).__name__}: {error}"
    assert one_line(status) == "model.safetensors: truncated"
    assert one_line("It failed. Error:\nTraceback:\n  File\nValueError: no") == "It failed. Error: ValueError: no"
    assert one_line("") == ""


ROUTERS = OtherRouters("squadron", "Router", ("Replica",))


def picture(age=0.0, deployment="Router", **counts):
    """What makes a picture when it is called: it is of its moment."""
    app = AppState("RUNNING", {deployment: DeploymentState("HEALTHY", counts)})
    return lambda: AppPicture(app, seen=time.monotonic() - age)


@pytest.mark.parametrize(
    ("seen", "sharing"),
    [
        (picture(RUNNING=3), 3),
        (picture(RUNNING=2, STARTING=1, STOPPING=1), 2),
        (picture(RUNNING=4), 4),  # in an update
        (picture(STARTING=3), 3),
        (picture(deployment="Replica", RUNNING=9), 3),
        (picture(age=OLD_SECONDS + 1, RUNNING=1), 3),
        (lambda: AppPicture(None, seen=time.monotonic()), 3),
        (lambda: None, 3),
    ],
    ids=["all", "one died", "more", "none yet", "not told", "long ago", "no app", "not looked yet"],
)
def test_those_that_serve_share_and_as_many_as_before_where_that_is_not_known(seen, sharing):
    assert ROUTERS.sharing(seen(), before=3) == sharing
