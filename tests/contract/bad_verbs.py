"""The verbs of strategies, of replica contexts and of functions with good arguments."""

import functools

import jax.numpy as jnp
import keras
import numpy as np
from bad_functions import same
from bad_values import (
    ALL,
    ARRAYS,
    COUNT,
    DISTRIBUTED,
    DTYPES,
    NONE,
    NOT_HELD,
    NUMERIC,
    PLACES,
    SUMMABLE,
    TREES,
    Case,
    named,
)

import phalanx


def of_strategies():
    default = phalanx.get_strategy()
    return named(
        Case(phalanx.OneDeviceStrategy, {"device": "cpu:0"}),
        Case(
            phalanx.MirroredStrategy,
            {"devices": ["cpu:0", "cpu:1"]},
            # A flag with three values, and a layout that divides nothing.
            takes={
                "devices": NONE | {"integer of NumPy"},
                "weight_update_sharding": {"None", "True"},
                "layout": NONE | {"empty dict"},
            },
        ),
        Case(phalanx.StrategyExtended, {"container_strategy": default}, takes={"container_strategy": {"strategy"}}),
        Case(
            phalanx.explain_sharding,
            {"dataset": np.arange(8.0), "strategy": default, "batch_size": 2},
            takes={
                "dataset": {"empty list", "set", "range", "list of None", "generator", "Mirrored"}
                | {"array of NumPy", "empty array", "bool array", "array"}
                | DTYPES,
                "strategy": {"strategy"},
                "batch_size": COUNT,
            },
            functions=("dataset",),
        ),
    ) | {"experimental_set_strategy": Case(_set_strategy, {"strategy": None}, takes={"strategy": NONE | {"strategy"}})}


def _set_strategy(**given):
    try:
        phalanx.experimental_set_strategy(**given)
    finally:
        phalanx.experimental_set_strategy(None)


def of_verbs(count):
    """What a strategy of `count` replicas does."""
    strategy = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(count)])
    value = strategy.run(lambda: jnp.ones((2, 3)) * phalanx.get_replica_context().replica_id_in_sync_group)
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0])
    dataset = strategy.experimental_distribute_dataset(np.arange(8.0), batch_size=2)
    extended, called = strategy.extended, {"args": TREES - NONE - {"empty dict"}, "kwargs": NONE | {"empty dict"}}
    to = {"reduce_op": "SUM", "options": None}
    return named(
        Case(strategy.run, {"fn": same, "args": (1.0,)}, takes={**called}, functions=("fn",)),
        # What is not distributed is the one local result.
        Case(strategy.experimental_local_results, {"value": value}, takes={"value": ALL}),
        Case(
            strategy.experimental_distribute_values_from_function,
            {"value_fn": lambda context: np.float32(1)},
            functions=("value_fn",),
        ),
        Case(strategy.replicate, {"tree": jnp.ones(2)}, takes={"tree": NUMERIC | {"key"}}),
        Case(strategy.held, {"variable": variable}, takes={"variable": {"variable"}}),
        Case(
            extended.reduce_to,
            {**to, "value": value, "destinations": variable},
            takes={"value": NUMERIC if count == 1 else set(), "destinations": PLACES},
        ),
        Case(
            extended.batch_reduce_to,
            {**to, "value_destination_pairs": [(value, variable)]},
            takes={"value_destination_pairs": {"empty list", "empty tuple"}},
        ),
        Case(
            extended.broadcast_to,
            {"tensor": jnp.ones(2), "destinations": variable},
            takes={"tensor": NUMERIC | {"key"}, "destinations": PLACES},
        ),
        Case(extended.call_for_each_replica, {"fn": same, "args": (1.0,)}, takes=called, functions=("fn",)),
        Case(
            extended.update,
            {"var": variable, "fn": lambda v, *args: args, "args": (1.0,)},
            takes={"var": {"variable"}, "args": called["args"] | {"ragged list"}, "kwargs": called["kwargs"]},
            functions=("fn",),
        ),
        Case(extended.colocate_vars_with, {"colocate_with_variable": variable}),
        # A value is its own container.
        Case(extended.value_container, {"value": variable}, takes={"value": ALL}),
        Case(extended.variable_created_in_scope, {"v": variable}, takes={"v": {"variable"}}),
    ) | {
        "Strategy.run(of a value)": Case(
            lambda x: strategy.run(same, args=(x,)), {"x": 1.0}, takes={"x": ALL - NOT_HELD - DISTRIBUTED}
        ),
        "Strategy.run(of a name)": Case(
            lambda x: strategy.run(same, kwargs={"x": x}), {"x": 1.0}, takes={"x": ALL - NOT_HELD - DISTRIBUTED}
        ),
        "Strategy.run(that returns it)": Case(
            lambda x: strategy.run(lambda: x), {"x": 1.0}, takes={"x": ALL - {"deleted array", "PerReplica of text"}}
        ),
        "Strategy.run_steps": Case(
            lambda fn, steps: strategy.run_steps(fn, iter(dataset), steps),
            {"fn": same, "steps": 2},
            takes={"steps": {"integer of NumPy"}},
            functions=("fn",),
        ),
        "Strategy.run_steps(of an iterator)": Case(
            lambda iterator: strategy.run_steps(same, iterator, 2), {"iterator": iter(dataset)}
        ),
        "steps": Case(
            lambda step, dataset, epochs: next(phalanx.elastic.steps(step, dataset, epochs)),
            {"step": same, "dataset": dataset, "epochs": 1},
            takes={"epochs": COUNT},
            functions=("step",),
        ),
        "Strategy.reduce": Case(
            strategy.reduce,
            {"reduce_op": "SUM", "value": value, "axis": None},
            takes={"value": TREES if count > 1 else NUMERIC, "axis": {"None", "-1", "0", "empty tuple"}},
        ),
        "Strategy.reduce(of rows)": Case(
            lambda x: strategy.reduce("MEAN", x, axis=0),
            {"x": value},
            takes={"x": TREES | DTYPES | {"range", "array of NumPy", "empty array", "array", "Mirrored", "variable"}},
        ),
        "Strategy.gather": Case(
            strategy.gather,
            {"value": value, "axis": 0},
            takes={"value": ALL - NOT_HELD - DISTRIBUTED, "axis": {"-1", "0"}},
        ),
        "Strategy.experimental_distribute_values_from_function(of a value)": Case(
            lambda x: strategy.experimental_distribute_values_from_function(lambda context: x),
            {"x": 1.0},
            takes={"x": ALL - NOT_HELD - DISTRIBUTED - {"Mirrored"}},
        ),
    }


def of_replicas(count):
    """What a replica context does in a step."""
    strategy = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(count)])
    context = phalanx.get_replica_context

    def inside(method):
        return functools.wraps(method)(lambda **given: strategy.run(lambda: method(context(), **given)))

    one, kind = jnp.ones((2, 3)), phalanx.ReplicaContext
    arrays = {"range", "array of NumPy", "empty array", "bool array", "array", "Mirrored", "variable"} | DTYPES
    return named(
        Case(
            kind,
            {"strategy": strategy, "replica_id_in_sync_group": 0},
            takes={"strategy": {"strategy"}, "replica_id_in_sync_group": {"0"}, "batches": {"empty tuple"}},
        ),
        Case(inside(kind.all_reduce), {"reduce_op": "SUM", "value": one}, takes={"value": SUMMABLE}),
        Case(inside(kind.all_gather), {"value": one, "axis": 0}, takes={"value": TREES | arrays, "axis": {"-1", "0"}}),
        Case(
            inside(kind.merge_call),
            {"merge_fn": lambda strategy, *args: args, "args": (one,)},
            takes={
                "args": {"empty list", "empty tuple", "list of None", "ragged list"},
                "kwargs": {"None", "empty dict"},
            },
            functions=("merge_fn",),
        ),
    ) | {
        "ReplicaContext.merge_call(of a value)": Case(
            lambda x: strategy.run(lambda: context().merge_call(lambda strategy, x: x, args=(x,))),
            {"x": one},
            takes={"x": ALL - {"deleted array", "PerReplica of text"}},
        )
    }


def of_cross_device_ops():
    """What reduces values of two replicas."""
    ops = phalanx.NcclAllReduce()
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"], ops)

    def merging(call):
        merge = phalanx.ReplicaContext.merge_call
        return functools.wraps(call)(
            lambda **given: strategy.run(lambda: merge(phalanx.get_replica_context(), lambda _: call(**given)))
        )

    one, sums = jnp.ones((2, 3)), ARRAYS | {"empty list", "empty tuple", "range"}
    return named(
        Case(
            merging(ops.reduce),
            {"reduce_op": "SUM", "per_replica_value": one, "destinations": one},
            takes={"per_replica_value": sums, "destinations": PLACES},
        ),
        Case(
            merging(ops.batch_reduce),
            {"reduce_op": "SUM", "value_destination_pairs": [(one, one)]},
            takes={"value_destination_pairs": {"empty list", "empty tuple"}},
        ),
        Case(
            merging(ops.broadcast), {"tensor": one, "destinations": one}, takes={"tensor": sums, "destinations": PLACES}
        ),
    )


GROUPS = {
    "strategies": of_strategies,
    "verbs_x1": lambda: of_verbs(1),
    "verbs_x2": lambda: of_verbs(2),
    "replicas_x1": lambda: of_replicas(1),
    "replicas_x2": lambda: of_replicas(2),
    "cross_device_ops": of_cross_device_ops,
}
