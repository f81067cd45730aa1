"""The devices of `MirroredStrategy`. Its training: the laws of tests/contract."""

import pytest

import phalanx
from phalanx.errors import DeviceError


def test_number_of_devices():
    assert repr(phalanx.MirroredStrategy(2)) == "MirroredStrategy(['cpu:0', 'cpu:1'])"


@pytest.mark.parametrize(
    ("devices", "match"),
    [
        (0, "devices=0: this process has cpu:0, .*\nHINT: devices=8"),
        (99, r"devices=99: this process has cpu:0, .*\nHINT: phalanx.set_virtual_cpu_devices\(99\)"),
        ([], r"devices=\[\]: a strategy needs at least one device"),
        ({}, "devices={}: must be a list of devices or a number of devices"),
        (True, "devices=True: must be a list of devices or a number of devices"),
        (
            "cpu:0",
            r"devices='cpu:0': must be a list of devices or a number of devices.\nHINT: devices=\['cpu:0', \.\.\.\], one list",
        ),
    ],
)
def test_bad_devices_are_refused(devices, match):
    with pytest.raises(DeviceError, match=match):
        phalanx.MirroredStrategy(devices)
