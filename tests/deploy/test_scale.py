"""A running cluster gets the numbers of pods of its release."""

import json

import httpx
import pytest

from deploy.scale import Resources, ScaleError, connect, main, read_groups, scale
from engine.errors import ConfigError

GROUPS = read_groups(
    '{"gpu": {"minReplicas": 2, "maxReplicas": 2, "replicas": 2}, "cpu": {"minReplicas": 1, "maxReplicas": 9}}'
)
PLACE = "/apis/ray.io/v1/namespaces/serving"


class Kubernetes:
    """One RayService with the clusters that its status names, behind HTTP.

    beaten: patches that come too late. looks: so many until KubeRay has seen the service.
    """

    def __init__(self, active="", pending="", beaten=0, looks=1):
        self.status = {
            "activeServiceStatus": {"rayClusterName": active},
            "pendingServiceStatus": {"rayClusterName": pending},
        }
        self.clusters = {name: self.groups() for name in (active, pending) if name}
        self.beaten = beaten
        self.patches = []
        self.looks = looks

    @staticmethod
    def groups():
        return [
            {"groupName": "cpu", "replicas": 4, "minReplicas": 1, "maxReplicas": 5},
            {"groupName": "gpu", "replicas": 1, "minReplicas": 1, "maxReplicas": 1},
            {"groupName": "new", "replicas": 1, "minReplicas": 1, "maxReplicas": 1},
        ]

    def __call__(self, request):
        name = request.url.path.rpartition("/")[2]
        if request.url.path == f"{PLACE}/rayservices/llm":
            self.looks -= 1
            status = self.status | {"observedGeneration": 0 if self.looks > 0 else 1}
            return httpx.Response(200, json={"metadata": {"generation": 1}, "status": status})
        if name not in self.clusters:
            return httpx.Response(404, json={"reason": "NotFound"})
        assert request.url.path == f"{PLACE}/rayclusters/{name}"
        if request.method == "PATCH":
            assert request.headers["content-type"] == "application/json-patch+json"
            if self.beaten:
                self.beaten -= 1
                return httpx.Response(409, json={"reason": "Conflict"})
            self.patches.append((name, json.loads(request.content)))
            return httpx.Response(200, json={})
        spec = {"workerGroupSpecs": self.clusters[name]}
        return httpx.Response(200, json={"metadata": {"resourceVersion": "7"}, "spec": spec})

    def resources(self):
        client = httpx.Client(base_url="http://kubernetes", transport=httpx.MockTransport(self))
        return Resources(client, "serving")


@pytest.fixture
def at_once(monkeypatch):
    """Wait for nothing between two looks."""
    monkeypatch.setattr("deploy.scale.PAUSE", 0.0)


def test_counts_that_differ_are_set_and_others_are_left_alone():
    there = Kubernetes(active="one")
    assert scale(there.resources(), "llm", GROUPS, 0) == (
        "one: cpu.maxReplicas=9, gpu.minReplicas=2, gpu.maxReplicas=2, gpu.replicas=2"
    )
    assert there.patches == [
        (
            "one",
            [
                {"op": "test", "path": "/metadata/resourceVersion", "value": "7"},
                {"op": "add", "path": "/spec/workerGroupSpecs/0/maxReplicas", "value": 9},
                {"op": "add", "path": "/spec/workerGroupSpecs/1/minReplicas", "value": 2},
                {"op": "add", "path": "/spec/workerGroupSpecs/1/maxReplicas", "value": 2},
                {"op": "add", "path": "/spec/workerGroupSpecs/1/replicas", "value": 2},
            ],
        )
    ]


def test_the_cluster_that_is_being_built_is_the_one_that_counts():
    there = Kubernetes(active="old", pending="new")
    assert scale(there.resources(), "llm", GROUPS, 0).startswith("new: ")
    assert [name for name, _ in there.patches] == ["new"]


@pytest.mark.parametrize("there", [Kubernetes(), Kubernetes(active="old")])
def test_a_cluster_that_is_not_there_yet_is_built_with_its_numbers(there):
    there.clusters.clear()
    assert "nothing to do" in scale(there.resources(), "llm", GROUPS, 0)


def test_a_change_that_another_one_overtook_is_made_again(at_once):
    there = Kubernetes(active="one", beaten=2)
    assert scale(there.resources(), "llm", GROUPS).startswith("one: ")
    assert len(there.patches) == 1


def test_kuberay_must_have_seen_the_service_as_it_is(at_once):
    with pytest.raises(ScaleError, match="KubeRay has not taken notice of RayService llm in 0 s; does it run"):
        scale(Kubernetes(active="one", looks=2).resources(), "llm", GROUPS, 0)
    assert scale(Kubernetes(active="one", looks=3).resources(), "llm", GROUPS).startswith("one: ")


def test_what_kubernetes_refuses_is_told():
    refused = httpx.MockTransport(lambda _: httpx.Response(403, text="rayservices is forbidden"))
    with pytest.raises(ScaleError, match=r"GET /apis/.*/rayservices/llm: 403 rayservices is forbidden"):
        scale(Resources(httpx.Client(base_url="http://kubernetes", transport=refused), "serving"), "llm", GROUPS, 0)
    with pytest.raises(ScaleError, match="there is no RayService other in serving"):
        scale(Kubernetes().resources(), "other", GROUPS, 0)


@pytest.mark.parametrize("text", ["gpu=2", '{"gpu": 2}', '{"gpu": {"minReplicas": 1}}', '{"gpu": {"min": 1}}'])
def test_counts_that_are_none_are_refused_with_some_that_work(text):
    with pytest.raises(ConfigError, match=r"--groups: must be JSON such as .*minReplicas"):
        read_groups(text)


def test_outside_of_a_pod_it_says_so(tmp_path, capsys):
    with pytest.raises(ScaleError, match="this runs in a pod of Kubernetes"):
        connect("http://kubernetes", tmp_path)
    assert main(["llm", "--namespace", "serving", "--groups", "{}", "--account", str(tmp_path)]) == 1
    assert "Error: " in capsys.readouterr().err
