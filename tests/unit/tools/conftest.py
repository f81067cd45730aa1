"""The launcher of the tests of `launch`: some commands start processes too."""

from tests.unit.launch.conftest import deadline, environment, launch, processes_left

__all__ = ["deadline", "environment", "launch", "processes_left"]
