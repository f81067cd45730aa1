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
    """Hints for collectives; all but `wire_dtype` change speed, never results. May be used in any context.

    Args:
      bytes_per_pack: gradients are concatenated into buffers that are closed once they hold this many bytes, or 64
        gradients; 0 leaves the choice to the strategy: as few buffers as that between processes, and buffers for small
        gradients only between the devices of one.
      timeout_seconds: how long a process waits for the others, in seconds: at the start, and in a step in which none of them
        gets any further. Strategies of one machine have one process.
      implementation: which collectives to use between processes; likewise.
      wire_dtype: None, or "bfloat16": wider floats are rounded to it before they are sent, added in their own dtype, and
        the sum is rounded once more. It sends half the bytes of float32; within one machine the rounding costs more than
        that saves. The result is equal on all replicas, and its error below 1% of the sum of the magnitudes. The algorithms
        that copy from device to device (`HierarchicalCopyAllReduce`, `ReductionToOneDevice`) send what they are given.

    Raises:
      InvalidArgumentError: a negative size or time, or an unknown implementation or dtype.

    Example:
      >>> CommunicationOptions(bytes_per_pack=1 << 20, implementation="ring").implementation
      <CommunicationImplementation.RING: 'RING'>
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO
    wire_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.bytes_per_pack < 0:
            raise InvalidArgumentError(
                f"bytes_per_pack={self.bytes_per_pack}", "must be 0 or more.", "bytes_per_pack=1 << 20"
            )
        if self.timeout_seconds is not None and self.timeout_seconds <= 0:
            raise InvalidArgumentError(
                f"timeout_seconds={self.timeout_seconds}", "must be more than 0 seconds, or None.", "timeout_seconds=60"
            )
        if self.wire_dtype not in (None, "bfloat16"):
            raise InvalidArgumentError(
                f"wire_dtype={self.wire_dtype!r}", 'must be "bfloat16" or None.', 'wire_dtype="bfloat16"'
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


class AutoShardPolicy(enum.IntEnum):
    """How the rows of a dataset are divided between workers. May be used in any context.

    OFF: every worker reads everything. AUTO: FILE for a dataset of at least as many files as workers, else DATA.
    FILE: worker w of W reads the files w, w + W, ... DATA: every worker takes its rows of every global batch.
    HINT: the dataset shards itself: its method `shard(num_workers, worker)` is called.

    Source: tf.data.experimental.AutoShardPolicy.

    Example:
      >>> AutoShardPolicy["FILE"]
      <AutoShardPolicy.FILE: 1>
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


class InputReplicationMode(enum.Enum):
    """For what a dataset function is called once. May be used in any context.

    Source: tf.distribute.InputReplicationMode.

    Example:
      >>> InputReplicationMode.PER_REPLICA
      <InputReplicationMode.PER_REPLICA: 'PER_REPLICA'>
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclass(frozen=True)
class InputOptions:
    """How a distributed dataset is read. May be used in any context.

    Args:
      experimental_fetch_to_device: whether batches are put on the replicas' devices ahead of time; else they stay NumPy
        arrays until a step uses them. None means yes, unless the dataset itself is on the devices.
      experimental_replication_mode: whether `distribute_datasets_from_function` calls its function once for each worker,
        or for each replica.
      experimental_place_dataset_on_device: with PER_REPLICA: call the function, and read its dataset, with the replica's
        device as JAX's default device.
      experimental_per_replica_buffer_size: how many batches are read ahead by a background thread; 0 reads each batch
        when it is asked for.
      auto_shard_policy: how rows are divided between workers.

    Raises:
      InvalidArgumentError: a combination that no dataset could honour.

    Source: tf.distribute.InputOptions; the policy is an option of the dataset there.

    Example:
      >>> InputOptions(experimental_per_replica_buffer_size=2).fetches_to_device
      True
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1
    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO

    def __post_init__(self) -> None:
        size = self.experimental_per_replica_buffer_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise InvalidArgumentError(
                f"experimental_per_replica_buffer_size={size!r}", "must be a number of batches, 0 or more.", "1"
            )
        mode = self.experimental_replication_mode
        if not isinstance(mode, InputReplicationMode):
            raise InvalidArgumentError(
                f"experimental_replication_mode={mode!r}",
                "must be an InputReplicationMode.",
                "phalanx.InputReplicationMode.PER_REPLICA",
            )
        if not isinstance(self.auto_shard_policy, AutoShardPolicy):
            raise InvalidArgumentError(
                f"auto_shard_policy={self.auto_shard_policy!r}",
                "must be an AutoShardPolicy.",
                "phalanx.data.AutoShardPolicy.DATA",
            )
        if not self.experimental_place_dataset_on_device:
            return
        if mode is InputReplicationMode.PER_WORKER:
            raise InvalidArgumentError(
                "experimental_place_dataset_on_device=True",
                "a dataset on a device is one replica's, and the function is called once for all replicas.",
                "experimental_replication_mode=phalanx.InputReplicationMode.PER_REPLICA",
            )
        if self.experimental_fetch_to_device:
            raise InvalidArgumentError(
                "experimental_place_dataset_on_device=True with experimental_fetch_to_device=True",
                "a dataset on the device has nothing to fetch.",
                "experimental_fetch_to_device=False",
            )

    @property
    def fetches_to_device(self) -> bool:
        """Whether batches are put on the devices ahead of time."""
        return self.experimental_fetch_to_device is not False
