"""A strategy for the tests of input."""

import pytest
from simulation import mirrored


@pytest.fixture
def strategy():
    """Two replicas."""
    return mirrored(2)
