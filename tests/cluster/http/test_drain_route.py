"""`POST /drain`: operators alone announce the end of a node, and hear what is wrong by the field's name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cluster.admission.key_file import parse_keys
from cluster.admission.keys import FixedKeys, KeyRing
from cluster.admission.tenants import Tenancy
from cluster.lifecycle import node_drains
from cluster.lifecycle.node_drains import DrainError, NotDrainedError
from tests.fake_source import FakeSource
from tests.openai_app import app_for, client_for, served_model

KEYS = "- {key: sk-user, tenant: user}\n- {key: sk-admin, tenant: operations, admin: true}\n"
ADMIN = {"authorization": "Bearer sk-admin"}


class Ray:
    """Takes in what is drained, or refuses it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float]] = []
        self.error: Exception | None = None

    def drain(self, name: str, deadline: float) -> list[str]:
        self.asked.append((name, deadline))
        if self.error is not None:
            raise self.error
        return ["c0ffee"]


@pytest.fixture
def ray() -> Ray:
    return Ray()


@pytest.fixture
def client(ray, tmp_path):
    tenancy = Tenancy(FixedKeys(KeyRing(parse_keys(KEYS, "keys.yaml"))))
    return client_for(app_for(FakeSource(lambda *_: [1]), served_model(tmp_path), tenancy=tenancy, drain=ray.drain))


@pytest.mark.parametrize(("more", "deadline"), [({}, 120.0), ({"deadline": 30}, 30.0), ({"deadline": None}, 120.0)])
async def test_a_notice_is_passed_on(client, ray, more, deadline):
    answer = await client.post("/drain", json={"node": "10.0.0.7"} | more, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"nodes": ["c0ffee"], "deadline": deadline}
    assert ray.asked == [("10.0.0.7", deadline)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "node"),
        ({"node": 7}, "node"),
        ({"node": ""}, "node"),
        ({"node": "n" * 257}, "node"),
        ({"node": "n", "deadline": -1}, "deadline"),
        ({"node": "n", "deadline": "soon"}, "deadline"),
        ({"node": "n", "deadline": True}, "deadline"),
        ({"node": "n", "deadline": 1e9}, "deadline"),
        ({"node": "n", "reason": "spot"}, "reason"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(client, ray, body, param):
    answer = await client.post("/drain", json=body, headers=ADMIN)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert not ray.asked


async def test_a_node_that_is_not_there_is_the_callers_error_and_a_silent_ray_is_not(client, ray):
    ray.error = DrainError("node: no node of this cluster that is alive is called 'x'")
    answer = await client.post("/drain", json={"node": "x"}, headers=ADMIN)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "node")
    ray.error = NotDrainedError("Ray's control store does not answer: timed out")
    answer = await client.post("/drain", json={"node": "x"}, headers=ADMIN)
    assert answer.status_code == 503
    assert answer.json()["error"]["retryable"]


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("sk-user", 403)])
async def test_who_is_no_operator_drains_nothing(client, ray, key, status):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    assert (await client.post("/drain", json={"node": "x"}, headers=headers)).status_code == status
    assert not ray.asked


async def test_without_keys_nobody_does(ray, tmp_path):
    client = client_for(app_for(FakeSource(lambda *_: [1]), served_model(tmp_path), drain=ray.drain))
    answer = await client.post("/drain", json={"node": "x"})
    assert answer.status_code == 403
    assert "--api-key" in answer.json()["error"]["message"]
    assert not ray.asked


class Nodes:
    """Ray's control store with two nodes at one address. The second one's drain does not succeed."""

    def __init__(self, failure: Exception | None) -> None:
        self._failure = failure

    def get_all_node_info(self, timeout: float) -> dict[bytes, SimpleNamespace]:
        node = SimpleNamespace(
            node_manager_address="10.0.0.7",
            node_manager_hostname="host",
            node_name="",
            is_head_node=False,
            state="alive",
            ALIVE="alive",
        )
        return {b"\x01": node, b"\x02": node}

    def drain_node(self, node_id: str, *_: object, timeout: float) -> tuple[bool, str]:
        if node_id == "02" and self._failure is not None:
            raise self._failure
        return node_id != "02", "it is busy"


@pytest.mark.parametrize("failure", [None, RuntimeError("timed out")])
async def test_where_some_nodes_are_drained_and_others_not_it_says_which(tmp_path, monkeypatch, failure):
    monkeypatch.setattr(node_drains, "_client", lambda _: Nodes(failure))
    tenancy = Tenancy(FixedKeys(KeyRing(parse_keys(KEYS, "keys.yaml"))))
    app = app_for(FakeSource(lambda *_: [1]), served_model(tmp_path), tenancy=tenancy, drain=node_drains.drain)
    answer = await client_for(app).post("/drain", json={"node": "10.0.0.7"}, headers=ADMIN)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"].endswith("already drained: 01")
