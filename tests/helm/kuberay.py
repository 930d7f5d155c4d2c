"""What KubeRay makes of a changed RayService: the same cluster with other numbers of pods, or another one.

Source: rayservice_controller.go of ray-operator, `shouldUpdateCluster`, and its util.go.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]
COUNTS = ("replicas", "minReplicas", "maxReplicas", "scaleStrategy")  # which it leaves out where it compares


@dataclass
class KubeRay:
    """The operator and its clusters, of which the last serves.

    A cluster goes on where nothing but counts differs, or groups were added at the end.
    """

    clusters: list[Object] = field(default_factory=list)

    def reconcile(self, service: Object) -> dict[str, int]:
        """Take notice of a RayService and return its pods by group."""
        wanted = service["spec"]["rayClusterConfig"]
        running = self.clusters[-1] if self.clusters else None
        if running is None or not _goes_on(running, wanted):
            self.clusters.append(copy.deepcopy(wanted))
        else:
            self.clusters[-1] = copy.deepcopy(wanted)
        return {one["groupName"]: one["replicas"] * one["numOfHosts"] for one in wanted["workerGroupSpecs"]}


def _goes_on(running: Object, wanted: Object) -> bool:
    groups = len(running["workerGroupSpecs"])
    return compared(running) == compared({**wanted, "workerGroupSpecs": wanted["workerGroupSpecs"][:groups]})


def compared(cluster: Object) -> Object:
    """Return what KubeRay compares of a cluster."""
    groups = [{key: one[key] for key in one if key not in COUNTS} for one in cluster["workerGroupSpecs"]]
    return {**cluster, "workerGroupSpecs": groups}
