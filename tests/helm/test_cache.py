"""Where models lie: disks and claims of the pods, and what is fetched before Ray starts."""

import json

import pytest
import yaml

from tests.helm.rendered import clusters, of_kind, rendered


def test_the_claim_of_the_cache_is_the_one_that_pods_mount(helm4):
    (claim,) = of_kind(rendered("two-models"), "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    (cluster,) = clusters(rendered("two-models"))
    for group in cluster["workerGroupSpecs"]:
        assert cache_of(group)["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}


def cache_of(pod):
    (volume,) = [one for one in pod["template"]["spec"]["volumes"] if one["name"] == "models"]
    return volume


def test_a_head_reads_no_weights_and_is_not_tied_to_the_node_of_a_claim(helm4):
    for kind in ("pvc", "ephemeral", "existingClaim,modelCache.existingClaim=m"):
        (cluster,) = clusters(helm4.template(None, "--set", f"modelCache.type={kind}"))
        assert cache_of(cluster["headGroupSpec"]) == {"name": "models", "emptyDir": {"sizeLimit": "20Gi"}}
        assert "emptyDir" not in cache_of(cluster["workerGroupSpecs"][0])


def test_each_pod_may_have_a_disk_of_its_own(helm4):
    assert of_kind(rendered("one-gpu"), "PersistentVolumeClaim") == []
    (cluster,) = clusters(rendered("one-gpu"))
    spec = cache_of(cluster["workerGroupSpecs"][0])["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert spec == {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "50Gi"}}}


@pytest.mark.parametrize(
    ("given", "modes"),
    [
        ("models[0].replicas=1", ["ReadWriteMany"]),  # an update starts a second pod beside the first
        ("upgrade.type=None", ["ReadWriteOnce"]),
        ("upgrade.type=None,models[0].replicas=2", ["ReadWriteMany"]),
        ("upgrade.type=None,models[0].max_replicas=2,autoscaling.enabled=true", ["ReadWriteMany"]),
        ("modelCache.accessModes[0]=ReadWriteOnce", ["ReadWriteOnce"]),
        ("modelCache.accessModes[0]=ReadWriteMany,upgrade.type=None", ["ReadWriteMany"]),
    ],
)
def test_a_claim_is_for_several_nodes_where_several_pods_mount_it(helm4, given, modes):
    objects = helm4.template(None, "--set", f"modelCache.type=pvc,models[0].model=demo,{given}")
    (claim,) = of_kind(objects, "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == modes


@pytest.mark.parametrize(
    ("given", "made"), [("null", {}), ("shared", {"storageClassName": "shared"}), ("", {"storageClassName": ""})]
)
def test_a_claim_may_name_a_class_or_none_or_leave_it_to_the_cluster(helm4, given, made):
    objects = helm4.template(None, "--set", f"modelCache.type=pvc,modelCache.storageClassName={given}")
    (claim,) = of_kind(objects, "PersistentVolumeClaim")
    assert claim["spec"] == {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "200Gi"}}} | made


def test_a_claim_that_is_there_is_used_and_none_is_made(helm4):
    assert of_kind(rendered("tp4"), "PersistentVolumeClaim") == []
    (cluster,) = clusters(rendered("tp4"))
    assert cache_of(cluster["workerGroupSpecs"][0])["persistentVolumeClaim"] == {"claimName": "models"}
    (batch,) = clusters(rendered("batch"))
    assert "persistentVolumeClaim" in cache_of(batch["headGroupSpec"]), "the batch itself runs there, maybe offline"


def listed(objects, spec):
    """Return what the init container of a worker's pod finds in the file that it reads."""
    (first,) = [one for one in spec["initContainers"] if one["name"] == "fetch-models"]
    *command, flag, path = first["command"]
    assert [*command, flag] == ["python", "-m", "deploy.fetch", "--list"]
    (mount,) = [one for one in first["volumeMounts"] if path.startswith(f"{one['mountPath']}/")]
    (volume,) = [one for one in spec["volumes"] if one["name"] == mount["name"]]
    (held,) = [one for one in of_kind(objects, "ConfigMap") if one["metadata"]["name"] == volume["configMap"]["name"]]
    return json.loads(held["data"][path.removeprefix(f"{mount['mountPath']}/")])


def test_workers_fetch_the_models_of_their_group_into_the_cache_that_ray_reads(helm4):
    (cluster, *_) = clusters(rendered("two-models"))
    fetched = {}
    for group in cluster["workerGroupSpecs"]:
        spec = group["template"]["spec"]
        (first,) = spec["initContainers"]
        fetched[group["groupName"]] = listed(rendered("two-models"), spec)
        (container,) = spec["containers"]
        for key in ("env", "image"):
            assert first[key] == container[key]
        assert first["volumeMounts"][:-1] == container["volumeMounts"]
    assert fetched == {
        "large": {"models": ["Qwen/Qwen3-32B"], "tokenizers": []},
        "small": {"models": ["Qwen/Qwen3-Embedding-0.6B"], "tokenizers": []},
    }
    assert "initContainers" not in cluster["headGroupSpec"]["template"]["spec"]


def test_workers_fetch_a_tokenizer_that_is_not_the_models_own(helm4, tmp_path):
    """Offline, or behind a NetworkPolicy without the hub, a replica could not; routers run in these pods, too."""
    given = tmp_path / "values.yaml"
    names = ["a/tokenizer", "a/tokenizer", "/data/tokenizer", None]
    models = [{"model": f"owner/{i}", "served_model_name": str(i), "tokenizer": one} for i, one in enumerate(names)]
    given.write_text(yaml.safe_dump({"models": models, "apiKeys": {"existingSecret": "keys"}}))
    objects = helm4.template(given)
    (cluster,) = clusters(objects)
    assert listed(objects, cluster["workerGroupSpecs"][0]["template"]["spec"]) == {
        "models": ["owner/0", "owner/1", "owner/2", "owner/3"],
        "tokenizers": ["a/tokenizer", "/data/tokenizer"],
    }


def test_workers_fetch_the_revision_of_a_model_that_is_served(helm4):
    settings = ("models[0].model=org/model", "models[0].revision=v1.2", "apiKeys.existingSecret=keys")
    objects = helm4.template(None, *(word for one in settings for word in ("--set", one)))
    (cluster,) = clusters(objects)
    assert listed(objects, cluster["workerGroupSpecs"][0]["template"]["spec"])["models"] == ["org/model@v1.2"]


def test_workers_of_a_batch_fetch_its_model(helm4):
    for name in ("batch", "everything"):
        objects = rendered(name)
        (job,) = of_kind(objects, "RayJob")
        (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        found = listed(objects, group["template"]["spec"])
        assert found == {"models": ["Qwen/Qwen3-8B"], "tokenizers": []}


def test_pods_of_routers_fetch_no_models(helm4):
    (cluster, *_) = clusters(rendered("multi-node"))
    front = cluster["workerGroupSpecs"][1]
    assert front["groupName"] == "front"
    assert "initContainers" not in front["template"]["spec"]


def test_fetching_can_be_left_to_the_replicas(helm4):
    objects = helm4.template(None, "--set", "modelCache.fetch=false")
    (cluster,) = clusters(objects)
    spec = cluster["workerGroupSpecs"][0]["template"]["spec"]
    assert "initContainers" not in spec
    assert "fetch" not in [volume["name"] for volume in spec["volumes"]]
    assert of_kind(objects, "ConfigMap") == []
