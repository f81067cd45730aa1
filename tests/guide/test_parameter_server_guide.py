"""The calls of TensorFlow's guide for parameter servers and central storage, with the imports changed.

Once all processes are children of this one, and once they are a cluster from TF_CONFIG, of which this file is the program.
"""

import contextlib
import json
import pickle
import secrets
import sys
from pathlib import Path

import phalanx  # isort: skip  (before Keras, whose backend it chooses)

import jax
import keras
import numpy as np
import pytest
from test_guide import GUIDE_LOSSES, custom_loop, ones

from phalanx._src.launch.plan import free_ports

DEADLINE_S = 900  # On a busy machine; alone, the cluster takes a small part of it.
STEPS = len(GUIDE_LOSSES)
X = np.random.RandomState(7).normal(size=(200, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def snippets(strategy):
    """Calls those of the guide, and of the tutorials that it names, and returns what they return."""
    coordinator = phalanx.experimental.coordinator.ClusterCoordinator(strategy)
    return {
        "cluster": whose_task(strategy),
        "variables": on_servers(strategy, coordinator),
        "losses": losses_of_loop(strategy, coordinator),
        "fit": fit(strategy),
    }


def whose_task(strategy):
    """What a program asks the resolver; None where it has started the processes itself."""
    resolver = strategy.cluster_resolver
    return None if resolver is None else (resolver.task_type, resolver.cluster_spec().num_tasks("worker"))


def on_servers(strategy, coordinator):
    """A variable of the scope is read and updated by the steps; one that all of them count in."""
    with strategy.scope():
        table = keras.Variable(np.zeros((6, 2), "float32"))
        counter = keras.Variable(0, dtype="int32", trainable=False)

    @phalanx.function
    def worker_fn(row):
        table.assign_add(keras.ops.one_hot(row, 6)[:, None] * np.float32([1, 2]))
        return counter.assign_add(1)

    for row in range(6):
        coordinator.schedule(worker_fn, args=(np.int32(row),))
    coordinator.join()
    assert coordinator.done()
    return table.numpy(), int(counter.numpy())


def losses_of_loop(strategy, coordinator):
    """Thirty steps on a dataset of each worker, the fetched losses, and the loss that the model has in the end."""
    model, distributed_train_step = custom_loop(strategy, GUIDE_LOSSES[0])
    dataset = ones(5, STEPS)

    @phalanx.function
    def step_fn(iterator):
        return distributed_train_step(next(iterator))

    def per_worker_dataset_fn():
        return strategy.distribute_datasets_from_function(lambda context: dataset)

    per_worker_dataset = coordinator.create_per_worker_dataset(per_worker_dataset_fn)
    per_worker_iterator = iter(per_worker_dataset)
    losses = [coordinator.schedule(step_fn, args=(per_worker_iterator,)) for _ in range(STEPS)]
    coordinator.join()
    logit = sum(float(w.sum()) for w in model.get_weights())
    return coordinator.fetch(losses), float(np.logaddexp(0, -logit))


def fit(strategy):
    """A dataset function, and arrays."""

    def dataset_fn(context):
        rng = np.random.default_rng(context.input_pipeline_id)
        while True:
            rows = rng.integers(len(X), size=context.get_per_replica_batch_size(20))
            yield X[rows], Y[rows]

    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    creator = phalanx.keras.DatasetCreator(dataset_fn)
    losses = model.fit(creator, epochs=2, steps_per_epoch=20, verbose=0).history["loss"]
    losses += model.fit(X, Y, epochs=1, batch_size=20, verbose=0).history["loss"]
    predicted = model.predict(X, batch_size=20, verbose=0)
    return losses, model.evaluate(X, Y, batch_size=20, verbose=0), float(((predicted - Y) ** 2).mean())


def main(path):
    """The program of the cluster's processes: serves, or coordinates and leaves in the file what the snippets return."""
    cluster_resolver = phalanx.cluster_resolver.TFConfigClusterResolver()
    if cluster_resolver.task_type in ("worker", "ps"):
        server = phalanx.Server(
            cluster_resolver.cluster_spec(),
            job_name=cluster_resolver.task_type,
            task_index=cluster_resolver.task_id,
            protocol=cluster_resolver.rpc_layer or "grpc",
        )
        server.join()
        return
    strategy = phalanx.experimental.ParameterServerStrategy(
        phalanx.cluster_resolver.TFConfigClusterResolver(),
        variable_partitioner=phalanx.experimental.partitioners.FixedShardsPartitioner(2),
    )
    Path(path).write_bytes(pickle.dumps(snippets(strategy)))


def found_by_cluster(folder):
    """What the chief of two workers and a parameter server finds."""
    from processes import errors_of, process

    tasks = [("worker", 0), ("worker", 1), ("ps", 0), ("chief", 0)]
    cluster = {"worker": [], "ps": [], "chief": []}
    for (job, _), port in zip(tasks, free_ports(len(tasks)), strict=True):
        cluster[job].append(f"127.0.0.1:{port}")
    token, path = secrets.token_hex(16), folder / "found.pickle"
    with contextlib.ExitStack() as stack:
        processes = []
        for job, index in tasks:
            config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            own = {"TF_CONFIG": config, "PHALANX_TOKEN": token, "PHALANX_CPU_DEVICES": None}
            processes.append(stack.enter_context(process(__file__, path, **own)))
        for one in reversed(processes):  # The servers end with the chief.
            assert one.wait(DEADLINE_S) == 0, errors_of(one)
    return pickle.loads(path.read_bytes())


@pytest.fixture(scope="module", params=["children", "cluster"])
def found(request, tmp_path_factory):
    """What the snippets return, with processes of this one and with those of a cluster."""
    if request.param == "cluster":
        return found_by_cluster(tmp_path_factory.mktemp("cluster"))
    with contextlib.closing(phalanx.experimental.ParameterServerStrategy(workers=2, ps=1)) as strategy:
        return snippets(strategy)


@pytest.mark.cover(["found"], {"cluster"})
def test_calls_of_the_guide(found):
    """They do what the guide says."""
    # The chief knows its workers; a strategy without TF_CONFIG needs no resolver.
    assert found["cluster"] in (None, ("chief", 2))
    # Every step's increments count once, in all rows and shards.
    table, counter = found["variables"]
    np.testing.assert_array_equal(table, [[1, 2]] * 6)
    assert counter == 6
    # The losses go down as those that the guide prints: late updates of a slow descent differ little.
    losses, last = found["losses"]
    assert max(losses) == pytest.approx(GUIDE_LOSSES[0], abs=2e-6)
    np.testing.assert_allclose(sorted(losses, reverse=True), GUIDE_LOSSES, rtol=0, atol=0.04)
    assert last == pytest.approx(GUIDE_LOSSES[-1], abs=0.01)
    # The model learns the sum of four numbers; evaluation and prediction agree.
    losses, evaluated, of_predicted = found["fit"]
    assert losses == sorted(losses, reverse=True)
    assert evaluated < 0.1 * losses[0]
    assert evaluated == pytest.approx(of_predicted, rel=1e-4)


def test_configuration_of_the_guide(monkeypatch):
    """A cluster of workers and parameter servers, seen by its second worker."""
    cluster = {"worker": ["host1:1", "host2:1", "host3:1"], "ps": ["host4:1", "host5:1"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}}))
    resolver = phalanx.cluster_resolver.TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.cluster_spec().as_dict() == cluster


@pytest.fixture
def central_storage_strategy():
    """Variables on the CPU, computation on all devices."""
    return phalanx.experimental.CentralStorageStrategy()


def test_central_storage_prints_the_losses_of_the_guide(central_storage_strategy):
    """Updates of all replicas, which are on all devices, are aggregated before they are applied to the variables."""
    assert central_storage_strategy.num_replicas_in_sync == jax.local_device_count()
    model, distributed_train_step = custom_loop(central_storage_strategy, GUIDE_LOSSES[0])
    dist_dataset = central_storage_strategy.experimental_distribute_dataset(ones(5, STEPS))
    losses = [float(distributed_train_step(dist_inputs)) for dist_inputs in dist_dataset]
    np.testing.assert_allclose(losses, GUIDE_LOSSES, rtol=0, atol=2e-6)
    assert {d.id for v in model.variables for d in v.value.devices()} == {0}


def test_fit_under_central_storage(central_storage_strategy):
    """The model is made and compiled in the scope; all else is as without a strategy."""
    with central_storage_strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    losses = model.fit(X, Y, epochs=3, batch_size=20, verbose=0).history["loss"]
    assert losses == sorted(losses, reverse=True)


if __name__ == "__main__":
    main(sys.argv[1])
