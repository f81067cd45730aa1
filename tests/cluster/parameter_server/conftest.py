"""What the tests of parameter servers share."""

import pytest

import phalanx
from phalanx.coordinator import ClusterCoordinator
from phalanx.servers.ray import load_ray

# It changes the environment, which tests must not.
load_ray()


@pytest.fixture(scope="module")
def strategy():
    """Two workers and one server."""
    strategy = phalanx.ParameterServerStrategy(workers=2, ps=1)
    yield strategy
    strategy.close()


@pytest.fixture(scope="module")
def coordinator(strategy):
    """The strategy's."""
    return ClusterCoordinator(strategy)


@pytest.fixture
def calm(coordinator):
    """A coordinator that has nothing to do, and has nothing to say, before the test and after it."""
    assert coordinator.done()
    yield coordinator
    coordinator.join()
