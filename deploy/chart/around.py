"""The values about what is around the pods: who gets in, what survives, what comes and goes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from deploy.chart.pods import (
    Anything,
    Count,
    Cpu,
    Labels,
    NotNegative,
    OptionalName,
    Part,
    Percent,
    Port,
    Quantity,
    Texts,
    named_as,
)
from deploy.observability.alerts import TTFT_SECONDS


class ApiKeys(Part):
    """API keys of the endpoint."""

    existingSecret: OptionalName = Field(
        default="",
        description="Secret with the key file of `squadron keys new`; required, unless allowOpen.",
    )
    allowOpen: bool = Field(
        default=False, description="Allow an endpoint without keys, open to everyone who reaches it."
    )
    fileKey: str = Field(default="keys.yaml", min_length=1, description="Key of that file in the secret.")
    probeKey: str = Field(
        default="probe-key",
        min_length=1,
        description="Key of one API key in the secret, in plain text, for probes of /ready.",
    )


class RayToken(Part):
    """The token that Ray's ports require."""

    enabled: bool = Field(default=True, description="Require a token on Ray's ports.")
    existingSecret: OptionalName = Field(
        default="", description="Secret with the token under auth_token; empty = KubeRay makes one."
    )


class FaultTolerance(Part):
    """Ray's state in Redis, which survives the head."""

    enabled: bool = Field(
        default=False,
        description="Keep Ray's control store in Redis, so that a new head takes over the cluster.",
    )
    redisAddress: str = Field(
        default="",
        pattern=r"^((rediss?://)?[^/:]+:[0-9]{1,5}(,[^/:]+:[0-9]{1,5})*)?$",
        description="Address of Redis, such as redis:6379 or rediss://redis:6380.",
    )
    redisPort: Port | None = Field(
        default=None, description="Redis port that the NetworkPolicy allows; empty = that of the address."
    )
    existingSecret: OptionalName = Field(default="", description="Secret with the password of Redis.")
    passwordKey: str = Field(default="password", min_length=1, description="Key of the password in the secret.")
    usernameKey: str = Field(default="", description="Key of the user name in the secret; empty = none.")


class Autoscaling(Part):
    """Pods that come and go with the replicas of models (`max_replicas`)."""

    enabled: bool = Field(
        default=False, description="Let Ray's autoscaler add and remove pods; max_replicas of models needs it."
    )
    idleTimeoutSeconds: NotNegative = Field(default=300, description="Seconds after which an idle pod is removed.")
    upscalingMode: Literal["Default", "Aggressive", "Conservative"] = Field(
        default="Default", description="How fast pods are added."
    )
    cpu: Cpu = Field(default="500m", description="CPUs of the autoscaler.")
    memory: Quantity = Field(default="1Gi", description="Memory of the autoscaler.")


class Upgrade(Part):
    """What follows a change of the cluster; changes of models, replicas and app are made by Serve in place."""

    type: Literal["NewCluster", "NewClusterWithIncrementalUpgrade", "None"] = Field(
        default="NewCluster",
        description="A new cluster first; the same in steps (needs autoscaling, a Gateway class and "
        "a feature gate of KubeRay); or no change.",
    )
    gatewayClassName: str = Field(default="", description="Gateway class, for upgrades in steps.")
    stepSizePercent: Percent = Field(default=10, description="Share of the traffic that moves per step.")
    intervalSeconds: Count = Field(default=10, description="Seconds between steps.")
    maxSurgePercent: Percent = Field(
        default=100, description="Extra capacity of the new cluster, relative to the old one."
    )
    deletionDelaySeconds: NotNegative = Field(
        default=600, description="Seconds that the old cluster stays, so that its streams can end."
    )
    scalePods: bool = Field(
        default=True,
        description="Let a Job give the running cluster this release's numbers of pods, which KubeRay does not; it "
        "may read the RayService and change RayClusters of the namespace.",
    )


class DisruptionBudget(Part):
    """How many pods may be evicted at a time."""

    enabled: bool = Field(
        default=True,
        description="Create PodDisruptionBudgets: one pod with replicas of each group may be evicted at a time.",
    )
    head: bool = Field(
        default=True, description="Forbid the eviction of the head; with faultTolerance there is no such budget."
    )


# A misspelt selector would let in more than was meant: what it leaves out selects everything.
Peer = Annotated[dict[str, Any], named_as("^(podSelector|namespaceSelector|ipBlock)$", type="object")]


class NetworkPolicy(Part):
    """Allowed connections from and to the pods."""

    enabled: bool = Field(default=True, description="Create a NetworkPolicy that refuses all other connections.")
    clients: list[Peer] = Field(
        default=[{"podSelector": {}}],
        description="Peers that may use the endpoint, such as pods of the namespace. Add an ingress controller.",
    )
    operator: list[Peer] = Field(
        default=[
            {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}}
        ],
        description="Peers that may control Ray: KubeRay's operator.",
    )
    monitoring: list[Peer] = Field(
        default=[], description="Peers that may read metrics, such as Prometheus; required with podMonitor.enabled."
    )
    hub: bool = Field(default=True, description="Let pods reach port 443 anywhere, to fetch models.")
    egress: list[Anything] = Field(default=[], description="More egress rules.")


class Ingress(Part):
    """An Ingress for the endpoint."""

    enabled: bool = Field(default=False, description="Create it.")
    className: str = Field(default="", description="Ingress class.")
    annotations: Texts = Field(
        default={}, description="Annotations; a proxy must not buffer streams or cut long ones."
    )
    host: str = Field(
        default="",
        pattern=r"^((\*\.)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$",
        description="Host name, such as llm.example.com; required.",
    )
    path: str = Field(default="/", pattern="^/", description="Path.")
    tlsSecret: OptionalName = Field(default="", description="Secret of the certificate; empty = no TLS.")


class Gateway(Part):
    """An HTTPRoute to the endpoint; not with upgrades in steps, for which KubeRay makes its own."""

    enabled: bool = Field(default=False, description="Create it.")
    parentRefs: list[Anything] = Field(default=[], description="Parent Gateways.")
    hostnames: list[str] = Field(default=[], description="Host names.")
    requestTimeout: str = Field(
        default="0s", pattern=r"^([0-9]{1,5}(h|m|s|ms)){1,4}$", description="Timeout of a request; 0s = none."
    )
    annotations: Texts = Field(default={}, description="Annotations.")


class PodMonitor(Part):
    """A PodMonitor for the Prometheus operator."""

    enabled: bool = Field(default=False, description="Create it.")
    interval: str = Field(default="15s", pattern=r"^[0-9]+(ms|s|m)$", description="Time between two scrapes.")
    labels: Labels = Field(default={}, description="Labels that Prometheus selects.")


class PrometheusRule(Part):
    """A PrometheusRule for the Prometheus operator, with Squadron's alerts."""

    enabled: bool = Field(default=False, description="Create it, for this release's service.")
    labels: Labels = Field(default={}, description="Labels that Prometheus selects.")
    ttftSeconds: float = Field(
        default=TTFT_SECONDS, gt=0, description="Time to first token (p95, seconds) above which an alert fires."
    )


class Dashboards(Part):
    """Grafana dashboards as ConfigMaps."""

    enabled: bool = Field(default=False, description="Create them; one set is enough for a Grafana.")
    labels: Labels = Field(default={"grafana_dashboard": "1"}, description="Labels that Grafana's sidecar selects.")
    annotations: Texts = Field(default={}, description="Annotations, such as grafana_folder.")


class Batch(Part):
    """A RayJob that answers the rows of files, on its own cluster."""

    enabled: bool = Field(default=False, description="Create it.")
    model: NotNegative = Field(default=0, description="Index of the model in `models`.")
    inputs: list[str] = Field(default=[], description="Files, folders, patterns or URLs; required.")
    output: str = Field(default="", description="File or URL of the answers, visible on all nodes; required.")
    ledger: str = Field(default="", description="Folder of the progress; required if the output is a URL.")
    args: list[str] = Field(default=[], description="More flags of `squadron batch`.")
    backoffLimit: NotNegative = Field(default=3, description="Restarts of a failed job, which resumes.")
    ttlSecondsAfterFinished: NotNegative = Field(
        default=600, description="Seconds that the cluster stays after the job."
    )
    activeDeadlineSeconds: Count | None = Field(
        default=None, description="Time limit of the job in seconds; empty = none."
    )
