"""Whether ports are free, and Ray and the hub can be reached."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import httpx
import huggingface_hub
from huggingface_hub import constants

from deploy.doctor.checks import Finding, ProbeError, ask, fix, ok, warning
from deploy.serve.address import connect_host, free_port, knock
from engine.errors import ConfigError

HUB_SECONDS = 6.0
SERVE_SECONDS = 3.0
RAY_SECONDS = 45.0
SERVE_SAYS = "success"  # to /-/healthz
MISMATCH = "Version mismatch"


def check_port(host: str, port: int, setting: str) -> list[Finding]:
    """Check whether the server can listen, or already does."""
    url = f"http://{connect_host(host)}:{port}/-/healthz"
    return [port_free(host, port, setting, lambda: _is_serve(url))]


def port_free(host: str, port: int, setting: str, serves: Callable[[], bool]) -> Finding:
    """Return whether a port can be listened on. serves: whether Ray Serve answers there."""
    name = f"port {port}" if port else "port"
    try:
        free_port(host, port, setting)
    except ConfigError as error:
        if serves():
            return ok(name, f"Ray Serve listens there already, on {host}")
        return fix(
            name, str(error).split(";")[0], f"choose another --{setting.replace('_', '-')}, or end what listens"
        )
    return ok(name, f"free on {host}")


def _is_serve(url: str) -> bool:
    try:
        return httpx.get(url, timeout=SERVE_SECONDS, trust_env=False).text.strip() == SERVE_SAYS
    except httpx.HTTPError:
        return False


def check_ray(address: str | None) -> list[Finding]:
    """Check whether the cluster of RAY_ADDRESS can be joined."""
    return [ray_cluster(address, knock, lambda: ask("ray_cluster", str(address), seconds=RAY_SECONDS))]


def ray_cluster(
    address: str | None, knocked: Callable[[str], None], probe: Callable[[], Mapping[str, Any]]
) -> Finding:
    """Return whether a cluster can be joined. knocked: raises `OSError` where the port is closed."""
    if address is None:
        return ok("ray cluster", "RAY_ADDRESS is not set: Squadron starts Ray on this machine")
    where = f"RAY_ADDRESS={address}"
    remedy = "see that `ray status` works there, or unset RAY_ADDRESS to start Ray here"
    if address == "auto":
        remedy += "; a Ray that was killed leaves its address behind, which `ray stop` removes"
    try:
        knocked(address)
        found = probe()
    except OSError as error:
        return fix("ray cluster", f"{where}: nobody listens ({error})", remedy)
    except ProbeError as error:
        return fix("ray cluster", f"{where}: {error}", remedy)
    if "error" in found:
        return _refused(where, str(found["error"]), str(found["version"]), remedy)
    nodes = f"{found['nodes']} node{'' if found['nodes'] == 1 else 's'}"
    size = f"{nodes}, {found['cpus']:g} CPUs, {found['gpus']:g} GPUs"
    return ok("ray cluster", f"{where}: Ray {found['version']}, {size}")


def _refused(where: str, error: str, version: str, remedy: str) -> Finding:
    words = " ".join(error.split())
    if MISMATCH in words:
        return fix(
            "ray cluster",
            f"{where}: {words[:300]}",
            f"run the same Ray and Python on all nodes; here it is Ray {version}",
        )
    return fix("ray cluster", f"{where} cannot be joined: {words[:300]}", remedy)


def check_hub() -> list[Finding]:
    """Check whether models can be fetched by their hub ids."""
    token = huggingface_hub.get_token()
    with httpx.Client(timeout=HUB_SECONDS, follow_redirects=True) as client:
        return [hub(constants.ENDPOINT, constants.HF_HUB_OFFLINE, token, client)]


def hub(endpoint: str, offline: bool, token: str | None, client: httpx.Client) -> Finding:
    """Return whether the hub answers, and takes the token where there is one."""
    if offline:
        return ok("hub", "HF_HUB_OFFLINE is set: models come from folders and the cache")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = f"{endpoint.rstrip('/')}/api/whoami-v2" if token else endpoint
    try:
        answer = client.get(url, headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return warning(
            "hub",
            f"{endpoint} cannot be reached ({error or type(error).__name__})",
            "give models as folders, fetch them first elsewhere (`hf download`), or set HF_ENDPOINT to a mirror",
        )
    if token and answer.status_code in (401, 403):
        return fix("hub", f"{endpoint} refuses this user's token", "hf auth login, or unset HF_TOKEN")
    if answer.is_server_error:
        return warning(
            "hub", f"{endpoint} answers {answer.status_code}", "try again later, or give models as folders"
        )
    return ok("hub", f"{endpoint} answers{', and takes the token' if token else ''}")
