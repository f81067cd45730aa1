"""Clusters of worker processes. One of each size is started when the first test asks for it, and ends with the session."""

from contextlib import ExitStack

import pytest
from cluster import Cluster


class Clusters:
    """The clusters of the session; each is started when it is first asked for, and again when a test has ended it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._running: dict[tuple[int, int], Cluster] = {}

    def __call__(self, workers: int, devices: int) -> Cluster:
        """Returns a running cluster of so many workers with so many devices each."""
        cluster = self._running.get((workers, devices))
        if cluster is None or not cluster.is_alive:
            cluster = self._running[workers, devices] = self._stack.enter_context(Cluster(workers, devices))
            cluster.wait_until_ready()
        return cluster

    def logs(self) -> str:
        """What all workers have printed last."""
        return "\n".join(cluster.logs() for cluster in self._running.values())


@pytest.fixture(scope="session")
def cluster_of():
    """A function that returns a running cluster of so many workers with so many devices each."""
    with ExitStack() as stack:
        yield Clusters(stack)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Shows the logs of the workers with a failed test."""
    report = yield
    if report.failed and "cluster_of" in item.funcargs:
        report.sections.append(("workers", item.funcargs["cluster_of"].logs()))
    return report
