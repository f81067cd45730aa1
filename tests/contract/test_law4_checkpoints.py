"""Law 4: a checkpoint saved under any strategy loads under any other, and training goes on as if nothing had happened."""

import functools
import os

import keras
import numpy as np
import pytest
from keras import layers
from strategy_table import ROWS

import phalanx

STRATEGIES = [
    "default",
    "one_device",
    "mirrored_x2",
    "mirrored_x4",
    "mirrored_x2_of_2",
    "sharded_x2",
    "central_x2",
    "tpu_x4_of_2",
]
BATCH, BEFORE, AFTER = 24, 4, 5
RANDOM = np.random.RandomState(3)
TOKENS = RANDOM.randint(0, 11, (BATCH * (BEFORE + AFTER), 6)).astype("int32")
NUMBERS = RANDOM.rand(len(TOKENS), 6).astype("float32")
CLASSES = RANDOM.randint(0, 3, len(TOKENS)).astype("int32")
per_example = functools.partial(keras.losses.sparse_categorical_crossentropy, from_logits=True)


def mlp():
    """Two dense layers."""
    return keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(3)])


def normalized():
    """Statistics of each replica, and random masks."""
    parts = [
        layers.Dense(8, use_bias=False),
        layers.BatchNormalization(),
        layers.Activation("tanh"),
        layers.Dropout(0.3),
        layers.Dense(3),
    ]
    return keras.Sequential([keras.Input((6,)), *parts])


class Shared(keras.Model):
    """One embedding that two towers use."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(11, 4)
        self.towers = [layers.Dense(5, activation="tanh"), layers.Dense(5, activation="tanh")]
        self.same = {"table": self.table}
        self.head = layers.Dense(3)

    def call(self, x):
        """Averages each half of the tokens."""
        halves = (x[:, :3], x[:, 3:])
        read = [tower(self.same["table"](half)) for tower, half in zip(self.towers, halves, strict=True)]
        return self.head(keras.ops.mean(keras.ops.concatenate(read, -1), 1))


MODELS = {"mlp": (mlp, NUMBERS), "normalized": (normalized, NUMBERS), "shared": (Shared, TOKENS)}


class Training:
    """A model under one strategy, its optimizer with a schedule and an accumulator of gradients, two metrics and the data."""

    def __init__(self, row, name):
        make, self.data = MODELS[name]
        self.strategy = ROWS[row]()
        with self.strategy.scope():
            keras.utils.set_random_seed(5)
            self.model = make()
            self.model(self.data[:1])
            schedule = keras.optimizers.schedules.ExponentialDecay(0.02, 3, 0.8)
            self.optimizer = keras.optimizers.Adam(schedule)
            self.optimizer.build(self.model.trainable_variables)
            self.metrics = {"loss": keras.metrics.Mean(), "accuracy": keras.metrics.SparseCategoricalAccuracy()}
        dataset = self.strategy.experimental_distribute_dataset((self.data, CLASSES), batch_size=BATCH)
        self.dataset, self.iterator = dataset, iter(dataset)
        self.checkpoint = phalanx.train.Checkpoint(
            model=self.model, optimizer=self.optimizer, metrics=self.metrics, iterator=self.iterator
        )
        self.start = self.values()
        self.before = self.iterator.get_state()

    @property
    def variables(self):
        """All that training changes."""
        seeds = [layer.seed_generator.state for layer in self.model.layers if hasattr(layer, "seed_generator")]
        results = [v for metric in self.metrics.values() for v in metric.variables]
        return [*self.model.variables, *self.optimizer.variables, *seeds, *results]

    def values(self):
        """The variables as NumPy arrays."""
        return [v.numpy() for v in self.variables]

    def begin(self):
        """Goes back to the state before the first step, without a checkpoint."""
        self.put(self.start, self.before)

    def put(self, values, position):
        """Assigns values one by one."""
        for variable, value in zip(self.variables, values, strict=True):
            variable.assign(value)
        self.iterator.set_state(position)

    def step(self, batch):
        """One step of a replica."""
        x, y = batch
        with phalanx.GradientTape() as tape:
            logits = self.model(x, training=True)
            loss = phalanx.nn.compute_average_loss(per_example(y, logits))
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.metrics["loss"].update_state(per_example(y, logits))
        self.metrics["accuracy"].update_state(y, logits)
        return loss

    def train(self, steps):
        """Returns the losses."""
        results = [self.strategy.run(self.step, args=(next(self.iterator),)) for _ in range(steps)]
        return [float(self.strategy.reduce("SUM", result, axis=None)) for result in results]


@functools.cache
def training(row, name):
    """One training per row and model, which all pairs share."""
    return Training(row, name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns path, values and position of a checkpoint after four steps, and the losses and values five steps later."""
    folder = tmp_path_factory.mktemp("checkpoints")
    results = {}

    def of(row, name):
        if (row, name) not in results:
            run = training(row, name)
            run.begin()
            run.train(BEFORE)
            path = run.checkpoint.write(os.path.join(folder, f"{row}-{name}"))
            values, position = run.values(), run.iterator.get_state()
            losses = run.train(AFTER)
            run.checkpoint.sync()
            results[row, name] = (path, values, position, losses, run.values())
        return results[row, name]

    yield of
    training.cache_clear()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("loaded", STRATEGIES)
@pytest.mark.parametrize("saved_under", STRATEGIES)
def test_every_strategy_loads_what_any_saved(saved, saved_under, loaded, name):
    """State, and the next five losses, equal those of a run that was not disturbed."""
    path, values, position, losses, after = saved(saved_under, name)
    run = training(loaded, name)
    run.begin()
    run.checkpoint.read(path).assert_consumed()
    for variable, value in zip(run.variables, values, strict=True):
        if saved_under == loaded:
            np.testing.assert_array_equal(variable.numpy(), value, err_msg=variable.path)
        else:
            np.testing.assert_allclose(variable.numpy(), value, rtol=1e-6, err_msg=variable.path)
    assert run.iterator.get_state() == position
    got = run.train(AFTER)
    if saved_under == loaded:
        assert got == losses
        assert all((a == v.numpy()).all() for a, v in zip(after, run.variables, strict=True))
        return
    if (
        name == "normalized"
        and run.strategy.num_replicas_in_sync != training(saved_under, name).strategy.num_replicas_in_sync
    ):
        # Masks and statistics depend on the number of replicas, so the undisturbed run moves to this strategy, too.
        run.put(values, position)
        losses, after = run.train(AFTER), run.values()
        run.checkpoint.read(path)
        got = run.train(AFTER)
    np.testing.assert_allclose(got, losses, rtol=1e-5, atol=1e-6)
    for variable, value in zip(run.variables, after, strict=True):
        np.testing.assert_allclose(variable.numpy(), value, rtol=1e-4, atol=1e-5, err_msg=variable.path)
