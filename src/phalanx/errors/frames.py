# SPDX-License-Identifier: Apache-2.0
"""Separates user code from Phalanx and library code in stacks and tracebacks. Uses the standard library only."""

import functools
import itertools
import linecache
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_PHALANX = str(Path(__file__).parents[1]) + "/"
# `<frozen ...>` is the code of importlib, which is a part of the interpreter.
_LIBRARIES = (_PHALANX, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), "<frozen ")
_NOTE_OF_JAX = "JAX has removed its internal frames"
"""JAX adds this note to every error that passes through it. It says nothing about a Phalanx error."""

_PACKAGES = "-packages/"
"""Part of the path of every installed package: `site-packages/` or `dist-packages/`."""


class Place(NamedTuple):
    """A line of source code.

    Args:
      filename: path of the file.
      lineno: line number, from 1.
      columns: start and end column, in bytes, of the evaluated expression. None if they are unknown.
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
        """The source text of the expression, up to the end of this line; the whole line if the columns are unknown."""
        line = linecache.getline(self.filename, self.lineno).encode()
        return line[slice(*self.columns)].decode(errors="replace") if self.columns else line.decode().strip()


def is_of_user(filename: str) -> bool:
    """Returns whether a file belongs to the user, not to Phalanx or a library."""
    return not (filename.startswith(_LIBRARIES) or _PACKAGES in filename)


def user_place() -> Place | None:
    """Returns the innermost line of user code on the stack of this thread, or None."""
    frame = _user_frame()
    return frame and Place(frame.f_code.co_filename, frame.f_lineno)


def user_call() -> Place | None:
    """Returns the innermost call in user code on the stack of this thread, with its columns, or None."""
    frame = _user_frame()
    return frame and Place(frame.f_code.co_filename, frame.f_lineno, _columns(frame.f_code, frame.f_lasti))


def _user_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_of_user(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def place_of(error: BaseException) -> Place | None:
    """Returns the innermost line of user code in the traceback of an error, or None."""
    entries = [tb for tb in _entries(error.__traceback__) if is_of_user(_filename(tb))]
    if not entries:
        return None
    last = entries[-1]
    return Place(_filename(last), last.tb_lineno, _columns(last.tb_frame.f_code, last.tb_lasti))


def place_in(traceback: object) -> Place | None:
    """Returns the innermost line of user code in a traceback of JAX, which has `frames`, or None."""
    frames = getattr(traceback, "frames", ())
    return next((Place(f.file_name, f.line_num) for f in frames if is_of_user(f.file_name)), None)


def is_raised_in(package: str, error: BaseException) -> bool:
    """Returns whether the innermost line of user code called into `package`, and the error was raised from there."""
    inner = itertools.takewhile(lambda name: not is_of_user(name), reversed(_filenames(error)))
    return any(f"{_PACKAGES}{package}/" in name for name in inner)


def is_raised_by_phalanx(error: BaseException) -> bool:
    """Returns whether Phalanx raised an error, or called a function with arguments that it does not take."""
    names = _filenames(error)
    return bool(names) and names[-1].startswith(_PHALANX)


def hide(error: BaseException) -> None:
    """Removes Phalanx frames from the traceback of an error that leaves a public function.

    Frames of JAX and Keras between Phalanx and user code are removed as well. The traceback stays unchanged if
    PHALANX_TRACEBACK is "full", or if it has no line of user code: then the error is internal to Phalanx.
    """
    if os.environ.get("PHALANX_TRACEBACK") == "full":
        return
    # A program can make a circle of causes with `raise a from b` and `b.__cause__ = a`.
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
    # The message of a Phalanx error suffices; other errors keep their frames inside libraries.
    # Not `isinstance`, because `phalanx.errors` imports this module.
    if hasattr(error, "hint"):
        last = len(entries)
        error.__notes__ = [note for note in getattr(error, "__notes__", ()) if _NOTE_OF_JAX not in note]
    elif last < 0:
        return
    traceback = None
    for i, tb in reversed(list(enumerate(entries))):
        if not (_is_between(_filename(tb)) if i < last else _filename(tb).startswith(_PHALANX)):
            traceback = TracebackType(traceback, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
    error.__traceback__ = traceback


def hide_of_uncaught() -> None:
    """Installs an exception hook that removes Phalanx frames from the traceback of an uncaught error."""
    show = sys.excepthook

    def show_short(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if any(name.startswith(_PHALANX) for name in _filenames(error)):
            hide(error)
        show(kind, error, error.__traceback__)

    sys.excepthook = show_short


def boundary(fn: Callable[P, R]) -> Callable[P, R]:
    """Wraps a public function so that its errors do not show Phalanx frames."""

    @functools.wraps(fn)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return fn(*args, **kwargs)
        except Exception as e:
            hide(e)
            raise

    return wrapped


def _is_between(filename: str) -> bool:
    """Returns whether a file belongs to Phalanx, JAX, Keras or `contextlib`, whose frames above user code are hidden."""
    packages = tuple(f"{_PACKAGES}{name}/" for name in ("jax", "keras"))
    return filename.startswith(_PHALANX) or filename.endswith("/contextlib.py") or any(p in filename for p in packages)


def _filename(entry: TracebackType) -> str:
    return entry.tb_frame.f_code.co_filename


def _filenames(error: BaseException) -> list[str]:
    return [_filename(tb) for tb in _entries(error.__traceback__)]


def _columns(code: CodeType, at: int) -> tuple[int, int] | None:
    """Returns the start and end column of the expression that the instruction at a byte of some code evaluates, in its first line."""
    # `co_positions` counts instructions, which have two bytes each.
    positions = itertools.islice(code.co_positions(), at // 2, None)
    line, end_line, start, end = next(positions, (None,) * 4)
    if line is None or start is None or end is None:
        return None
    # If the expression ends in a later line, it takes the rest of this one.
    return (start, end if line == end_line else 10**6)


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next
