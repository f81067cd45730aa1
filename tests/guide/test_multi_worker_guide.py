"""The calls of TensorFlow's guide to multi-worker training, with the imports changed, made by two processes.

This file is also the program of the workers, each of which leaves what the calls returned in a file.
"""

import contextlib
import itertools
import json
import os
import pickle
import shutil
import signal
import sys
import time
from pathlib import Path

import phalanx  # isort: skip  (before Keras, whose backend it chooses)

import jax
import keras
import numpy as np
import pytest
from test_guide import GUIDE_LOSSES, custom_loop, ones

WORKERS = 2
X = np.random.RandomState(7).normal(size=(50, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


# What a worker does: the snippets of the guide.


def worker(folder):
    """Calls all snippets, and leaves in the folder what they return."""
    strategy = strategy_of_guide()
    snippets = (
        whose_task,
        train_epoch,
        batch_sizes,
        dataset_of_function,
        losses_of_loop,
        fit,
        save,
        backed_up,
        checkpointed,
        preempted,
    )
    found = {snippet.__name__: snippet(strategy, folder) for snippet in snippets}
    number = strategy.cluster_resolver.task_id
    (folder / f"{number}.pickle").write_bytes(pickle.dumps(found))


def strategy_of_guide():
    """TF_CONFIG is set by the program itself, and names parameter servers, which this strategy does without."""
    given = json.loads(os.environ["TF_CONFIG"])
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {"worker": given["cluster"]["worker"], "ps": ["localhost:34567"]},
            "task": {"type": "worker", "index": given["task"]["index"]},
        }
    )
    communication_options = phalanx.experimental.CommunicationOptions(
        implementation=phalanx.experimental.CommunicationImplementation.RING
    )
    assert phalanx.MultiWorkerMirroredStrategy(communication_options=communication_options).num_replicas_in_sync == 2
    return phalanx.experimental.MultiWorkerMirroredStrategy()


def whose_task(strategy, folder):
    """What a program asks the resolver, to do something on workers only."""
    resolver = strategy.cluster_resolver
    return {
        "task": (resolver.task_type, resolver.task_id),
        "jobs": {job: len(tasks) for job, tasks in resolver.cluster_spec().as_dict().items()},
        "chief": (strategy.extended.should_checkpoint, strategy.extended.should_save_summary),
        "replicas": strategy.num_replicas_in_sync,
    }


def train_epoch(strategy, folder):
    """The loop on the page of `Strategy`: a replica function, and a sum over all batches."""
    with strategy.scope():

        @phalanx.function
        def distribute_train_epoch(batch):
            return strategy.reduce(phalanx.ReduceOp.SUM, strategy.run(lambda x: (x**2).sum(), args=(batch,)), axis=None)

        dist_dataset = strategy.experimental_distribute_dataset(np.split(X, 5))
        return sum(float(distribute_train_epoch(x)) for x in dist_dataset)


def batch_sizes(strategy, folder):
    """A global batch that grows with the replicas; this worker's results are those of its own replicas."""
    global_batch_size = 5 * strategy.num_replicas_in_sync
    dist_dataset = strategy.experimental_distribute_dataset(ones(global_batch_size, 1))
    features, _ = next(iter(dist_dataset))
    return [x.shape for x in strategy.experimental_local_results(features)]


def dataset_of_function(strategy, folder):
    """Nothing is divided but by the function itself, which is told which worker asks."""

    def dataset_fn(context):
        rows = X[context.input_pipeline_id :: context.num_input_pipelines]
        size = context.get_per_replica_batch_size(10)
        return [rows[i : i + size] for i in range(0, len(rows), size)]

    dataset = strategy.experimental_distribute_datasets_from_function(dataset_fn)
    return np.concatenate([np.asarray(strategy.gather(batch, axis=0)) for batch in dataset])


def losses_of_loop(strategy, folder):
    """Twenty steps over the dataset, ten with an iterator."""
    _, distributed_train_step = custom_loop(strategy, GUIDE_LOSSES[0])
    dist_dataset = strategy.experimental_distribute_dataset(ones(5, 20))
    losses = [float(distributed_train_step(dist_inputs)) for dist_inputs in dist_dataset]
    iterator = iter(dist_dataset)
    return losses + [float(distributed_train_step(next(iterator))) for _ in range(10)]


def compiled_model():
    """The guide's model, for rows of four, with the same weights in all processes."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(loss="mse", optimizer="sgd")
    model.set_weights([np.full((4, 1), 0.1), np.zeros(1)])
    return model


def fit_of(model):
    """Trains with a dataset of batches and with arrays, and evaluates."""
    batches = ((X[i : i + 10], Y[i : i + 10]) for i in [0, 10, 20, 30] * 2)
    return [
        *model.fit(batches, epochs=2, steps_per_epoch=4, shuffle=False, verbose=0).history["loss"],
        *model.fit(X, Y, epochs=2, batch_size=20, shuffle=False, verbose=0).history["loss"],
        model.evaluate(X, Y, batch_size=20, verbose=0),
    ]


def fit(strategy, folder):
    """The model is made and compiled in the scope; all else is as without a strategy."""
    with strategy.scope():
        model = compiled_model()
    return fit_of(model)


def save(strategy, folder):
    """As tf.distribute has to be told to save: all call it, the chief to the place, the others to one that they remove."""
    with strategy.scope():
        model = compiled_model()
    model.fit(X, Y, epochs=1, batch_size=20, shuffle=False, verbose=0)
    resolver = strategy.cluster_resolver
    is_chief = resolver.task_type == "worker" and resolver.task_id == 0
    target = folder if is_chief else folder / f"workertemp_{resolver.task_id}"
    target.mkdir(exist_ok=True)
    model.save(target / "saved.keras")
    if not is_chief:
        shutil.rmtree(target)
    return model.predict(X, batch_size=20, verbose=0)


class Interrupted(keras.callbacks.Callback):
    """Fails in the second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        """Fails."""
        if epoch == 1:
            raise ZeroDivisionError


def backed_up(strategy, folder):
    """A training of three epochs that fails on all workers, and the same lines again."""
    for others in ([Interrupted()], []):
        with strategy.scope():
            model = compiled_model()
        callbacks = [keras.callbacks.BackupAndRestore(backup_dir=folder / "backup"), *others]
        with contextlib.suppress(ZeroDivisionError):
            model.fit(X, Y, epochs=3, batch_size=20, shuffle=False, verbose=0, callbacks=callbacks)
    return model.get_weights()


NUM_EPOCHS, NUM_STEPS_PER_EPOCH = 3, 4


class Ended(Exception):
    """Stands for the end of the program, as the exit function of the handler raises it here."""


def epochs(strategy, folder, *, handles_preemption=False):
    """The tutorial of a custom loop on several workers: counters of epochs and steps are in the checkpoint too.

    Args:
      strategy: the strategy.
      folder: where the chief saves.
      handles_preemption: whether a handler calls the steps, instead of a save after each epoch.

    Yields:
      Loss, epoch and step of each step.
    """
    resolver = strategy.cluster_resolver
    is_chief = resolver.task_type == "worker" and resolver.task_id == 0
    write_dir = folder if is_chief else folder / f"workertemp_{resolver.task_id}"
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.set_weights([np.full((4, 1), 0.1), np.zeros(1)])
        optimizer = keras.optimizers.Adam(0.05)
        epoch = phalanx.Variable(0, trainable=False, dtype="int32", name="epoch")
        step_in_epoch = phalanx.Variable(0, trainable=False, dtype="int32", name="step_in_epoch")

    @phalanx.function
    def train_step(iterator):
        def step_fn(inputs):
            with phalanx.GradientTape() as tape:
                loss = phalanx.nn.compute_average_loss((model(inputs[0], training=True) - inputs[1]) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return strategy.reduce(phalanx.ReduceOp.SUM, strategy.run(step_fn, args=(next(iterator),)), axis=None)

    dataset = strategy.experimental_distribute_dataset([(X[i : i + 10], Y[i : i + 10]) for i in (0, 10, 20, 30)])
    checkpoint = phalanx.train.Checkpoint(model=model, optimizer=optimizer, epoch=epoch, step_in_epoch=step_in_epoch)
    if handles_preemption:
        config = phalanx.experimental.TerminationConfig(exit_fn=end)
        handler = phalanx.experimental.PreemptionCheckpointHandler(resolver, checkpoint, folder, config)
        run = handler.run
    else:
        run = lambda step, *args: step(*args)  # noqa: E731
        checkpoint_manager = phalanx.train.CheckpointManager(checkpoint, directory=write_dir, max_to_keep=1)
        if latest_checkpoint := phalanx.train.latest_checkpoint(folder):
            checkpoint.restore(latest_checkpoint)
    while epoch.numpy() < NUM_EPOCHS:
        iterator = iter(dataset)
        for _ in range(int(step_in_epoch.numpy())):
            next(iterator)
        while step_in_epoch.numpy() < NUM_STEPS_PER_EPOCH:
            loss = run(train_step, iterator)
            yield float(loss), int(epoch), int(step_in_epoch)
            step_in_epoch.assign_add(1)
        epoch.assign_add(1)
        step_in_epoch.assign(0)
        if not handles_preemption:
            checkpoint_manager.save()
            checkpoint_manager.sync()
            if not is_chief:
                shutil.rmtree(write_dir, ignore_errors=True)
    if handles_preemption:
        handler.close()


def end():
    """The handler calls this after its save, so that the process does not exit."""
    raise Ended


def checkpointed(strategy, folder):
    """Stopped in the second epoch, and started again."""
    folder = folder / "epochs"
    first = list(itertools.islice(epochs(strategy, folder), NUM_STEPS_PER_EPOCH + 2))
    return first, list(epochs(strategy, folder))


def preempted(strategy, folder):
    """SIGTERM reaches the second worker in the second epoch; both save at the same step, and are started again."""
    first, folder = [], folder / "preempted"
    with contextlib.suppress(Ended):
        for loss, epoch, step in epochs(strategy, folder, handles_preemption=True):
            first.append((loss, epoch, step))
            if (epoch, step) == (1, 0) and strategy.cluster_resolver.task_id == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            # The notice travels while the others train on. This training would be over before it has arrived.
            if (epoch, step) >= (1, 0):
                time.sleep(0.5)
    return first, list(epochs(strategy, folder, handles_preemption=True))


# What the test does: start the workers, and compare.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the workers write."""
    return tmp_path_factory.mktemp("guide")


@pytest.fixture(scope="module")
def found(folder):
    """What the snippets returned, by worker."""
    from launching import RUN, run  # The workers, which run this file, cannot import it.

    code, out, err = run(*RUN, WORKERS, __file__, folder)
    assert code == 0, out + err
    return [pickle.loads((folder / f"{number}.pickle").read_bytes()) for number in range(WORKERS)]


def same_everywhere(found, name):
    """Returns what a snippet returned, once it is known that it was the same on all workers."""
    first, *others = [each[name] for each in found]
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)
    return first


def test_resolver_finds_task_and_chief(found):
    """Each process finds its own task in TF_CONFIG; the first worker is the chief, and a parameter server no replica."""
    for number, each in enumerate(found):
        assert each["whose_task"] == {
            "task": ("worker", number),
            "jobs": {"worker": WORKERS, "ps": 1},
            "chief": (number == 0, number == 0),
            "replicas": WORKERS,
        }


def test_sum_over_an_epoch(found):
    """Every row counts once, on all workers."""
    assert same_everywhere(found, "train_epoch") == pytest.approx((X.astype("float64") ** 2).sum(), rel=1e-5)


def test_batch_size_from_number_of_replicas(found):
    """Each worker has its replica's share of the global batch."""
    assert [each["batch_sizes"] for each in found] == [[(5, 1)]] * WORKERS


def test_dataset_function_reads_every_row_once(found):
    """Every row is read once, each worker's by itself."""
    rows = same_everywhere(found, "dataset_of_function")
    np.testing.assert_array_equal(np.sort(rows, axis=0), np.sort(X, axis=0))
    np.testing.assert_array_equal(rows[:10], np.concatenate([X[0:10:2], X[1:10:2]]))


def test_custom_loop_prints_the_losses_of_the_guide(found):
    """Batches of five rows, which two workers cannot share evenly."""
    np.testing.assert_allclose(same_everywhere(found, "losses_of_loop"), GUIDE_LOSSES, rtol=0, atol=2e-6)


def test_fit_equals_keras_on_one_device(found):
    """Losses of training and evaluation are those of Keras without a strategy."""
    np.testing.assert_allclose(same_everywhere(found, "fit"), fit_of(compiled_model()), rtol=1e-5)


def test_saved_model_predicts_without_strategy(found, folder):
    """What the chief has saved predicts the same without a strategy, and no other file is left."""
    model = keras.models.load_model(folder / "saved.keras")
    expected = model.predict(X, verbose=0)
    np.testing.assert_allclose(same_everywhere(found, "save"), expected, rtol=1e-5, atol=1e-6)
    assert np.abs(expected - compiled_model().predict(X, verbose=0)).max() > 1e-2, "the model has learnt nothing"
    assert list(folder.glob("workertemp_*")) == []


def test_backup_and_restore(found):
    """The weights are those of a training that was not interrupted."""
    model = compiled_model()
    model.fit(X, Y, epochs=3, batch_size=20, shuffle=False, verbose=0)
    for ours, theirs in zip(same_everywhere(found, "backed_up"), model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "again"), [("checkpointed", 2), ("preempted", 0)])
def test_counters_of_epochs_and_steps_are_restored(found, folder, name, again):
    """A second start does again what was not saved, and nothing else, with the losses of one device."""
    first, second = same_everywhere(found, name)
    places = [(epoch, step) for epoch in range(NUM_EPOCHS) for step in range(NUM_STEPS_PER_EPOCH)]
    expected = losses_of_adam(len(places))
    assert 0 < len(second) < len(places), "it was not interrupted"
    for steps, start in ((first, 0), (second, len(first) - again)):
        assert [tuple(place) for _, *place in steps] == places[start : start + len(steps)]
        np.testing.assert_allclose([loss for loss, *_ in steps], expected[start : start + len(steps)], rtol=1e-4)
    assert len(first) - again + len(second) == len(places)
    assert list(folder.rglob("workertemp_*")) == []


def losses_of_adam(steps):
    """The losses of the training above, computed with NumPy."""
    weights, moments = np.array([[0.1]] * 4 + [[0.0]]), [0.0, 0.0]
    losses = []
    for number in range(steps):
        rows = slice(number % 4 * 10, number % 4 * 10 + 10)
        inputs = np.hstack([X[rows], np.ones((10, 1))])
        errors = inputs @ weights - Y[rows]
        losses.append(float(np.mean(errors**2)))
        gradient = 2 * inputs.T @ errors / 10
        moments = [0.9 * moments[0] + 0.1 * gradient, 0.999 * moments[1] + 0.001 * gradient**2]
        rate = 0.05 * np.sqrt(1 - 0.999 ** (number + 1)) / (1 - 0.9 ** (number + 1))
        weights = weights - rate * moments[0] / (np.sqrt(moments[1]) + 1e-7)
    return losses


def test_strategy_without_cluster_uses_local_devices():
    """Without a cluster all local devices are replicas, as when the guide makes the strategy in a notebook."""
    options = phalanx.experimental.CommunicationOptions(
        implementation=phalanx.experimental.CommunicationImplementation.AUTO
    )
    for strategy in (
        phalanx.MultiWorkerMirroredStrategy(),
        phalanx.MultiWorkerMirroredStrategy(communication_options=options),
        phalanx.experimental.MultiWorkerMirroredStrategy(),
    ):
        assert strategy.num_replicas_in_sync == jax.local_device_count()
        assert not strategy.cluster_resolver.cluster_spec()


def test_communication_of_older_guide():
    """The guide for TensorFlow 2.3 passes the implementation alone."""
    implementation = phalanx.experimental.CollectiveCommunication.AUTO
    strategy = phalanx.experimental.MultiWorkerMirroredStrategy(implementation)
    assert strategy.communication_options.implementation is implementation
    assert isinstance(strategy, phalanx.MultiWorkerMirroredStrategy)


def test_nccl_without_gpus():
    """tf.distribute warns; here the error says what there is."""
    options = phalanx.experimental.CommunicationOptions(
        implementation=phalanx.experimental.CommunicationImplementation.NCCL
    )
    with pytest.raises(phalanx.errors.InvalidArgumentError, match="'cpu' support only RING"):
        phalanx.MultiWorkerMirroredStrategy(communication_options=options)


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
