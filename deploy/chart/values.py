"""The values of the chart but for the settings of models and app: one small class for each thing that is made."""

from __future__ import annotations

from pydantic import Field

from deploy.chart.around import (
    ApiKeys,
    Autoscaling,
    Batch,
    Dashboards,
    DisruptionBudget,
    FaultTolerance,
    Gateway,
    Ingress,
    NetworkPolicy,
    PodMonitor,
    PrometheusRule,
    RayToken,
    Upgrade,
)
from deploy.chart.pods import (
    Anything,
    Disk,
    EnvVar,
    Image,
    Labels,
    ModelCache,
    ModelHub,
    NotNegative,
    OptionalName,
    Part,
    Probes,
    RayHead,
    RouterPlace,
    Security,
    ServiceValues,
    Texts,
    WorkerGroup,
)


class Values(Part):
    """All values but `models` and `app`, which `deploy.chart.schema` describes."""

    nameOverride: OptionalName = Field(default="", description="Replaces the chart's name.")
    fullnameOverride: OptionalName = Field(default="", description="Replaces the name made of release and chart.")
    image: Image = Field(default=Image(), description="The image of all pods.")
    rayVersion: str = Field(
        default="2.60.0", pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$", description="Version of Ray in the image."
    )
    service: ServiceValues = Field(default=ServiceValues(), description="The endpoint.")
    workerGroups: list[WorkerGroup] = Field(
        default=[WorkerGroup(name="workers")],
        min_length=1,
        description="Groups of worker pods; models without workerGroup run in the first.",
    )
    routers: RouterPlace = Field(
        default=RouterPlace(), description="Where routers run; how many there are app.routers says."
    )
    head: RayHead = Field(default=RayHead(), description="Ray's head, which runs neither models nor routers.")
    modelCache: ModelCache = Field(default=ModelCache(), description="Cache for models from the hub.")
    disk: Disk = Field(default=Disk(), description="Limits for what pods write to their node's disk (emptyDirs).")
    hub: ModelHub = Field(default=ModelHub(), description="The hub of models.")
    apiKeys: ApiKeys = Field(default=ApiKeys(), description="API keys of the endpoint.")
    rayToken: RayToken = Field(default=RayToken(), description="The token that Ray's ports require.")
    faultTolerance: FaultTolerance = Field(
        default=FaultTolerance(), description="Ray's state in Redis, which survives the head."
    )
    autoscaling: Autoscaling = Field(
        default=Autoscaling(), description="Pods that start and stop with the replicas of models."
    )
    upgrade: Upgrade = Field(
        default=Upgrade(),
        description="How KubeRay changes the cluster. What changes it is listed in the README; models, routers, "
        "replicas and app do not.",
    )
    probes: Probes = Field(default=Probes(), description="Liveness, readiness and startup probes.")
    podDisruptionBudget: DisruptionBudget = Field(
        default=DisruptionBudget(), description="How many pods may be evicted at a time."
    )
    networkPolicy: NetworkPolicy = Field(
        default=NetworkPolicy(), description="Allowed connections from and to the pods."
    )
    security: Security = Field(
        default=Security(),
        description="Users and groups of the processes; never root, read-only root file system.",
    )
    serviceAccountName: OptionalName = Field(
        default="", description="Service account of all pods; its token is not mounted."
    )
    terminationGracePeriodSeconds: NotNegative = Field(
        default=630,
        description="Most seconds that a worker pod may take to terminate: at least app.drain_timeout, "
        "preStopSeconds and 10. It ends as soon as nothing runs there any more. The head has 60 at most.",
    )
    preStopSeconds: NotNegative = Field(
        default=5,
        description="Seconds between the end of a pod's being offered to clients and its drain; 0 = none.",
    )
    extraEnv: list[EnvVar] = Field(default=[], description="More environment variables for all Ray containers.")
    extraVolumes: list[Anything] = Field(default=[], description="More volumes for all pods.")
    extraVolumeMounts: list[Anything] = Field(default=[], description="Their mounts in all Ray containers.")
    labels: Labels = Field(default={}, description="More labels for all objects.")
    annotations: Texts = Field(
        default={}, description="Annotations of the RayService and the RayJob, such as those of KubeRay."
    )
    ingress: Ingress = Field(default=Ingress(), description="An Ingress for the endpoint.")
    gateway: Gateway = Field(default=Gateway(), description="An HTTPRoute to the endpoint.")
    podMonitor: PodMonitor = Field(default=PodMonitor(), description="A PodMonitor for the Prometheus operator.")
    prometheusRule: PrometheusRule = Field(
        default=PrometheusRule(), description="A PrometheusRule for the Prometheus operator, with Squadron's alerts."
    )
    dashboards: Dashboards = Field(default=Dashboards(), description="Grafana dashboards as ConfigMaps.")
    batch: Batch = Field(default=Batch(), description="A RayJob that answers the rows of files, on its own cluster.")
    extraObjects: list[Anything] = Field(default=[], description="More objects; their strings may be templates.")
