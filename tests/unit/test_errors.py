"""The tree of errors."""

import inspect
import pickle

import jax.numpy as jnp
import pytest

from phalanx import errors
from phalanx.errors import PhalanxError, shown

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, PhalanxError)]
BUILTINS = {
    errors.InvalidArgumentError: ValueError,
    errors.DeviceError: ValueError,
    errors.ReduceOpError: ValueError,
    errors.InputError: ValueError,
    errors.CardinalityError: TypeError,
    errors.ContextError: RuntimeError,
    errors.MixedStrategyError: RuntimeError,
    errors.StartupError: RuntimeError,
    errors.MissingDependencyError: ImportError,
    errors.VariableError: ValueError,
    errors.AggregationError: ValueError,
    errors.VariableIndexError: (errors.VariableError, IndexError),
    errors.NestedWriteError: ValueError,
    errors.VariableIndexError: IndexError,
    errors.TapeError: RuntimeError,
    errors.TraceError: RuntimeError,
    errors.OutOfRangeError: IndexError,
    errors.StateLostError: RuntimeError,
    errors.PeerLostError: RuntimeError,
    errors.WorkerLostError: RuntimeError,
    errors.CancelledError: RuntimeError,
    errors.ServerLostError: RuntimeError,
    errors.CheckpointError: RuntimeError,
    errors.CheckpointMismatchError: AssertionError,
    errors.DivergenceError: AssertionError,
    errors.NanLossDuringTrainingError: RuntimeError,
    errors.SummaryError: RuntimeError,
    errors.ClusterError: ValueError,
    errors.ClusterTypeError: TypeError,
    errors.ClusterSourceError: RuntimeError,
}


def test_table_is_complete():
    """Every class has a row above."""
    assert set(CLASSES) == {PhalanxError, *BUILTINS}


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("parts", [("asked", "found", "hint"), ("asked", "found")])
def test_errors_survive_pickling(cls, parts):
    """They cross processes whole."""
    error = cls(*parts)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == str(error)
    assert (copy.asked, copy.found, copy.hint) == (*parts, "")[:3]


@pytest.mark.parametrize(("cls", "builtin"), BUILTINS.items())
def test_errors_are_builtin_classes_too(cls, builtin):
    """Callers may catch the builtin class that tf.distribute raises."""
    with pytest.raises(builtin, match="asked: found\nHINT: hint"):
        raise cls("asked", "found", "hint")


@pytest.mark.parametrize("cls", CLASSES)
def test_the_docstring_draws_the_tree(cls):
    """Each class stands in the drawing, under its parent."""
    lines = [line.replace("│", " ") for line in errors.__doc__.splitlines() if "Error" in line]
    depth = {line.split("(")[0].strip("├└─ ").split()[0]: len(line) - len(line.lstrip("├└─ ")) for line in lines}
    parent = next((b for b in cls.__bases__ if issubclass(b, PhalanxError)), None)
    assert parent is None or depth[cls.__name__] - depth[parent.__name__] == 4


def test_no_hint_no_line():
    """The hint is left out where there is none."""
    assert str(PhalanxError("n=0", "too few.")) == "n=0: too few."


def test_recompilation_warning_is_a_user_warning():
    """It is shown by default."""
    assert issubclass(errors.RecompilationWarning, UserWarning)
    assert issubclass(errors.SlipWarning, UserWarning)


def test_values_without_a_repr():
    """A deleted array, or an object that cannot be shown, does not hide what was asked."""
    array = jnp.ones(2)
    array.delete()
    assert shown(array) == "<ArrayImpl>"
    assert shown("x" * 100) == f"'{'x' * 56}..."
