"""Input that is not what it should be: a right result, or one typed error that says what to write."""

import pathlib

import keras
import numpy as np
import pytest
from simulation import prefetching

import phalanx
from phalanx.errors import ContextError, InputError, InvalidArgumentError
from phalanx.options import AutoShardPolicy, InputOptions, InputReplicationMode

PER_REPLICA, PER_WORKER = InputReplicationMode.PER_REPLICA, InputReplicationMode.PER_WORKER


@pytest.fixture
def strategy():
    """Two replicas."""
    return phalanx.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture(params=["list", "generator", "function"])
def as_dataset(request):
    """Makes a dataset of batches."""
    kinds = {"list": list, "generator": iter, "function": lambda batches: lambda: iter(batches)}
    return kinds[request.param]


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        (
            np.float32(1),
            r"a batch of shapes \[\(\)\]: every leaf must be an array .*\nHINT: group the rows into batches",
        ),
        (3, r"a batch of shapes \[\(\)\]: every leaf must be an array"),
        ({}, r"a batch of shapes \[\]: every leaf must be an array"),
        (
            (np.ones(2), np.ones(3)),
            r"a batch of shapes \[\(2,\), \(3,\)\]: its leaves have different numbers of rows: \[2, 3\]",
        ),
        ({"x": np.ones(2), "y": 1.0}, r"a batch of shapes \[\(2,\), \(\)\]: every leaf must be an array"),
        (np.array(["a", "b"]), "a batch of dtype .*U1: only numbers and bools"),
        (np.array(["2020-01-01"], dtype="M8[D]"), "a batch of dtype .*datetime64"),
        (np.array([None, {}]), "a batch of dtype object: only numbers"),
    ],
)
def test_batches_that_cannot_be_split(strategy, as_dataset, batch, match):
    """At the latest when the batch is asked for; no thread remains."""
    with pytest.raises(InputError, match=match):
        next(iter(strategy.experimental_distribute_dataset(as_dataset([batch]))))
    assert prefetching() == []


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([[1, 2], [1, 2, 3]], r"records of shapes \[\(2,\), \(3,\)\]: .*\nHINT: pad the rows"),
        (
            [np.ones(2), np.ones(2)],
            "a list of 2 arrays with batch_size=2: is ambiguous, because each array could be one row.*\nHINT: np.stack",
        ),
        (5, "dataset=int: must be a pytree of arrays, or an iterable of rows"),
        ("a*.txt", "dataset='a.*.txt': text or a path is not a dataset.\nHINT: phalanx.data.from_files"),
        (b"abc", "dataset=b'abc': text or a path is not a dataset"),
        (bytearray(b"abc"), "dataset=bytearray.b'abc'.: text or a path is not"),
        (list, r"dataset=list: a class is not a dataset.\nHINT: pass an instance: list\(\.\.\.\)"),
    ],
)
def test_what_is_neither_rows_nor_columns(strategy, rows, match):
    """The message says what to write."""
    with pytest.raises(InputError, match=match):
        strategy.experimental_distribute_dataset(rows, batch_size=2)


def test_lists_are_columns_in_a_nest(strategy):
    """As in tf.data: labels that are a list belong to the rows of the images."""
    (batch,) = strategy.experimental_distribute_dataset((np.ones((4, 3)), [1, 2, 3, 4]), batch_size=4)
    assert strategy.gather(batch[1], axis=0).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        (
            [{"x": [1], "y": np.ones(2)}, {"x": [1], "y": np.ones(3)}],
            r"shapes \[\(2,\), \(3,\)\]: .*\nHINT: pad the rows",
        ),
        ([{"a": 1}, {"b": 2}], "the records of one batch: they have different structures"),
        (
            ["to be", "or not"],
            "a batch of dtype .*U[56]: only numbers and bools can be placed on devices.\nHINT: encode",
        ),
        ([b"ab", b"cd"], "a batch of dtype .*S2: only numbers and bools"),
    ],
)
def test_rows_that_make_no_batch(strategy, as_dataset, rows, match):
    """Ragged rows, rows of various structures, and text."""
    with pytest.raises(InputError, match=match):
        next(iter(strategy.experimental_distribute_dataset(as_dataset(rows), batch_size=2)))


@pytest.mark.parametrize(
    ("dataset", "match"),
    [
        (np.ones(4), "dataset=ndarray: is not an iterable of batches.\nHINT: pass batch_size=64"),
        (3, "dataset=int: is not an iterable of batches"),
        (None, "dataset=NoneType: is not an iterable of batches"),
        (keras.utils.PyDataset, "dataset=PyDataset: a class is not a dataset"),
        (
            (np.ones(4), np.ones(4)),
            "a dataset that is a tuple of arrays: without batch_size, .*\nHINT: pass batch_size=64",
        ),
        (
            {"x": np.ones(4)},
            "a dataset that is a dict of arrays: without batch_size, a dataset must be an iterable of batches",
        ),
        (
            phalanx.get_strategy().make_experimental_numpy_dataset(np.ones(4)),
            "NumpyDataset: a dataset of single rows needs a global batch size",
        ),
    ],
)
def test_a_missing_batch_size(strategy, dataset, match):
    """At once."""
    with pytest.raises(InputError, match=match):
        strategy.experimental_distribute_dataset(dataset)


def test_files_without_a_batch_size(strategy, tmp_path):
    """They hold single rows."""
    (tmp_path / "a").write_text("1")
    with pytest.raises(
        InputError, match="dataset=Files: a dataset of single rows needs a global batch size.\nHINT: pass batch_size=64"
    ):
        strategy.experimental_distribute_dataset(phalanx.data.from_files([tmp_path / "a"], open))


class Batches(keras.utils.PyDataset):
    """Batches."""

    def __len__(self):
        return 1

    def __getitem__(self, i):
        return np.ones(2)


def test_a_batch_size_for_batches(strategy):
    """What batches itself has one."""
    numpy_dataset = strategy.make_experimental_numpy_dataset(np.ones(4)).batch(2)
    for dataset in (Batches(), numpy_dataset):
        with pytest.raises(
            InputError, match=r"batch_size=4 for a \w+: the dataset already yields batches.*\nHINT: leave out"
        ):
            strategy.experimental_distribute_dataset(dataset, batch_size=4)


class TooLong:
    """Says that it has five rows, and has two."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return [7, 8][index]


def test_a_length_that_is_not_true(strategy):
    """The error says which record is missing."""
    with pytest.raises(InputError, match="record 2 of a TooLong: the record does not exist .*the `len` 5.\nHINT: "):
        list(strategy.experimental_distribute_dataset(TooLong(), batch_size=5))


@pytest.mark.parametrize("size", [0, -3, 2.5, True, "4"])
@pytest.mark.parametrize("dataset", [np.ones(4), range(4), lambda: iter([])], ids=["array", "sequence", "generator"])
def test_bad_batch_size(strategy, dataset, size):
    """With its value."""
    with pytest.raises(InvalidArgumentError, match=f"batch_size={size!r}: must be"):
        strategy.experimental_distribute_dataset(dataset, batch_size=size)


@pytest.mark.parametrize(
    "dataset", [[], lambda: iter([]), np.ones(0), range(0)], ids=["list", "stream", "array", "range"]
)
def test_an_empty_dataset(strategy, dataset):
    """No batches; their shape is unknown."""
    batch_size = None if isinstance(dataset, list) or callable(dataset) else 4
    distributed = strategy.experimental_distribute_dataset(dataset, batch_size=batch_size)
    assert list(distributed) == list(distributed) == []
    with pytest.raises(InputError, match="element_spec: the dataset has no further batch"):
        _ = distributed.element_spec


def test_dataset_distributed_twice_is_refused(strategy):
    """The message says which one to pass."""
    dataset = strategy.experimental_distribute_dataset([np.ones(2)])
    with pytest.raises(InputError, match="the dataset is already distributed.\nHINT: pass the original dataset"):
        strategy.experimental_distribute_dataset(dataset)


@pytest.mark.parametrize("where", ["run", "function"])
@pytest.mark.parametrize("how", ["next", "get_next", "get_next_as_optional"])
def test_next_in_a_traced_step(strategy, where, how):
    """It would be baked in."""
    iterator = iter(strategy.experimental_distribute_dataset([np.ones(2)] * 9))
    read = {"next": lambda: next(iterator), "get_next": iterator.get_next}.get(how, iterator.get_next_as_optional)
    step = phalanx.function(read) if where == "function" else read
    with pytest.raises(
        ContextError, match="next.iterator. was called in a traced step.*\nHINT: pass the batch to the step"
    ):
        strategy.run(step)


@pytest.mark.parametrize("method", ["experimental_distribute_dataset", "distribute_datasets_from_function"])
def test_distributing_in_a_replica_function(strategy, method):
    """It is for outside."""
    with pytest.raises(
        ContextError, match=f"{method} was called in replica context.*\nHINT: distribute the dataset outside"
    ):
        strategy.run(lambda: getattr(strategy, method)([np.ones(2)]))


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_a_batch_smaller_than_the_replicas(replicas):
    """Some have no row, and nothing is lost."""
    strategy = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    dataset = strategy.experimental_distribute_dataset(np.arange(3.0), batch_size=1)
    means = [strategy.run(phalanx.nn.compute_average_loss, args=(batch,)) for batch in dataset]
    assert [float(strategy.reduce("SUM", m, axis=None)) for m in means] == [0, 1, 2]


@pytest.mark.parametrize("name", ["list", "generator"])
def test_a_failing_source(strategy, name):
    """Its own error, after the batches before it."""

    class Failing(list):
        def __getitem__(self, i):
            if i == 2:
                raise OSError("disk gone")
            return super().__getitem__(i)

    def generator():
        yield from [np.ones(2)] * 2
        raise OSError("disk gone")

    iterator = iter(
        strategy.experimental_distribute_dataset(Failing([np.ones(2)] * 3) if name == "list" else generator)
    )
    next(iterator)
    next(iterator)
    with pytest.raises(OSError, match="disk gone"):
        next(iterator)
    assert prefetching() == []


def test_a_file_that_disappears_between_epochs(strategy, tmp_path):
    """The first epoch is whole; the second says which file is gone."""
    for name in "ab":
        (tmp_path / name).write_text("1\n2\n")
    reader = lambda path: list(map(int, pathlib.Path(path).read_text().split()))  # noqa: E731
    files = phalanx.data.from_files(str(tmp_path / "*"), reader)
    dataset = strategy.experimental_distribute_dataset(files, batch_size=2)
    assert len(list(dataset)) == 2
    (tmp_path / "b").unlink()
    with pytest.raises(
        InputError,
        match="the file .*/b: the file has disappeared since the dataset was created.\nHINT: call phalanx.data",
    ):
        list(dataset)


@pytest.mark.parametrize("options", ["fast", 3, {}, AutoShardPolicy.DATA])
def test_options_of_another_type(strategy, options):
    """What is given is not ignored."""
    for distribute in (strategy.experimental_distribute_dataset, strategy.distribute_datasets_from_function):
        with pytest.raises(InvalidArgumentError, match="options=.*: must be InputOptions or None"):
            distribute([np.ones(4)], options)


def test_a_batch_size_in_the_place_of_options(strategy):
    """The hint is the keyword that was left out."""
    with pytest.raises(InvalidArgumentError, match=r"options=96: must be .*\nHINT: batch_size=96$"):
        strategy.experimental_distribute_dataset(np.ones((96, 2)), 96)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"experimental_per_replica_buffer_size": -1}, "experimental_per_replica_buffer_size=-1: must be a number of"),
        ({"experimental_per_replica_buffer_size": 1.5}, "experimental_per_replica_buffer_size=1.5: must be a number"),
        ({"experimental_per_replica_buffer_size": True}, "experimental_per_replica_buffer_size=True: must be a number"),
        (
            {"experimental_replication_mode": "PER_REPLICA"},
            "experimental_replication_mode='PER_REPLICA': must be an Inp",
        ),
        ({"auto_shard_policy": 2}, "auto_shard_policy=2: must be an AutoShardPolicy.\nHINT: phalanx.data.AutoShardPol"),
        (
            {"experimental_place_dataset_on_device": True},
            "experimental_place_dataset_on_device=True: a dataset on a device belongs to one replica.*\nHINT: .*PER_REPLICA",
        ),
        (
            {
                "experimental_place_dataset_on_device": True,
                "experimental_replication_mode": PER_REPLICA,
                "experimental_fetch_to_device": True,
            },
            "experimental_place_dataset_on_device=True with experimental_fetch_to_device=True",
        ),
    ],
)
def test_bad_input_options(kwargs, match):
    """When they are made."""
    with pytest.raises(InvalidArgumentError, match=match):
        InputOptions(**kwargs)


@pytest.mark.parametrize("on_device", [False, True])
def test_one_dataset_for_each_replica(strategy, on_device):
    """There is only one."""
    options = InputOptions(experimental_replication_mode=PER_REPLICA, experimental_place_dataset_on_device=on_device)
    with pytest.raises(
        InvalidArgumentError,
        match="with InputReplicationMode.PER_REPLICA: this method splits one dataset .*\nHINT: distrib",
    ):
        strategy.experimental_distribute_dataset([np.ones(2)], options)


@pytest.mark.parametrize(
    ("dataset", "batch_size", "state", "match"),
    [
        (np.arange(4), 2, {"batches": 1}, "a position of this dataset has the entries 'records'"),
        ([np.ones(2)], None, {"records": 1}, "a position of this dataset has the entries 'batches'"),
        (
            [np.ones(2)],
            None,
            {"workers": [{}, {}]},
            "set_state of a position of 2 workers: the number of workers is now 1",
        ),
        (np.arange(4), 2, {}, "a position of this dataset has the entries 'records'"),
    ],
)
def test_wrong_positions_leave_the_iterator_usable(strategy, dataset, batch_size, state, match):
    """Are refused, and the iterator can go on."""
    iterator = iter(strategy.experimental_distribute_dataset(dataset, batch_size=batch_size))
    with pytest.raises(InputError, match=match):
        iterator.set_state(state)
    assert next(iterator) is not None


def test_values_of_another_strategy(strategy):
    """A batch for two replicas does not fit three."""
    (batch,) = strategy.experimental_distribute_dataset([np.arange(4)])
    other = phalanx.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    with pytest.raises(InvalidArgumentError, match="a PerReplica of 2 components: the strategy .* has 3 replicas"):
        other.run(lambda x: x, args=(batch,))
