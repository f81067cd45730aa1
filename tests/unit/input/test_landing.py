"""How often a batch is copied, where, and by which thread: without a clock and without a GPU."""

import threading

import jax
import numpy as np
import pytest
from simulation import mirrored

import phalanx
from phalanx._src.input import landing
from phalanx._src.mesh import arrays
from phalanx._src.mesh.memory import Pool
from phalanx.errors import InputError
from phalanx.keras.data import EpochData

ROWS, WIDTH, BATCHES = 8, 1 << 16, 6
"""Batches of 2 MiB."""

X = arrays.empty((ROWS * BATCHES, WIDTH), np.float32)
X[:] = np.arange(len(X))[:, None]
DEVICE_X = jax.numpy.asarray(X)


def cut(array):
    return [array[i : i + ROWS] for i in range(0, len(array), ROWS)]


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
    # JAX arrays are stacked, which is a copy.
    copies = 1 if group > 1 else copies
    assert sum(size for size, _ in writes) == copies * X.nbytes
    assert {name for _, name in writes} <= {thread or "phalanx-prefetch", "MainThread" if thread is None else thread}


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
