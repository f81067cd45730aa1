# SPDX-License-Identifier: Apache-2.0
"""Which lines of a stack are the user's own: neither Phalanx's nor a library's. Standard library only."""

import functools
import itertools
import linecache
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_PHALANX = str(Path(__file__).parents[1]) + "/"
_LIBRARIES = (_PHALANX, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), "<frozen ")
_PACKAGES = "-packages/"
"""What the path of an installed package has in it: site-packages, or dist-packages."""


class Place(NamedTuple):
    """One line of code.

    Args:
      filename: the file.
      lineno: the line, from 1.
      columns: where in the line the expression stands that was evaluated; empty if that is unknown.
    """

    filename: str
    lineno: int
    columns: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"{self.filename}:{self.lineno}"

    @property
    def text(self) -> str:
        """The source text of the line; empty if it is unknown."""
        return linecache.getline(self.filename, self.lineno).strip()

    @property
    def expression(self) -> str:
        """The source text of the expression, as far as it stands in this line; the whole line if it is unknown."""
        line = linecache.getline(self.filename, self.lineno).encode()
        return line[slice(*self.columns)].decode(errors="replace") if self.columns else line.decode().strip()


def is_of_user(filename: str) -> bool:
    """Returns whether code of this file belongs to neither Phalanx nor a library."""
    return not (filename.startswith(_LIBRARIES) or _PACKAGES in filename)


def user_place() -> Place | None:
    """Returns the user's innermost line on the stack of this thread; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_of_user(frame.f_code.co_filename):
            return Place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def place_of(error: BaseException) -> Place | None:
    """Returns the user's innermost line in the traceback of an error; None if there is none."""
    entries = [tb for tb in _entries(error.__traceback__) if is_of_user(_filename(tb))]
    return Place(_filename(entries[-1]), entries[-1].tb_lineno, _columns(entries[-1])) if entries else None


def is_raised_in(package: str, error: BaseException) -> bool:
    """Returns whether the user's innermost line called a package in which an error was raised."""
    inner = itertools.takewhile(lambda name: not is_of_user(name), reversed(_filenames(error)))
    return any(f"{_PACKAGES}{package}/" in name for name in inner)


def is_raised_by_phalanx(error: BaseException) -> bool:
    """Returns whether a line of Phalanx raised an error, or called a function with arguments that it does not take."""
    names = _filenames(error)
    return bool(names) and names[-1].startswith(_PHALANX)


def hide(error: BaseException) -> None:
    """Takes the frames of Phalanx out of the traceback of an error that leaves a public function.

    Frames of JAX and Keras between them and the user's go as well. The traceback stays as it is if PHALANX_TRACEBACK is "full",
    or if no line of the user's raised the error: then it is one of Phalanx's own.
    """
    if os.environ.get("PHALANX_TRACEBACK") == "full":
        return
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        _hide(one)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _hide(error: BaseException) -> None:
    entries = list(_entries(error.__traceback__))
    of_user = [i for i, tb in enumerate(entries) if is_of_user(_filename(tb))]
    last = of_user[-1] if of_user else -1
    if hasattr(error, "hint"):  # One of Phalanx's errors says all; for others the place inside a library does.
        last = len(entries)
    elif last < 0:
        return
    traceback = None
    for i, tb in reversed(list(enumerate(entries))):
        if not (_is_between(_filename(tb)) if i < last else _filename(tb).startswith(_PHALANX)):
            traceback = TracebackType(traceback, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
    error.__traceback__ = traceback


def hide_of_uncaught() -> None:
    """Takes the frames of Phalanx out of what Python prints of an error that nobody has caught, whichever call raised it."""
    show = sys.excepthook

    def show_short(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if any(name.startswith(_PHALANX) for name in _filenames(error)):
            hide(error)
        show(kind, error, error.__traceback__)

    sys.excepthook = show_short


def boundary(fn: Callable[P, R]) -> Callable[P, R]:
    """Makes `fn` a public function whose errors do not show the frames of Phalanx."""

    @functools.wraps(fn)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return fn(*args, **kwargs)
        except Exception as e:
            hide(e)
            raise

    return wrapped


def _is_between(filename: str) -> bool:
    """Returns whether a frame that called the user's code is of no interest to the user."""
    packages = tuple(f"{_PACKAGES}{name}/" for name in ("jax", "keras"))
    return filename.startswith(_PHALANX) or filename.endswith("/contextlib.py") or any(p in filename for p in packages)


def _filename(entry: TracebackType) -> str:
    return entry.tb_frame.f_code.co_filename


def _filenames(error: BaseException) -> list[str]:
    return [_filename(tb) for tb in _entries(error.__traceback__)]


def _columns(entry: TracebackType) -> tuple[int, int] | None:
    """Returns where in its first line the expression stands that an entry was evaluating."""
    positions = itertools.islice(entry.tb_frame.f_code.co_positions(), entry.tb_lasti // 2, None)
    line, end_line, start, end = next(positions, (None,) * 4)
    if line is None or start is None or end is None:
        return None
    return (start, end if line == end_line else 10**6)


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next
