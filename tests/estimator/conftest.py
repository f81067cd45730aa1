"""Imports what changes the environment, before a test looks at it, and waits for checkpoints."""

import threading

import pytest
import tensorboardX.event_file_writer  # noqa: F401


@pytest.fixture(autouse=True)
def written_checkpoints():
    """A training that ends with an error may still be writing a checkpoint."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("phalanx-checkpoint"):
            thread.join(30)
