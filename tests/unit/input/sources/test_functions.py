"""Datasets that a function makes: nothing is divided, and the function hears where it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulation import DATA, content, mirrored

import phalanx
from phalanx._src.input.shard import InputWorker
from phalanx._src.input.sources.functions import FunctionSource
from phalanx._src.options import InputOptions, InputReplicationMode
from phalanx.errors import InputError, InvalidArgumentError

PER_REPLICA = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)
ON_DEVICE = InputOptions(
    experimental_replication_mode=InputReplicationMode.PER_REPLICA, experimental_place_dataset_on_device=True
)


def counted(start, sizes):
    return np.split(start + np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


@pytest.mark.parametrize(
    "method", ["distribute_datasets_from_function", "experimental_distribute_datasets_from_function"]
)
def test_replicas_take_batches_in_turn(strategy, method):
    """One call for the worker, whose replicas share one dataset, as in tf.distribute; also under the older name."""
    seen = []
    dataset = getattr(strategy, method)(lambda context: seen.append(context) or counted(0, [2, 2, 2, 2, 1]))
    assert [(c.num_input_pipelines, c.input_pipeline_id, c.num_replicas_in_sync) for c in seen] == [(1, 0, 2)]
    assert [content(b) for b in dataset] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], []]]


@pytest.mark.parametrize("mode", InputReplicationMode)
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 3), (3, 2)])
def test_input_context_of_all_workers(mode, shape):
    """The function is called at once, for each worker or each replica. Pipelines are numbered through all workers."""
    seen, options = [], InputOptions(experimental_replication_mode=mode)
    for index in range(shape[0]):
        FunctionSource(lambda c: seen.append(c) or [], InputWorker(index, *shape), options, [None] * shape[1])
    total = shape[0] if mode is InputReplicationMode.PER_WORKER else shape[0] * shape[1]
    assert [c.input_pipeline_id for c in seen] == list(range(total))
    assert {(c.num_input_pipelines, c.num_replicas_in_sync) for c in seen} == {(total, shape[0] * shape[1])}


def test_per_replica_batch_size():
    """It divides, or the message says what divides any batch."""
    context = phalanx.InputContext(2, 1, 4)
    assert context.get_per_replica_batch_size(8) == 2
    assert str(context) == "InputContext(input pipeline 1 of 2)"
    message = "global_batch_size=9: is not divisible by the number of replicas, 4.\nHINT: exp"
    with pytest.raises(InvalidArgumentError, match=message):
        context.get_per_replica_batch_size(9)


def test_a_dataset_for_each_replica(strategy):
    """Each replica has its own; one that has ended gets no rows until all have."""
    dataset = strategy.distribute_datasets_from_function(
        lambda c: counted(100 * c.input_pipeline_id, [2, 1] if c.input_pipeline_id else [2, 2, 1]), PER_REPLICA
    )
    assert [content(b) for b in dataset] == [[[0, 1], [100, 101]], [[2, 3], [102]], [[4], []]]


def test_batches_of_unequal_sizes(strategy):
    """Each replica has its rows. Arrays have room for the larger."""
    dataset = strategy.distribute_datasets_from_function(lambda c: counted(0, [1, 3, 2, 2]))
    one, two = dataset
    assert (content(one), content(two)) == ([[0], [1, 2, 3]], [[4, 5], [6, 7]])
    assert (one.data.shape, two.data.shape) == ((2, 3), (2, 2))
    assert float(strategy.reduce("MEAN", two, axis=0)) == 5.5


def test_dataset_on_the_device(strategy):
    """The function and its dataset run with the replica's device as the default; the arrays stay there."""
    made = []

    def batches():
        for i in range(2):
            made.append(jnp.full(2, i))
            yield made[-1]

    (one, two) = strategy.distribute_datasets_from_function(lambda c: batches, ON_DEVICE)
    assert [x.device.id for x in made] == [0, 1, 0, 1]
    assert [v.device.id for v in (*one.values, *two.values)] == [0, 1, 0, 1]
    assert (content(one), content(two)) == ([[0, 0], [0, 0]], [[1, 1], [1, 1]])


@pytest.mark.parametrize("options", [None, PER_REPLICA, ON_DEVICE])
@pytest.mark.parametrize("strategy", [phalanx.get_strategy(), phalanx.OneDeviceStrategy("cpu:1")], ids=str)
def test_one_replica_gets_batches_unpadded(strategy, options):
    dataset = strategy.distribute_datasets_from_function(lambda c: counted(0, [2, 2, 1]), options)
    assert [np.asarray(b).tolist() for b in dataset] == [[0, 1], [2, 3], [4]]


def test_positions_are_those_of_each_pipeline(strategy):
    """They fit as many replicas only."""
    make = lambda c: counted(0, [2] * 6)  # noqa: E731
    iterator = iter(strategy.distribute_datasets_from_function(make, PER_REPLICA))
    next(iterator)
    assert iterator.get_state() == {"pipelines": [{"batches": 1}, {"batches": 1}]}
    other = mirrored(3).distribute_datasets_from_function(make, PER_REPLICA)
    message = "set_state of 2 input pipelines: this dataset has 3 input pipelines.\nHINT: restore the position on as"
    with pytest.raises(InputError, match=message):
        iter(other).set_state(iterator.get_state())


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (3, "dataset=int: is not an iterable of batches"),
        (np.ones(4), "dataset=ndarray: is not an iterable of batches"),
        (
            phalanx.get_strategy().make_experimental_numpy_dataset(np.ones(4)),
            "a dataset of single rows needs a global batch size",
        ),
    ],
    ids=lambda x: type(x).__name__,
)
def test_functions_that_make_no_dataset(strategy, made, match):
    with pytest.raises(InputError, match=match):
        strategy.distribute_datasets_from_function(lambda c: made)


def test_batches_that_differ_beyond_dim_0(strategy):
    dataset = strategy.distribute_datasets_from_function(lambda c: [np.ones((2, 3)), np.ones((2, 4))])
    message = r"batches of shapes \[\(2, 3\), \(2, 4\)\]: the batches of the replicas must have equal shapes"
    with pytest.raises(InputError, match=message):
        next(iter(dataset))


def test_exhausted_pipelines_give_no_batch():
    source = FunctionSource(lambda c: [], InputWorker(0, 1, 2), InputOptions(), jax.local_devices()[:2])
    reader = source.open(InputWorker(0, 1, 2), DATA, None)
    assert [reader.read(), reader.read()] == [None, None]
