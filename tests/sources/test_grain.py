"""Grain: the recommended data library."""

import gc
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
from evaluation import BATCH, ROWS, X, Y
from laws import PositionLaws, batches, rows, slices, strategy_of
from simulation import wait_for

import phalanx
from phalanx.errors import InputError

grain = pytest.importorskip("grain", reason="Grain is in the extra [data]")
experimental = pytest.importorskip("grain.experimental")


@pytest.fixture(autouse=True)
def grain_has_ended():
    """Grain ends its own threads some time after its iterators."""
    gc.freeze()  # A collection takes a second otherwise, for all objects of JAX and Keras.
    yield
    gc.collect()
    gc.unfreeze()
    wait_for(lambda: not any(t.name.startswith("grain") for t in threading.enumerate()))


def row(i: int):
    return X[i], Y[i]


def records():
    return grain.MapDataset.range(ROWS).map(row)


def encoded(i: int) -> bytes:
    return X[i].tobytes() + Y[i].tobytes()


def decoded(record: bytes):
    return np.frombuffer(record[:-4], "float32"), np.frombuffer(record[-4:], "int32")[0]


def array_records(folder: Path) -> list[str]:
    module = pytest.importorskip("array_record.python.array_record_module")
    for number, s in enumerate(slices(35)):
        writer = module.ArrayRecordWriter(str(folder / f"{number}.arrayrecord"), "group_size:1")
        for i in range(ROWS)[s]:
            writer.write(encoded(i))
        writer.close()
    return sorted(map(str, folder.glob("*.arrayrecord")))


def read_array_record(path: str):
    return grain.MapDataset.source(grain.sources.ArrayRecordDataSource(path)).map(decoded)


def tfrecords(folder: Path):
    """Files of records one after the other; Grain does not check their sums."""
    for number, s in enumerate(slices(35)):
        with open(folder / f"{number}.tfrecord", "wb") as file:
            for i in range(ROWS)[s]:
                file.write(struct.pack("<QI", len(encoded(i)), 0) + encoded(i) + struct.pack("<I", 0))
    return phalanx.data.from_files(f"{folder}/*.tfrecord", lambda p: experimental.TFRecordIterDataset(p).map(decoded))


def parquet(folder: Path):
    arrow = pytest.importorskip("pyarrow")
    tables = pytest.importorskip("pyarrow.parquet")
    for number, s in enumerate(slices(35)):
        x = arrow.array(list(X[s]), arrow.list_(arrow.float32()))
        tables.write_table(arrow.table({"x": x, "y": Y[s]}), folder / f"{number}.parquet")
    return phalanx.data.from_files(f"{folder}/*.parquet", experimental.ParquetIterDataset)


def data_loader():
    sampler = grain.samplers.IndexSampler(ROWS, shuffle=False, num_epochs=1)
    operations = [grain.transforms.Batch(BATCH, drop_remainder=False)]
    return grain.DataLoader(data_source=list(zip(X, Y, strict=True)), sampler=sampler, operations=operations)


class TestGrain(PositionLaws):
    """Each of its datasets, and each kind of file that it reads."""

    SOURCES = {
        "map_dataset_of_batches": batches(lambda _: records().batch(BATCH)),
        "map_dataset_of_rows": rows(lambda _: records()),
        "shuffled_map_dataset": rows(lambda _: records().shuffle(seed=3)),
        "iter_dataset_of_batches": batches(lambda _: records().to_iter_dataset().batch(BATCH)),
        "iter_dataset_of_rows": rows(lambda _: records().to_iter_dataset()),
        "prefetched_iter_dataset": batches(
            lambda _: records().to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)).batch(BATCH)
        ),
        "filtered_iter_dataset": rows(
            lambda _: (
                grain.MapDataset.range(ROWS * 11 // 10)
                .filter(lambda i: i % 11 < 10)
                .map(lambda i: row(i - i // 11))
                .to_iter_dataset()
            )
        ),
        "data_loader": batches(lambda _: data_loader()),
        "array_record_files": rows(lambda f: phalanx.data.from_files(array_records(f), read_array_record)),
        "interleaved_files": rows(lambda f: phalanx.data.from_files(array_records(f), read_array_record, interleave=2)),
        "array_record_source": rows(
            lambda f: grain.MapDataset.source(grain.sources.ArrayRecordDataSource(array_records(f))).map(decoded)
        ),
        "tfrecord_files": rows(tfrecords),
        "parquet_files": rows(parquet),
    }


def test_array_records_are_bytes(folder):
    """Grain's own source is files. Its records have to be decoded before they can be placed on devices."""
    source = grain.sources.ArrayRecordDataSource(array_records(folder))
    (shard,) = phalanx.explain_sharding(source, strategy_of(2), batch_size=BATCH)
    assert shard.num_files == len(slices(35))
    dataset = strategy_of(2).experimental_distribute_dataset(source, batch_size=BATCH)
    with pytest.raises(InputError, match=r"a batch of dtype \S*S28: only numbers"):
        next(iter(dataset))


def test_filter_leaves_rows_out_or_is_refused():
    """A filter on an `IterDataset` drops rows. On a `MapDataset` it leaves holes, which is an error."""
    even = records().filter(lambda record: record[1] % 2 == 0)
    dataset = strategy_of(3).experimental_distribute_dataset(even.to_iter_dataset(), batch_size=BATCH)
    kept = [y for _, labels in dataset for part in labels.values for y in np.asarray(part)]
    assert kept == [y for y in Y if y % 2 == 0]
    message = f"record {(Y % 2).argmax()} of a FilterMapDataset: it is None, because a filter"
    with pytest.raises(InputError, match=message):
        list(strategy_of(3).experimental_distribute_dataset(even, batch_size=BATCH))
