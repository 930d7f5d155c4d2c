"""The values about pods: what is in them, how large they are, what they read."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
# As a pattern binds texts alone, numbers pass it too, which is how CPUs are mostly written.
Cpu = Annotated[
    str,
    Field(pattern=r"^[0-9]+(\.[0-9]+)?m?$", json_schema_extra={"type": ["string", "number"], "exclusiveMinimum": 0}),
]
NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
OptionalName = Annotated[str, Field(pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$", max_length=253)]
Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Port = Annotated[int, Field(ge=1, le=65535)]
Percent = Annotated[int, Field(ge=0, le=100)]
Texts = dict[str, str]


def named_as(names: str, **value: Any) -> Any:
    """Return the field of a map whose names match this pattern, and whose values have this schema."""
    return Field(json_schema_extra={"patternProperties": {names: value}, "additionalProperties": False})


LABEL = r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
# Kubernetes takes no resource without a domain but its own. For these a template says where they are set.
OWN = "hugepages-.*|cpu|memory|ephemeral-storage"
Amounts = Annotated[
    dict[str, str],
    named_as(rf"^([-a-z0-9.]+/[-A-Za-z0-9_.]+|{OWN})$", pattern=r"^[0-9]+[A-Za-z]{0,2}$", type=["string", "integer"]),
]
Labels = Annotated[
    dict[str, str],
    named_as(f"^{LABEL}$", pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$", type="string"),
]
Anything = dict[str, Any]  # a piece of a Kubernetes object, which Kubernetes itself checks


class Part(BaseModel):
    """A part of the values. Its fields' descriptions are the comments of values.yaml and the README's table."""

    model_config = ConfigDict(frozen=True, extra="forbid")


PullSecret = Annotated[
    str,
    Field(
        json_schema_extra={
            "type": ["string", "object"],
            "properties": {"name": {"type": "string", "pattern": NAME}},
            "pattern": NAME,  # of the secret, where it is a text
            "required": ["name"],
            "additionalProperties": False,
        }
    ),
]


class Image(Part):
    """The image of all pods."""

    registry: str = Field(
        default="",
        pattern=r"^([-a-z0-9.]+(:[0-9]+)?(/[-a-z0-9._/]+)?)?$",
        description="Registry, such as registry.example.com/team; empty = as the repository says.",
    )
    repository: str = Field(
        default="squadron",
        pattern=r"^[-a-z0-9._]+(:[0-9]+)?(/[-a-z0-9._]+)*$",
        description="Image with Squadron, Python and bash.",
    )
    tag: str = Field(
        default="",
        pattern=r"^([A-Za-z0-9_][-A-Za-z0-9_.]{0,127})?$",
        description="Tag; empty = the chart's appVersion, with -cuda if a worker group has accelerators.",
    )
    digest: str = Field(default="", pattern=r"^(sha256:[0-9a-f]{64})?$", description="Digest; overrides the tag.")
    pullPolicy: Literal["IfNotPresent", "Always", "Never"] = Field(default="IfNotPresent", description="Pull policy.")
    pullSecrets: list[PullSecret] = Field(
        default=[], description="Secrets for the registry, by name: [regcred], or [{name: regcred}] as in a pod."
    )


Cidr = Annotated[str, Field(pattern=r"^[0-9a-f.:]+/[0-9]{1,3}$")]


class ServiceValues(Part):
    """The endpoint."""

    enabled: bool = Field(default=True, description="Create a RayService; off for batches only.")
    port: int = Field(default=8000, ge=1024, le=65535, description="HTTP port of the pods and of the Service.")
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = Field(
        default="ClusterIP", description="Type of the Service that KubeRay makes."
    )
    annotations: Texts = Field(default={}, description="Its annotations, such as those of a cloud's load balancer.")
    loadBalancerClass: str = Field(default="", description="Class of the load balancer, for type LoadBalancer.")
    loadBalancerSourceRanges: list[Cidr] = Field(
        default=[],
        description="Addresses that may use the load balancer, such as 203.0.113.0/24; the NetworkPolicy lets them "
        "in.",
    )
    externalTrafficPolicy: Literal["Local", "Cluster"] = Field(
        default="Local",
        description="For types other than ClusterIP: Local keeps clients' addresses, which the NetworkPolicy needs.",
    )


class RouterPlace(Part):
    """Where routers run; how many there are `app.routers` says."""

    workerGroup: OptionalName = Field(
        default="",
        description="Name of a worker group without accelerators for routers and batch runners alone; empty = beside "
        "the models.",
    )


class Accelerator(Part):
    """Accelerator of a rank."""

    resource: str = Field(
        default="",
        pattern=r"^([-a-z0-9.]+/[-A-Za-z0-9_.]+)?$",  # Kubernetes takes no such resource without a domain
        description="Resource of a node, such as nvidia.com/gpu; each rank takes one; empty = CPU.",
    )
    claim: OptionalName = Field(
        default="",
        description="Name of one of resourceClaims, whose devices the ranks take in place of a resource (DRA).",
    )


class EnvVar(Part):
    """An environment variable."""

    name: str = Field(pattern=r"^[-._A-Za-z][-._A-Za-z0-9]*$", description="Name.")
    value: str | None = Field(default=None, description="Value.")
    valueFrom: Anything | None = Field(default=None, description="Source of the value, such as a key of a secret.")


class WorkerGroup(Part):
    """Pods of one kind."""

    name: str = Field(
        default="",
        pattern=r"^([a-z]([-a-z0-9]{0,28}[a-z0-9])?)?$",
        description="Name, as in `models[].workerGroup`; empty = workers, for the first group.",
    )
    accelerator: Accelerator = Field(default=Accelerator(), description="Accelerator of a rank.")
    ranksPerPod: Count | None = Field(
        default=None,
        description="Ranks per pod; empty = the largest tensor_parallel_size of its models. "
        "A model with more ranks gets several pods for each replica.",
    )
    replicas: NotNegative | None = Field(
        default=None, description="Pods (sets of pods for a model over several); empty = as the models need."
    )
    minReplicas: NotNegative | None = Field(
        default=None, description="Minimum with autoscaling; empty = what min_replicas needs."
    )
    maxReplicas: Count | None = Field(
        default=None, description="Maximum with autoscaling; empty = what max_replicas needs."
    )
    cpu: Cpu | None = Field(
        default=None, description="CPUs of a pod; empty = cpus_per_worker for each rank, and 1 for routers."
    )
    memory: Quantity = Field(default="16Gi", description="Memory of a pod, including shared memory.")
    sharedMemory: Quantity = Field(
        default="4Gi", description="Size of /dev/shm: Ray's objects, messages between ranks, NCCL."
    )
    objectStoreBytes: int = Field(
        default=1_000_000_000,
        ge=80_000_000,
        description="Bytes of /dev/shm for Ray's objects; Squadron needs few.",
    )
    labels: Labels = Field(default={}, description="More labels for the worker pods.")
    annotations: Texts = Field(default={}, description="Annotations of the worker pods.")
    nodeSelector: Labels = Field(default={}, description="Required labels of the node.")
    tolerations: list[Anything] = Field(default=[], description="Tolerations for the worker pods.")
    affinity: Anything = Field(default={}, description="Affinity.")
    topologySpreadConstraints: list[Anything] = Field(
        default=[], description="Spread of the pods over nodes and zones."
    )
    priorityClassName: str = Field(default="", description="Priority class.")
    runtimeClassName: str = Field(default="", description="Runtime class, such as nvidia.")
    schedulerName: str = Field(default="", description="Scheduler of the pods; empty = the cluster's.")
    serviceAccountName: OptionalName = Field(
        default="", description="Service account of the pods; empty = that of all pods."
    )
    resources: Amounts = Field(
        default={},
        description="More resources of a pod, such as rdma/hca: 8 or vpc.amazonaws.com/efa: 32.",
    )
    resourceClaims: list[Anything] = Field(
        default=[], description="Claims of devices (DRA), as in a pod; its containers get all of them."
    )
    capabilities: list[Annotated[str, Field(pattern=r"^[A-Z][A-Z_]*$")]] = Field(
        default=[],
        description="Capabilities beyond none, such as IPC_LOCK; the namespace must allow them (see the README).",
    )
    nccl: Texts = Field(
        default={}, description="NCCL's settings, such as NCCL_SOCKET_IFNAME: eth0 or NCCL_IB_HCA: mlx5."
    )
    env: list[EnvVar] = Field(default=[], description="More environment variables for the Ray containers.")
    volumes: list[Anything] = Field(default=[], description="More volumes of the pods.")
    volumeMounts: list[Anything] = Field(default=[], description="Their mounts in the Ray containers.")
    initContainers: list[Anything] = Field(default=[], description="Containers that run before models are fetched.")
    sidecars: list[Anything] = Field(default=[], description="Containers beside Ray's.")


class RayHead(Part):
    """Ray's head, which runs neither models nor routers."""

    cpu: Cpu = Field(default="1", description="CPUs.")
    memory: Quantity = Field(default="4Gi", description="Memory.")
    sharedMemory: Quantity = Field(default="1Gi", description="Size of /dev/shm.")
    objectStoreBytes: int = Field(
        default=200_000_000, ge=80_000_000, description="Bytes of /dev/shm for Ray's objects."
    )
    labels: Labels = Field(default={}, description="More labels for the head pod.")
    annotations: Texts = Field(default={}, description="Annotations of the head pod.")
    nodeSelector: Labels = Field(default={}, description="Required labels of the node.")
    tolerations: list[Anything] = Field(default=[], description="Tolerations for the head pod.")
    affinity: Anything = Field(default={}, description="Affinity.")
    priorityClassName: str = Field(default="", description="Priority class.")
    schedulerName: str = Field(default="", description="Scheduler of the pod; empty = the cluster's.")


class ModelCache(Part):
    """Cache for models from the hub, which worker pods mount; the head has a small one of its own."""

    type: Literal["none", "ephemeral", "pvc", "existingClaim"] = Field(
        default="none",
        description="none = one cache per pod, on its node's disk; ephemeral = a claim for each pod, gone with it; "
        "pvc = a claim of this release; existingClaim = an existing claim.",
    )
    fetch: bool = Field(
        default=True, description="Fetch and check the models of a worker pod before Ray starts in it."
    )
    existingClaim: OptionalName = Field(default="", description="Name of the claim, for type existingClaim.")
    size: Quantity = Field(default="200Gi", description="Size, for types pvc and ephemeral; limit, for type none.")
    storageClassName: str | None = Field(
        default=None,
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$",
        description="Storage class, for types pvc and ephemeral; null = the cluster's default, '' = an existing "
        "volume.",
    )
    accessModes: list[Literal["ReadWriteMany", "ReadWriteOnce"]] = Field(
        default=[],
        description="Access modes, for type pvc; empty = ReadWriteMany if pods share the claim (several workers, or "
        "two clusters during an update), else ReadWriteOnce. Kubernetes changes them no more.",
    )
    keep: bool = Field(default=True, description="Keep the claim after `helm uninstall`.")


class Disk(Part):
    """Limits for what pods write to their node's disk; a pod that writes more is evicted."""

    tmp: Quantity = Field(
        default="50Gi", description="Limit of /tmp: Ray's logs, spilled objects, batch files in transit."
    )
    home: Quantity = Field(
        default="20Gi", description="Limit of the home folder: compiled code and caches of libraries."
    )
    request: Quantity = Field(
        default="2Gi",
        description="Requested ephemeral storage; with modelCache.type none more than the size of its models.",
    )


class ModelHub(Part):
    """The hub of models."""

    existingSecret: OptionalName = Field(default="", description="Secret with a token for the hub.")
    tokenKey: str = Field(default="token", min_length=1, description="Key of the token in the secret.")
    offline: bool = Field(default=False, description="Use the cache only.")


class Probes(Part):
    """Liveness, readiness and startup probes."""

    periodSeconds: Count = Field(default=10, description="Seconds between two probes.")
    timeoutSeconds: Count = Field(default=5, description="Timeout of a probe in seconds.")
    livenessFailures: Count = Field(default=6, description="Failed probes of Ray before the container restarts.")
    readinessFailures: Count = Field(
        default=2, description="Failed probes of /ready before a worker gets no requests."
    )
    startupFailures: Count = Field(default=60, description="Probes that Ray may take to start.")


class Security(Part):
    """Users and groups of the processes. They are never root and write to volumes only."""

    runAsUser: Count | None = Field(default=1000, description="User; null = chosen by the cluster, as on OpenShift.")
    runAsGroup: Count | None = Field(default=1000, description="Group; null = chosen by the cluster.")
    fsGroup: Count | None = Field(default=1000, description="Group of the volumes; null = chosen by the cluster.")
