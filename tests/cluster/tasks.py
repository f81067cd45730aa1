"""What a worker can be told to do. Each function runs in all workers of a cluster at once."""

import contextlib
import io
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import keras
import numpy as np
from checkpoint_training import Saved, Training
from evaluation import ROWS, Evaluation, X, Y

# They are found here, by their names.
from sharding import (  # noqa: F401
    bytes_of_large_model,
    exchanges_of_step,
    first_values_differ,
    load_shards,
    load_whole,
    move_arrays,
    move_to_neighbour,
    read_alone,
    refuse_eager_steps,
    refuse_what_reads_alone,
    restore_before_slots,
    save_in_all,
    save_shards,
    train_with_optax,
)
from training import (  # noqa: F401
    accumulated,
    different_rows,
    diverged,
    estimated,
    first_values,
    fit,
    fit_that_chooses,
    interrupted,
    loop,
    loop_on_pairs,
    loop_sharded,
    loop_with,
    metrics_and_a_table,
    one_step,
    predict_eagerly,
    shuffled,
    steered_apart,
    stopped,
    summaries,
    verbs,
    writing,
)

import phalanx
from phalanx.data import AutoShardPolicy
from phalanx.testing import assert_restores_everywhere

BATCH = 48
ALL = {"x": X, "y": Y, "id": np.arange(ROWS, dtype="int32")}


class Opened(list):
    """The names of the files that were opened, in order."""

    def reader(self, path: str) -> list[dict[str, Any]]:
        """Returns the records of a file that `write_files` wrote."""
        self.append(Path(path).name)
        with np.load(path) as arrays:
            return [_row(int(i)) for i in arrays["id"]]


def write_files(folder: Path, lengths: Iterable[int]) -> None:
    """Writes files of that many rows each; called by the test."""
    start = 0
    for number, length in enumerate(lengths):
        np.savez(folder / f"{number}.npz", id=np.arange(start, start + length))
        start += length


def train_drawn(strategy: phalanx.Strategy, way: str, drawn: dict[str, Any]) -> Any:
    """Does a training that was drawn at random, by the function of `drawn_trainings` of that name."""
    import drawn_trainings  # And hypothesis, which no other task needs.

    return getattr(drawn_trainings, way)(strategy, drawn)


def rows_handed_over(strategy: phalanx.Strategy, case: dict[str, Any]) -> list[list[int]]:
    """Reads batches in memory that is written again; returns the numbers of the rows of each step that this worker sees."""
    import handed_over  # And hypothesis.

    keras.utils.set_random_seed(0)
    return handed_over.rows_seen(strategy, **case)


def evaluate(strategy: phalanx.Strategy, **kwargs: Any) -> dict[str, Any]:
    """Evaluates a dataset; returns the result, the rows of each step and local replica, the files and what was logged."""
    opened, steps = Opened(), []
    with _logged() as messages:
        dataset = _distributed(strategy, opened, **kwargs)
    result = Evaluation(strategy).run(_noted(dataset, steps))
    shards = [(s.policy.name, s.records, len(s.files), str(s)) for s in dataset.shards]
    return {"result": result, "steps": steps, "opened": opened, "messages": messages, "shards": shards}


def read(
    strategy: phalanx.Strategy,
    steps: int | None = None,
    load: str | None = None,
    save: str | None = None,
    **kwargs: Any,
) -> list[list[list[int]]]:
    """Reads some steps from a position, and leaves another; returns the rows of each step and local replica."""
    noted: list[list[list[int]]] = []
    iterator = iter(_distributed(strategy, Opened(), **kwargs))
    if load is not None:
        phalanx.train.Checkpoint(iterator=iterator).read(load).assert_consumed()
    for _ in _noted(iterator, noted):
        if len(noted) == steps:
            break
    if save is not None:
        checkpoint = phalanx.train.Checkpoint(iterator=iterator)
        checkpoint.write(save)
        checkpoint.sync()
    return noted


def states_everywhere(strategy: phalanx.Strategy, **kwargs: Any) -> int:
    """Checks that an iterator goes on equally from each of its positions; returns how many batches there are."""
    dataset = _distributed(strategy, Opened(), **kwargs)
    assert_restores_everywhere(dataset)
    return sum(1 for _ in dataset)


def explain(strategy: phalanx.Strategy, **kwargs: Any) -> list[tuple[str, str]]:
    """Returns policies and sentences."""
    shards = _distributed(strategy, Opened(), call=phalanx.explain_sharding, **kwargs)
    return [(shard.policy.name, str(shard)) for shard in shards]


def local_results(strategy: phalanx.Strategy) -> list[list[int]]:
    """Reads short batches by the public verb."""
    dataset = strategy.experimental_distribute_dataset(np.arange(10, dtype="int32"), batch_size=7)
    return [[part.tolist() for part in strategy.experimental_local_results(batch)] for batch in dataset]


def local_results_of_nest(strategy: phalanx.Strategy) -> list[Any]:
    """A distributed value beside one that is not."""
    (batch,) = strategy.experimental_distribute_dataset([np.arange(8, dtype="int32")])
    return [(r["a"].tolist(), r["b"]) for r in strategy.experimental_local_results({"a": batch, "b": 3.0})]


def gathered(strategy: phalanx.Strategy) -> list[list[int]]:
    """Gathers short batches: every worker gets all rows."""
    dataset = strategy.experimental_distribute_dataset(np.arange(10, dtype="int32"), batch_size=7)
    return [np.asarray(strategy.gather(batch, axis=0)).tolist() for batch in dataset]


def several_steps(strategy: phalanx.Strategy, **kwargs: Any) -> list[float]:
    """Sums the row numbers, four steps in one program."""
    iterator = iter(_distributed(strategy, Opened(), **kwargs))
    sums: list[float] = []
    while True:
        try:
            parts = strategy.run_steps(_masked_sum, iterator, 4)
        except phalanx.errors.OutOfRangeError:
            return sums
        sums += np.asarray(strategy.reduce("SUM", parts, axis=None)).tolist()


def steps_that_draw(strategy: phalanx.Strategy, **kwargs: Any) -> list[float]:
    """Sums the row numbers of batches that a `phalanx.function` takes from its iterator."""

    @phalanx.function
    def step(iterator: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(_masked_sum, args=(next(iterator),)), axis=None)

    iterator = iter(_distributed(strategy, Opened(), **kwargs))
    sums: list[float] = []
    while True:
        try:
            sums.append(float(step(iterator)))
        except phalanx.errors.OutOfRangeError:
            return sums


def growing_batches(strategy: phalanx.Strategy) -> list[tuple[float, tuple[int, ...]]]:
    """Batches that grow, so that the replicas of one worker need more room before those of the other do.

    Returns the sum of each batch, and its global shape, which all workers must agree on.
    """
    sizes = [4, 5, 9, 6, 17]
    dataset = strategy.experimental_distribute_dataset(lambda: (np.ones(size, "float32") for size in sizes))
    return [(float(strategy.reduce("SUM", batch, axis=0)), batch.data.shape) for batch in dataset]


def values_from_function(strategy: phalanx.Strategy) -> list[float]:
    """Each replica's value has as many rows as its number says."""
    value = strategy.experimental_distribute_values_from_function(
        lambda c: np.ones(1 + c.replica_id_in_sync_group, "float32")
    )
    return [float(strategy.reduce(op, value, axis=0)) for op in ("SUM", "MEAN")]


def one_thread_for_one_device(strategy: phalanx.Strategy) -> int:
    """With one device a process, the rule is NPROC = cores / processes, which may be 1."""
    with mock.patch.dict(os.environ, NPROC="1"):
        return phalanx.MultiWorkerMirroredStrategy().num_replicas_in_sync


def _masked_sum(batch: dict[str, Any]) -> Any:
    mask = phalanx.get_replica_context().example_mask
    return (batch["id"] if mask is None else batch["id"] * mask).sum()


def _distributed(
    strategy: phalanx.Strategy,
    opened: Opened,
    *,
    source: str,
    policy: str = "AUTO",
    folder: str = "",
    call: Callable[..., Any] | None = None,
) -> Any:
    """Distributes one of the datasets that tests name, or passes it to another function."""
    options = phalanx.InputOptions(auto_shard_policy=AutoShardPolicy[policy])
    worker = jax.process_index()

    def distribute(dataset: Any, **kwargs: Any) -> Any:
        if call is not None:
            return call(dataset, strategy, options, **kwargs)
        return strategy.experimental_distribute_dataset(dataset, options, **kwargs)

    if source == "arrays":
        return distribute(ALL, batch_size=BATCH)
    if source == "generator":
        return distribute(lambda: (_batch(range(i, min(i + BATCH, ROWS))) for i in range(0, ROWS, BATCH)))
    if source == "rows":
        return distribute(lambda: map(_row, range(ROWS)), batch_size=BATCH)
    if source == "files":
        return distribute(phalanx.data.from_files(f"{folder}/*.npz", opened.reader), batch_size=BATCH)
    if source == "failing files":
        return distribute(phalanx.data.from_files(f"{folder}/*.npz", _fails_at_zero), batch_size=BATCH)
    if source == "failing generator":
        return distribute(lambda: _fails_in_worker_1(worker))
    # Worker 0 has the first 180 rows, the others share the rest.
    edges = np.linspace(180, ROWS, strategy.topology.num_workers).astype(int)
    own = range(0, 180) if worker == 0 else range(edges[worker - 1], edges[worker])
    functions = {
        "function": lambda c: [_batch(own[i : i + BATCH]) for i in range(0, len(own), BATCH)],
        "failing function": lambda c: _fails_in_worker_1(c.input_pipeline_id),
    }
    return strategy.distribute_datasets_from_function(functions[source], options)


def _row(i: int) -> dict[str, Any]:
    return {key: values[i] for key, values in ALL.items()}


def _batch(rows: range) -> dict[str, Any]:
    return {key: values[rows.start : rows.stop] for key, values in ALL.items()}


def _fails_in_worker_1(worker: int) -> Iterator[Any]:
    for start in range(0, ROWS, BATCH):
        if worker == 1 and start == 3 * BATCH:
            raise OSError("the disk of worker 1 is gone")
        yield _batch(range(start, min(start + BATCH, ROWS)))


def _fails_at_zero(path: str) -> Iterator[Any]:
    """Reads files, of which those with an odd number are broken."""
    with np.load(path) as arrays:
        for i in arrays["id"][:30]:
            yield _row(int(i))
    if int(Path(path).stem) % 2:
        raise OSError(f"{Path(path).name} is broken")


def _noted(batches: Iterable[Any], noted: list[list[list[int]]]) -> Iterator[Any]:
    """Yields the batches, and notes the real rows of each local replica."""
    for batch in batches:
        noted.append(_real_rows(batch["id"]))
        yield batch


def _real_rows(value: phalanx.PerReplica) -> list[list[int]]:
    """Returns what this worker's devices hold, by JAX alone."""
    counts = value.rows.counts if value.rows else [value.data.shape[1]] * len(value.data)
    shards = _shards(value.data)
    return [np.asarray(shard.data)[0, : counts[shard.index[0].start or 0]].tolist() for shard in shards]


def _shards(array: jax.Array) -> list[Any]:
    return sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)


class _logged:
    """Collects what Phalanx's input says."""

    def __enter__(self) -> list[str]:
        self.messages: list[str] = []
        self._handler = logging.Handler()
        self._handler.emit = lambda record: self.messages.append(record.getMessage())
        logging.getLogger("phalanx.input").addHandler(self._handler)
        return self.messages

    def __exit__(self, *_: object) -> None:
        logging.getLogger("phalanx.input").removeHandler(self._handler)


def devices(strategy: phalanx.Strategy) -> dict[str, Any]:
    """Names of this process's devices, which it can use, and what the chief alone prints."""
    names = strategy.extended.worker_devices
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        phalanx.print_on_chief("one", "line", sep="-")
    own = [phalanx.OneDeviceStrategy(name).topology.devices[0] for name in names]
    return {"names": names, "are own": own == jax.local_devices(), "printed": printed.getvalue()}


def differing(strategy: phalanx.Strategy, case: str) -> Any:
    """Does what differs between the workers."""
    rank = jax.process_index()
    own = strategy.run(lambda: jnp.ones([rank + 1]) * (rank + 1))
    if case == "mean of shapes":
        return float(strategy.reduce("MEAN", own, axis=0))
    if case == "gather of shapes":
        return np.asarray(strategy.gather(own, axis=0)).tolist()
    if case == "dtypes":
        return float(strategy.reduce("SUM", strategy.run(lambda: jnp.ones(9, ["float32", "int32"][rank])), axis=0))
    if case == "models":
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3 + rank)])
            model.compile("sgd", "mse")
        return model.fit(X[:8, :4], X[:8, :1], batch_size=8, verbose=0).history
    if case == "operations":
        wave = [jnp.cos, jnp.sin][rank]
        return strategy.run(lambda x: phalanx.get_replica_context().all_reduce("SUM", wave(x)), args=(jnp.ones(3),))
    if case == "layouts":
        with type(strategy)(model_axis=("model", 2), layout={".*kernel": [(None, "model"), ("model",)][rank]}).scope():
            model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(4)])
            model.compile("sgd", "mse")
        return model.fit(X[:8, :4], X[:8, :4], batch_size=8, verbose=0).history
    if case == "meshes":
        return type(strategy)(model_axis=("model", 2) if rank else None).num_replicas_in_sync
    if case == "constants":
        return float(strategy.reduce("SUM", strategy.run(lambda: jnp.full((2,), rank + 0.5)), axis=0))
    if case == "one worker alone":
        return np.asarray(strategy.experimental_local_results(own)[0]).tolist() if rank else None
    assert case == "late"
    time.sleep(float(rank))
    return float(strategy.reduce("SUM", strategy.run(lambda: jnp.ones(11)), axis=0))


def fit_other_rows(strategy: phalanx.Strategy, kind: str) -> Any:
    """Trains on rows that each worker shuffles in its own way."""
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    rows = np.random.default_rng(jax.process_index()).permutation(X[:8, :4])
    if kind == "arrays":
        return model.fit(rows, X[:8, :1], batch_size=4, shuffle=False, verbose=0).history
    batches = [(rows[i : i + 4], X[i : i + 4, :1]) for i in (0, 4)]
    data: Any = (lambda: iter(batches)) if kind == "function" else batches
    return model.fit(strategy.experimental_distribute_dataset(data), verbose=0).history


_trainings: dict[str, Training] = {}


def save_checkpoint(strategy: phalanx.Strategy, name: str, path: str) -> Saved:
    """Trains a model of law 4, saves it and trains on."""
    return _training(strategy, name).save(path)


def load_checkpoint(strategy: phalanx.Strategy, name: str, saved: Saved, by_hand: bool = False) -> Saved:
    """Goes on from a checkpoint, or from its values."""
    return _training(strategy, name).load(saved, by_hand=by_hand)


def _training(strategy: phalanx.Strategy, name: str) -> Training:
    if name not in _trainings:
        _trainings[name] = Training(strategy, name)
    return _trainings[name]


def failing_checkpoints(strategy: phalanx.Strategy, folder: str) -> list[str]:
    """What each process is told when the processes do not do the same, or one of them cannot do it."""
    rank = strategy.topology.worker_index
    checkpoint = phalanx.train.Checkpoint(step=keras.Variable(3))
    told = []
    for call in (
        lambda: checkpoint.write(f"{folder}/{rank}"),
        lambda: checkpoint.write(f"{folder}/a") if rank else checkpoint.save(f"{folder}/a"),
        lambda: checkpoint.read(f"{folder}/none"),
        lambda: checkpoint.write(f"{folder}/file/a") and checkpoint.write(f"{folder}/b"),
        lambda: checkpoint.restore(None if rank else f"{folder}/none"),
    ):
        try:
            call()
            checkpoint.sync()
            told.append("")
        except phalanx.errors.CheckpointError as e:
            told.append(str(e))
    return told


class _Stop(keras.callbacks.Callback):
    """Ends `fit` after that many batches."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts."""
        self.left -= 1
        if not self.left:
            raise StopIteration


def backed_up_fit(strategy: phalanx.Strategy, folder: str, **options: Any) -> list[list[np.ndarray]]:
    """Fits without being disturbed, and fits with two stops; returns what each has trained."""
    results = []
    for stops in ([], [7, 12]):
        for after in [*stops, None]:
            keras.utils.set_random_seed(3)
            with strategy.scope():
                layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dropout(0.2), keras.layers.Dense(3)]
                model = keras.Sequential([keras.Input((X.shape[1],)), *layers])
                loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
                model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
            callbacks = [phalanx.keras.BackupAndRestore(folder, **options)] if stops else []
            callbacks += [] if after is None else [_Stop(after)]
            with contextlib.suppress(StopIteration):
                model.fit(X[:160], Y[:160] % 3, batch_size=16, epochs=2, verbose=0, callbacks=callbacks)
        results.append([v.numpy() for v in [*model.variables, *model.optimizer.variables]])
    return results
