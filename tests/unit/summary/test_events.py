"""Event files that someone else may have made."""

import struct
import tracemalloc

import pytest

from phalanx.summary import events
from phalanx.summary.events import scalars_in

pytest.importorskip("tensorboardX")


def scalar(step, number):
    """An event with one scalar, as `phalanx.summary.scalar` writes it."""
    from tensorboardX.proto.event_pb2 import Event

    event = Event(step=step)
    value = event.summary.value.add(tag="x")
    value.metadata.plugin_data.plugin_name = "scalars"
    value.tensor.tensor_content = struct.pack("<f", number)
    return event.SerializeToString()


def write(path, *recorded):
    path.write_bytes(b"".join(struct.pack("<Q", len(event)) + bytes(4) + event + bytes(4) for event in recorded))


def test_event_of_millions_of_values_is_skipped(tmp_path):
    """Each of them is two bytes, and 90 when it is parsed."""
    # Field 5 of an event, its summary, has so many times field 1, a value, without anything in it.
    many = b"\x2a\x80\x87\xa7\x0e" + b"\x0a\x00" * 15_000_000
    assert len(many) == 30_000_005
    write(tmp_path / "events", scalar(1, 0.5), many, scalar(2, 0.25))
    assert scalars_in(str(tmp_path / "events*")) == {1: {"x": 0.5}, 2: {"x": 0.25}}


def test_scalars_take_no_more_memory_than_is_allowed(tmp_path, monkeypatch):
    write(tmp_path / "events", *[scalar(1000 * step, 0.5) for step in range(3000)])
    tracemalloc.start()
    scalars = scalars_in(str(tmp_path / "events"))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(scalars) == 3000
    assert size <= 3000 * events._BYTES_OF_A_SCALAR
    monkeypatch.setattr(events, "_BYTES_OF_A_SCALAR", 100_000_000)
    assert scalars_in(str(tmp_path / "events")) == {0: {"x": 0.5}, 1000: {"x": 0.5}}
