"""Trainings that a worker can be told to do, and the same on one device without a cluster."""

import contextlib
import io
import math
import re
import unittest.mock
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from reference_training import MODELS, OPTIMIZERS, batches, per_example

import phalanx
import phalanx.testing
from phalanx import estimator

ROWS, BATCH, WIDTH, CLASSES = 1003, 64, 6, 3
RANDOM = np.random.RandomState(11)
X = RANDOM.normal(size=(ROWS, WIDTH)).astype("float32")
Y = X[:, :CLASSES].argmax(1)


def loop(strategy: phalanx.Strategy, model: str, optimizer: str, sizes: list[int]) -> dict[str, Any]:
    """Twenty steps of a custom loop; returns losses, and the weights before and after."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        made, optimizer_ = MODELS[model](), OPTIMIZERS[optimizer]()

    def step(batch: Any) -> Any:
        x, y = batch
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss(per_example(y, made(x, training=True)))
            loss += phalanx.nn.scale_regularization_loss(made.losses)
        gradients = tape.gradient(loss, made.trainable_variables)
        optimizer_.apply_gradients(zip(gradients, made.trainable_variables, strict=True))
        return loss

    start, losses = made.get_weights(), []
    for batch in strategy.experimental_distribute_dataset(batches(made, tuple(sizes))):
        losses.append(float(strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)))
    return {"start": start, "losses": losses, "weights": made.get_weights()}


def loop_with(strategy: phalanx.Strategy, option: str, **kwargs: Any) -> dict[str, Any]:
    """The same with local updates, or with unequal shares of a batch."""
    del strategy
    options: dict[str, Any] = {
        "LocalSGD": {"local_updates": phalanx.experimental.LocalSGD(every=1)},
        "DiLoCo": {"local_updates": phalanx.experimental.DiLoCo(lambda: keras.optimizers.SGD(1.0), every=1)},
        "weights": {"replica_weights": [3, 1]},
        "auto": {"replica_weights": "auto"},
    }
    return loop(phalanx.MultiWorkerMirroredStrategy(**options[option]), **kwargs)


def loop_on_pairs(strategy: phalanx.Strategy, **kwargs: Any) -> dict[str, Any]:
    """The same with replicas of two devices."""
    pairs = type(strategy)(model_axis=("model", 2))
    return {"replicas": pairs.num_replicas_in_sync, **loop(pairs, **kwargs)}


def make_model(steps_per_execution: int = 1) -> keras.Model:
    """A compiled model with statistics, whose weights are those of the seed."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((WIDTH,)),
            layers.Dense(8, activation="tanh", kernel_regularizer=keras.regularizers.L2(1e-3)),
            layers.BatchNormalization(synchronized=True),
            layers.Dense(CLASSES),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], steps_per_execution=steps_per_execution)
    return model


def fit_of(model: keras.Model) -> dict[str, Any]:
    """Fits, evaluates and predicts."""
    keras.utils.set_random_seed(2)
    history = model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0, validation_data=(X[:101], Y[:101])).history
    return {
        "history": history,
        "evaluate": model.evaluate(X, Y, batch_size=BATCH, verbose=0),
        "predict": model.predict(X, batch_size=BATCH, verbose=0),
        "weights": model.get_weights(),
    }


def fit(strategy: phalanx.Strategy, steps_per_execution: int) -> dict[str, Any]:
    """`fit` under the strategy."""
    with strategy.scope():
        model = make_model(steps_per_execution)
    return fit_of(model)


def gradients_of(replica: int) -> list[np.ndarray]:
    """What one replica adds to four weights."""
    random = np.random.default_rng(replica)
    return [random.normal(size=size).astype("float32") for size in (10, 20, 4000, 30)]


def one_step(strategy: phalanx.Strategy, **options: Any) -> dict[str, Any]:
    """Subtracts the sum of all replicas' gradients from zeros; returns the weights, and what collectives send."""
    del strategy
    options_ = phalanx.experimental.CommunicationOptions(**options)
    own = phalanx.MultiWorkerMirroredStrategy(communication_options=options_)
    with own.scope():
        weights = [keras.Variable(np.zeros_like(g)) for g in gradients_of(0)]
        optimizer = keras.optimizers.SGD(1.0)
    all_gradients = [np.stack(gs) for gs in zip(*map(gradients_of, range(own.num_replicas_in_sync)), strict=True)]

    def step() -> None:
        replica = phalanx.get_replica_context().replica_id_in_sync_group
        optimizer.apply([jnp.asarray(g)[replica] for g in all_gradients], weights)

    whole = phalanx.function(lambda: own.run(step))
    whole()
    text = whole.lower().compile().as_text()
    return {"weights": [w.numpy() for w in weights], "sent": _sent(text)}


def metrics_and_a_table(strategy: phalanx.Strategy) -> dict[str, Any]:
    """Trains a table and a bias, counts rows in a metric, and returns the values with what is sent per step."""
    ids = np.arange(12 * strategy.num_replicas_in_sync, dtype="int32").reshape(-1, 4) * 977 % 50_000
    with strategy.scope():
        table, bias = keras.Variable(np.ones((50_000, 16), "float32")), keras.Variable(np.zeros(16, "float32"))
        optimizer, mean = keras.optimizers.SGD(1.0), keras.metrics.Mean()
        optimizer.build([table, bias])

    def step(ids: jax.Array) -> None:
        with phalanx.GradientTape() as tape:
            loss = keras.ops.sum(keras.ops.take(table, ids, axis=0) * (bias + 1))
        optimizer.apply(tape.gradient(loss, [table, bias]), [table, bias])
        mean.update_state(ids)

    (batch,) = strategy.experimental_distribute_dataset([ids])
    whole = phalanx.function(lambda batch: strategy.run(step, args=(batch,)))
    whole(batch)
    values = [table.value[ids[:, 0], 0], bias.value, mean.result()]
    return {"values": list(map(np.asarray, values)), "ids": ids, "sent": _sent(whole.lower(batch).compile().as_text())}


def _sent(text: str) -> dict[str, list[int]]:
    """The sizes of what the collectives of a program send, by dtype."""
    sizes: dict[str, list[int]] = {}
    for arrays in re.findall(r" = (.*) (?:all-reduce|all-to-all|all-gather)(?:-start)?\(", text):
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", arrays):
            sizes.setdefault(dtype, []).append(math.prod(int(d) for d in dims.split(",") if d))
    return {dtype: sorted(found) for dtype, found in sizes.items()}


def first_values(strategy: phalanx.Strategy) -> list[np.ndarray]:
    """The weights of a model of which each worker has drawn others, after a step that only reads them."""
    keras.utils.set_random_seed(strategy.topology.worker_index)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2)])
    drawn = model.get_weights()[0]
    strategy.run(lambda: model(np.ones((1, 2), "float32")))
    return [drawn, model.get_weights()[0]]


def predict_eagerly(strategy: phalanx.Strategy) -> np.ndarray:
    """The predictions of a model that is not compiled into programs."""
    model = small_model(strategy)
    model.run_eagerly = True
    return model.predict(X[:101], batch_size=BATCH, verbose=0)


def shuffled(strategy: phalanx.Strategy) -> list[float]:
    """The losses of a training whose order of rows nobody has chosen."""
    return small_model(strategy).fit(X, Y, batch_size=BATCH, epochs=2, verbose=0).history["loss"]


def verbs(strategy: phalanx.Strategy) -> dict[str, Any]:
    """What the public verbs return."""
    context = phalanx.get_replica_context

    def replica() -> Any:
        number = context().replica_id_in_sync_group
        return number, context().all_reduce("SUM", number), context().all_gather(np.ones(1) * number, axis=0)

    numbers, total, gathered = strategy.run(replica)
    with strategy.scope():
        count = keras.Variable(0, aggregation="sum", synchronization="on_read", trainable=False)
    strategy.run(lambda: count.assign_add(context().replica_id_in_sync_group))
    merge = phalanx.function(lambda: (strategy.reduce("SUM", numbers, axis=None), strategy.gather(gathered, axis=0)))
    merged = merge()
    return {
        "replicas": strategy.num_replicas_in_sync,
        "local": [int(x) for x in strategy.experimental_local_results(numbers)],
        "total": [int(x) for x in strategy.experimental_local_results(total)],
        "gathered": [x.tolist() for x in strategy.experimental_local_results(gathered)],
        "sum": int(strategy.reduce("SUM", numbers, axis=None)),
        "closed over": (int(merged[0]), merged[1].tolist()),
        "count": int(count.value),
        "writes": (strategy.extended.should_checkpoint, strategy.extended.should_save_summary),
        "task": (strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id),
    }


class Stopping(keras.callbacks.Callback):
    """Raises at the end of an epoch."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self._epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Raises."""
        if epoch == self._epoch:
            raise ZeroDivisionError


def writing(strategy: phalanx.Strategy, folder: str, verbose: int) -> str:
    """Fits with all callbacks that write, into the same folder on all workers; returns what it prints."""
    model = small_model(strategy)
    callbacks = [
        keras.callbacks.ModelCheckpoint(f"{folder}/{{epoch}}.keras"),
        keras.callbacks.CSVLogger(f"{folder}/log.csv"),
        phalanx.keras.TensorBoard(
            f"{folder}/board", histogram_freq=1, write_images=True, update_freq=2, profile_batch=2
        ),
    ]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=verbose, callbacks=callbacks)
    return printed.getvalue()


def summaries(strategy: phalanx.Strategy, folder: str) -> None:
    """Records values of replicas and of a whole batch, in two steps."""
    strategy_batch = strategy.experimental_distribute_values_from_function(
        lambda c: np.arange(3, dtype="float32") + 10 * c.replica_id_in_sync_group
    )

    def replica(x: Any) -> Any:
        phalanx.summary.scalar("mean", x[0])
        phalanx.summary.histogram("values", x, buckets=4)
        phalanx.summary.write("first", x)
        return x

    @phalanx.function
    def step(x: Any) -> None:
        everything = strategy.gather(strategy.run(replica, args=(x,)), axis=0)
        phalanx.summary.write("everything", everything)

    writer = phalanx.summary.create_file_writer(folder)
    for number in range(2):
        with writer.as_default(step=number):
            step(strategy_batch)
    writer.close()


class StopAt(estimator.SessionRunHook):
    """Requests a stop after a number of steps."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def after_run(self, run_context: estimator.SessionRunContext, run_values: estimator.SessionRunValues) -> None:
        """Counts down."""
        self._left -= 1
        if self._left <= 0:
            run_context.request_stop()


def estimated(strategy: phalanx.Strategy, folder: str) -> dict[str, Any]:
    """Trains an Estimator twice, and then evaluates, predicts and exports, first in all processes and then on the chief."""

    def model_fn(features: Any, labels: Any, mode: str) -> estimator.EstimatorSpec:
        outputs = keras.layers.Dense(CLASSES, name="dense")(features)
        if mode == estimator.ModeKeys.PREDICT:
            return estimator.EstimatorSpec(mode, predictions={"outputs": outputs})
        losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        loss = losses(labels, outputs)
        return estimator.EstimatorSpec(mode, loss=loss, train_op=estimator.minimize(keras.optimizers.SGD(0.1), loss))

    config = estimator.RunConfig(folder, train_distribute=strategy, save_checkpoints_steps=1000)
    model = estimator.Estimator(model_fn, config=config)
    input_fn = lambda: [(X[i : i + BATCH], Y[i : i + BATCH]) for i in range(0, 10 * BATCH, BATCH)]  # noqa: E731
    receive = lambda: estimator.export.ServingInputReceiver(X[:1])  # noqa: E731
    latest = []
    # A hook of one worker ends the first training of all, after the fifth step or soon after it.
    for hooks in ([StopAt(5)] if strategy.topology.worker_index else [], []):
        model.train(input_fn, hooks, max_steps=10)
        latest.append(model.latest_checkpoint())
    found = {
        "latest": latest,
        "loss": model.evaluate(input_fn)["loss"],
        "outputs": next(model.predict(input_fn))["outputs"],
        "kernel": model.get_variable_value("dense/kernel"),
        "bias": model.get_variable_value("dense/bias"),
    }
    is_chief = strategy.cluster_resolver.task_id == 0
    exports = [model.export_saved_model(f"{folder}/{name}", receive) for name in (["all", "chief"] if is_chief else [])]
    served = [estimator.load_saved_model(path).predict(X[:1])["outputs"][0] for path in exports]
    return {**found, "served": [len(served) == 2 * is_chief, *(np.allclose(x, found["outputs"], 1e-5) for x in served)]}


def interrupted(strategy: phalanx.Strategy, folder: str, shared: bool) -> list[np.ndarray]:
    """Fits until the second epoch has failed, then anew from what is backed up; returns the weights."""
    if not shared:
        folder = f"{folder}/{strategy.topology.worker_index}"
    for callbacks in ([Stopping(1)], []):
        model = small_model(strategy, keras.optimizers.Adam(0.01))
        with contextlib.suppress(ZeroDivisionError):
            model.fit(callbacks=[keras.callbacks.BackupAndRestore(folder), *callbacks], **THREE_EPOCHS)
    return model.get_weights()


THREE_EPOCHS = {"x": X[:256], "y": Y[:256], "batch_size": BATCH, "epochs": 3, "shuffle": False, "verbose": 0}


def accumulated(strategy: phalanx.Strategy, path: str) -> list[np.ndarray]:
    """Saves in the middle of a round of accumulated gradients; returns weights and slots."""
    model = small_model(strategy, keras.optimizers.Adam(0.01, gradient_accumulation_steps=3))
    saving = keras.callbacks.ModelCheckpoint(path, save_freq=4)
    model.fit(X[:640], Y[:640], batch_size=BATCH, shuffle=False, verbose=0, callbacks=[saving])
    return [v.numpy() for v in [*model.weights, *model.optimizer.variables]]


def diverged(strategy: phalanx.Strategy) -> None:
    """Lets the last worker assign a value of its own, once all are in sync."""
    model = small_model(strategy)
    model.fit(X[:64], Y[:64], batch_size=BATCH, verbose=0, callbacks=[phalanx.keras.SyncCheck(1)])
    bias = model.weights[1]
    bias.assign(bias.value + (strategy.topology.worker_index == strategy.topology.num_workers - 1))
    phalanx.testing.assert_in_sync(model)


STOPPERS = {
    "stop_training": "on_train_batch_end",
    "stop_evaluating": "on_test_batch_end",
    "stop_predicting": "on_predict_batch_end",
}


def stopped(strategy: phalanx.Strategy, ranks: list[int]) -> dict[str, int]:
    """Callbacks of some workers stop each loop after its fourth batch, and `fit` after its second epoch. Returns what was done."""
    model = small_model(strategy, keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)))
    is_stopping, batches = strategy.topology.worker_index in ranks, dict.fromkeys(STOPPERS, 0)

    def stopper(flag: str) -> keras.callbacks.Callback:
        def hear(batch: int, logs: Any = None) -> None:
            batches[flag] += 1
            if is_stopping and batch == 3:
                setattr(model, flag, True)

        return keras.callbacks.LambdaCallback(**{STOPPERS[flag]: hear})

    options = {"batch_size": BATCH, "verbose": 0}
    model.fit(X, Y, epochs=2, callbacks=[stopper("stop_training")], **options)
    model.evaluate(X, Y, callbacks=[stopper("stop_evaluating")], **options)
    rows = len(model.predict(X, callbacks=[stopper("stop_predicting")], **options))

    def end_epoch(epoch: int, logs: Any = None) -> None:
        model.stop_training = is_stopping and epoch == 1

    ending = keras.callbacks.LambdaCallback(on_epoch_end=end_epoch)
    history = model.fit(X[:BATCH], Y[:BATCH], epochs=4, callbacks=[ending], **options)
    phalanx.testing.assert_in_sync(model)
    return batches | {"rows": rows, "epochs": len(history.epoch), "updates": int(model.optimizer.iterations)}


class OwnScore(keras.callbacks.Callback):
    """Writes a score into the logs that each worker computes from rows of its own."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the score."""
        logs["score"] = 1.0 + 0.25 * own_rank()


class Counted(keras.callbacks.Callback):
    """Counts in each worker what it likes, but says that its state is the same in all."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.count, self.step, self.own = 0, step, own_rank()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Counts."""
        self.count += self.step

    def get_state(self) -> dict[str, int]:
        """What all workers share."""
        return {"count": self.count}

    def set_state(self, state: dict[str, int]) -> None:
        """Takes it over."""
        self.count = state["count"]


def own_rank() -> int:
    """The number of this process."""
    return jax.process_index()


def steered_apart(strategy: phalanx.Strategy) -> list[str]:
    """Trainings that callbacks steer apart, and one with such that do not. Returns their errors."""
    rank, errors = own_rank(), []
    plateau = keras.callbacks.ReduceLROnPlateau("score", mode="min", patience=0, factor=0.5)
    rates = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (1 + epoch * rank))
    for callbacks in ([OwnScore(), plateau], [rates], [Counted(1 + rank)], [Counted(1)]):
        model = small_model(strategy)
        try:
            model.fit(X[:BATCH], Y[:BATCH], batch_size=BATCH, epochs=3, verbose=0, callbacks=callbacks)
        except phalanx.errors.DivergenceError as e:
            errors.append(str(e))
    return errors


def small_model(strategy: phalanx.Strategy, optimizer: keras.Optimizer | None = None) -> keras.Model:
    """A compiled model of one layer, whose weights are those of the seed."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1)])
        model.compile(optimizer or keras.optimizers.SGD(0.1), "mse")
    return model


def fit_that_chooses(strategy: phalanx.Strategy) -> dict[str, Any]:
    """`fit` with `steps_per_execution="auto"`. Many steps per execution are faster by the clock of the first worker only."""
    model, now_s = small_model(strategy), 0.0
    model.steps_per_execution = "auto"
    times = {1: 0.001, 16: 0.001 if strategy.topology.is_chief else 0.1}

    def later(batch: int, logs: Any) -> None:
        nonlocal now_s
        now_s += times[model.steps_per_execution]

    def now() -> float:
        return now_s

    with unittest.mock.patch("phalanx.keras.pace.perf_counter", now):
        callback = keras.callbacks.LambdaCallback(on_train_batch_end=later)
        model.fit(X, Y, batch_size=6, shuffle=False, verbose=0, callbacks=[callback])
    return {"number": model.steps_per_execution, "weights": model.get_weights()}


def different_rows(strategy: phalanx.Strategy, rows: list[int], method: str, source: str) -> None:
    """Fits or the like, or runs a loop, with the first of the rows; each worker with another number of them."""
    model = small_model(strategy)
    own = rows[strategy.topology.worker_index]
    x, y = X[:own], Y[:own]
    if method == "loop":
        for batch in strategy.experimental_distribute_dataset(x, batch_size=BATCH):
            strategy.run(lambda x: x.sum(), args=(batch,))
    elif source == "arrays":
        getattr(model, method)(x, *([] if method == "predict" else [y]), batch_size=BATCH, verbose=0)
    elif source == "generator":
        getattr(model, method)(_batches(x, y), verbose=0)
    else:
        getattr(model, method)(phalanx.keras.DatasetCreator(lambda _: list(_batches(x, y))), verbose=0)


def _batches(x: np.ndarray, y: np.ndarray) -> Iterator[Any]:
    for i in range(0, len(x), BATCH):
        yield x[i : i + BATCH], y[i : i + BATCH]


def loop_sharded(strategy: phalanx.Strategy, devices_per_replica: int, **kwargs: Any) -> dict[str, Any]:
    """The same with variables that are sharded over the replicas, or over the devices of each."""
    axis = ("model", devices_per_replica) if devices_per_replica > 1 else None
    layout = phalanx.fully_sharded("model" if axis else "replica", min_size=1)
    sharded = type(strategy)(model_axis=axis, layout=layout)
    return {"replicas": sharded.num_replicas_in_sync, **loop(sharded, **kwargs)}
