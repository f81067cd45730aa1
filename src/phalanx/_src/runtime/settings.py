# SPDX-License-Identifier: Apache-2.0
"""Settings of this process, which reach code that no argument reaches. Uses the standard library only."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class ProcessSettings:
    """Settings of this process. All threads see them.

    Attributes:
      cpu_kernels: whether steps for CPUs use the kernels of Phalanx.
      logits_recovery: whether steps compute a cross-entropy from the logits of its probabilities.
      wraps_one_replica: whether the only replica of a strategy gets a `PerReplica`, too, so that its rows can be told from other arrays.
      emulates_tpus: whether a program that asks for a TPU system gets all CPU devices, as chips in a row.
      hollow_bytes: number of bytes from which a new variable gets no array, whatever it is assigned, and is read as zeros. None if every variable gets one.
      convert: function of an array that is sharded over the replicas. Programs are traced for its result. None for the array itself.
    """

    cpu_kernels: bool = True
    logits_recovery: bool = True
    wraps_one_replica: bool = False
    emulates_tpus: bool = False
    hollow_bytes: int | None = None
    convert: Callable[[Any], Any] | None = None

    @contextmanager
    def changed(self, **changes: object) -> Iterator[None]:
        """Returns a context in which some settings have other values, for a tool that measures or predicts steps."""
        before = {name: getattr(self, name) for name in changes}
        try:
            for name, value in changes.items():
                setattr(self, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)


settings = ProcessSettings()
