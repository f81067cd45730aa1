# SPDX-License-Identifier: Apache-2.0
"""What a topology requires of its axes, of the processes that share a replica, and of the values that several devices hold."""

import copy
import dataclasses
import itertools
import math
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from phalanx._src.cluster.watch.agreement import Difference, Signature
from phalanx._src.mesh.devices import device_name
from phalanx._src.mesh.layout import REPLICA_AXIS, AbstractLayout, Sizes
from phalanx._src.typed_jax import partition_spec
from phalanx.errors import (
    DeviceError,
    DivergenceError,
    InvalidArgumentError,
    TraceError,
    arguments,
    listed,
    shown,
    warn_of_slip,
)

MODEL_AXIS = 'model_axis=("model", 2)'
"""An example of the argument, for messages."""


def require_axes(axes: Sequence[tuple[str, int]], num_devices: int) -> None:
    """Checks the names and sizes of the axes over which XLA partitions a replica.

    Raises:
      InvalidArgumentError: one of them is invalid, or they do not divide the number of devices.
    """
    # Strategies take one axis, so an error shows what the user has written.
    called = f"model_axis={shown(axes[0])}" if len(axes) == 1 else f"axes={shown(axes)}"
    if not all(isinstance(name, str) and name for name, _ in axes):
        raise InvalidArgumentError(called, "names of axes must be strings.", MODEL_AXIS)
    names, sizes = [name for name, _ in axes], [size for _, size in axes]
    if len({REPLICA_AXIS, *names}) <= len(names):
        raise InvalidArgumentError(
            called, f"names of axes must be unique, and {REPLICA_AXIS!r} is reserved.", MODEL_AXIS
        )
    if not all(arguments.is_integer(n, least=1) for n in sizes):
        raise InvalidArgumentError(called, "sizes of axes must be positive integers.", MODEL_AXIS)
    if num_devices % (count := math.prod(sizes)):
        fitting = [n for n in range(2, num_devices + 1) if num_devices % n == 0]
        raise InvalidArgumentError(
            called,
            f"{num_devices} devices cannot be divided into replicas of {count} devices.",
            f'model_axis=("{names[0]}", {min(fitting, key=lambda n: abs(n - count))})'
            if fitting and len(axes) == 1
            else f"a multiple of {count} devices",
        )


def require_one_mesh(mesh: jax.sharding.Mesh, agree: Callable[[Signature], Difference | None]) -> None:
    """Checks that all processes have made the same mesh.

    Args:
      mesh: the mesh of this process.
      agree: compares a signature with those of the others.

    Raises:
      TraceError: they have not.
    """
    sizes = dict(mesh.shape)
    if difference := agree({"mesh": [f"{sizes}"]}):
        raise TraceError(
            f"a strategy with the mesh {sizes}",
            f"all processes must divide their devices in the same way, but {dataclasses.replace(difference, index=None)}.",
            "create the strategy with the same arguments, such as model_axis=, on all workers",
        )


def require_layout(
    layout: AbstractLayout, variables: Sequence[tuple[str, jax.ShapeDtypeStruct]], sizes: Mapping[int, Sizes]
) -> None:
    """Checks that a layout fits variables, whatever number of workers trains them. Warns of those that are sharded with some numbers only.

    Args:
      layout: the layout.
      variables: paths and shapes.
      sizes: the sizes of the mesh, by the number of workers, ascending.

    Raises:
      InvalidArgumentError: it does not fit a shape.
    """
    layout, group = copy.deepcopy(layout), f"an elastic group of {min(sizes)} to {max(sizes)} workers"
    divided: dict[int, set[str]] = {}
    for count, sizes_of_axes in sizes.items():
        try:
            # In a copy, because a layout remembers the shardings, which it prints.
            specs = {path: layout.spec(path, shape.shape, sizes_of_axes) for path, shape in variables}
        except InvalidArgumentError as e:
            raise InvalidArgumentError(f"{e.asked} in {group}", f"with {count} workers, {e.found}", e.hint) from e
        divided[count] = {path for path, spec in specs.items() if spec != partition_spec()}
    for count in list(sizes)[:-1]:
        whole = divided[max(sizes)] - divided[count]
        num_bytes = sum(math.prod(s.shape) * s.dtype.itemsize for path, s in variables if path in whole)
        # A single worker has the whole model.
        if whole and count > 1:
            warn_of_slip(
                f"In {group}, layout={shown(layout)} does not shard {listed(sorted(whole), 3)} with {count} workers: then each device "
                f"holds these {num_bytes:,} bytes, and their slots, whole.",
                f"sizes of which one is a multiple of each of {listed([str(n) for n in sizes if n > 1])}, or other --workers",
            )


def warn_if_whole(
    layout: AbstractLayout,
    trained: Sequence[tuple[str, tuple[int, ...]]],
    read: Sequence[tuple[str, tuple[int, ...]]],
    sizes: Sizes,
) -> None:
    """Warns of a layout that shards none of the variables of a training step.

    Args:
      layout: the layout.
      trained: paths and shapes of the variables that the step trains.
      read: those of all variables that it reads. Large ones may be frozen.
      sizes: the sizes of the mesh.
    """
    why = layout.why_whole([shape for _, shape in trained], sizes) if trained else None
    if why is None or any(layout.spec(path, shape, sizes) != partition_spec() for path, shape in (*trained, *read)):
        return
    warn_of_slip(
        f"layout={shown(layout)} shards 0 of {len(trained)} variables, so each device holds the whole model: {why[0]}.",
        why[1],
    )


def require_own_rows(devices: Sequence[jax.Device], replicas: Sequence[range]) -> None:
    """Checks that processes which share a replica share all of theirs, and that all processes have as many devices.

    Args:
      devices: the devices of all replicas, in their order.
      replicas: per process, the replicas of which it has devices.

    Raises:
      DeviceError: they do not.
    """
    # In this order, two ranges overlap only if two neighbours do.
    ordered = sorted(replicas, key=lambda each: (each.start, each.stop))
    per_replica = len(devices) // max(each.stop for each in ordered)
    for first, second in itertools.pairwise(ordered):
        if first != second and second.start < first.stop:
            start = second.start * per_replica
            shared = list(map(device_name, devices[start : start + per_replica]))
            raise DeviceError(
                f"replica {second.start} on {shared}",
                "it has devices of two processes, which read the same rows, but one of them has devices of another replica too.",
                "a model axis whose size divides the number of devices of a process, or is a multiple of it",
            )
    # A batch is divided evenly over the processes that read, and `process_allgather` arranges JAX's devices in one row per process.
    counts = Counter(device.process_index for device in devices)
    least = min(counts.values())
    if least < max(counts.values()):
        raise DeviceError(
            f"a strategy over processes with {' and '.join(map(str, sorted(set(counts.values()))))} devices",
            "all processes must have the same number of devices.",
            f"phalanx run --devices-per-worker {least}, or CUDA_VISIBLE_DEVICES with {least} in each process",
        )


def digests_of(devices: Sequence[jax.Device], arrays: Sequence[tuple[str, jax.Array]]) -> np.ndarray:
    """Returns a digest per array and device, `(arrays, devices)`. 0 for the devices of other processes."""
    # 32 bits, because JAX exchanges no wider integers unless x64 is on.
    digests = np.zeros((len(arrays), len(devices)), np.uint32)
    for row, (_, array) in zip(digests, arrays, strict=True):
        for shard in array.addressable_shards:
            # Bytes and not numbers, so that a NaN equals itself.
            row[devices.index(shard.device)] = zlib.crc32(np.ascontiguousarray(shard.data).view(np.uint8).data)
    return digests


def require_equal_digests(
    devices: Sequence[jax.Device], arrays: Sequence[tuple[str, jax.Array]], digests: np.ndarray
) -> None:
    """Checks that devices which hold the same shard of an array have the same digest.

    Args:
      devices: the devices of all processes.
      arrays: paths of variables, and their arrays.
      digests: digests of all processes. See `digests_of`.

    Raises:
      DivergenceError: they do not.
    """
    for row, (path, array) in zip(digests, arrays, strict=True):
        places = array.sharding.devices_indices_map(array.shape)
        shards = {(str(places[device]), digest) for device, digest in zip(devices, row, strict=True)}
        if len(shards) > len({place for place, _ in shards}):
            raise DivergenceError(
                f"the variable {path!r} of a layout on {len({d.process_index for d in devices})} processes",
                "the processes have given it different first values.",
                "keras.utils.set_random_seed(1), with the same number in all processes",
            )
