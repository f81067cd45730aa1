"""What `fit` is given, as epochs of distributed batches; what the data raises."""

import itertools
import random
import sqlite3
import time
from fractions import Fraction

import keras
import numpy as np
import pytest
from twins import FIT, SHORT, X, Y, compiled, failing_after, mlp, same, same_state, state, twins, under

import phalanx
from phalanx.errors import InputError, InvalidArgumentError, SlipWarning
from phalanx.keras.callbacks import runs_user_code
from phalanx.keras.data import EpochData

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("steps", "group", "expected"),
    [
        pytest.param(None, 1, [(i, [1]) for i in range(7)], id="all batches, the last one short"),
        pytest.param(None, 4, [(0, [4]), (4, [2, 1])], id="a short batch has a program of its own"),
        pytest.param(6, 4, [(0, [4]), (4, [2])], id="an epoch ends within a group"),
    ],
)
def test_epochs_of_arrays(strategy, steps, group, expected):
    """In groups of as many batches as one program takes."""
    data = EpochData(strategy, X[:SHORT], steps=steps, group=group, y=Y[:SHORT], batch_size=16, shuffle=False)
    assert steps or data.num_batches == 7
    for _ in range(1 if steps else 2):
        assert [(first, [n for _, n in parts]) for first, parts in data.epoch()] == expected


@pytest.mark.cover(["k"], {2})
@pytest.mark.parametrize("k", [1, 2])
def test_generator_that_raises(strategy, k):
    """The steps before it count, and its error reaches the caller."""
    ours, theirs = twins(strategy, compiled(steps_per_execution=k))
    with pytest.raises(ZeroDivisionError):
        ours.fit(failing_after(2), **(FIT | {"batch_size": None}))
    for i in (0, 4):
        theirs.train_on_batch(X[i : i + 4], Y[i : i + 4])
    same(state(ours)[:4], state(theirs)[:4])
    same(ours.evaluate(X, Y, verbose=0), theirs.evaluate(X, Y, verbose=0))
    ours.fit(X, Y, **FIT)


@pytest.mark.cover(["k"], {3})
@pytest.mark.parametrize("k", [1, 3])
def test_generator_of_several_calls_loses_no_batch(strategy, k):
    """As many batches are read as there are steps, so that a call goes on where the one before it ended."""
    read = []

    def batches():
        for number in itertools.count():
            read.append(number)
            yield np.ones((4, 5), "float32"), np.zeros((4,), "int32")

    model, generator = under(strategy, compiled(steps_per_execution=k)), batches()
    model.fit(generator, steps_per_epoch=4, epochs=2, shuffle=False, verbose=0)
    assert len(read) == 8
    model.evaluate(generator, steps=5, verbose=0)
    assert len(read) == 13
    model.predict(generator, steps=2, verbose=0)
    assert len(read) == 15


@pytest.mark.parametrize("is_validation", [True, False])
def test_generator_of_one_epoch(strategy, is_validation):
    """In Keras, the next epoch silently has the two batches that Keras has looked at."""
    model, rows = under(strategy, compiled()), ((X[i : i + 4], Y[i : i + 4]) for i in range(0, 24, 4))
    data = {"x": X, "y": Y, "validation_data": rows} if is_validation else {"x": rows}
    with pytest.warns(
        SlipWarning, match=r"ended in an earlier epoch, so (.|\n)*HINT: strategy.experimental_distribute"
    ):
        model.fit(**data, epochs=2, shuffle=False, verbose=0)


class Selected(keras.utils.PyDataset):
    """Batches from a database, whose connection works only in the thread that opened it."""

    def __init__(self, database):
        super().__init__()
        self.database = database

    def __len__(self):
        return 6

    def __getitem__(self, index):
        rows = self.database.execute("SELECT number FROM numbers WHERE number / 4 = ?", (index,)).fetchall()
        x = np.array(rows, "float32")
        return np.repeat(x, 5, axis=1), np.zeros(len(x), "int32")


@pytest.mark.parametrize("kind", ["generator", "PyDataset"])
@pytest.mark.parametrize(
    ("method", "options"),
    [("fit", {"steps_per_epoch": 6, "shuffle": False}), ("evaluate", {"steps": 6}), ("predict", {"steps": 6})],
)
def test_objects_of_the_callers_thread(strategy, kind, method, options):
    """They work as in Keras, which reads in this thread."""
    database, results = database_of_24(), []
    for model in twins(strategy, compiled()):
        data = Selected(database)
        rows = data if kind == "PyDataset" else (data[i % 6] for i in itertools.count())
        result = getattr(model, method)(rows, **options, verbose=0)
        results.append(result.history["loss"] if method == "fit" else result)
    same(*results)


class Interrupting(Selected):
    """Is interrupted while the fourth batch is read."""

    def __getitem__(self, index):
        if index == 3:
            raise KeyboardInterrupt
        return super().__getitem__(index)


def database_of_24():
    """The rows of six batches."""
    database = sqlite3.connect(":memory:")
    database.execute("CREATE TABLE numbers (number INTEGER)")
    database.executemany("INSERT INTO numbers VALUES (?)", ((i,) for i in range(24)))
    return database


def test_interrupt_while_a_batch_is_read(strategy):
    """The batches before it are trained on, as in Keras."""
    ours, theirs = twins(strategy, compiled())
    for model in (ours, theirs):
        with pytest.raises(KeyboardInterrupt):
            model.fit(Interrupting(database_of_24()), shuffle=False, verbose=0)
    same_state(ours, theirs)


def test_stop_within_an_epoch_loses_no_batch(strategy):
    """`fit` reads nothing ahead of a small batch, so a generator continues where training stopped."""
    stop = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda i, logs: i == 1 and setattr(model, "stop_training", True)
    )
    model, rows = under(strategy, compiled()), Selected(database_of_24())
    batches = iter(range(6))
    generator = (rows[i] for i in batches)
    model.fit(generator, steps_per_epoch=6, shuffle=False, verbose=0, callbacks=[stop])
    assert next(batches) == 2


def test_no_program_anew_for_each_epoch(strategy):
    """One compilation serves all epochs, the short batch, and rows of other widths."""
    (ours, theirs), traced = twins(strategy, compiled(steps_per_execution=4)), []
    ours.fit(X, Y, **FIT)
    compute = ours.compute_loss
    ours.compute_loss = lambda *args, **kwargs: (traced.append(1), compute(*args, **kwargs))[1]
    ours.fit(X.astype("float64"), Y.astype("int64"), **FIT, epochs=3)
    assert not traced
    theirs.fit(X, Y, **FIT, epochs=4)
    same_state(ours, theirs)


class Endless(keras.utils.PyDataset):
    num_batches = None

    def __getitem__(self, index):
        time.sleep(0.002)
        return np.ones((4, 5), "float32"), np.ones((4, 1), "float32")


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("is_distributed", [False, True])
def test_endless_data_needs_a_number_of_steps(strategy, method, is_distributed):
    """As in tf.keras, which raises a ValueError too. A model takes the data if it is told how much of it."""
    model, options = (
        under(strategy, compiled(loss="mse")),
        {"verbose": 0} | ({"shuffle": False} if method == "fit" else {}),
    )
    data = strategy.experimental_distribute_dataset(Endless()) if is_distributed else Endless()
    with pytest.raises(
        InputError, match=r"endless data, without a number of steps.*\nHINT: fit\(dataset, steps_per_epoch="
    ):
        getattr(model, method)(data, **options)
    getattr(model, method)(data, **options, **{"steps_per_epoch" if method == "fit" else "steps": 2})


@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_data_without_rows(strategy, method):
    """It says so, instead of returning an empty history or list."""
    model = under(strategy, compiled())
    model.evaluate(X, Y, verbose=0)
    with pytest.raises(InvalidArgumentError, match=f"{method} without a batch: the data is empty.*\nHINT: pass"):
        getattr(model, method)(X[:0], Y[:0], verbose=0)


@pytest.mark.parametrize(
    "data", [{"x": None}, {"x": []}, {"x": X, "validation_data": (None, None)}], ids=["none", "empty", "validation"]
)
def test_data_without_arrays_are_refused(strategy, data):
    """Keras ends with an error of its own sets."""
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(InputError, match=r"the data x=(None|\[\]): they contain no array.\nHINT: x: an array"):
        model.fit(**{"y": Y} | data, verbose=0)


@pytest.mark.parametrize("weights", [{}, [], ()])
def test_empty_weights_are_refused(strategy, weights):
    """Keras multiplies them with the loss."""
    with pytest.raises(InputError, match="sample_weight=.*: it contains no array.\nHINT: sample_weight=None"):
        under(strategy, compiled()).fit(X, Y, sample_weight=weights, verbose=0)


@pytest.mark.parametrize("batch", [{}, (), {"x": None}, None])
def test_grain_batches_without_arrays_are_refused(strategy, batch):
    """Keras reads the first of them before Phalanx does."""
    grain = pytest.importorskip("grain")
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    dataset = grain.MapDataset.range(4).map(lambda _: batch).to_iter_dataset(options)
    with pytest.raises(InputError, match="a batch .*: it contains no array, so it has no rows"):
        under(strategy, compiled()).predict(dataset, verbose=0)


class Rows:
    """Rows by index, which Keras does not read."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return X[index], Y[index]


@pytest.mark.parametrize(
    ("data", "options"),
    [
        ([(X[:4], Y[:4]), (X[:3], Y[:3])], {}),
        (lambda: iter([(X[:4], Y[:4])] * 3), {}),
        (Rows(), {"batch_size": 4}),
        (map(lambda i: (X[i : i + 4], Y[i : i + 4]), (0, 4)), {}),
    ],
    ids=["list of batches", "function", "rows", "iterator"],
)
def test_data_that_must_be_distributed_first(strategy, data, options):
    """The hint is what trains."""
    model = under(strategy, compiled(lambda: keras.Sequential([keras.layers.Dense(Y.shape[-1])])))
    with pytest.raises(
        InputError, match=r"Keras reads no data of this kind.\nHINT: x=strategy.experimental_distribute_d"
    ):
        model.fit(data, verbose=0)
    model.fit(strategy.experimental_distribute_dataset(data, **options), verbose=0)


def test_targets_are_missing(strategy):
    """Without them a loss has nothing to compare with, in the first step and before the model is built."""
    for make in (compiled(), compiled(lambda: keras.Sequential([keras.layers.Dense(3)]))):
        model = under(strategy, make)
        with pytest.raises(InvalidArgumentError, match="without targets.*\nHINT: fit\\(x, y\\)"):
            model.fit(X, verbose=0)


class Written(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        pass


@pytest.mark.parametrize(
    ("callback", "expected"),
    [
        (Written(), True),
        (keras.callbacks.LambdaCallback(on_train_batch_end=print), True),
        (keras.callbacks.LambdaCallback(on_epoch_end=print), False),
        (keras.callbacks.ModelCheckpoint("x.keras"), False),
    ],
)
def test_code_that_runs_between_batches(callback, expected):
    """Callbacks of the user, unless they hear of epochs only."""
    assert runs_user_code([callback]) is expected


def test_epochs_of_an_endless_dataset(strategy):
    """Between two epochs Keras's threads rest, and nothing is read ahead from them."""
    data = EpochData(strategy, Endless(workers=2, max_queue_size=2), steps=2, group=1, shuffle=False)
    assert [sum(len(parts) for _, parts in data.epoch()) for _ in range(8)] == [2] * 8


class Told(keras.utils.PyDataset):
    """Six batches. Draws another order of its rows when an epoch begins, and again when one ends. Records all calls."""

    def __init__(self):
        super().__init__()
        self.calls, self._random, self._order = [], np.random.default_rng(0), None

    def __len__(self):
        return 6

    def __getitem__(self, index):
        self.calls.append(index)
        rows = self._order[16 * index : 16 * index + 16]
        return X[rows], Y[rows]

    def on_epoch_begin(self):
        self.calls.append("begin")
        self._order = self._random.permutation(96)

    def on_epoch_end(self):
        self.calls.append("end")
        self._order = self._random.permutation(96)


def unbuilt():
    return keras.Sequential([keras.layers.Dense(3)])


@pytest.mark.cover(
    ["model", "options"], [(mlp, {"validation_data": Told}), (unbuilt, {}), (mlp, {"steps_per_epoch": 3})]
)
@pytest.mark.parametrize("model", [mlp, unbuilt])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="whole epochs"),
        pytest.param({"validation_data": Told}, id="epochs of the validation"),
        pytest.param({"steps_per_epoch": 3}, id="an epoch ends before the data"),
    ],
)
def test_dataset_hears_of_epochs_as_in_keras(strategy, model, options):
    """The functions of a dataset are called in the order in which Keras calls them, so a dataset that shuffles itself does the same."""
    results = []
    for one in twins(strategy, compiled(model)):
        data, given = [Told()], dict(options)
        if "validation_data" in given:
            given["validation_data"] = Told()
            data.append(given["validation_data"])
        history = one.fit(data[0], epochs=2, shuffle=False, verbose=0, **given).history
        results.append((history, [each.calls for each in data]))
    assert results[0][1] == results[1][1]
    same(results[0][0], results[1][0])


class Growing(Told):
    """Has one batch more after each epoch."""

    size = 2

    def __len__(self):
        return self.size

    def on_epoch_end(self):
        super().on_epoch_end()
        self.size = min(6, self.size + 1)


def test_dataset_that_grows_is_read_as_in_keras(strategy):
    """Epochs of `fit` have the batches that it had at first, and those of a validation what it had at the end of the last one."""
    calls = []
    for one in twins(strategy, compiled(mlp)):
        data, validation = Growing(), Growing()
        one.fit(data, validation_data=validation, epochs=3, shuffle=False, verbose=0)
        calls.append([data.calls, validation.calls])
    assert calls[0] == calls[1]


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_dataset_without_training_hears_of_epochs(strategy, method):
    """A model that must be built reads one batch in an epoch of its own."""
    ours, theirs = twins(strategy, compiled(unbuilt))
    calls = []
    for one in (ours, theirs):
        data = Told()
        getattr(one, method)(data, verbose=0)
        calls.append(data.calls)
    assert calls[0] == calls[1]


def test_steps_begin_again_where_the_data_ended(strategy):
    """Of seven batches, epochs of four have four, three and four; epochs of seven have all; epochs of nine warn."""

    def epochs(steps, count):
        data = EpochData(strategy, X, steps=steps, group=1, y=Y, batch_size=16, shuffle=False)
        return [sum(len(parts) for _, parts in data.epoch()) for _ in range(count)]

    with pytest.warns(UserWarning, match="ended after 3 of 4 steps"):
        assert epochs(4, 3) == [4, 3, 4]
    assert epochs(7, 3) == [7, 7, 7]
    with pytest.warns(UserWarning, match="ended after 7 of 9 steps"):
        assert epochs(9, 2) == [7, 7]


def test_dataset_creator_gets_the_input_context(strategy):
    """A function of an input context makes the per-replica batches, and is called with what it should know."""
    seen = []

    def dataset_fn(context):
        seen.append((context.num_input_pipelines, context.num_replicas_in_sync))
        size = context.get_per_replica_batch_size(16)
        return [(X[i : i + size], Y[i : i + size]) for i in range(0, 96, size)]

    ours, theirs = twins(strategy, compiled())
    creator = phalanx.keras.DatasetCreator(dataset_fn)
    same(ours.fit(creator, epochs=2, verbose=0).history, theirs.fit(X[:96], Y[:96], epochs=2, **FIT).history)
    same(ours.evaluate(creator, verbose=0), theirs.evaluate(X[:96], Y[:96], verbose=0))
    assert set(seen) == {(1, 2)}


@pytest.mark.parametrize(
    ("args", "message"), [((3,), "dataset_fn is not callable"), ((len, 3), "must be InputOptions or None")]
)
def test_what_is_no_dataset_creator(args, message):
    with pytest.raises(InvalidArgumentError, match=message):
        phalanx.keras.DatasetCreator(*args)


def test_records_of_files_are_batched(strategy, tmp_path):
    """`fit` batches the records of files itself, and the rows of `make_experimental_numpy_dataset`, too."""
    for i in range(3):
        np.savez(tmp_path / f"{i}.npz", x=X[i * 32 : i * 32 + 32], y=Y[i * 32 : i * 32 + 32])

    def records(path):
        with np.load(path) as arrays:
            yield from zip(arrays["x"], arrays["y"], strict=True)

    ours, theirs = twins(strategy, compiled())
    files = phalanx.data.from_files(tmp_path / "*.npz", records)
    for dataset, rows in ((files, 96), (strategy.make_experimental_numpy_dataset((X[:SHORT], Y[:SHORT])), SHORT)):
        found = ours.fit(dataset, batch_size=16, epochs=2, verbose=0).history
        same(found, theirs.fit(X[:rows], Y[:rows], epochs=2, **FIT).history)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        *(({name: Y}, "make them part of the elements") for name in ("y", "sample_weight")),
        ({"batch_size": 4}, "omit batch_size"),
        ({"class_weight": {0: 2.0}}, "make them part of the elements"),
    ],
)
def test_arguments_that_a_distributed_dataset_has_itself(strategy, given, hint):
    """They are not ignored. An iterator is no dataset."""
    dataset = strategy.experimental_distribute_dataset((X, Y), batch_size=16)
    model = under(strategy, compiled())
    with pytest.raises(InvalidArgumentError, match=f"{next(iter(given))} with a DistributedDataset(.|\n)*HINT: {hint}"):
        model.fit(dataset, **given)
    with pytest.raises(InputError, match="HINT: fit\\(dataset\\) instead of fit"):
        model.fit(iter(dataset))


def test_epoch_goes_on_with_smaller_batches():
    """In an elastic group that scales them, rows come once, in the order in which they were shuffled, and no total is promised."""

    def data_of(part):
        keras.utils.set_random_seed(3)
        strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
        strategy.topology.shares.part = part
        return strategy, EpochData(strategy, X, steps=None, group=1, y=Y, batch_size=16, shuffle=True)

    def rows_in(strategy, groups):
        return [np.asarray(strategy.gather(batch[0], 0)) for _, ((batch, _),) in groups]

    strategy, data = data_of(None)
    expected = np.concatenate(rows_in(strategy, data.epoch()))
    strategy, data = data_of(Fraction(1))
    assert data.num_batches is None
    groups = data.epoch()
    first = rows_in(strategy, [next(groups), next(groups)])
    state = data.get_state()
    strategy, data = data_of(Fraction(3, 4))
    data.set_state(state)
    rest = rows_in(strategy, data.epoch())
    assert {len(rows) for rows in first} == {16}
    assert {len(rows) for rows in rest[:-1]} == {12}
    np.testing.assert_array_equal(np.concatenate(first + rest), expected)


def _draws_forever():
    while True:
        for row in random.sample(range(7), 7):
            yield np.full((2, 1), row, "float32"), np.zeros((2, 1), "float32")


class _Forever:
    """Draws each pass from Python's generator while it is read, as the generator does that Keras reads."""

    def __iter__(self):
        return _draws_forever()


@pytest.mark.parametrize("kind", ["generator", "iterable"])
def test_data_that_draw_while_they_are_read(kind):
    """Resumed twice by programs whose generators are elsewhere, each row comes once per pass: what was drawn after the first time counts too."""
    seen, state = [], None
    for seed, steps in ((0, 7), (1 if kind == "iterable" else 0, 10), (2 if kind == "iterable" else 0, 4)):
        random.seed(seed)
        strategy = phalanx.MirroredStrategy(["cpu:0"])
        made = _draws_forever() if kind == "generator" else strategy.experimental_distribute_dataset(_Forever())
        data = EpochData(strategy, made, steps=7, group=1)
        if state is not None:
            data.set_state(state)
        left = steps
        while left:
            for _, ((batch, _),) in data.epoch():
                seen.append(int(np.asarray(strategy.gather(batch, 0)).flat[0]))
                left -= 1
                state = data.get_state()
                if not left:
                    break
        random.seed(100 + seed)
    assert [sorted(seen[first : first + 7]) for first in (0, 7, 14)] == [list(range(7))] * 3
