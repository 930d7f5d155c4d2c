"""What KubeRay makes of a changed RayService: the same cluster, the same with more groups, or another one.

Source: rayservice_controller.go of ray-operator, `shouldPrepareNewCluster`, `shouldUpdateCluster`.
"""

from __future__ import annotations

import copy
from typing import Any

from tests.helm.api_server import ApiServer

Object = dict[str, Any]
COUNTS = ("replicas", "minReplicas", "maxReplicas", "scaleStrategy")  # which it leaves out where it compares


class KubeRay:
    """The operator, with its RayClusters on an API server. The newest of them serves.

    A cluster goes on where nothing but counts differs, which do not reach it. Where groups were added at the end, it
    gets the service's description, with the counts. Else another one is built.
    """

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self._seen: list[Object] = []  # the description by which each cluster was built or changed

    @property
    def clusters(self) -> int:
        """How many clusters were built."""
        return len(self._server.named("RayCluster"))

    def reconcile(self, service: Object) -> None:
        """Take notice of a RayService."""
        wanted = copy.deepcopy(service["spec"]["rayClusterConfig"])
        if not self._seen or not _goes_on(self._seen[-1], wanted):
            self._seen.append(wanted)
            self._put(copy.deepcopy(wanted))
        elif len(wanted["workerGroupSpecs"]) > len(self._seen[-1]["workerGroupSpecs"]):
            self._seen[-1] = wanted
            self._put(copy.deepcopy(wanted))
        service["status"] = {
            "observedGeneration": service["metadata"]["generation"],
            "activeServiceStatus": {"rayClusterName": self._name},
            "pendingServiceStatus": {},
        }

    def pods(self) -> dict[str, int]:
        """Return the pods of the newest cluster by group."""
        groups = self._server.named("RayCluster")[self._name]["spec"]["workerGroupSpecs"]
        return {one["groupName"]: _pods(one) * one["numOfHosts"] for one in groups}

    @property
    def _name(self) -> str:
        return f"cluster-{len(self._seen)}"

    def _put(self, spec: Object) -> None:
        made = {"metadata": {"name": self._name, "resourceVersion": f"of-{len(self._seen)}"}, "spec": spec}
        self._server.objects["rayclusters", self._name] = made


def _pods(group: Object) -> int:
    """Replicas within their bounds, as `GetWorkerGroupDesiredReplicas` counts them."""
    return int(min(max(group["replicas"], group["minReplicas"]), group["maxReplicas"]))


def _goes_on(running: Object, wanted: Object) -> bool:
    groups = len(running["workerGroupSpecs"])
    return compared(running) == compared({**wanted, "workerGroupSpecs": wanted["workerGroupSpecs"][:groups]})


def compared(cluster: Object) -> Object:
    """Return what KubeRay compares of a cluster."""
    groups = [{key: one[key] for key in one if key not in COUNTS} for one in cluster["workerGroupSpecs"]]
    return {**cluster, "workerGroupSpecs": groups}
