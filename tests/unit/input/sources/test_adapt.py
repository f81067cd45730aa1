"""Input that is not what it should be: a right result, or one typed error that says what to write."""

import keras
import numpy as np
import pytest
from simulation import mirrored, prefetching

import phalanx
from phalanx._src.options import AutoShardPolicy, InputOptions, InputReplicationMode
from phalanx.errors import ContextError, InputError, InvalidArgumentError

PER_REPLICA = InputReplicationMode.PER_REPLICA


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
        ({}, "a batch {}: it contains no array, so it has no rows.\nHINT: at least one array in each batch or record"),
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


RAGGED = r"records of shapes \[\(2,\), \(3,\)\]: the rows of one batch must have the same shape.*\nHINT: pad the rows"
AMBIGUOUS = "a list of 2 arrays with batch_size=2: is ambiguous, because each array could be one row.*\nHINT: np.stack"
NO_BATCH_SIZE = "a dataset of single rows needs a global batch size"


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 1

    def __getitem__(self, i):
        return np.ones(2)


def numpy_dataset():
    return phalanx.get_strategy().make_experimental_numpy_dataset(np.ones(4))


@pytest.mark.parametrize(
    ("dataset", "batch_size", "match"),
    [
        ([[1, 2], [1, 2, 3]], 2, RAGGED),
        ([np.ones(2), np.ones(2)], 2, AMBIGUOUS),
        (5, 2, "dataset=int: must be a pytree of arrays, or an iterable of rows"),
        ("a*.txt", 2, "dataset='a.*.txt': text or a path is not a dataset.\nHINT: phalanx.data.from_files"),
        (b"abc", 2, "dataset=b'abc': text or a path is not a dataset"),
        (bytearray(b"abc"), 2, "dataset=bytearray.b'abc'.: text or a path is not"),
        (list, 2, r"dataset=list: a class is not a dataset.\nHINT: pass an instance: list\(\.\.\.\)"),
        (
            np.ones(4),
            None,
            r"dataset=ndarray: is not an iterable of batches.\nHINT: experimental_distribute_dataset\(rows, batch_size=64\);",
        ),
        (3, None, "dataset=int: is not an iterable of batches"),
        (None, None, "dataset=NoneType: is not an iterable of batches"),
        (keras.utils.PyDataset, None, "dataset=PyDataset: a class is not a dataset"),
        (
            (np.ones(4), np.ones(4)),
            None,
            "a dataset that is a tuple of arrays: without batch_size, .*\nHINT: pass batch_size=64",
        ),
        (
            {"x": np.ones(4)},
            None,
            "a dataset that is a dict of arrays: without batch_size, a dataset must be an iterable of batches",
        ),
        (numpy_dataset(), None, f"NumpyDataset: {NO_BATCH_SIZE}"),
        (phalanx.data.from_files([__file__], open), None, f"dataset=Files: {NO_BATCH_SIZE}.\nHINT: pass batch_size=64"),
        (Batches(), 4, r"batch_size=4 for a \w+: the dataset already yields batches.*\nHINT: omit"),
        (numpy_dataset().batch(2), 4, r"batch_size=4 for a \w+: the dataset already yields batches.*\nHINT: omit"),
    ],
)
def test_what_is_no_dataset(strategy, dataset, batch_size, match):
    """Neither rows nor columns, or with a batch size too many or too few: refused at once, with what to write."""
    with pytest.raises(InputError, match=match):
        strategy.experimental_distribute_dataset(dataset, batch_size=batch_size)


def test_lists_are_columns_in_a_nest(strategy):
    """As in tf.data: labels that are a list belong to the rows of the images."""
    (batch,) = strategy.experimental_distribute_dataset((np.ones((4, 3)), [1, 2, 3, 4]), batch_size=4)
    assert strategy.gather(batch[1], axis=0).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([{"x": [1], "y": np.ones(n)} for n in (2, 3)], RAGGED),
        ([{"a": 1}, {"b": 2}], "the records of one batch: they have different structures"),
        (
            ["to be", "or not"],
            "a batch of dtype .*U[56]: only numbers and bools can be placed on devices.\nHINT: encode",
        ),
        ([b"ab", b"cd"], "a batch of dtype .*S2: only numbers and bools"),
        ([{}, {}], "a record {}: it contains no array, so it has no rows.\nHINT: at least one array"),
        ([{"x": None}] * 2, "a record {'x': None}: it contains no array"),
        ([None] * 2, "a record None: it contains no array|record 0 of a list: it is None"),
    ],
)
def test_rows_that_make_no_batch(strategy, as_dataset, rows, match):
    """Ragged rows, rows of various structures, text, and rows without an array."""
    with pytest.raises(InputError, match=match):
        next(iter(strategy.experimental_distribute_dataset(as_dataset(rows), batch_size=2)))


@pytest.mark.parametrize("size", [0, -3, 2.5, True, "4"])
@pytest.mark.parametrize("dataset", [np.ones(4), range(4), lambda: iter([])], ids=["array", "sequence", "generator"])
def test_bad_batch_size(strategy, dataset, size):
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


@pytest.mark.parametrize("where", ["run", "function"])
@pytest.mark.parametrize("how", ["next", "get_next", "get_next_as_optional"])
def test_next_in_a_traced_step(strategy, where, how):
    """The batch would be baked into the program."""
    iterator = iter(strategy.experimental_distribute_dataset([np.ones(2)] * 9))
    read = {"next": lambda: next(iterator), "get_next": iterator.get_next}.get(how, iterator.get_next_as_optional)
    step = phalanx.function(read) if where == "function" else read
    message = "next.iterator. was called in a traced step.*\nHINT: pass the batch to the step"
    with pytest.raises(ContextError, match=message):
        strategy.run(step)


class Failing:
    """Has two rows, and says that it has five."""

    def __init__(self, failure):
        self.failure = failure

    def __len__(self):
        return 5

    def __getitem__(self, index):
        if index == 2:
            raise self.failure
        return np.ones(2)


def test_a_failing_source(strategy):
    """The batches before the failure, then its own error. `test_generator_that_raises_at_row_1000` does it with a stream."""
    iterator = iter(strategy.experimental_distribute_dataset(Failing(OSError("disk gone")), batch_size=1))
    next(iterator)
    next(iterator)
    with pytest.raises(OSError, match="disk gone"):
        next(iterator)
    assert prefetching() == []
    with pytest.raises(InputError, match="record 2 of a Failing: the record does not exist .*the `len` 5.\nHINT: "):
        list(strategy.experimental_distribute_dataset(Failing(IndexError()), batch_size=5))


BUFFER, MODE = "experimental_per_replica_buffer_size", "experimental_replication_mode"
PLACE, FETCH = "experimental_place_dataset_on_device", "experimental_fetch_to_device"


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({BUFFER: -1}, f"{BUFFER}=-1: must be a number of"),
        ({BUFFER: 1.5}, f"{BUFFER}=1.5: must be a number"),
        ({BUFFER: True}, f"{BUFFER}=True: must be a number"),
        ({MODE: "PER_REPLICA"}, f"{MODE}='PER_REPLICA': must be an Inp"),
        ({"auto_shard_policy": 2}, "auto_shard_policy=2: must be an AutoShardPolicy.\nHINT: phalanx.data.AutoShardPol"),
        ({PLACE: True}, f"{PLACE}=True: a dataset on a device belongs to one replica.*\nHINT: .*PER_REPLICA"),
        ({PLACE: True, MODE: PER_REPLICA, FETCH: True}, f"{PLACE}=True with {FETCH}=True"),
    ],
)
def test_bad_input_options(kwargs, match):
    """They are refused when they are made."""
    with pytest.raises(InvalidArgumentError, match=match):
        InputOptions(**kwargs)


def position(state, dataset, batch_size=None):
    return lambda s: iter(s.experimental_distribute_dataset(dataset, batch_size=batch_size)).set_state(state)


def in_a_step(method):
    return lambda s: s.run(lambda: getattr(s, method)([np.ones(2)]))


def with_options(options, method="experimental_distribute_dataset"):
    return lambda s: getattr(s, method)([np.ones(4)], options)


ENTRIES = "a position of this dataset has the entries"
FUNCTION = "distribute_datasets_from_function"
IN_A_STEP = "was called in replica context.*\nHINT: distribute the dataset outside"
OPTIONS = "options=.*: must be InputOptions or None"
ONE_DATASET = "with InputReplicationMode.PER_REPLICA: this method splits one dataset .*\nHINT: distrib"


@pytest.mark.parametrize(
    ("use", "error", "match"),
    [
        (
            position({"batches": 1}, np.arange(4), 2),
            InputError,
            rf"set_state\(\{{'batches': 1\}}\): {ENTRIES} 'records'",
        ),
        (position({}, np.arange(4), 2), InputError, f"{ENTRIES} 'records'"),
        (position({"records": 1}, [np.ones(2)]), InputError, f"{ENTRIES} 'batches'"),
        (
            position({"workers": [{}, {}]}, [np.ones(2)]),
            InputError,
            "set_state of a position of 2 workers: the number of workers is now 1",
        ),
        (in_a_step("experimental_distribute_dataset"), ContextError, f"experimental_distribute_dataset {IN_A_STEP}"),
        (in_a_step(FUNCTION), ContextError, f"{FUNCTION} {IN_A_STEP}"),
        (with_options("fast"), InvalidArgumentError, OPTIONS),
        (with_options({}), InvalidArgumentError, OPTIONS),
        (with_options(AutoShardPolicy.DATA), InvalidArgumentError, OPTIONS),
        (with_options(3, FUNCTION), InvalidArgumentError, OPTIONS),
        (with_options(96), InvalidArgumentError, r"options=96: must be .*\nHINT: batch_size=96$"),
        (with_options(InputOptions(**{MODE: PER_REPLICA})), InvalidArgumentError, ONE_DATASET),
        (with_options(InputOptions(**{MODE: PER_REPLICA, PLACE: True})), InvalidArgumentError, ONE_DATASET),
        (
            lambda s: s.experimental_distribute_dataset(s.experimental_distribute_dataset([np.ones(2)])),
            InputError,
            "the dataset is already distributed.\nHINT: pass the original dataset",
        ),
        (
            lambda s: mirrored(3).run(
                lambda x: x, args=(next(iter(s.experimental_distribute_dataset([np.arange(4)]))),)
            ),
            InvalidArgumentError,
            "a PerReplica of 2 components: the strategy .* has 3 replicas",
        ),
    ],
)
def test_wrong_uses_of_datasets(strategy, use, error, match):
    """Positions of other datasets, options of other types, a dataset in a step, of another strategy, or distributed twice."""
    with pytest.raises(error, match=match):
        use(strategy)
