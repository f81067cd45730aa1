"""scikit-learn, for the data and the scores of Estimators."""

import pytest


@pytest.fixture(scope="session")
def scikit_learn():
    """It is imported by the process that runs the tests, not by all that collect them, and before `clean_slate` looks at the environment."""
    return pytest.importorskip("sklearn.metrics")
