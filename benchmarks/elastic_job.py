# SPDX-License-Identifier: Apache-2.0
"""The training that `elastic` and `elastic_peers` disturb, and that `slow_link` measures, as far as all libraries share it, and the file of its steps.

It needs only NumPy, because the scripts for other libraries run in environments of their own.
"""

import mmap
import os
import struct
import time
from pathlib import Path

import numpy as np

RECORD = struct.Struct("qqqd")
"""The record that a process writes after each step: worker, generation, number of steps and time, see `elastic.Done`."""
STEPS = 40
"""Steps per epoch."""
BATCH = 48
"""Rows of a global batch."""
WIDTHS = (784, 512, 512, 10)
"""Widths of the MLP. Its activation is tanh."""
LEARNING_RATE = 0.01
MOMENTUM = 0.9
WARM_UP = 5
"""Steps before the measurement of `slow_link`. The first one compiles."""


def rows() -> tuple[np.ndarray, np.ndarray]:
    """Returns the inputs and the labels of an epoch."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(STEPS * BATCH, WIDTHS[0])).astype("float32")
    return inputs, rng.integers(0, WIDTHS[-1], size=STEPS * BATCH)


class StepFile:
    """The file in which this process writes down its steps. Its name is the number of the process.

    Args:
      folder: where the file is.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / str(os.getpid())
        self.path.write_bytes(bytes(RECORD.size))
        with self.path.open("r+b") as file:
            self._file = mmap.mmap(file.fileno(), RECORD.size)

    def write(self, worker: int, generation: int, step: int) -> None:
        """Writes down that a step is finished now."""
        self._file[:] = RECORD.pack(worker, generation, step, time.monotonic())
