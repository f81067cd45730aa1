"""`phalanx.Variable`, and what a variable of a strategy does with an index that it does not have."""

import enum

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import phalanx
from phalanx.errors import InputError, InvalidArgumentError, VariableError, VariableIndexError


def test_arguments_of_tf_variable(strategy):
    """Each that has a meaning is kept."""
    with strategy.scope():
        v = phalanx.Variable(
            initial_value=[1, 2],
            trainable=False,
            name="v",
            dtype=jnp.float16,
            constraint=keras.constraints.NonNeg(),
            synchronization=phalanx.VariableSynchronization.ON_WRITE,
            aggregation=phalanx.VariableAggregation.SUM,
            shape=(2,),
        )
    assert isinstance(v, keras.Variable)
    assert isinstance(v, phalanx.Variable)
    assert not isinstance(jnp.ones(2), phalanx.Variable)
    assert (v.name, v.dtype, v.trainable, v.shape) == ("v", "float16", False, (2,))
    assert len(v.value.devices()) == 2
    assert isinstance(v.constraint, keras.constraints.NonNeg)
    strategy.run(lambda: v.assign_add([1, 1]))
    assert v.numpy().tolist() == [3.0, 4.0]


@pytest.mark.parametrize("where", ["outside", "function", "replicas"])
def test_arguments_of_assignments(strategy, where):
    """Those of tf.Variable, by name or in order. Without `read_value`, nothing is returned."""
    with strategy.scope():
        v = phalanx.Variable(1.0, aggregation="mean")

    def step():
        reads = v.assign(2.0, False, "first"), v.assign_add(3.0, use_locking=True, name="second"), v.assign_sub(1.0)
        silent = (
            v.assign(v + 4.0, read_value=False),
            v.assign_add(5.0, read_value=False),
            v.assign_sub(6.0, False, None, False),
        )
        return jnp.stack(reads), silent

    run = {"outside": lambda fn: fn(), "function": lambda fn: phalanx.function(fn)(), "replicas": strategy.run}[where]
    reads, silent = run(step)
    assert strategy.reduce("MEAN", reads, axis=None).tolist() == [2, 5, 4]
    assert silent == (None, None, None)
    assert float(v) == 7


def test_names_of_other_enums():
    """Strings in either case of letters, and TensorFlow's members, which have the same names."""
    other = enum.Enum("VariableAggregation", ["NONE", "SUM", "MEAN"])
    assert [phalanx.Variable(1.0, aggregation=a).aggregation for a in ("mean", "MEAN", other.MEAN)] == ["mean"] * 3


def test_function_as_a_value(strategy):
    """It is called once, in a step that is being traced too."""
    made = []

    @phalanx.function
    def step():
        if not made:
            made.append(phalanx.Variable(lambda: jnp.ones(2) * 3))
        return made[0].assign_add(jnp.ones(2))

    with strategy.scope():
        assert [step().tolist(), step().tolist()] == [[4.0, 4.0], [5.0, 5.0]]


@pytest.mark.parametrize(("synchronization", "trainable"), [("auto", True), ("on_read", False)])
def test_trainable_by_default(synchronization, trainable):
    """As in tf.Variable, where variables that are read in each replica are not trained. The value is a copy of the given one."""
    given = np.ones(2, "float32")
    v = phalanx.Variable(given, synchronization=synchronization)
    given[:] = 7
    assert (v.trainable, v.numpy().tolist()) == (trainable, [1.0, 1.0])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({}, "phalanx.Variable.*: a variable needs an initial value"),
        ({"initial_value": "text"}, "initial_value='text': is not an array of numbers"),
        ({"initial_value": 1.0, "dtype": "text"}, "dtype='text': is not a numeric dtype"),
        ({"initial_value": jnp.ones(2, "int4")}, r"dtype=dtype\(int4\): is not a numeric dtype of Keras"),
        ({"initial_value": jax.random.key(0)}, "(?s)initial_value=.*: is not an array of numbers"),
        ({"initial_value": np.ma.masked_array([1.0], [True])}, "initial_value that is a masked array"),
        ({"initial_value": 1.0, "name": "a/b"}, "name='a/b': must be a string without a slash"),
        ({"initial_value": 1.0, "trainable": 1}, "trainable=1: must be True or False"),
        ({"initial_value": 1.0, "shape": (None,)}, r"shape=\(None,\): the initial value has the shape \(\)"),
        ({"initial_value": 1.0, "constraint": 1}, "constraint=1: is not callable"),
        ({"initial_value": 1.0, "aggregation": "max"}, "aggregation='max': must be one of NONE, SUM, MEAN, ONLY_FIRST"),
        ({"initial_value": 1.0, "synchronization": None}, "synchronization=None: must be one of AUTO, NONE, ON_WRITE"),
        (
            {"initial_value": 1.0, "caching_device": "cpu"},
            "caching_device='cpu': has no meaning in Phalanx.\nHINT: leave",
        ),
        ({"initial_value": 1.0, "validate_shape": False}, "validate_shape=False: has no meaning in Phalanx"),
        ({"initial_value": 1.0, "variable_def": 1}, "variable_def=1: has no meaning in Phalanx"),
        ({"initial_value": 1.0, "import_scope": "x"}, "import_scope='x': has no meaning in Phalanx"),
        ({"initial_value": 1.0, "experimental_enable_variable_lifting": False}, "variable_lifting=False: has no"),
    ],
)
def test_bad_arguments_of_a_variable(arguments, match):
    """Each is refused, and the message says what to write."""
    with pytest.raises(InvalidArgumentError, match=match):
        phalanx.Variable(**arguments)


def test_value_of_a_step(strategy):
    """A variable is made before the step runs, so no value of the step can be its first."""
    step = phalanx.function(lambda x: phalanx.Variable(x + 1).value)
    with strategy.scope(), pytest.raises(VariableError, match="it is computed in the step that is being traced"):
        step(1.0)


@pytest.mark.parametrize("index", [3, -4, (0, 2), np.int64(3), (slice(None), 2)])
def test_index_beyond_the_end(strategy, index):
    """An error, in a step too, where JAX takes the last row."""
    with strategy.scope():
        v = keras.Variable(np.ones((3, 2), "float32"), name="v")
    with pytest.raises(VariableIndexError, match=r"variable 'v' \(3, 2\) float32\[.*out of bounds"):
        v[index]
    with pytest.raises(IndexError, match="HINT: use an index below the size of the dim"):
        strategy.run(lambda: v[index])


def test_indices_that_are_those_of_jax(strategy):
    """Slices and loops end where the variable does, and arrays of indices are JAX's. The check does not read a traced index.

    Keras's own variables are as Keras has them.
    """
    value = np.arange(6, dtype="float32").reshape(3, 2)
    with strategy.scope():
        v = keras.Variable(value)
    for index in (0, -1, slice(1, 9), ..., None, (0, slice(None)), np.array([0, 9]), jnp.int32(9)):
        np.testing.assert_array_equal(v[index], jnp.asarray(value)[index])
    assert [row.tolist() for row in v] == value.tolist()
    total, row = strategy.run(lambda i: (sum(row.sum() for row in v), v[i]), args=(jnp.int32(1),))
    assert [float(x) for x in total.values] == [15.0, 15.0]
    assert [x.tolist() for x in row.values] == [[2, 3]] * 2
    assert jax.eval_shape(lambda i: v[i], 0).shape == (2,)
    assert float(keras.Variable([1.0, 2.0])[9]) == 2.0


def test_a_value_of_64_bits_is_refused():
    """Without jax_enable_x64 it would become another number."""
    with pytest.raises(InputError, match=r"(?s)initial_value.*HINT: .*jax_enable_x64"):
        phalanx.Variable(np.array([2**40, 5]), dtype="int64")
    with pytest.raises(InputError, match="jax_enable_x64"):
        phalanx.Variable(2**70)


@pytest.mark.parametrize("use", [list, sum, lambda v: 1.0 in v, lambda v: v[0], lambda v: max(v)])
def test_a_scalar_has_no_elements(strategy, use):
    """An IndexError would end a loop as if the variable were empty."""
    with strategy.scope():
        v = keras.Variable(1.0, name="v")
    with pytest.raises(
        VariableError, match=r"'v' \(\) float32\[0\]: a scalar has no elements.\nHINT: float\(variable\)"
    ) as e:
        use(v)
    assert not isinstance(e.value, IndexError)
    assert float(v[...]) == 1.0
