# SPDX-License-Identifier: Apache-2.0
"""Predicts the time of a step from its operations, its bytes and the figures of a chip.

The model: a chip computes and reads memory at the same time, so the slower of the two decides. Collectives add the time that
they take alone, unless they run while the chip computes.

Source: Williams et al. 2009, "Roofline: An Insightful Visual Performance Model for Multicore Architectures".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from phalanx._src.tools.estimate.chips import LATENCY_S, Chip
from phalanx._src.tools.estimate.hlo import Collective
from phalanx._src.tools.estimate.targets import Target

# An all-reduce is a reduce-scatter and an all-gather, so it sends twice.
_VOLUME = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 0.5, "collective-permute": 1.0}
"""Bytes that a chip sends per byte of the whole array, in a large group."""


@dataclass(frozen=True)
class Time:
    """The predicted time of a step, in seconds.

    Args:
      compute: time of the multiplications and additions at the chip's highest rate.
      memory: time of the reads and writes of its memory.
      links: time of the collectives over the links of a slice or host.
      network: time of the collectives over the network between slices or hosts.
      hidden: the part of the collectives during which the chip computes.
    """

    compute: float
    memory: float
    links: float
    network: float
    hidden: float

    @property
    def alone(self) -> float:
        """The time of a step without communication."""
        return max(self.compute, self.memory)

    @property
    def step(self) -> float:
        """The time of a step."""
        return self.alone + self.links + self.network - self.hidden

    @property
    def bound(self) -> str:
        """The part that takes most of the step."""
        exposed = self.links + self.network - self.hidden
        if exposed > self.alone:
            return "network" if self.network > self.links else "links"
        return "compute" if self.compute >= self.memory else "memory"


def predict(
    target: Target, devices: Sequence[jax.Device], flops: float, num_bytes: float, collectives: Sequence[Collective]
) -> Time:
    """Returns the time of a step whose program each of `devices` runs."""
    chip = target.chip
    assert chip is not None
    sums = {True: 0.0, False: 0.0}
    parallel = 0.0
    for collective in collectives:
        is_far = collective.is_between_slices or _is_far(chip, [devices[i] for i in collective.group])
        seconds = _seconds(target, chip, collective, is_far=is_far)
        sums[is_far] += seconds
        parallel += seconds if collective.is_async else 0.0
    compute, memory = flops / chip.flops, num_bytes / chip.memory_bandwidth
    # No more can be hidden than there is to compute.
    return Time(compute, memory, sums[False], sums[True], min(parallel, max(compute, memory)))


def _is_far(chip: Chip, group: Sequence[jax.Device]) -> bool:
    """Returns whether devices are in several slices, or GPUs in several hosts."""
    where = "slice_index" if chip.dims else "process_index"
    return len({getattr(d, where, None) for d in group}) > 1


def _seconds(target: Target, chip: Chip, collective: Collective, *, is_far: bool) -> float:
    count = len(collective.group) or target.slices  # A collective between slices lists no devices.
    if count < 2:
        return 0.0
    sent = _VOLUME.get(collective.kind, 1.0) * collective.num_bytes * (count - 1) / count
    if is_far:
        # All chips of a host send at the same time. The arrays of slices are already divided over their chips.
        share = 1 if chip.dims else min(count, chip.per_host)
        return sent / (chip.network * share) + LATENCY_S[chip.platform] * 2 * math.log2(count)
    if not chip.dims:
        return sent / chip.link + LATENCY_S[chip.platform] * math.log2(count)
    dims = [n for n in target.sizes if n > 1]
    rings = all(n % chip.longest == 0 for n in dims)
    return sent / (len(dims) * chip.link * (1.0 if rings else 0.5)) + LATENCY_S[chip.platform] * sum(dims)
