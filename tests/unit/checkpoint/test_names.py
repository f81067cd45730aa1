"""The names of objects in a checkpoint."""

import jax
import keras
import numpy as np
import pytest
from keras import layers

from phalanx.errors import CheckpointError, CheckpointMismatchError
from phalanx.train import Checkpoint, list_variables


def names_of(folder, **objects):
    path = Checkpoint(**objects).write(folder / str(len(list(folder.iterdir()))))
    return [name for name, _ in list_variables(path)]


class Weights(layers.Layer):
    """Two variables of one name, and one whose name looks like that of the second."""

    def build(self, shape):
        self.w = [self.add_weight(shape=(), name="w") for _ in range(2)]
        self.w_1 = self.add_weight(shape=(), name="w_1")


def weights(start):
    layer = Weights()
    layer.build(())
    for number, variable in enumerate(layer.weights):
        variable.assign(start + number)
    return layer


@jax.tree_util.register_pytree_with_keys_class
class Box:
    """A container of a user, with any keys."""

    def __init__(self, **items):
        self.items = items

    def tree_flatten_with_keys(self):
        keys = sorted(self.items)
        return [(jax.tree_util.DictKey(key), self.items[key]) for key in keys], keys

    @classmethod
    def tree_unflatten(cls, keys, items):
        return cls(**dict(zip(keys, items, strict=True)))


def with_attribute(name, value, **others):
    checkpoint = Checkpoint(**others)
    setattr(checkpoint, name, value)
    return checkpoint


TWINS = {
    "keys": lambda a, b: Checkpoint(x={1: a, "1": b}),
    "marked_keys": lambda a, b: Checkpoint(x={1: a, "=1": b}),
    "empty_key": lambda a, b: Checkpoint(x={"": {"y": a}, "y": b}),
    "attributes": lambda a, b: with_attribute("x/y", a, x={"y": b}),
    "quoted": lambda a, b: with_attribute("x%2Fy", a, **{"x/y": b}),
    "suffix": lambda a, b: with_attribute("x@replicas", a, x=b),
    "surrogates": lambda a, b: Checkpoint(x={"\ud800": a, "%D800": b}),
    "pytree": lambda a, b: Checkpoint(x=Box(**{"a/b": a, "a": Box(b=b)})),
}


@pytest.mark.parametrize("case", TWINS)
@pytest.mark.parametrize(
    "make", [np.full, lambda shape, x: keras.Variable(np.full(shape, x))], ids=["array", "variable"]
)
def test_two_objects_never_have_one_name(tmp_path, case, make):
    """Each comes back with its own value."""
    path = TWINS[case](make(2, 1.0), make(2, 2.0)).write(tmp_path / "a")
    first, second = make(2, 0.0), make(2, 0.0)
    TWINS[case](first, second).read(path).assert_consumed()
    assert (float(first[0]), float(second[0])) == (1.0, 2.0)


def test_variables_of_a_layer_never_have_one_name(tmp_path):
    """A list beside an attribute that looks like its second item."""
    path = Checkpoint(layer=weights(1.0)).write(tmp_path / "a")
    other = weights(5.0)
    Checkpoint(layer=other).read(path).assert_consumed()
    assert [float(v) for v in other.weights] == [1.0, 2.0, 3.0]


def test_two_objects_of_one_name_are_refused(tmp_path):
    """The attributes of the root have no prefix."""
    checkpoint = Checkpoint(Checkpoint(a=np.ones(2)), a=np.zeros(2))
    with pytest.raises(
        CheckpointError, match=r"'a': another object of the checkpoint has this name[^§]*HINT: give one"
    ):
        checkpoint.write(tmp_path / "a")


def dense(name=None, units=2):
    layer = layers.Dense(units, name=name)
    layer.build((None, 2))
    return layer


def test_layers_have_the_names_of_their_users(tmp_path):
    """Others are numbered among those of their class, whatever Keras has made before."""
    dense()  # Keras numbers the next one.
    model = keras.Sequential(
        [keras.Input((2,)), layers.Dense(2, use_bias=False, name="a"), layers.Dropout(0.1), dense(), dense()]
    )
    layer, seed = "model/layers/dense~", "model/layers/dropout~0/seed_generator/seed_generator_state"
    assert names_of(tmp_path, model=model) == [
        "model/layers/a/kernel",
        *(f"{layer}{i}/{v}" for i in range(2) for v in ("bias", "kernel")),
        seed,
    ]
    names = names_of(tmp_path, x=[dense("b"), dense(), np.ones(1)])
    assert names == ["x/2", *(f"x/{layer}/{v}" for layer in ("b", "dense~0") for v in ("bias", "kernel"))]


def test_variables_that_keras_numbers_have_the_names_of_attributes(tmp_path):
    class Scaled(layers.Layer):
        def __init__(self):
            super().__init__()
            self.scale = keras.Variable(2.0)

    keras.Variable(1.0)
    assert names_of(tmp_path, x=Scaled()) == ["x/scale"]


class Net(keras.Model):
    """Layers as attributes and in a list."""

    def __init__(self, names, last="last"):
        super().__init__()
        self.blocks = [dense(name) for name in names]
        setattr(self, last, dense())


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")], ids=["same", "reordered"])
def test_named_layers_may_change_their_order(tmp_path, names):
    saved, other = Net(("a", "b")), Net(names)
    Checkpoint(model=other).read(Checkpoint(model=saved).write(tmp_path / "a")).assert_consumed()
    theirs = {layer.name: layer for layer in saved.blocks}
    for layer in other.blocks:
        np.testing.assert_array_equal(layer.kernel.numpy(), theirs[layer.name].kernel.numpy())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: Net(("a", "c")), r"does not contain model/blocks/c \(nearest: model/blocks/b\)"),
        (lambda: Net(("a", None)), r"does not contain model/blocks/dense~0 \(nearest: model/blocks/b\)"),
        (
            lambda: Net(("a", "b"), "final"),
            r"does not contain model/final \(nearest: .*\), and this program lacks model/last",
        ),
    ],
    ids=["layer", "unnamed", "attribute"],
)
def test_renamed_layers_are_refused(tmp_path, other, message):
    """With the nearest name. Nothing has changed."""
    path, model = Checkpoint(model=Net(("a", "b"))).write(tmp_path / "a"), other()
    before = [v.numpy() for v in model.weights]
    with pytest.raises(CheckpointMismatchError, match=message.replace(r"\(nearest: .*\)", ".*")):
        Checkpoint(model=model).read(path)
    for variable, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


@pytest.mark.parametrize(
    ("names", "other", "message"),
    [
        (("dense_1", "dense_2"), ("dense_1", "dense_2"), None),
        (("dense_1", "dense_2"), ("dense_2", "dense_1"), "dense~0 is the layer dense_2, and dense_1 in the checkpoint"),
        (("dense_1", "dense_2"), ("dense_2", "dense_3"), "dense~1 is the layer dense_3, and dense_2 in the checkpoint"),
        ((None, "dense_91"), ("dense_91", None), "dense~0 is the layer dense_91, and one that Keras has numbered in"),
        ((None, None), ("dense_1", "dense_2"), None),
        (("dense_1", "dense_2"), (None, None), None),
    ],
    ids=["same", "reordered", "moved", "mixed", "from_file", "to_file"],
)
def test_names_that_look_like_those_of_keras(tmp_path, names, other, message):
    """Files of models contain the names that Keras has generated, so they fit layers without names. Two of users must be the same."""
    saved, model = Net(names), Net(other)
    before, checkpoint = [v.numpy() for v in model.weights], Checkpoint(model=model)
    path = Checkpoint(model=saved).write(tmp_path / "a")
    if message is None:
        checkpoint.read(path).assert_consumed()
    else:
        with pytest.raises(CheckpointMismatchError, match=message):
            checkpoint.read(path)
    for variable, value in zip(model.weights, before if message else saved.get_weights(), strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_renamed_layers_that_are_built_later_are_refused(tmp_path):
    """When they get their variables."""
    path = Checkpoint(model=Net(("a", "b"))).write(tmp_path / "a")
    model = Net(("a",))
    later = layers.Dense(2, name="c")
    model.blocks.append(later)
    Checkpoint(model=model).read(path).expect_partial()
    with pytest.raises(CheckpointMismatchError, match="does not contain model/blocks/c"):
        later.build((None, 2))


def test_new_layers_begin_as_they_are(tmp_path):
    """If the checkpoint has no other of their shape."""
    path = Checkpoint(model=Net(("a",))).write(tmp_path / "a")
    model = Net(("a", "new"))
    before = model.blocks[1].kernel.numpy()
    Checkpoint(model=model).read(path).expect_partial()
    np.testing.assert_array_equal(model.blocks[1].kernel.numpy(), before)


def layer_twice(tied):
    """A layer in two places, or two layers."""

    class Twice(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = layers.Dense(2)
            self.second = self.first if tied else layers.Dense(2)

        def call(self, x):
            return self.second(self.first(x))

    return Twice(), np.ones((1, 2), np.float32)


def table_twice(tied):
    """An embedding whose weights are those of the output, or not."""

    class Output(keras.Model):
        def __init__(self):
            super().__init__()
            self.embed = layers.Embedding(4, 3)

        def build(self, shape):
            self.embed.build(shape)
            self.table = self.embed.embeddings if tied else self.add_weight(shape=(4, 3), name="table")

        def call(self, x):
            return self.embed(x) @ keras.ops.transpose(self.table)

    return Output(), np.ones(1, np.int32)


@pytest.mark.parametrize("is_built", [True, False], ids=["built", "unbuilt"])
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("make", [layer_twice, table_twice])
def test_tied_and_untied_weights_are_told_apart(tmp_path, make, is_tied, is_built):
    """Those that are one object in one of the programs only are refused if that would change a value, also when they are made later."""
    (model, x), (same, _), (other, _) = make(is_tied), make(is_tied), make(not is_tied)
    y = model(x)
    path = Checkpoint(model=model).write(tmp_path / "a")
    if is_built:
        same(x)
        other(x)
    status = Checkpoint(model=same).read(path)
    np.testing.assert_array_equal(same(x), y)
    status.assert_consumed()
    before = other.get_weights()
    message = r"one (variable|object) in the.*two in|are one object, and|this program lacks"

    def read_and_build():
        Checkpoint(model=other).read(path)
        other(x)

    with pytest.raises(CheckpointMismatchError, match=message):
        read_and_build()
    for value, old in zip(other.get_weights(), before, strict=False):
        np.testing.assert_array_equal(value, old)
