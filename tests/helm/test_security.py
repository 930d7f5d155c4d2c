"""Pods keep to the restricted Pod Security standard, and talk to nobody but those that they need."""

import pytest

from tests.helm.rendered import RELEASE, VALUES, clusters, of_kind, pod_templates, rendered

each_example = pytest.mark.parametrize("name", VALUES)
TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount"
VOLUMES = {"configMap", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
WRITTEN = {"/tmp", "/var/lib/squadron", "/dev/shm", "/var/cache/squadron"}
OWN = {"app.kubernetes.io/instance": RELEASE, "app.kubernetes.io/part-of": "squadron"}


def test_the_cluster_may_choose_the_users(helm4):
    """As OpenShift does; Helm hands null on as nothing."""
    given = "security.runAsUser=null,security.runAsGroup=null,security.fsGroup=null"
    objects = helm4.template(VALUES["everything"], "--set", given)
    for template in pod_templates(objects):
        security = template["spec"]["securityContext"]
        assert security["runAsNonRoot"] is True
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & security.keys()


def test_a_user_whom_the_image_does_not_know_has_a_name(helm4):
    for _, container in containers("tp4"):
        assert {"name": "USER", "value": "squadron"} in container["env"]


def assert_restricted(security, more=()):
    assert security["allowPrivilegeEscalation"] is False
    assert security["readOnlyRootFilesystem"] is True
    assert security["runAsNonRoot"] is True
    assert security["capabilities"] == {"drop": ["ALL"]} | ({"add": [*more]} if more else {})
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not security.get("privileged")


def containers(name):
    for template in pod_templates(rendered(name)):
        spec = template["spec"]
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            yield spec, container


@each_example
def test_pods_are_restricted(helm4, name):
    """Source: kubernetes.io, Pod Security Standards, restricted; and what it leaves open."""
    for pod, container in containers(name):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        for volume in pod["volumes"]:
            assert set(volume) - {"name"} < VOLUMES
        asked_for = name == "everything" and container["name"] == "ray-worker" and pod.get("schedulerName")
        assert_restricted(container["securityContext"], ["IPC_LOCK"] if asked_for else ())
        assert "hostPort" not in str(container.get("ports"))
        assert container["resources"]["limits"]["memory"]
        assert container["resources"]["requests"]["cpu"]


@each_example
def test_a_read_only_root_leaves_ray_and_the_models_somewhere_to_write(helm4, name):
    for cluster in clusters(rendered(name)):
        for pod in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
            spec = pod["template"]["spec"]
            volumes = {volume["name"]: volume for volume in spec["volumes"]}
            mounts = {mount["mountPath"]: mount for mount in spec["containers"][0]["volumeMounts"]}
            assert mounts.keys() >= WRITTEN
            for path in WRITTEN:
                assert not mounts[path].get("readOnly")
                assert {"emptyDir", "ephemeral", "persistentVolumeClaim"} & volumes[mounts[path]["name"]].keys()
            assert volumes["shared-memory"]["emptyDir"]["medium"] == "Memory"
            env = {one["name"]: one.get("value") for one in spec["containers"][0]["env"]}
            assert env["HOME"] in WRITTEN
            assert env["HF_HOME"] in WRITTEN


@each_example
def test_every_volume_on_a_nodes_disk_has_a_bound_and_every_container_a_share(helm4, name):
    """So that a quota of a namespace lets the pods in, and a log that grows evicts its own pod alone."""
    for template in pod_templates(rendered(name)):
        spec = template["spec"]
        on_disk = [volume for volume in spec["volumes"] if "emptyDir" in volume]
        assert all(volume["emptyDir"].get("sizeLimit") for volume in on_disk)
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            for share in ("requests", "limits"):
                assert container["resources"][share]["ephemeral-storage"], container["name"]
    for cluster in clusters(rendered(name)):
        if cluster["enableInTreeAutoscaling"]:
            assert "ephemeral-storage" in cluster["autoscalerOptions"]["resources"]["limits"]


@pytest.mark.parametrize(
    ("given", "limit", "of_head"),
    [
        ("disk.tmp=1Gi,disk.home=512Mi,modelCache.size=10Gi", "13Gi", "13Gi"),
        ("disk.tmp=1500M,disk.home=1Gi,modelCache.type=pvc", "4Gi", "5Gi"),
        ("disk.tmp=1500M,disk.home=1Gi,modelCache.type=ephemeral", "4Gi", "5Gi"),
        ("disk.tmp=2Ti,disk.home=1Gi,modelCache.type=existingClaim,modelCache.existingClaim=m", "2050Gi", "2051Gi"),
    ],
)
def test_a_pod_may_write_what_its_volumes_may_hold(helm4, given, limit, of_head):
    (cluster,) = clusters(helm4.template(None, "--set", f"{given},disk.request=3Gi"))
    for pod, most in zip((cluster["headGroupSpec"], *cluster["workerGroupSpecs"]), (of_head, limit), strict=True):
        (container,) = pod["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["ephemeral-storage"] == most
        assert container["resources"]["requests"]["ephemeral-storage"] == "3Gi"


@each_example
def test_only_the_autoscaler_and_the_job_that_scales_see_a_service_account_token(helm4, name):
    for pod, container in containers(name):
        assert pod["automountServiceAccountToken"] is False
        mounted = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
        assert (TOKEN in mounted) == (container["name"] == "scale")
    for cluster in clusters(rendered(name)):
        volumes = [volume["name"] for volume in cluster["headGroupSpec"]["template"]["spec"]["volumes"]]
        mounts = cluster.get("autoscalerOptions", {}).get("volumeMounts", [])
        assert (TOKEN in [mount["mountPath"] for mount in mounts]) == cluster["enableInTreeAutoscaling"]
        assert {mount["name"] for mount in mounts} <= set(volumes)
        if cluster["enableInTreeAutoscaling"]:
            assert_restricted(cluster["autoscalerOptions"]["securityContext"])


@each_example
def test_secrets_are_named_and_never_held(helm4, name):
    for one in rendered(name):
        assert one["kind"] != "Secret"
    for _, container in containers(name):
        for variable in container.get("env", []):
            if variable["name"] == "HF_TOKEN":
                assert variable["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}


def policy_of(objects, whose=""):
    """The policy of all pods, or of those that `whose` says."""
    policies = of_kind(objects, "NetworkPolicy")
    others = ("-head", "-scale")
    (found,) = [
        one
        for one in policies
        if (one["metadata"]["name"].endswith(whose) if whose else not one["metadata"]["name"].endswith(others))
    ]
    return found


@each_example
def test_a_policy_covers_every_pod_both_ways(helm4, name):
    policy = policy_of(rendered(name))
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert policy["spec"]["podSelector"]["matchLabels"] == OWN
    for template in pod_templates(rendered(name)):
        assert OWN.items() <= template["metadata"]["labels"].items()


def ports(rule):
    return [(port["protocol"], port["port"], port.get("endPort")) for port in rule["ports"]]


def test_strangers_reach_the_endpoint_alone_and_the_operator_ray_too(helm4):
    policy = policy_of(rendered("tp4"))
    among, clients, operator, monitoring = policy["spec"]["ingress"]
    assert among["from"] == [{"podSelector": {"matchLabels": OWN}}]
    assert ports(among) == [("TCP", 1024, 65535)]
    assert ports(clients) == [("TCP", 8000, None)]
    assert clients["from"][0]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "ingress-nginx"}
    assert ports(operator) == [("TCP", 8265, None), ("TCP", 8000, None)]
    assert ports(monitoring) == [("TCP", 8080, None)]


def test_pods_reach_each_other_names_and_the_hub_alone(helm4):
    policy = policy_of(rendered("tp4"))
    assert [ports(rule) for rule in policy["spec"]["egress"]] == [
        [("TCP", 1024, 65535)],
        [("UDP", 53, None), ("TCP", 53, None), ("UDP", 5353, None), ("TCP", 5353, None)],
        [("TCP", 443, None)],
    ]
    assert policy["spec"]["egress"][0]["to"] == [{"podSelector": {"matchLabels": OWN}}]


@pytest.mark.parametrize(
    ("endpoint", "reached"),
    [
        ("http://otel-collector.monitoring:4318", 4318),
        ("http://collector/v1/traces", 80),
        ("https://collector.example/v1/traces", 443),
        ("file:///tmp/traces.jsonl", None),
    ],
)
def test_collector_of_traces_is_reached_where_there_is_one(helm4, endpoint, reached):
    chosen = ("--set", "networkPolicy.hub=false", "--set", f"app.otlp_traces_endpoint={endpoint}")
    policy = policy_of(helm4.template(None, *chosen))
    further = [port["port"] for rule in policy["spec"]["egress"][2:] for port in rule["ports"]]
    assert further == ([] if reached is None else [reached])


def test_the_job_that_scales_reaches_kubernetes_and_may_change_nothing_but_clusters(helm4):
    objects = rendered("tp4")
    policy = policy_of(objects, "-scale")
    assert {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]} == {443, 6443}
    (job,) = of_kind(objects, "Job")
    pod = job["spec"]["template"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (role,) = of_kind(objects, "Role")
    assert role["rules"] == [
        {"apiGroups": ["ray.io"], "resources": ["rayservices"], "resourceNames": ["llm-squadron"], "verbs": ["get"]},
        {"apiGroups": ["ray.io"], "resources": ["rayclusters"], "verbs": ["get", "patch"]},
    ]
    (binding,) = of_kind(objects, "RoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (subject,) = binding["subjects"]
    assert subject["name"] == pod["spec"]["serviceAccountName"]
    without = helm4.template(VALUES["tp4"], "--set", "upgrade.scalePods=false")
    assert not {"Job", "Role", "RoleBinding", "ServiceAccount"} & {one["kind"] for one in without}


def test_without_hub_and_autoscaler_nothing_outside_is_reached(helm4):
    objects = helm4.template(None, "--set", "networkPolicy.hub=false")
    policy = policy_of(objects)
    assert [443 in [port["port"] for port in rule["ports"]] for rule in policy["spec"]["egress"]] == [False, False]


def test_the_head_alone_reaches_kubernetes_and_redis(helm4):
    objects = rendered("everything")
    everybody, head = (
        {port["port"] for rule in policy_of(objects, whose)["spec"]["egress"] for port in rule["ports"]}
        for whose in ("", "-head")
    )
    assert head == {443, 6443, 6380}
    assert not {6443, 6380} & everybody
    assert 9000 in everybody, "as networkPolicy.egress says"
    chosen = policy_of(objects, "-head")["spec"]["podSelector"]
    assert chosen["matchLabels"] == OWN
    heads = [cluster["headGroupSpec"]["template"]["metadata"]["labels"] for cluster in clusters(objects)]
    (condition,) = chosen["matchExpressions"]
    assert [labels[condition["key"]] for labels in heads] == condition["values"]


@pytest.mark.parametrize(
    ("address", "port"),
    [("redis:6400", 6400), ("rediss://redis.cache.svc:6380", 6380), ("redis:6400,other:6401", 6401)],
)
def test_the_port_of_redis_is_that_of_its_address(helm4, address, port):
    given = f"faultTolerance.enabled=true,faultTolerance.redisAddress={address}".replace(":6400,", ":6400\\,")
    policy = policy_of(helm4.template(None, "--set", given), "-head")
    assert ("TCP", port, None) in [one for rule in policy["spec"]["egress"] for one in ports(rule)]


def test_the_submitter_of_a_batch_has_no_secrets(helm4):
    (job,) = of_kind(rendered("everything"), "RayJob")
    (container,) = job["spec"]["submitterPodTemplate"]["spec"]["containers"]
    assert [variable["name"] for variable in container["env"]] == ["HOME"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {"tmp", "home"}
