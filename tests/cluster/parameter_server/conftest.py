"""One Ray for all tests of parameter servers, and strategies that they share."""

from pathlib import Path

import pytest
from processes import wait_until

import phalanx
from phalanx._src.parameter_server.processes.ray import load_ray
from phalanx.coordinator import ClusterCoordinator

# It changes the environment, which tests must not.
load_ray()

_MOST = 3
_FOLDER = Path(__file__).parent
_DIVIDED = ("test_checkpoints", "test_server_variables", "test_sharded_embedding")
_RARE = ("test_consistency", "test_estimator", "test_losses", "test_no_hangs")
"""Files whose strategies have divided variables, and files with strategies that few others use."""


def pytest_collection_modifyitems(items):
    """Files that share a strategy follow each other, so that it is not closed and started again."""
    places = [place for place, item in enumerate(items) if item.nodeid.startswith("tests/cluster/parameter_server/")]
    own = sorted(
        (items[place] for place in places), key=lambda item: (item.path.stem in _RARE) - (item.path.stem in _DIVIDED)
    )
    for place, item in zip(places, own, strict=True):
        items[place] = item


class SharedStrategies:
    """Strategies by their arguments, each started once. If there are too many, the one that was not used for longest is closed."""

    def __init__(self):
        self._open, self._used = {}, set()

    def __call__(self, **options):
        # No process is silent for so long on a busy machine.
        options = {"workers": 2, "ps": 1, "worker_timeout_s": 120.0, **options}
        key = tuple(sorted(options.items()))
        self._open[key] = self._open.pop(key, None) or phalanx.ParameterServerStrategy(**options)
        self._used.add(key)
        if len(self._open) > _MOST:
            self._open.pop(next(iter(self._open))).close()
        return self._open[key]

    def settle(self):
        """Waits for all steps and workers, as the next test needs them. A strategy with which a test has failed is given up."""
        used, self._used = self._used & self._open.keys(), set()
        for key in used:
            try:
                coordinator = ClusterCoordinator(self._open[key])
                coordinator.join()
                wait_until(lambda: coordinator.status().alive == coordinator.status().workers)  # noqa: B023
            except BaseException:
                self._open.pop(key).close()
                raise

    def close(self):
        while self._open:
            self._open.popitem()[1].close()


_strategies = SharedStrategies()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem):
    """No process outlives the last of these tests."""
    if nextitem is None or _FOLDER not in nextitem.path.parents:
        _strategies.close()


@pytest.fixture(scope="session")
def shared_strategies():
    _strategies()  # Before the first test, as Ray changes the environment when it starts.
    return _strategies


@pytest.fixture
def strategy_of(shared_strategies):
    """A function that returns the strategy of some arguments, which this test leaves as it was."""
    yield shared_strategies
    shared_strategies.settle()


@pytest.fixture
def strategy(strategy_of):
    return strategy_of()


@pytest.fixture
def coordinator(strategy):
    return ClusterCoordinator(strategy)
