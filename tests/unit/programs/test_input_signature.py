"""The signature that `phalanx.function` is given."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import phalanx
from phalanx.errors import CallError, InvalidArgumentError

SPEC = jax.ShapeDtypeStruct


class Anything:
    """A spec with dims of any size, as `tf.TensorSpec((None, None))` is one."""

    shape, dtype = (None, None), np.dtype("float32")


@pytest.mark.parametrize(
    ("signature", "good", "bad", "found"),
    [
        ([SPEC((2,), "float32")], np.ones(2, "f"), np.ones(3, "f"), r"it is float32\[3\], but .* has float32\[2\]"),
        ([SPEC((2,), "float32")], jnp.ones(2), np.ones(2, "i4"), r"it is int32\[2\], but .* has float32\[2\]"),
        ([Anything()], np.ones((3, 4), "f"), np.ones(3, "f"), r"it is float32\[3\], but .*\[None, None\]"),
        ([SPEC((), "int32")], 3, 3.5, "it is float"),
        ([SPEC((), "uint8")], 255, 256, "it is int"),
        ([SPEC((), "float32")], 3, "three", "it is 'three', but input_signature has an array"),
        ([SPEC((), jax.random.key(0).dtype)], jax.random.key(1), 1.0, "it is float"),
        ([{"a": SPEC((), "int32")}], {"a": 1}, {"b": 1}, "its structure is"),
        ([(SPEC((), "int32"), SPEC((), "int32"))], (1, 2), 1, "its structure is"),
    ],
)
def test_arguments_are_checked(signature, good, bad, found):
    """By structure, shape and dtype; keyword arguments too."""
    step = phalanx.function(lambda x: jax.tree.map(lambda a: a, x), input_signature=signature)
    assert jax.tree.structure(step(good)) == jax.tree.structure(step(x=good))
    with pytest.raises(InvalidArgumentError, match=rf"<lambda>\(x=\.\.\.\): {found}.*\nHINT: pass an argument of that"):
        step(bad)
    with pytest.raises(CallError, match="too many positional arguments"):
        step(good, good)


def test_numbers_get_the_dtype_of_the_signature():
    """One program for integers and floats."""
    calls = []

    @phalanx.function(input_signature=[SPEC((), "float32")])
    def step(x):
        calls.append(x.dtype)
        return x / 2

    assert [float(step(x)) for x in (1, 2.0, np.float32(3))] == [0.5, 1, 1.5]
    assert calls == ["float32"]


def test_variables_are_passed_as_their_values(strategy):
    """Of any strategy or of none, in a nest too; the next call takes the next value, or an array."""

    @phalanx.function(input_signature=[[SPEC((2,), "float32")] * 2])
    def step(pair):
        return pair[0] * pair[1]

    with strategy.scope():
        v = keras.Variable([2.0, 3.0], aggregation="mean")
    w = keras.Variable([4.0, 5.0])
    assert step([v, w]).tolist() == [8, 15]
    v.assign([3.0, 4.0])
    assert [step([v, v]).tolist(), step([w, np.ones(2, "f")]).tolist()] == [[9, 16], [4, 5]]
    with pytest.raises(InvalidArgumentError, match=r"it is float32\[2\], but input_signature has int32\[2\]"):
        phalanx.function(step, input_signature=[SPEC((2,), "int32")])(v)


def test_the_spec_of_a_dataset(strategy):
    """As the input tutorial of TensorFlow has it: `input_signature=[dataset.element_spec]`."""
    dataset = strategy.experimental_distribute_dataset((np.ones((6, 3), "float32"), np.arange(6)), batch_size=4)

    class Trainer:
        @phalanx.function(input_signature=[dataset.element_spec])
        def step(self, batch):
            return strategy.run(lambda batch: batch[1].sum(), args=(batch,))

    first, second = [Trainer().step(batch) for batch in dataset]
    assert [int(x) for x in first.values] == [1, 5]
    assert second.values[0].shape == ()
    with pytest.raises(InvalidArgumentError, match="its structure is"):
        Trainer().step(next(iter(dataset))[0])
