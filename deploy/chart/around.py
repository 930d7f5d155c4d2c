"""The values about what is around the pods: who gets in, what survives, what comes and goes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from deploy.alerts.table import TTFT_SECONDS
from deploy.chart.part import Anything, Count, Cpu, NotNegative, OptionalName, Part, Percent, Port, Quantity, Texts


class ApiKeys(Part):
    """Who may use the endpoint."""

    existingSecret: OptionalName = Field(
        default="",
        description="Secret with the file of keys that `squadron keys new` writes; needed, unless allowOpen.",
    )
    allowOpen: bool = Field(
        default=False, description="Whether there may be no keys: then whoever gets through uses the endpoint."
    )
    fileKey: str = Field(default="keys.yaml", min_length=1, description="Key in it of that file.")
    probeKey: str = Field(
        default="probe-key",
        min_length=1,
        description="Key in it of one API key, in plain text, for probes of /ready.",
    )


class RayToken(Part):
    """The token without which Ray answers nobody."""

    enabled: bool = Field(default=True, description="Whether Ray's ports want a token.")
    existingSecret: OptionalName = Field(
        default="", description="Secret with the token under auth_token; empty = KubeRay makes one."
    )


class FaultTolerance(Part):
    """What is left when the head dies."""

    enabled: bool = Field(
        default=False,
        description="Whether Ray's control store lies in Redis, so that a new head takes up the old one's cluster.",
    )
    redisAddress: str = Field(
        default="",
        pattern=r"^((rediss?://)?[^/:]+:[0-9]{1,5}(,[^/:]+:[0-9]{1,5})*)?$",
        description="Address of Redis, such as redis:6379 or rediss://redis:6380.",
    )
    redisPort: Port | None = Field(
        default=None, description="Port that the NetworkPolicy lets pods reach; empty = that of the address."
    )
    existingSecret: OptionalName = Field(default="", description="Secret with the password of Redis.")
    passwordKey: str = Field(default="password", min_length=1, description="Key of the password.")
    usernameKey: str = Field(default="", description="Key of a user's name; empty = none.")


class Autoscaling(Part):
    """Pods that come and go with the replicas of models (`max_replicas`)."""

    enabled: bool = Field(default=False, description="Whether Ray's autoscaler adds and removes pods.")
    idleTimeoutSeconds: NotNegative = Field(default=300, description="Seconds after which an idle pod goes.")
    upscalingMode: Literal["Default", "Aggressive", "Conservative"] = Field(
        default="Default", description="How eagerly pods come."
    )
    cpu: Cpu = Field(default="500m", description="CPUs of the autoscaler.")
    memory: Quantity = Field(default="1Gi", description="Memory of the autoscaler.")


class Upgrade(Part):
    """What follows a change of the cluster; changes of models and app alone are made by Serve in place."""

    type: Literal["NewCluster", "NewClusterWithIncrementalUpgrade", "None"] = Field(
        default="NewCluster",
        description="A whole new cluster first; the same step by step (which needs autoscaling, a Gateway class and "
        "a feature gate of KubeRay); or nothing.",
    )
    gatewayClassName: str = Field(default="", description="Gateway class, for step by step.")
    stepSizePercent: Percent = Field(default=10, description="Share of the traffic that moves in a step.")
    intervalSeconds: Count = Field(default=10, description="Seconds between steps.")
    maxSurgePercent: Percent = Field(
        default=100, description="Share of the capacity that the new cluster may have beyond the old one."
    )
    deletionDelaySeconds: NotNegative = Field(
        default=600, description="Seconds that the old cluster stays, for its streams to end."
    )


class DisruptionBudget(Part):
    """How many pods may be evicted at a time."""

    enabled: bool = Field(
        default=True,
        description="Whether there are PodDisruptionBudgets: of each group all pods with replicas but one stay.",
    )
    head: bool = Field(default=True, description="Whether the head may not be evicted, unless Redis keeps its state.")


class NetworkPolicy(Part):
    """Who may talk to the pods, and with whom they may talk."""

    enabled: bool = Field(default=True, description="Whether all else is refused.")
    clients: list[Anything] = Field(
        default=[{"podSelector": {}}],
        description="Peers that may use the endpoint: pods of the namespace. Add an ingress controller elsewhere.",
    )
    operator: list[Anything] = Field(
        default=[
            {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}}
        ],
        description="Peers that may steer Ray: KubeRay's operator.",
    )
    monitoring: list[Anything] = Field(default=[], description="Peers that may read metrics, such as Prometheus.")
    hub: bool = Field(default=True, description="Whether pods may reach anybody's port 443, to fetch models.")
    egress: list[Anything] = Field(default=[], description="Further rules of egress.")


class Ingress(Part):
    """An Ingress before the endpoint."""

    enabled: bool = Field(default=False, description="Whether there is one.")
    className: str = Field(default="", description="Ingress class.")
    annotations: Texts = Field(
        default={}, description="Annotations; proxies must not buffer streams nor cut long ones."
    )
    host: str = Field(
        default="",
        pattern=r"^((\*\.)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$",
        description="Host name, such as llm.example.com; needed.",
    )
    path: str = Field(default="/", pattern="^/", description="Path.")
    tlsSecret: OptionalName = Field(default="", description="Secret of the certificate; empty = no TLS.")


class Gateway(Part):
    """An HTTPRoute to the endpoint."""

    enabled: bool = Field(default=False, description="Whether there is one.")
    parentRefs: list[Anything] = Field(default=[], description="Gateways that it belongs to.")
    hostnames: list[str] = Field(default=[], description="Host names.")
    requestTimeout: str = Field(
        default="0s", pattern=r"^([0-9]{1,5}(h|m|s|ms)){1,4}$", description="Longest request; 0s = no limit."
    )
    annotations: Texts = Field(default={}, description="Annotations.")


class PodMonitor(Part):
    """A PodMonitor of Prometheus' operator."""

    enabled: bool = Field(default=False, description="Whether there is one.")
    interval: str = Field(default="15s", pattern=r"^[0-9]+(ms|s|m)$", description="Time between two scrapes.")
    labels: Texts = Field(default={}, description="Labels by which Prometheus finds it.")


class PrometheusRule(Part):
    """A PrometheusRule of Prometheus' operator, with Squadron's alerts."""

    enabled: bool = Field(default=False, description="Whether there is one, for the release's own service.")
    labels: Texts = Field(default={}, description="Labels by which Prometheus finds it.")
    ttftSeconds: float = Field(
        default=TTFT_SECONDS, gt=0, description="Time to first token (p95) above which there is an alert."
    )


class Dashboards(Part):
    """Grafana's dashboards, as ConfigMaps."""

    enabled: bool = Field(default=False, description="Whether there are any; one set for a Grafana is enough.")
    labels: Texts = Field(
        default={"grafana_dashboard": "1"}, description="Labels by which Grafana's sidecar finds them."
    )
    annotations: Texts = Field(default={}, description="Annotations, such as grafana_folder.")


class Batch(Part):
    """A RayJob that answers the rows of files, on a cluster of its own."""

    enabled: bool = Field(default=False, description="Whether there is one.")
    model: NotNegative = Field(default=0, description="Which of `models` answers: its place in the list.")
    inputs: list[str] = Field(default=[], description="Files, folders, patterns or URLs; needed.")
    output: str = Field(default="", description="File or URL of the answers, which all nodes see; needed.")
    ledger: str = Field(default="", description="Folder for what is done so far; needed where the output is a URL.")
    args: list[str] = Field(default=[], description="Further flags of `squadron batch`.")
    backoffLimit: NotNegative = Field(
        default=3, description="How often a job that failed is started again; it goes on where it was."
    )
    ttlSecondsAfterFinished: NotNegative = Field(
        default=600, description="Seconds that the cluster stays after its end."
    )
    activeDeadlineSeconds: Count | None = Field(default=None, description="Longest time of a job; empty = none.")
