"""The tree of errors."""

import inspect
import pickle

import jax.numpy as jnp
import pytest

from phalanx import errors
from phalanx.errors import PhalanxError, shown

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, PhalanxError)]
BUILTINS = {
    ValueError: """InvalidArgumentError DeviceError ReduceOpError InputError VariableError AggregationError NestedWriteError
        ClusterError""",
    TypeError: "CallError CardinalityError ClusterTypeError",
    RuntimeError: """ContextError MixedStrategyError StartupError TapeError TraceError StateLostError PeerLostError
        WorkerLostError CancelledError ServerLostError CheckpointError NanLossDuringTrainingError SummaryError
        ClusterSourceError""",
    ImportError: "MissingDependencyError",
    IndexError: "VariableIndexError OutOfRangeError",
    AssertionError: "CheckpointMismatchError DivergenceError",
}


def test_errors_are_builtin_classes_too():
    """Callers may catch the builtin class that tf.distribute raises."""
    for builtin, names in BUILTINS.items():
        for name in names.split():
            with pytest.raises(builtin, match="asked: found\nHINT: hint"):
                raise getattr(errors, name)("asked", "found", "hint")
    assert {c.__name__ for c in CLASSES} == {"PhalanxError", *" ".join(BUILTINS.values()).split()}
    assert issubclass(errors.VariableIndexError, errors.VariableError)
    # Warnings are shown by default.
    assert issubclass(errors.RecompilationWarning, UserWarning)
    assert issubclass(errors.SlipWarning, UserWarning)


def test_errors_survive_pickling():
    """They cross processes whole."""
    for cls in CLASSES:
        for parts in (("asked", "found", "hint"), ("asked", "found")):
            error = cls(*parts)
            copy = pickle.loads(pickle.dumps(error))
            assert type(copy) is cls
            assert str(copy) == str(error)
            assert (copy.asked, copy.found, copy.hint) == (*parts, "")[:3]


def test_the_docstring_draws_the_tree():
    """Each class stands in the drawing, under its parent."""
    lines = [line.replace("│", " ") for line in errors.__doc__.splitlines() if "Error" in line]
    depth = {line.split("(")[0].strip("├└─ ").split()[0]: len(line) - len(line.lstrip("├└─ ")) for line in lines}
    for cls in CLASSES:
        parent = next((b for b in cls.__bases__ if issubclass(b, PhalanxError)), None)
        assert parent is None or depth[cls.__name__] - depth[parent.__name__] == 4, cls


def test_no_hint_no_line():
    """The hint is left out where there is none."""
    assert str(PhalanxError("n=0", "too few.")) == "n=0: too few."


def test_values_without_a_repr():
    """A deleted array, or an object that cannot be shown, does not hide what was asked."""
    array = jnp.ones(2)
    array.delete()
    assert shown(array) == "<ArrayImpl>"
    assert shown("x" * 100) == f"'{'x' * 56}..."
