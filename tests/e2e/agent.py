"""Ray's metrics agent of this machine, as Prometheus would scrape it."""

from __future__ import annotations

import httpx
import ray
from prometheus_client.parser import text_string_to_metric_families

SECONDS = 45.0  # until it has been told all there is; Ray tells it every ten


def metrics_at_the_agent() -> set[str]:
    """Return the names of the metrics that have samples."""
    (node,) = ray.nodes()
    text = httpx.get(f"http://127.0.0.1:{node['MetricsExportPort']}/metrics", timeout=10).text
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
