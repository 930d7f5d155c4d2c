"""Releases are installed, upgraded, rolled back and uninstalled by real Helm, and clusters go on meanwhile."""

import pytest
import yaml

from tests.helm.api_server import served
from tests.helm.kuberay import KubeRay
from tests.helm.rendered import CHART, RELEASE, deployments_of

FIRST = {
    "apiKeys": {"existingSecret": "llm-keys"},
    "models": [{"model": "Qwen/Qwen3-8B", "served_model_name": "qwen", "replicas": 2}],
    "workerGroups": [{"name": "gpu", "accelerator": {"resource": "nvidia.com/gpu"}}],
    "modelCache": {"type": "pvc"},
}
MORE = {
    **FIRST,
    "models": [{**FIRST["models"][0], "replicas": 3}, {"model": "owner/other", "served_model_name": "other"}],
    "app": {"routers": 3},
}
OTHER_IMAGE = {**MORE, "image": {"tag": "mine"}}
NAME = f"{RELEASE}-squadron"


@pytest.fixture
def release(helm, tmp_path):
    """Run commands of Helm on a release; return the RayService, if there is one then."""
    with served(tmp_path) as (server, config):

        def run(command, *words, values=None):
            given = []
            if values is not None:
                path = tmp_path / "values.yaml"
                path.write_text(yaml.safe_dump(values))
                given = [str(CHART), "--disable-openapi-validation", "--values", str(path)]
            done = helm.run(command, RELEASE, *words, *given, "--kubeconfig", str(config), "--namespace", "serving")
            assert done.returncode == 0, done.stderr
            return server.named("RayService").get(NAME), done.stdout

        yield server, run


def test_a_cluster_goes_on_through_another_model_and_other_numbers_and_back(release):
    server, run = release
    kuberay = KubeRay()
    service, said = run("install", values=FIRST)
    assert f"get rayservice {NAME} --watch" in said
    assert kuberay.reconcile(service) == {"gpu": 2}
    service, _ = run("upgrade", values=MORE)
    assert kuberay.reconcile(service) == {"gpu": 4}
    assert deployments_of([service]).keys() == {"Router", "Replica-qwen", "Replica-other"}
    assert "owner/other" in server.named("ConfigMap")[f"{NAME}-fetch"]["data"]["gpu.json"]
    service, _ = run("rollback", "1")
    assert kuberay.reconcile(service) == {"gpu": 2}
    assert deployments_of([service]).keys() == {"Router", "Replica-qwen"}
    assert "owner/other" not in server.named("ConfigMap")[f"{NAME}-fetch"]["data"]["gpu.json"]
    assert len(kuberay.clusters) == 1


def test_another_image_is_another_cluster(release):
    _, run = release
    kuberay = KubeRay()
    kuberay.reconcile(run("install", values=MORE)[0])
    kuberay.reconcile(run("upgrade", values=OTHER_IMAGE)[0])
    assert len(kuberay.clusters) == 2


def test_nothing_stays_of_a_release_but_its_models(release):
    server, run = release
    run("install", values=FIRST)
    run("uninstall")
    assert [plural for plural, _ in server.objects] == ["persistentvolumeclaims"]
