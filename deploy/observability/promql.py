"""PromQL of our own families, as they reach Prometheus through Ray, of Ray Serve's own, and viewers' variables.

Names are those of `cluster.telemetry.families`, without `squadron_`; others raise `KeyError`.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.telemetry.families import FAMILIES, RAY_PREFIX, Kind
from deploy.observability.grafana import Variable

CLUSTER = "ray_io_cluster"  # of KubeRay's pods; other series do not have it, and "all" chooses these too
SERVE_HEALTHY = "ray_serve_deployment_replica_healthy"
SERVE_WANTED = "ray_serve_autoscaling_target_replicas"  # set without autoscaling, too
SERVE_STATUS = "ray_serve_deployment_status"
CHOSEN_CLUSTER = f'{CLUSTER}=~"$cluster"'
CHOSEN_MODEL = f'{CHOSEN_CLUSTER},model_name=~"$model_name"'
CHOSEN_REPLICA = f'{CHOSEN_MODEL},replica=~"$replica"'
EVERY = "$__rate_interval"


def metric(name: str, suffix: str = "") -> str:
    """Return what Prometheus calls a family's series. suffix: `_bucket`, `_sum` or `_count` of a histogram."""
    family = FAMILIES[name]
    if (family.kind is Kind.HISTOGRAM) != bool(suffix):
        raise ValueError(f"{name} is a {family.kind}: give it {'no' if suffix else 'a'} suffix")
    return RAY_PREFIX + family.shown_name + suffix


@dataclass(frozen=True, slots=True)
class Chosen:
    """Expressions of what a viewer has chosen. by_replica: whether replicas are chosen, too.

    by: labels to tell apart, "" = none. more: further matchers, separated by commas.
    """

    by_replica: bool

    def series(self, name: str, more: str = "", suffix: str = "") -> str:
        """Return the selector of a family."""
        has_replicas = self.by_replica and "replica" in FAMILIES[name].ray_labels
        chosen = CHOSEN_REPLICA if has_replicas else CHOSEN_MODEL
        return f"{metric(name, suffix)}{{{chosen}{',' if more else ''}{more}}}"

    def rate(self, name: str, by: str = "model_name", more: str = "") -> str:
        """Return how much a counter grows a second."""
        return f"sum{_by(by)} (rate({self.series(name, more)}[{EVERY}]))"

    def growth(self, name: str, by: str = "model_name", more: str = "") -> str:
        """Return how much a counter grows from one point to the next."""
        return f"sum{_by(by)} (increase({self.series(name, more)}[{EVERY}]))"

    def total(self, name: str, by: str = "model_name", more: str = "") -> str:
        """Return the sum of a gauge."""
        return f"sum{_by(by)} ({self.series(name, more)})"

    def most(self, name: str, by: str = "model_name", more: str = "") -> str:
        """Return the highest of a gauge."""
        return f"max by ({by}) ({self.series(name, more)})"

    def reported_alike(self, name: str, by: str = "model_name", more: str = "") -> str:
        """Return the sum over clusters of a gauge that all routers of a cluster report alike, counted once."""
        labels = ", ".join((CLUSTER, *FAMILIES[name].labels))
        return f"sum{_by(by)} ({self.most(name, labels, more)})"

    def percentile(self, share: float, name: str, by: str = "model_name") -> str:
        """Return the value below which a share of a histogram's observations stay."""
        buckets = f"sum by (le, {by}) (rate({self.series(name, suffix='_bucket')}[{EVERY}]))"
        return f"histogram_quantile({share}, {buckets})"

    def mean(self, name: str, by: str = "replica") -> str:
        """Return the mean of a histogram's observations."""
        parts = (f"sum by ({by}) (rate({self.series(name, suffix=end)}[{EVERY}]))" for end in ("_sum", "_count"))
        return " / ".join(parts)


def serve(name: str, deployment: str) -> str:
    """Return a metric of Ray Serve's controller, by deployment. deployment: a pattern of their names."""
    return f'sum by (deployment) ({name}{{{CHOSEN_CLUSTER},deployment=~"{deployment}"}})'


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""


CHOOSE_CLUSTER = Variable("cluster", "Cluster", CLUSTER, metric("replicas"))
CHOOSE_MODEL = Variable("model_name", "Model", "model_name", f"{metric('replicas')}{{{CHOSEN_CLUSTER}}}")
CHOOSE_REPLICA = Variable("replica", "Replica", "replica", f"{metric('num_requests_running')}{{{CHOSEN_MODEL}}}")
