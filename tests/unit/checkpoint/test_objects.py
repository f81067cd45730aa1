"""How each kind of object is saved and restored."""

import contextlib
import functools
import itertools
from fractions import Fraction
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import phalanx
from phalanx._src.checkpoint import objects
from phalanx.errors import CheckpointError, CheckpointMismatchError
from phalanx.train import Checkpoint


@pytest.fixture
def moved(tmp_path):
    """Saves one object and restores the file into another; returns what the checkpoint holds then."""

    def move(saved, target):
        checkpoint = Checkpoint(value=saved)
        path = checkpoint.write(tmp_path / str(len(list(tmp_path.iterdir()))))
        checkpoint.sync()
        other = Checkpoint(value=target)
        other.read(path).assert_consumed()
        return other.value

    return move


class Pair(NamedTuple):
    """A container with names."""

    first: object
    second: object


class Stateful:
    """An object of a user."""

    def __init__(self, state):
        self.state = state

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


@pytest.mark.parametrize("value", [3, 2**200, 2.5, True, "text", b"bytes", None, 3j, [1, "a"], {"a": [1]}, (1, 2)])
def test_plain_values_are_replaced(moved, value):
    """Numbers and text cannot change in place."""
    assert moved(value, None if value is not None else 1) == value


def test_lists_and_dicts_change_in_place(moved):
    """Whatever their length is: the program may hold them under another name."""
    history, counts = [0.0], {"old": 1}
    assert moved([1.0, 2.0, 3.0], history) is history
    assert history == [1.0, 2.0, 3.0]
    assert moved({"new": 2}, counts) is counts
    assert counts == {"new": 2}


def test_numpy_arrays_change_in_place(moved):
    """Also below containers."""
    own = np.zeros(3)
    got = moved({"a": [np.arange(3.0), 5]}, {"a": [own, 0]})
    assert got["a"][0] is own
    assert own.tolist() == [0, 1, 2]
    assert got["a"][1] == 5


def test_scalars_and_frozen_arrays_are_replaced(moved):
    """With their dtypes."""
    assert moved(np.float32(2.5), np.float32(0)).dtype == np.float32
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    assert moved(np.ones(2), frozen).tolist() == [1, 1]


def test_jax_arrays_keep_their_devices(moved):
    """The new array is where the old one was."""
    target = jax.device_put(jnp.zeros(4), jax.devices()[3])
    got = moved(jnp.arange(4.0), target)
    assert got.devices() == {jax.devices()[3]}
    assert got.tolist() == [0, 1, 2, 3]


def test_random_keys_keep_their_kind(moved):
    """Of any implementation."""
    key = jax.random.key(7, impl="rbg")
    got = moved(key, jax.random.key(0, impl="rbg"))
    assert jax.random.key_impl(got) == jax.random.key_impl(key)
    assert jax.random.uniform(got) == jax.random.uniform(key)


@pytest.mark.parametrize(
    "make", [np.random.default_rng, np.random.RandomState, lambda s: np.random.Generator(np.random.Philox(s))]
)
def test_generators_of_numpy_go_on(moved, make):
    """With the number that would have come next."""
    saved, target = make(1), make(2)
    saved.normal(size=3)
    moved(saved, target)
    np.testing.assert_array_equal(target.normal(size=3), saved.normal(size=3))


def test_states_of_users_may_contain_arrays(moved):
    """Anywhere in them."""
    target = Stateful(None)
    moved(Stateful({"position": 3, "rows": [np.arange(2), b"x"]}), target)
    assert target.state["position"] == 3
    assert target.state["rows"][0].tolist() == [0, 1]
    assert target.state["rows"][1] == b"x"


def test_states_of_flax_and_optax_are_pytrees(moved):
    """Parameters and slots come back in the same containers."""
    model, x = nn.Dense(3), jnp.ones((1, 2))
    first, second = (model.init(jax.random.key(seed), x) for seed in (0, 1))
    optimizer = optax.adamw(1e-3)
    _, slots = optimizer.update(jax.tree.map(jnp.ones_like, first), optimizer.init(first), first)
    got = moved(Pair(first, slots), Pair(second, optimizer.init(second)))
    assert isinstance(got, Pair)
    assert jax.tree.structure(got) == jax.tree.structure(Pair(first, slots))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(Pair(first, slots)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_state_of_a_distributed_iterator_is_its_position(moved):
    """The next batch is the one that would have come."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.experimental_distribute_dataset(np.arange(24.0), batch_size=4)
    saved, target = iter(dataset), iter(dataset)
    next(saved)
    next(saved)
    moved(saved, target)
    assert next(target).values[0].tolist() == next(saved).values[0].tolist() == [8, 9]


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, open, np.array(["text"]), {"a": [lambda: 1]}, np.ma.masked_array([1, 2], [0, 1])]
)
def test_other_objects_are_named(tmp_path, value):
    """With their path and type, and nothing is written."""
    with pytest.raises(
        CheckpointError,
        match=r"a checkpoint with the object 'value.*cannot be saved.*\nHINT: give it the methods get_state\(\)",
    ):
        Checkpoint(value=value).write(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def _raises():
    raise KeyError("x")


def _circle():
    circle = {}
    circle["again"] = circle
    return circle


def _tower():
    return functools.reduce(lambda inner, _: {"inner": inner}, range(5000), 1)


class WithState:
    def __init__(self, get_state):
        self.get_state = get_state

    def set_state(self, state):
        pass


@pytest.mark.parametrize(
    ("make", "problem"),
    [(_raises, "KeyError: 'x'"), (_circle, "it contains itself"), (_tower, "too many containers within each other")],
)
def test_states_that_cannot_be_saved_are_named(tmp_path, make, problem):
    message = (
        rf"the object 'value/0': an object of type WithState cannot be saved: .*{problem}.*\nHINT: get_state\(\) that"
    )
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(value=[WithState(make)]).write(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


DTYPES = [
    *("bool", "int8", "uint8", "int16", "uint32", "int64", "uint64", "float16", "float32", "float64"),
    *("bfloat16", "float8_e4m3fn", "int4", "uint4", "complex64", "complex128"),
]
NUMBERS = [
    0,
    1,
    -1,
    7,
    127,
    300,
    70_000,
    2**24 + 1,
    2**40,
    2**53 + 1,
    2**63 - 1,
    0.5,
    0.1,
    1e-7,
    1e300,
    np.nan,
    np.inf,
    1j,
]


def exact(number):
    """A number of NumPy as fractions of Python, or as text if it is none."""
    parts = (number.real, number.imag) if number.dtype.kind == "c" else (number,)
    is_whole = number.dtype.kind in "biu" or "int" in number.dtype.name
    found = [Fraction(int(x) if is_whole else float(x)) if np.isfinite(x) else str(x) for x in parts]
    return [*found, Fraction(0)][:2]


def converted(array, dtype):
    """int4 does not become uint4 directly."""
    return (array.astype(np.float32) if "int4" in array.dtype.name else array).astype(dtype)


@np.errstate(all="ignore")
def test_every_dtype_into_every_other_is_exact_or_refused(tmp_path):
    """No number is narrowed, and none changes its kind."""
    kinds = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}
    with np.errstate(all="ignore"):
        numbers = {d: [np.asarray(x).astype(d) for x in NUMBERS if d.startswith("complex") or x != 1j] for d in DTYPES}
        for source, target in itertools.product(DTYPES, DTYPES):
            if np.dtype(source).kind == "c" != np.dtype(target).kind:
                continue  # Refused by its kind: see below.
            survive = [exact(converted(x, target)) == exact(x) for x in numbers[source]]
            for number, does in zip(numbers[source], survive, strict=True):
                with contextlib.nullcontext() if does else pytest.raises(ValueError, match="would become"):
                    assert exact(objects.exactly(number, np.dtype(target))) == exact(number)
    for source in DTYPES:
        path = Checkpoint(x=np.stack(numbers[source][:3])).write(tmp_path / source)
        for target in DTYPES:
            own = np.full(3, 2).astype(target)
            kind = [2 if name == "bfloat16" else kinds[name[0]] for name in (source, target)]
            if kind[0] <= kind[1] and all(exact(converted(x, target)) == exact(x) for x in numbers[source][:3]):
                Checkpoint(x=own).read(path).expect_partial()
                np.testing.assert_array_equal(own, converted(np.stack(numbers[source][:3]), target))
            else:
                with pytest.raises(CheckpointMismatchError, match="has the dtype|would become"):
                    Checkpoint(x=own).read(path)
                np.testing.assert_array_equal(own, np.full(3, 2).astype(target))


@pytest.mark.parametrize(
    ("saved", "target"),
    [(300, "int8"), (-1, "uint32"), (70_000.0, "float16"), (1.7, "int32"), (np.nan, "int32"), (0.1, "bfloat16")],
)
def test_variables_keep_all_digits_or_are_refused(moved, saved, target):
    """As arrays do."""
    with pytest.raises(CheckpointMismatchError, match=r"has the dtype|would become .* of dtype"):
        moved(np.asarray([saved]), keras.Variable([0], dtype=target))
    assert moved(np.asarray([3], "int8"), keras.Variable([0], dtype=target)).numpy().tolist() == [3]


def test_byte_orders_are_those_of_the_program(moved):
    assert moved(np.arange(3, dtype=">i4"), np.zeros(3, "int32")).tolist() == [0, 1, 2]
    assert moved(np.arange(3, dtype="int32"), np.zeros(3, ">i4")).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("saved", "target", "message"),
    [
        (Stateful({"a": 1}), {"a": 0}, "it is a value of type dict, and the state of an object in the checkpoint"),
        ({"a": 1}, Stateful({"a": 0}), "it is an object of type Stateful, and a value in the checkpoint"),
        (
            jax.random.key(0),
            jnp.zeros((), "uint32"),
            "it has numbers, and random keys 'threefry2x32' in the checkpoint",
        ),
        (
            jax.random.key(0),
            jax.random.key(0, impl="rbg"),
            "it has random keys 'rbg', and random keys 'threefry2x32' in",
        ),
        (np.random.default_rng(1), np.random.RandomState(1), "it refuses its state"),
    ],
)
def test_other_kinds_of_objects_are_refused(moved, saved, target, message):
    with pytest.raises(CheckpointMismatchError, match=message):
        moved(saved, target)


@pytest.mark.parametrize(
    ("saved", "target", "message"),
    [
        (np.zeros(3), np.zeros(4), r"value: the array has the shape \(4,\), and \(3,\) in the checkpoint"),
        (keras.Variable([1.0]), keras.Variable([[1.0]]), r"has the shape \(1, 1\), and \(1,\) in the checkpoint"),
        (keras.Variable([1.5]), keras.Variable([1]), r"has the dtype int32, and float32 in the checkpoint"),
    ],
)
def test_other_shapes_are_named(moved, saved, target, message):
    """Both shapes, and nothing is restored."""
    with pytest.raises(
        CheckpointMismatchError, match=f"(?s){message}.*Nothing was restored.*HINT: create the objects as in"
    ):
        moved(saved, target)
