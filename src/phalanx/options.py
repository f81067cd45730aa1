# SPDX-License-Identifier: Apache-2.0
"""Enums and frozen, self-validating options. Standard library only."""

import enum
from dataclasses import dataclass, fields, replace
from typing import Self

from phalanx.errors import InvalidArgumentError, ReduceOpError


class ReduceOp(enum.Enum):
    """How values of several replicas become one. May be used in any context.

    Example:
      >>> ReduceOp.parse("mean")
      <ReduceOp.MEAN: 'MEAN'>
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def parse(cls, op: "ReduceOp | str") -> "ReduceOp":
        """Returns the member that `op` names, in either case of letters.

        Raises:
          ReduceOpError: `op` is neither a member nor the name of one.
        """
        if isinstance(op, cls):
            return op
        if isinstance(op, str) and op.upper() in cls.__members__:
            return cls[op.upper()]
        raise ReduceOpError(f"reduce_op={op!r}", "not a ReduceOp; the operations are SUM and MEAN.", "ReduceOp.SUM")


class CommunicationImplementation(enum.Enum):
    """Which collectives a cluster uses; AUTO chooses by hardware. May be used in any context."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"

    @classmethod
    def parse(cls, value: "CommunicationImplementation | str") -> "CommunicationImplementation":
        """Returns the member that `value` names, in either case of letters.

        Raises:
          InvalidArgumentError: `value` is neither a member nor the name of one.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        raise InvalidArgumentError(
            f"implementation={value!r}", "not a CommunicationImplementation.", "CommunicationImplementation.AUTO"
        )


@dataclass(frozen=True)
class CommunicationOptions:
    """Hints for collectives; they change speed, never results. May be used in any context.

    Args:
      bytes_per_pack: gradients are concatenated into buffers that are closed once they exceed this many bytes;
        0 leaves the choice to the strategy (one buffer between processes, none between the devices of one process).
      timeout_seconds: how long a collective between processes may wait for the others, in seconds. Strategies of one
        machine have one process.
      implementation: which collectives to use between processes; likewise.

    Raises:
      InvalidArgumentError: a negative size or time, or an unknown implementation.

    Example:
      >>> CommunicationOptions(bytes_per_pack=1 << 20, implementation="ring").implementation
      <CommunicationImplementation.RING: 'RING'>
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        if self.bytes_per_pack < 0:
            raise InvalidArgumentError(
                f"bytes_per_pack={self.bytes_per_pack}", "must be 0 or more.", "bytes_per_pack=1 << 20"
            )
        if self.timeout_seconds is not None and self.timeout_seconds <= 0:
            raise InvalidArgumentError(
                f"timeout_seconds={self.timeout_seconds}", "must be more than 0 seconds, or None.", "timeout_seconds=60"
            )
        object.__setattr__(self, "implementation", CommunicationImplementation.parse(self.implementation))

    def merge(self, other: Self | None) -> "CommunicationOptions":
        """Returns these options with every field that `other` sets to something else than the default."""
        if other is None:
            return self
        changed = {f.name: v for f in fields(self) if (v := getattr(other, f.name)) != f.default}
        return replace(self, **changed)


@dataclass(frozen=True)
class RunOptions:
    """How `Strategy.run` executes a replica function. May be used in any context.

    Args:
      eager: run the Python code of the replica function at every call, without compiling it, so that `print` shows
        the values of all replicas and a debugger stops at them. It is traced first, without values. A value that differs
        between replicas has no `float` here either. Slow; the results are those of the compiled program.

    Example:
      >>> RunOptions(eager=True)
      RunOptions(eager=True)
    """

    eager: bool = False
