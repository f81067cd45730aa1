"""Which lines of a stack are the user's own."""

import functools
import json
import os
import re
import subprocess
import sys
import warnings

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
    """A library raised it, and this file called that."""
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    assert frames.place_of(caught.value).text == 'json.loads("{")'
    assert frames.place_of(ValueError()) is None


def test_a_slip_warns_once_per_line():
    """The warning names the user's line, and a loop hears it once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            errors.warn_of_slip("step returns 2, and means 1.", "step(1)")
        errors.warn_of_slip("step returns 2, and means 1.", "step(1)")
    assert [str(w.message) for w in caught] == ["step returns 2, and means 1.\nHINT: step(1)"] * 2
    assert all(w.category is errors.SlipWarning and w.filename == __file__ for w in caught)
    assert caught[0].lineno + 1 == caught[1].lineno


UNCAUGHT = """
import phalanx, numpy as np
def step(x):
    return {}[x.shape]
if {refused}:
    phalanx.MirroredStrategy(["cpu:7"])
phalanx.OneDeviceStrategy("cpu:0").run(step, args=(np.ones(2),))
"""


@pytest.mark.parametrize("refused", [True, False])
@pytest.mark.parametrize("shown", ["", "full"])
def test_an_error_that_nobody_catches(tmp_path, refused, shown):
    """Python prints the user's lines alone, whichever public name was called."""
    script = tmp_path / "script.py"
    script.write_text(UNCAUGHT.replace("{refused}", str(refused)))
    environment = os.environ | {"PHALANX_TRACEBACK": shown}
    found = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert found.returncode == 1
    files = set(re.findall(r'File "(.*?)"', found.stderr))
    assert any("/phalanx/" in name for name in files) == (shown == "full"), found.stderr
    assert str(script) in files
    assert ("DeviceError: device='cpu:7'" if refused else "KeyError: (2,)") in found.stderr


def test_an_error_that_has_nothing_to_do_with_phalanx():
    """It is printed as Python prints it."""
    code = "import phalanx, json, functools\nfunctools.reduce(lambda a, b: json.loads('{'), [0, 1])"
    plain = code.replace("import phalanx, ", "import os, ")
    shown = [
        subprocess.run([sys.executable, "-c", c], capture_output=True, text=True, timeout=120, check=False).stderr
        for c in (code, plain)
    ]
    assert shown[0] == shown[1]
    assert "JSONDecodeError" in shown[0]
