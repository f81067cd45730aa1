"""Iterators inside a phalanx.function: a call takes as many batches as the trace did."""

import weakref

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import phalanx
from phalanx._src.typed_jax import OpenSpec
from phalanx.errors import ContextError, OutOfRangeError

EVERY_KIND = {
    "mirrored": lambda: phalanx.MirroredStrategy(["cpu:0", "cpu:1"]),
    "one": lambda: phalanx.OneDeviceStrategy("cpu:1"),
    "central": lambda: phalanx.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:2"),
    "default": phalanx.get_strategy,
}
every_kind = pytest.mark.parametrize("make", EVERY_KIND.values(), ids=EVERY_KIND)
# 4 + 4 + 4 + 3 rows: the last batch is short.
ROWS = np.arange(15, dtype="float32")


def dataset(strategy, rows=ROWS):
    return strategy.experimental_distribute_dataset(rows, batch_size=4)


def total_of(strategy, batch):
    return strategy.reduce("SUM", strategy.run(jnp.sum, args=(batch,)), axis=None)


@pytest.mark.cover(["make"], [EVERY_KIND["mirrored"], EVERY_KIND["central"]])
@every_kind
def test_a_step_that_takes_the_iterator(make, collect):
    """The step of TensorFlow's TPU guide: sums of all batches, at each epoch; a new iterator is no new program, and none is held."""
    strategy, traces = make(), []
    batches = dataset(strategy)
    step = phalanx.function(lambda iterator: (traces.append(1), total_of(strategy, next(iterator)))[1])
    for _ in range(3):
        iterator = iter(batches)
        assert [float(step(iterator)) for _ in range(4)] == [6, 22, 38, 39]
        assert iterator.get_state()["records"] == 15
        with pytest.raises(OutOfRangeError, match="the dataset has no further batch.\nHINT: for _ in range"):
            step(iterator)
    assert len(traces) == 2  # One for the short batch.
    gone = weakref.ref(iterator)
    del iterator
    collect()
    assert gone() is None


def test_training_equals_a_loop_outside(strategy):
    """Weights after three epochs are those of the same step called with batches."""

    def trained(inside):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            optimizer = keras.optimizers.Adam(0.1)
        variables = model.trainable_variables

        def replica(x):
            with phalanx.GradientTape() as tape:
                loss = phalanx.nn.compute_average_loss(keras.ops.sum(model(x) ** 2, -1))
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        take = phalanx.function(lambda it: strategy.run(replica, args=(next(it),)))
        batches = dataset(strategy, np.random.default_rng(0).normal(size=(10, 3)).astype("float32"))
        for _ in range(3):
            iterator = iter(batches)
            for _ in range(3):
                take(iterator) if inside else strategy.run(replica, args=(next(iterator),))
        return model.get_weights()

    for a, b in zip(trained(inside=True), trained(inside=False), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.cover(["make"], [EVERY_KIND["one"], EVERY_KIND["mirrored"], EVERY_KIND["default"]])
@every_kind
def test_the_loop_of_the_input_tutorial(make):
    """Three batches per call while there are some, as `tf.distribute.DistributedIterator` shows; the last call finds one."""
    strategy = make()

    @phalanx.function
    def total(iterator):
        result = jnp.zeros(())
        for _ in range(3):
            batch = iterator.get_next_as_optional()
            if not batch.has_value():
                break
            result += total_of(strategy, batch.get_value())
        return result

    iterator = iter(dataset(strategy))
    assert [float(total(iterator)) for _ in range(3)] == [66, 39, 0]


def test_too_few_batches_for_a_call(strategy):
    """It raises before anything is taken or changed."""
    with strategy.scope():
        count = keras.Variable(0.0)

    @phalanx.function
    def step(iterator):
        count.assign_add(1.0)
        return [total_of(strategy, next(iterator)) for _ in range(3)]

    iterator = iter(dataset(strategy))
    assert [float(x) for x in step(iterator)] == [6, 22, 38]
    with pytest.raises(OutOfRangeError, match="takes 2 batches per call, and the dataset has only 1 left.\nHINT: "):
        step(iterator)
    assert float(count) == 1
    assert float(total_of(strategy, next(iterator))) == 39


def test_a_step_that_raises_takes_nothing():
    """The position stays that of the weights."""
    strategy = phalanx.OneDeviceStrategy("cpu:1")
    with strategy.scope():
        v = keras.Variable(1.0)

    def fail(x):
        raise ValueError("no luck")

    @phalanx.function
    def step(iterator):
        total = total_of(strategy, next(iterator))
        v.assign(jax.pure_callback(fail, total, total))

    iterator = iter(dataset(strategy))
    with pytest.raises(Exception, match="no luck"):
        step(iterator)
    assert float(v) == 1
    assert np.asarray(next(iterator)).tolist() == [0, 1, 2, 3]


def test_two_iterators_and_a_batch(strategy):
    """Batches come from their own iterator, in the order in which the function takes them, and keep their masks."""

    @phalanx.function
    def step(batch, iterators):
        both = [next(iterators["b"]), iterators["a"].get_next(), batch, next(iterators["b"])]
        doubled = [strategy.run(lambda x: 2 * x, args=(x,)) for x in both]
        return [total_of(strategy, x) for x in both], [strategy.reduce("MEAN", x, axis=0) for x in doubled]

    a, b = iter(dataset(strategy)), iter(dataset(strategy, -ROWS))
    for expected in ([-6, 22, 6, -22], [-38, 39, 38, -39]):
        sums, means = step(next(a), {"a": a, "b": b})
        assert [float(x) for x in sums] == expected
        assert [float(x) for x in means] == [2 * x / (3 if abs(x) == 39 else 4) for x in expected]


def test_a_step_that_closes_over_the_iterator(strategy, collect):
    """The iterator is fetched from all the same, and no program keeps it alive."""
    iterator = iter(dataset(strategy))
    gone = weakref.ref(iterator)
    calls = []

    @phalanx.function
    def step():
        calls.append(1)
        return total_of(strategy, next(iterator))

    assert [float(step()) for _ in range(4)] == [6, 22, 38, 39]
    with pytest.raises(OutOfRangeError, match="no further batch"):
        step()
    iterator = iter(dataset(strategy))
    collect()
    assert gone() is None
    assert [float(step()) for _ in range(4)] == [6, 22, 38, 39]
    assert len(calls) == 4  # A full and a short batch of each iterator.


def test_positions_and_specs_between_calls(strategy):
    """A batch that was looked at, also to lower a step, is neither lost nor handed out twice."""
    step = phalanx.function(lambda it: jnp.sin(total_of(strategy, next(it))))
    iterator = iter(dataset(strategy))
    assert "sine" in step.lower(iterator).as_text()
    assert float(step(iterator)) == pytest.approx(np.sin(6))
    state = iterator.get_state()
    assert iterator.element_spec == OpenSpec((None,), "float32")
    assert iterator.get_state() == state
    with pytest.raises(OutOfRangeError, match="takes 4 batches"):
        phalanx.function(lambda it: [next(it) for _ in range(4)])(iterator)
    sums = strategy.run_steps(jnp.sum, iterator, 2)
    assert strategy.reduce("SUM", sums, axis=None).tolist() == [22, 38]
    iterator.set_state(state)
    assert float(step(iterator)) == pytest.approx(np.sin(22))
    assert strategy.reduce("SUM", strategy.run_steps(jnp.sum, iterator, 4), axis=None).tolist() == [38]


# In a replica function or a loop the one batch of the trace would stay, and a program has no loop over batches.


@pytest.mark.parametrize("case", ["iterator", "dataset", "run_steps", "replica", "scan", "phalanx.scan", "grad"])
def test_batches_where_no_program_can_fetch(strategy, case):
    """In a replica function or a loop the one batch of the trace would stay: the message says where the loop belongs."""
    batches = dataset(strategy)
    iterator = iter(batches)
    take = lambda *_: (jnp.float32(0), next(iterator).data)  # noqa: E731
    inside = {
        "iterator": lambda: [x for x in iterator],  # noqa: C416
        "dataset": lambda: [x for x in batches],  # noqa: C416
        "run_steps": lambda: strategy.run_steps(jnp.sum, iterator, 2),
        "replica": lambda: strategy.run(take),
        "scan": lambda: jax.lax.scan(take, jnp.float32(0), length=2),
        "phalanx.scan": lambda: phalanx.scan(take, jnp.float32(0), jnp.arange(2)),
        "grad": lambda: phalanx.value_and_grad(take, [], has_aux=True)(),
    }
    match = rf"next.iterator. was called in a traced step at {__file__}.*\nHINT: pass the batch to the step"
    if case in ("iterator", "dataset", "run_steps"):
        match = rf"in a traced step: the loop at {__file__}.*\nHINT: loop around the step"
    with pytest.raises(ContextError, match=match):
        phalanx.function(inside[case])()
    assert next(iterator).values[0].tolist() == [0, 1]
