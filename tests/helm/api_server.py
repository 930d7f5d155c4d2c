"""A small API server in memory, on which Helm installs, upgrades, rolls back and uninstalls releases.

It keeps objects as they are sent and checks nothing: what Kubernetes and KubeRay take, `tests.helm.schemas` says.
Kubernetes' own API server is in no package that could be found: PyPI, npm and Debian 12 were searched for
kube-apiserver, envtest, kwok, k3s, k0s, minikube and microk8s, and have clients, wrappers that want Docker or a
download, and etcd.
"""

from __future__ import annotations

import copy
import json
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

Object = dict[str, Any]
# By group and version: kind -> plural.
KINDS = {
    "v1": {
        "ConfigMap": "configmaps",
        "PersistentVolumeClaim": "persistentvolumeclaims",
        "Secret": "secrets",
        "ServiceAccount": "serviceaccounts",
    },
    "batch/v1": {"Job": "jobs"},
    "rbac.authorization.k8s.io/v1": {"Role": "roles", "RoleBinding": "rolebindings"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
    "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies", "Ingress": "ingresses"},
    "gateway.networking.k8s.io/v1": {"HTTPRoute": "httproutes"},
    "ray.io/v1": {"RayService": "rayservices", "RayJob": "rayjobs", "RayCluster": "rayclusters"},
    "monitoring.coreos.com/v1": {"PodMonitor": "podmonitors", "PrometheusRule": "prometheusrules"},
}
PROTOBUF = b"k8s\x00"
VERBS = ["create", "delete", "get", "list", "patch", "update"]


class ApiServer:
    """Objects by plural and name, of any namespace."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self._lock = threading.Lock()
        self._version = 0

    def named(self, kind: str) -> dict[str, Object]:
        """Return the objects of a kind by name."""
        plural = next(kinds[kind] for kinds in KINDS.values() if kind in kinds)
        return {name: one for (of, name), one in self.objects.items() if of == plural}

    def answer(self, method: str, path: str, sent: bytes, kind: str) -> tuple[int, Object]:
        """Return status and body. kind: the content's type."""
        address = urlsplit(path)
        parts = address.path.strip("/").split("/")
        if method == "GET" and (found := _discovery(parts)) is not None:
            return 200, found
        if "namespaces" not in parts or len(parts) < parts.index("namespaces") + 3:
            return 404, _status("NotFound", path)
        plural, *name = parts[parts.index("namespaces") + 2 :]
        with self._lock:
            if not name and method == "GET":
                return 200, self._list(parts, plural, parse_qs(address.query).get("labelSelector", [""])[0])
            body = {} if method in ("GET", "DELETE") else _read(sent)
            return self._one(method, plural, name[0] if name else body["metadata"]["name"], body, kind)

    def _list(self, parts: list[str], plural: str, selector: str) -> Object:
        wanted = dict(one.split("=", 1) for one in selector.split(",") if "=" in one)
        found = [
            one
            for (of, _), one in self.objects.items()
            if of == plural and wanted.items() <= one["metadata"].get("labels", {}).items()
        ]
        version = parts[1] if parts[0] == "api" else f"{parts[1]}/{parts[2]}"
        kind = next(kind for kind, name in KINDS[version].items() if name == plural)
        return {"kind": f"{kind}List", "apiVersion": version, "metadata": {"resourceVersion": "1"}, "items": found}

    def _one(self, method: str, plural: str, name: str, body: Object, kind: str) -> tuple[int, Object]:
        there = self.objects.get((plural, name))
        applied = method == "PATCH" and "apply" in kind
        if there is None and not (method == "POST" or applied):
            return 404, _status("NotFound", name)
        if method == "GET":
            return 200, there or {}
        if method == "DELETE":
            return 200, self.objects.pop((plural, name))
        if method == "POST" and there is not None:
            return 409, _status("AlreadyExists", name)
        made = body
        if method == "PATCH" and not applied and there is not None:
            changed = _changed(there, body) if "json-patch" in kind else _merged(there, body)
            if changed is None:
                return 422, _status("Invalid", name)
            made = changed
        self._version += 1
        made["metadata"] = made["metadata"] | {"uid": f"{plural}-{name}", "resourceVersion": str(self._version)}
        self.objects[plural, name] = made
        return (200 if there else 201), made


def _read(sent: bytes) -> Object:
    """Return what was sent: JSON, YAML, or a Secret in protobuf, as which Helm keeps its releases."""
    if not sent.startswith(PROTOBUF):
        found: Object = yaml.safe_load(sent)
        return found
    secret = _fields(_fields(sent[len(PROTOBUF) :])[2][0])
    metadata = _fields(secret[1][0])
    labels = {name.decode(): value.decode() for name, value in map(_entry, metadata.get(11, []))}
    data = {name.decode(): b64encode(value).decode() for name, value in map(_entry, secret.get(2, []))}
    named = {"name": metadata[1][0].decode(), "namespace": "serving", "labels": labels}
    kind = secret[3][0].decode() if 3 in secret else "Opaque"
    return {"apiVersion": "v1", "kind": "Secret", "metadata": named, "data": data, "type": kind}


def _entry(message: bytes) -> tuple[bytes, bytes]:
    found = _fields(message)
    return found[1][0], found.get(2, [b""])[0]


def _fields(message: bytes) -> dict[int, list[bytes]]:
    """Return the fields with a length of a message in protobuf, by number; others are left out."""
    found: dict[int, list[bytes]] = {}
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        length, at = _varint(message, at)  # or a number, of a field without a length
        if tag & 7 == 2:
            found.setdefault(tag >> 3, []).append(message[at : at + length])
            at += length
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def _merged(there: Object, patch: Object) -> Object:
    """Return an object after a JSON merge patch (RFC 7396); a strategic one is as much where no lists have keys."""
    result = dict(there)
    for key, value in patch.items():
        if key.startswith("$"):
            continue
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            inner = result.get(key)
            result[key] = _merged(inner if isinstance(inner, dict) else {}, value)
        else:
            result[key] = value
    return result


def _changed(there: Object, patch: list[Object]) -> Object | None:
    """Return an object after a JSON patch (RFC 6902) of tests and additions, None where a test does not hold."""
    result = copy.deepcopy(there)
    for change in patch:
        *steps, last = change["path"].strip("/").split("/")
        inner: Any = result
        for step in steps:
            inner = inner[int(step)] if isinstance(inner, list) else inner[step]
        if change["op"] == "test" and inner.get(last) != change["value"]:
            return None
        if change["op"] == "add":
            inner[last] = change["value"]
    return result


def _discovery(parts: list[str]) -> Object | None:
    if parts == ["version"]:
        return {"major": "1", "minor": "35", "gitVersion": "v1.35.0"}
    if parts == ["api"]:
        return {"kind": "APIVersions", "versions": ["v1"]}
    if parts == ["apis"]:
        groups = [one.split("/") for one in KINDS if "/" in one]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(*one) for one in groups]}
    version = "/".join(parts[1:])
    if parts[0] in ("api", "apis") and version in KINDS:
        resources = [
            {"name": plural, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": VERBS}
            for kind, plural in KINDS[version].items()
        ]
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
    return None


def _group(name: str, version: str) -> Object:
    served = {"groupVersion": f"{name}/{version}", "version": version}
    return {"name": name, "versions": [served], "preferredVersion": served}


def _status(reason: str, name: str) -> Object:
    code = {"NotFound": 404, "AlreadyExists": 409, "Invalid": 422}[reason]
    message = f'"{name}": {reason}'
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "message": message,
        "code": code,
    }


@contextmanager
def served(folder: Path) -> Iterator[tuple[ApiServer, Path]]:
    """Serve an empty one on loopback; yields it with a kubeconfig for it, which lies in `folder`."""
    server = ApiServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, body = server.answer(self.command, self.path, sent, self.headers.get("Content-Type", ""))
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    config = folder / "kubeconfig"
    cluster = {"name": "it", "cluster": {"server": f"http://127.0.0.1:{listening.server_port}"}}
    context = {"name": "it", "context": {"cluster": "it", "user": "it", "namespace": "serving"}}
    users = [{"name": "it", "user": {}}]
    known = {"clusters": [cluster], "contexts": [context], "users": users, "current-context": "it"}
    config.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **known}))
    try:
        yield server, config
    finally:
        listening.shutdown()
        listening.server_close()
