"""Input, Keras helpers, strategies of several processes and what belongs to them, with good arguments."""

import functools

import keras
import numpy as np
import optax
import tensorboardX  # noqa: F401  (It sets a variable of the environment, which no test may.)
from bad_values import ALL, ARRAYS, COUNT, DTYPES, INDEX, INTEGER, NONE, SECONDS, TEXTS, VALUES, Case, named

import phalanx
import phalanx.testing
from phalanx import cluster_resolver
from phalanx.cluster_resolver import ClusterSpec

ROWS = {"range", "array of NumPy", "empty array", "bool array", "Mirrored"} | DTYPES
STREAMS = {"empty list", "range", "generator"}
TENSORS = ARRAYS | {"True", "bool array", "empty list", "empty tuple", "range"}
NOT_ROWS = set(VALUES) - (
    {"True", "-1", "0", "1.5", "nan", "inf", "1j", "empty list", "empty dict", "empty tuple", "range", "dict of int"}
    | {"integer of NumPy", "scalar of NumPy", "PerReplica of three", "PerReplica of text", "Mirrored", "variable"}
)
NOT_INITIALIZERS = set(VALUES) - (
    {"None", "object array", "text array", "date array", "array of NumPy", "empty array", "bool array", "array"}
    | {"integer of NumPy", "scalar of NumPy", "deleted array", "masked array", "structured array", "key"}
    | DTYPES
)


class _Reached(Exception):
    """All arguments were looked at, and processes would start now."""


class _Resolver(cluster_resolver.SimpleClusterResolver):
    """A resolver that is asked last."""

    def cluster_spec(self):
        """Ends the construction."""
        raise _Reached


def _until_reached(make):
    @functools.wraps(make)
    def call(**given):
        if given["cluster_resolver"] is None:  # It would start processes of its own.
            return
        try:
            make(**given)
        except _Reached:
            return

    return call


def of_input():
    """Datasets and their iterators."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    rows = np.arange(8.0)
    dataset = strategy.experimental_distribute_dataset(rows, batch_size=2)
    of_rows = strategy.make_experimental_numpy_dataset(rows)

    def reading(call):
        return functools.wraps(call)(lambda **given: list(call(**given)))

    distribute = reading(strategy.experimental_distribute_dataset)
    by_function = reading(strategy.distribute_datasets_from_function)
    of_batches = {"dataset_fn": lambda context: [rows, rows]}
    return named(
        Case(
            strategy.make_experimental_numpy_dataset,
            {"numpy_input": rows},
            takes={"numpy_input": ROWS | {"array", "empty list", "PerReplica of three", "variable"}},
        ),
        Case(of_rows.batch, {"batch_size": 2}, takes={"batch_size": {"integer of NumPy"}}),
        Case(
            dataset.reduce,
            {"initial_state": 0.0, "reduce_func": lambda state, x: state},
            takes={"initial_state": ALL},
            functions=("reduce_func",),
        ),
        Case(
            phalanx.data.from_files,
            {"pattern": __file__, "reader": open},
            takes={"pattern": {"text array"}, "interleave": COUNT},
            functions=("reader",),
        ),
        Case(
            phalanx.testing.assert_restores_everywhere, {"dataset": dataset, "steps": 1}, takes={"steps": NONE | COUNT}
        ),
        Case(
            distribute,
            {"dataset": rows, "batch_size": 2},
            takes={"dataset": ROWS | {"set", "generator", "array", "empty list"}, "batch_size": {"integer of NumPy"}},
            functions=("dataset",),
        ),
        Case(by_function, of_batches, functions=("dataset_fn",)),
        Case(reading(strategy.experimental_distribute_datasets_from_function), of_batches, functions=("dataset_fn",)),
    ) | {
        "Strategy.experimental_distribute_dataset(of batches)": Case(
            lambda x: distribute(dataset=x), {"x": [rows]}, takes={"x": STREAMS}, functions=("x",)
        ),
        "Strategy.experimental_distribute_dataset(of a batch)": Case(
            lambda x: distribute(dataset=[x]),
            {"x": rows},
            takes={"x": ROWS | {"array", "PerReplica of three", "variable"}},
        ),
        "Strategy.experimental_distribute_dataset(of rows)": Case(
            lambda x: distribute(dataset=[x, x], batch_size=2), {"x": 1.0}, takes={"x": ALL - NOT_ROWS}
        ),
        "Strategy.distribute_datasets_from_function(of what it returns)": Case(
            lambda x: by_function(dataset_fn=lambda context: x),
            {"x": [rows, rows]},
            takes={"x": STREAMS},
            functions=("x",),
        ),
        "DistributedDataset.batches": Case(
            lambda steps: iter(dataset.batches(steps=steps)), {"steps": 2}, takes={"steps": {"integer of NumPy"}}
        ),
        "DistributedDataset.require_position": Case(
            lambda state: dataset.require_position(state), {"state": iter(dataset).get_state()}
        ),
        "DistributedIterator.set_state": Case(
            lambda state: iter(dataset).set_state(state), {"state": iter(dataset).get_state()}
        ),
    }


def of_keras():
    """What belongs beside `fit`."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = (np.ones((2, 1), "float32"), np.ones((2, 1), "float32"))
    creator = phalanx.keras.DatasetCreator(lambda context: [np.ones(2)])
    optimizer, variable = phalanx.keras.OptaxOptimizer(optax.sgd(0.1)), keras.Variable(np.ones(2, "float32"))

    def restored(switch):
        @functools.wraps(switch)
        def switched(enabled):
            try:
                switch(enabled)
            finally:
                switch(True)

        return switched

    return named(
        Case(phalanx.keras.DatasetCreator, {"dataset_fn": lambda context: [np.ones(2)]}, functions=("dataset_fn",)),
        Case(
            phalanx.keras.ShardedEmbedding,
            {"input_dim": 4, "output_dim": 2},
            # Keras takes arrays and functions for initializers, and looks at them when the layer is built.
            takes={"embeddings_initializer": ALL - NOT_INITIALIZERS},
            functions=("embeddings_initializer",),
        ),
        Case(
            phalanx.keras.OptaxOptimizer,
            {"transformation": optax.sgd(0.1)},
            takes={"name": NONE | TEXTS - {"no text"}},
        ),
        Case(
            phalanx.keras.SidecarEvaluator,
            {"model": model, "data": data, "checkpoint_dir": "checkpoints", "timeout_s": 0.1},
            # What is evaluated, and with which callbacks, is looked at when a checkpoint is there.
            takes={
                "data": ALL,
                "checkpoint_dir": TEXTS,
                **dict.fromkeys(("steps", "max_evaluations", "stop_at_step"), NONE | COUNT),
                "callbacks": ALL,
                "poll_s": SECONDS - NONE,
                "timeout_s": SECONDS,
            },
        ),
        Case(phalanx.keras.SyncCheck, takes={"every": COUNT}),
        Case(
            phalanx.keras.TensorBoard,
            {"histogram_freq": 1, "write_images": True, "write_steps_per_second": True, "embeddings_freq": 1},
            takes={
                "log_dir": TEXTS,
                **dict.fromkeys(("histogram_freq", "embeddings_freq", "profile_batch"), INDEX),
                "update_freq": COUNT,
                "embeddings_metadata": TEXTS | NONE | {"empty dict"},
            },
        ),
        Case(phalanx.keras.Tracking, {"writer": phalanx.summary.create_noop_writer()}, takes={"update_freq": COUNT}),
        Case(restored(phalanx.keras.set_cpu_kernels), {"enabled": True}, takes={"enabled": {"True"}}),
        Case(restored(phalanx.keras.set_logits_recovery), {"enabled": True}, takes={"enabled": {"True"}}),
    ) | {
        "DatasetCreator.__call__": Case(creator, {"context": phalanx.InputContext()}),
        "OptaxOptimizer.apply": Case(
            optimizer.apply, {"grads": {"a": np.ones(2)}, "trainable_variables": {"a": variable}}
        ),
        "OptaxOptimizer.build": Case(
            lambda variables: phalanx.keras.OptaxOptimizer(optax.sgd(0.1)).build(variables),
            {"variables": [variable]},
            takes={"variables": {"variable"}},
        ),
    }


def of_processes():
    """Strategies and servers, until they would start processes."""
    resolver = _Resolver(
        ClusterSpec({"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}), task_type="chief", task_id=0
    )
    multi = _until_reached(phalanx.MultiWorkerMirroredStrategy)
    old = _until_reached(phalanx.experimental.MultiWorkerMirroredStrategy)
    return named(
        Case(
            _until_reached(phalanx.ParameterServerStrategy),
            {"cluster_resolver": resolver, "workers": 1},
            takes={
                "workers": COUNT,
                "ps": COUNT,
                "max_staleness": NONE | INDEX,
                "snapshot_every_s": SECONDS,
                "worker_timeout_s": SECONDS,
                "resources": NONE | {"empty dict"},
            },
            functions=("variable_partitioner",),
        ),
        Case(
            multi,
            {"cluster_resolver": resolver},
            # The last two are looked at when the processes have connected.
            takes={
                "stall_timeout_s": SECONDS,
                "layout": NONE | {"empty dict"},
                **dict.fromkeys(("local_updates", "replica_weights"), ALL),
            },
        ),
        Case(
            phalanx.experimental.CentralStorageStrategy,
            {"compute_devices": ["cpu:1"], "parameter_device": "cpu:0"},
            takes={"compute_devices": NONE | {"integer of NumPy"}},
        ),
        Case(phalanx.coordinator.ClusterCoordinator, {"strategy": None}),
        Case(phalanx.experimental.ShardedVariable, {"variable": None}, takes={"strategy": set()}),
        Case(
            cluster_resolver.GCEClusterResolver,
            {"project": "p", "zone": "z", "instance_group": "g", "port": 1, "service": object()},
            takes={
                **dict.fromkeys(("project", "zone", "instance_group", "task_type", "rpc_layer"), TEXTS),
                "port": {"integer of NumPy"},
                "task_id": INTEGER,
                "credentials": ALL,
                "service": ALL,
            },
        ),
        Case(
            cluster_resolver.KubernetesClusterResolver,
            {"job_to_label_mapping": {"worker": ["a=b"]}, "override_client": object()},
            takes={
                "job_to_label_mapping": NONE | {"empty dict"},
                "tf_server_port": {"integer of NumPy"},
                "rpc_layer": TEXTS,
                "service": NONE | TEXTS,
                "num_pods": NONE | INTEGER,
                "environ": NONE | {"empty dict"},
                "override_client": ALL,
            },
        ),
    ) | {
        "MultiWorkerMirroredStrategy(experimental)": Case(old, {"communication": "auto", "cluster_resolver": resolver}),
        "ClusterResolver.num_accelerators": Case(
            cluster_resolver.SimpleClusterResolver(
                ClusterSpec({"worker": ["a:1"]}), num_accelerators={"GPU": 1}
            ).num_accelerators,
            {"task_type": "worker", "task_id": 0},
            takes={"task_type": NONE | TEXTS, "task_id": NONE | INTEGER},
        ),
    }


def of_logical_devices():
    """Where arrays of a replica on several devices are."""
    devices = phalanx.testing.virtual_topology((1, 1, 2))
    assignment = phalanx.tpu.experimental.DeviceAssignment.build(devices, [1, 1, 2], num_replicas=1)
    strategy = phalanx.TPUStrategy(experimental_device_assignment=assignment)

    def inside(method):
        return functools.wraps(method)(lambda **given: strategy.run(lambda: method(strategy, **given)))

    one, kind = np.ones((2, 3), "float32"), phalanx.TPUStrategy
    return named(
        Case(kind, {"experimental_device_assignment": assignment}, takes={"layout": NONE | {"empty dict"}}),
        Case(
            inside(kind.experimental_assign_to_logical_device),
            {"tensor": one, "logical_device_id": 0},
            takes={"tensor": TENSORS, "logical_device_id": {"0"}},
        ),
        Case(inside(kind.experimental_split_to_logical_devices), {"tensor": one, "partition_dimensions": [2, 1]}),
        Case(
            inside(kind.experimental_replicate_to_logical_devices), {"tensor": one}, takes={"tensor": TENSORS | {"key"}}
        ),
    ) | {"TPUStrategy(experimental)": Case(phalanx.experimental.TPUStrategy, {"device_assignment": assignment})}


GROUPS = {"input": of_input, "keras": of_keras, "processes": of_processes, "logical_devices": of_logical_devices}
