"""What viewers of the dashboards choose by."""

from __future__ import annotations

from deploy.dashboards.panel import Variable
from deploy.dashboards.promql import CHOSEN_CLUSTER, CHOSEN_MODEL, CLUSTER, metric

CHOOSE_CLUSTER = Variable("cluster", "Cluster", CLUSTER, metric("replicas"))
CHOOSE_MODEL = Variable("model_name", "Model", "model_name", f"{metric('replicas')}{{{CHOSEN_CLUSTER}}}")
CHOOSE_REPLICA = Variable("replica", "Replica", "replica", f"{metric('num_requests_running')}{{{CHOSEN_MODEL}}}")
