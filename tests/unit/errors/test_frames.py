"""Which lines of a stack are the user's own."""

import concurrent.futures
import functools
import json
import os
import re
import subprocess
import sys
import warnings

import jax
import numpy as np
import pytest

from phalanx import errors
from phalanx.errors import frames


def test_the_innermost_line_of_the_user():
    """Those of libraries that called it do not count."""
    line = sys._getframe().f_lineno + 1
    places = list(map(lambda _: functools.reduce(lambda a, b: frames.user_place(), [0, 1]), [0]))  # noqa: C417
    assert places == [frames.Place(__file__, line)]
    assert str(places[0]) == f"{__file__}:{line}"
    assert places[0].text.startswith("places = list(map(")


def test_the_line_that_raised_an_error():
    """A library raised it, and this file called that. Python knows the columns of the call."""
    with pytest.raises(json.JSONDecodeError) as caught:
        [1, json.loads("{")]
    place = frames.place_of(caught.value)
    assert (place.text, place.expression) == ('[1, json.loads("{")]', 'json.loads("{")')
    assert frames.place_of(ValueError()) is None


def test_the_line_in_a_traceback_of_jax():
    """JAX keeps its own for each operation."""
    (equation,) = jax.make_jaxpr(lambda x: x + 1)(2).eqns
    line = sys._getframe().f_lineno - 1
    assert frames.place_in(equation.source_info.traceback) == frames.Place(__file__, line)
    assert frames.place_in(None) is None


def test_a_slip_warns_once_per_line():
    """The warning names the user's line, and a loop hears it once. That of a library's thread stands by itself."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            errors.warn_of_slip("step returns 2, and means 1.", "step(1)")
        errors.warn_of_slip("step returns 2, and means 1.", "step(1)")
        assert in_library(errors.warn_of_slip, "nobody's.", "nothing") is None
    expected = ["step returns 2, and means 1.\nHINT: step(1)"] * 2 + ["nobody's.\nHINT: nothing"]
    assert [str(w.message) for w in caught] == expected
    assert {w.category for w in caught} == {errors.SlipWarning}
    assert [w.filename == __file__ for w in caught] == [True, True, False]
    assert caught[0].lineno + 1 == caught[1].lineno


UNCAUGHT = """
import phalanx, numpy as np
def step(x):
    return {}[x.shape]
if {refused}:
    phalanx.MirroredStrategy(["cpu:7"])
phalanx.OneDeviceStrategy("cpu:0").run(step, args=(np.ones(2),))
"""


@pytest.mark.cover(["refused", "shown"], {(True, "")})
@pytest.mark.slow
@pytest.mark.parametrize(("refused", "shown"), [(True, ""), (False, ""), (False, "full")])
def test_an_error_that_nobody_catches(tmp_path, refused, shown):
    """Python prints the user's lines alone, whichever public name was called."""
    script = tmp_path / "script.py"
    script.write_text(UNCAUGHT.replace("{refused}", str(refused)))
    environment = os.environ | {"PHALANX_TRACEBACK": shown}
    found = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert found.returncode == 1
    files = set(re.findall(r'File "(.*?)"', found.stderr))
    assert any("/phalanx/" in name for name in files) == (shown == "full"), found.stderr
    assert str(script) in files
    assert ("DeviceError: device='cpu:7'" if refused else "KeyError: (2,)") in found.stderr


@pytest.mark.slow
def test_an_error_that_has_nothing_to_do_with_phalanx():
    code = "import phalanx, json, functools\nfunctools.reduce(lambda a, b: json.loads('{'), [0, 1])"
    plain = code.replace("import phalanx, ", "import os, ")
    shown = [
        subprocess.run([sys.executable, "-c", c], capture_output=True, text=True, timeout=300, check=False).stderr
        for c in (code, plain)
    ]
    assert shown[0] == shown[1]
    assert "JSONDecodeError" in shown[0]


def test_call_of_the_user_is_an_expression():
    place = [0, functools.reduce(lambda _, __: frames.user_call(), [0, 1])][1]
    assert place.expression == "frames.user_call()"
    assert place._replace(columns=None) == frames.Place(__file__, place.lineno)


@pytest.mark.slow
def test_expression_without_columns_is_the_line(tmp_path):
    """Python may be told to keep no columns."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json\nfrom phalanx.errors import frames\ntry:\n    [1, json.loads('{')]\n"
        "except ValueError as e:\n    place = frames.place_of(e)\n    print(place.columns, place.expression)\n"
    )
    command = [sys.executable, "-X", "no_debug_ranges", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "None [1, json.loads('{')]\n"


def in_library(fn, *args):
    """Calls a function of a library in a thread, with no line of the user on the stack; returns its error."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(fn, *args).exception()


def test_errors_of_phalanx_are_recognized():
    """By the innermost frame of the traceback."""
    with pytest.raises(errors.InvalidArgumentError) as ours:
        errors.arguments.flag("x", 3)
    assert frames.is_raised_by_phalanx(ours.value)
    assert not frames.is_raised_by_phalanx(in_library(json.loads, "{"))
    assert not frames.is_raised_by_phalanx(ValueError())


def test_package_in_which_an_error_was_raised():
    """Called by the innermost line of the user; not by the lines before it."""
    with pytest.raises(TypeError) as caught:
        jax.jit(lambda x: np.ones(2).reshape(x))("text")
    assert frames.is_raised_in("jax", caught.value)
    assert not frames.is_raised_in("keras", caught.value)


def test_boundary_hides_frames_of_phalanx(monkeypatch):
    """The error that leaves a public function has the user's lines alone, or all if there is none; values pass."""
    monkeypatch.setenv("PHALANX_TRACEBACK", "")
    flag = frames.boundary(errors.arguments.flag)
    assert flag("x", True) is True
    with pytest.raises(errors.InvalidArgumentError) as caught:
        flag("x", 3)
    assert {entry.path.name for entry in caught.traceback} == {"test_frames.py"}
    error = in_library(json.loads, "{")
    before = error.__traceback__
    frames.hide(error)
    assert error.__traceback__ is before
    # A function of the user that Phalanx called keeps its own frames, and those of the library that it called.
    call = frames.boundary(lambda function: function())
    names = {"test_frames.py", "__init__.py", "decoder.py"}
    with pytest.raises(json.JSONDecodeError) as of_user:
        call(lambda: json.loads("{"))
    assert {entry.path.name for entry in of_user.traceback} == names
    monkeypatch.setenv("PHALANX_TRACEBACK", "full")
    with pytest.raises(json.JSONDecodeError) as full:
        call(lambda: json.loads("{"))
    assert {entry.path.name for entry in full.traceback} == {*names, "frames.py"}
