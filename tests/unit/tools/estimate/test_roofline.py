"""Predicted times, beside times computed by hand from the figures of a chip."""

from types import SimpleNamespace

import pytest

from phalanx._src.tools.estimate import targets
from phalanx._src.tools.estimate.chips import CHIPS
from phalanx._src.tools.estimate.hlo import Collective
from phalanx._src.tools.estimate.roofline import predict


def places(count, per_host, per_slice=None):
    """Returns what the model reads of devices: where they are."""
    return [SimpleNamespace(process_index=i // per_host, slice_index=i // (per_slice or count)) for i in range(count)]


def predicted(name, devices, *collectives, flops=0.0, num_bytes=0.0):
    (target,) = targets.parse([name])
    return predict(target, devices, flops, num_bytes, collectives)


def test_slower_of_compute_and_memory_decides():
    """v5e: 197 TFLOP/s and 0.81 TB/s."""
    time = predicted("v5e:1", places(1, 1), flops=1.97e14, num_bytes=8.1e11 / 2)
    assert (time.compute, time.memory, time.step, time.bound) == pytest.approx((1.0, 0.5, 1.0, "compute"))
    time = predicted("v5e:1", places(1, 1), flops=1.97e14 / 4, num_bytes=8.1e11)
    assert (time.step, time.bound) == (pytest.approx(1.0), "memory")


def test_all_reduce_of_a_torus():
    """Twice the bytes over both dims, 100 GB/s each if they are rings of 16, and half of that if they are shorter."""
    one = Collective("all-reduce", "f32", 10**9, tuple(range(256)))
    time = predicted("v5e:16x16", places(256, 4), one)
    assert time.links == pytest.approx(2 * 1e9 * 255 / 256 / (2 * 1e11), rel=0.01)
    small = Collective("all-reduce", "f32", 10**9, tuple(range(16)))
    assert predicted("v5e:4x4", places(16, 4), small).links == pytest.approx(2 * 1e9 * 15 / 16 / 1e11, rel=0.01)
    assert time.bound == "links"


def test_gpus_of_several_hosts_share_the_network():
    """Eight GPUs of a host send at the same time, 50 GB/s each; within a host, a GPU sends 450 GB/s."""
    far = Collective("all-reduce", "f32", 10**9, tuple(range(16)))
    time = predicted("h100:16", places(16, 8), far)
    assert (time.links, time.bound) == (0.0, "network")
    assert time.network == pytest.approx(2 * 1e9 * 15 / 16 / (8 * 5e10), rel=0.01)
    near = Collective("all-reduce", "f32", 10**9, tuple(range(8)))
    time = predicted("h100:8", places(8, 8), near)
    assert (time.network, time.links) == (0.0, pytest.approx(2 * 1e9 * 7 / 8 / 4.5e11, rel=0.01))


def test_slices_are_connected_by_the_network():
    """What XLA carries between two slices goes over the network of the data centre."""
    one = Collective("all-reduce", "f32", 10**8, (), is_async=True, is_between_slices=True)
    time = predicted("2*v5e:4x4", places(32, 4, 16), one)
    assert time.links == 0
    assert time.network == pytest.approx(1e8 / (2.5e10 / 4), rel=0.01)


def test_only_asynchronous_collectives_are_hidden():
    """As much of them as there is to compute meanwhile."""
    whole = tuple(range(256))
    waits, runs = (Collective("all-reduce", "f32", 10**8, whole, is_async=flag) for flag in (False, True))
    work = 1.97e14 * 0.1
    assert predicted("v5e:16x16", places(256, 4), waits, flops=work).hidden == 0
    time = predicted("v5e:16x16", places(256, 4), runs, flops=work)
    assert time.step == pytest.approx(0.1)
    time = predicted("v5e:16x16", places(256, 4), runs, flops=work / 1000)
    assert time.hidden == pytest.approx(0.1 / 1000)


def test_collective_of_one_device_takes_no_time():
    """Nobody else is there."""
    assert predicted("v5e:1", places(1, 1), Collective("all-reduce", "f32", 10**9, (0,))).step == 0


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_figures_of_chips_are_consistent(chip):
    """A chip reads its memory faster than it sends, and sends faster within its slice or host than out of it."""
    assert chip.memory_bandwidth > chip.link > chip.network > 0
    assert (chip.platform == "tpu") == bool(chip.dims) == bool(chip.largest) == (not chip.target)
