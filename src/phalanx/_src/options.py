# SPDX-License-Identifier: Apache-2.0
"""Enums and frozen, self-validating options. Uses the standard library only."""

import enum
from dataclasses import dataclass, field, fields, replace
from typing import Self, TypeVar

from phalanx.errors import InvalidArgumentError, ReduceOpError, arguments, listed, shown

_Member = TypeVar("_Member", bound=enum.Enum)


def _member(members: type[_Member], value: object) -> _Member | None:
    """Returns the member that a value is or names, ignoring case. None if there is none."""
    if isinstance(value, members):
        return value
    return members.__members__.get(value.upper()) if isinstance(value, str) else None


class ReduceOp(enum.Enum):
    """Operation that reduces the values of several replicas to one. May be used in any context.

    Example:
      >>> ReduceOp.parse("mean")
      <ReduceOp.MEAN: 'MEAN'>
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def parse(cls, op: "ReduceOp | str") -> "ReduceOp":
        """Returns the member that `op` names, ignoring case. Also accepts a `tf.distribute.ReduceOp`.

        Raises:
          ReduceOpError: `op` is neither a member nor the name of one.
        """
        # By the name of the module, because TensorFlow need not be installed.
        if isinstance(op, enum.Enum) and type(op).__module__.startswith("tensorflow."):
            op = op.name
        if (member := _member(cls, op)) is not None:
            return member
        raise ReduceOpError(
            f"reduce_op={shown(op)}", "is not a ReduceOp. The operations are SUM and MEAN.", '"SUM" or "MEAN"'
        )


class CommunicationImplementation(enum.Enum):
    """Collectives that a cluster uses. AUTO chooses by hardware. May be used in any context."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"

    @classmethod
    def parse(cls, value: "CommunicationImplementation | str") -> "CommunicationImplementation":
        """Returns the member that `value` names, ignoring case.

        Raises:
          InvalidArgumentError: `value` is neither a member nor the name of one.
        """
        if (member := _member(cls, value)) is not None:
            return member
        raise InvalidArgumentError(
            f"implementation={shown(value)}",
            "is not a CommunicationImplementation.",
            "CommunicationImplementation.AUTO",
        )


@dataclass(frozen=True)
class PowerSGD:
    """Compression of gradients: each matrix is sent as the product of two narrow ones. May be created in any context.

    A gradient with m x n elements costs `rank * (m + n)`. Vectors, and gradients that this would not shorten, are sent uncompressed.

    Args:
      rank: the number of columns of the narrow matrices.
      start_step: number of steps of the optimizer during which gradients are sent uncompressed, because they change most then.

    Raises:
      InvalidArgumentError: `rank` is not a positive integer, or `start_step` is negative.

    Source: Vogels et al. 2019, https://arxiv.org/abs/1905.13727.

    Example:
      >>> CommunicationOptions(compression=PowerSGD(rank=4)).compression.rank
      4
    """

    rank: int = 2
    start_step: int = 0

    def __post_init__(self) -> None:
        arguments.integer("rank", self.rank, least=1, hint="rank=2")
        arguments.integer("start_step", self.start_step, least=0, hint="start_step=100")


@dataclass(frozen=True)
class TopK:
    """Compression of gradients: each replica sends its elements with the largest magnitudes. May be created in any context.

    An element costs 8 bytes, because its place is sent too, and each replica receives those of all others.

    Args:
      fraction: the share of the elements of all compressed gradients, between 0 and 1.

    Raises:
      InvalidArgumentError: `fraction` is not such a number.

    Source: Aji and Heafield 2017, https://arxiv.org/abs/1704.05021.

    Example:
      >>> CommunicationOptions(compression=TopK(0.05)).compression.fraction
      0.05
    """

    fraction: float = 0.01

    def __post_init__(self) -> None:
        number = self.fraction
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < 1:
            raise InvalidArgumentError(
                f"fraction={shown(number)}", "must be a number between 0 and 1.", "fraction=0.01"
            )


@dataclass(frozen=True)
class CommunicationOptions:
    """Options for collectives. Only `wire_dtype` and `compression` affect results; the others affect speed. May be used in any context.

    Args:
      bytes_per_pack: size at which a buffer of concatenated gradients is closed, in bytes. A buffer holds at most 64
        gradients. With 0 the strategy decides: between processes it uses as few buffers as possible, and between the
        devices of one process it packs small gradients only.
      timeout_seconds: time that a process waits for the others, in seconds: at the start, and in a step in which no
        process makes progress. Strategies for one machine ignore it, because they have one process.
      implementation: collectives to use between processes. Strategies for one machine ignore it.
      wire_dtype: None or "bfloat16". With "bfloat16", wider floats are rounded before they are sent, added in their own
        dtype, and the sum is rounded again. This halves the bytes of float32, but within one machine the rounding costs
        more than it saves. All replicas get the same result. Its error is below 1% of the sum of the magnitudes.
        Algorithms that copy between devices (`HierarchicalCopyAllReduce`, `ReductionToOneDevice`) ignore it.
      compression: how the gradients that an optimizer applies are sent: None, "bfloat16", "int8" (a scale for 256 elements), `PowerSGD`
        or `TopK`. Gradients with fewer than 1,024 elements, and integer gradients, are sent uncompressed.
      error_feedback: whether what a replica has not sent of a gradient is added to its next one. It takes the memory of one more
        gradient, which checkpoints save.

    Raises:
      InvalidArgumentError: a size or time is negative, or an implementation, dtype or compression is unknown.

    Example:
      >>> CommunicationOptions(bytes_per_pack=1 << 20, implementation="ring").implementation
      <CommunicationImplementation.RING: 'RING'>
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO
    wire_dtype: str | None = None
    compression: str | PowerSGD | TopK | None = None
    error_feedback: bool = True

    def __post_init__(self) -> None:
        choices = ("bfloat16", "int8")
        # Only a string is looked up: `in` compares with `==`, and the result is not a bool for an array.
        is_known = isinstance(self.compression, (PowerSGD, TopK)) or (
            isinstance(self.compression, str) and self.compression in choices
        )
        if self.compression is not None and not is_known:
            raise InvalidArgumentError(
                f"compression={shown(self.compression)}",
                f"must be {listed(choices)}, a PowerSGD, a TopK or None.",
                "compression=PowerSGD(rank=2)" if _names_powersgd(self.compression) else 'compression="int8"',
            )
        arguments.instance("error_feedback", self.error_feedback, bool, "error_feedback=False")
        size = arguments.integer("bytes_per_pack", self.bytes_per_pack, least=0, hint="bytes_per_pack=1 << 20")
        # The class is frozen. `size` is an int even if the argument is a NumPy integer.
        object.__setattr__(self, "bytes_per_pack", size)
        arguments.seconds("timeout_seconds", self.timeout_seconds)
        if not (self.wire_dtype is None or (isinstance(self.wire_dtype, str) and self.wire_dtype == "bfloat16")):
            raise InvalidArgumentError(
                f"wire_dtype={shown(self.wire_dtype)}", 'must be "bfloat16" or None.', 'wire_dtype="bfloat16"'
            )
        object.__setattr__(self, "implementation", CommunicationImplementation.parse(self.implementation))

    def merge(self, other: Self | None) -> "CommunicationOptions":
        """Returns a copy of these options, updated with every field of `other` that is not the default.

        Raises:
          InvalidArgumentError: `other` is neither CommunicationOptions nor None.
        """
        if other is None:
            return self
        arguments.instance("other", other, CommunicationOptions, "options.merge(CommunicationOptions(...))")
        # A field that was set to its default cannot be told from one that was not set.
        changed = {f.name: v for f in fields(self) if (v := getattr(other, f.name)) != f.default}
        return replace(self, **changed)


def _names_powersgd(value: object) -> bool:
    # A user may pass the class, or its name, instead of an instance.
    return isinstance(value, (str, type)) and "powersgd" in f"{value}".lower()


@dataclass(frozen=True)
class XLAOptions:
    """XLA options of a `RunOptions`. May be created in any context.

    They exist for code written for TensorFlow and have no effect. XLA partitions every program, with the partitioner that
    JAX chooses, and all shapes are static.

    Args:
      use_spmd_for_xla_partitioning: must be True.
      enable_xla_dynamic_padder: must be True. No program has dynamic shapes to pad.
      use_shardy_partitioner: accepted and ignored. JAX decides whether to use Shardy.

    Raises:
      InvalidArgumentError: an argument has another value.

    Source: tf.tpu.XLAOptions.

    Example:
      >>> XLAOptions(use_shardy_partitioner=True).use_spmd_for_xla_partitioning
      True
    """

    use_spmd_for_xla_partitioning: bool = True
    enable_xla_dynamic_padder: bool = True
    use_shardy_partitioner: bool = False

    def __post_init__(self) -> None:
        arguments.flag("use_shardy_partitioner", self.use_shardy_partitioner)
        for name in ("use_spmd_for_xla_partitioning", "enable_xla_dynamic_padder"):
            if not arguments.flag(name, getattr(self, name)):
                raise InvalidArgumentError(
                    f"{name}=False", "every program has static shapes and is partitioned by XLA.", f"{name}=True"
                )


@dataclass(frozen=True)
class RunOptions:
    """Options of `Strategy.run`. May be created in any context.

    Args:
      experimental_enable_dynamic_batch_size: bool, accepted for code written for TensorFlow and ignored. A batch of
        another size has its own program.
      experimental_bucketizing_dynamic_shape: must be False, because shapes are static.
      experimental_xla_options: an `XLAOptions` or None.
      eager: whether to run the Python code of the replica function at every call, without compiling it. `print` then shows
        the values of all replicas, and a debugger can inspect them. The function is traced once first, without values. Even
        here, `float()` of a per-replica value is an error. Slow, but equal to the compiled program, except for padded short batches.

    Raises:
      InvalidArgumentError: a field has the wrong type, or `experimental_bucketizing_dynamic_shape` is True.

    Source: tf.distribute.RunOptions.

    Example:
      >>> RunOptions(eager=True)
      RunOptions(eager=True)
    """

    # These three fields change nothing, so `repr` does not show them.
    experimental_enable_dynamic_batch_size: bool = field(default=True, repr=False)
    experimental_bucketizing_dynamic_shape: bool = field(default=False, repr=False)
    experimental_xla_options: XLAOptions | None = field(default=None, repr=False)
    eager: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        arguments.flag("eager", self.eager)
        arguments.flag("experimental_enable_dynamic_batch_size", self.experimental_enable_dynamic_batch_size)
        # True is refused below, so the hint is the other value.
        if arguments.flag(
            "experimental_bucketizing_dynamic_shape", self.experimental_bucketizing_dynamic_shape, hint=False
        ):
            raise InvalidArgumentError(
                "experimental_bucketizing_dynamic_shape=True",
                "the shapes in a program are static.",
                "keras.utils.pad_sequences(x, maxlen=...), with a few lengths",
            )
        if self.experimental_xla_options is not None:
            arguments.instance(
                "experimental_xla_options", self.experimental_xla_options, XLAOptions, "phalanx.tpu.XLAOptions()"
            )


class VariableAggregation(enum.StrEnum):
    """Aggregation of the values that replicas assign to a variable. May be used in any context.

    Source: tf.VariableAggregation. The members equal the strings that Keras uses.

    Example:
      >>> import keras
      >>> keras.Variable(1.0, aggregation=VariableAggregation.SUM).aggregation == "sum"
      True
    """

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "only_first_replica"


class VariableSynchronization(enum.StrEnum):
    """Time at which the values that replicas assign to a variable are aggregated. May be used in any context.

    Source: tf.VariableSynchronization. The members equal the strings that Keras uses.

    Example:
      >>> VariableSynchronization("on_read")
      <VariableSynchronization.ON_READ: 'on_read'>
    """

    AUTO = "auto"
    NONE = "none"
    ON_WRITE = "on_write"
    ON_READ = "on_read"


class AutoShardPolicy(enum.IntEnum):
    """Policy that divides the rows of a dataset between workers. May be used in any context.

    OFF: every worker reads everything. AUTO: FILE if the dataset has at least as many files as workers, otherwise DATA.
    FILE: worker w of W reads the files w, w + W, ... DATA: every worker takes its rows of every global batch.
    HINT: the dataset shards itself in its method `shard(num_workers, worker)`.

    Source: tf.data.experimental.AutoShardPolicy.

    Example:
      >>> AutoShardPolicy["FILE"]
      <AutoShardPolicy.FILE: 1>
    """

    # The numbers are those of tf.data.experimental.AutoShardPolicy.
    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


class InputReplicationMode(enum.Enum):
    """Number of calls of a dataset function: one per worker or one per replica. May be used in any context.

    Source: tf.distribute.InputReplicationMode.

    Example:
      >>> InputReplicationMode.PER_REPLICA
      <InputReplicationMode.PER_REPLICA: 'PER_REPLICA'>
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclass(frozen=True)
class InputOptions:
    """Options for reading a distributed dataset. May be used in any context.

    Args:
      experimental_fetch_to_device: whether to put batches on the replicas' devices ahead of time. If False, they stay NumPy
        arrays until a step uses them. None means True, unless the dataset itself is on the devices.
      experimental_replication_mode: whether `distribute_datasets_from_function` calls its function once per worker or once
        per replica.
      experimental_place_dataset_on_device: whether to call the function and read its dataset with the replica's device as
        JAX's default device. Requires PER_REPLICA.
      experimental_per_replica_buffer_size: number of batches that a background thread reads ahead. With 0, each batch is
        read on demand.
      auto_shard_policy: policy that divides rows between workers.

    Raises:
      InvalidArgumentError: the options contradict each other.

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
        if self.experimental_fetch_to_device is not None:
            arguments.flag("experimental_fetch_to_device", self.experimental_fetch_to_device)
        arguments.flag("experimental_place_dataset_on_device", self.experimental_place_dataset_on_device, hint=False)
        name, size = "experimental_per_replica_buffer_size", self.experimental_per_replica_buffer_size
        arguments.integer(name, size, least=0, kind="a number of batches, 0 or more", hint="1")
        mode = self.experimental_replication_mode
        if not isinstance(mode, InputReplicationMode):
            raise InvalidArgumentError(
                f"experimental_replication_mode={shown(mode)}",
                "must be an InputReplicationMode.",
                "phalanx.InputReplicationMode.PER_REPLICA",
            )
        if not isinstance(self.auto_shard_policy, AutoShardPolicy):
            raise InvalidArgumentError(
                f"auto_shard_policy={shown(self.auto_shard_policy)}",
                "must be an AutoShardPolicy.",
                "phalanx.data.AutoShardPolicy.DATA",
            )
        if not self.experimental_place_dataset_on_device:
            return
        if mode is InputReplicationMode.PER_WORKER:
            raise InvalidArgumentError(
                "experimental_place_dataset_on_device=True",
                "a dataset on a device belongs to one replica, but the function is called once per worker.",
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


@dataclass(frozen=True)
class ElasticOptions:
    """Options of `MultiWorkerMirroredStrategy(elastic=...)`: how a training run survives the loss of a process.

    They apply only in the processes of `phalanx run --workers 2:4`. May be created in any context.

    Args:
      donate: whether a step may consume the old values of the variables, which saves memory. If not, no step is lost: the other
        processes repeat only the step that failed, unless a layout shards variables over the processes.
      copy_every: number of steps between two copies of the variables in host memory. None chooses it so that copies take 1% of the time.
      scale_batch: whether each process keeps its number of rows when others leave. The global batches of the dataset are then those of a
        group with all processes, and with n of N each step takes n / N of their rows: steps are as long as before, and an epoch has
        more of them. If not, the global batch keeps its size.

    Raises:
      InvalidArgumentError: `donate` or `scale_batch` is not a bool, or `copy_every` is not a positive integer.

    Example:
      >>> import phalanx
      >>> phalanx.elastic.ElasticOptions(donate=False).donate
      False
    """

    donate: bool = True
    copy_every: int | None = None
    scale_batch: bool = False

    def __post_init__(self) -> None:
        arguments.flag("donate", self.donate)
        arguments.flag("scale_batch", self.scale_batch)
        if self.copy_every is not None:
            arguments.integer("copy_every", self.copy_every, hint="copy_every=100")
