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
from deploy.chart.part import Anything, NotNegative, OptionalName, Part, Texts
from deploy.chart.pods import Disk, EnvVar, Head, Hub, Image, ModelCache, Probes, Security, Service, WorkerGroup


class Values(Part):
    """All values but `models` and `app`, which `deploy.chart.settings` describes."""

    nameOverride: OptionalName = Field(default="", description="Name in place of the chart's.")
    fullnameOverride: OptionalName = Field(default="", description="Name in place of that of release and chart.")
    image: Image = Field(default=Image(), description="The image of all pods.")
    rayVersion: str = Field(default="2.60.0", pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$", description="Ray in the image.")
    service: Service = Field(default=Service(), description="The endpoint.")
    workerGroups: list[WorkerGroup] = Field(
        default=[WorkerGroup(name="workers")],
        min_length=1,
        description="Kinds of pods; models without workerGroup run in the first.",
    )
    head: Head = Field(default=Head(), description="Ray's head, which runs neither models nor routers.")
    modelCache: ModelCache = Field(default=ModelCache(), description="Where models from the hub are kept.")
    disk: Disk = Field(default=Disk(), description="What pods may write to the disk of their node, in emptyDirs.")
    hub: Hub = Field(default=Hub(), description="The hub that models come from.")
    apiKeys: ApiKeys = Field(default=ApiKeys(), description="Who may use the endpoint.")
    rayToken: RayToken = Field(default=RayToken(), description="The token without which Ray answers nobody.")
    faultTolerance: FaultTolerance = Field(default=FaultTolerance(), description="What is left when the head dies.")
    autoscaling: Autoscaling = Field(
        default=Autoscaling(), description="Pods that come and go with the replicas of models."
    )
    upgrade: Upgrade = Field(
        default=Upgrade(),
        description="What follows a change of the cluster. Changes of models and app alone are made in place.",
    )
    probes: Probes = Field(default=Probes(), description="How it is seen that a pod works.")
    podDisruptionBudget: DisruptionBudget = Field(
        default=DisruptionBudget(), description="How many pods may be evicted at a time."
    )
    networkPolicy: NetworkPolicy = Field(
        default=NetworkPolicy(), description="Who may talk to the pods, and with whom they may talk."
    )
    security: Security = Field(
        default=Security(),
        description="Users and groups of the processes, which are never root and write to volumes alone.",
    )
    serviceAccountName: OptionalName = Field(
        default="", description="Service account of all pods; its token is not mounted."
    )
    terminationGracePeriodSeconds: NotNegative = Field(default=60, description="Seconds that a pod has to end.")
    extraEnv: list[EnvVar] = Field(default=[], description="Further environment variables of all Ray containers.")
    extraVolumes: list[Anything] = Field(default=[], description="Further volumes of all pods.")
    extraVolumeMounts: list[Anything] = Field(default=[], description="Where they are mounted in all Ray containers.")
    labels: Texts = Field(default={}, description="Further labels of all objects.")
    annotations: Texts = Field(
        default={}, description="Annotations of the RayService and the RayJob, such as KubeRay's own."
    )
    ingress: Ingress = Field(default=Ingress(), description="An Ingress before the endpoint.")
    gateway: Gateway = Field(default=Gateway(), description="An HTTPRoute to the endpoint.")
    podMonitor: PodMonitor = Field(default=PodMonitor(), description="A PodMonitor of Prometheus' operator.")
    prometheusRule: PrometheusRule = Field(
        default=PrometheusRule(), description="A PrometheusRule of Prometheus' operator, with Squadron's alerts."
    )
    dashboards: Dashboards = Field(default=Dashboards(), description="Grafana's dashboards, as ConfigMaps.")
    batch: Batch = Field(
        default=Batch(), description="A RayJob that answers the rows of files, on a cluster of its own."
    )
    extraObjects: list[Anything] = Field(default=[], description="Further objects, whose texts may be templates.")
