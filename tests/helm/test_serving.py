"""What the chart tells Serve is what `serve deploy` would be told, and its pods have room for it."""

import math
import shlex

import pytest
import yaml

from cluster.app_config import parse_app
from cluster.config import ClusterConfig
from cluster.resources import app_resources, deployment_names, model_resources
from deploy.serve.environment import LOCAL_RAY
from tests.helm.rendered import (
    CHART,
    OPEN,
    VALUES,
    app_of,
    clusters,
    declared,
    of_kind,
    rendered,
    scaled_app_of,
)

SERVING = [name for name in VALUES if name != "batch"]
each_service = pytest.mark.parametrize("name", SERVING)
# Of what `squadron serve` starts Ray with: put every server on loopback, KubeRay's own way to have tokens, and import
# Serve in every worker, which in pods others may use as well, and leave processes the mark by which it ends them.
NOT_IN_PODS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER",
    "RAY_AUTH_MODE",
    "RAY_worker_niceness",
    "RAY_preload_python_modules",
    "SPT_NOENV",
}


def on_gpu(config):
    assert config.device in ("cpu", "cuda"), "Serve must not guess from the nodes that are there"
    return config.device == "cuda"


@each_service
def test_serve_and_the_app_take_the_config(helm4, name):
    config = declared(rendered(name))
    (application,) = config.applications
    assert application.import_path == "cluster.app:build"
    app = scaled_app_of(rendered(name))
    assert config.http_options.host == "0.0.0.0"
    assert config.http_options.port == app.shared.port
    given = yaml.safe_load(VALUES[name].read_text())
    assert [one.model for one in app.models] == [one["model"] for one in given["models"]]
    for config, one in zip(app.models, given["models"], strict=True):
        assert config.tensor_parallel_size == one.get("tensor_parallel_size", 1)
        assert config.replicas == one.get("replicas", max(1, one.get("min_replicas", 1)))
        assert config.max_replicas == one.get("max_replicas")
        assert config.scales_to_zero == (one.get("min_replicas") == 0)
    assert app.shared.routers == given.get("app", {}).get("routers", 1)
    assert {one.name for one in application.deployments} <= {*deployment_names(app), "Router", "Batches"}


def test_large_and_broken_numbers_arrive_as_they_were_given(helm4):
    app = app_of(rendered("everything"))
    assert app.shared.max_file_bytes == 209715200
    assert app.shared.drain_timeout == 120.5
    assert app.models[0].kv_cache_memory_bytes == 4294967296
    assert app.models[1].tokenizer is None


def test_lengths_may_be_written_as_on_the_command_line(helm4):
    given = (
        "models[0].model=demo,models[0].max_model_len=32k,models[0].kv_cache_memory_bytes=4G,app.max_body_bytes=8M"
    )
    app = app_of(helm4.template(None, "--set", given))
    (model,) = app.models
    assert (model.max_model_len, model.kv_cache_memory_bytes, app.shared.max_body_bytes) == (32_000, 2**32, 2**23)


OUTSIDE = "ingress.enabled=true,ingress.host=llm.example.com,gateway.enabled=true,gateway.parentRefs[0].name=public"
OPEN_CLUSTER = "llm-squadron-serve-svc.serving"


@pytest.mark.parametrize(
    ("given", "hosts"),
    [
        ("apiKeys.allowOpen=true", (OPEN_CLUSTER,)),
        (
            f"apiKeys.allowOpen=true,{OUTSIDE},gateway.hostnames[0]=*.example.org",
            (OPEN_CLUSTER, "llm.example.com", "*.example.org"),
        ),
        (
            "apiKeys.allowOpen=true,app.allowed_hosts[0]=a.example,app.allowed_hosts[1]=b.example",
            ("a.example", "b.example", OPEN_CLUSTER),
        ),
        (r"apiKeys.allowOpen=true,app.allowed_hosts=a.example\,b.example", ("a.example", "b.example", OPEN_CLUSTER)),
        (r'apiKeys.allowOpen=true,app.allowed_hosts=["*"]', ("*", OPEN_CLUSTER)),
        ("apiKeys.allowOpen=true,app.allowed_hosts=null", (OPEN_CLUSTER,)),
        (f"apiKeys.existingSecret=keys,{OUTSIDE}", None),
        (
            f"apiKeys.existingSecret=keys,{OUTSIDE},app.allowed_hosts[0]=a.example",
            ("a.example", OPEN_CLUSTER, "llm.example.com"),
        ),
    ],
)
def test_clients_may_use_the_names_that_the_chart_gives_the_endpoint(helm4, given, hosts):
    """Names of this cluster's other forms are known to be its own (`Sites`); with keys no name is looked at."""
    assert app_of(helm4.template(None, "--set", f"apiKeys.allowOpen=false,{given}")).shared.allowed_hosts == hosts


@each_service
def test_pods_have_room_for_all_replicas_and_routers(helm4, name):
    (cluster, *_) = [one["spec"]["rayClusterConfig"] for one in of_kind(rendered(name), "RayService")]
    groups = cluster["workerGroupSpecs"]
    app = scaled_app_of(rendered(name))
    placement = app_resources(app, on_gpu)
    for kind, param in (("CPU", "num-cpus"), ("GPU", "num-gpus")):
        offered = sum(one["maxReplicas"] * one["numOfHosts"] * int(one["rayStartParams"][param]) for one in groups)
        needed = placement.cpus if kind == "CPU" else placement.gpus
        assert offered >= needed


@each_service
def test_each_replica_fits_its_pods(helm4, name):
    (cluster, *_) = [one["spec"]["rayClusterConfig"] for one in of_kind(rendered(name), "RayService")]
    given = yaml.safe_load(VALUES[name].read_text())
    groups = {one["groupName"]: one for one in cluster["workerGroupSpecs"]}
    for config, one in zip(app_of(rendered(name)).models, given["models"], strict=True):
        group = groups[one.get("workerGroup", given["workerGroups"][0]["name"])]
        bundles = model_resources(config, on_gpu(config)).bundles
        per_pod = math.ceil(len(bundles) / group["numOfHosts"])
        assert per_pod * group["numOfHosts"] == len(bundles)
        assert per_pod * bundles[0]["CPU"] <= int(group["rayStartParams"]["num-cpus"])
        assert per_pod * bundles[0].get("GPU", 0) <= int(group["rayStartParams"]["num-gpus"])


@each_service
def test_pods_ask_kubernetes_for_what_ray_is_told_of(helm4, name):
    for cluster in clusters(rendered(name)):
        for group in cluster["workerGroupSpecs"]:
            container = group["template"]["spec"]["containers"][0]
            gpus = int(group["rayStartParams"]["num-gpus"])
            assert container["resources"]["limits"].get("nvidia.com/gpu", 0) == gpus
            assert container["resources"]["requests"].get("nvidia.com/gpu", 0) == gpus
        assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_several_pods_make_one_replica_where_it_is_larger(helm4):
    (cluster,) = clusters(rendered("multi-node"))
    group = cluster["workerGroupSpecs"][0]
    assert (group["replicas"], group["numOfHosts"], group["rayStartParams"]["num-gpus"]) == (2, 2, "8")


def test_pods_come_and_go_between_the_bounds_of_the_models(helm4):
    (cluster,) = clusters(rendered("two-models"))
    assert cluster["enableInTreeAutoscaling"]
    bounds = {
        one["groupName"]: [one[f"{bound}eplicas"] for bound in ("minR", "r", "maxR")]
        for one in cluster["workerGroupSpecs"]
    }
    assert bounds == {"large": [1, 1, 4], "small": [0, 1, 4]}


def test_without_autoscaling_no_pods_are_rented_for_the_most_replicas_unless_they_are_asked_for(helm):
    more = ["--set", "models[0].model=demo,models[0].max_replicas=3"]
    refused = helm.run("template", "llm", str(CHART), *OPEN, *more)
    assert refused.returncode != 0
    said = "models[0].max_replicas: pods neither come nor go without autoscaling.enabled=true; set that, or "
    assert f"{said}workerGroups[0].replicas=3 for pods that are always there" in refused.stderr
    for way, pods in (("autoscaling.enabled=true", [1, 1, 3]), ("workerGroups[0].replicas=3", [3, 3, 3])):
        (cluster,) = clusters(helm.template(None, *more, "--set", way))
        (group,) = cluster["workerGroupSpecs"]
        assert [group[name] for name in ("minReplicas", "replicas", "maxReplicas")] == pods


def test_ray_is_started_with_what_squadron_serve_starts_it_with(helm4):
    expected = {name: value for name, value in LOCAL_RAY.items() if name not in NOT_IN_PODS}
    for cluster in clusters(rendered("everything")):
        assert cluster["authOptions"] == {"mode": "token", "secretName": "ray-token"}
        pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        for pod in pods:
            env = {one["name"]: one.get("value") for one in pod["template"]["spec"]["containers"][0]["env"]}
            assert expected.items() <= env.items()
            assert env["NCCL_DEBUG"] == "WARN"


def test_a_pod_is_drained_within_the_time_that_it_has_to_terminate(helm4):
    for grace, before, drained in ((630, 5, 615), (300, 0, 290), (16, 5, 1)):
        given = f"terminationGracePeriodSeconds={grace},preStopSeconds={before},app.drain_timeout={drained}"
        (cluster,) = clusters(helm4.template(None, "--set", given))
        (worker,) = cluster["workerGroupSpecs"]
        for pod, seconds, drain in ((worker, grace, drained), (cluster["headGroupSpec"], min(grace, 60), 0)):
            spec = pod["template"]["spec"]
            env = {one["name"]: one.get("value") for one in spec["containers"][0]["env"]}
            assert spec["terminationGracePeriodSeconds"] == seconds
            assert env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == str(drain), "a head has nothing to hand over"
        (container,) = worker["template"]["spec"]["containers"]
        waits = {"preStop": {"exec": {"command": ["sleep", str(before)]}}} if before else None
        assert container.get("lifecycle") == waits


def test_by_default_streams_have_the_time_that_the_app_gives_them(helm4):
    (cluster,) = clusters(helm4.template())
    (worker,) = cluster["workerGroupSpecs"]
    assert worker["template"]["spec"]["terminationGracePeriodSeconds"] > ClusterConfig("demo").drain_timeout


def test_the_batch_runs_its_model_with_its_settings(helm4):
    (files,) = of_kind(rendered("batch"), "ConfigMap")
    app = parse_app(yaml.safe_load(files["data"]["settings.yaml"]))
    assert (app.shared.model, app.shared.replicas, app.shared.device) == ("Qwen/Qwen3-8B", 4, "cuda")
    (job,) = of_kind(rendered("batch"), "RayJob")
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert group["replicas"] == 4
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert job["spec"]["entrypoint"] == "sh /etc/squadron/batch/run.sh"
    assert {"name": "batch", "mountPath": "/etc/squadron/batch", "readOnly": True} in head["containers"][0][
        "volumeMounts"
    ]
    assert {"name": "batch", "configMap": {"name": files["metadata"]["name"]}} in head["volumes"]


def test_a_shell_reads_the_words_of_the_batch_as_they_were_given(helm4):
    (files,) = of_kind(rendered("batch"), "ConfigMap")
    command = files["data"]["run.sh"].partition("\n")[2].replace("\\\n", " ")
    given = yaml.safe_load(VALUES["batch"].read_text())["batch"]
    words = ["exec", "squadron", "batch", *given["inputs"], given["output"]]
    assert shlex.split(command) == [
        *words,
        "--config",
        "/etc/squadron/batch/settings.yaml",
        "--resume",
        *given["args"],
    ]


def test_a_batch_that_may_take_longer_is_the_same_job(helm4):
    given = "batch.backoffLimit=9,batch.ttlSecondsAfterFinished=9,batch.activeDeadlineSeconds=9"
    changed = helm4.template(VALUES["batch"], "--set", given)
    (before,), (after,) = of_kind(rendered("batch"), "RayJob"), of_kind(changed, "RayJob")
    assert before["metadata"]["name"] == after["metadata"]["name"]


def test_a_changed_batch_is_another_job(helm4):
    changed = helm4.template(VALUES["batch"], "--set", "batch.output=/data/other.jsonl")
    names = [of_kind(objects, "RayJob")[0]["metadata"]["name"] for objects in (rendered("batch"), changed)]
    assert len(set(names)) == 2
    assert all(len(name) <= 47 for name in names)
