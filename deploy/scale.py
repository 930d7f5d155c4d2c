"""`python -m deploy.scale NAME --namespace N --groups JSON`: as many pods in a running RayCluster as a release says.

KubeRay keeps the numbers of pods of a changed RayService from the cluster that runs, as Ray's autoscaler changes them
there (kuberay issues 2331 and 4568; rayservice_controller.go, `shouldUpdateCluster`). So a Job of the chart sets them
after an upgrade or a rollback. What else differs is KubeRay's to change.
"""

from __future__ import annotations

import argparse
import os
import ssl
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from engine.errors import ConfigError, SquadronError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
SECONDS = 600.0
PAUSE = 2.0  # between two looks at what KubeRay has done
Object = dict[str, Any]


class ScaleError(SquadronError):
    """The numbers of pods could not be set."""


class Counts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    """Pods of a worker group, or sets of pods. replicas: None = Ray's autoscaler's own, between the others."""

    min_replicas: int
    max_replicas: int
    replicas: int | None = None

    def named(self) -> dict[str, int]:
        """Return the fields of a worker group to set."""
        found: dict[str, int] = msgspec.to_builtins(self)
        return found


Groups = dict[str, Counts]


def read_groups(text: str) -> Groups:
    """Return counts by the name of the worker group. Raises `ConfigError`."""
    try:
        return msgspec.json.decode(text, type=Groups)
    except msgspec.DecodeError as error:
        example = '{"workers": {"minReplicas": 1, "maxReplicas": 4}}'
        raise ConfigError(f"--groups: must be JSON such as {example}: {error}", "groups") from error


@dataclass(frozen=True)
class Resources:
    """KubeRay's objects in one namespace of a Kubernetes API server. Raises `ScaleError` where it refuses."""

    client: httpx.Client
    namespace: str

    def get(self, plural: str, name: str) -> Object | None:
        """Return an object, None where there is none."""
        answer = self._asked("GET", plural, name)
        return None if answer.status_code == httpx.codes.NOT_FOUND else _content(answer)

    def patch(self, plural: str, name: str, changes: list[Object]) -> bool:
        """Make the changes, a JSON patch (RFC 6902); return False where another was faster."""
        headers = {"Content-Type": "application/json-patch+json"}
        answer = self._asked("PATCH", plural, name, json=changes, headers=headers)
        # 422 is the answer where a test of the patch does not hold.
        if answer.status_code in (httpx.codes.CONFLICT, httpx.codes.UNPROCESSABLE_ENTITY):
            return False
        _content(answer)
        return True

    def _asked(self, method: str, plural: str, name: str, **content: Any) -> httpx.Response:
        path = f"/apis/ray.io/v1/namespaces/{self.namespace}/{plural}/{name}"
        try:
            return self.client.request(method, path, **content)
        except httpx.HTTPError as error:
            raise ScaleError(f"{method} {path}: {error}") from error


def _content(answer: httpx.Response) -> Object:
    if answer.is_error:
        raise ScaleError(
            f"{answer.request.method} {answer.request.url.path}: {answer.status_code} {answer.text[:500]}"
        )
    found: Object = answer.json()
    return found


def scale(resources: Resources, service: str, groups: Groups, seconds: float = SECONDS) -> str:
    """Set the counts of the cluster that goes on under a RayService; return what was done, in words.

    It is the one that KubeRay builds, if it builds one, else the one that serves. Waits until KubeRay has seen the
    service as it is, for at most `seconds`. Raises `ScaleError`.
    """
    deadline = time.monotonic() + seconds
    while True:
        found = resources.get("rayservices", service)
        if found is None:
            raise ScaleError(f"there is no RayService {service} in {resources.namespace}")
        status = found.get("status", {})
        if status.get("observedGeneration") == found["metadata"]["generation"]:
            done = _set(resources, _cluster_of(status), groups)
            if done is not None:
                return done
        if time.monotonic() >= deadline:
            raise ScaleError(f"KubeRay has not taken notice of RayService {service} in {seconds:g} s; does it run?")
        time.sleep(PAUSE)


def _cluster_of(status: Object) -> str:
    names = [status.get(f"{which}ServiceStatus", {}).get("rayClusterName", "") for which in ("pending", "active")]
    return next(filter(None, names), "")


def _set(resources: Resources, name: str, groups: Groups) -> str | None:
    """Return what was done, None to look again."""
    cluster = resources.get("rayclusters", name) if name else None
    if cluster is None:
        return "nothing to do: KubeRay builds a cluster with these numbers of pods"
    changes, said = [], []
    for index, group in enumerate(cluster["spec"].get("workerGroupSpecs", [])):
        wanted = groups[group["groupName"]].named() if group["groupName"] in groups else {}
        for field, count in wanted.items():
            if group.get(field) != count:
                changes.append({"op": "add", "path": f"/spec/workerGroupSpecs/{index}/{field}", "value": count})
                said.append(f"{group['groupName']}.{field}={count}")
    if not changes:
        return f"nothing to do: {name} has these numbers of pods"
    version = cluster["metadata"]["resourceVersion"]
    as_read = {"op": "test", "path": "/metadata/resourceVersion", "value": version}
    return f"{name}: {', '.join(said)}" if resources.patch("rayclusters", name, [as_read, *changes]) else None


def connect(server: str, account: Path) -> httpx.Client:
    """Return a client of the API server as a pod's service account: `token` and `ca.crt` lie in `account`."""
    token, authority = account / "token", account / "ca.crt"
    verify = ssl.create_default_context(cafile=str(authority)) if authority.is_file() else True
    try:
        headers = {"Authorization": f"Bearer {token.read_text(encoding='ascii').strip()}"}
    except OSError as error:
        raise ScaleError(f"{token} cannot be read: {error.strerror}; this runs in a pod of Kubernetes") from error
    return httpx.Client(base_url=server, headers=headers, verify=verify, timeout=30, trust_env=False)


def _own_server() -> str:
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
    return f"https://{f'[{host}]' if ':' in host else host}:{port}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Scale a cluster; return 0, or 1 after saying what is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.scale", description="Set the pods of a running RayCluster."
    )
    parser.add_argument("service", metavar="NAME", help="the RayService")
    parser.add_argument("--namespace", required=True, help="its namespace")
    groups_help = 'counts by worker group: {"workers": {"minReplicas": 1, "maxReplicas": 4, "replicas": 2}}'
    parser.add_argument("--groups", required=True, metavar="JSON", help=groups_help)
    parser.add_argument("--server", default=_own_server(), help="API server; default: that of the pod's cluster")
    parser.add_argument("--account", type=Path, default=ACCOUNT, help="folder with the token and ca.crt")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="longest wait for KubeRay")
    given = parser.parse_args(arguments)
    try:
        groups = read_groups(given.groups)
        with connect(given.server, given.account) as client:
            print(scale(Resources(client, given.namespace), given.service, groups, given.seconds), flush=True)
    except SquadronError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
