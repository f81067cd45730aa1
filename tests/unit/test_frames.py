"""Which lines of a stack are the user's own."""

import functools
import json
import sys
import warnings

import pytest

from phalanx import errors, frames


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
