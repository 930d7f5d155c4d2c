"""The values about pods: what is in them, how large they are, what they read."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from deploy.chart.part import Anything, Count, Cpu, NotNegative, OptionalName, Part, Quantity, Texts


class Image(Part):
    """The image of all pods."""

    repository: str = Field(
        default="squadron", min_length=1, description="Image with Squadron, Python and bash in it."
    )
    tag: str = Field(default="", description="Tag; empty = the chart's appVersion.")
    digest: str = Field(
        default="", pattern=r"^(sha256:[0-9a-f]{64})?$", description="Digest, which wins over the tag."
    )
    pullPolicy: Literal["IfNotPresent", "Always", "Never"] = Field(
        default="IfNotPresent", description="When it is pulled."
    )
    pullSecrets: list[str] = Field(default=[], description="Names of secrets for the registry.")


class Service(Part):
    """The endpoint."""

    enabled: bool = Field(default=True, description="Whether there is a RayService; off for batches alone.")
    port: int = Field(default=8000, ge=1024, le=65535, description="Port of HTTP in the pods and of the Service.")


class Accelerator(Part):
    """What a rank runs on."""

    resource: str = Field(
        default="",
        pattern=r"^([-a-z0-9.]+/[-A-Za-z0-9_.]+)?$",  # Kubernetes takes no such resource without a domain
        description="Resource that a node offers, such as nvidia.com/gpu, of which each rank takes one; empty = CPU.",
    )


class WorkerGroup(Part):
    """Pods of one kind."""

    name: str = Field(
        pattern=r"^[a-z]([-a-z0-9]{0,28}[a-z0-9])?$", description="Name, which `models[].workerGroup` gives."
    )
    accelerator: Accelerator = Field(default=Accelerator(), description="What a rank runs on.")
    ranksPerPod: Count | None = Field(
        default=None,
        description="Ranks that a pod has room for; empty = the largest tensor_parallel_size of its models. "
        "Where a model has more, each of its replicas gets several pods.",
    )
    replicas: NotNegative | None = Field(
        default=None, description="Pods (of a model over several: sets of them); empty = as the models need."
    )
    minReplicas: NotNegative | None = Field(
        default=None, description="Fewest under autoscaling; empty = for min_replicas."
    )
    maxReplicas: Count | None = Field(default=None, description="Most under autoscaling; empty = for max_replicas.")
    cpu: Cpu | None = Field(
        default=None, description="CPUs of a pod; empty = cpus_per_worker of each rank, and room for routers."
    )
    memory: Quantity = Field(default="16Gi", description="Memory of a pod, shared memory included.")
    sharedMemory: Quantity = Field(
        default="4Gi", description="Size of /dev/shm: Ray's objects, messages between ranks, NCCL."
    )
    objectStoreBytes: int = Field(
        default=1_000_000_000,
        ge=80_000_000,
        description="Bytes of /dev/shm for Ray's objects, of which Squadron has few.",
    )
    labels: Texts = Field(default={}, description="Further labels of its pods.")
    annotations: Texts = Field(default={}, description="Annotations of its pods.")
    nodeSelector: Texts = Field(default={}, description="Labels that a node must have.")
    tolerations: list[Anything] = Field(default=[], description="Taints that are put up with.")
    affinity: Anything = Field(default={}, description="Affinity.")
    topologySpreadConstraints: list[Anything] = Field(default=[], description="How pods spread over nodes and zones.")
    priorityClassName: str = Field(default="", description="Priority class.")
    runtimeClassName: str = Field(default="", description="Runtime class, such as nvidia.")


class Head(Part):
    """Ray's head, which runs neither models nor routers."""

    cpu: Cpu = Field(default="1", description="CPUs.")
    memory: Quantity = Field(default="4Gi", description="Memory.")
    sharedMemory: Quantity = Field(default="1Gi", description="Size of /dev/shm.")
    objectStoreBytes: int = Field(default=200_000_000, ge=80_000_000, description="Bytes of it for Ray's objects.")
    labels: Texts = Field(default={}, description="Further labels of its pod.")
    annotations: Texts = Field(default={}, description="Annotations of its pod.")
    nodeSelector: Texts = Field(default={}, description="Labels that a node must have.")
    tolerations: list[Anything] = Field(default=[], description="Taints that are put up with.")
    affinity: Anything = Field(default={}, description="Affinity.")
    priorityClassName: str = Field(default="", description="Priority class.")


class ModelCache(Part):
    """Where models from the hub are kept."""

    type: Literal["none", "pvc", "existingClaim"] = Field(
        default="none",
        description="none = each pod has its own; pvc = a claim of the release; existingClaim = one that is there.",
    )
    fetch: bool = Field(
        default=True, description="Whether worker pods fetch their models and look at them before Ray starts there."
    )
    existingClaim: OptionalName = Field(default="", description="Name of the claim, for type existingClaim.")
    size: Quantity = Field(default="200Gi", description="Size, for type pvc, and most of what type none may hold.")
    storageClassName: str | None = Field(
        default=None,
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$",
        description="Storage class, for type pvc; null = the cluster's default, '' = a volume that is there.",
    )
    accessModes: list[Literal["ReadWriteMany", "ReadWriteOnce"]] = Field(
        default=["ReadWriteMany"],
        min_length=1,
        description="Access modes, for type pvc. Pods on several nodes need ReadWriteMany.",
    )
    keep: bool = Field(default=True, description="Whether the claim outlives `helm uninstall`.")


class Disk(Part):
    """What pods may write to the disk of their node: one that writes more is evicted, and not its neighbours."""

    tmp: Quantity = Field(
        default="50Gi", description="Most of /tmp: Ray's logs, objects that it spills, files of batches on their way."
    )
    home: Quantity = Field(default="20Gi", description="Most of the home: what libraries compile and keep.")
    request: Quantity = Field(
        default="2Gi",
        description="What a pod asks of its node's disk; with modelCache.type none give more than its models take.",
    )


class Hub(Part):
    """The hub that models come from."""

    existingSecret: OptionalName = Field(default="", description="Secret with a token of the hub.")
    tokenKey: str = Field(default="token", min_length=1, description="Key in it.")
    offline: bool = Field(default=False, description="Whether only the cache is looked at.")


class Probes(Part):
    """How it is seen that a pod works."""

    periodSeconds: Count = Field(default=10, description="Seconds between two looks.")
    timeoutSeconds: Count = Field(default=5, description="Seconds that a look may take.")
    livenessFailures: Count = Field(
        default=6, description="Looks in a row that find no Ray before the container is restarted."
    )
    readinessFailures: Count = Field(
        default=2, description="Looks in a row at /ready that fail before a worker gets no requests."
    )
    startupFailures: Count = Field(default=60, description="Looks that Ray may take to start.")


class EnvVar(Part):
    """An environment variable."""

    name: str = Field(min_length=1, description="Name.")
    value: str | None = Field(default=None, description="Value.")
    valueFrom: Anything | None = Field(default=None, description="Where the value is, such as a key of a secret.")


class Security(Part):
    """Users and groups of the processes. They are never root, and write to volumes alone."""

    runAsUser: Count | None = Field(default=1000, description="User; null = the cluster's choice, as on OpenShift.")
    runAsGroup: Count | None = Field(default=1000, description="Group; null = the cluster's choice.")
    fsGroup: Count | None = Field(default=1000, description="Group of the volumes; null = the cluster's choice.")
