"""Checks of arguments: what passes comes back, what does not is shown with what it must be."""

import collections.abc
import functools
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from phalanx.errors import ClusterTypeError, InvalidArgumentError, MissingDependencyError, arguments


class Options:
    """A class with a plural for a name."""


class BytesPath:
    def __fspath__(self):
        return b"folder"


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        (lambda: arguments.integer("n", 3), 3),
        (lambda: arguments.integer("n", 0, least=0, most=0), 0),
        (lambda: arguments.seconds("s", 0.5), 0.5),
        (lambda: arguments.seconds("s", np.float32(1.5)), 1.5),
        (lambda: arguments.seconds("s", None), None),
        (lambda: arguments.flag("f", False), False),
        (lambda: arguments.function("fn", len, "len"), len),
        (lambda: arguments.path("p", Path("folder") / "name"), "folder/name"),
        (lambda: arguments.local_path("p", Path("folder") / "name"), "folder/name"),
        (lambda: arguments.instance("e", 3, int, "1"), 3),
        (lambda: arguments.of_call([1, 2], {"x": 3}), ((1, 2), {"x": 3})),
        (lambda: arguments.of_call((), None), ((), {})),
    ],
)
def test_values_that_fit_come_back(check, expected):
    assert check() == expected


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: arguments.integer("n", 0), "n=0: must be a positive integer.\nHINT: n=1"),
        (lambda: arguments.integer("n", 2.0, least=0), "n=2.0: must be 0 or more, and an integer.\nHINT: n=0"),
        (lambda: arguments.integer("n", 9, most=8, kind="1 to 8", hint="n=8"), "n=9: must be 1 to 8.\nHINT: n=8"),
        (lambda: arguments.seconds("s", 0), "s=0: must be more than 0 seconds, or None.\nHINT: s=60"),
        (lambda: arguments.seconds("s", True, hint="s=1"), "s=True: must be more than 0 seconds, or None.\nHINT: s=1"),
        (lambda: arguments.flag("f", 1), "f=1: must be True or False.\nHINT: f=True"),
        (lambda: arguments.function("fn", 3, "fn=step"), "fn=3: is not callable.\nHINT: fn=step"),
        (lambda: arguments.path("p", 3), 'p=3: must be a path.\nHINT: p="folder/name"'),
        (lambda: arguments.path("p", BytesPath()), "must be a path."),
        (lambda: arguments.path("p", "a\0b"), "must be a path."),
        (lambda: arguments.path("p", "a\ud800"), "must be a path."),
        (
            lambda: arguments.local_path("p", "gs://bucket/logs"),
            "p='gs://bucket/logs': is a folder of a store, but must be one of a file system. Checkpoint and CheckpointManager "
            'take both.\nHINT: p="folder/name"',
        ),
        (lambda: arguments.instance("e", "x", int, "1"), "e='x': must be a int.\nHINT: 1"),
        (lambda: arguments.instance("e", 3, ArithmeticError, ""), "e=3: must be an ArithmeticError."),
        (lambda: arguments.instance("o", 3, Options, ""), "o=3: must be Options."),
        (
            lambda: arguments.of_call(3, None),
            "args=3: positional arguments must be a list or a tuple.\nHINT: args=(x,)",
        ),
        (lambda: arguments.of_call((), [1]), "kwargs=[1]: keyword arguments must be a dict from names to values."),
        (lambda: arguments.of_call((), {1: 2}), "kwargs={1: 2}: keyword arguments must be a dict from names"),
    ],
)
def test_values_that_do_not_fit_are_shown(check, message):
    with pytest.raises(InvalidArgumentError) as caught:
        check()
    assert message in str(caught.value)


def test_files_for_results(monkeypatch, tmp_path):
    """What could not be written is refused before there are results. Nothing is imported for JSON."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    save = functools.partial(arguments.json_or_picture, "path", hint="path=speed.json")
    assert save(f"{tmp_path}/speed.json") == tmp_path / "speed.json"
    (tmp_path / "link.json").symlink_to("nowhere")
    for file, message in {
        "speed.txt": "speed.txt': must end with .json, .png, .svg or .pdf.\nHINT: path=speed.json",
        "none/speed.json": f"speed.json': its folder does not exist.\nHINT: mkdir -p {tmp_path}/none",
        "link.json": "link.json': it is a link, a folder, a device or a pipe.\nHINT: path=speed.json",
    }.items():
        with pytest.raises(InvalidArgumentError, match=re.escape(message)):
            save(tmp_path / file)
    with pytest.raises(MissingDependencyError, match=r"speed.svg': the package matplotlib is not.*\nHINT: pip install"):
        save(tmp_path / "speed.svg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", sys)
    assert save(tmp_path / "speed.svg") == tmp_path / "speed.svg"


@arguments.typed()
def configured(
    count: int = 1,
    rate: float | None = None,
    names: collections.abc.Sequence[str] = (),
    sizes: collections.abc.Mapping[str, int] | None = None,
    then: collections.abc.Callable[[], None] | None = None,
    anything: object = None,
    pair: tuple[int, int] = (1, 2),
    *rest: int,
    raw: bytes = b"",
    options: "Options | None" = None,
    **others: int,
):
    return count, rest, others


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"count": 3, "rate": 1, "names": ["a", "b"], "sizes": {"a": 1}, "then": print, "anything": 7},
        {"pair": ("no", "integers"), "raw": b"x", "options": Options(), "other": "of any type"},
    ],
)
def test_typed_function_takes_what_fits(given):
    """Elements of lists and dicts are checked; those of tuples, and further arguments, are not."""
    assert configured(**given)[0] == given.get("count", 1)
    assert configured(1, None, (), None, None, None, (1, 2), "further")[1] == ("further",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": True}, "count=True: must be an integer.\nHINT: count=1"),
        ({"rate": "fast"}, "rate='fast': must be a number or None.\nHINT: rate=None"),
        ({"names": "ab"}, "names='ab': must be a list of str.\nHINT: names=()"),
        ({"names": [1]}, "names=[1]: must be a list of str."),
        ({"sizes": {"a": "b"}}, "sizes={'a': 'b'}: must be a dict of str to int or None."),
        ({"sizes": {1: 2}}, "sizes={1: 2}: must be a dict of str to int or None."),
        ({"then": 3}, "then=3: must be a function or None."),
        ({"raw": "text"}, "raw='text': must be bytes."),
        ({"options": 3}, "options=3: must be an Options or None."),
    ],
)
def test_typed_function_refuses_the_rest(given, message):
    """The message has what the annotation says, and the default."""
    with pytest.raises(InvalidArgumentError) as caught:
        configured(**given)
    assert message in str(caught.value)


def test_wrong_number_of_arguments_is_left_to_python():
    """Python's own message says which argument is missing."""

    @arguments.typed()
    def two(a: int, b: int):
        return a + b

    assert two(1, 2) == 3
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'b'"):
        two(1)
    with pytest.raises(InvalidArgumentError, match="b='x': must be an integer.\nHINT: b=1"):
        two(1, "x")


def test_typed_class_checks_its_constructor():
    """A class raises the error that it names."""

    @arguments.typed(ClusterTypeError)
    class Named:
        def __init__(self, name: str):
            self.name = name

    assert Named("a").name == "a"
    with pytest.raises(ClusterTypeError, match="name=3: must be a string"):
        Named(3)
