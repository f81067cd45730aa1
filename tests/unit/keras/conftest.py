"""Most tests of `fit` take a strategy of two replicas."""

import pytest
from twins import replicas


@pytest.fixture
def strategy():
    return replicas(2)
