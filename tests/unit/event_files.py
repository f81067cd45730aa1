"""Reads event files of TensorBoard."""

import numpy as np
from tensorboardX.proto.event_pb2 import Event

TYPES = {1: np.float32, 2: np.float64, 3: np.int32, 4: np.uint8, 9: np.int64}


def events(folder):
    """Yields the step and the value of each summary in a folder, in the order of the files."""
    for path in sorted(folder.iterdir()):
        if not path.name.startswith("events"):
            continue
        for event in map(Event.FromString, records(path)):
            for value in event.summary.value:
                yield event.step, value


def written(folder):
    """Returns `{tag: [(step, value)]}`: arrays, or lists of strings."""
    found = {}
    for step, value in events(folder):
        found.setdefault(value.tag, []).append((step, content(value.tensor)))
    return found


def content(tensor):
    """Returns what a tensor holds: an array, or a list of strings."""
    if tensor.dtype == 7:
        return list(tensor.string_val)
    shape = [dim.size for dim in tensor.tensor_shape.dim]
    return np.frombuffer(tensor.tensor_content, TYPES[tensor.dtype]).reshape(shape)


def records(path):
    """Yields the records of an event file: a length of 8 bytes, its checksum of 4, the data, and their checksum."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        yield data[at + 12 : at + 12 + size]
        at += size + 16
