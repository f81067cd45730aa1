# SPDX-License-Identifier: Apache-2.0
"""The `CrossDeviceOps` family: algorithms that reduce and broadcast values between devices.

All of them run inside a program, on the arrays of one replica. All replicas run the same program, so a step of an algorithm
is a `lax.ppermute` (a copy from device to device) or a `lax.psum` (an all-reduce).
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from typing_extensions import override

from phalanx._src.collectives import packing
from phalanx._src.collectives.dtypes import dtype_of, term
from phalanx._src.collectives.primitives import only_on, packed, sums, to_array
from phalanx._src.compat import Variable
from phalanx._src.mesh.devices import device_name, parse_device
from phalanx._src.mesh.layout import REPLICA_AXIS
from phalanx._src.mesh.values import DistributedValues, PerReplica, ReplicaLocal
from phalanx._src.options import CommunicationOptions, ReduceOp
from phalanx._src.typed_jax import ppermute, psum
from phalanx.errors import ContextError, InvalidArgumentError, arguments, shown

Pair = tuple[Any, object]
Accumulate = Callable[[jax.Array, jax.Array], jax.Array] | Callable[[list[jax.Array]], jax.Array]

_REDUCE_TO = "strategy.extended.reduce_to(op, value, value)"


class CrossDeviceOps:
    """Reduces and broadcasts values between the replicas of a running program.

    For a custom algorithm, override `reduce_implementation`, and also `batch_reduce_implementation` if it helps to see all
    gradients at once. These hooks get the array of one replica and return the result for every replica. They may use the
    collectives of `jax.lax` over the axis `phalanx.REPLICA_AXIS`. The array has the dtype in which `jnp.sum` or `jnp.mean`
    accumulates: float32 for a mean of integers or of float16.

    May be called inside `merge_call`. Elsewhere use `Strategy.extended.reduce_to`, which enters it.

    Example:
      >>> import jax, phalanx
      >>> class Half(phalanx.CrossDeviceOps):
      ...     def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
      ...         half = per_replica_value.astype("float16")
      ...         return jax.lax.psum(half, phalanx.REPLICA_AXIS).astype(per_replica_value.dtype)
      >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=Half())
    """

    @property
    def adds(self) -> bool:
        """Whether SUM adds the values of the replicas. If so, a single value may be reduced with any other addition."""
        return False

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: ArrayLike,
        destinations: object,
        options: CommunicationOptions | None = None,
    ) -> jax.Array:
        """Reduces one value over the replicas.

        Args:
          reduce_op: SUM or MEAN.
          per_replica_value: value of this replica: an argument of a merge function, or an array.
          destinations: a value, variable or device where the result is wanted. Every replica gets the result in any case.
          options: hints for this call.

        Returns:
          The reduced array.

        Raises:
          InvalidArgumentError: `destinations` is not a destination.
          ContextError: called on a `PerReplica`, or outside a program.
        """
        return self.batch_reduce(reduce_op, [(per_replica_value, destinations)], options)[0]

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[Pair],
        options: CommunicationOptions | None = None,
    ) -> list[jax.Array]:
        """Reduces several values over the replicas, so that they can share buffers. See `reduce`."""
        op = ReduceOp.parse(reduce_op)
        pairs = [_checked(pair) for pair in checked_pairs(value_destination_pairs)]
        _require_program()
        # Hooks of users may add the terms as they are.
        terms = [(term(op, value), destinations) for value, destinations in pairs]
        results = self.batch_reduce_implementation(op, terms, checked_options(options))
        return [result.astype(dtype_of(op, value.dtype)) for result, (value, _) in zip(results, pairs, strict=True)]

    def broadcast(self, tensor: ArrayLike, destinations: object) -> jax.Array:
        """Returns the value of the first replica, on every replica. See `reduce`."""
        value, destinations = _checked((tensor, destinations))
        _require_program()
        return self.broadcast_implementation(value, destinations)

    def for_devices(self, devices: Sequence[jax.Device]) -> "CrossDeviceOps":
        """Returns the operations for a strategy over `devices`. A strategy calls this when it is created.

        Raises:
          InvalidArgumentError: these operations name a device that is not in `devices`.
        """
        return self

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: jax.Array, destinations: object, options: CommunicationOptions
    ) -> jax.Array:
        """Reduces one array and returns the result for every replica. Subclasses must override it."""
        raise NotImplementedError(f"{type(self).__name__} must override reduce_implementation")

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Sequence[Pair], options: CommunicationOptions
    ) -> list[jax.Array]:
        """Reduces several arrays, one after the other unless overridden."""
        return [self.reduce_implementation(reduce_op, value, to, options) for value, to in value_destination_pairs]

    def broadcast_implementation(self, tensor: jax.Array, destinations: object) -> jax.Array:
        """Broadcasts the array of the first replica. The default sums it with zeros from the other replicas."""
        return psum(only_on(0, tensor), REPLICA_AXIS)


# Between the devices of one process an array costs 10 to 15 us plus its bytes. For large arrays, copying costs more.
_SMALL_BYTES = 32 << 10


class _Packed(CrossDeviceOps):
    """Sums values in shared buffers. Subclasses define how to sum the buffers."""

    def __init__(self, num_packs: int | None = 1) -> None:
        self.num_packs = (
            None if num_packs is None else arguments.integer("num_packs", num_packs, least=0, hint="num_packs=1")
        )

    @property
    @override
    def adds(self) -> bool:
        return True

    def _sum(self, buffers: list[jax.Array], options: CommunicationOptions) -> list[jax.Array]:
        raise NotImplementedError

    @override
    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: jax.Array, destinations: object, options: CommunicationOptions
    ) -> jax.Array:
        return self.batch_reduce_implementation(reduce_op, [(per_replica_value, destinations)], options)[0]

    @override
    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Sequence[Pair], options: CommunicationOptions
    ) -> list[jax.Array]:
        values = [value for value, _ in value_destination_pairs]
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

    On hardware without NCCL, the same program uses the native collectives.

    Args:
      num_packs: number of buffers into which the gradients of one dtype are concatenated. More buffers are used if one would
        hold over 64 gradients. 0 concatenates nothing. None concatenates only gradients of at most 32 KiB.

    Raises:
      InvalidArgumentError: `num_packs` is negative.
    """

    @override
    def _sum(self, buffers: list[jax.Array], options: CommunicationOptions) -> list[jax.Array]:
        return sums(buffers, options.wire_dtype)


@final
class HierarchicalCopyAllReduce(_Packed):
    """Sums in a tree of two levels: within each half of the devices, then between the halves, then copies back.

    The devices that add rotate from buffer to buffer, to spread the load.

    Args:
      num_packs: number of buffers into which the gradients of one dtype are concatenated. More buffers are used if one would
        hold over 64 gradients. 0 concatenates nothing. None concatenates only gradients of at most 32 KiB.

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
            # Both halves add in the same order, so all replicas get the same bits.
            other = ppermute(value, REPLICA_AXIS, [(a, b), (b, a)])
            value = jnp.where(lax.axis_index(REPLICA_AXIS) == a, value + other, other + value)
        return _spread(value, halves)


@final
class ReductionToOneDevice(CrossDeviceOps):
    """Copies all values to one device, accumulates them there, and copies the result back.

    A strategy with these operations uses them for every reduction: `reduce`, `all_reduce`, `extended.reduce_to`, and the
    gradients of optimizers.

    Args:
      reduce_to_device: device that accumulates, for example `"gpu:0"`. None means the device of the first replica.
      accumulation_fn: function of two arrays, or, if it has one argument without a default, function of the list of the
        replicas' arrays, in replica order. None means the sum. A `MEAN` divides the result by the number of replicas.

    Raises:
      InvalidArgumentError: `accumulation_fn` is not such a function.
      DeviceError: `reduce_to_device` is not a device.

    Example:
      >>> import jax.numpy as jnp, phalanx
      >>> ops = phalanx.ReductionToOneDevice(accumulation_fn=jnp.maximum)
      >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)
      >>> ids = strategy.run(lambda: phalanx.get_replica_context().replica_id_in_sync_group)
      >>> strategy.reduce("SUM", ids, axis=None)
      Array(1, dtype=int32)
    """

    def __init__(
        self, reduce_to_device: str | None = None, accumulation_fn: Accumulate | None = None, *, _root: int = 0
    ) -> None:
        self.reduce_to_device = None if reduce_to_device is None else device_name(parse_device(reduce_to_device))
        self.accumulation_fn = jnp.add if accumulation_fn is None else accumulation_fn
        self._takes_list = accumulation_fn is not None and _takes_list(accumulation_fn)
        self._root = _root

    @property
    @override
    def adds(self) -> bool:
        return self.accumulation_fn is jnp.add

    @override
    def for_devices(self, devices: Sequence[jax.Device]) -> "ReductionToOneDevice":
        names = [device_name(d) for d in devices]
        if self.reduce_to_device is None:
            return self
        if self.reduce_to_device not in names:
            raise InvalidArgumentError(
                f"reduce_to_device={self.reduce_to_device!r}",
                f"is not one of the strategy's devices {names}.",
                f"reduce_to_device={names[0]!r}",
            )
        root = names.index(self.reduce_to_device)
        return ReductionToOneDevice(self.reduce_to_device, self.accumulation_fn, _root=root)

    @override
    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: jax.Array, destinations: object, options: CommunicationOptions
    ) -> jax.Array:
        members = list(range(lax.axis_size(REPLICA_AXIS)))
        arrived = [
            per_replica_value if i == self._root else ppermute(per_replica_value, REPLICA_AXIS, [(i, self._root)])
            for i in members
        ]
        # All devices run this. Devices other than the root compute with zeros, and their result is not used.
        total = self._accumulate(arrived)
        return mean_or_sum(reduce_op, [_spread(total, [_rotated(members, self._root)])])[0]

    def _accumulate(self, values: list[jax.Array]) -> jax.Array:
        fn: Any = self.accumulation_fn
        total = jnp.asarray(fn(values) if self._takes_list else functools.reduce(fn, values))
        if total.shape != values[0].shape:
            raise InvalidArgumentError(
                f"accumulation_fn={shown(fn)} of {len(values)} arrays {values[0].dtype}{list(values[0].shape)}",
                f"it returned an array {total.dtype}{list(total.shape)}.",
                "accumulation_fn=jnp.maximum, or lambda values: jnp.stack(values).max(axis=0)",
            )
        return total


def _takes_list(fn: Callable[..., Any]) -> bool:
    """Returns whether an accumulation function takes the list of all arrays, as in tf.distribute, instead of two arrays.

    Raises:
      InvalidArgumentError: it takes neither, or its signature is unknown.
    """
    arguments.function("accumulation_fn", fn, "accumulation_fn=jnp.maximum")
    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError:  # Built-in functions such as `max` have no signature.
        parameters = ()  # type: ignore[assignment]
    kinds = [p.kind for p in parameters]
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(needed) == 2 or (len(needed) < 2 and inspect.Parameter.VAR_POSITIONAL in kinds):
        return False
    if len(needed) == 1:
        return True
    raise InvalidArgumentError(
        f"accumulation_fn={shown(fn)}",
        "must take two arrays, or the list of all of them.",
        "accumulation_fn=lambda a, b: jnp.maximum(a, b), or lambda values: jnp.stack(values).max(axis=0)",
    )


def mean_or_sum(op: ReduceOp, sums: list[jax.Array]) -> list[jax.Array]:
    """Returns the sums, divided by the number of replicas if `op` is MEAN."""
    return [s / lax.axis_size(REPLICA_AXIS) for s in sums] if op is ReduceOp.MEAN else sums


def _rotated(members: list[int], turn: int) -> list[int]:
    turn %= len(members)
    return members[turn:] + members[:turn]


def _fold(
    value: jax.Array, groups: list[list[int]], accumulate: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """Accumulates on the first member of each group, in all groups at once."""
    index, total = lax.axis_index(REPLICA_AXIS), value
    for k in range(1, max(map(len, groups))):
        moves = [(g[k], g[0]) for g in groups if k < len(g)]
        arrived = ppermute(value, REPLICA_AXIS, moves)
        # `ppermute` gives zeros to replicas that receive nothing, so they keep their totals.
        is_main = jnp.isin(index, jnp.array([to for _, to in moves]))
        total = jnp.where(is_main, accumulate(total, arrived), total)
    return total


def _spread(total: jax.Array, groups: list[list[int]]) -> jax.Array:
    """Copies from the first member of each group to the others, in all groups at once."""
    index, result = lax.axis_index(REPLICA_AXIS), total
    for k in range(1, max(map(len, groups))):
        moves = [(g[0], g[k]) for g in groups if k < len(g)]
        arrived = ppermute(total, REPLICA_AXIS, moves)
        result = jnp.where(jnp.isin(index, jnp.array([to for _, to in moves])), arrived, result)
    return result


def checked_options(options: object) -> CommunicationOptions:
    """Returns the options of a call, with the defaults for None.

    Raises:
      InvalidArgumentError: `options` is neither CommunicationOptions nor None.
    """
    if options is None:
        return CommunicationOptions()
    return arguments.instance(
        "options", options, CommunicationOptions, "options=phalanx.experimental.CommunicationOptions()"
    )


def checked_pairs(pairs: object) -> list[Pair]:
    """Returns pairs of a value and its destinations as a list.

    Raises:
      InvalidArgumentError: `pairs` is not a list of pairs, or an element is not a destination.
    """
    if not isinstance(pairs, (list, tuple)):
        raise InvalidArgumentError(
            f"value_destination_pairs={shown(pairs)}", "must be a list of pairs.", "[(value, variable)]"
        )
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise InvalidArgumentError(
                f"pair={shown(pair)}", "must be a tuple (value, destinations).", "[(value, variable)]"
            )
        check_destinations(pair[1])
    return list(pairs)


_DESTINATIONS = (str, int, float, complex, np.ndarray, np.generic, jax.Array, jax.Device, Variable, DistributedValues)


def check_destinations(destinations: object) -> None:
    """Checks that `destinations` is a value, a variable or a device.

    Raises:
      InvalidArgumentError: `destinations` is none of these.
    """
    if not isinstance(destinations, _DESTINATIONS) or (isinstance(destinations, str) and not destinations):
        raise InvalidArgumentError(
            f"destinations={shown(destinations)}", "must be a value, a variable or a device name.", "destinations=value"
        )


def _checked(pair: Pair) -> Pair:
    value, destinations = pair
    check_destinations(destinations)
    if isinstance(value, PerReplica):
        raise ContextError(
            "a cross-device operation on a PerReplica",
            "it runs only inside a program, on the value of one replica.",
            _REDUCE_TO,
        )
    return to_array(value.value if isinstance(value, ReplicaLocal) else value), destinations


def _require_program() -> None:
    """Checks that a replica function is being traced.

    Raises:
      ContextError: called outside a program of the replicas.
    """
    try:
        lax.axis_size(REPLICA_AXIS)
    except NameError:  # JAX's error for an axis that no `shard_map` has.
        raise ContextError(
            "a cross-device operation outside merge_call", "it runs only inside a program of the replicas.", _REDUCE_TO
        ) from None
