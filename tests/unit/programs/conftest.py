"""The strategy of most tests of this room."""

import pytest

import phalanx


@pytest.fixture
def strategy():
    return phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
