"""Releases are installed, upgraded, rolled back and uninstalled by real Helm, and clusters go on meanwhile."""

import json

import pytest
import yaml

from deploy.scale import main
from tests.helm.api_server import served
from tests.helm.kuberay import KubeRay
from tests.helm.rendered import CHART, EXAMPLES, RELEASE, deployments_of

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


SCALED = {
    **FIRST,
    "models": [{**FIRST["models"][0], "replicas": 1, "min_replicas": 1, "max_replicas": 2}],
    "autoscaling": {"enabled": True},
}
WIDER = {**SCALED, "models": [{**SCALED["models"][0], "min_replicas": 2, "replicas": 2, "max_replicas": 8}]}


@pytest.fixture
def release(helm, tmp_path):
    """Run commands of Helm on a release; return the RayService, if there is one then."""
    with served(tmp_path) as (server, config):
        given_at = config.with_name("values.yaml")

        def run(command, *words, values=None):
            given = []
            if values is not None:
                given_at.write_text(yaml.safe_dump(values))
                given = [str(CHART), "--disable-openapi-validation", "--values", str(given_at)]
            done = helm.run(command, RELEASE, *words, *given, "--kubeconfig", str(config), "--namespace", "serving")
            assert done.returncode == 0, done.stderr
            service = server.named("RayService").get(NAME)
            if service is not None:  # an API server counts changes of a spec
                service["metadata"]["generation"] = service["metadata"].get("generation", 0) + 1
            return service, done.stdout

        yield server, run


@pytest.fixture
def run_jobs(tmp_path):
    """Run the commands of Jobs that have not run yet; return what they said."""
    (tmp_path / "token").write_text("of-a-service-account")
    done = set()

    def run(server, capsys):
        done.intersection_update(server.named("Job"))
        for name, job in server.named("Job").items():
            if name in done:
                continue
            done.add(name)
            (container,) = job["spec"]["template"]["spec"]["containers"]
            command = container["command"]
            assert command[:3] == ["python", "-m", "deploy.scale"]
            address = json.loads((tmp_path / "kubeconfig").read_text())["clusters"][0]["cluster"]["server"]
            assert main([*command[3:], "--server", address, "--account", str(tmp_path), "--seconds", "0"]) == 0
        return capsys.readouterr().out

    return run


def test_a_cluster_goes_on_through_another_model_and_other_numbers_and_back(release, run_jobs, capsys):
    server, run = release
    kuberay = KubeRay(server)

    def change(*words, values=None):
        service, said = run(*words, values=values)
        kuberay.reconcile(service)
        return service, said, run_jobs(server, capsys)

    service, said, done = change("install", values=FIRST)
    assert f"get rayservice {NAME} --watch" in said
    assert "nothing to do: cluster-1 has these numbers" in done
    assert kuberay.pods() == {"gpu": 2}
    service, _, done = change("upgrade", values=MORE)
    assert "gpu.replicas=4" in done
    assert kuberay.pods() == {"gpu": 4}
    assert deployments_of([service]).keys() == {"Router", "Replica-qwen", "Replica-other"}
    assert "owner/other" in server.named("ConfigMap")[f"{NAME}-fetch"]["data"]["gpu.json"]
    service, _, _ = change("rollback", "1")
    assert kuberay.pods() == {"gpu": 2}, "the first Job was gone, and is made again"
    assert deployments_of([service]).keys() == {"Router", "Replica-qwen"}
    assert "owner/other" not in server.named("ConfigMap")[f"{NAME}-fetch"]["data"]["gpu.json"]
    assert kuberay.clusters == 1


def test_bounds_reach_the_cluster_and_the_autoscalers_own_number_stays(release, run_jobs, capsys):
    server, run = release
    kuberay = KubeRay(server)
    kuberay.reconcile(run("install", values=SCALED)[0])
    run_jobs(server, capsys)
    (group,) = server.named("RayCluster")["cluster-1"]["spec"]["workerGroupSpecs"]
    group["replicas"] = 2  # as the autoscaler does
    kuberay.reconcile(run("upgrade", values=WIDER)[0])
    assert "cluster-1: gpu.min" in run_jobs(server, capsys)
    (group,) = server.named("RayCluster")["cluster-1"]["spec"]["workerGroupSpecs"]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (2, 2, 8)


def test_another_image_is_another_cluster_which_has_its_numbers(release, run_jobs, capsys):
    server, run = release
    kuberay = KubeRay(server)
    kuberay.reconcile(run("install", values=FIRST)[0])
    kuberay.reconcile(run("upgrade", values=OTHER_IMAGE)[0])
    assert kuberay.clusters == 2
    assert kuberay.pods() == {"gpu": 4}
    assert "nothing to do: cluster-2 has these numbers" in run_jobs(server, capsys)


def test_the_release_of_the_guide_lives_through_its_second_day(release, run_jobs, capsys):
    server, run = release
    kuberay = KubeRay(server)
    values = yaml.safe_load(EXAMPLES["production"].read_text())
    embed = {"name": "embed", "accelerator": {"resource": "nvidia.com/gpu"}, "ranksPerPod": 1}
    first, *others = values["models"]
    days = [
        (values, {"single": 2, "pair": 4, "front": 2}),
        ({"app": {**values["app"], "routers": 4}}, {"single": 2, "pair": 4, "front": 4}),
        (
            {"models": [{**first, "min_replicas": 3, "max_replicas": 8}, *others]},
            {"single": 3, "pair": 4, "front": 4},
        ),
        (
            {
                "models": [*values["models"], {"model": "BAAI/bge-m3", "workerGroup": "embed"}],
                "workerGroups": [*values["workerGroups"], embed],
            },
            {"single": 2, "pair": 4, "front": 4, "embed": 1},
        ),
        (
            {"models": values["models"], "workerGroups": [*values["workerGroups"], {**embed, "replicas": 0}]},
            {"single": 2, "pair": 4, "front": 4, "embed": 0},
        ),
    ]
    for number, (change, pods) in enumerate(days):
        values = {**values, **change}
        kuberay.reconcile(run("upgrade" if number else "install", values=values)[0])
        run_jobs(server, capsys)
        assert kuberay.pods() == pods
    assert kuberay.clusters == 1


def test_nothing_stays_of_a_release_but_its_models(release):
    server, run = release
    run("install", values=FIRST)
    run("uninstall")
    assert [plural for plural, _ in server.objects] == ["persistentvolumeclaims"]
