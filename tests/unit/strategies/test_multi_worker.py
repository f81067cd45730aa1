"""`MultiWorkerMirroredStrategy` in one process."""

import pytest

import phalanx


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_stall_timeout_must_be_positive(seconds):
    """It is a time."""
    with pytest.raises(phalanx.errors.InvalidArgumentError, match=r"must be more than 0 seconds, or None"):
        phalanx.MultiWorkerMirroredStrategy(stall_timeout_s=seconds)
