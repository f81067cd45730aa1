"""Values that hardly any argument can be."""

import functools
import inspect
import signal
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

import phalanx
import phalanx.testing


def deleted():
    """An array that JAX has given to another program."""
    array = jnp.arange(3.0)
    array.delete()
    return array


def yielding(*_):
    """A call runs nothing of it."""
    yield 1.0


class Unshown:
    """An object whose repr fails."""

    def __repr__(self):
        raise RuntimeError("no repr")


def _fail(self, *_):
    raise RuntimeError("no")


Incomparable = type("Incomparable", (), dict.fromkeys(("__eq__", "__ne__", "__lt__", "__hash__", "__bool__"), _fail))
Uncountable = type("Uncountable", (), dict.fromkeys(("__len__", "__iter__", "__getitem__", "__contains__"), _fail))
"""Objects with methods that fail."""


VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "-1": lambda: -1,
    "0": lambda: 0,
    "1.5": lambda: 1.5,
    "2**70": lambda: 2**70,
    "-2**70": lambda: -(2**70),
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "1j": lambda: 1j,
    "no text": lambda: "",
    "text": lambda: "x",
    "long text": lambda: "x" * 100_000,
    "bytes": lambda: b"\xff",
    "empty list": list,
    "empty dict": dict,
    "empty tuple": tuple,
    "set": lambda: {1},
    "range": lambda: range(0),
    "list of None": lambda: [None],
    "ragged list": lambda: [[1], [2, 3]],
    "dict of int": lambda: {1: 2},
    "dict of two kinds": lambda: {1: 2, "a": 3},
    "object": object,
    "unshown": Unshown,
    "incomparable": Incomparable,
    "uncountable": Uncountable,
    "integer of NumPy": lambda: np.int64(3),
    "masked array": lambda: np.ma.masked_array([1.0, 2.0], [True, False]),
    "structured array": lambda: np.zeros(2, [("a", "f4"), ("b", "i4")]),
    "complex array": lambda: np.ones(3, "complex64"),
    "int4 array": lambda: jnp.ones(3, "int4"),
    "key": lambda: jax.random.key(0),
    "generator function": lambda: yielding,
    "class": lambda: int,
    "own class": lambda: Unshown,
    "function": lambda: lambda: 1,
    "function of one": lambda: lambda x: x,
    "partial": lambda: functools.partial(max, 1),
    "module": lambda: np,
    "exception": lambda: ValueError("x"),
    "ellipsis": lambda: ...,
    "slice": lambda: slice(1),
    "generator": lambda: (x for x in ()),
    "object array": lambda: np.array([None, {}], object),
    "text array": lambda: np.array(["a", "b"]),
    "date array": lambda: np.array(["2020-01-01"], "M8[D]"),
    "array of NumPy": lambda: np.ones(3, "float32"),
    "empty array": lambda: np.zeros((0,), "float32"),
    "bool array": lambda: np.array([True, False]),
    "scalar of NumPy": lambda: np.float64(2.5),
    "array": lambda: jnp.ones(3),
    "deleted array": deleted,
    "PerReplica of three": lambda: phalanx.PerReplica(jnp.ones((3, 2))),
    "PerReplica of text": lambda: phalanx.PerReplica(("a", "b")),
    "Mirrored": lambda: phalanx.Mirrored(jnp.ones(2)),
    "variable": lambda: keras.Variable([1.0, 2.0]),
    "strategy": lambda: phalanx.OneDeviceStrategy("cpu:5"),
}
"""Made anew for each call."""

FEW = ("None", "-1", "2**70", "nan", "text", "empty list", "object", "class", "function", "text array", "deleted array")
"""The values that stand for the others in a quick run."""

# What a kind of argument may be, of the values above.
DTYPES = {"complex array", "int4 array"}
EMPTY = {"empty list", "empty tuple", "empty dict"}
FUNCTIONS = {"class", "own class", "function", "function of one", "generator function", "partial"}
TEXTS = {"no text", "text", "long text"}
COUNT = {"2**70", "integer of NumPy"}
INDEX = COUNT | {"0"}
INTEGER = INDEX | {"-1", "-2**70"}
SECONDS = COUNT | {"None", "1.5", "scalar of NumPy"}
NUMBERS = {"-1", "0", "1.5", "nan", "inf", "1j", "integer of NumPy", "scalar of NumPy"}
ARRAYS = NUMBERS | {"array of NumPy", "empty array", "array", "variable", "Mirrored"} | DTYPES
NONE = {"None"}
ALL = set(VALUES)
TREES = {"None", "empty list", "empty tuple", "empty dict", "list of None"}
NOT_HELD = {"2**70", "-2**70", "deleted array", "masked array", "structured array"}
DISTRIBUTED = {"PerReplica of three", "PerReplica of text"}
SUMMABLE = ARRAYS | TREES | {"range", "ragged list", "dict of int"}
NUMERIC = SUMMABLE | {"True", "bool array"}
PLACES = (
    {"True", "2**70", "-2**70", "text", "long text", "object array", "text array", "date array", "bool array"}
    | {"deleted array", "masked array", "structured array", "key"}
    | ARRAYS
    | DISTRIBUTED
)


class Hung(BaseException):
    """A call that did not return in time."""


@contextmanager
def limited():
    """Ends a call that computes for 20 seconds, or waits for two minutes, which a busy machine may let any call do for a while."""

    def end(*_):
        raise Hung

    limits = {
        signal.SIGVTALRM: (signal.ITIMER_VIRTUAL, 20),
        signal.SIGALRM: (signal.ITIMER_REAL, 120),
    }
    before = {number: signal.signal(number, end) for number in limits}
    for timer, seconds in limits.values():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer, _ in limits.values():
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Case:
    """A call, its good arguments, and which bad values each of them takes, for it has a use for them.

    Args:
      call: what is called.
      good: good arguments, besides those that have a default.
      takes: for each argument the values that are good for it. One whose default is None takes None, a flag takes True.
      functions: the arguments that are functions. They take all functions, which may refuse what they are called with.
    """

    call: Callable[..., Any]
    good: dict[str, Any] = field(default_factory=dict)
    takes: dict[str, set[str]] = field(default_factory=dict)
    functions: tuple[str, ...] = ()

    def __post_init__(self):
        parameters = inspect.signature(self.call).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty and p.name[0] != "_"}
        flags = {name: {"True"} for name, value in defaults.items() if isinstance(value, bool)}
        self.takes = {name: NONE for name, value in defaults.items() if value is None} | flags | self.takes
        self.good = defaults | self.good


def named(*cases: Case) -> dict[str, Case]:
    """Returns cases by the names of what they call."""
    return {case.call.__qualname__: case for case in cases}


def answer(case: Case, parameter: str, value: Any) -> BaseException | None:
    """Returns what a call raises if one argument has another value; None if it raises nothing."""
    try:
        with limited():
            case.call(**{**case.good, parameter: value})
    except (Exception, Hung) as e:
        return e.with_traceback(None)
    return None
