"""What stands before and beside the pods: probes, budgets, Ingress, route, monitor, notes."""

import pytest

from deploy.probe import PROBES
from tests.helm.rendered import CHART, OPEN, RELEASE, VALUES, clusters, of_kind, rendered


def probes(name, batch=False):
    (cluster, *_) = clusters(
        tuple(one for one in rendered(name) if one["kind"] == ("RayJob" if batch else "RayService"))
    )
    for pod in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        container = pod["template"]["spec"]["containers"][0]
        yield (
            container["name"],
            {key: container[f"{key}Probe"]["exec"]["command"] for key in ("startup", "liveness", "readiness")},
        )


@pytest.mark.parametrize("name", VALUES)
def test_probes_look_with_the_command_that_the_image_has(helm4, name):
    for _, commands in probes(name, batch=name == "batch"):
        for command in commands.values():
            assert command[:3] == ["python", "-m", "deploy.probe"]
            assert command[-1] == "--seconds=5"
            assert set(command[3:-1]) - {"--port=8000", "--port=9000"} <= PROBES.keys()


def test_a_worker_gets_requests_when_ready_says_so_and_lives_while_ray_does(helm4):
    (_, head), *workers = probes("everything")
    assert all("app" not in command for command in head.values()), "the app is deployed only when the head is ready"
    for _, commands in workers:
        assert commands["readiness"][3:-1] == ["raylet", "app", "--port=9000"]
        assert commands["liveness"][3:-1] == ["raylet"]


def test_workers_of_a_batch_wait_for_no_app(helm4):
    for _, commands in probes("batch", batch=True):
        assert "app" not in commands["readiness"]


def test_keys_lie_where_the_app_and_the_probe_read_them(helm4):
    (cluster,) = clusters(rendered("tp4"))
    spec = cluster["workerGroupSpecs"][0]["template"]["spec"]
    (volume,) = [one["secret"] for one in spec["volumes"] if one["name"] == "keys"]
    assert volume["secretName"] == "llm-keys"
    assert {item["key"]: item["path"] for item in volume["items"]} == {
        "keys.yaml": "keys.yaml",
        "probe-key": "probe-key",
    }
    (mount,) = [one for one in spec["containers"][0]["volumeMounts"] if one["name"] == "keys"]
    assert mount["mountPath"] == "/etc/squadron/keys"


def budgets_of(objects):
    return {one["metadata"]["name"]: one["spec"] for one in of_kind(objects, "PodDisruptionBudget")}


def test_one_replica_of_a_group_may_be_evicted_at_a_time_and_the_head_never(helm4):
    budgets = budgets_of(rendered("multi-node"))
    assert {name: budget["minAvailable"] for name, budget in budgets.items()} == {
        "llm-squadron-h200": 1,  # of four pods: only those two with rank 0 have a proxy of Serve, and become ready
        "llm-squadron-front": 1,
        "llm-squadron-head": 1,
    }
    for budget in budgets.values():
        assert "maxUnavailable" not in budget, "Kubernetes knows no scale of a RayCluster"
    (cluster,) = clusters(rendered("multi-node"))
    chosen = budgets["llm-squadron-h200"]["selector"]["matchLabels"]
    group = cluster["workerGroupSpecs"][0]
    labels = {
        **group["template"]["metadata"]["labels"],
        "ray.io/group": group["groupName"],
    }  # the latter from KubeRay
    assert chosen.items() <= labels.items()


def test_a_spare_pod_which_is_never_ready_holds_up_no_drain(helm4):
    (cluster,) = clusters(rendered("tp4"))
    assert cluster["workerGroupSpecs"][0]["replicas"] == 4
    assert budgets_of(rendered("tp4"))["llm-squadron-h100"]["minAvailable"] == 2, "three pods have replicas"


@pytest.mark.parametrize(
    ("settings", "least"),
    [
        ("replicas=4", 3),
        ("replicas=4,max_replicas=8,min_replicas=2", 1),  # replicas come and go in the eight pods
        ("replicas=1", None),
    ],
)
def test_budgets_count_pods_that_hold_replicas(helm4, settings, least):
    given = ",".join(f"models[0].{one}" for one in ["model=demo", *settings.split(",")])
    given += f",autoscaling.enabled={str('max' in settings).lower()}"
    budgets = budgets_of(helm4.template(None, "--set", given))
    assert budgets.get("llm-squadron-workers", {}).get("minAvailable") == least


def test_a_head_whose_state_is_in_redis_may_be_evicted(helm4):
    assert "everything-head" not in budgets_of(rendered("everything"))


def test_a_group_of_one_pod_has_no_budget_which_would_hold_up_every_drain(helm4):
    names = [one["metadata"]["name"] for one in of_kind(rendered("one-gpu"), "PodDisruptionBudget")]
    assert names == ["llm-squadron-head"]


def test_the_ingress_leads_to_the_service_that_kuberay_makes_with_tls(helm4):
    (service,) = of_kind(rendered("tp4"), "RayService")
    (ingress,) = of_kind(rendered("tp4"), "Ingress")
    assert ingress["spec"]["tls"] == [{"hosts": ["llm.example.com"], "secretName": "llm-tls"}]
    (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"] == {
        "name": f"{service['metadata']['name']}-serve-svc",
        "port": {"name": "serve"},
    }
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert {"name": "serve", "containerPort": 8000} in head["ports"], "KubeRay takes the Service's port from the head"


def test_a_path_is_taken_as_it_is_written(helm4):
    given = {"ingress.enabled": "true", "ingress.host": "a.example.com", "ingress.path": "/v1 #: x"}
    objects = helm4.template(None, "--set", ",".join(f"{name}={value}" for name, value in given.items()))
    (ingress,) = of_kind(objects, "Ingress")
    assert ingress["spec"]["rules"][0]["http"]["paths"][0]["path"] == "/v1 #: x"


def test_a_gateway_class_of_digits_stays_a_text(helm4):
    upgrade = "upgrade.type=NewClusterWithIncrementalUpgrade,autoscaling.enabled=true"
    (service,) = of_kind(
        helm4.template(None, "--set", upgrade, "--set-string", "upgrade.gatewayClassName=12"), "RayService"
    )
    assert service["spec"]["upgradeStrategy"]["clusterUpgradeOptions"]["gatewayClassName"] == "12"


def test_the_route_leads_there_without_a_limit_of_time(helm4):
    (route,) = of_kind(rendered("multi-node"), "HTTPRoute")
    assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert route["spec"]["parentRefs"] == [{"name": "public", "namespace": "gateways"}]
    assert route["spec"]["hostnames"] == ["llm.example.com"]
    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "llm-squadron-serve-svc", "port": 8000}]
    assert rule["timeouts"] == {"request": "0s"}


def test_prometheus_finds_the_metrics_port_of_every_pod(helm4):
    (monitor,) = of_kind(rendered("everything"), "PodMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    chosen = monitor["spec"]["selector"]["matchLabels"]
    for cluster in clusters(rendered("everything")):
        for pod in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
            assert chosen.items() <= pod["template"]["metadata"]["labels"].items()
            assert endpoint["port"] in [port["name"] for port in pod["template"]["spec"]["containers"][0]["ports"]]


def test_long_names_that_begin_alike_stay_apart(helm4):
    names = set()
    for end in ("one", "two"):
        objects = helm4.template(None, "--set", f"nameOverride=a-team-with-a-long-name-in-production-{end}")
        names |= {service["metadata"]["name"] for service in of_kind(objects, "RayService")}
    assert len(names) == 2
    assert all(len(name) <= 34 for name in names)


def test_redis_keeps_the_control_store_under_a_name_of_its_own_for_each_cluster(helm4):
    (service,) = of_kind(rendered("everything"), "RayService")
    options = service["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == "rediss://redis:6380"
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"] == {"name": "redis", "key": "password"}
    assert options["redisUsername"]["valueFrom"]["secretKeyRef"] == {"name": "redis", "key": "username"}
    assert "externalStorageNamespace" not in options, "during an update two clusters would share it"


def test_updates_step_by_step_say_how(helm4):
    (service,) = of_kind(rendered("two-models"), "RayService")
    assert service["spec"]["upgradeStrategy"] == {
        "type": "NewClusterWithIncrementalUpgrade",
        "clusterUpgradeOptions": {
            "gatewayClassName": "istio",
            "stepSizePercent": 10,
            "intervalSeconds": 10,
            "maxSurgePercent": 100,
        },
    }


def test_annotations_are_those_of_service_and_job(helm4):
    for kind in ("RayService", "RayJob"):
        (found,) = of_kind(rendered("everything"), kind)
        assert found["metadata"]["annotations"] == {"ray.io/initializing-timeout": "30m"}


def test_extra_objects_may_be_templates(helm4):
    (extra,) = [
        one for one in of_kind(rendered("everything"), "ConfigMap") if one["metadata"]["name"] == f"{RELEASE}-more"
    ]
    assert extra["data"] == {"name": "everything"}


def test_an_image_is_named_by_its_digest_where_there_is_one(helm4):
    (cluster, *_) = clusters(rendered("everything"))
    image = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["image"]
    assert image.startswith("registry.example.com/squadron@sha256:0123")


def test_secrets_of_the_registry_are_named_alone_or_as_in_a_pod(helm4):
    (cluster, *_) = clusters(rendered("everything"))
    for pod in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        assert pod["template"]["spec"]["imagePullSecrets"] == [{"name": "registry"}, {"name": "mirror"}]


def notes(helm, name):
    """Return what an installation would say. Helm 3 wants a cluster for it."""
    result = helm.run("install", RELEASE, str(CHART), "--dry-run=client", "--values", str(VALUES[name]))
    assert result.returncode == 0, result.stderr
    return result.stdout.partition("NOTES:")[2]


def test_notes_tell_the_next_command(helm4):
    said = notes(helm4, "two-models")
    assert "get rayservice llm-squadron --watch" in said
    assert "get gateway llm-squadron-gateway" in said, "there is no Service that lasts"
    assert "curl http://$ADDRESS/v1/chat/completions" in said
    assert "llm-squadron-serve-svc" not in said
    assert '"model": "qwen"' in said
    assert "Warning: everyone" not in said
    assert "llm-squadron-gateway" in said
    assert "Warning: networkPolicy.clients" in said, "KubeRay's Gateway must get in"


def test_notes_of_a_guarded_service_show_the_key_and_the_address(helm4):
    said = notes(helm4, "tp4")
    assert "Authorization: Bearer $KEY" in said
    assert "with KEY set to a key that `squadron keys new` showed" in said
    assert "port-forward svc/llm-squadron-serve-svc 8000" in said
    assert '"model": "llama-70b"' in said
    assert "https://llm.example.com/v1" in said
    assert "Warning" not in said


def test_notes_of_an_open_service_warn(helm4):
    said = notes(helm4, "laptop")
    assert "Warning: everyone who reaches it can use it (apiKeys.allowOpen)" in said
    assert "Bearer" not in said
    assert "app.allowed_hosts" in said


def test_notes_name_the_hosts_of_a_gateway(helm4):
    assert "From outside, through the Gateway: llm.example.com" in notes(helm4, "multi-node")


def test_notes_tell_where_a_load_balancer_is(helm4):
    said = notes(helm4, "everything")
    assert "From outside: the address of svc/everything-serve-svc, of type LoadBalancer." in said
    assert "From outside: https://llm.example.com/v1" in said


def test_notes_of_a_batch_tell_how_to_follow_it(helm4):
    (job,) = of_kind(rendered("batch"), "RayJob")
    said = notes(helm4, "batch")
    assert f"logs --follow job/{job['metadata']['name']}" in said
    assert "rayservice" not in said


def test_notes_warn_of_an_nginx_that_would_cut_answers(helm4):
    def said(*more):
        given = ["--set", "ingress.enabled=true,ingress.host=a.example.com", *more]
        return helm4.run("install", RELEASE, str(CHART), "--dry-run=client", *OPEN, *given).stdout

    kind = r"ingress.annotations.nginx\.ingress\.kubernetes\.io/proxy-"
    assert 'read-timeout: "3600"' in said("--set", "ingress.className=nginx")
    assert "Warning: unless it is told" not in said("--set", "ingress.className=haproxy")
    whole = f"ingress.className=nginx,{kind}read-timeout=900,{kind}body-size=16m"
    assert "Warning: unless it is told" not in said("--set-string", whole)


def test_notes_warn_where_the_ingress_is_kept_out(helm4):
    result = helm4.run(
        *("install", RELEASE, str(CHART), "--dry-run=client", *OPEN),
        *("--set", "ingress.enabled=true,ingress.host=a.example.com"),
    )
    assert "Warning: networkPolicy.clients" in result.stdout
