"""Goes back to the version that served before an update that failed: decisions, what they remember, and the deed.

Serve has no public way to read and to write an app's config from Python (`serve deploy` goes through the dashboard,
which not every Ray has), so `DeployedApp` takes the client that Serve itself uses. Nothing else in the project does;
where another Ray has it no more, updates that fail are not rolled back, and routers say so in their logs.
"""

from __future__ import annotations

import importlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import ray
from ray import serve
from ray.serve import context as serve_context
from ray.serve.schema import ServeDeploySchema

from cluster.lifecycle import control_store
from cluster.lifecycle.app_status import DELETING, FAILED, RUNNING, AppState
from engine.errors import SquadronError

logger = logging.getLogger(__name__)

CONFIRMED = 2  # states in a row that must have shown the failure
ATTEMPTS = 5  # that were refused
ROLLBACK = "rollback"  # the setting `update_failure_action`
REFRESH = 10.0  # seconds between two signs of life of the app
STALE = 60.0  # seconds without one after which a version belongs to an app that was deleted
T = TypeVar("T", bound=msgspec.Struct)
DECLARATIVE = "declarative"  # deployed from a config file
# Apps of one config file are written together, so one after the other. No app's memory has a name that begins so.
CLAIM = "//rollback"
CLAIM_SECONDS = 30.0


class GoodVersion(msgspec.Struct, frozen=True):
    """A version with which an app was whole, as it is deployed again.

    action: what it wants done when an update from it fails. config: the app's part of a Serve config file; None = it
    had none, and is built of `args` with `versions` of its deployments, in a process with `runtime_env`.
    """

    route_prefix: str | None
    action: str = ROLLBACK
    config: dict[str, Any] | None = None
    args: dict[str, Any] = {}
    versions: dict[str, str] = {}
    runtime_env: dict[str, Any] = {}

    def as_kept(self) -> GoodVersion:
        """Return it as it is read back: tuples are lists then."""
        return msgspec.json.decode(msgspec.json.encode(self), type=GoodVersion)


class Undone(msgspec.Struct, frozen=True):
    """An update that was undone: why, and at which second since the epoch. whole: whether the app was whole again."""

    reason: str
    at: float
    whole: bool = False


class Rollback:
    """A router's watch over its app: it remembers what was whole and deploys it again where a later version fails.

    An update replaces routers while its replicas still fail to start, so the router that undoes an update may be one
    of the failed version. Where several do, it is the same deed. Before the next time the app must have been whole
    again, so that two versions which both fail do not take turns for ever.

    notice: what became of the last update, if it failed. time_of_day: seconds since the epoch, which may jump; a
    router that knows the app goes by `clock`, which is monotonic.
    """

    def __init__(
        self,
        deployed: DeployedApp,
        memory: AppMemory,
        time_of_day: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.notice = ""
        self._deployed = deployed
        self._memory = memory
        self._time_of_day = time_of_day
        self._clock = clock
        self._belongs = False  # whether this router belongs to the version that is whole
        self._before = ("", 0.0)
        self._refreshed = -math.inf
        self._seen = 0.0  # what the memory said of it at our last look
        self._failures_seen = 0
        self._refused = 0

    def observe(self, state: AppState) -> None:
        """Take notice of what Serve says now, and act on it. Blocks for as long as Serve does not answer."""
        now = (state.status, state.deployed_at)
        if state.status == DELETING:
            self._memory.forget()
            self._refreshed = -math.inf
            return
        if state.status == RUNNING and now != self._before:
            self._is_whole()
        self._refresh()
        self._failures_seen = self._failures_seen + 1 if state.update_failed else 0
        if self._failures_seen >= CONFIRMED:
            self._has_failed(state)
        self._before = now

    def _is_whole(self) -> None:
        self._refused = 0
        version = self._deployed.version()
        self._belongs = version is not None
        if version is None:
            return
        undone = self._memory.undone
        if version.as_kept() != self._memory.good:
            self._memory.good, self._memory.undone = version, None
        elif undone is not None:
            self._memory.undone = msgspec.structs.replace(undone, whole=True)
        undone = self._memory.undone
        self.notice = "" if undone is None else _sentence(undone)

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._refreshed >= REFRESH and (self._belongs or self._is_fresh()):
            self._memory.seen, self._refreshed = self._time_of_day(), now

    def _is_fresh(self) -> bool:
        before, self._seen = self._seen, self._memory.seen
        known = self._clock() - self._refreshed < STALE
        written = 0.0 not in (before, self._seen) and before != self._seen  # since our last look, by whatever clock
        return known or written or abs(self._time_of_day() - self._seen) < STALE

    def _has_failed(self, state: AppState) -> None:
        good, undone = self._memory.good, self._memory.undone
        if good is None or good.action != ROLLBACK or not self._is_fresh():
            return
        if self._refused >= ATTEMPTS or (undone is not None and not undone.whole):
            return
        if self._restored(good):
            logger.error("the update failed and is rolled back: %s", state.failure)
            self._memory.undone = Undone(state.failure, self._time_of_day())
        else:
            self._refused += 1

    def _restored(self, good: GoodVersion) -> bool:
        try:
            return self._deployed.restore(good)
        except SquadronError as error:
            logger.error("the update failed, and the version before it cannot be built again: %s", error)
            return False


def _sentence(undone: Undone) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(undone.at))
    return f"an update failed and was rolled back at {at}: {undone.reason}"


class AppMemory:
    """The memory of the app `app`, read from and written to Ray's control store at each use.

    Raises one of `control_store.FAILURES` where that cannot be reached.
    """

    def __init__(self, app: str) -> None:
        # No app can have this name, which keeps records of starts (`app/deployment/...`) apart.
        self._prefix = f"/{app}/"

    @property
    def good(self) -> GoodVersion | None:
        """The last version with which the app was whole."""
        return self._get("good", GoodVersion)

    @good.setter
    def good(self, version: GoodVersion | None) -> None:
        self._put("good", version)

    @property
    def undone(self) -> Undone | None:
        """The last update that was undone, if no other version has been whole since."""
        return self._get("undone", Undone)

    @undone.setter
    def undone(self, undone: Undone | None) -> None:
        self._put("undone", undone)

    @property
    def seen(self) -> float:
        """Seconds since the epoch at which the app was known to be there; 0 = never."""
        value = control_store.get(self._prefix + "seen")
        return 0.0 if value is None else float(value)

    @seen.setter
    def seen(self, at: float) -> None:
        control_store.put(self._prefix + "seen", str(at).encode())

    def is_first(self, deployment: str, version: str, who: str) -> bool:
        """Return whether only `who` has asked this of the deployment in this version."""
        asked = f"{self._prefix}first/{deployment}/"
        first = control_store.create(asked + version, who.encode())
        for key in control_store.keys(asked):
            if first and key != (asked + version).encode():
                control_store.delete(key)
        return first

    def forget(self) -> None:
        """Forget all of it."""
        for key in control_store.keys(self._prefix):
            control_store.delete(key)

    def _get(self, name: str, kind: type[T]) -> T | None:
        value = control_store.get(self._prefix + name)
        return None if value is None else msgspec.json.decode(value, type=kind)

    def _put(self, name: str, record: msgspec.Struct | None) -> None:
        if record is None:
            control_store.delete(self._prefix + name)
        else:
            control_store.put(self._prefix + name, msgspec.json.encode(record))


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
        found = serve_details()["applications"].get(self.app)
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
            if not self._may_restore(details := serve_details()):
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


def serve_details() -> dict[str, Any]:
    """Return what Serve says of itself: its options, its proxies, its apps. It must run."""
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
