# SPDX-License-Identifier: Apache-2.0
"""The imports of a module, after its names have been replaced."""

from collections.abc import Collection, Mapping, Sequence
from typing import final

import libcst as cst
from typing_extensions import override

from phalanx._src.tools.migrate.names import Binding, RefusedError, aliases_of, dotted, path_in_tensorflow

MODULES: Mapping[str, str] = {
    "phalanx": "phalanx",  # First, because it sets Keras's backend.
    "jax": "jax",
    "jnp": "jax.numpy",
    "keras": "keras",
    "np": "numpy",
}
"""What new names begin with, and the modules that these are."""

REMOVED = cst.Expr(cst.Name("__phalanx_removed__"))
"""Stands for a removed statement. If nothing stood for it, its comments would be gone before they can move."""

_HOLDERS = (
    cst.Module, cst.BaseSuite, cst.BaseCompoundStatement, cst.SimpleStatementLine, cst.Else, cst.ExceptHandler,
    cst.ExceptStarHandler, cst.Finally, cst.MatchCase,
)  # fmt: skip
"""Nodes that hold statements."""

_BEFORE = {"keras", "jax", "tensorflow"}
"""Modules that are imported after Phalanx."""


def _import_of(local: str) -> cst.SimpleStatementLine:
    module = MODULES[local]
    alias = "" if module == local else f" as {local}"
    statement = cst.parse_statement(f"import {module}{alias}")
    return cst.ensure_type(statement, cst.SimpleStatementLine)


@final
class Imports(cst.CSTTransformer):
    """Replaces the imports of TensorFlow, and removes statements that have become empty.

    Args:
      bindings: the local names that stood for TensorFlow.
      remaining: the ids of the bindings that are still used.
      roots: the modules that new names need.
      assigned: for each local name, the qualified names of its imports; an empty string if it is assigned otherwise.

    Raises:
      RefusedError: a module that new names need has the name of something else.
    """

    def __init__(
        self,
        bindings: Collection[Binding],
        remaining: Collection[int],
        roots: Collection[str],
        assigned: Mapping[str, Collection[str]],
    ) -> None:
        super().__init__()
        self._bindings = {(id(binding.statement), binding.local): binding for binding in bindings}
        self._remaining = remaining
        moved = {binding.target for binding in bindings if binding.target and id(binding) in remaining}
        self._needed = set(roots) | {target.partition(".")[0] for target in moved}
        # Without `import phalanx` before it, `import keras` would choose its default backend, TensorFlow.
        if "keras" in self._needed:
            self._needed.add("phalanx")
        self._present = {local for local, module in MODULES.items() if module in assigned.get(local, ())}
        for local in sorted(self._needed & set(MODULES)):
            # `from tensorflow import keras` gives way to `import keras`, so the name has no other meaning.
            meanings = set(assigned.get(local, ())) - {MODULES[local], f"tensorflow.{local}"}
            if meanings:
                raise RefusedError(
                    cst.Pass(), f"the name `{local}` stands for something else than {MODULES[local]}. Rename it."
                )
        self._depth = 0

    @override
    def on_visit(self, node: cst.CSTNode) -> bool:
        return isinstance(node, _HOLDERS)

    # One import statement.

    @override
    def leave_Import(
        self, original_node: cst.Import, updated_node: cst.Import
    ) -> cst.FlattenSentinel[cst.BaseSmallStatement]:
        return cst.FlattenSentinel(self._replaced(original_node))

    @override
    def leave_ImportFrom(
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.FlattenSentinel[cst.BaseSmallStatement]:
        return cst.FlattenSentinel(self._replaced(original_node))

    def _replaced(self, statement: cst.Import | cst.ImportFrom) -> list[cst.BaseSmallStatement]:
        stays: list[cst.ImportAlias] = []
        moved: dict[str, list[str]] = {}
        for alias, local, qualified in aliases_of(statement):
            binding = self._bindings.get((id(statement), local))
            is_used = binding is not None and id(binding) in self._remaining
            if binding is None or not path_in_tensorflow(qualified) or (is_used and not binding.target):
                stays.append(alias)
            elif is_used:
                parent, _, last = binding.target.rpartition(".")
                if parent or local != last:  # The import of a module by its own name is one of the needed ones.
                    moved.setdefault(parent, []).append(last + (f" as {local}" if local != last else ""))
        if isinstance(statement.names, cst.ImportStar) or len(stays) == len(statement.names):
            return [statement]
        new: list[cst.BaseSmallStatement] = []
        for parent, names in moved.items():
            text = f"from {parent} import {', '.join(names)}" if parent else f"import {', '.join(names)}"
            new += cst.ensure_type(cst.parse_statement(text), cst.SimpleStatementLine).body
        if stays:
            new.append(
                statement.with_changes(names=[*stays[:-1], stays[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)])
            )
        return new or [REMOVED.deep_clone()]

    # Bodies.

    @override
    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.SimpleStatementLine]:
        """Removes what stands for removed statements from lines of several, and writes each new import on a line."""
        statements = [small for small in updated_node.body if not small.deep_equals(REMOVED)] or [REMOVED.deep_clone()]
        end = cst.MaybeSentinel.DEFAULT
        if len(statements) < len(updated_node.body):
            # The last statement of the line may be gone, but not the semicolon before it.
            statements[-1] = statements[-1].with_changes(semicolon=end)
        if len(statements) <= len(original_node.body):
            return updated_node.with_changes(body=statements)
        lines = [cst.SimpleStatementLine([small.with_changes(semicolon=end)]) for small in statements]
        lines[0] = lines[0].with_changes(leading_lines=updated_node.leading_lines)
        lines[-1] = lines[-1].with_changes(trailing_whitespace=updated_node.trailing_whitespace)
        return cst.FlattenSentinel(lines)

    @override
    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        body, rest = _without_empty(updated_node.body)
        if not body:
            body = [cst.SimpleStatementLine([cst.Pass()], leading_lines=rest)]
            rest = []
        return updated_node.with_changes(body=body, footer=[*rest, *updated_node.footer])

    @override
    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        new = [_import_of(local) for local in MODULES if local in self._needed - self._present]
        body = list(updated_node.body)
        # In the original, which still has the imports. Statements before the first of them keep their indices.
        at = self._position(original_node)
        if new and at < len(body):
            lines: Sequence[cst.EmptyLine] = getattr(body[at], "leading_lines", ())
            new[0] = new[0].with_changes(leading_lines=lines)
            body[at] = body[at].with_changes(leading_lines=[])
        body[at:at] = new
        remaining, rest = _without_empty(body)
        return updated_node.with_changes(body=remaining, footer=[*rest, *updated_node.footer])

    @staticmethod
    def _position(module: cst.Module) -> int:
        """Returns the index of the statement before which new imports stand."""
        first = 0
        for i, statement in enumerate(module.body):
            if not isinstance(statement, cst.SimpleStatementLine):
                continue
            for small in statement.body:
                if isinstance(small, cst.Import | cst.ImportFrom):
                    modules = {qualified.partition(".")[0] for _, _, qualified in aliases_of(small)}
                    if modules & _BEFORE:
                        return i
            # Python wants the docstring and imports from `__future__` first.
            is_text = i == 0 and isinstance(statement.body[0], cst.Expr)
            small_ = statement.body[0]
            is_future = isinstance(small_, cst.ImportFrom) and dotted(small_.module) == "__future__"
            if is_text or is_future:
                first = i + 1
        return first


def _without_empty(body: Sequence[cst.BaseStatement]) -> tuple[list[cst.BaseStatement], list[cst.EmptyLine]]:
    """Returns the statements that are not empty, and the comments of empty ones at the end. Other comments move to the next."""
    remaining: list[cst.BaseStatement] = []
    pending: list[cst.EmptyLine] = []
    for statement in body:
        lines: Sequence[cst.EmptyLine] = getattr(statement, "leading_lines", ())
        if isinstance(statement, cst.SimpleStatementLine) and statement.body[0].deep_equals(REMOVED):
            pending += [line for line in lines if line.comment or not pending]
            comment = statement.trailing_whitespace.comment
            if comment is not None:
                pending.append(cst.EmptyLine(comment=comment))
        elif pending:
            # One empty line between two statements is not lost when the second moves up.
            remaining.append(statement.with_changes(leading_lines=_joined(pending, lines)))
            pending = []
        else:
            remaining.append(statement)
    return remaining, pending


def _joined(first: Sequence[cst.EmptyLine], second: Sequence[cst.EmptyLine]) -> list[cst.EmptyLine]:
    blank = [line for line in first if line.comment is None]
    comments = [line for line in first if line.comment is not None]
    more = [line for line in second if line.comment is None]
    before = blank if len(blank) > len(more) or comments else []
    return [*before, *comments, *second]
