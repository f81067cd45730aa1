"""The table of all strategies. A new strategy is one more row here, and every law holds for it or it is not done.

The rows use eight virtual CPU devices, or those that an environment variable names, as in `PHALANX_TEST_DEVICES=gpu:0`.
A row that needs more devices is skipped.
"""

import os
from collections.abc import Callable
from typing import Literal

import pytest

import phalanx
import phalanx.testing
from phalanx.tpu.experimental import DeviceAssignment

DEVICES = (os.environ.get("PHALANX_TEST_DEVICES") or ",".join(f"cpu:{i}" for i in range(8))).split(",")
STORAGE = "cpu:0"


def devices(count: int, *, beside: str = "") -> list[str]:
    """The names of the first `count` devices other than `beside`. Skips the test if there are fewer."""
    names = [name for name in DEVICES if name != beside]
    if count > len(names):
        needed = f"{count} device{'s' * (count > 1)}{' beside ' * bool(beside)}{beside}"
        pytest.skip(f"needs {needed}; the devices are {', '.join(DEVICES)}")
    return names[:count]


def mirrored(count: int, ops: phalanx.CrossDeviceOps | None = None) -> Callable[[], phalanx.Strategy]:
    """A row over the first `count` devices."""
    return lambda: phalanx.MirroredStrategy(devices(count), cross_device_ops=ops)


def central(count: int) -> Callable[[], phalanx.Strategy]:
    """A row over devices that do not hold the variables: GPUs, or the second and further CPU devices."""
    return lambda: phalanx.experimental.CentralStorageStrategy(devices(count, beside=STORAGE), STORAGE)


def tpu(shape: tuple[int, int, int], count: int) -> Callable[[], phalanx.Strategy]:
    """A row of `count` replicas of that computation shape, on eight devices that stand for a cube of cores."""

    def make() -> phalanx.Strategy:
        if not DEVICES[0].startswith("cpu:"):
            pytest.skip("TPUs are emulated on CPU devices only")
        devices(8)
        assignment = DeviceAssignment.build(phalanx.testing.virtual_topology((2, 2, 2)), shape, num_replicas=count)
        return phalanx.TPUStrategy(experimental_device_assignment=assignment)

    return make


def model_parallel(count: int, size: int) -> Callable[[], phalanx.Strategy]:
    """A row of `count` replicas on `size` devices each, over which the variables are divided."""
    layout = phalanx.fully_sharded("model", min_size=1)
    return lambda: phalanx.MirroredStrategy(devices(count * size), model_axis=("model", size), layout=layout)


def sharded(count: int, gather: Literal["layer", "step"]) -> Callable[[], phalanx.Strategy]:
    """A row of replicas that hold, and update, parts of the variables."""
    layout = phalanx.fully_sharded(min_size=1, gather=gather)
    return lambda: phalanx.MirroredStrategy(devices(count), layout=layout)


def update_sharding(count: int) -> Callable[[], phalanx.Strategy]:
    """A row of replicas that hold whole variables, and update shards of them."""
    return lambda: phalanx.MirroredStrategy(devices(count), weight_update_sharding=True)


def local_sgd(count: int) -> Callable[[], phalanx.Strategy]:
    """One synchronization per step, so that a linear optimizer trains as if gradients were aggregated."""
    local_updates = phalanx.experimental.LocalSGD(every=1)
    return lambda: phalanx.MirroredStrategy(devices(count), local_updates=local_updates)


def weighted(weights: list[float]) -> Callable[[], phalanx.Strategy]:
    """Replicas with unequal shares of each batch."""
    return lambda: phalanx.MirroredStrategy(devices(len(weights)), replica_weights=weights)


def compressed(count: int) -> Callable[[], phalanx.Strategy]:
    """Gradients that may be compressed. These are too small, and are sent whole."""
    options = phalanx.experimental.CommunicationOptions(compression="int8")
    return lambda: phalanx.MirroredStrategy(devices(count), communication_options=options)


ROWS: dict[str, Callable[[], phalanx.Strategy]] = {
    "default": phalanx.get_strategy,
    "one_device": lambda: phalanx.OneDeviceStrategy(DEVICES[:2][-1]),  # Not JAX's default device, if there is another.
    "mirrored_x1": mirrored(1),
    "mirrored_x2": mirrored(2),
    "mirrored_x3": mirrored(3),
    "mirrored_x4": mirrored(4),
    "mirrored_x8": mirrored(8),
    "mirrored_x2_packed": mirrored(2, phalanx.NcclAllReduce(num_packs=1)),
    "mirrored_x2_hierarchical": mirrored(2, phalanx.HierarchicalCopyAllReduce()),
    "mirrored_x2_one_device": mirrored(2, phalanx.ReductionToOneDevice()),
    "mirrored_x3_hierarchical": mirrored(3, phalanx.HierarchicalCopyAllReduce(num_packs=2)),
    "mirrored_x4_one_device": lambda: mirrored(4, phalanx.ReductionToOneDevice(devices(4)[2]))(),
    "central_x1": central(1),
    "central_x2": central(2),
    "central_x4": central(4),
    "tpu_x4_of_1": tpu((1, 1, 1), 4),
    "tpu_x4_of_2": tpu((1, 1, 2), 4),
    "tpu_x2_of_4": tpu((1, 2, 2), 2),
    "mirrored_x2_of_2": model_parallel(2, 2),
    "update_sharding_x2": update_sharding(2),
    "local_sgd_x2": local_sgd(2),
    "weighted_x3": weighted([3, 1, 2]),
    "compressed_x2": compressed(2),
    "sharded_x2": sharded(2, "step"),
    "sharded_x4": sharded(4, "layer"),
}


def on(*names: str) -> pytest.MarkDecorator:
    """Runs a test that takes `strategy` on these rows instead of on all."""
    return pytest.mark.parametrize("strategy", names, indirect=True)
