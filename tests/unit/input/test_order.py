"""What decides the order of data is part of its position: `fit` goes on with the rows that are left, whatever has shuffled them."""

import itertools
import random

import keras
import numpy as np
import pytest

import phalanx
from phalanx._src.checkpoint import text
from phalanx._src.input.order import Order, digest_of
from phalanx.errors import SlipWarning
from phalanx.keras.backup import FitProgress
from phalanx.keras.data import EpochData

ROWS, BATCH, EPOCHS = 24, 4, 3
X = np.arange(ROWS, dtype="float32").reshape(ROWS, 1)


class Plain(keras.utils.PyDataset):
    """Batches that Keras shuffles."""

    def __len__(self):
        return ROWS // BATCH

    def __getitem__(self, index):
        return (X[index * BATCH : index * BATCH + BATCH],)


class Shuffled(Plain):
    """Shuffles its rows at the end of each epoch."""

    def __init__(self, shuffle, indices=None):
        super().__init__()
        self.shuffle, self.indices = shuffle, np.arange(ROWS) if indices is None else indices

    def __getitem__(self, index):
        return (X[self.indices[index * BATCH : index * BATCH + BATCH]],)

    def on_epoch_end(self):
        self.shuffle(self.indices)


class Owner(Shuffled):
    """Shuffles its rows by a generator of its own."""

    def __init__(self, generator):
        super().__init__(generator.shuffle)
        self.generator = generator


class Stateful(Plain):
    """Says what its state is. Nobody could find its order otherwise."""

    def __init__(self):
        super().__init__()
        self.orders = {"now": [0, 1, 2, 3, 4, 5]}

    def __getitem__(self, index):
        return super().__getitem__(self.orders["now"][index])

    def on_epoch_begin(self):
        self.orders["now"] = self.orders["now"][1:] + self.orders["now"][:1]

    def get_state(self):
        return dict(self.orders)

    def set_state(self, state):
        self.orders = dict(state)


class Seeded(Plain):
    """Draws its order from Keras's global generator when an epoch begins."""

    def __init__(self):
        super().__init__()
        self.order = None

    def __getitem__(self, index):
        return super().__getitem__(self.order[index])

    def on_epoch_begin(self):
        self.order = np.asarray(keras.random.shuffle(np.arange(6)))


class Opened:
    """Shuffles its batches when it is opened, by a generator that is an attribute of an attribute."""

    def __init__(self):
        self.sampler = type("Sampler", (), {"__module__": "user"})()
        self.sampler.random = random.Random(3)

    def __iter__(self):
        order = list(range(6))
        self.sampler.random.shuffle(order)
        return iter([X[index * BATCH : index * BATCH + BATCH] for index in order])


def global_order():
    order = list(range(6))
    random.shuffle(order)
    return iter([X[index * BATCH : index * BATCH + BATCH] for index in order])


def distributed(make):
    return lambda strategy: strategy.experimental_distribute_dataset(make())


SOURCES = {
    "arrays": lambda _: X,
    "arrays by batches": lambda _: X,
    "batches": lambda _: Plain(),
    "batches of threads": lambda _: Plain(workers=2),
    "indices by NumPy": lambda _: Shuffled(np.random.shuffle),
    "indices by Python": lambda _: Shuffled(random.shuffle, [*range(ROWS)]),
    "generator of NumPy": lambda _: Owner(np.random.default_rng(0)),
    "old generator of NumPy": lambda _: Owner(np.random.RandomState(0)),
    "generator of Keras": lambda _: Seeded(),
    "state of its own": lambda _: Stateful(),
    "distributed iterable": distributed(Opened),
    "distributed function": distributed(lambda: global_order),
    "distributed batches": distributed(lambda: Owner(np.random.default_rng(0))),
    "generator": lambda _: ((X[i % ROWS : i % ROWS + BATCH],) for i in itertools.count(0, BATCH)),
}
OPTIONS = {
    "arrays": {"batch_size": BATCH, "shuffle": True},
    "arrays by batches": {"batch_size": BATCH, "shuffle": "batch"},
    "generator": {"steps": 6},
}


def reading(name, seed):
    """Fresh data as in a new process, its position, and an iterator over the rows of each batch of all epochs from the present one."""
    keras.utils.set_random_seed(seed)
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    x = SOURCES[name](strategy)
    options = OPTIONS.get(name, {"shuffle": True} if isinstance(x, keras.utils.PyDataset) else {})
    data = EpochData(strategy, x, **{"steps": None, "group": 1, **options})
    progress = FitProgress(data, None, strategy.topology, lambda: None)
    data.restart()
    return strategy, progress, batches_of(strategy, progress)


def batches_of(strategy, progress):
    for epoch in range(progress.epoch, EPOCHS):
        if progress.epoch != epoch:
            progress.begin(epoch)
        for _, ((batch, _),) in progress._data.epoch():
            leaf = batch[0] if isinstance(batch, tuple) else batch
            yield np.asarray(strategy.gather(leaf, 0)).ravel().tolist()


@pytest.mark.cover(
    ["name", "stops"],
    {(name, (8,)) for name in SOURCES}
    | {(name, (1,)) for name in ("arrays", "indices by NumPy", "state of its own", "distributed function")},
)
@pytest.mark.parametrize("stops", [(1,), (8,), tuple(range(18)), (2, 3, 3, 6, 9, 17)], ids=str)
@pytest.mark.parametrize("name", SOURCES)
def test_rest_of_the_epochs_has_the_same_order(name, stops):
    """Positions at or in an epoch go on in other processes, one after the other, as if nothing had happened."""
    _keep, _, batches = reading(name, 1)
    expected = list(batches)
    assert sorted(itertools.chain(*expected)) == sorted(X.ravel().tolist() * EPOCHS)
    found, state = [], None
    for seed, stop in enumerate((*stops, None), 1):
        _keep, progress, batches = reading(name, seed)
        if state is not None:
            progress.set_state(state)
        found += itertools.islice(batches, None if stop is None else stop - len(found))
        if stop is not None:
            state = text.unpacked(text.packed(progress.get_state()))
            batches.close()
    assert found == expected


@pytest.mark.cover(
    ["name"], {"arrays", "batches of threads", "indices by NumPy", "state of its own", "distributed function"}
)
@pytest.mark.parametrize("name", [name for name in SOURCES if name != "generator"])
def test_rest_of_an_epoch_after_a_move(name):
    """In a group that loses a process, the data is read again, from a position in the middle of an epoch. Threads had read more of it."""
    _keep, _, batches = reading(name, 1)
    expected = list(batches)
    strategy, progress, batches = reading(name, 1)
    found = list(itertools.islice(batches, 8))
    position = progress.get_position(undone=False)
    progress.move(strategy.topology)
    progress.set_position(position)
    assert found + list(batches_of(strategy, progress)) == expected


class Hidden(Plain):
    """Nobody can find its order."""

    def __init__(self, seed):
        super().__init__()
        self.order = {"now": np.random.default_rng(seed).permutation(6)}

    def __getitem__(self, index):
        return super().__getitem__(self.order["now"][index])


class Drawn:
    """An iterable whose order depends on the process that opens it."""

    def __init__(self, seed):
        self.hidden = {"now": seed}

    def __iter__(self):
        return iter([Hidden(self.hidden["now"])[index] for index in range(6)])


UNKNOWN_ORDERS = {
    "batches": lambda strategy, seed: Hidden(seed),
    "distributed batches": lambda strategy, seed: strategy.experimental_distribute_dataset(Hidden(seed)),
    "distributed iterable": lambda strategy, seed: strategy.experimental_distribute_dataset(Drawn(seed)),
    "distributed function": lambda strategy, seed: strategy.experimental_distribute_dataset(lambda: iter(Drawn(seed))),
    "datasets from function": lambda strategy, seed: strategy.distribute_datasets_from_function(lambda _: Drawn(seed)),
}
"""Data whose order nobody can save."""


@pytest.mark.parametrize("kind", UNKNOWN_ORDERS)
def test_epoch_of_another_order_begins_again(kind, monkeypatch):
    """And says so, so that no row is left out."""
    seeds = itertools.count()
    monkeypatch.setitem(SOURCES, "hidden", lambda strategy: UNKNOWN_ORDERS[kind](strategy, next(seeds)))
    monkeypatch.setitem(OPTIONS, "hidden", {"shuffle": False})
    _keep, progress, batches = reading("hidden", 1)
    before = list(itertools.islice(batches, 8))
    state = progress.get_state()
    _keep, progress, batches = reading("hidden", 1)
    progress.set_state(state)
    with pytest.warns(
        SlipWarning,
        match=r"another order .* after 2 steps of an epoch, so the epoch begins again\.(.|\n)*get_state\(\)",
    ):
        rest = list(batches)
    # A function makes the batches of one replica, of which a step takes two.
    steps = 3 if kind == "datasets from function" else 6
    for epoch in (before[:steps], rest[:steps], rest[-steps:]):
        assert sorted(itertools.chain(*epoch)) == X.ravel().tolist()


def test_what_was_fresh_becomes_fresh_again():
    """A process that has tried a step before it joins has shuffled more often than the others."""
    here, there = Owner(np.random.default_rng(0)), Owner(np.random.default_rng(0))
    order, state = Order(here), Order(there).take()
    here.on_epoch_end()
    order.restore(state)
    assert here.indices.tolist() == list(range(ROWS))
    here.on_epoch_end()
    there.on_epoch_end()
    assert here.indices.tolist() == there.indices.tolist()


def test_digest_differs_with_the_rows():
    same = digest_of((X, {"a": X})), digest_of((X.copy(), {"a": X.copy()}))
    assert same[0] == same[1]
    assert digest_of((X[::-1], {"a": X})) != same[0]
    words = np.array(["a", "b"], object)
    assert digest_of(words) == digest_of(words.copy()) != digest_of(words[::-1])
