"""What a router reads of its app from Serve's controller, and what it deploys again; Serve's client is a fake."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
from ray import serve
from ray.serve import Application
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    DeploymentStatusTrigger,
)

from cluster.lifecycle import control_store, rollback
from cluster.lifecycle.app_status import FAILED, RUNNING, read_overview
from cluster.lifecycle.rollback import AppMemory, BuiltOf, DeployedApp, GoodVersion, Undone

ARGS = {"model": "demo", "update_failure_action": "rollback"}
BUILT_OF = BuiltOf(ARGS, {"Router": "r1", "Replica": "m1"})
ENV = {"working_dir": "gcs://one.zip"}


def config(name: str, **args: Any) -> dict[str, Any]:
    return {"name": name, "route_prefix": f"/{name}", "import_path": "cluster.app:build", "args": args}


class KeyValues:
    """What Ray keeps in its control store. step: called before each look or change."""

    def __init__(self, step: Callable[[], None] = lambda: None) -> None:
        self.kept: dict[bytes, bytes] = {}
        self._step = step

    def _internal_kv_get(self, key: str | bytes, namespace: bytes) -> bytes | None:
        self._step()
        return self.kept.get(_bytes(key))

    def _internal_kv_put(self, key: str | bytes, value: bytes, overwrite: bool, namespace: bytes) -> bool:
        self._step()
        there = _bytes(key) in self.kept
        if overwrite or not there:
            self.kept[_bytes(key)] = value
        return there

    def _internal_kv_del(self, key: str | bytes, namespace: bytes) -> None:
        self._step()
        self.kept.pop(_bytes(key), None)

    def _internal_kv_list(self, prefix: str | bytes, namespace: bytes) -> list[bytes]:
        self._step()
        return [key for key in self.kept if key.startswith(_bytes(prefix))]


def _bytes(key: str | bytes) -> bytes:
    return key.encode() if isinstance(key, str) else key


class Client:
    """Serve's client: one app of ours, and another from the same config file."""

    def __init__(self, status: str = RUNNING, source: str = "declarative", state: str = "RUNNING") -> None:
        copy = {"replica_id": "me", "state": state}
        self.app: dict[str, Any] = {
            "status": status,
            "source": source,
            "route_prefix": "/ours",
            "deployed_app_config": config("ours", model="demo"),
            "deployments": {"Router": {"replicas": [copy]}, "Replica": {"replicas": []}},
        }
        other = {
            "source": "declarative",
            "deployed_app_config": config("other"),
            "status": RUNNING,
            "deployments": {},
        }
        self.details = {"target_capacity": 50.0, "applications": {"ours": self.app, "other": other}}
        self.deployed: list[Any] = []
        self.ran: list[Any] = []

    def get_serve_details(self) -> dict[str, Any]:
        return self.details

    def deploy_apps(self, schema: Any) -> None:
        self.deployed.append(schema)


def test_the_first_router_of_a_version_is_told_apart_from_those_that_come_anew(monkeypatch) -> None:
    monkeypatch.setattr(control_store, "internal_kv", KeyValues())
    memory = AppMemory("ours")
    assert memory.is_first("Replica", "v1", "a router")
    assert memory.is_first("Replica", "v1", "a router"), "asked again, as Ray repeats calls"
    assert not memory.is_first("Replica", "v1", "another")
    assert memory.is_first("Replica-b", "v1", "another")
    assert memory.is_first("Replica", "v2", "another"), "a new version is started once, too"
    assert control_store.keys("/ours/first/Replica/") == [b"/ours/first/Replica/v2"]
    memory.forget()
    assert memory.is_first("Replica", "v2", "who deploys the app anew")


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> DeployedApp:
    """An app on no Serve yet: `on` puts it on one."""

    monkeypatch.setattr(control_store, "internal_kv", KeyValues())
    monkeypatch.setattr(rollback, "_runtime_env", lambda: dict(ENV))
    return DeployedApp("ours", "Router", "me", BUILT_OF, builder=f"{__name__}:built")


def on(client: Client, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setattr(rollback.serve_context, "_get_global_client", lambda: client)
    monkeypatch.setattr(serve, "run_many", lambda targets, **_: client.ran.append(targets[0]))
    return client


def built(args: dict[str, Any], versions: dict[str, str]) -> Application:
    return serve.deployment(lambda: None, name=f"{args['model']} {versions['Router']}").bind()


def test_a_version_from_a_file_is_remembered_by_its_file_and_leaves_no_key_behind(ours, monkeypatch) -> None:
    on(Client(), monkeypatch)
    version = ours.version()
    assert version == GoodVersion("/ours", "rollback", config("ours", model="demo"))
    assert not version.args


def test_a_version_from_python_is_remembered_by_what_it_was_built_of(ours, monkeypatch) -> None:
    on(Client(source="imperative"), monkeypatch)
    assert ours.version() == GoodVersion("/ours", "rollback", None, ARGS, BUILT_OF.versions, ENV)


@pytest.mark.parametrize("client", [Client(state="STOPPING"), Client(status="DEPLOYING"), Client(status=FAILED)])
def test_only_a_copy_that_serves_a_whole_app_says_what_is_good(ours, monkeypatch, client) -> None:
    on(client, monkeypatch)
    assert ours.version() is None


def test_a_file_is_applied_again_with_what_it_says_of_other_apps_now(ours, monkeypatch) -> None:
    client = on(Client(status=FAILED), monkeypatch)
    assert ours.restore(GoodVersion("/ours", config=config("ours", model="before")))
    (schema,) = client.deployed
    assert {app.name: app.args for app in schema.applications} == {"ours": {"model": "before"}, "other": {}}
    assert schema.target_capacity == 50.0


def test_an_app_that_could_not_be_built_names_no_copies_and_is_restored(ours, monkeypatch) -> None:
    client = on(Client(status=FAILED), monkeypatch)
    client.app["deployments"] = {}
    assert ours.restore(GoodVersion("/ours", config=config("ours")))


@pytest.mark.parametrize("client", [Client(), Client(status="DEPLOYING"), Client(status=FAILED, state="STOPPING")])
@pytest.mark.parametrize(
    "version",
    [GoodVersion("/", config=config("ours")), GoodVersion("/", "rollback", None, ARGS, BUILT_OF.versions, ENV)],
)
def test_what_was_deployed_meanwhile_is_left_alone(ours, monkeypatch, client, version) -> None:
    on(client, monkeypatch)
    assert not ours.restore(version)
    assert not client.deployed
    assert not client.ran


def test_a_version_from_python_is_built_and_run_again(ours, monkeypatch) -> None:
    client = on(Client(status=FAILED, source="imperative"), monkeypatch)
    version = GoodVersion("/ours", "rollback", None, ARGS, BUILT_OF.versions, ENV)
    assert ours.restore(version)
    (target,) = client.ran
    assert (target.name, target.route_prefix) == ("ours", "/ours")
    assert target.target._bound_deployment.name == "demo r1"


def test_what_a_user_deploys_while_the_version_is_built_is_left_alone(ours, monkeypatch) -> None:
    client = on(Client(status=FAILED, source="imperative"), monkeypatch)

    build = built

    def built_while_a_user_deploys(args: dict[str, Any], versions: dict[str, str]) -> Application:
        client.app["status"] = "DEPLOYING"
        return build(args, versions)

    monkeypatch.setitem(globals(), "built", built_while_a_user_deploys)
    assert not ours.restore(GoodVersion("/ours", "rollback", None, ARGS, BUILT_OF.versions, ENV))
    assert not client.ran


def test_a_version_of_another_runtime_env_is_not_run_in_this_one(ours, monkeypatch, caplog) -> None:
    client = on(Client(status=FAILED, source="imperative"), monkeypatch)
    assert not ours.restore(GoodVersion("/ours", "rollback", None, ARGS, BUILT_OF.versions, {"pip": ["x"]}))
    assert not client.ran
    assert "runtime_env" in caplog.text


GIVEN_UP = "failed to start 3 times in a row during a rolling update. The update is stopped and replicas keep running"


@pytest.mark.parametrize(
    ("trigger", "message", "failed"),
    [
        ("REPLICA_STARTUP_FAILED", GIVEN_UP, True),
        ("HEALTH_CHECK_FAILED", "A replica's health check failed.", False),
        ("HEALTH_CHECK_FAILED", GIVEN_UP, True),
    ],
)
def test_an_update_has_failed_when_serve_gives_it_up_not_when_a_copy_dies_in_it(trigger, message, failed) -> None:
    why = DeploymentStatusTrigger(trigger)
    copies = DeploymentStatusOverview(DeploymentStatus.DEPLOY_FAILED, why, {}, message)
    healthy = DeploymentStatusOverview(
        DeploymentStatus.HEALTHY, DeploymentStatusTrigger.CONFIG_UPDATE_COMPLETED, {}, ""
    )
    app = ApplicationStatusOverview(
        ApplicationStatus.DEPLOY_FAILED, message, 1.0, {"Replica": copies, "Router": healthy}
    )
    assert read_overview(app).update_failed is failed


class TurnTaking:
    """Threads of which one goes on at a time, from one step of the store to the next; who, is drawn by a seed."""

    def __init__(self, seed: int, acts: list[Callable[[], None]]) -> None:
        self._random = Random(seed)
        self._next = [threading.Semaphore(0) for _ in acts]
        self._back = threading.Semaphore(0)
        self._left = set(range(len(acts)))
        self._threads = [threading.Thread(target=self._run, args=one, daemon=True) for one in enumerate(acts)]
        self.failed: list[BaseException] = []

    def step(self, *_: object) -> None:
        self._back.release()
        self._next[self._threads.index(threading.current_thread())].acquire()

    def run(self) -> None:
        for thread in self._threads:
            thread.start()
        while self._left:
            self._next[self._random.choice(sorted(self._left))].release()
            self._back.acquire()

    def _run(self, number: int, act: Callable[[], None]) -> None:
        self._next[number].acquire()
        try:
            act()
        except BaseException as error:
            self.failed.append(error)
        self._left.discard(number)
        self._back.release()


@pytest.mark.parametrize("seed", range(60))
def test_of_processes_that_claim_at_once_one_has_it_at_a_time(monkeypatch, seed) -> None:
    holders: list[int] = []
    most: list[int] = []

    def claims(number: int) -> None:
        for _ in range(2):
            with control_store.claim("//x", 1e9, sleep=turns.step) as holds:
                holders.append(number)
                turns.step()
                assert holds()
                most.append(len(holders))
                holders.remove(number)

    turns = TurnTaking(seed, [partial(claims, number) for number in range(3)])
    monkeypatch.setattr(control_store, "internal_kv", KeyValues(turns.step))
    turns.run()
    assert not turns.failed
    assert most == [1] * 6


def test_who_died_in_a_claim_holds_it_for_its_time_whatever_the_time_of_day(monkeypatch) -> None:
    kept = KeyValues()
    monkeypatch.setattr(control_store, "internal_kv", kept)
    control_store.put("//x/7", b"of one that died")
    now = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        monkeypatch.setattr("time.time", lambda: 1e12 * now)

    with control_store.claim("//x", 30, lambda: now, sleep) as holds:
        assert now == pytest.approx(130.0, abs=1.0)
        assert holds()
        now += 30.0
        assert not holds(), "others may have it by now"
    assert list(kept.kept) == [b"//x/8"], "the last number alone, which is not given again"


def test_a_claim_that_ray_repeated_is_ours(monkeypatch) -> None:
    kept = KeyValues()
    put = kept._internal_kv_put
    monkeypatch.setattr(kept, "_internal_kv_put", lambda *given, **more: put(*given, **more) or put(*given, **more))
    monkeypatch.setattr(control_store, "internal_kv", kept)
    with control_store.claim("//x", 30) as holds:
        assert holds()


def test_an_answer_that_comes_after_the_claim_is_not_acted_on(ours, monkeypatch) -> None:
    client = on(Client(status=FAILED), monkeypatch)
    monkeypatch.setattr(rollback, "CLAIM_SECONDS", 0.0)
    with pytest.raises(TimeoutError, match="did not tell"):
        ours.restore(GoodVersion("/", config=config("ours")))
    assert not client.deployed


def test_the_memory_of_an_app_is_read_back_and_forgotten_without_touching_another_s(monkeypatch) -> None:
    kept: dict[str, bytes] = {}
    monkeypatch.setattr(control_store, "get", kept.get)
    monkeypatch.setattr(control_store, "put", kept.__setitem__)
    monkeypatch.setattr(control_store, "delete", lambda key: kept.pop(key, None))
    monkeypatch.setattr(control_store, "keys", lambda prefix: [key for key in kept if key.startswith(prefix)])
    ours, other = AppMemory("ours"), AppMemory("ours2")
    assert (ours.good, ours.undone, ours.seen) == (None, None, 0.0)
    version = GoodVersion("/", config=config("ours", model="demo"), args={"models": [{"model": "demo"}]})
    for memory in (ours, other):
        memory.good, memory.undone, memory.seen = version, Undone("no weights", 12.5), 99.5
    assert (ours.good, ours.undone, ours.seen) == (version, Undone("no weights", 12.5), 99.5)
    ours.undone = None
    assert ours.undone is None
    ours.forget()
    assert (ours.good, ours.seen) == (None, 0.0)
    assert (other.good, other.undone) == (version, Undone("no weights", 12.5))
