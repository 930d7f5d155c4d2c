"""The app as Serve's controller knows it, asked by one of its copies: which version serves, and deploying it again.

Serve has no public way to read and to write an app's config from Python (`serve deploy` goes through the dashboard,
which not every Ray has), so this file takes the client that Serve itself uses. Nothing else in the project does;
where another Ray has it no more, updates that fail are not rolled back, and routers say so in their logs.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.serve import context as serve_context
from ray.serve.schema import ServeDeploySchema

from cluster.lifecycle import control_store
from cluster.lifecycle.app_status import FAILED, RUNNING
from cluster.lifecycle.rollback import GoodVersion

logger = logging.getLogger(__name__)

DECLARATIVE = "declarative"  # deployed from a config file
# Apps of one config file are written together, so one after the other. No app's memory has a name that begins so.
CLAIM = "//rollback"
CLAIM_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class BuiltOf:
    """What a version of an app was built of. args: of `cluster.app.build`. versions: by name of the deployment."""

    args: dict[str, Any]
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class DeployedApp:
    """An app, asked about by the copy `replica_id` of its `deployment`.

    builder: module:function that makes this copy's version of its arguments and versions.
    """

    app: str
    deployment: str
    replica_id: str
    built_of: BuiltOf
    builder: str = "cluster.app:build_version"

    def version(self) -> GoodVersion | None:
        """Return the version that serves; None unless the app is whole and this copy is one of those that serve."""
        found = _details()["applications"].get(self.app)
        if found is None or found["status"] != RUNNING or not self._serves(found):
            return None
        action = self.built_of.args["update_failure_action"]
        if found["source"] == DECLARATIVE:
            return GoodVersion(found["route_prefix"], action, config=found["deployed_app_config"])
        built_of = self.built_of
        return GoodVersion(found["route_prefix"], action, None, built_of.args, built_of.versions, _runtime_env())

    def restore(self, version: GoodVersion) -> bool:
        """Deploy `version` unless the app is deployed anew already, or this copy is on its way out.

        Raises what Serve raises, and `SquadronError` where the version cannot be built any more.
        """
        return self._run(version) if version.config is None else self._apply(version.config)

    def _run(self, version: GoodVersion) -> bool:
        if version.runtime_env != _runtime_env():
            # Serve would give the old version the environment of the copy that deploys it.
            logger.error("the version before has another runtime_env: deploy it by hand to undo the update")
            return False
        module, function = self.builder.split(":")
        target = getattr(importlib.import_module(module), function)(version.args, version.versions)

        def run(_: Mapping[str, Any]) -> None:
            serve.run_many(
                [serve.RunTarget(target, name=self.app, route_prefix=version.route_prefix)],
                wait_for_ingress_deployment_creation=False,
                wait_for_applications_running=False,
            )

        return self._claimed(run)  # asked last: building may take seconds, in which a user deploys

    def _apply(self, config: Mapping[str, Any]) -> bool:
        def apply(details: Mapping[str, Any]) -> None:
            serve_context._get_global_client().deploy_apps(_with(details, self.app, config))

        return self._claimed(apply)

    def _claimed(self, deploy: Callable[[Mapping[str, Any]], None]) -> bool:
        """Deploy unless that is not to be (any more), while no other router does; return whether it was."""
        with control_store.claim(CLAIM, CLAIM_SECONDS) as holds:
            if not self._may_restore(details := _details()):
                return False
            if not holds():  # Serve took so long to answer
                raise TimeoutError(f"Serve did not tell within {CLAIM_SECONDS:g} s how the app is")
            deploy(details)
            return True

    def _may_restore(self, details: Mapping[str, Any]) -> bool:
        found = details["applications"].get(self.app)
        if found is None or found["status"] != FAILED:
            return False
        # Where the app could not even be built, Serve names no deployments, and leaves all copies alone.
        return not found["deployments"] or self._serves(found)

    def _serves(self, found: Mapping[str, Any]) -> bool:
        copies = found["deployments"].get(self.deployment, {}).get("replicas", ())
        return any(copy["replica_id"] == self.replica_id and copy["state"] == RUNNING for copy in copies)


def _details() -> dict[str, Any]:
    details: dict[str, Any] = serve_context._get_global_client().get_serve_details()
    return details


def _runtime_env() -> dict[str, Any]:
    return dict(ray.get_runtime_context().runtime_env)


def _with(details: Mapping[str, Any], app: str, config: Mapping[str, Any]) -> ServeDeploySchema:
    """Return the config of all apps that have one, with `config` for `app`: Serve deletes those it does not name."""
    configs = {
        name: one["deployed_app_config"]
        for name, one in details["applications"].items()
        if one["source"] == DECLARATIVE and one.get("deployed_app_config")
    }
    return ServeDeploySchema.model_validate(
        {"applications": [*(configs | {app: config}).values()], "target_capacity": details.get("target_capacity")}
    )
