"""The table of all strategies. A new strategy is one more row here, and every law holds for it or it is not done."""

from collections.abc import Callable

import pytest

import phalanx


def mirrored(count: int, ops: phalanx.CrossDeviceOps | None = None) -> Callable[[], phalanx.Strategy]:
    """A row over the first `count` CPU devices."""
    return lambda: phalanx.MirroredStrategy([f"cpu:{i}" for i in range(count)], cross_device_ops=ops)


def central(count: int) -> Callable[[], phalanx.Strategy]:
    """A row over the second and further CPU devices, with the variables on the first."""
    return lambda: phalanx.experimental.CentralStorageStrategy([f"cpu:{i}" for i in range(1, count + 1)], "cpu:0")


ROWS: dict[str, Callable[[], phalanx.Strategy]] = {
    "default": phalanx.get_strategy,
    "one_device": lambda: phalanx.OneDeviceStrategy("cpu:1"),
    "mirrored_x1": mirrored(1),
    "mirrored_x2": mirrored(2),
    "mirrored_x3": mirrored(3),
    "mirrored_x4": mirrored(4),
    "mirrored_x8": mirrored(8),
    "mirrored_x2_packed": mirrored(2, phalanx.NcclAllReduce(num_packs=1)),
    "mirrored_x2_hierarchical": mirrored(2, phalanx.HierarchicalCopyAllReduce()),
    "mirrored_x2_one_device": mirrored(2, phalanx.ReductionToOneDevice()),
    "mirrored_x3_hierarchical": mirrored(3, phalanx.HierarchicalCopyAllReduce(num_packs=2)),
    "mirrored_x4_one_device": mirrored(4, phalanx.ReductionToOneDevice("cpu:2")),
    "central_x1": central(1),
    "central_x2": central(2),
    "central_x4": central(4),
}


def on(*names: str) -> pytest.MarkDecorator:
    """Runs a test that takes `strategy` on these rows instead of on all."""
    return pytest.mark.parametrize("strategy", names, indirect=True)
