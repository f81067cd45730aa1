"""What the tests of parameter servers share."""

import pytest

from phalanx.servers.ray import load_ray

# It changes the environment, which tests must not.
load_ray()


@pytest.fixture
def calm(coordinator):
    """A coordinator that has nothing to do, and has nothing to say, before the test and after it."""
    assert coordinator.done()
    yield coordinator
    coordinator.join()
