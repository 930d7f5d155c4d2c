"""What a change of the values leaves alone: pods that KubeRay would build anew, copies that Serve would restart."""

from __future__ import annotations

import json
import subprocess

import pytest
import yaml
from ray.serve._private.deploy_utils import get_app_code_version

from cluster.config import parse_config, scaling_settings
from cluster.lifecycle.serve_autoscaling import POLICY, autoscaling_config
from cluster.resources import deployment_names
from tests.helm.kuberay import compared
from tests.helm.rendered import EXAMPLES, app_of, declared, deployments_of, of_kind, pod_templates

OPEN = {"apiKeys": {"allowOpen": True}}
GPU = {"name": "gpu", "accelerator": {"resource": "nvidia.com/gpu"}}
BASE = {**OPEN, "models": [{"model": "Qwen/Qwen3-8B", "replicas": 2}], "workerGroups": [GPU], "app": {"routers": 1}}
SCALED = {
    **BASE,
    "models": [{"model": "Qwen/Qwen3-8B", "replicas": 2, "min_replicas": 1, "max_replicas": 4}],
    "autoscaling": {"enabled": True},
}


def model(**settings):
    return [{"model": "Qwen/Qwen3-8B", **settings}]


@pytest.fixture
def render(helm4, tmp_path):
    """Render values with the newer Helm."""

    def made(values):
        given = tmp_path / "values.yaml"
        given.write_text(yaml.safe_dump(values))
        return helm4.template(given)

    return made


def cluster_of(objects):
    """Return the cluster as KubeRay compares it."""
    (service,) = of_kind(objects, "RayService")
    return compared(service["spec"]["rayClusterConfig"])


def version_of(objects):
    """Return what Serve compares to see whether the app must be built anew and all its copies started again."""
    (application,) = declared(objects).applications
    return get_app_code_version(application)


ADDED = {
    "a model": {**BASE, "models": [*BASE["models"], {"model": "owner/other", "tokenizer": "owner/tokenizer"}]},
    "a model's length": {**BASE, "models": model(replicas=2, max_model_len=4096)},
    "routers": {**BASE, "app": {"routers": 4}},
    "replicas": {**BASE, "models": model(replicas=5)},
    "the time of streams": {**BASE, "app": {"drain_timeout": 300}},
    "bodies": {**BASE, "app": {"max_body_bytes": 2**20}},
    "labels": {**BASE, "labels": {"example.com/team": "a"}, "annotations": {"a": "b"}},
    "budgets": {**BASE, "podDisruptionBudget": {"enabled": False}},
    "how updates are made": {**BASE, "upgrade": {"deletionDelaySeconds": 9}},
    "a batch": {**BASE, "batch": {"enabled": True, "inputs": ["a"], "output": "b"}},
    "a monitor": {**BASE, "podMonitor": {"enabled": True}, "networkPolicy": {"monitoring": [{"podSelector": {}}]}},
    "a Service": {**BASE, "service": {"annotations": {"a": "b"}}},
    "who gets in": {**BASE, "networkPolicy": {"clients": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}},
}


@pytest.mark.parametrize("change", ADDED)
def test_pods_stay_as_they_are(render, change):
    before, after = render(BASE), render(ADDED[change])
    of_service = [[one for one in objects if one["kind"] == "RayService"] for objects in (before, after)]
    first, second = (list(pod_templates(objects)) for objects in of_service)
    assert first == second
    assert cluster_of(before) == cluster_of(after)
    assert json.dumps(before) != json.dumps(after), "there was a change"


SECOND_DAY = {
    "another model": {
        "models": [{"model": "BAAI/bge-m3", "workerGroup": "embed"}],
        "workerGroups": [{"name": "embed", "accelerator": {"resource": "nvidia.com/gpu"}}],
    },
    "routers": {"app": {"routers": 4}},
    "another model of a group": {"models": [{"model": "BAAI/bge-m3", "workerGroup": "single"}]},
}


@pytest.mark.parametrize("change", SECOND_DAY)
def test_the_release_of_the_guide_keeps_its_pods_through_its_second_day(render, change):
    before = yaml.safe_load(EXAMPLES["production"].read_text())
    more = SECOND_DAY[change]
    after = before | {"app": before["app"] | more.get("app", {})}
    after |= {name: [*before[name], *more.get(name, [])] for name in ("models", "workerGroups")}
    first, second = cluster_of(render(before)), cluster_of(render(after))
    assert first == {**second, "workerGroupSpecs": second["workerGroupSpecs"][: len(before["workerGroups"])]}


def test_bounds_of_autoscaling_leave_pods_as_they_are(render):
    after = {**SCALED, "models": model(replicas=3, min_replicas=2, max_replicas=9)}
    assert cluster_of(render(SCALED)) == cluster_of(render(after))


def test_a_group_at_the_end_leaves_the_others_as_they_are(render):
    """KubeRay adds it to the cluster that runs."""
    more = {
        **BASE,
        "models": [*BASE["models"], {"model": "owner/other", "workerGroup": "large"}],
        "workerGroups": [GPU, {**GPU, "name": "large"}],
    }
    before, after = cluster_of(render(BASE)), cluster_of(render(more))
    assert [group["groupName"] for group in after["workerGroupSpecs"]] == ["gpu", "large"]
    assert before == {**after, "workerGroupSpecs": after["workerGroupSpecs"][:1]}


def test_a_group_whose_model_is_taken_away_may_stay_empty_and_the_others_as_they_are(render):
    """KubeRay builds another cluster where a group is gone."""
    small = {**GPU, "name": "small", "memory": "8Gi", "ranksPerPod": 2}
    both = {
        **SCALED,
        "models": [*SCALED["models"], {"model": "owner/other", "workerGroup": "small"}],
        "workerGroups": [GPU, small],
    }
    alone = {**both, "models": SCALED["models"], "workerGroups": [GPU, {**small, "replicas": 0}]}
    before, after = render(both), render(alone)
    assert cluster_of(before) == cluster_of(after)
    (service,) = of_kind(after, "RayService")
    (_, empty) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert (empty["minReplicas"], empty["replicas"], empty["maxReplicas"]) == (0, 0, 0)
    assert deployments_of(after).keys() == {"Router", "Replica-Qwen3-8B"}


MADE_ANEW = {
    "the image": {**BASE, "image": {"tag": "0.2.0"}},
    "more memory": {**BASE, "workerGroups": [{**GPU, "memory": "32Gi"}]},
    "a model with more ranks": {**BASE, "models": [*BASE["models"], {"model": "a/b", "tensor_parallel_size": 2}]},
    "more CPUs for a rank": {**BASE, "models": model(replicas=2, cpus_per_worker=2)},
    "keys": {**BASE, "apiKeys": {"existingSecret": "keys"}},
    "autoscaling": {**BASE, "autoscaling": {"enabled": True}},
    "the autoscaler": {**BASE, "autoscaling": {"enabled": True, "idleTimeoutSeconds": 9}},
    "grace": {**BASE, "terminationGracePeriodSeconds": 900},
    "the first GPUs": {**BASE, "workerGroups": [{"name": "gpu"}]},
}


@pytest.mark.parametrize("change", MADE_ANEW)
def test_what_the_readme_lists_makes_other_pods(render, change):
    assert cluster_of(render(BASE)) != cluster_of(render(MADE_ANEW[change]))


def test_a_larger_model_fits_pods_whose_size_was_given(render):
    roomy = {**BASE, "workerGroups": [{**GPU, "ranksPerPod": 4}]}
    more = {**roomy, "models": [*roomy["models"], {"model": "a/b", "tensor_parallel_size": 4}]}
    assert cluster_of(render(roomy)) == cluster_of(render(more))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (BASE, {**BASE, "models": model(replicas=5)}),
        (BASE, {**BASE, "models": model()}),
        (BASE, {**BASE, "app": {"routers": 4}}),
        (SCALED, {**SCALED, "models": model(replicas=4, min_replicas=1, max_replicas=8)}),
        (SCALED, {**SCALED, "models": model(replicas=2, min_replicas=2, max_replicas=4)}),
    ],
)
def test_another_number_restarts_no_copy(render, before, after):
    first, second = render(before), render(after)
    assert version_of(first) == version_of(second)
    assert deployments_of(first) != deployments_of(second)


@pytest.mark.parametrize(
    "after",
    [
        {**BASE, "models": model(replicas=2, max_model_len=4096)},
        {**SCALED, "models": model(replicas=2, min_replicas=0, max_replicas=4)},
        {**SCALED, "models": model(replicas=2, min_replicas=1, max_replicas=4, target_ttft=1.0)},
    ],
)
def test_another_setting_is_another_version(render, after):
    assert version_of(render(SCALED if "autoscaling" in after else BASE)) != version_of(render(after))


def test_routers_go_to_a_group_of_their_own_by_a_resource_that_only_its_pods_have(render):
    values = yaml.safe_load(EXAMPLES["multi-node"].read_text()) | {"app": {"routers": 3, "batch_dir": "s3://a/b"}}
    objects = render(values)
    cluster = cluster_of(objects)
    offered = {one["groupName"]: one["rayStartParams"].get("resources") for one in cluster["workerGroupSpecs"]}
    assert offered["h200"] is None
    command = ["bash", "-c", f"printf %s {offered['front']}"]  # KubeRay hands it to a shell so
    heard = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    assert json.loads(heard) == {"router": 1000}
    for name in ("Router", "Batches"):
        options = deployments_of(objects)[name]["ray_actor_options"]
        assert options == {"num_cpus": 0.25, "resources": {"router": 0.001}}
    (service,) = of_kind(objects, "RayService")
    (front,) = [g for g in service["spec"]["rayClusterConfig"]["workerGroupSpecs"] if g["groupName"] == "front"]
    assert (front["minReplicas"], front["replicas"], front["maxReplicas"]) == (3, 3, 3)
    assert front["rayStartParams"]["num-gpus"] == "0"


def test_what_serve_is_told_of_autoscaling_is_what_the_app_would_tell_it(render):
    settings = {"min_replicas": 0, "max_replicas": 4, "replicas": 3, "downscale_delay_s": 60, "upscale_delay_s": 0}
    told = deployments_of(render({**SCALED, "models": model(**settings)}))["Replica-Qwen3-8B"]["autoscaling_config"]
    scaling = scaling_settings(parse_config({"model": "demo", **settings}))
    assert scaling is not None
    of_the_app = autoscaling_config(scaling, 3)
    policy = told.pop("policy")
    assert policy == {"policy_function": POLICY, "policy_kwargs": of_the_app.policy.policy_kwargs}
    assert {name: getattr(of_the_app, name) for name in told} == told
    assert told["initial_replicas"] == 3


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-8B", "owner/über modèle:1", "a/b,c"], ids=["plain", "other-letters", "list"]
)
def test_a_deployment_is_called_as_the_app_calls_it(render, name):
    objects = render({**OPEN, "models": [{"model": name}]})
    assert deployments_of(objects).keys() == {"Router", *deployment_names(app_of(objects))}
