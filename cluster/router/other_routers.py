"""What Serve says of an app's routers: who serves while one starts, and among how many the replicas are shared."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cluster.lifecycle.app_status import app_state
from cluster.lifecycle.app_watch import AppPicture
from cluster.lifecycle.start_gate import UpdateFailedError
from cluster.router.app_body import fresh

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OtherRouters:
    """The routers of an app beside the one that asks. `deployment`: their name."""

    app: str
    deployment: str

    def count(self) -> int:
        """Return how many serve; 0 also where no replica is there or on its way, for which one could wait.

        Blocks. Raises `UpdateFailedError` when the replicas of the new version do not start.
        """
        try:
            state = app_state(self.app)
        except (RayError, RayServeException, ConnectionError) as error:
            logger.warning("Serve cannot be asked who else serves: %r", error)
            return 0
        if state is None:
            return 0
        replicas = [one for name, one in state.deployments.items() if name != self.deployment]
        for one in replicas:
            if one.update_failed:
                raise UpdateFailedError(f"the new version does not start: {one.reason}")
        routers = state.deployments.get(self.deployment)
        return routers.running if routers is not None and any(one.present for one in replicas) else 0

    def sharing(self, picture: AppPicture | None, configured: int) -> int:
        """Return how many routers serve by the latest picture, the one that asks among them.

        configured: what to return where the picture is old, or has none serve yet.
        """
        seen = fresh(picture, time.monotonic())
        app = None if seen is None else seen.app
        routers = None if app is None else app.deployments.get(self.deployment)
        return (0 if routers is None else routers.running) or configured
