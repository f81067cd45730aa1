"""NumPy, JAX, Keras, and whatever Python can iterate over."""

import itertools
from pathlib import Path

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from evaluation import BATCH, ROWS, X, Y, expected
from laws import PositionLaws, SourceLaws, batches, mirrored, rows, slices, strategy_of

import phalanx


class Batches:
    def __iter__(self):
        return ((X[s], Y[s]) for s in slices())


class Rows:
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return X[index], Y[index]


class KerasBatches(keras.utils.PyDataset):
    def __len__(self):
        return len(slices())

    def __getitem__(self, index):
        return X[slices()[index]], Y[slices()[index]]


class ReusedArrays:
    """Batches in the same two arrays each time."""

    def __iter__(self):
        x, y = np.empty((50, X.shape[1]), X.dtype), np.empty(50, Y.dtype)
        for s in slices(50):
            x[:], y[:] = X[s], Y[s]
            yield x, y


def make_batches():
    yield from Batches()


def make_rows():
    """A generator function of rows, as dicts of NumPy arrays and Python integers."""
    yield from ({"x": x, "y": int(y)} for x, y in zip(X, Y, strict=True))


def uneven_batches():
    """A generator function of batches of four sizes, the largest of them not first."""
    start = 0
    for size in itertools.cycle([20, 36, 3, 75]):
        if start >= ROWS:
            return
        yield X[start : start + size], Y[start : start + size]
        start += size


def from_function(strategy, folder, options=None):
    """Batches of one replica each, of a dataset of all rows for each input pipeline."""

    def dataset_fn(context):
        own = slice(context.input_pipeline_id, None, context.num_input_pipelines)
        x, y, size = X[own], Y[own], context.get_per_replica_batch_size(BATCH)
        return [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]

    return strategy.distribute_datasets_from_function(dataset_fn, options)


def from_function_per_replica(strategy, folder):
    mode = phalanx.InputReplicationMode.PER_REPLICA
    return from_function(strategy, folder, phalanx.InputOptions(experimental_replication_mode=mode))


def numpy_dataset(strategy, folder):
    dataset = strategy.make_experimental_numpy_dataset((X, Y)).batch(BATCH)
    return strategy.experimental_distribute_dataset(dataset)


def array_files(folder: Path, count: int = 7):
    """Files of a few rows to many."""
    edges = [ROWS * i**2 // count**2 for i in range(count + 1)]
    for i, (start, stop) in enumerate(itertools.pairwise(edges)):
        np.savez(folder / f"{i}.npz", x=X[start:stop], y=Y[start:stop])
    return phalanx.data.from_files(f"{folder}/*.npz", read_arrays)


def read_arrays(path):
    with np.load(path) as arrays:
        return list(zip(arrays["x"], arrays["y"], strict=True))


def text_files(folder: Path):
    """One row a line, as numbers."""
    for i, s in enumerate(slices(20)):
        lines = (",".join([*map(repr, x.tolist()), str(y)]) for x, y in zip(X[s], Y[s], strict=True))
        (folder / f"{i}.csv").write_text("\n".join(lines) + "\n")
    return phalanx.data.from_files(f"{folder}/*.csv", read_lines)


def read_lines(path):
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            *x, y = line.split(",")
            yield {"x": np.float32(x), "y": np.int32(y)}


class TestPython(PositionLaws):
    """Nothing but NumPy, JAX, Keras and Python."""

    SOURCES = {
        "numpy_arrays": rows(lambda _: (X, Y)),
        "numpy_dict": rows(lambda _: {"x": X, "y": Y.astype("int64")}),
        "jax_arrays": rows(lambda _: {"x": jnp.asarray(X), "y": jnp.asarray(Y)}),
        "numpy_dataset": numpy_dataset,
        "numpy_dataset_of_rows": lambda s, _: s.experimental_distribute_dataset(
            s.make_experimental_numpy_dataset({"x": X, "y": Y}), batch_size=BATCH
        ),
        "list_of_batches": batches(lambda _: [(X[s], Y[s]) for s in slices()]),
        "list_of_jax_batches": batches(lambda _: [(jnp.asarray(X[s]), jnp.asarray(Y[s])) for s in slices()]),
        "list_of_rows": rows(lambda _: list(zip(X, Y, strict=True))),
        "sequence_of_rows": rows(lambda _: Rows()),
        "iterable_of_batches": batches(lambda _: Batches()),
        "batches_in_the_same_arrays": batches(lambda _: ReusedArrays()),
        "generator_function_of_batches": batches(lambda _: make_batches),
        "generator_function_of_rows": rows(lambda _: make_rows),
        "generator_function_of_uneven_batches": batches(lambda _: uneven_batches),
        "keras_py_dataset": batches(lambda _: KerasBatches()),
        "array_files": rows(array_files),
        "text_files": rows(text_files),
    }


class TestFunctions(SourceLaws):
    """Each replica takes batches of its own."""

    SOURCES = {"per_worker": from_function, "per_replica": from_function_per_replica}


@pytest.mark.cover(["replicas"], {1, 3})
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("make", "batch_size"),
    [(make_batches, None), (lambda: map(lambda s: (X[s], Y[s]), slices()), None), (make_rows, BATCH)],
    ids=["generator", "map", "generator of rows"],
)
def test_what_can_be_read_once(make, batch_size, replicas):
    """A generator is exact too. It cannot be read from its beginning again, so it is not among the sources above."""
    dataset = strategy_of(replicas).experimental_distribute_dataset(make(), batch_size=batch_size)
    assert mirrored(replicas).run(dataset) == pytest.approx(expected(), rel=0, abs=1e-6)
