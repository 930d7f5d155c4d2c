"""Values that cannot work are refused before anything is applied, by the name of the field."""

import json

import pytest
import yaml

from tests.helm.rendered import CHART, OPEN, RELEASE, app_of, clusters

GPU = {"name": "gpu", "accelerator": {"resource": "nvidia.com/gpu"}}
DEMO = [{"model": "demo"}]
FOUR = [{"model": "demo", "tensor_parallel_size": 4}]
INCREMENTAL = {"type": "NewClusterWithIncrementalUpgrade"}
IN_STEPS = {"upgrade": {**INCREMENTAL, "gatewayClassName": "istio"}, "autoscaling": {"enabled": True}}
# Values, and what the message must say.
BY_SCHEMA = {
    "a misspelt setting": ({"models": [{"model": "demo", "tensor_paralel_size": 2}]}, "tensor_paralel_size"),
    "a length that is no number": ({"models": [{"model": "demo", "max_model_len": "long"}]}, "max_model_len"),
    "a secret for the registry without a name": ({"image": {"pullSecrets": [{"key": "a"}]}}, "pullSecrets"),
    "a word for a number": ({"models": [{"model": "demo", "tensor_parallel_size": "two"}]}, "tensor_parallel_size"),
    "no ranks": ({"models": [{"model": "demo", "tensor_parallel_size": 0}]}, "tensor_parallel_size"),
    "more memory than there is": (
        {"models": [{"model": "demo", "gpu_memory_utilization": 1.5}]},
        "gpu_memory_utilization",
    ),
    "a collector without a scheme": ({"app": {"otlp_traces_endpoint": "otel:4317"}}, "otlp_traces_endpoint"),
    "a collector that speaks gRPC": ({"app": {"otlp_traces_endpoint": "grpc://otel:4317"}}, "otlp_traces_endpoint"),
    "a file of traces by its path": ({"app": {"otlp_traces_endpoint": "/tmp/t.jsonl"}}, "otlp_traces_endpoint"),
    "a resource that no node offers": (
        {"workerGroups": [{"name": "gpu", "accelerator": {"resource": "nvidia"}}]},
        "resource",
    ),
    "an unknown type": ({"models": [{"model": "demo", "dtype": "float8"}]}, "dtype"),
    "an unknown policy": ({"models": [{"model": "demo", "routing_policy": "best"}]}, "routing_policy"),
    "no models": ({"models": []}, "models"),
    "a model without a name": ({"models": [{"replicas": 2}]}, "model"),
    "a setting that is the chart's": ({"app": {"host": "127.0.0.1"}}, "host"),
    "a key in plain text": ({"app": {"api_key": "secret"}}, "api_key"),
    "a model's setting for the app": ({"app": {"max_model_len": 100}}, "max_model_len"),
    "too little to upload": ({"app": {"max_body_bytes": 1}}, "max_body_bytes"),
    "a misspelt value": ({"modles": DEMO}, "modles"),
    "no quantity": ({"head": {"memory": "lots"}}, "memory"),
    "an unknown pull policy": ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
    "a misspelt option of a group": ({"workerGroups": [{"name": "a", "nodeSelektor": {}}]}, "nodeSelektor"),
    "an unknown cache": ({"modelCache": {"type": "s3"}}, "modelCache"),
    "no storage class": ({"modelCache": {"storageClassName": "-"}}, "storageClassName"),
    "an unknown update": ({"upgrade": {"type": "Recreate"}}, "upgrade"),
    "an address for a host name": ({"ingress": {"enabled": True, "host": "https://a.example.com"}}, "host"),
    "Redis without a port": ({"faultTolerance": {"enabled": True, "redisAddress": "redis"}}, "redisAddress"),
    "a number for a text": ({"extraEnv": [{"name": "A", "value": 1}]}, "extraEnv"),
    "a blank model": ({"models": [{"model": " "}]}, "model"),
    "no revision at all": ({"models": [{"model": "demo", "revision": ""}]}, "revision"),
    "overrides that are no object": (
        {"models": [{"model": "demo", "hf_overrides": "a=1"}]},
        "hf_overrides",
    ),
    "no CPUs": ({"workerGroups": [{"cpu": 0}]}, "cpu"),
    "a peer of the network that is misspelt": (
        {"networkPolicy": {"clients": [{"namespaceSelector": {}, "podSelecter": {}}]}},
        "podSelecter",
    ),
    "a label that Kubernetes refuses": ({"labels": {"a b": "c"}}, "a b"),
    "a label's value that it refuses": ({"head": {"nodeSelector": {"pool": "x y"}}}, "nodeSelector"),
    "a resource without a domain": ({"workerGroups": [{"resources": {"rdma": 1}}]}, "rdma"),
    "a capability in small letters": ({"workerGroups": [{"capabilities": ["ipc_lock"]}]}, "capabilities"),
    "an image in capitals": ({"image": {"repository": "Team/Squadron"}}, "repository"),
    "a tag with a blank": ({"image": {"tag": "a b"}}, "tag"),
    "a secret without letters": ({"image": {"pullSecrets": [""]}}, "pullSecrets"),
    "a range without a mask": (
        {"service": {"type": "LoadBalancer", "loadBalancerSourceRanges": ["203.0.113.7"]}},
        "loadBalancerSourceRanges",
    ),
    "a variable with a blank": ({"extraEnv": [{"name": "A B", "value": "1"}]}, "extraEnv"),
}
MANY = [{"model": "demo", "replicas": 2}]
BY_TEMPLATE = {
    "a second group without a name": (
        {"workerGroups": [GPU, {"memory": "1Gi"}]},
        "workerGroups[1].name: is missing, which only the first group may; give one such as workers-1",
    ),
    "no group of that name for routers": (
        {"routers": {"workerGroup": "front"}},
        'routers.workerGroup: there is no worker group "front"; known: workers',
    ),
    "models beside routers that are to be alone": (
        {"routers": {"workerGroup": "workers"}},
        'routers.workerGroup: models[0] runs in "workers"; give routers a group of their own',
    ),
    "GPUs for routers": (
        {"routers": {"workerGroup": "front"}, "workerGroups": [{"name": "a"}, {**GPU, "name": "front"}]},
        "workerGroups[1].accelerator: routers use none",
    ),
    "more routers than there is room for": (
        {"app": {"routers": 9}},
        "app.routers: 9 take 2.25 CPUs with what runs beside them, and pods have 1 to spare; give fewer, or pods of "
        'workerGroups "workers" more with cpu=4',
    ),
    "less time than streams have": (
        {"terminationGracePeriodSeconds": 60},
        "terminationGracePeriodSeconds: 60 ends streams that app.drain_timeout=600 gives more time; with "
        "preStopSeconds and 10 s for Ray give at least 615, or app.drain_timeout=45",
    ),
    "a monitor that may read nothing": ({"podMonitor": {"enabled": True}}, "networkPolicy.monitoring: podMonitor"),
    "a claim for one node and two pods": (
        {"models": MANY, "modelCache": {"type": "pvc", "accessModes": ["ReadWriteOnce"]}},
        "modelCache.accessModes: 2 pods mount the claim, and only those on one node can with ReadWriteOnce; give "
        "[ReadWriteMany], or modelCache.type=ephemeral",
    ),
    "a load balancer that reaches nobody": (
        {"service": {"type": "LoadBalancer"}},
        "service.type: the NetworkPolicy lets in pods of the namespace alone, so nobody gets through from a "
        "LoadBalancer; give service.loadBalancerSourceRanges or networkPolicy.clients",
    ),
    "a node's port that reaches nobody": (
        {"service": {"type": "NodePort"}},
        "from a NodePort; give networkPolicy.clients, such as",
    ),
    "ranges of no load balancer": (
        {"service": {"loadBalancerSourceRanges": ["10.0.0.0/8"]}},
        "service.loadBalancerSourceRanges: a Service of type ClusterIP has no load balancer",
    ),
    "a Service that updates in steps ignore": (
        {**IN_STEPS, "service": {"annotations": {"a": "b"}}},
        "service.type: with upgrade.type=NewClusterWithIncrementalUpgrade",
    ),
    "a route beside that of updates in steps": (
        {**IN_STEPS, "gateway": {"enabled": True, "parentRefs": [{"name": "public"}]}},
        "gateway.enabled: with upgrade.type=NewClusterWithIncrementalUpgrade KubeRay makes a Gateway and a route of "
        "its own, llm-squadron-gateway",
    ),
    "an Ingress beside the Gateway of updates in steps": (
        {**IN_STEPS, "ingress": {"enabled": True, "host": "a.example.com"}},
        "ingress.enabled: with upgrade.type",
    ),
    "CPUs as another resource": (
        {"workerGroups": [{"resources": {"cpu": "4"}}]},
        "workerGroups[0].resources: cpu is asked for already",
    ),
    "GPUs twice": (
        {"workerGroups": [{**GPU, "resources": {"nvidia.com/gpu": 1}}]},
        "workerGroups[0].resources: nvidia.com/gpu is asked for already",
    ),
    "another variable as NCCL's": (
        {"workerGroups": [{"nccl": {"IB_HCA": "mlx5"}}]},
        "workerGroups[0].nccl: IB_HCA is no setting of NCCL, such as NCCL_SOCKET_IFNAME; put it into env",
    ),
    "a claim of devices that is not there": (
        {"workerGroups": [{"accelerator": {"claim": "gpu"}}]},
        'workerGroups[0].accelerator.claim: "gpu" is none of resourceClaims; add one such as {name: gpu, ',
    ),
    "devices of two kinds": (
        {"workerGroups": [{"accelerator": {"claim": "gpu", "resource": "nvidia.com/gpu"}}]},
        "workerGroups[0].accelerator.claim: ranks take nvidia.com/gpu already",
    ),
    "a volume of a group that is the chart's": (
        {"workerGroups": [{"volumes": [{"name": "models", "emptyDir": {}}]}]},
        'workerGroups "workers".volumes[0].name: models is a volume of the chart',
    ),
    "an unknown group": (
        {"models": [{"model": "demo", "workerGroup": "gpus"}]},
        "models[0].workerGroup: there is no worker group",
    ),
    "two groups of one name": ({"workerGroups": [GPU, GPU]}, "workerGroups[1].name"),
    "a group without models": ({"workerGroups": [GPU, {"name": "cpu"}]}, "workerGroups[1].name"),
    "ranks that fill no pods": (
        {"models": FOUR, "workerGroups": [{**GPU, "ranksPerPod": 3}]},
        "models[0].tensor_parallel_size: 4 ranks",
    ),
    "one pod and several in a group": (
        {"models": [*FOUR, {"model": "demo", "served_model_name": "b"}], "workerGroups": [{**GPU, "ranksPerPod": 2}]},
        "models[1].workerGroup",
    ),
    "fewer pods than at the start": (
        {
            "models": [{"model": "demo", "replicas": 3, "max_replicas": 4}],
            "workerGroups": [{**GPU, "maxReplicas": 2}],
            "autoscaling": {"enabled": True},
        },
        "maxReplicas",
    ),
    "an Ingress without a host": ({"ingress": {"enabled": True}}, "ingress.host"),
    "a route without a Gateway": ({"gateway": {"enabled": True}}, "gateway.parentRefs"),
    "a claim without a name": ({"modelCache": {"type": "existingClaim"}}, "modelCache.existingClaim"),
    "no address of Redis": ({"faultTolerance": {"enabled": True}}, "faultTolerance.redisAddress"),
    "steps without autoscaling": ({"upgrade": INCREMENTAL}, "autoscaling.enabled"),
    "steps without a Gateway class": (
        {"upgrade": INCREMENTAL, "autoscaling": {"enabled": True}},
        "upgrade.gatewayClassName",
    ),
    "a batch of nothing": ({"batch": {"enabled": True, "output": "/data/out.jsonl"}}, "batch.inputs"),
    "a batch to nowhere": ({"batch": {"enabled": True, "inputs": ["/data/in.jsonl"]}}, "batch.output"),
    "a batch of a model that is not there": (
        {"batch": {"enabled": True, "inputs": ["a"], "output": "b", "model": 1}},
        "batch.model",
    ),
    "a label by which KubeRay finds its head": (
        {"head": {"labels": {"app.kubernetes.io/name": "llm"}}},
        "head.labels: app.kubernetes.io/name",
    ),
    "a label by which KubeRay finds its workers": (
        {"workerGroups": [{**GPU, "labels": {"app.kubernetes.io/created-by": "us"}}]},
        'workerGroups "gpu".labels: app.kubernetes.io/created-by',
    ),
    "a label by which budgets find workers": (
        {"workerGroups": [{**GPU, "labels": {"app.kubernetes.io/component": "us"}}]},
        'workerGroups "gpu".labels: app.kubernetes.io/component',
    ),
    "a label that every object has": ({"labels": {"app.kubernetes.io/instance": "us"}}, "labels: app.kubernetes.io"),
    "a label that KubeRay writes": ({"head": {"labels": {"ray.io/cluster": "us"}}}, "head.labels: ray.io/cluster"),
    "a name that begins with a number": ({"fullnameOverride": "7b"}, "fullnameOverride"),
    "a name that is too long": ({"fullnameOverride": "a" * 35}, "fullnameOverride: KubeRay leaves room for 34"),
    "two models of one name": (
        {"models": [{"model": "one/llama"}, {"model": "other/llama"}]},
        'models[1].served_model_name: "llama" is the name of models[0]',
    ),
    "another model's alias": (
        {
            "models": [
                {"model": "a", "served_model_name": "first, other"},
                {"model": "b", "served_model_name": ["other"]},
            ]
        },
        'models[1].served_model_name: "other"',
    ),
    "more replicas than the most": (
        {"models": [{"model": "demo", "replicas": 5, "max_replicas": 2}]},
        "models[0].replicas: must lie between 1 and 2",
    ),
    "bounds that cross": (
        {"models": [{"model": "demo", "min_replicas": 3, "max_replicas": 2}]},
        "models[0].min_replicas: 3 is more than max_replicas=2; give at most that",
    ),
    "blocks of no power of two": (
        {"models": [{"model": "demo", "block_size": 100}]},
        "models[0].block_size: must be a power of two such as 16, not 100",
    ),
    "a lower bound alone": ({"models": [{"model": "demo", "min_replicas": 1}]}, "models[0].max_replicas"),
    "replicas below the least": (
        {"models": [{"model": "demo", "replicas": 1, "min_replicas": 2, "max_replicas": 4}]},
        "models[0].replicas: must lie between 2 and 4",
    ),
    "a group that nothing runs in": (
        {"workerGroups": [{"name": "a"}, GPU]},
        'workerGroups[1].name: no model runs in "gpu"; name it in models[].workerGroup or routers.workerGroup, keep '
        "it empty with workerGroups[1].replicas=0, or leave the group out",
    ),
    "an empty group of pods of unknown size": (
        {"workerGroups": [{"name": "a"}, {**GPU, "replicas": 0}]},
        "workerGroups[1].ranksPerPod: is missing, as no model of",
    ),
    "an empty group that may grow": (
        {"workerGroups": [{"name": "a"}, {**GPU, "ranksPerPod": 1, "replicas": 0, "maxReplicas": 4}]},
        'workerGroups[1].maxReplicas: no model runs in "gpu", and replicas=0 keeps it empty; leave maxReplicas out',
    ),
    "GPUs that no pod has": ({"models": [{"model": "demo", "device": "cuda"}]}, "models[0].device: cuda"),
    "objects that do not fit shared memory": (
        {"workerGroups": [{**GPU, "sharedMemory": "512Mi"}]},
        'workerGroups "gpu".objectStoreBytes: 1000000000 are more than sharedMemory=512Mi',
    ),
    "a head's objects that do not fit": (
        {"head": {"sharedMemory": "0.1G"}},
        "head.objectStoreBytes: 200000000 are more than sharedMemory=0.1G holds",
    ),
    "more of a disk than may be written": (
        {"disk": {"request": "400Gi"}},
        "disk.request: 400Gi is more than the 271Gi that a pod may write",
    ),
    "a port that Ray listens on": (
        {"service": {"port": 8080}},
        "service.port: Ray listens on 8080 in the pods; give another, such as 8000",
    ),
    "a port of Ray's workers": ({"service": {"port": 10002}}, "service.port: Ray listens on 10002"),
    "shared memory that is all of it": (
        {"workerGroups": [{**GPU, "memory": "4Gi", "sharedMemory": "8Gi"}]},
        'workerGroups "gpu".sharedMemory: 8Gi is in the pod\'s memory=4Gi and leaves nothing of it',
    ),
    "fewer pods than replicas": (
        {"models": MANY, "workerGroups": [{**GPU, "replicas": 1}]},
        'workerGroups[0].replicas: 1 have no room for all replicas of the models in "gpu", some of which would wait '
        "for ever; give at least 2, or leave it out",
    ),
    "bounds of pods that never come or go": (
        {"workerGroups": [{**GPU, "maxReplicas": 4}]},
        "workerGroups[0].maxReplicas: pods neither come nor go without autoscaling.enabled=true",
    ),
    "bounds of pods that cross": (
        {"autoscaling": {"enabled": True}, "workerGroups": [{**GPU, "minReplicas": 5, "maxReplicas": 2}]},
        "workerGroups[0].minReplicas: 5 is more than maxReplicas=2; give at most that",
    ),
    "experts over one rank": (
        {"models": [{"model": "demo", "enable_expert_parallel": True}]},
        "models[0].enable_expert_parallel: spreads experts over ranks, and there is one",
    ),
    "overrides in broken JSON": (
        {"models": [{"model": "demo", "hf_overrides": "{a}"}]},
        "models[0].hf_overrides: is no JSON",
    ),
    "batches on the disk of the image": (
        {"app": {"batch_dir": "/data/batches"}},
        "app.batch_dir: /data/batches is on no volume, and the disk of the image is read-only; mount one there by "
        "extraVolumes and extraVolumeMounts, or give a URL such as s3://bucket/squadron",
    ),
    "incidents beside a volume": (
        {
            "app": {"record_incidents": "/database"},
            "extraVolumes": [{"name": "data", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "data", "mountPath": "/data"}],
        },
        "app.record_incidents: /database is on no volume",
    ),
    "a mount of no volume": (
        {"extraVolumeMounts": [{"name": "data", "mountPath": "/data"}]},
        'extraVolumeMounts[0].name: there is no volume "data"; add one of that name to extraVolumes',
    ),
    "two mounts at one place": (
        {
            "workerGroups": [
                {"volumes": [{"name": "a", "emptyDir": {}}], "volumeMounts": [{"name": "a", "mountPath": "/tmp"}]}
            ]
        },
        'workerGroups "workers".volumeMounts[0].mountPath: something is mounted at /tmp already',
    ),
    "a volume of the chart's": ({"extraVolumes": [{"name": "tmp", "emptyDir": {}}]}, "extraVolumes[0].name: tmp"),
}
CASES = BY_SCHEMA | BY_TEMPLATE


@pytest.mark.parametrize("case", CASES)
def test_is_refused_by_the_name_of_the_field(helm, case, tmp_path):
    values, said = CASES[case]
    given = tmp_path / "values.yaml"
    given.write_text(yaml.safe_dump(values))
    result = helm.run("template", RELEASE, str(CHART), *OPEN, "--values", str(given))
    assert result.returncode != 0, result.stdout
    assert said in result.stderr


def test_an_endpoint_without_keys_must_be_wanted(helm):
    refused = helm.run("template", RELEASE, str(CHART))
    assert refused.returncode != 0
    for said in ("apiKeys.existingSecret: without keys", "such as llm-keys", "apiKeys.allowOpen=true"):
        assert said in refused.stderr
    for given in ("apiKeys.allowOpen=true", "apiKeys.existingSecret=llm-keys", "service.enabled=false"):
        assert helm.run("template", RELEASE, str(CHART), "--set", given).returncode == 0, given


def test_a_value_of_the_first_group_is_taken_on_the_command_line(helm):
    """Helm replaces the chart's list by one whose item has that value alone, not even a name."""
    (cluster,) = clusters(helm.template(None, "--set", "workerGroups[0].memory=32Gi"))
    (group,) = cluster["workerGroupSpecs"]
    assert group["groupName"] == "workers"
    (container,) = group["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["memory"] == "32Gi"


def test_overrides_may_be_maps_as_in_a_file_of_settings(helm, tmp_path):
    given = tmp_path / "values.yaml"
    given.write_text(
        "models: [{model: demo, hf_overrides: {rope_theta: 5}, override_generation_config: {top_p: 0.5}}]\n"
    )
    (model,) = app_of(helm.template(None, "--values", str(given))).models
    assert json.loads(model.hf_overrides) == {"rope_theta": 5}
    assert json.loads(model.override_generation_config) == {"top_p": 0.5}


def test_a_number_on_the_command_line_is_taken(helm4):
    result = helm4.run("template", RELEASE, str(CHART), *OPEN, "--set", "models[0].model=demo,models[0].replicas=3")
    assert result.returncode == 0, result.stderr
    assert "replicas: 3" in result.stdout
