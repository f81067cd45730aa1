"""The table of all strategies. A new strategy is one more row here, and every law holds for it or it is not done."""

from collections.abc import Callable

import pytest

import phalanx


def mirrored(count: int, ops: phalanx.CrossDeviceOps | None = None) -> Callable[[], phalanx.Strategy]:
    """A row over the first `count` CPU devices."""
    return lambda: phalanx.MirroredStrategy([f"cpu:{i}" for i in range(count)], cross_device_ops=ops)


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
}


def on(*names: str) -> pytest.MarkDecorator:
    """Runs a test that takes `strategy` on these rows instead of on all."""
    return pytest.mark.parametrize("strategy", names, indirect=True)
