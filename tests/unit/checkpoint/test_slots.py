"""Optimizers: each slot belongs to its variable and its kind."""

import itertools

import keras
import numpy as np
import pytest
from keras import layers, optimizers

from phalanx.errors import CheckpointMismatchError
from phalanx.train import Checkpoint, list_variables

MAKE = {
    "SGD": lambda: optimizers.SGD(0.1, momentum=0.9),
    "RMSprop": lambda: optimizers.RMSprop(0.1, momentum=0.5, centered=True),
    **{
        name: lambda name=name: getattr(optimizers, name)(0.1)
        for name in [
            "Adadelta",
            "Adafactor",
            "Adagrad",
            "Adam",
            "AdamW",
            "Adamax",
            "Ftrl",
            "Lamb",
            "Lion",
            "Muon",
            "Nadam",
            "ScheduleFreeAdamW",
        ]
    },
}
"""Every optimizer of Keras, with all of its slots."""


def test_list_of_optimizers_is_complete():
    kinds = {n for n, k in vars(optimizers).items() if isinstance(k, type) and issubclass(k, optimizers.Optimizer)}
    assert kinds - {"Optimizer", "LossScaleOptimizer", "MultiOptimizer"} == set(MAKE)


def chain(names=("a", "b"), seed=0):
    """Layers of one shape."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((2,)), *(layers.Dense(2, name=name) for name in names)])


def train(variables, optimizer, steps):
    """Makes the sum of squares smaller; returns it before each step."""
    losses = []
    for step in range(steps):
        values = [v.numpy() for v in variables]
        losses.append(float(sum((x**2).sum() for x in values)))
        # Each variable has gradients of its own, which no other has.
        optimizer.apply([2 * x + 0.1 * i + 0.01 * step for i, x in enumerate(values)], variables)
    return losses


def state(model, optimizer):
    return [v.numpy().copy() for v in (*model.variables, *optimizer.variables)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A trained model and checkpoint of each optimizer, and its next five losses."""
    folder, trained = tmp_path_factory.mktemp("optimizers"), {}
    for name, make in MAKE.items():
        model, optimizer = chain((None,)), make()
        train(model.trainable_variables, optimizer, 2)
        path = Checkpoint(model=model, optimizer=optimizer).write(folder / name)
        trained[name] = path, train(model.trainable_variables, optimizer, 5)
    return trained


def test_every_optimizer_is_restored_into_its_own_kind_only(saved):
    """The next five losses are equal; or both are named, and nothing has changed."""
    for name, make in MAKE.items():
        model, optimizer = chain((None,), seed=1), make()
        optimizer.build(model.trainable_variables)
        checkpoint, before = Checkpoint(model=model, optimizer=optimizer), state(model, optimizer)
        for other in MAKE.keys() - {name}:
            with pytest.raises(CheckpointMismatchError, match=f"optimizer is the optimizer {name}, and {other} in the"):
                checkpoint.read(saved[other][0])
        for x, y in zip(state(model, optimizer), before, strict=True):
            np.testing.assert_array_equal(x, y)
        path, losses = saved[name]
        checkpoint.read(path).assert_consumed()
        assert train(model.trainable_variables, optimizer, 5) == losses, name


def test_slots_have_the_names_of_their_variables(saved):
    """Numbers that Keras has given to layers are not in them."""
    names = [name for name, _ in list_variables(saved["SGD"][0])]
    layer = "model/layers/dense~0"
    slots = [f"optimizer/momentum:{layer}/bias", f"optimizer/momentum:{layer}/kernel"]
    assert names == [f"{layer}/bias", f"{layer}/kernel", "optimizer/iteration", "optimizer/learning_rate", *slots]


@pytest.mark.parametrize("is_alone", [False, True], ids=["with_model", "alone"])
@pytest.mark.parametrize("change", ["same", "reordered", "first_frozen", "first_thawed"])
def test_slots_follow_their_layers(tmp_path, change, is_alone):
    """Whatever their order is, and whichever of them are trained. Without the layers, by the names of the user."""

    def make(names, frozen):
        model, optimizer = chain(names), optimizers.Adam(0.1)
        model.get_layer("a").trainable = not frozen
        optimizer.build(model.trainable_variables)
        return model, optimizer

    def slots(model, optimizer):
        both = zip(optimizer._trainable_variables, optimizer._momentums, optimizer._velocities, strict=True)
        of = {id(v): np.concatenate([m.numpy().ravel(), u.numpy().ravel()]) for v, m, u in both}
        return {
            layer.name: np.concatenate([of[id(v)] for v in layer.trainable_variables])
            for layer in model.layers
            if layer.trainable
        }

    model, optimizer = make(("a", "b"), change == "first_thawed")
    train(model.trainable_variables, optimizer, 2)
    objects = {"optimizer": optimizer} if is_alone else {"optimizer": optimizer, "model": model}
    path = Checkpoint(**objects).write(tmp_path / "a")
    other, fresh = make(("b", "a") if change == "reordered" else ("a", "b"), change == "first_frozen")
    objects = {"optimizer": fresh} if is_alone else {"optimizer": fresh, "model": other}
    Checkpoint(**objects).read(path).expect_partial()
    wanted, got = slots(model, optimizer), slots(other, fresh)
    for name, values in got.items():
        np.testing.assert_array_equal(values, wanted.get(name, np.zeros_like(values)))
    assert int(fresh.iterations) == 2


def test_numbered_layers_outside_the_checkpoint_are_refused_if_some_are_missing(tmp_path):
    """Nothing tells which of them are there. As many as before are those of before."""
    model, optimizer = chain((None, None)), optimizers.SGD(0.1, momentum=0.9)
    train(model.trainable_variables, optimizer, 2)
    path = Checkpoint(optimizer=optimizer).write(tmp_path / "a")
    same = optimizers.SGD(0.1, momentum=0.9)
    same.build(chain((None, None)).trainable_variables)
    Checkpoint(optimizer=same).read(path).assert_consumed()
    for slot, other in zip(same.variables, optimizer.variables, strict=True):
        np.testing.assert_array_equal(slot.numpy(), other.numpy())
    model = chain((None, None))
    model.layers[0].trainable = False
    other = optimizers.SGD(0.1, momentum=0.9)
    other.build(model.trainable_variables)
    with pytest.raises(
        CheckpointMismatchError, match=r"optimizer trains 1 variables 'sequential/dense/kernel', and 2 in"
    ):
        Checkpoint(optimizer=other).read(path)


WRAPPED = {
    "plain": lambda: optimizers.Adam(0.1),
    "loss_scale": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.1)),
    "average": lambda: optimizers.Adam(0.1, use_ema=True),
    "accumulation": lambda: optimizers.Adam(0.1, gradient_accumulation_steps=2),
    "schedule": lambda: optimizers.Adam(optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)),
}


def test_wrappers_and_schedules_are_exchanged(tmp_path):
    """What both have is restored. What the program alone has stays as it is."""
    model = chain()
    made = {name: make() for name, make in WRAPPED.items()}
    for number, optimizer in enumerate(made.values()):
        optimizer.build(model.trainable_variables)
        for slot in optimizer.variables:
            if "momentum" in slot.name or "velocity" in slot.name:
                slot.assign(np.full(slot.shape, number + 1.0))
    paths = {name: Checkpoint(model=model, optimizer=o).write(tmp_path / name) for name, o in made.items()}
    for (number, name), other in itertools.product(enumerate(paths), WRAPPED):
        optimizer = WRAPPED[other]()
        optimizer.build(model.trainable_variables)
        Checkpoint(model=model, optimizer=optimizer).read(paths[name]).expect_partial()
        slots = [slot for slot in optimizer.variables if "momentum" in slot.name or "velocity" in slot.name]
        assert len(slots) == 8
        assert {float(slot.numpy().mean()) for slot in slots} == {number + 1.0}


LATER = {
    "average": {"use_ema": True},
    "accumulation": {"gradient_accumulation_steps": 4},
    "both": {"use_ema": True, "gradient_accumulation_steps": 4},
}


WRAPS = {"plain": lambda optimizer: optimizer, "loss_scale": optimizers.LossScaleOptimizer}


@pytest.mark.cover(
    ["kind", "wrap", "is_built"],
    {
        ("both", "plain", True),
        ("both", "loss_scale", False),
        ("average", "plain", False),
        ("accumulation", "loss_scale", True),
    },
)
@pytest.mark.parametrize("is_built", [True, False], ids=["built", "not_built"])
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("kind", LATER)
def test_optimizer_that_averages_or_accumulates_goes_on(tmp_path, kind, wrap, is_built):
    """An average that the file lacks begins as the restored weights; `iterations` counts updates, whatever the number of calls."""
    model, optimizer = chain(), optimizers.Adam(0.1)
    train(model.trainable_variables, optimizer, 7)
    path = Checkpoint(model=model, optimizer=optimizer).write(tmp_path / "before")
    other = chain(seed=1)
    options = LATER[kind]
    inner = optimizers.Adam(0.1, **options)
    later = WRAPS[wrap](inner)
    if is_built:
        later.build(other.trainable_variables)
    Checkpoint(model=other, optimizer=later).read(path).expect_partial()
    later.build(other.trainable_variables)
    assert int(inner.iterations) == 7
    if "use_ema" in options:
        averages = [v for v in inner.variables if v.path.endswith("average")]
        for average, weight in zip(averages, model.trainable_variables, strict=True):
            np.testing.assert_array_equal(average, weight)
    if "gradient_accumulation_steps" in options:
        inner.apply([np.ones(v.shape, "float32") for v in other.trainable_variables], other.trainable_variables)
        path = Checkpoint(model=other, optimizer=later).write(tmp_path / "within")  # One of four gradients.
        three = optimizers.Adam(0.1, gradient_accumulation_steps=3)
        three.build(other.trainable_variables)
        for slot in three.variables:
            slot.assign(np.ones(slot.shape))
        Checkpoint(model=other, optimizer=three).read(path).expect_partial()
        assert int(three.iterations) == 7
        assert not any(v.numpy().any() for v in three.variables if "accumulator" in v.path)


def test_average_of_a_new_layer_begins_as_its_weights(tmp_path):
    model, optimizer = chain(), optimizers.Adam(0.1, use_ema=True)
    train(model.trainable_variables, optimizer, 3)
    path = Checkpoint(model=model, optimizer=optimizer).write(tmp_path / "before")
    other, later = chain(("a", "b", "c"), seed=1), optimizers.Adam(0.1, use_ema=True)
    later.build(other.trainable_variables)
    Checkpoint(model=other, optimizer=later).read(path).expect_partial()
    averages = [v for v in later.variables if v.path.endswith("average")]
    wanted = [v.numpy() for v in optimizer.variables if v.path.endswith("average")]
    for average, expected in zip(averages, [*wanted, *other.layers[-1].get_weights()], strict=True):
        np.testing.assert_array_equal(average, expected)


def test_average_without_weights_is_refused(tmp_path):
    model, optimizer = chain(), optimizers.Adam(0.1)
    train(model.trainable_variables, optimizer, 3)
    path = Checkpoint(optimizer=optimizer).write(tmp_path / "before")
    later = optimizers.Adam(0.1, use_ema=True)
    later.build(model.trainable_variables)
    with pytest.raises(CheckpointMismatchError, match="has neither averages nor weights"):
        Checkpoint(optimizer=later).read(path)
    assert int(later.iterations) == 0
