"""What the chart renders is what Kubernetes and KubeRay take, with both versions of Helm."""

import copy
import re

import pytest
import yaml

from tests.helm.rendered import CHART, ROOT, VALUES, clusters, of_kind, pod_templates, rendered
from tests.helm.schemas import CORE, KUBERAY, VERSIONS, core_trouble, pod_of, ray_trouble

OF_KUBERAY = {"RayService", "RayJob"}
# No schemas of these are at hand; what matters in them is looked at in test_front.py and test_monitoring.py.
OF_OTHERS = {"HTTPRoute", "PodMonitor", "PrometheusRule"}
each_example = pytest.mark.parametrize("name", VALUES)


@each_example
def test_lint_finds_nothing(helm, name):
    result = helm.run("lint", str(CHART), "--strict", "--values", str(VALUES[name]))
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_defaults_alone_make_a_service(helm):
    result = helm.run("lint", str(CHART), "--strict")
    assert result.returncode == 0, result.stdout + result.stderr
    assert [service["metadata"]["name"] for service in of_kind(helm.template(), "RayService")] == ["llm-squadron"]


def test_both_versions_render_the_same(helm):
    for name in VALUES:
        assert rendered(name, helm.major) == rendered(name)


@each_example
@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_every_object_and_pod(helm4, name, version):
    objects = rendered(name)
    known = CORE | OF_KUBERAY | OF_OTHERS
    assert {one["kind"] for one in objects} <= known
    things = [one for one in objects if one["kind"] in CORE] + [pod_of(one) for one in pod_templates(objects)]
    assert things
    assert [line for one in things for line in core_trouble(one, version)] == []


@pytest.mark.skipif(not KUBERAY.is_dir(), reason=f"KubeRay's schemas are not here: {KUBERAY}")
@each_example
def test_kuberay_takes_service_and_job(helm4, name):
    objects = [one for one in rendered(name) if one["kind"] in OF_KUBERAY]
    assert objects
    assert [line for one in objects for line in ray_trouble(one)] == []


@pytest.mark.skipif(not KUBERAY.is_dir(), reason=f"KubeRay's schemas are not here: {KUBERAY}")
def test_a_misspelt_field_is_found_in_an_object_of_kuberay(helm4):
    (service,) = copy.deepcopy(of_kind(rendered("tp4"), "RayService"))
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["minReplica"] = 1
    (trouble,) = ray_trouble(service)
    assert "minReplica" in trouble


@pytest.mark.skipif(not KUBERAY.is_dir(), reason=f"KubeRay's schemas are not here: {KUBERAY}")
def test_what_only_an_api_server_could_check_is_told(helm4):
    """So that the schemas say all that a server would say of what the chart renders today."""
    (service,) = copy.deepcopy(of_kind(rendered("tp4"), "RayService"))
    service["spec"]["managedBy"] = "ray.io/kuberay-operator"
    assert any("self == oldSelf" in line for line in ray_trouble(service))


def test_a_misspelt_field_is_found_in_a_pod(helm4):
    pod = pod_of(copy.deepcopy(next(pod_templates(rendered("tp4")))))
    pod["spec"]["containers"][0]["readinesProbe"] = {}
    (trouble,) = core_trouble(pod, VERSIONS[-1])
    assert "readinesProbe" in trouble


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_the_pods_that_the_guide_shows(version):
    text = (ROOT / "docs" / "start" / "kubernetes.md").read_text(encoding="utf-8")
    shown = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]
    assert [one["kind"] for one in shown] == ["Pod"]
    assert [line for one in shown for line in core_trouble(one, version)] == []
    (container,) = shown[0]["spec"]["containers"]
    group = yaml.safe_load(VALUES["production"].read_text())["workerGroups"][1]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": group["ranksPerPod"], **group["resources"]}


@pytest.mark.parametrize("version", VERSIONS)
def test_names_of_digits_stay_texts(helm4, version):
    names = (
        "hub.existingSecret=11,apiKeys.existingSecret=12,modelCache.type=existingClaim,modelCache.existingClaim=13"
    )
    given = ["--set-string", f"{names},image.pullSecrets[0]=14,head.memory=4000000000"]
    result = helm4.run("template", "15", str(CHART), "--set", "fullnameOverride=llm", *given)
    assert result.returncode == 0, result.stderr
    objects = [one for one in yaml.safe_load_all(result.stdout) if one]
    things = [one for one in objects if one["kind"] in CORE] + [pod_of(one) for one in pod_templates(objects)]
    assert [line for one in things for line in core_trouble(one, version)] == []


@each_example
def test_labels_by_which_kuberay_finds_its_pods_are_left_to_it(helm4, name):
    for template in pod_templates(rendered(name)):
        labels = template["metadata"]["labels"]
        assert not {"app.kubernetes.io/name", "app.kubernetes.io/created-by"} & labels.keys()


def test_the_chart_can_be_packaged_and_rendered_from_its_package(helm, tmp_path):
    result = helm.run("package", str(CHART), "--destination", str(tmp_path))
    assert result.returncode == 0, result.stderr
    (package,) = tmp_path.glob("squadron-*.tgz")
    result = helm.run(
        "template", "llm", str(package), "--namespace", "serving", "--values", str(VALUES["two-models"])
    )
    assert result.returncode == 0, result.stderr
    assert tuple(one for one in yaml.safe_load_all(result.stdout) if one) == rendered("two-models")


def test_ray_in_the_cluster_is_the_one_that_was_tested(helm4):
    pinned = (CHART.parents[1] / "constraints.txt").read_text().splitlines()
    (cluster,) = clusters(helm4.template())
    assert f"ray=={cluster['rayVersion']}" in pinned
