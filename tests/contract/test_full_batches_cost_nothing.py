"""A step on full batches is what one would write by hand with `shard_map`: no branch, no mask, no operation more."""

import collections
import re
import weakref

import jax
import jax.flatten_util
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import phalanx
from phalanx.keras import steps
from phalanx.keras.programs import StepProgram

REPLICAS, ROWS, WIDTH, CLASSES, RATE = 2, 8, 3, 3, 0.1
X = np.ones((ROWS, WIDTH), "float32")
Y = np.zeros((ROWS, CLASSES), "float32")
EACH, ALL = PartitionSpec("replica"), PartitionSpec()


def by_hand(step, *args, specs, out_specs):
    """The operations of a step that is mapped over the replicas."""
    mesh = Mesh(np.array(jax.devices()[:REPLICAS]), ("replica",))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
    return operations_of(jax.jit(mapped).lower(*args))


def operations_of(lowered):
    """How often a program does each operation, also in the functions that it calls."""
    _, *functions = re.split(r"func\.func \w+ @", lowered.as_text())
    bodies = {re.match(r"\w+", text).group(): text for text in functions}

    def of(name):
        called = re.findall(r"(?<!custom_)call @(\w+)", bodies[name])
        return sum(map(of, called), collections.Counter(re.findall(r"stablehlo\.(\w+)", bodies[name])))

    return of("main")


def assert_no_more(ours, theirs):
    """The programs compute the same. Ours states the layouts that its two inputs have, which costs nothing."""
    assert ours.pop("custom_call") == 2
    assert ours - theirs == {}
    assert not {"case", "if", "while", "dynamic_slice"} & ours.keys()


def together(arrays):
    """The sums over the replicas, in one message as it should be."""
    flat, unflatten = jax.flatten_util.ravel_pytree(arrays)
    return unflatten(jax.lax.psum(flat, "replica"))


def forward(params, x):
    return jnp.tanh(x @ params["a"]) @ params["b"]


def distributed(strategy):
    return next(iter(strategy.experimental_distribute_dataset([(X, Y)])))


def test_run_is_a_mapped_step():
    """A function of pytrees."""
    params = {"a": jnp.ones((WIDTH, 4)), "b": jnp.ones((4, CLASSES))}

    def loss_of(params, x, y):
        return jnp.sum(jnp.square(forward(params, x) - y)) / ROWS

    def updated(params, gradients):
        return jax.tree.map(lambda p, g: p - RATE * g, params, gradients)

    def hand(params, x, y):
        loss, gradients = jax.value_and_grad(loss_of)(params, x[0], y[0])
        return loss[None], updated(params, jax.lax.psum(gradients, "replica"))

    def step(params, batch):
        loss, gradients = jax.value_and_grad(loss_of)(params, *batch)
        return loss, phalanx.Mirrored(updated(params, phalanx.get_replica_context().all_reduce("SUM", gradients)))

    strategy = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(REPLICAS)])
    run = phalanx.function(lambda params, batch: strategy.run(step, args=(params, batch)))
    ours = operations_of(run.lower(strategy.replicate(params), distributed(strategy)))
    parts = [x.reshape(REPLICAS, -1, x.shape[1]) for x in (X, Y)]
    assert_no_more(ours, by_hand(hand, params, *parts, specs=(ALL, EACH, EACH), out_specs=(EACH, ALL)))


def test_fit_is_a_mapped_step():
    """Of a model of Keras, with its own loss, optimizer and metric."""
    strategy = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(REPLICAS)])
    with strategy.scope():
        layers = [keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(CLASSES)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
        model.compile(keras.optimizers.SGD(RATE), "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    model.evaluate(X, Y, verbose=0)  # Builds the metrics.
    program = StepProgram(weakref.ref(model), strategy, steps.train)
    ours = operations_of(program._compiled.lower(distributed(strategy)))
    groups = [model.trainable_variables, model.optimizer.variables, model.metrics_variables]
    values = [[np.asarray(v.value) for v in group] for group in groups]
    tracker, metric = keras.metrics.Mean(), keras.metrics.MeanMetricWrapper(keras.metrics.mean_absolute_error)

    def hand(trained, slots, metrics, x, y):
        x, y = x[0], y[0]

        def loss_of(trained):
            outputs, _ = model.stateless_call(trained, [], x, training=True)
            loss = keras.losses.MeanSquaredError()(y, outputs)
            return loss * (1 / REPLICAS), (loss, outputs)

        (_, (loss, outputs)), gradients = jax.value_and_grad(loss_of, has_aux=True)(trained)
        trained, slots = model.optimizer.stateless_apply(slots, together(gradients), trained)
        sums = [v[0] for v in metrics]
        sums = [
            *tracker.stateless_update_state(sums[:2], loss, sample_weight=len(x)),
            *metric.stateless_update_state(sums[2:], y, outputs),
        ]
        totals = together(sums)
        results = [tracker.stateless_result(totals[:2]), metric.stateless_result(totals[2:])]
        return trained, slots, [x[None] for x in sums], results

    parts = [x.reshape(REPLICAS, -1, x.shape[1]) for x in (X, Y)]
    sums = [np.stack([v] * REPLICAS) for v in values[2]]
    specs = (ALL, ALL, EACH, EACH, EACH)
    theirs = by_hand(hand, values[0], values[1], sums, *parts, specs=specs, out_specs=(ALL, ALL, EACH, ALL))
    assert_no_more(ours, theirs)


def test_a_short_last_batch_costs_full_ones_nothing():
    """The program of a full batch has the text that it has if all batches are full, before the short batch and after it."""
    assert texts_of_full_batches(2 * ROWS - 1) == texts_of_full_batches(2 * ROWS)


def texts_of_full_batches(rows):
    """The programs of the first of two batches: a step of `fit` and of a loop, before and after steps of both batches."""
    strategy = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(REPLICAS)])
    with strategy.scope():
        layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(CLASSES)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
        model.compile(keras.optimizers.Adam(RATE), "mse", metrics=["mae"])
    data = [np.resize(array, (rows, array.shape[1])) for array in (X, Y)]
    model.evaluate(X, Y, verbose=0)  # Builds the metrics.
    model.optimizer.build(model.trainable_variables)
    full, last = strategy.experimental_distribute_dataset(tuple(data), batch_size=ROWS)

    @phalanx.function
    def loop(batch):
        return strategy.run(lambda x, y: jnp.mean(jnp.square(model(x, training=True) - y)), args=batch)

    def texts():
        program = StepProgram(weakref.ref(model), strategy, steps.train)
        return program._compiled.lower(full).as_text(), loop.lower(full).as_text()

    before = texts()
    model.fit(*data, batch_size=ROWS, verbose=0)
    loop(last)
    assert texts() == before
    return before
