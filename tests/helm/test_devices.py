"""The image that fits the devices, what a worker group adds to its pods, and the Service that clients use."""

import pytest
import yaml

from tests.helm.rendered import CHART, EXAMPLES, app_of, clusters, of_kind, pod_templates, rendered
from tests.helm.schemas import VERSIONS, core_trouble, pod_of
from tests.helm.test_security import policy_of, ports

VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
GPU = "workerGroups[0].accelerator.resource=nvidia.com/gpu"


def images(objects):
    return {
        container["image"]
        for template in pod_templates(objects)
        for container in [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]
    }


@pytest.mark.parametrize(
    ("given", "image"),
    [
        ("nameOverride=a", f"squadron:{VERSION}"),
        (GPU, f"squadron:{VERSION}-cuda"),
        (f"{GPU},image.tag=mine", "squadron:mine"),
        (
            f"{GPU},image.registry=registry.example.com:5000/team",
            f"registry.example.com:5000/team/squadron:{VERSION}-cuda",
        ),
        ("image.registry=a.example,image.repository=llm/squadron", f"a.example/llm/squadron:{VERSION}"),
        (f"{GPU},image.registry=a.example,image.digest=sha256:{'0' * 64}", f"a.example/squadron@sha256:{'0' * 64}"),
    ],
)
def test_the_image_is_the_one_for_the_devices(helm, given, image):
    """One for all pods, the head's too: Ray's processes must be of one version."""
    assert images(helm.template(None, "--set", given)) == {image}


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_runs_its_models_on_the_devices_of_its_image(helm4, name):
    (image,) = images(rendered(name))
    values = yaml.safe_load(EXAMPLES[name].read_text())
    accelerated = any(group.get("accelerator") for group in values["workerGroups"])
    assert image.endswith("-cuda") == accelerated
    if of_kind(rendered(name), "RayService"):
        assert {model.device for model in app_of(rendered(name)).models} == {"cuda" if accelerated else "cpu"}


def test_ranks_may_take_devices_by_a_claim(helm4, tmp_path):
    values = tmp_path / "values.yaml"
    claims = [{"name": "gpu", "resourceClaimTemplateName": "gpus"}, {"name": "net", "resourceClaimName": "net"}]
    group = {"name": "gpu", "accelerator": {"claim": "gpu"}, "resourceClaims": claims}
    models = [{"model": "a/b", "tensor_parallel_size": 4}]
    values.write_text(yaml.safe_dump({"models": models, "workerGroups": [group], "apiKeys": {"allowOpen": True}}))
    objects = helm4.template(values)
    (cluster,) = clusters(objects)
    (made,) = cluster["workerGroupSpecs"]
    assert made["rayStartParams"]["num-gpus"] == "4"
    spec = made["template"]["spec"]
    assert spec["resourceClaims"] == claims
    (container,) = spec["containers"]
    assert container["resources"]["claims"] == [{"name": "gpu"}, {"name": "net"}]
    assert app_of(objects).models[0].device == "cuda"
    assert images(objects) == {f"squadron:{VERSION}-cuda"}
    assert [line for one in pod_templates(objects) for line in core_trouble(pod_of(one), VERSIONS[-1])] == []


def test_a_group_adds_what_its_pods_need_and_no_other_group_has(helm4):
    service = next(clusters(rendered("everything")))
    groups = {group["groupName"]: group["template"]["spec"] for group in service["workerGroupSpecs"]}
    spec, other = groups["gpu"], groups["cpu"]
    ray, beside = spec["containers"]
    assert beside["name"] == "beside", "Ray's container must be the first"
    assert [one["name"] for one in spec["initContainers"]] == ["before", "fetch-models"]
    for share in ("requests", "limits"):
        assert (
            ray["resources"][share].items()
            >= {"rdma/hca": 2, "vpc.amazonaws.com/efa": "4", "nvidia.com/gpu": 4}.items()
        )
    env = {one["name"]: one.get("value") for one in ray["env"]}
    assert (env["NCCL_IB_HCA"], env["A"]) == ("mlx5", "1")
    assert {"name": "own", "mountPath": "/own"} in ray["volumeMounts"]
    assert (spec["serviceAccountName"], spec["schedulerName"]) == ("gpu", "volcano")
    assert other["serviceAccountName"] == "squadron"
    assert service["headGroupSpec"]["template"]["spec"]["schedulerName"] == "volcano"
    assert "schedulerName" not in other
    assert "NCCL_IB_HCA" not in [one["name"] for one in other["containers"][0]["env"]]


def test_labels_that_schedule_pods_together_are_on_what_kuberay_takes_them_from(helm4):
    for kind in ("RayService", "RayJob"):
        (found,) = of_kind(rendered("everything"), kind)
        assert found["metadata"]["labels"]["ray.io/gang-scheduling-enabled"] == "true"


def service_of(objects):
    (service,) = of_kind(objects, "RayService")
    return service["spec"].get("serveService")


def test_the_service_is_kuberays_unless_something_is_said_of_it(helm4):
    assert service_of(rendered("tp4")) is None
    given = helm4.template(None, "--set-string", "service.annotations.a=b")
    assert service_of(given) == {"metadata": {"annotations": {"a": "b"}}, "spec": {"type": "ClusterIP"}}


def test_a_load_balancer_lets_in_its_ranges_and_so_does_the_policy(helm4):
    assert service_of(rendered("everything")) == {
        "metadata": {"annotations": {"example.com/internal": "true"}},
        "spec": {
            "type": "LoadBalancer",
            "externalTrafficPolicy": "Local",
            "loadBalancerClass": "example.com/nlb",
            "loadBalancerSourceRanges": ["203.0.113.0/24"],
        },
    }
    rules = policy_of(rendered("everything"))["spec"]["ingress"]
    (rule,) = [one for one in rules if one["from"] == [{"ipBlock": {"cidr": "203.0.113.0/24"}}]]
    assert ports(rule) == [("TCP", 9000, None)]


def test_a_monitor_needs_no_rule_where_there_is_no_policy(helm4):
    objects = helm4.template(None, "--set", "podMonitor.enabled=true,networkPolicy.enabled=false")
    assert of_kind(objects, "PodMonitor")
