"""Which sharding policy is in force, and what is said about it."""

import functools
import logging
import pathlib

import numpy as np
import pytest
from simulation import DATA, FILE, MOVES, open_all, rows, rows_of, take, workers

import phalanx
from phalanx._src.input.shard import InputWorker
from phalanx._src.input.sharding import CutBatches, plan
from phalanx._src.input.sources.adapt import source_of
from phalanx._src.options import AutoShardPolicy
from phalanx.errors import InputError

AUTO, OFF, HINT = AutoShardPolicy.AUTO, AutoShardPolicy.OFF, AutoShardPolicy.HINT


@pytest.fixture
def files(tmp_path):
    """Three files of four numbers each."""
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text("".join(f"{4 * i + j}\n" for j in range(4)))
    return phalanx.data.from_files(
        str(tmp_path / "*.txt"), lambda p: list(map(int, pathlib.Path(p).read_text().split()))
    )


def planned(dataset, policy, shape, batch_size=None):
    make = functools.partial(source_of, batch_size=batch_size)
    return [plan(dataset, make, policy, w) for w in workers(*shape)]


def rows_of_workers(taken):
    return [[x for pieces in taken for x in rows(pieces[index])] for index in range(len(taken[0]) if taken else 0)]


def epoch(dataset, policy, shape, batch_size=None):
    plans = planned(dataset, policy, shape, batch_size)
    return take([p.source.open(w, p.policy, None) for p, w in zip(plans, workers(*shape), strict=True)])


@pytest.mark.parametrize(
    ("kind", "policy", "count", "in_force", "agreed"),
    [
        ("files", AUTO, 1, FILE, False),
        ("files", AUTO, 2, FILE, True),
        ("files", AUTO, 3, FILE, True),
        ("files", AUTO, 4, DATA, False),
        ("files", FILE, 3, FILE, True),
        ("files", DATA, 2, DATA, False),
        ("files", OFF, 2, OFF, True),
        ("arrays", AUTO, 2, DATA, False),
        ("arrays", DATA, 2, DATA, False),
        ("arrays", FILE, 1, DATA, False),
    ],
)
def test_policy_in_force(files, kind, policy, count, in_force, agreed):
    """AUTO takes complete files if there are enough. A single worker reads everything, so it may have no files."""
    for p in planned(files if kind == "files" else np.arange(10), policy, (count, 2), 4):
        assert [s.policy for s in p.shards] == [in_force] * count
        assert (p.policy, p.agreed) == (FILE if in_force is FILE else DATA, agreed)


@pytest.mark.parametrize(
    ("policy", "count", "message"),
    [
        (FILE, 4, "AutoShardPolicy.FILE for 3 files: the dataset has 3 files for 4 workers.\nHINT: auto"),
        (FILE, 2, "AutoShardPolicy.FILE for .*: the dataset does not consist of files"),
        (HINT, 2, r"AutoShardPolicy.HINT for \[\]: the dataset has no method `shard\(num_workers"),
    ],
    ids=["few files", "no files", "no shard"],
)
def test_policy_that_cannot_be_followed(files, policy, count, message):
    """Every worker raises it, before the first step."""
    dataset = [] if policy is HINT else files if count == 4 else np.arange(4)
    for w in workers(count, 1):
        with pytest.raises(InputError, match=message):
            plan(dataset, lambda d: source_of(d, None if policy is HINT else 4), policy, w)


def test_auto_with_too_few_files_says_so(files, caplog):
    """In one line, on the chief, however many datasets there are."""
    planned(files, AUTO, (9, 1), 4)
    planned(files, AUTO, (9, 1), 4)
    assert [r.message for r in caplog.records] == [
        "3 files are too few for 9 workers, so each reads its rows of every batch"
    ]


def test_announcement_appears_once_on_chief(files, caplog):
    """As a warning if there are several workers."""
    for p, w in 2 * list(zip(planned(files, FILE, (2, 1), 4), workers(2, 1), strict=True)):
        p.announce(w)
    assert [r.message for r in caplog.records] == [
        "worker 0 of 2 reads 2 of 3 files (FILE)",
        "worker 1 of 2 reads 1 of 3 files (FILE)",
    ]
    assert {(r.name, r.levelno) for r in caplog.records} == {("phalanx.input", logging.WARNING)}


def test_announcement_of_many_workers_is_short(caplog):
    """The first 16 workers are named, and the others are counted."""
    chief = InputWorker(0, 20)
    with caplog.at_level(logging.INFO, "phalanx.input"):
        plan(np.zeros((40, 1)), functools.partial(source_of, batch_size=40), AUTO, chief).announce(chief)
    lines = [r.message for r in caplog.records]
    assert len(lines) == 17
    assert lines[15].startswith("worker 15 of 20 reads records 30..31 of every 40")
    assert lines[16].startswith("4 more workers read their shards")


ROWS = np.arange(100)


@pytest.mark.parametrize(
    ("dataset", "policy", "shape", "batch_size", "expected"),
    [
        (ROWS, AUTO, (1, 2), 8, "worker 0 of 1 reads all records of 100 (DATA)"),
        (ROWS, DATA, (2, 2), 8, "worker 0 of 2 reads records 0..3 of every 8, of 100 in all (DATA)"),
        (ROWS, DATA, (2, 2), 1, "worker 0 of 2 reads records 0..0 of every 1, of 100 in all (DATA)"),
        (ROWS, OFF, (2, 1), 8, "worker 0 of 2 reads all records of 100 (OFF)"),
        ([np.ones(4)] * 3, DATA, (2, 1), None, "0..1 of every 4, of 12 in all (DATA; each worker reads everything and"),
        (lambda: iter([]), DATA, (2, 1), None, "its part of every batch (DATA; each worker reads everything and keeps"),
        (lambda: iter([]), AUTO, (1, 1), None, "worker 0 of 1 reads all records (DATA)"),
    ],
)
def test_what_is_said(dataset, policy, shape, batch_size, expected):
    shard = planned(dataset, policy, shape, batch_size)[0].shards[0]
    assert expected in str(shard)


def test_a_worker_without_a_record():
    shard = planned(ROWS, DATA, (2, 1), 1)[0].shards[1]
    assert "worker 1 of 2 reads no record of every 1" in str(shard)
    assert shard.records == (1, 0)


def test_explain_sharding_returns_the_plan(strategy, files):
    """The same as data; also of a dataset that is distributed already."""
    (shard,) = phalanx.explain_sharding(files, strategy, batch_size=4)
    assert (shard.worker, shard.num_workers, shard.policy, shard.num_files) == (0, 1, FILE, 3)
    assert shard.files == files.paths
    assert phalanx.explain_sharding(strategy.experimental_distribute_dataset(files, batch_size=4), strategy) == (shard,)
    (off,) = phalanx.explain_sharding(np.arange(9), strategy, phalanx.InputOptions(auto_shard_policy=OFF), batch_size=4)
    assert (off.policy, off.num_records, off.records) == (OFF, 9, None)


@pytest.mark.parametrize("shape", [(2, 1), (3, 2), (4, 1)])
@pytest.mark.parametrize(("n", "b"), [(10, 4), (12, 6), (7, 1), (0, 3)])
def test_off_every_worker_reads_everything(shape, n, b):
    """In batches as many times smaller as there are workers."""
    taken = epoch(np.arange(n), OFF, shape, b)
    assert rows_of_workers(taken) == [list(range(n))] * (shape[0] if n else 0)
    assert all(sum(sum(p.counts) for p in pieces) <= shape[0] * -(-b // shape[0]) for pieces in taken)


@pytest.mark.parametrize(("before", "after"), MOVES[:4])
def test_off_goes_on_from_every_position(before, after):
    source = CutBatches(source_of(np.arange(10), 4))
    for steps in range(len(take(open_all(source, before))) + 1):
        readers = open_all(source, before)
        read = take(readers, steps)
        rest = take([source.open(w, DATA, r.get_state()) for w, r in zip(workers(*before), readers, strict=True)])
        assert rows_of_workers(read + rest) == [list(range(10))] * before[0]


class Sharded:
    def __init__(self, numbers):
        self.numbers = list(numbers)

    def shard(self, num_workers, worker):
        return type(self)(self.numbers[worker::num_workers])

    def __iter__(self):
        return iter(np.array(self.numbers[i : i + 4]) for i in range(0, len(self.numbers), 4))


class ShardedRows(Sharded):
    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, i):
        return self.numbers[i]


class ShardedList(list):
    def shard(self, num_workers, worker):
        return ShardedList(self[worker::num_workers])


@pytest.mark.parametrize(("kind", "batch_size"), [(Sharded, None), (ShardedRows, 4)])
@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (3, 2)])
def test_hint_lets_dataset_shard_itself(kind, batch_size, shape):
    """Each worker reads all of its shard. A single worker does not ask for one."""
    taken = epoch(kind(range(13)), HINT, shape, batch_size)
    assert rows_of_workers(taken) == [list(range(13))[index :: shape[0]] for index in range(shape[0])]


def test_hint_of_a_list_of_batches():
    taken = epoch(ShardedList([np.arange(4) + 4 * i for i in range(4)]), HINT, (2, 1))
    assert rows_of_workers(taken)[1] == [4, 5, 6, 7, 12, 13, 14, 15]


def test_hint_keeps_drop_remainder():
    """The shards are read as the dataset would have been."""
    make = functools.partial(source_of, batch_size=4, drop_remainder=True)
    p = plan(ShardedRows(range(10)), make, HINT, InputWorker(1, 2, 1))
    assert rows_of(take([p.source.open(InputWorker(1, 2, 1), p.policy, None)])) == [1, 3, 5, 7]
