# SPDX-License-Identifier: Apache-2.0
"""The event files of TensorBoard, with values in the form of tf.summary."""

import contextlib
import glob
import importlib.util
import io
import itertools
import os
import time
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from numpy.typing import ArrayLike

from phalanx._src.cluster.untrusted import most_memory, read_data
from phalanx._src.tracing.records import Record
from phalanx.summary.steps import Step

_TYPES = {"float32": 1, "float64": 2, "int32": 3, "uint8": 4, "int16": 5, "int8": 6, "int64": 9, "bool": 10}
"""Numbers of `tensorflow/core/framework/types.proto`. Other types are written as float32."""

_STRING = 7

_LARGEST_EVENT, _BYTES_OF_A_SCALAR = 1_000_000, 400
"""The most bytes of an event with scalars, and those that one takes in `scalars_in`."""

Notes: TypeAlias = tuple[Any, ...]
"""What a record holds besides its array: the description first, then what its kind needs."""

_WAV = b"\x10\x0b"
"""The field `encoding` of TensorBoard's `AudioPluginData`, with the value WAV."""


def is_installed(*libraries: str) -> bool:
    """Returns whether libraries are installed."""
    try:
        return all(map(importlib.util.find_spec, libraries))
    except ValueError:  # A module whose import was forbidden.
        return False


def computed(record: Record, default_step: Any) -> Iterator[tuple[Any, int]]:
    """Waits until the arrays of a record are computed, and yields each value that counts, with its step.

    Args:
      record: the record.
      default_step: the step, if the record has none.
    """
    value, step, condition = jax.tree.map(np.asarray, (record.value, record.step, record.condition))
    if condition is None or not condition.shape:
        if condition is None or condition:
            yield value, int(default_step if step is None else step)
        return
    # `run_steps` stacks the records of its steps.
    for i in np.flatnonzero(condition):
        at = int(default_step) + int(i) if step is None else int(step[i])
        yield None if value is None else value[i], at


class EventFile:
    """One event file.

    Args:
      log_dir: the folder.
      suffix: end of the file's name.

    Raises:
      OSError: the file cannot be created.
    """

    def __init__(self, log_dir: str, suffix: str = "") -> None:
        from tensorboardX.event_file_writer import EventsWriter

        os.makedirs(log_dir, exist_ok=True)
        # Two files of one process, created in one second, need their own names.
        name = f"events.{time.time_ns() % 10**9:09d}.{os.getpid()}"
        self._file = EventsWriter(os.path.join(log_dir, name), suffix)
        self.flush()

    def write(self, record: Record, default_step: Step) -> None:
        """Waits until the arrays of a record are computed, and writes them."""
        for value, step in computed(record, default_step):
            self._write(record, value, step)

    def _write(self, record: Record, value: np.ndarray, step: int) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata

        # The form of TensorFlow 2, tensors with the name of a plugin: TensorBoard converts the older one at each read.
        plugin, content, convert = _KINDS[record.kind]
        metadata = SummaryMetadata()
        if record.kind == "write":
            metadata.ParseFromString(record.notes[0])  # type: ignore[index]
        else:
            metadata.plugin_data.plugin_name, metadata.plugin_data.content = plugin, content
            metadata.summary_description = record.notes[0] or ""  # type: ignore[index]
        event = Event(wall_time=time.time(), step=step)
        event.summary.CopyFrom(Summary(value=[Summary.Value(tag=record.tag, metadata=metadata)]))
        event.summary.value[0].tensor.CopyFrom(convert(value, record.notes))
        self._file.write_event(event)

    def flush(self) -> None:
        """Writes buffered events to the disk."""
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _tensor(value: ArrayLike) -> object:
    from tensorboardX.proto.tensor_pb2 import TensorProto

    array = np.asarray(value)
    if array.dtype.name not in _TYPES:
        array = array.astype(np.float32)
    tensor = TensorProto(dtype=_TYPES[array.dtype.name], tensor_content=array.tobytes())
    for size in array.shape:
        tensor.tensor_shape.dim.add().size = size
    return tensor


def _strings(values: list[bytes], shape: tuple[int, ...]) -> object:
    from tensorboardX.proto.tensor_pb2 import TensorProto

    tensor = TensorProto(dtype=_STRING, string_val=values)
    for size in shape:
        tensor.tensor_shape.dim.add().size = size
    return tensor


def _scalar(value: np.ndarray, notes: Notes) -> object:
    return _tensor(np.asarray(value, np.float32))


def _histogram(value: np.ndarray, notes: Notes) -> object:
    return _tensor(np.asarray(value, np.float64))


def _text(value: np.ndarray | None, notes: Notes) -> object:
    _, texts, shape = notes
    return _strings([t.encode() for t in texts], shape)


def _written(value: np.ndarray | None, notes: Notes) -> object:
    return _tensor(value) if value is not None else _text(value, notes)


def _image(value: np.ndarray, notes: Notes) -> object:
    from PIL import Image

    if value.dtype != np.uint8:
        # The rounding of `tf.image.convert_image_dtype`.
        value = np.clip(np.nan_to_num(np.asarray(value, np.float32)) * 255.5, 0, 255).astype(np.uint8)
    encoded = []
    for pixels in value:
        file = io.BytesIO()
        Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(file, "png")
        encoded.append(file.getvalue())
    height, width = value.shape[1:3]
    return _strings([str(width).encode(), str(height).encode(), *encoded], (2 + len(encoded),))


def _audio(value: np.ndarray, notes: Notes) -> object:
    strings: list[bytes] = []
    for clip in np.clip(np.nan_to_num(np.asarray(value, np.float32)), -1, 1):
        file = io.BytesIO()
        with wave.open(file, "wb") as out:
            out.setnchannels(clip.shape[1])
            out.setsampwidth(2)
            out.setframerate(notes[1])
            out.writeframes(np.round(clip * 32767).astype("<i2").tobytes())
        strings += [file.getvalue(), b""]
    return _strings(strings, (len(strings) // 2, 2))


_KINDS: dict[str, tuple[str, bytes, Callable[[Any, Any], object]]] = {
    "scalar": ("scalars", b"", _scalar),
    "histogram": ("histograms", b"", _histogram),
    "image": ("images", b"", _image),
    "audio": ("audio", _WAV, _audio),
    "text": ("text", b"", _text),
    "write": ("", b"", _written),
}


def scalars_in(pattern: str) -> dict[int, dict[str, float]]:
    """Returns the scalars of the event files that match a pattern, by step and tag.

    Ignores what is damaged or incomplete, and what would take more memory than three times the size of a file and 200 MB.
    """
    scalars: dict[int, dict[str, float]] = {}
    for path in sorted(glob.glob(pattern)):
        try:
            data = read_data(Path(path))
        except (OSError, ValueError):
            continue
        most = most_memory(len(data)) // _BYTES_OF_A_SCALAR
        for step, tag, value in itertools.islice(_scalars_of(data), most):
            scalars.setdefault(step, {})[tag] = value
    # Files are sorted by name and not by step: a training run that was restarted has several.
    return dict(sorted(scalars.items()))


def _scalars_of(data: bytes) -> Iterator[tuple[int, str, float]]:
    """Yields the step, the tag and the value of each scalar in a file."""
    for event in _events_of(data):
        for value in event.summary.value:
            content = value.tensor.tensor_content
            if value.metadata.plugin_data.plugin_name == "scalars" and len(content) == np.float32().nbytes:
                yield event.step, value.tag, float(np.frombuffer(content, np.float32)[0])


def _events_of(data: bytes) -> Iterator[Any]:
    """Yields the events of a file: a length of 8 bytes, its checksum of 4, the event, and the checksum of 4 of the event."""
    from google.protobuf.message import DecodeError
    from tensorboardX.proto.event_pb2 import Event

    at = 0
    while at + 12 <= len(data):
        # The framing of a TFRecord. The checksums are not compared: a torn write shows as a record that is too short.
        size = int.from_bytes(data[at : at + 8], "little")
        # No event is empty. A file of zeros has millions of such records.
        if not size or at + size + 16 > len(data):
            return
        # Those with images may be large. A parsed event takes up to 50 times its bytes.
        if size <= _LARGEST_EVENT:
            with contextlib.suppress(DecodeError):
                yield Event.FromString(data[at + 12 : at + 12 + size])
        at += size + 16
