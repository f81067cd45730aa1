"""The calls of TensorFlow's documentation about TPUs, with the imports changed, on virtual devices."""

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import phalanx as dist
import phalanx.testing


@pytest.fixture(autouse=True)
def virtual_tpus():
    """Four chips of two cores."""
    phalanx.testing.virtual_topology((2, 2, 1, 2))
    yield
    dist.tpu.experimental.shutdown_tpu_system()


def make_strategy():
    """Two logical devices and four replicas."""
    resolver = dist.cluster_resolver.TPUClusterResolver(tpu="")
    topology = dist.tpu.experimental.initialize_tpu_system(resolver)
    device_assignment = dist.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=[1, 1, 1, 2], num_replicas=4
    )
    return dist.TPUStrategy(resolver, experimental_device_assignment=device_assignment)


def test_assign_to_logical_device():
    """An addition, executed on logical device 0."""
    strategy = make_strategy()
    inputs = strategy.experimental_distribute_dataset([np.arange(8.0, dtype="float32")])
    iterator = iter(inputs)

    @dist.function
    def step_fn(inputs):
        output = jnp.add(inputs, inputs)
        return strategy.experimental_assign_to_logical_device(output, 0)

    results = strategy.run(step_fn, args=(next(iterator),))
    assert strategy.num_replicas_in_sync == 4
    assert [x.tolist() for x in results.values] == [[0, 2], [4, 6], [8, 10], [12, 14]]


def test_split_and_replicate():
    """An image split in its height, and what is made of it replicated."""
    strategy = make_strategy()
    images = np.random.default_rng(0).random((4, 16, 4, 1), "float32")
    (inputs,) = strategy.experimental_distribute_dataset([images])

    @dist.function
    def step_fn(inputs):
        inputs = strategy.experimental_split_to_logical_devices(inputs, [1, 2, 1, 1])
        output = jnp.tanh(inputs).sum(axis=1)
        return strategy.experimental_replicate_to_logical_devices(output)

    result = strategy.gather(strategy.run(step_fn, args=(inputs,)), axis=0)
    np.testing.assert_allclose(result, np.tanh(images).sum(axis=1), rtol=1e-6)


def test_strategy_of_a_resolver():
    """What the guide's section on TPUStrategy does: a resolver, the system initialized, a strategy over all cores."""
    cluster_resolver = dist.cluster_resolver.TPUClusterResolver()
    dist.tpu.experimental.initialize_tpu_system(cluster_resolver)
    tpu_strategy = dist.TPUStrategy(cluster_resolver)
    assert tpu_strategy.num_replicas_in_sync == 8
    assert tpu_strategy.cluster_resolver is cluster_resolver
    with tpu_strategy.scope():
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile(loss="mse", optimizer="sgd")
    ones = np.ones((32, 1), "float32")
    history = model.fit(ones, ones, batch_size=16, epochs=2, verbose=0)
    assert history.history["loss"][1] < history.history["loss"][0]


def test_older_name_makes_a_strategy():
    """`experimental.TPUStrategy(resolver, device_assignment)`."""
    resolver = dist.cluster_resolver.TPUClusterResolver.connect("local")
    topology = dist.tpu.experimental.initialize_tpu_system(resolver)
    assignment = dist.tpu.experimental.DeviceAssignment.build(topology, num_replicas=2)
    assert dist.experimental.TPUStrategy(resolver, assignment).num_replicas_in_sync == 2
