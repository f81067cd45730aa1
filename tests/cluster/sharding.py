"""What a worker can be told to do with variables that no process holds whole."""

import os
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import jax
import keras
import numpy as np
import optax
import stores  # noqa: F401  (registers the store of `store://`)
from training import make_model

import phalanx
from phalanx._src.checkpoint.shards import Division
from phalanx.errors import PhalanxError

ROWS = 48
X = np.random.default_rng(3).normal(size=(ROWS, 6)).astype("float32")
Y = np.random.default_rng(4).integers(0, 3, ROWS)


class Trained:
    """A model and its checkpoint.

    Args:
      strategy: its strategy.
      seed: the seed of its first weights.
    """

    def __init__(self, strategy: phalanx.Strategy, seed: int) -> None:
        with strategy.scope():
            self.model = make_model()
            keras.utils.set_random_seed(seed)
            self.model.set_weights([np.random.default_rng(seed).normal(size=w.shape) for w in self.model.weights])
        self.checkpoint = phalanx.train.Checkpoint(model=self.model, optimizer=self.model.optimizer)

    def losses(self) -> list[float]:
        """The losses of three more epochs."""
        history = self.model.fit(X, Y, batch_size=16, epochs=3, verbose=0, shuffle=False).history
        return [float(loss) for loss in history["loss"]]


def _sharded(strategy: phalanx.Strategy, devices_per_replica: int) -> phalanx.Strategy:
    axis = ("model", devices_per_replica) if devices_per_replica > 1 else None
    return type(strategy)(model_axis=axis, layout=phalanx.fully_sharded("model" if axis else "replica", min_size=1))


def save_shards(strategy: phalanx.Strategy, path: str, devices_per_replica: int = 1) -> list[float]:
    """Trains, saves, and returns the losses of the training that goes on."""
    trained = Trained(_sharded(strategy, devices_per_replica), 1)
    trained.losses()
    trained.checkpoint.save(path)
    return trained.losses()


def load_shards(strategy: phalanx.Strategy, path: str, devices_per_replica: int = 1) -> list[float]:
    """Restores what others have saved, and returns the losses of the training that goes on."""
    trained = Trained(_sharded(strategy, devices_per_replica), 2)
    trained.checkpoint.restore(path)
    return trained.losses()


def restore_before_slots(strategy: phalanx.Strategy, path: str) -> list[list[list[float]]]:
    """Takes a step, and restores it where the optimizer has no slots yet, for the next one. Returns the variable after each step."""

    def step(is_restored: bool) -> list[list[float]]:
        sharded = _sharded(strategy, 1)
        with sharded.scope():
            variable, optimizer = keras.Variable(np.ones((4, 2), "float32")), keras.optimizers.SGD(0.1, momentum=0.5)
        checkpoint = phalanx.train.Checkpoint(variable=variable, optimizer=optimizer)
        if is_restored:
            checkpoint.read(path)
        sharded.run(lambda: optimizer.apply([keras.ops.ones((4, 2))], [variable]))
        if not is_restored:
            checkpoint.write(path)
            checkpoint.sync()
        return variable.numpy().tolist()

    return [step(is_restored=False), step(is_restored=True)]


def move_arrays(strategy: phalanx.Strategy, path: str) -> list[list[float]]:
    """Saves an array of JAX of which each process has a half, and restores it into another. Returns the half of this process."""
    halves = jax.sharding.NamedSharding(strategy.topology.mesh, jax.sharding.PartitionSpec("replica"))
    saved, other = (
        jax.make_array_from_callback((4,), halves, lambda index, x=x: x[index]) for x in (np.arange(4.0), np.ones(4))
    )
    phalanx.train.Checkpoint(params={"w": saved}).write(path)
    checkpoint = phalanx.train.Checkpoint(params={"w": other})
    checkpoint.read(path).assert_consumed()
    return [np.asarray(shard.data).tolist() for shard in checkpoint.params["w"].addressable_shards]


def move_to_neighbour(strategy: phalanx.Strategy) -> list[object]:
    """Sends shards to the next process. Returns the rows of the array before that are here then, and numbers of all processes."""
    topology = strategy.topology
    rows = jax.sharding.NamedSharding(topology.mesh, jax.sharding.PartitionSpec("replica"))
    array = jax.make_array_from_callback((8,), rows, lambda index: np.arange(8)[index])
    (moved,) = topology.from_neighbours([array])
    numbers = topology.exchange(np.array([jax.process_index(), 7]))
    assert Division.of(array).ranks == set(topology.workers)
    return [[np.asarray(shard.data).tolist() for shard in moved.addressable_shards], numbers.tolist()]


def load_whole(strategy: phalanx.Strategy, path: str) -> list[float]:
    """The same with variables that each device holds whole."""
    trained = Trained(strategy, 2)
    trained.checkpoint.restore(path)
    return trained.losses()


def train_with_optax(strategy: phalanx.Strategy) -> list[list[float]]:
    """Trains a pytree of variables in shards, with a short last batch. Returns a matrix and the bytes that are here of all three of its shape."""
    sharded = _sharded(strategy, 1)
    with sharded.scope():
        params = {"w": phalanx.Variable(np.ones((6, 4), "float32"))}
        optimizer = phalanx.keras.OptaxOptimizer(optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1)))

    def step(x: jax.Array) -> None:
        loss_of = lambda w: phalanx.nn.compute_average_loss(((x @ w) ** 2).mean(-1))  # noqa: E731
        optimizer.apply({"w": jax.grad(loss_of)(params["w"].value)}, params)

    for batch in sharded.experimental_distribute_dataset(X[:19], batch_size=16):
        sharded.run(step, args=(batch,))
    like = [v for v in (params["w"], *optimizer.variables) if v.shape == (6, 4)]
    num_bytes = [float(shard.data.nbytes) for v in like for shard in v.value.addressable_shards]
    return [*params["w"].numpy().tolist(), num_bytes]


def bytes_of_large_model(strategy: phalanx.Strategy, folder: str) -> dict[str, float]:
    """The part of all bytes of variables and slots that this process holds: after creation, after steps, while it saves and loads.

    The last part is that of a Keras weight file, slots included, which NumPy holds while the process loads it.
    """
    sharded = _sharded(strategy, 1)
    before = _bytes_here()
    with sharded.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(4096), keras.layers.Dense(64)])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    whole = 3 * sum(int(np.prod(v.shape)) * 4 for v in model.weights)
    parts = {"created": (_bytes_here() - before) / whole}
    rows = np.ones((8, 64), "float32")
    model.fit(rows, rows, batch_size=8, verbose=0)
    parts["trained"] = (_bytes_here() - before) / whole
    checkpoint = phalanx.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(os.path.join(folder, "large"))
    checkpoint.sync()
    index = jax.process_index()
    parts["written"] = Path(f"{path}.shards/{index:05d}.safetensors").stat().st_size / whole
    checkpoint.restore(path).assert_consumed()
    parts["loaded"] = (_bytes_here() - before) / whole
    weights = os.path.join(folder, "large.weights.h5")
    model.save_weights(weights)
    checkpoint.sync()
    tracemalloc.start()
    model.load_weights(weights)
    parts["read"] = tracemalloc.get_traced_memory()[1] / whole
    tracemalloc.stop()
    return parts


def _bytes_here() -> int:
    return sum(shard.data.nbytes for array in jax.live_arrays() for shard in array.addressable_shards)


def read_alone(strategy: phalanx.Strategy) -> list[str]:
    """The first process reads weights while the others train, and then each process reads another variable."""
    trained = Trained(_sharded(strategy, 1), 1)
    trained.losses()
    texts = [_text_of(trained.model.get_weights)] if jax.process_index() == 0 else []
    trained.losses()
    return [*texts, _text_of(trained.model.weights[jax.process_index()].numpy)]


def save_in_all(strategy: phalanx.Strategy, folder: str, is_sharded: bool) -> list[str]:
    """Saves in all processes, and loads at once in each. Returns what differs."""
    model = Trained(_sharded(strategy, 1) if is_sharded else strategy, 1).model
    model.fit(X, Y, batch_size=16, verbose=0)
    weights, wrong = model.get_weights(), []
    saves: dict[str, Callable[[str], object]] = {
        "a.keras": model.save,
        "b.keras": lambda path: keras.models.save_model(model, filepath=path),
        "c": lambda path: keras.saving.save_model(model, Path(path), zipped=False),
        "d.weights.h5": model.save_weights,
        "e.weights.json": lambda path: keras.saving.save_weights(model, path, max_shard_size=0.0001),
        "f.h5": lambda path: model.save(path, include_optimizer=False),
    }
    for turn in range(2):
        for name, save in saves.items():
            path = os.path.join(folder, f"{turn}{name}")
            save(path)
            for ours, theirs in zip(_loaded(path).get_weights(), weights, strict=True):
                if not np.array_equal(ours, theirs):
                    wrong.append(name)
    # Other processes wait neither for a file of another name, nor for one that the chief saves alone.
    local_folder = Path(folder, str(jax.process_index()))
    local_folder.mkdir()
    model.save_weights(local_folder / "w.weights.h5")
    if strategy.extended.should_checkpoint:
        wrong.append(_text_of(lambda: model.save(f"{folder}/alone.keras")))
    model.fit(X, Y, batch_size=16, verbose=0)
    return [*wrong, *(str(path) for path in local_folder.iterdir())]


def _loaded(path: str) -> keras.Model:
    with phalanx.OneDeviceStrategy("cpu:0").scope():
        if ".weights." not in path:
            return keras.models.load_model(path, compile=False)
        model = make_model()
        model.load_weights(path)
        return model


def _text_of(call: Callable[[], object]) -> str:
    try:
        call()
    except PhalanxError as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


def refuse_what_reads_alone(strategy: phalanx.Strategy, folder: str) -> str:
    """A callback that the first process runs alone."""
    trained = Trained(_sharded(strategy, 1), 1)
    callback = keras.callbacks.ModelCheckpoint(os.path.join(folder, "best.keras"))
    return _text_of(lambda: trained.model.fit(X, Y, verbose=0, callbacks=[callback]))


def first_values_differ(strategy: phalanx.Strategy) -> str:
    """Both processes hold all shards of a variable, and draw its first values from other seeds."""
    sharded = _sharded(strategy, 2)
    keras.utils.set_random_seed(jax.process_index())
    with sharded.scope():
        variable = keras.Variable(keras.initializers.RandomNormal(), shape=(4, 4), dtype="float32")
    return _text_of(lambda: sharded.run(lambda: variable.value.sum()))


def refuse_eager_steps(strategy: phalanx.Strategy) -> str:
    """A step that is executed operation by operation."""
    trained = Trained(_sharded(strategy, 1), 1)
    trained.model.run_eagerly = True
    return _text_of(lambda: trained.model.fit(X, Y, verbose=0))


def exchanges_of_step(strategy: phalanx.Strategy) -> list[str]:
    """The exchanges in the program of a step that sums shards of a gradient, and a small gradient."""
    sharded = type(strategy)(layout=phalanx.fully_sharded(min_size=9))
    with sharded.scope():
        variables = [keras.Variable(np.ones((6, 4), "float32")), keras.Variable(np.ones(4, "float32"))]
        optimizer = keras.optimizers.SGD()
        optimizer.build(variables)

    def train(x: jax.Array) -> None:
        with phalanx.GradientTape() as tape:
            loss = keras.ops.sum((x @ variables[0] + variables[1]) ** 2)
        optimizer.apply(tape.gradient(loss, variables), variables)

    (batch,) = sharded.experimental_distribute_dataset([X[:12]])
    text = phalanx.function(lambda x: sharded.run(train, args=(x,))).lower(batch).as_text()
    return sorted(set(re.findall(r"stablehlo\.(all_reduce|reduce_scatter|all_to_all)", text)))
