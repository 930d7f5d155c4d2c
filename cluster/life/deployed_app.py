"""The app as Serve's controller knows it, asked by one of its copies: which version serves, and deploying it again.

Serve has no public way to read and to write an app's config from Python (`serve deploy` goes through the dashboard,
which not every Ray has), so this file takes the client that Serve itself uses. Nothing else in the project does.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from cluster.life.app_status import FAILED
from cluster.life.rollback import GoodVersion

DECLARATIVE = "declarative"  # deployed from a config file
SERVING = "RUNNING"


@dataclass(frozen=True, slots=True)
class DeployedApp:
    """An app, asked about by the copy `replica_id` of its `deployment`.

    args: what `builder` (module:function) made this copy's version of.
    """

    app: str
    deployment: str
    replica_id: str
    args: dict[str, Any]
    builder: str = "cluster.app:build"

    def version(self) -> GoodVersion | None:
        """Return the version that serves; None if this copy is not one of those that serve it."""
        found = _details()["applications"].get(self.app)
        if found is None or not self._serves(found):
            return None
        config = found["deployed_app_config"] if found["source"] == DECLARATIVE else None
        return GoodVersion(found["route_prefix"], config, self.args)

    def restore(self, version: GoodVersion) -> bool:
        """Deploy `version` unless the app is deployed anew already, or this copy is on its way out.

        Raises what Serve raises, and `SquadronError` where the version cannot be built any more.
        """
        details = _details()
        found = details["applications"].get(self.app)
        if found is None or found["status"] != FAILED:
            return False
        # Where the app could not even be built, Serve names no deployments, and leaves all copies alone.
        if found["deployments"] and not self._serves(found):
            return False
        if version.config is None:
            self._run(version)
        else:
            _get_global_client().deploy_apps(_with(details, self.app, version.config))
        return True

    def _serves(self, found: Mapping[str, Any]) -> bool:
        copies = found["deployments"].get(self.deployment, {}).get("replicas", ())
        return any(copy["replica_id"] == self.replica_id and copy["state"] == SERVING for copy in copies)

    def _run(self, version: GoodVersion) -> None:
        module, function = self.builder.split(":")
        target = getattr(importlib.import_module(module), function)(version.args)
        serve.run_many(
            [serve.RunTarget(target, name=self.app, route_prefix=version.route_prefix)],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )


def _details() -> dict[str, Any]:
    details: dict[str, Any] = _get_global_client().get_serve_details()
    return details


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
