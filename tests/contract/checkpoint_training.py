"""A training that is saved after four steps, and its next five steps. Used with every strategy of law 4."""

import functools
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers

import phalanx
from phalanx.coordinator import ClusterCoordinator

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
"""The rows of the table of strategies that law 4 covers."""

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


@dataclass
class Saved:
    """A checkpoint, and the training that went on from it without being disturbed."""

    path: str
    replicas: int
    values: list[np.ndarray]
    position: Any
    losses: list[float]
    after: list[np.ndarray]


class Training:
    """A model under one strategy, its optimizer with a schedule, two metrics, and the position in the data."""

    def __init__(self, strategy, name):
        make, self.data = MODELS[name]
        self.strategy = strategy
        with self.strategy.scope():
            keras.utils.set_random_seed(5)
            self.model = make()
            self.model(self.data[:1])
            schedule = keras.optimizers.schedules.ExponentialDecay(0.02, 3, 0.8)
            self.optimizer = keras.optimizers.Adam(schedule)
            self.optimizer.build(self.model.trainable_variables)
            self.metrics = {"loss": keras.metrics.Mean(), "accuracy": keras.metrics.SparseCategoricalAccuracy()}
        self.iterator = iter(self.reader().experimental_distribute_dataset((self.data, CLASSES), batch_size=BATCH))
        self.checkpoint = phalanx.train.Checkpoint(
            model=self.model, optimizer=self.optimizer, metrics=self.metrics, iterator=self.iterator
        )
        self.start = self.values()
        self.before = self.iterator.get_state()

    def reader(self):
        """The strategy that reads the data."""
        return self.strategy

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

    def save(self, path):
        """Trains, saves, and trains on."""
        self.begin()
        self.train(BEFORE)
        self.checkpoint.write(path)
        values, position = self.values(), self.iterator.get_state()
        losses = self.train(AFTER)
        self.checkpoint.sync()
        return Saved(path, self.strategy.num_replicas_in_sync, values, position, losses, self.values())

    def load(self, saved, *, by_hand=False):
        """Restores what was saved, and trains on. By hand: without the checkpoint."""
        self.begin()
        if by_hand:
            self.put(saved.values, saved.position)
        else:
            self.checkpoint.read(saved.path).assert_consumed()
        values, position = self.values(), self.iterator.get_state()
        losses = self.train(AFTER)
        return Saved(saved.path, self.strategy.num_replicas_in_sync, values, position, losses, self.values())


class ServersTraining(Training):
    """The same on parameter servers, whose only worker takes one step after the other."""

    def __init__(self, strategy, name):
        self.coordinator = ClusterCoordinator(strategy)
        super().__init__(strategy, name)

    def reader(self):
        """The coordinator reads the batches and sends them."""
        return phalanx.OneDeviceStrategy("cpu:0")

    def train(self, steps):
        """Returns the losses."""
        scheduled = (self.coordinator.schedule(self.on_worker, args=(next(self.iterator),)) for _ in range(steps))
        return [float(result.fetch()) for result in scheduled]

    def on_worker(self, batch):
        """One step of a worker."""
        return self.strategy.run(self.step, args=(batch,))


def assert_state(saved, got, *, is_exact=False):
    """All variables, and the position in the data, are those that were saved."""
    assert got.position == saved.position
    assert_values(got.values, saved.values, is_exact=is_exact)


def assert_values(got, wanted, *, is_exact):
    """Variables are equal: to the last bit, or within the tolerances of law 1."""
    tolerance = {"rtol": 0, "atol": 0} if is_exact else {"rtol": 1e-4, "atol": 1e-5}
    for i, (x, y) in enumerate(zip(got, wanted, strict=True)):
        np.testing.assert_allclose(x, y, **tolerance, err_msg=f"variable {i}")


def assert_goes_on(saved, got, undisturbed, *, is_exact):
    """State, and the next five losses and the state after them, equal those of a run that was not disturbed."""
    assert_state(saved, got, is_exact=is_exact)
    if is_exact:
        assert got.losses == undisturbed.losses
    np.testing.assert_allclose(got.losses, undisturbed.losses, rtol=1e-5, atol=1e-6)
    assert_values(got.after, undisturbed.after, is_exact=is_exact)


def depends_on_replicas(name, saved, replicas):
    """Whether masks and statistics differ with this number of replicas, so that the undisturbed run must move to it too."""
    return name == "normalized" and saved.replicas != replicas
