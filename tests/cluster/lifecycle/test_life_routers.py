"""Among how many routers the replicas are shared, by what Serve says of them."""

import time

import pytest

from cluster.lifecycle.app_status import AppState, DeploymentState
from cluster.lifecycle.app_watch import AppPicture
from cluster.router.app_body import OLD_SECONDS
from cluster.router.other_routers import OtherRouters

ROUTERS = OtherRouters("squadron", "Router")


def picture(age=0.0, deployment="Router", **counts):
    """What makes a picture when it is called: it is of its moment."""
    app = AppState("RUNNING", {deployment: DeploymentState("HEALTHY", counts)})
    return lambda: AppPicture(app, seen=time.monotonic() - age)


@pytest.mark.parametrize(
    ("seen", "sharing"),
    [
        (picture(RUNNING=3), 3),
        (picture(RUNNING=2, STARTING=1, STOPPING=1), 2),
        (picture(RUNNING=4), 4),  # in an update
        (picture(STARTING=3), 3),
        (picture(deployment="Replica", RUNNING=9), 3),
        (picture(age=OLD_SECONDS + 1, RUNNING=1), 3),
        (lambda: AppPicture(None, seen=time.monotonic()), 3),
        (lambda: None, 3),
    ],
    ids=["all", "one died", "more", "none yet", "not told", "long ago", "no app", "not looked yet"],
)
def test_those_that_serve_share_and_all_that_should_where_that_is_not_known(seen, sharing):
    assert ROUTERS.sharing(seen(), configured=3) == sharing
