"""A strategy for the tests of input."""

import pytest
from simulation import mirrored


@pytest.fixture
def strategy():
    return mirrored(2)
