"""What Ray's Serve-LLM dashboard needs of a replica beside its figures."""

from __future__ import annotations

from ray.serve.metrics import Counter

from cluster.telemetry.ray_publisher import LEAST


def show_to_dashboard() -> None:
    """Have Serve's counter of requests tell of this replica. Called in a replica of Serve.

    The dashboard joins figures with that counter, by process, to learn whose they are. Serve counts a request when it
    has ended, and those of a replica of ours are leases, which end with it: without this its panels would be empty.
    """
    counter = Counter("serve_deployment_request_counter", "Requests processed in this replica.", ("route",))
    counter.inc(LEAST, {"route": ""})
