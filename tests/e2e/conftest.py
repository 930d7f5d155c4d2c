"""The Ray head that the tests of jobs, of the chart, of config files and of `squadron doctor` share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.ray_head import RayHead
from tests.helm.rendered import clusters, rendered
from tests.helm.tools import NoTools


@pytest.fixture(scope="session")
def head() -> Iterator[RayHead]:
    """A head with the variables that the chart gives to Ray's containers, but for folders of theirs."""
    with RayHead(**variables_of_the_chart()) as head:
        yield head


def variables_of_the_chart() -> dict[str, str]:
    """Return the variables of Ray's head, none where the chart cannot be rendered."""
    try:
        (cluster,) = clusters(rendered("laptop"))
    except NoTools:
        return {}
    (container,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    given = {one["name"]: one["value"] for one in container["env"]}
    return {name: value for name, value in given.items() if not value.startswith("/")}
