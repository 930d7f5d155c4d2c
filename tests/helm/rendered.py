"""Runs `helm` on the chart and holds what it renders."""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from ray.serve.schema import ServeDeploySchema

from cluster.app_config import AppConfig, parse_app
from cluster.resources import deployment_names
from tests.helm.tools import tools

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "squadron"
EXAMPLES = {path.stem: path for path in sorted((ROOT / "helm" / "examples").glob("*.yaml"))}
EVERYTHING = Path(__file__).with_name("everything.yaml")
VALUES = {**EXAMPLES, "everything": EVERYTHING}
RELEASE = "llm"
# What the defaults lack: to say that no keys are wanted.
OPEN = ("--set", "apiKeys.allowOpen=true")
Object = dict[str, Any]


@dataclass(frozen=True)
class Helm:
    """One version of the command."""

    major: str

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run it; what it says is in the result, be it well or ill."""
        binary = str(tools(self.major) / "helm")
        return subprocess.run([binary, *arguments], capture_output=True, text=True, timeout=60, check=False)

    def template(self, values: Path | None = None, *more: str) -> list[Object]:
        """Return the objects that the chart renders. Fails with helm's message where it does not.

        values: where there are none it is open, as the defaults alone are refused.
        """
        given = OPEN if values is None else ("--values", str(values))
        result = self.run("template", RELEASE, str(CHART), "--namespace", "serving", *given, *more)
        assert result.returncode == 0, result.stderr
        return [one for one in yaml.safe_load_all(result.stdout) if one is not None]


@cache
def rendered(name: str, major: str = "4") -> tuple[Object, ...]:
    """Return what the chart renders of one of `VALUES`."""
    return tuple(Helm(major).template(VALUES[name]))


def of_kind(objects: tuple[Object, ...] | list[Object], kind: str) -> list[Object]:
    """Return the objects of a kind."""
    return [one for one in objects if one["kind"] == kind]


def clusters(objects: tuple[Object, ...] | list[Object]) -> Iterator[Object]:
    """Yield the RayCluster specs of service and job."""
    for service in of_kind(objects, "RayService"):
        yield service["spec"]["rayClusterConfig"]
    for job in of_kind(objects, "RayJob"):
        yield job["spec"]["rayClusterSpec"]


def pod_templates(objects: tuple[Object, ...] | list[Object]) -> Iterator[Object]:
    """Yield the templates of all pods, those of the job's submitter and of the Job that scales included."""
    for cluster in clusters(objects):
        yield cluster["headGroupSpec"]["template"]
        for group in cluster["workerGroupSpecs"]:
            yield group["template"]
    for job in of_kind(objects, "RayJob"):
        yield job["spec"]["submitterPodTemplate"]
    for job in of_kind(objects, "Job"):
        yield job["spec"]["template"]


def serve_config(objects: tuple[Object, ...] | list[Object]) -> Object:
    """Return the Serve config of the RayService."""
    (service,) = of_kind(objects, "RayService")
    config: Object = yaml.safe_load(service["spec"]["serveConfigV2"])
    return config


def declared(objects: tuple[Object, ...] | list[Object]) -> ServeDeploySchema:
    """Return the Serve config as Serve takes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of metrics_interval_s, as `autoscaling_config` says
        return ServeDeploySchema(**serve_config(objects))


def app_of(objects: tuple[Object, ...] | list[Object]) -> AppConfig:
    """Return the app as `cluster.app:build` reads it from the Serve config."""
    (application,) = serve_config(objects)["applications"]
    return parse_app(application["args"])


def deployments_of(objects: tuple[Object, ...] | list[Object]) -> dict[str, Object]:
    """Return what the Serve config says of each deployment in place of the app's code, by name."""
    (application,) = serve_config(objects)["applications"]
    return {one["name"]: one for one in application["deployments"]}


def scaled_app_of(objects: tuple[Object, ...] | list[Object]) -> AppConfig:
    """Return the app with as many replicas and routers as Serve runs of it."""
    app, deployments = app_of(objects), deployments_of(objects)
    models = []
    for config, name in zip(app.models, deployment_names(app), strict=True):
        scaling = deployments[name].get("autoscaling_config")
        if scaling is None:
            counts = {"replicas": deployments[name]["num_replicas"]}
        else:
            counts = {name: scaling[name] for name in ("min_replicas", "max_replicas")}
            counts["replicas"] = scaling.get("initial_replicas", max(1, scaling["min_replicas"]))
        models.append(replace(config, **counts))
    scaled = replace(app, models=tuple(models))
    return scaled.with_shared(routers=deployments["Router"]["num_replicas"])
