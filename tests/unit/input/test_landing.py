"""How often a batch is copied, where, and by which thread: without a clock and without a GPU."""

import math
import re
import threading

import jax
import keras
import numpy as np
import pytest
from simulation import mirrored

import phalanx
from phalanx._src.input import landing
from phalanx._src.input.sources import rows as sources_rows
from phalanx._src.mesh import arrays, topology
from phalanx._src.mesh.memory import Pool
from phalanx._src.mesh.values import is_distributed
from phalanx.errors import InputError
from phalanx.keras.data import EpochData

ROWS, WIDTH, BATCHES = 8, 1 << 16, 6
"""Batches of 2 MiB."""

X = arrays.empty((ROWS * BATCHES, WIDTH), np.float32)
X[:] = np.arange(len(X))[:, None]
DEVICE_X = jax.numpy.asarray(X)


def cut(array, size=ROWS):
    return [array[i : i + size] for i in range(0, len(array), size)]


@pytest.fixture
def writes(monkeypatch):
    """The bytes of each copy, and the thread that made it."""
    made, write = [], landing.write

    def note(out, leaves, counts):
        made.append((out.nbytes, threading.current_thread().name))
        write(out, leaves, counts)

    monkeypatch.setattr(landing, "write", note)
    return made


def in_fit(strategy, x, *, alone, group=1, **options):
    data = EpochData(strategy, x, steps=None, group=group, **options)
    if alone:
        data.read_beside()
    return [batch for _, parts in data.epoch() for batch, _ in parts]


def whole(strategy, batches, steps):
    """Returns the first number of each row."""
    found = []
    for batch in batches:
        parts = [np.asarray(x)[..., 0] for x in strategy.experimental_local_results(batch)]
        found += (
            np.concatenate(parts, axis=-1).ravel().tolist()
            if steps == 1
            else np.concatenate(parts, axis=1).ravel().tolist()
        )
    return found


@pytest.mark.cover(
    ["kind", "group", "replicas"],
    {
        *((kind, 1, 2) for kind in ("arrays", "shuffled", "JAX array", "generator")),
        *((kind, 3, 1) for kind in ("arrays beside callbacks", "JAX array", "generator of JAX arrays")),
        *((kind, 3, 2) for kind in ("arrays", "JAX array")),
        *((kind, 1, 1) for kind in ("arrays beside callbacks", "generator of JAX arrays")),
    },
)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(
    ("kind", "copies", "thread"),
    [
        ("arrays", 1, "phalanx-prefetch"),
        ("arrays beside callbacks", 1, "MainThread"),
        ("shuffled", 1, "phalanx-prefetch"),
        ("JAX array", 0, None),
        ("generator", 1, "phalanx-prefetch"),
        ("generator of JAX arrays", 0, None),
    ],
)
def test_batches_of_fit_are_copied_once(writes, replicas, group, kind, copies, thread):
    """By the thread that reads ahead, unless code of the user runs between two batches; into the stack, if there is one."""
    strategy = mirrored(replicas)
    options = {} if "generator" in kind else {"batch_size": ROWS, "shuffle": kind == "shuffled"}
    x = {
        "JAX array": DEVICE_X,
        "generator": ((b,) for b in cut(X)),
        "generator of JAX arrays": ((b,) for b in cut(DEVICE_X)),
    }
    batches = in_fit(strategy, x.get(kind, X), alone="beside" not in kind, group=group, **options)
    batches = [batch[0] if isinstance(batch, tuple) else batch for batch in batches]
    rows = whole(strategy, batches, group)
    assert (sorted(rows) if kind == "shuffled" else rows) == list(range(len(X)))
    # JAX arrays are stacked, which is a copy, unless the steps of one replica follow each other in one array.
    copies = 1 if group > 1 and (kind, replicas) != ("JAX array", 1) else copies
    assert sum(size for size, _ in writes) == copies * X.nbytes
    # The first batch, which shows how large they are, is read by the caller.
    assert {name for _, name in writes[group:]} <= {
        thread or "phalanx-prefetch",
        "MainThread" if thread is None else thread,
    }


@pytest.mark.parametrize(
    ("x", "shuffle", "is_read"), [(X, False, True), (DEVICE_X, False, False), (DEVICE_X, True, True)]
)
def test_a_thread_reads_what_the_host_copies(x, shuffle, is_read):
    """Rows of a device in their order cost the host nothing, so the caller takes them; NumPy gathers shuffled rows of a CPU."""
    data = EpochData(mirrored(1), x, steps=None, group=1, batch_size=ROWS, shuffle=shuffle)
    data.read_beside()
    epoch = data.epoch()
    next(epoch)
    assert ("phalanx-prefetch" in {thread.name for thread in threading.enumerate()}) == is_read
    assert len(list(epoch)) == BATCHES - 1


def places(value):
    """Returns the addresses of the parts of a batch."""
    data = value.data if isinstance(value, phalanx.PerReplica) else value
    return {shard.data.unsafe_buffer_pointer() for shard in data.addressable_shards}


@pytest.mark.parametrize("replicas", [1, 2])
def test_arrays_of_devices_are_used_where_they_are(writes, replicas):
    """Batches of a dataset function, and values of a function: nothing is copied, and nothing passes through NumPy's memory."""
    strategy, parts = mirrored(replicas), cut(DEVICE_X)
    dataset = strategy.distribute_datasets_from_function(lambda context: parts)
    shared = {x.unsafe_buffer_pointer() for x in parts}
    assert {place for batch in dataset for place in places(batch)} == shared
    values = strategy.experimental_distribute_values_from_function(lambda c: parts[c.replica_id_in_sync_group])
    assert places(values) == {x.unsafe_buffer_pointer() for x in parts[:replicas]}
    assert not writes


@pytest.fixture
def transfers(monkeypatch, capfd):
    """A function that returns the bytes that have gone to devices, where NumPy cannot read the arrays of these, as on a GPU.

    What has come from a device to the host would have to go back to a device, and so count.
    """
    for module in (landing, sources_rows, topology):
        monkeypatch.setattr(module, "is_on_cpu", lambda _: False)
    jax.config.update("jax_transfer_guard_host_to_device", "log_explicit")
    yield lambda: [
        math.prod(map(int, shape.split(","))) * np.dtype(dtype).itemsize
        for dtype, shape in re.findall(
            r"host-to-device transfer: aval=ShapedArray\((\w+)\[([\d,]+)\]", capfd.readouterr().err
        )
    ]
    jax.config.update("jax_transfer_guard_host_to_device", None)


class Batches(keras.utils.PyDataset):
    """Batches of a PyDataset."""

    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def __len__(self):
        return len(self.parts)

    def __getitem__(self, index):
        return (self.parts[index],)


SIZE = 10
"""Rows of a batch of which the last one is short, and no replica has as many as another."""
ARRAYS = {"NumPy": lambda: np.array(X[:, :4]), "devices": lambda: DEVICE_X[:, :4]}
IN_FIT = {
    "array": lambda x: (x, {"batch_size": SIZE, "shuffle": False}),
    "shuffled": lambda x: (x, {"batch_size": SIZE, "shuffle": True}),
    "dict": lambda x: ({"a": x, "b": x}, {"batch_size": SIZE, "shuffle": False}),
    "generator": lambda x: (((part,) for part in cut(x, SIZE)), {}),
    "PyDataset": lambda x: (Batches(cut(x, SIZE)), {"shuffle": False}),
}
IN_LOOPS = {
    "array": lambda s, x: s.experimental_distribute_dataset(x, batch_size=SIZE),
    "batches": lambda s, x: s.experimental_distribute_dataset(cut(x, SIZE)),
    "generator": lambda s, x: s.experimental_distribute_dataset(lambda: iter(cut(x, SIZE))),
    "PyDataset": lambda s, x: s.experimental_distribute_dataset(Batches(cut(x, SIZE))),
    "function": lambda s, x: s.distribute_datasets_from_function(lambda context: cut(x, ROWS)),
    "uneven function": lambda s, x: s.distribute_datasets_from_function(lambda context: cut(x, SIZE)),
}


def rows_of(strategy, leaf, count):
    """The first number of each row of a batch, or of a stack of some batches."""
    parts = [np.asarray(x)[..., 0] for x in strategy.experimental_local_results(leaf)]
    steps = [parts] if parts[0].ndim == 1 else [[part[i] for part in parts] for i in range(min(count, len(parts[0])))]
    return [row for step in steps for part in step for row in part.tolist()]


WAYS = [("fit", kind) for kind in IN_FIT] + [("loop", kind) for kind in IN_LOOPS]
COVER = {
    (kind, *cell)
    for i, kind in enumerate(WAYS)
    for cell in ([("NumPy", 1, 1), ("devices", 3, 2)], [("NumPy", 3, 2), ("devices", 1, 2)])[i % 2]
} | {(kind, "devices", 3, 1) for kind in WAYS[::4]}


@pytest.mark.cover(["kind", "place", "group", "replicas"], COVER)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("place", ARRAYS)
@pytest.mark.parametrize("kind", WAYS, ids=" of ".join)
def test_rows_go_to_the_devices_once_at_most(transfers, kind, place, group, replicas):
    """Rows of devices never, in order or shuffled, in one array or several, on one device or two."""
    (way, name), strategy, x = kind, mirrored(replicas), ARRAYS[place]()
    transfers()
    if way == "fit":
        data, options = IN_FIT[name](x)
        batches = [
            part for _, parts in EpochData(strategy, data, steps=None, group=group, **options).epoch() for part in parts
        ]
    else:
        dataset = IN_LOOPS[name](strategy, x)
        batches = [(batch, 3) for batch in (dataset if group == 1 else dataset.batches(steps=group))]
    gone = transfers()
    leaves = [(leaf, count) for batch, count in batches for leaf in jax.tree.leaves(batch, is_leaf=is_distributed)]
    rows = [row for leaf, count in leaves for row in rows_of(strategy, leaf, count)]
    assert sorted(rows) == sorted(x[:, 0].tolist() * (len(rows) // len(x)))
    if place == "devices":
        # Which rows a shuffle takes is known on the host.
        assert max(gone, default=0) < SIZE * 4 * 4
    else:
        assert sum(gone) >= x.nbytes


@pytest.mark.usefixtures("transfers")
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("group", [1, 3])
def test_rows_of_one_array_are_laid_out_by_one_program(monkeypatch, group, shuffle, replicas):
    """A batch or a stack of several steps, on one device or two, is one call for each leaf."""
    calls, program = [], sources_rows._taken
    monkeypatch.setattr(sources_rows, "_taken", lambda *args: calls.append(args) or program(*args))
    batches = in_fit(mirrored(replicas), DEVICE_X[:, :4], alone=True, group=group, batch_size=ROWS, shuffle=shuffle)
    assert len(batches) == BATCHES // group
    assert len(calls) == len(batches) + 1  # One more for the digest of the first batch.


@pytest.mark.parametrize("replicas", [1, 2])
def test_values_of_devices_stay_there(transfers, replicas):
    """Values that a function returns per replica."""
    parts = cut(ARRAYS["devices"](), ROWS)
    transfers()
    values = mirrored(replicas).experimental_distribute_values_from_function(
        lambda c: parts[c.replica_id_in_sync_group]
    )
    assert max(transfers(), default=0) < 64
    assert [x[:, 0].tolist() for x in map(np.asarray, mirrored(replicas).experimental_local_results(values))] == [
        x[:, 0].tolist() for x in parts[:replicas]
    ]


@pytest.mark.parametrize("kind", ["array", "generator", "list", "values", "fit", "fit of a generator"])
@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (np.zeros(4, [("a", "f4"), ("b", "i4")]), "structured array.*\nHINT: one array per field: {'a': x\\['a'\\]"),
        (np.zeros(4, np.longdouble), 'at most 64 bits.\nHINT: x.astype\\("float64"\\)'),
        (np.zeros(4, np.clongdouble), 'at most 64 bits.\nHINT: x.astype\\("complex128"\\)'),
        (np.full(4, 1e300), "the number 1e\\+300 of dtype float64: it does not fit"),
        (np.arange(4, dtype=">f4"), None),
        (np.arange(4, dtype=">i8"), None),
    ],
)
def test_odd_arrays_are_converted_or_refused(strategy, kind, odd, message):
    """In the same way from every kind of source."""

    def first():
        if kind == "values":
            return strategy.experimental_distribute_values_from_function(
                lambda c: odd[2 * c.replica_id_in_sync_group :][:2]
            )
        if kind == "fit":
            return in_fit(strategy, odd, alone=False, batch_size=4)[0]
        if kind == "fit of a generator":
            return in_fit(strategy, ((odd,) for _ in range(1)), alone=False)[0][0]
        data = {"array": odd, "generator": lambda: iter([odd]), "list": [odd]}[kind]
        return next(iter(strategy.experimental_distribute_dataset(data, batch_size=4 if kind == "array" else None)))

    if message is None:
        assert [x.tolist() for x in strategy.experimental_local_results(first())] == [[0, 1], [2, 3]]
        return
    with pytest.raises(InputError, match=f"(?s){message}"):
        first()


def test_pool_serves_all_steps_of_an_epoch():
    """A few blocks for many batches, if nobody keeps these."""
    strategy = phalanx.MirroredStrategy(["cpu:0"])
    data = EpochData(strategy, X, steps=None, group=1, batch_size=ROWS, shuffle=False)
    places = {batch.unsafe_buffer_pointer() for _ in range(4) for _, ((batch, _),) in data.epoch()}
    assert len(places) < 2 * BATCHES
    assert Pool().empty((1, 3), np.int8).shape == (1, 3)
