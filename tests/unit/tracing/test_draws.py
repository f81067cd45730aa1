"""Iterators inside a phalanx.function: a call takes as many batches as the trace did."""

import gc
import weakref

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import phalanx
from phalanx.errors import ContextError, OutOfRangeError

STRATEGIES = {
    "mirrored": lambda: phalanx.MirroredStrategy(["cpu:0", "cpu:1"]),
    "one": lambda: phalanx.OneDeviceStrategy("cpu:1"),
    "central": lambda: phalanx.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:2"),
    "default": phalanx.get_strategy,
}
# 4 + 4 + 4 + 3 rows: the last batch is short.
ROWS = np.arange(15, dtype="float32")


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    """Each kind of strategy."""
    return STRATEGIES[request.param]()


@pytest.fixture
def mirrored():
    """Two replicas."""
    return STRATEGIES["mirrored"]()


def dataset(strategy, rows=ROWS):
    """Batches of four."""
    return strategy.experimental_distribute_dataset(rows, batch_size=4)


def real_sum(x):
    """Returns the sum of this replica's real rows."""
    mask = phalanx.get_replica_context().example_mask
    return (x if mask is None else jnp.where(mask, x, 0)).sum()


def summing(strategy, traces):
    """Returns the step of TensorFlow's TPU guide: it takes the iterator."""

    @phalanx.function
    def step(iterator):
        traces.append(1)
        return strategy.reduce("SUM", strategy.run(real_sum, args=(next(iterator),)), axis=None)

    return step


def test_a_step_that_takes_the_iterator(strategy):
    """Sums of all batches, at each epoch; a new iterator is no new program."""
    traces, batches = [], dataset(strategy)
    step = summing(strategy, traces)
    for _ in range(3):
        iterator = iter(batches)
        assert [float(step(iterator)) for _ in range(4)] == [6, 22, 38, 39]
        assert iterator.get_state()["records"] == 15
        with pytest.raises(OutOfRangeError, match="the dataset has no further batch.\nHINT: for _ in range"):
            step(iterator)
    # Under the default strategy the last batch is not padded, and has a program of its own.
    assert len(traces) == (2 if strategy is phalanx.get_strategy() else 1)


def test_training_equals_a_loop_outside(mirrored):
    """Weights after three epochs are those of the same step called with batches."""

    def trained(inside):
        keras.utils.set_random_seed(1)
        with mirrored.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            optimizer = keras.optimizers.Adam(0.1)
        data = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")

        def replica(x):
            with phalanx.GradientTape() as tape:
                loss = phalanx.nn.compute_average_loss(keras.ops.sum(model(x) ** 2, -1))
            optimizer.apply_gradients(
                zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
            )
            return loss

        take = phalanx.function(lambda it: mirrored.run(replica, args=(next(it),)))
        batches = dataset(mirrored, data)
        for _ in range(3):
            iterator = iter(batches)
            for _ in range(3):
                take(iterator) if inside else mirrored.run(replica, args=(next(iterator),))
        return model.get_weights()

    for a, b in zip(trained(inside=True), trained(inside=False), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_the_loop_of_the_input_tutorial(strategy):
    """Three batches per call while there are some, as `tf.distribute.DistributedIterator` shows; the last call finds one."""

    @phalanx.function
    def total(iterator):
        result = jnp.zeros(())
        for _ in range(3):
            batch = iterator.get_next_as_optional()
            if not batch.has_value():
                break
            result += strategy.reduce("SUM", strategy.run(real_sum, args=(batch.get_value(),)), axis=None)
        return result

    iterator = iter(dataset(strategy))
    assert [float(total(iterator)) for _ in range(3)] == [66, 39, 0]


def test_too_few_batches_for_a_call(mirrored):
    """It raises before anything is taken or changed."""
    with mirrored.scope():
        count = keras.Variable(0.0)

    @phalanx.function
    def step(iterator):
        count.assign_add(1.0)
        return [strategy_sum(next(iterator)) for _ in range(3)]

    strategy_sum = lambda batch: mirrored.reduce("SUM", mirrored.run(real_sum, args=(batch,)), axis=None)  # noqa: E731
    iterator = iter(dataset(mirrored))
    assert [float(x) for x in step(iterator)] == [6, 22, 38]
    with pytest.raises(OutOfRangeError, match="takes 2 batches per call, and the dataset has only 1 left.\nHINT: "):
        step(iterator)
    assert float(count) == 1
    assert float(strategy_sum(next(iterator))) == 39


def test_a_step_that_raises_takes_nothing():
    """The position stays that of the weights."""
    strategy = phalanx.OneDeviceStrategy("cpu:1")
    with strategy.scope():
        v = keras.Variable(1.0)

    def fail(x):
        raise ValueError("no luck")

    @phalanx.function
    def step(iterator):
        total = strategy.reduce("SUM", strategy.run(real_sum, args=(next(iterator),)), axis=None)
        v.assign(jax.pure_callback(fail, total, total))

    iterator = iter(dataset(strategy))
    with pytest.raises(Exception, match="no luck"):
        step(iterator)
    assert float(v) == 1
    assert np.asarray(next(iterator)).tolist() == [0, 1, 2, 3]


def test_two_iterators_and_a_batch(mirrored):
    """Batches come from their own iterator, in the order in which the function takes them."""

    @phalanx.function
    def step(batch, iterators):
        both = [next(iterators["b"]), iterators["a"].get_next(), batch, next(iterators["b"])]
        return [mirrored.reduce("SUM", mirrored.run(real_sum, args=(x,)), axis=None) for x in both]

    a, b = iter(dataset(mirrored)), iter(dataset(mirrored, -ROWS))
    assert [float(x) for x in step(next(a), {"a": a, "b": b})] == [-6, 22, 6, -22]
    assert [float(x) for x in step(next(a), {"a": a, "b": b})] == [-38, 39, 38, -39]


def test_batches_that_go_through_two_runs(mirrored):
    """The mask of a padded batch stays with it."""

    @phalanx.function
    def step(iterator):
        doubled = mirrored.run(lambda x: 2 * x, args=(next(iterator),))
        return mirrored.reduce("MEAN", doubled, axis=0)

    iterator = iter(dataset(mirrored))
    assert [float(step(iterator)) for _ in range(4)] == [3, 11, 19, 26]


def test_a_step_that_closes_over_the_iterator(mirrored):
    """The iterator is fetched from all the same, and no program keeps it alive."""
    iterator = iter(dataset(mirrored))
    gone = weakref.ref(iterator)
    calls = []

    @phalanx.function
    def step():
        calls.append(1)
        return mirrored.reduce("SUM", mirrored.run(real_sum, args=(next(iterator),)), axis=None)

    assert [float(step()) for _ in range(4)] == [6, 22, 38, 39]
    with pytest.raises(OutOfRangeError, match="no further batch"):
        step()
    iterator = iter(dataset(mirrored))
    gc.collect()
    assert gone() is None
    assert [float(step()) for _ in range(4)] == [6, 22, 38, 39]
    assert len(calls) == 2


def test_an_iterator_that_is_an_argument_dies(mirrored):
    """Programs, and what they have traced, do not hold it."""
    step = summing(mirrored, [])
    iterator = iter(dataset(mirrored))
    step(iterator)
    gone = weakref.ref(iterator)
    del iterator
    gc.collect()
    assert gone() is None


def test_positions_and_specs_between_calls(mirrored):
    """What was looked at is neither lost nor handed out twice."""
    step = summing(mirrored, [])
    iterator = iter(dataset(mirrored))
    step(iterator)
    state = iterator.get_state()
    assert iterator.element_spec == jax.ShapeDtypeStruct((2,), "float32")
    assert iterator.get_state() == state
    sums = mirrored.run_steps(real_sum, iterator, 2)
    assert mirrored.reduce("SUM", sums, axis=None).tolist() == [22, 38]
    iterator.set_state(state)
    assert float(step(iterator)) == 22


def test_the_next_batch_is_looked_at_before_run_steps(mirrored):
    """A look in one form gives the batch back for another."""
    iterator = iter(dataset(mirrored))
    assert iterator.element_spec.shape == (2,)
    with pytest.raises(OutOfRangeError, match="takes 5 batches"):
        phalanx.function(lambda it: [next(it) for _ in range(5)])(iterator)
    assert mirrored.reduce("SUM", mirrored.run_steps(real_sum, iterator, 4), axis=None).tolist() == [6, 22, 38, 39]


def test_the_program_of_a_step_that_draws(mirrored):
    """`lower` takes no batch."""
    iterator = iter(dataset(mirrored))
    step = phalanx.function(lambda it: mirrored.run(jnp.sin, args=(next(it),)))
    assert "sine" in step.lower(iterator).as_text()
    assert next(iterator).values[0].tolist() == [0, 1]


@pytest.mark.parametrize("loop", ["iterator", "dataset", "run_steps"])
def test_a_loop_inside_a_function(mirrored, loop):
    """A program has no loop over batches: the message says where it belongs."""
    batches = dataset(mirrored)
    iterator = iter(batches)
    loops = {
        "iterator": lambda: [x for x in iterator],  # noqa: C416
        "dataset": lambda: [x for x in batches],  # noqa: C416
        "run_steps": lambda: mirrored.run_steps(real_sum, iterator, 2),
    }
    with pytest.raises(ContextError, match=rf"in a traced step: the loop at {__file__}.*\nHINT: loop around the step"):
        phalanx.function(loops[loop])()


@pytest.mark.parametrize("body", ["replica", "scan", "phalanx.scan", "grad"])
def test_next_where_no_program_can_fetch(mirrored, body):
    """In a replica function or a loop the one batch of the trace would stay."""
    iterator = iter(dataset(mirrored))
    take = lambda *_: (jnp.float32(0), next(iterator).data)  # noqa: E731
    inside = {
        "replica": lambda: mirrored.run(take),
        "scan": lambda: jax.lax.scan(take, jnp.float32(0), length=2),
        "phalanx.scan": lambda: phalanx.scan(take, jnp.float32(0), jnp.arange(2)),
        "grad": lambda: phalanx.value_and_grad(take, [], has_aux=True)(),
    }
    with pytest.raises(
        ContextError,
        match=rf"next.iterator. was called in a traced step at {__file__}.*\nHINT: pass the batch to the step",
    ):
        phalanx.function(inside[body])()
    assert next(iterator).values[0].tolist() == [0, 1]
