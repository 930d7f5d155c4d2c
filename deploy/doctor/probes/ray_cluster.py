"""A script: joins the Ray cluster at the address given and prints what it is, as one JSON object."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import ray


def read(address: str) -> dict[str, Any]:
    """Return the cluster's size, or under `error` why it cannot be joined."""
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        return {"error": str(error), "version": ray.__version__}
    total = ray.cluster_resources()
    alive = [node for node in ray.nodes() if node["Alive"]]
    found = {
        "version": ray.__version__,
        "nodes": len(alive),
        "cpus": total.get("CPU", 0),
        "gpus": total.get("GPU", 0),
    }
    ray.shutdown()
    return found


if __name__ == "__main__":
    print(json.dumps(read(sys.argv[1])))
