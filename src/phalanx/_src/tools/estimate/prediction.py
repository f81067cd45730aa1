# SPDX-License-Identifier: Apache-2.0
"""The prediction for one topology."""

from dataclasses import asdict, dataclass
from typing import Any, final

from phalanx._src.tools.estimate.hlo import Collective
from phalanx._src.tools.estimate.roofline import Time
from phalanx._src.tools.estimate.step import Memory


@final
@dataclass(frozen=True)
class Estimate:
    """The prediction for one topology. It was predicted, not run.

    Args:
      topology: the name of the topology.
      num_devices: its number of devices.
      num_replicas: the number of replicas on them.
      num_processes: the number of hosts.
      rows_per_replica: rows of the batch of each replica. None if no argument is distributed.
      steps_per_program: the number of steps that one call runs.
      memory: bytes of one device.
      available: bytes that a device has. None for CPUs.
      flops: multiplications and additions of one device in a step.
      num_bytes: bytes that one device reads and writes in a step.
      collectives: the communication of one step.
      transfers: number of transfers between device and host in a step.
      time: the predicted time of a step. None for CPUs, which are measured instead, and if the step does not fit.
      compile_seconds: the time that the compiler took here.
      advice: what makes the step fit. Empty if it fits, or if nothing that was tried makes it fit.
    """

    topology: str
    num_devices: int
    num_replicas: int
    num_processes: int
    rows_per_replica: int | None
    steps_per_program: int
    memory: Memory
    available: int | None
    flops: float
    num_bytes: float
    collectives: tuple[Collective, ...]
    transfers: int
    time: Time | None
    compile_seconds: float
    advice: str = ""

    @property
    def fits(self) -> bool:
        """Whether the step fits into the memory of a device."""
        return self.available is None or self.memory.peak <= self.available

    @property
    def efficiency(self) -> float | None:
        """The speed per device, as a share of that of one device alone with as many rows."""
        return None if self.time is None else self.time.alone / self.time.step

    @property
    def communicated(self) -> int:
        """Bytes of the arrays that the devices exchange in a step."""
        return sum(c.num_bytes for c in self.collectives)

    def as_dict(self) -> dict[str, Any]:
        """Returns all figures, for JSON. Groups of devices are given by their size."""
        figures = asdict(self)
        # `asdict` keeps a NamedTuple, which JSON would write as a list without names.
        figures["memory"] = self.memory._asdict()
        figures["collectives"] = [
            {"kind": c.kind, "dtype": c.dtype, "bytes": c.num_bytes, "devices": len(c.group), "async": c.is_async}
            for c in self.collectives
        ]
        if self.time is not None:
            figures["time"] |= {"step": self.time.step, "bound": self.time.bound}
        return figures | {"fits": self.fits, "efficiency": self.efficiency}
