# SPDX-License-Identifier: Apache-2.0
"""How gradients cross devices: the `CrossDeviceOps` family.

All of them run inside a program, on this replica's own arrays; one program serves all replicas, so a step of an algorithm
is a `lax.ppermute` (a copy from device to device) or a `lax.psum` (an all-reduce).
"""

from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from typing_extensions import override

from phalanx.collectives import packing
from phalanx.collectives.primitives import only_on, packed, sums, to_array
from phalanx.errors import ContextError, InvalidArgumentError
from phalanx.options import CommunicationOptions, ReduceOp
from phalanx.topology import REPLICA_AXIS, device_name, parse_device
from phalanx.values import PerReplica, ReplicaLocal

Pair = tuple[Any, Any]


class CrossDeviceOps:
    """Reduces and broadcasts values between the replicas of a running program.

    For an algorithm of your own, override `reduce_implementation` (and `batch_reduce_implementation`, where it pays to see
    all gradients at once). The hooks get this replica's own array and return what every replica must hold; the collectives
    of `jax.lax` work in them over the axis `phalanx.REPLICA_AXIS`.

    May be called inside `merge_call`; `Strategy.extended.reduce_to` does that for you elsewhere.

    Example:
      >>> import jax, phalanx
      >>> class Half(phalanx.CrossDeviceOps):
      ...     def reduce_implementation(self, reduce_op, value, destinations, options):
      ...         return jax.lax.psum(value.astype("float16"), phalanx.REPLICA_AXIS).astype(value.dtype)
      >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=Half())
    """

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduces one value over the replicas.

        Args:
          reduce_op: SUM or MEAN.
          per_replica_value: what a replica holds: an argument of a merge function, or an array.
          destinations: a value or variable that lives where the result is wanted; every replica of the program gets it.
          options: hints for this call.

        Raises:
          InvalidArgumentError: no destinations.
          ContextError: called on a `PerReplica` outside a program.
        """
        return self.batch_reduce(reduce_op, [(per_replica_value, destinations)], options)[0]

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[Pair],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduces several values over the replicas, which lets them share buffers. See `reduce`."""
        op = ReduceOp.parse(reduce_op)
        pairs = [_checked(pair) for pair in value_destination_pairs]
        return self.batch_reduce_implementation(op, pairs, options or CommunicationOptions())

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Gives every replica the first replica's value. See `reduce`."""
        value, destinations = _checked((tensor, destinations))
        return self.broadcast_implementation(value, destinations)

    def for_devices(self, devices: Sequence[jax.Device]) -> "CrossDeviceOps":
        """Returns the operations for a strategy over `devices`; a strategy calls it when it is made.

        Raises:
          InvalidArgumentError: these operations name a device that is not one of them.
        """
        return self

    def reduce_implementation(
        self, reduce_op: ReduceOp, value: jax.Array, destinations: Any, options: CommunicationOptions
    ) -> jax.Array:
        """The algorithm for one array; returns what every replica must hold."""
        raise NotImplementedError(f"{type(self).__name__} must override reduce_implementation")

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, pairs: Sequence[Pair], options: CommunicationOptions
    ) -> list[jax.Array]:
        """The algorithm for several arrays; one after the other unless overridden."""
        return [self.reduce_implementation(reduce_op, value, to, options) for value, to in pairs]

    def broadcast_implementation(self, value: jax.Array, destinations: Any) -> jax.Array:
        """The algorithm for a broadcast; an all-reduce of zeros and the first replica's value unless overridden."""
        return lax.psum(only_on(0, value), REPLICA_AXIS)


# Between the devices of one process an array costs 10 to 15 us beside its bytes, and a copy of a large one costs more.
_SMALL_BYTES = 32 << 10


class _Packed(CrossDeviceOps):
    """Sums in shared buffers; subclasses say how one buffer is summed."""

    def __init__(self, num_packs: int | None = 1) -> None:
        if num_packs is not None and num_packs < 0:
            raise InvalidArgumentError(f"num_packs={num_packs}", "must be 0 (no packing) or more.", "num_packs=1")
        self.num_packs = num_packs

    def _sum(self, buffers: list[jax.Array], options: CommunicationOptions) -> list[jax.Array]:
        raise NotImplementedError

    @override
    def reduce_implementation(
        self, reduce_op: ReduceOp, value: jax.Array, destinations: Any, options: CommunicationOptions
    ) -> jax.Array:
        return self.batch_reduce_implementation(reduce_op, [(value, destinations)], options)[0]

    @override
    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, pairs: Sequence[Pair], options: CommunicationOptions
    ) -> list[jax.Array]:
        values = [value for value, _ in pairs]
        packs = packing.no_longer_than(packing.ARRAYS_IN_A_MESSAGE, self._packs(values, options))
        return mean_or_sum(reduce_op, packed(lambda buffers: self._sum(buffers, options), values, packs))

    def _packs(self, values: list[jax.Array], options: CommunicationOptions) -> list[list[int]]:
        dtypes, sizes = [str(v.dtype) for v in values], [v.nbytes for v in values]
        if options.bytes_per_pack:
            return packing.by_bytes(dtypes, sizes, options.bytes_per_pack)
        if self.num_packs is None:
            return packing.small_together(dtypes, sizes, _SMALL_BYTES)
        return packing.by_count(dtypes, sizes, self.num_packs)


@final
class NcclAllReduce(_Packed):
    """All-reduces of XLA (NCCL on NVIDIA GPUs), over `num_packs` buffers.

    Where there is no NCCL the same program uses what the hardware has.

    Args:
      num_packs: into how many buffers the gradients of one dtype are concatenated, into more where one would hold over 64;
        0 does not concatenate, None only gradients of at most 32 KiB.

    Raises:
      InvalidArgumentError: `num_packs` is negative.
    """

    @override
    def _sum(self, buffers: list[jax.Array], options: CommunicationOptions) -> list[jax.Array]:
        return sums(buffers, options.wire_dtype)


@final
class HierarchicalCopyAllReduce(_Packed):
    """Copies in a tree of two levels: within each half of the devices, then between the halves, then back.

    The devices that sum rotate from buffer to buffer, which spreads the load.

    Args:
      num_packs: into how many buffers the gradients of one dtype are concatenated, into more where one would hold over 64;
        0 does not concatenate, None only gradients of at most 32 KiB.

    Raises:
      InvalidArgumentError: `num_packs` is negative.
    """

    @override
    def _sum(self, buffers: list[jax.Array], options: CommunicationOptions) -> list[jax.Array]:
        return [self._sum_one(b, turn) for turn, b in enumerate(buffers)]

    def _sum_one(self, value: jax.Array, turn: int) -> jax.Array:
        n = lax.axis_size(REPLICA_AXIS)
        halves = [_rotated(half, turn) for half in (list(range(n // 2)), list(range(n // 2, n))) if half]
        value = _fold(value, halves, jnp.add)
        if len(halves) == 2:
            a, b = halves[0][0], halves[1][0]
            # Both mains add in the same order, so all replicas end with the same bits.
            other = lax.ppermute(value, REPLICA_AXIS, [(a, b), (b, a)])
            value = jnp.where(lax.axis_index(REPLICA_AXIS) == a, value + other, other + value)
        return _spread(value, halves)


@final
class ReductionToOneDevice(CrossDeviceOps):
    """Copies everything to one device, accumulates there, and copies the result back.

    Args:
      reduce_to_device: the device that accumulates, for example `"gpu:0"`; the first replica's if None.
      accumulation_fn: maps two arrays to one; a sum if None. A `MEAN` divides its result by the number of replicas.

    Example:
      >>> import jax.numpy as jnp, phalanx
      >>> ops = phalanx.ReductionToOneDevice(accumulation_fn=jnp.maximum)
      >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)
    """

    def __init__(
        self,
        reduce_to_device: str | None = None,
        accumulation_fn: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
        *,
        _root: int = 0,
    ) -> None:
        self.reduce_to_device = reduce_to_device and device_name(parse_device(reduce_to_device))
        self.accumulation_fn = accumulation_fn or jnp.add
        self._root = _root

    @override
    def for_devices(self, devices: Sequence[jax.Device]) -> "ReductionToOneDevice":
        names = [device_name(d) for d in devices]
        if self.reduce_to_device is None:
            return self
        if self.reduce_to_device not in names:
            raise InvalidArgumentError(
                f"reduce_to_device={self.reduce_to_device!r}",
                f"not one of the strategy's devices {names}.",
                f"reduce_to_device={names[0]!r}",
            )
        return ReductionToOneDevice(
            self.reduce_to_device, self.accumulation_fn, _root=names.index(self.reduce_to_device)
        )

    @override
    def reduce_implementation(
        self, reduce_op: ReduceOp, value: jax.Array, destinations: Any, options: CommunicationOptions
    ) -> jax.Array:
        everyone = [_rotated(list(range(lax.axis_size(REPLICA_AXIS))), self._root)]
        total = _spread(_fold(value, everyone, self.accumulation_fn), everyone)
        return mean_or_sum(reduce_op, [total])[0]


def mean_or_sum(op: ReduceOp, sums: list[jax.Array]) -> list[jax.Array]:
    """Divides sums by the number of replicas where the mean is asked for."""
    return [s / lax.axis_size(REPLICA_AXIS) for s in sums] if op is ReduceOp.MEAN else sums


def _rotated(members: list[int], turn: int) -> list[int]:
    turn %= len(members)
    return members[turn:] + members[:turn]


def _fold(
    value: jax.Array, groups: list[list[int]], accumulate: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """Accumulates on the first member of each group, all groups at once."""
    index, total = lax.axis_index(REPLICA_AXIS), value
    for k in range(1, max(map(len, groups))):
        moves = [(g[k], g[0]) for g in groups if k < len(g)]
        arrived = lax.ppermute(value, REPLICA_AXIS, moves)
        is_main = jnp.isin(index, jnp.array([to for _, to in moves]))
        total = jnp.where(is_main, accumulate(total, arrived), total)
    return total


def _spread(total: jax.Array, groups: list[list[int]]) -> jax.Array:
    """Copies from the first member of each group to the others, all groups at once."""
    index, result = lax.axis_index(REPLICA_AXIS), total
    for k in range(1, max(map(len, groups))):
        moves = [(g[0], g[k]) for g in groups if k < len(g)]
        arrived = lax.ppermute(total, REPLICA_AXIS, moves)
        result = jnp.where(jnp.isin(index, jnp.array([to for _, to in moves])), arrived, result)
    return result


def _checked(pair: Pair) -> Pair:
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise InvalidArgumentError(f"pair={pair!r}", "must be a tuple (value, destinations).", "[(value, variable)]")
    value, destinations = pair
    if destinations is None or (isinstance(destinations, str) and not destinations):
        raise InvalidArgumentError(
            f"destinations={destinations!r}", "must be a value, a variable or a device name.", "destinations=value"
        )
    if isinstance(value, PerReplica):
        raise ContextError(
            "a cross-device operation on a PerReplica",
            "it runs inside a program only.",
            "strategy.extended.reduce_to(op, value, value)",
        )
    return to_array(value.value if isinstance(value, ReplicaLocal) else value), destinations
