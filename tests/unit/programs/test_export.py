"""Lifted functions as programs: what they return, against the same function called eagerly."""

import jax
import jax.export
import keras
import numpy as np
import pytest

import phalanx
from phalanx._src.programs.export import export
from phalanx._src.tracing import context
from phalanx.errors import TraceError


@pytest.fixture(params=["one device", "storage"])
def strategy(request):
    """In the first, updates are in the program; in the second they are left to be done after it."""
    if request.param == "one device":
        return phalanx.OneDeviceStrategy("cpu:0")
    return phalanx.experimental.CentralStorageStrategy(["cpu:0"], "cpu:0")


def exported(strategy, fn, *inputs, **options):
    arrays = [np.asarray(x) for x in inputs]
    with context.enter(context.Mode(strategy, None)):
        found = export(lambda given: fn(*given), arrays, ("cpu",), **options)
    program = jax.export.deserialize(bytearray(found.module))
    return found, program.call([v.value for v in found.variables], arrays)


def stored(found, increments, values):
    """The variables' values after the program."""
    new = [np.asarray(v.value) for v in found.variables]
    for i, increment in zip(found.added, increments, strict=True):
        new[i] = new[i] + np.asarray(increment)
    for i, value in zip(found.set, values, strict=True):
        new[i] = np.asarray(value)
    return new


def test_increments_and_assignments(strategy):
    """What was only added to comes back as an increment, what was assigned as a value, what was read not at all."""
    with strategy.scope():
        added, assigned, both, read = (keras.Variable(np.full(2, 1.0 + i)) for i in range(4))

    def fn(x):
        added.assign_add(x)
        added.assign_sub(2 * read.value)
        assigned.assign(x * read.value)
        both.assign_add(x)
        both.assign(both * 2)
        return {"sum": added.value + both.value, "text": "as it is"}

    found, (results, increments, values, gradients) = exported(strategy, fn, np.array([3.0, 5.0], "float32"))
    assert [found.variables[i] for i in found.added] == [added]
    assert [found.variables[i] for i in found.set] == [assigned, both]
    assert gradients == []
    np.testing.assert_array_equal(increments[0], [3.0 - 8.0, 5.0 - 8.0])
    new = stored(found, increments, values)
    result = found.output.join([np.asarray(x) for x in results], [])
    eager = fn(np.array([3.0, 5.0], "float32"))
    assert result["text"] == "as it is"
    np.testing.assert_array_equal(result["sum"], eager["sum"])
    for variable, value in zip(found.variables, new, strict=True):
        np.testing.assert_array_equal(variable.value, value)


def test_a_server_gets_values(strategy):
    """Where increments are not wanted, everything written is a value."""
    with strategy.scope():
        count = keras.Variable(1, dtype="int32", trainable=False)
    found, (_, increments, values, _) = exported(strategy, lambda: count.assign_add(2), adds=False)
    assert (found.added, found.set) == ((), (0,))
    assert increments == []
    assert int(values[0]) == 3


def test_statistics_of_batch_normalization_are_increments(strategy):
    """Several workers' add up; one worker's lead to what Keras has."""
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.5)
        layer.build((None, 3))
    x = np.random.RandomState(0).normal(size=(8, 3)).astype("float32")
    found, (results, increments, values, _) = exported(strategy, lambda x: layer(x, training=True), x)
    moving = {found.variables[i].path for i in found.added}
    assert moving == {layer.moving_mean.path, layer.moving_variance.path}
    assert found.set == ()
    new = stored(found, increments, values)
    np.testing.assert_allclose(results[0], layer(x, training=True), rtol=1e-6, atol=1e-6)
    for variable, value in zip(found.variables, new, strict=True):
        np.testing.assert_allclose(variable.value, value, rtol=1e-6, atol=1e-6)


def test_seeds_are_named(strategy):
    """The states of generators are inputs, and not among what is stored."""
    with strategy.scope():
        generator = keras.random.SeedGenerator(5)
    draw = lambda: keras.random.uniform((2,), seed=generator)  # noqa: E731
    found, (results, _, _, _) = exported(strategy, lambda: (draw(), draw()))
    assert [found.variables[i] for i in found.seeds] == [generator.state]
    assert (found.added, found.set) == ((), ())
    np.testing.assert_array_equal(results, [draw(), draw()])


def test_gradients_are_left():
    """Where variables live elsewhere, an update leaves the gradients, without those that are None."""
    strategy = phalanx.experimental.CentralStorageStrategy(["cpu:0"], "cpu:0")
    with strategy.scope():
        variables = used, unused = keras.Variable(np.ones(3)), keras.Variable(np.ones(2))
        optimizer = keras.optimizers.SGD(0.1, clipvalue=1.0)

    def replica(x):
        with phalanx.GradientTape() as tape:
            loss = keras.ops.sum(keras.ops.square(used) * x)
        optimizer.apply_gradients(zip(tape.gradient(loss, [used, unused]), variables, strict=True))

    x = np.array([0.25, 1.0, 2.0], "float32")
    for clips, expected in ((False, 2 * x), (True, np.minimum(2 * x, 1.0))):
        step = lambda x: strategy.run(replica, args=(x,))  # noqa: E731
        found, (_, _, _, gradients) = exported(strategy, step, x, clips=lambda update, clips=clips: clips)
        (update,) = found.updates
        assert update.optimizer is optimizer
        assert update.variables == (used,)
        np.testing.assert_array_equal(gradients[0][0], expected)


def test_several_programs_share_the_variables(strategy):
    """Programs of one function for other shapes."""
    with strategy.scope():
        total = keras.Variable(1.0, trainable=False)

    def fn(x):
        total.assign_add(x.sum())
        return x * total.value

    for x in (np.ones(2, "float32"), np.ones((3, 1), "float32")):
        found, (results, increments, _, _) = exported(strategy, fn, x)
        assert found.variables == (total,)
        assert float(increments[0]) == x.sum()
        np.testing.assert_array_equal(results[0], x * (1.0 + x.sum()))
    assert float(total.value) == 1.0


@pytest.mark.parametrize(
    "call",
    [
        lambda x: jax.debug.print("{x}", x=x),
        lambda x: jax.debug.callback(print, x),
        lambda x: jax.experimental.io_callback(print, None, x),
        lambda x: jax.pure_callback(np.sin, x, x),
        lambda x: jax.lax.fori_loop(0, 2, lambda i, y: [jax.debug.print("{y}", y=y), y][1], x),
    ],
    ids=["print", "debug", "io", "pure", "in a loop"],
)
def test_callbacks_are_refused(strategy, call):
    """Other processes have no Python to call back to."""
    with pytest.raises(TraceError, match=r"(?s)calls back to Python.*HINT: return the value"):
        exported(strategy, call, np.float32(1))
