"""A real Prometheus of our own on loopback, for as long as a block lasts."""

from __future__ import annotations

import math
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import yaml

from tests.e2e.harness import eventually, free_port

EVERY, STEP = 1, 1  # seconds between two scrapes, and between two points


@dataclass(frozen=True)
class Line:
    """One series: its labels, and points of (seconds since the epoch, value)."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]


class Prometheus:
    """Scrapes `targets` (host:port) every second, with the rules of `rules` if there are any."""

    def __init__(self, targets: Sequence[str], rules: Path | None = None) -> None:
        self._binary = shutil.which("prometheus")
        if self._binary is None:
            raise FileNotFoundError("there is no prometheus here: on Debian `apt-get install prometheus` brings it")
        self._targets = list(targets)
        self._rules = rules
        self._port = free_port()

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        (folder / "prometheus.yml").write_text(yaml.safe_dump(self._settings()))
        log = (folder / "log").open("w")
        arguments = {
            "config.file": folder / "prometheus.yml",
            "storage.tsdb.path": folder / "data",
            "web.listen-address": f"127.0.0.1:{self._port}",
        }
        command = [str(self._binary), *(f"--{name}={value}" for name, value in arguments.items())]
        self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
        log.close()
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=30.0, trust_env=False)
        eventually(lambda: self._client.get("/-/ready").status_code == 200, "Prometheus is ready")
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait(20)
        self._folder.cleanup()

    def over(self, expr: str, start: float, end: float) -> list[Line]:
        """Return an expression's series from start to end, at the same moments for all expressions.

        Raises `ValueError` with Prometheus' words.
        """
        given = {"query": expr, "start": start, "end": end, "step": STEP}
        return [Line(one["metric"], _points(one["values"])) for one in self._ask("query_range", given)]

    def alerts(self) -> dict[str, str]:
        """Return what each alert is: inactive, pending or firing. Raises `ValueError` where one has no answer."""
        rules = [rule for group in self._ask("rules", {})["groups"] for rule in group["rules"]]
        failed = [f"{rule['name']}: {rule['lastError']}" for rule in rules if rule["health"] != "ok"]
        if failed:
            raise ValueError("; ".join(failed))
        return {rule["name"]: rule["state"] for rule in rules}

    def _ask(self, what: str, given: Mapping[str, Any]) -> Any:
        body = self._client.get(f"/api/v1/{what}", params=dict(given)).json()
        if body["status"] != "success":
            raise ValueError(f"{body['error']}: {given}")
        return body["data"]["result"] if "result" in body["data"] else body["data"]

    def _settings(self) -> dict[str, Any]:
        job = {"job_name": "ray", "static_configs": [{"targets": self._targets}]}
        rules = [str(self._rules.resolve())] if self._rules is not None else []
        every = {"scrape_interval": f"{EVERY}s", "scrape_timeout": f"{EVERY}s", "evaluation_interval": f"{EVERY}s"}
        return {"global": every, "scrape_configs": [job], "rule_files": rules}


def _points(values: Sequence[Sequence[Any]]) -> list[tuple[float, float]]:
    """Where a series tells nothing, there is a point without a value, so that no line goes over it."""
    points: list[tuple[float, float]] = []
    for at, value in ((float(at), float(value)) for at, value in values):
        if points and at - points[-1][0] > 1.5 * STEP:
            points.append((points[-1][0] + STEP, math.nan))
        points.append((at, value))
    return points
