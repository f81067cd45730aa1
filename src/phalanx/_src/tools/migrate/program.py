# SPDX-License-Identifier: Apache-2.0
"""The migration of one program."""

import ast
import contextlib
import gc
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider, ScopeProvider

from phalanx._src.tools.migrate.flow import ControlFlow
from phalanx._src.tools.migrate.imports import Imports
from phalanx._src.tools.migrate.names import RefusedError, UsedNames
from phalanx._src.tools.migrate.refusals import Refusals
from phalanx._src.tools.migrate.regions import Regions
from phalanx._src.tools.migrate.report import LOOK, UNREADABLE, Report
from phalanx._src.tools.migrate.table import NameTable
from phalanx._src.tools.migrate.transformer import Layout, Transformer
from phalanx._src.tools.migrate.walk import parents_of, walk

_TOO_DEEP = "its expressions are too deep. Write the longest one in several statements."


@final
@dataclass(frozen=True)
class Migration:
    """A migrated program.

    Attributes:
      source: its source. That of the original if it could not be migrated.
      report: what was found.
    """

    source: bytes
    report: Report


def migrate(source: bytes, path: str, table: NameTable) -> Migration:
    """Returns a TensorFlow program as a Phalanx program.

    Args:
      source: the program.
      path: its file, for the report.
      table: the table of names.
    """
    report = Report(path)
    # Other files are not parsed, so they may be in any version of Python.
    if b"tensorflow" not in source:
        return Migration(source, report)
    # First by Python, which explains errors better, and refuses what is so deep that libcst's parser would overflow the stack.
    try:
        # Notebooks may have `await` outside functions. Warnings of the program are for those who run it.
        with warnings.catch_warnings(action="ignore"):
            compile(source, "program", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as e:
        return _unreadable(source, path, e.lineno or 1, f"this is not Python 3: {e.msg}")
    except ValueError as e:  # A null byte, and an encoding that does not fit.
        return _unreadable(source, path, 1, f"this is not Python 3: {e}")
    except (MemoryError, RecursionError):
        return _unreadable(source, path, 1, _TOO_DEEP)
    try:
        module = cst.parse_module(source)
    except (cst.ParserSyntaxError, ValueError) as e:
        line = e.raw_line if isinstance(e, cst.ParserSyntaxError) else 1
        return _unreadable(source, path, line, f"libcst cannot read this: {str(e).splitlines()[0]}")
    # The copy would make sure that no node occurs twice in the tree. None does after `parse_module`.
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    try:
        with _no_collection():
            migrated = _migrated(wrapper, table, report).bytes
    except RecursionError:
        return _unreadable(source, path, 1, _TOO_DEEP)
    except UnicodeError as e:
        return _unreadable(source, path, 1, f"the new program cannot be written in its encoding: {e}")
    except RefusedError as e:
        positions = wrapper.resolve(PositionProvider)
        refused = Report(path)
        refused.add(positions[e.node].start.line if e.node in positions else 1, LOOK, f"nothing was changed: {e.text}")
        return Migration(source, refused)
    return Migration(migrated, report)


def _unreadable(source: bytes, path: str, line: int, why: str) -> Migration:
    report = Report(path)
    report.add(line, UNREADABLE, why)
    return Migration(source, report)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """A module is a million objects that all stay until its end. To search them for garbage takes a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _migrated(wrapper: MetadataWrapper, table: NameTable, report: Report) -> cst.Module:
    module, parents, scopes = wrapper.module, parents_of(wrapper.module), wrapper.resolve(ScopeProvider)
    names = UsedNames(scopes, parents, table)
    walk(module, Refusals(names))
    # The word is only in a text or a comment.
    if not names.bindings:
        return module
    regions = Regions(names, parents)
    walk(module, regions)
    flow = ControlFlow(names, regions)
    walk(module, flow)
    layout = Layout(parents, wrapper.resolve(PositionProvider), scopes)
    transformer = Transformer(names=names, regions=regions, flow=flow, table=table, report=report, layout=layout)
    changed = module.visit(transformer)
    # A second pass, because only the end of the first one shows which imports are still used.
    bindings = names.bindings.values()
    return changed.visit(Imports(bindings, transformer.remaining, transformer.roots, names.assigned))
