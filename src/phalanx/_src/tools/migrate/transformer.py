# SPDX-License-Identifier: Apache-2.0
"""Replaces the names of TensorFlow in a module, and marks the lines that a person must look at."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, final

import libcst as cst
import libcst.matchers as m
from libcst.metadata import CodeRange, Scope
from typing_extensions import override

from phalanx._src.tools.migrate.calls import MismatchError, as_function, in_parentheses, migrated, source_of
from phalanx._src.tools.migrate.flow import ControlFlow
from phalanx._src.tools.migrate.forms import FORMS, VIRTUAL_DEVICES, LookError
from phalanx._src.tools.migrate.imports import MODULES, REMOVED
from phalanx._src.tools.migrate.names import Reference, UsedNames, dotted
from phalanx._src.tools.migrate.regions import Regions
from phalanx._src.tools.migrate.report import CHANGED, LOOK, STAYS, Report
from phalanx._src.tools.migrate.table import NameTable, Row

CSTNodeT = TypeVar("CSTNodeT", bound=cst.CSTNode)

MARK = "# phalanx: "
_PAIRS = {"tf.math.top_k", "tf.nn.top_k"}
"""Names of TensorFlow whose results are pairs with names, and whose targets return pairs."""

_PLACE = re.compile(r"\{(\w+)(?:=[^}]*)?\}")
_TAKE_SHAPES = {
    "tf.broadcast_to", "tf.fill", "tf.ones", "tf.random.normal", "tf.random.truncated_normal", "tf.random.uniform",
    "tf.reshape", "tf.zeros",
}  # fmt: skip


@final
@dataclass(frozen=True)
class Layout:
    """The positions of the nodes of a module.

    Attributes:
      parents: the parent of each node.
      positions: its lines.
      scopes: the scope of each node.
    """

    parents: Mapping[cst.CSTNode, cst.CSTNode]
    positions: Mapping[cst.CSTNode, CodeRange]
    scopes: Mapping[cst.CSTNode, Scope | None]

    def has_several_lines(self, node: cst.CSTNode) -> bool:
        """Whether a node ends on another line than it begins."""
        return self.positions[node].start.line != self.positions[node].end.line


@final
class Transformer(cst.CSTTransformer):
    """Replaces the names of TensorFlow.

    Args:
      names: the uses of TensorFlow.
      regions: the functions of the module.
      flow: its control flow.
      table: the table of names.
      report: gets the findings.
      layout: where the nodes stand.
    """

    def __init__(
        self,
        *,
        names: UsedNames,
        regions: Regions,
        flow: ControlFlow,
        table: NameTable,
        report: Report,
        layout: Layout,
    ) -> None:
        super().__init__()
        self._names, self._regions, self._flow = names, regions, flow
        self._table, self._report, self._layout = table, report, layout
        self._concerned = self._find_concerned()
        self._unneeded: dict[int, str] = {}
        """For each assignment of devices that only virtual devices are made of, the name in TensorFlow that lists them. Empty for arguments
        of calls that make them, of which the new calls need only the number."""
        self._late: set[int] = set()
        """Calls that make virtual devices of such a name, but something else uses it too."""
        self._find_devices()
        self._marks: list[list[str]] = []
        self._called: set[int] = set()
        self._dropped: set[int] = set()
        self._depth_in_tensorflow = 0
        self.roots: set[str] = set()
        """The modules that the new names need."""
        self.remaining: set[int] = set()
        """The ids of the bindings that the migrated module still uses."""

    @override
    def on_visit(self, node: cst.CSTNode) -> bool:
        if id(node) not in self._concerned:
            return False
        if isinstance(node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            # Statements contain others. A mark stands above the innermost one.
            self._marks.append([])
        if id(node) in self._regions.in_tensorflow:
            self._depth_in_tensorflow += 1
        for name, reason in self._flow.looks.get(id(node), []):
            self._look(node, name, reason)
        return id(node) not in self._unneeded and super().on_visit(node)

    @override
    def on_leave(
        self, original_node: CSTNodeT, updated_node: CSTNodeT
    ) -> CSTNodeT | cst.RemovalSentinel | cst.FlattenSentinel[CSTNodeT]:
        if id(original_node) not in self._concerned:
            return updated_node
        # An argument has an empty path. It stays here, and the form of its call drops it.
        if path := self._unneeded.get(id(original_node)):
            self._change(original_node, path, "nothing", "")
            return REMOVED.deep_clone()  # type: ignore[return-value]
        left = super().on_leave(original_node, updated_node)
        if id(original_node) in self._regions.in_tensorflow:
            self._depth_in_tensorflow -= 1
        if isinstance(original_node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            marks = self._marks.pop()
            if marks and isinstance(left, cst.CSTNode):
                return _marked(left, marks)
        return left

    def _find_concerned(self) -> set[int]:
        """Returns the ids of the nodes that may change, and of all around them."""
        changing = {*self._names.references, *self._flow.looks, *self._flow.loops, *self._regions.to_decorate}
        concerned: set[int] = set()
        for node in self._layout.parents:
            # The table has methods of any object, so that every call of a method may change.
            is_method = isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute)
            # Visits come from above, so what is around a node is visited too.
            if id(node) in changing or is_method:
                around: cst.CSTNode | None = node
                while around is not None and id(around) not in concerned:
                    concerned.add(id(around))
                    around = self._layout.parents.get(around)
        return concerned

    def _find_devices(self) -> None:
        """Looks at the calls that make virtual devices, and at the devices that they take."""
        of_devices: dict[int, cst.Call] = {}
        for call in self._layout.parents:
            if isinstance(call, cst.Call) and (path := self._regions.path(call.func)) in VIRTUAL_DEVICES:
                # A call that gets a mark keeps its arguments.
                with contextlib.suppress(LookError, MismatchError):
                    self._form(path, call)
                    # Of `[Device()] * 2`, the new call needs the number.
                    values = [
                        arg.value.left if isinstance(arg.value, cst.BinaryOperation) else arg.value for arg in call.args
                    ]
                    self._unneeded |= dict.fromkeys(map(id, values), "")
                    of_devices |= {id(_without_index(value)): call for value in values}
        for node in self._layout.parents if of_devices else ():
            value = _without_index(node.value) if isinstance(node, cst.Assign) else None
            path = self._regions.path(value.func) if isinstance(value, cst.Call) else ""
            if path.endswith("list_physical_devices") and isinstance(node, cst.Assign):
                target = node.targets[0].target
                scope = self._layout.scopes.get(target)
                assignments = list(scope[target.value]) if scope and isinstance(target, cst.Name) else []
                uses = [id(access.node) for assignment in assignments for access in assignment.references]
                # Only if this is the one assignment of the name: after another, it could mean other devices.
                if len(assignments) == len(node.targets) and uses and all(use in of_devices for use in uses):
                    self._unneeded[id(node)] = path
                else:
                    self._late |= {id(of_devices[use]) for use in uses if use in of_devices}

    # What is reported.

    def _line(self, node: cst.CSTNode) -> int:
        return self._layout.positions[node].start.line

    def _look(self, node: cst.CSTNode, name: str, reason: str) -> None:
        """Reports a line that a person must look at, and marks it."""
        text = f"{name}: {reason}"
        self._report.add(self._line(node), LOOK, text)
        if self._marks:
            self._marks[-1].append(f"{MARK}{text}")

    def _change(self, node: cst.CSTNode, name: str, target: str, note: str) -> None:
        self._report.add(self._line(node), CHANGED, f"{name} -> {target}" + (f" ({note})" if note else ""))

    def _need(self, node: cst.BaseExpression) -> None:
        """Notes the modules that a new expression uses."""
        self.roots |= {name.value for name in m.findall(node, m.Name()) if isinstance(name, cst.Name)} & set(MODULES)

    # UsedNames and calls of TensorFlow.

    @override
    def visit_Import(self, node: cst.Import) -> bool:
        return False

    @override
    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    @override
    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> cst.Import:
        return original_node  # The next pass knows it by its identity.

    @override
    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom) -> cst.ImportFrom:
        return original_node

    @override
    def visit_Attribute(self, node: cst.Attribute) -> bool:
        return self._names.reference(node) is None

    @override
    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        return self._replaced(original_node, updated_node)

    @override
    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        return self._replaced(original_node, updated_node)

    @override
    def visit_Call(self, node: cst.Call) -> None:
        # `leave_Call` replaces this name, because the arguments select the row.
        self._called.add(id(node.func))

    @override
    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        reference = self._names.reference(original_node.func)
        if reference is None:
            return self._of_method(original_node, updated_node)
        rows = self._rows(original_node, reference)
        if rows is None:
            return updated_node
        if rows[0].kind == "drop" and isinstance(self._layout.parents[original_node], cst.Expr):
            self._dropped.add(id(original_node))
            self._change(original_node, reference.path, "nothing", rows[0].note)
            return updated_node
        try:
            new = self._call(original_node, updated_node, reference, rows)
        except (LookError, MismatchError) as e:
            self._keep(original_node, reference, str(e))
            return updated_node
        return self._with_comments(original_node, new)

    def _call(
        self, original: cst.Call, updated: cst.Call, reference: Reference, rows: Sequence[Row]
    ) -> cst.BaseExpression:
        path, row = reference.path, rows[0]
        rest = path.removeprefix(row.name)
        # A `drop` comes here if something uses its result. It is then not a statement and cannot be removed.
        if row.kind == "drop" or {row.kind for row in rows} == {"none"}:
            raise LookError(row.note)
        if id(original) in self._flow.loops:
            new: cst.BaseExpression = updated.with_changes(func=cst.Name("range"))
        elif path == "tf.shape" and not self._is_shape(original):
            raise LookError("its target is a tuple of numbers. HINT: keras.ops.array(x.shape) for an array")
        elif path in _PAIRS and not self._is_unpacked(original):
            raise LookError("its target is a pair without names. HINT: values, indices = keras.ops.top_k(x, k)")
        elif path in FORMS:
            new = self._form(path, updated)
            if id(original) in self._late:
                self._look(
                    original,
                    path,
                    "it must run before anything uses the devices. HINT: move it to the first line below the imports",
                )
        # The table has no arguments of methods of a class, such as `tf.keras.Model.from_config`.
        elif rest or (row.kind == "expression" and row.is_open):
            new = updated.with_changes(func=self._name(original.func, reference, rows))
        else:
            # After `from tensorflow.keras.layers import Dense`, only the import changes, and `Dense(1)` stays.
            is_spelled = row.kind == "name" and reference.is_spelled(row.target)
            if is_spelled:
                self.remaining.add(id(reference.binding))
            row, new = migrated(rows, updated, original.func if is_spelled else None)
        self._need(new)
        self._change(original, path, _target_of(row, new) + rest, row.note)
        if row.note.startswith("look: "):
            self._look(original, path, row.note.removeprefix("look: "))
        return new

    def _form(self, path: str, call: cst.Call) -> cst.BaseExpression:
        migrated(self._table.rows(path), call)  # A form expects that the row of the name allows the arguments.
        return FORMS[path](call)

    def _replaced(self, original: cst.Name | cst.Attribute, updated: cst.BaseExpression) -> cst.BaseExpression:
        """Returns the replacement of a name that is not called."""
        reference = self._names.reference(original)
        if reference is None or id(original) in self._called:
            return updated
        if reference.path == "tf" or self._is_alias(original, reference):
            return self._bare(original, updated, reference)
        rows = self._rows(original, reference)
        if rows is None:
            return updated
        # Without the arguments of a call, nothing could choose among several rows.
        if rows[0].kind == "template" and len(rows) == 1:
            new = as_function(rows[0])
            self._need(new)
            self._change(original, reference.path, source_of(new), rows[0].note)
            parent = self._layout.parents[original]
            return new if isinstance(parent, cst.Arg | cst.Assign) else in_parentheses(new)
        if rows[0].kind not in {"name", "expression"} or (rows[0].kind == "expression" and not rows[0].is_open):
            hint = rows[0].note if rows[0].kind == "none" else f"it must be called here. HINT: {rows[0].target}"
            self._keep(original, reference, hint)
            return updated
        new = self._name(original, reference, rows)
        self._need(new)
        self._change(original, reference.path, rows[0].target + reference.path.removeprefix(rows[0].name), rows[0].note)
        return new

    def _is_alias(self, original: cst.Name | cst.Attribute, reference: Reference) -> bool:
        """Whether it is the value of `math = tf.math`, a module without a counterpart whose uses are all replaced."""
        parent = self._layout.parents[original]
        if not isinstance(parent, cst.Assign) or self._table.find(reference.path)[0]:
            return False
        return any(
            binding.statement is parent.targets[0].target and binding.path == reference.path
            for binding in self._names.bindings.values()
        )

    def _bare(
        self, original: cst.Name | cst.Attribute, updated: cst.BaseExpression, reference: Reference
    ) -> cst.BaseExpression:
        self._keep(original, reference, "a module has no counterpart as a value. Use its full name where it is used.")
        return updated

    def _name(self, original: cst.BaseExpression, reference: Reference, rows: Sequence[Row]) -> cst.BaseExpression:
        row = rows[0]
        target = row.target + reference.path.removeprefix(row.name)
        if reference.is_spelled(target):
            self.remaining.add(id(reference.binding))
            return original
        return cst.parse_expression(target)

    def _rows(self, node: cst.CSTNode, reference: Reference) -> Sequence[Row] | None:
        """Returns the rows of a name that is to be replaced. Reports it if it stays."""
        rows, _ = self._table.find(reference.path)
        if self._depth_in_tensorflow:
            is_layer = bool(rows) and rows[0].kind == "name" and rows[0].target.startswith("keras.")
            if is_layer and not rows[0].target.startswith(("keras.ops", "keras.random", "keras.backend")):
                return rows
        elif not rows:
            self._keep(node, reference, "the table of names does not have it, so nothing was changed.")
            return None
        elif rows[0].kind != "keep":
            return rows
        self._report.add(self._line(node), STAYS, reference.path)
        self.remaining.add(id(reference.binding))
        return None

    def _keep(self, node: cst.CSTNode, reference: Reference, reason: str) -> None:
        self.remaining.add(id(reference.binding))
        self._look(node, reference.path, reason)

    def _is_shape(self, call: cst.Call) -> bool:
        """Whether a call of `tf.shape` is used as a tuple of numbers can be."""
        parent = self._layout.parents[call]
        if isinstance(parent, cst.Assign) and len(parent.targets) == 1:
            target = parent.targets[0].target
            scope = self._layout.scopes.get(target)
            if isinstance(target, cst.Name) and isinstance(scope, Scope):
                uses = [access.node for assignment in scope[target.value] for access in assignment.references]
                return all(self._takes_tuple(use) for use in uses)
            return isinstance(target, cst.Tuple)
        return self._takes_tuple(call)

    def _takes_tuple(self, node: cst.CSTNode) -> bool:
        parent = self._layout.parents[node]
        if isinstance(parent, cst.Subscript):
            return parent.value is node
        if not isinstance(parent, cst.Arg):
            return False
        call = self._layout.parents[parent]
        return isinstance(call, cst.Call) and self._regions.path(call.func) in _TAKE_SHAPES

    def _is_unpacked(self, call: cst.Call) -> bool:
        """Whether a pair is used in a way that needs no names, as by `a, b = pair` or `pair[0]`."""
        parent = self._layout.parents[call]
        if isinstance(parent, cst.Assign):
            return all(isinstance(target.target, cst.Tuple | cst.List) for target in parent.targets)
        return isinstance(parent, cst.Subscript) and parent.value is call

    @override
    def leave_Expr(self, original_node: cst.Expr, updated_node: cst.Expr) -> cst.Expr:
        return REMOVED.deep_clone() if id(original_node.value) in self._dropped else updated_node

    # Methods of objects whose classes nobody knows.

    def _of_method(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        if self._depth_in_tensorflow or not isinstance(original.func, cst.Attribute):
            return updated
        name = original.func.attr.value
        rows = self._table.rows(f".{name}")
        root = dotted(original.func.value).partition(".")[0]
        # The functions of a module that the program imports are not methods, whatever they are called.
        if not rows or (root and any(self._names.assigned.get(root, ()))):
            return updated
        try:
            func = updated.func.with_changes(attr=cst.Name(rows[0].target)) if rows[0].kind == "name" else None
            row, new = migrated(rows, updated, func)
        except MismatchError as e:
            self._look(original, f".{name}()", str(e))
            return updated
        self._need(new)
        self._change(original, f".{name}()", _PLACE.sub(r"\1", row.target), row.note)
        return self._with_comments(original, new)

    def _with_comments(self, original: cst.Call, new: cst.BaseExpression) -> cst.BaseExpression:
        """Writes comments of a call that its replacement does not have above the statement."""
        if self._layout.has_several_lines(original) and "#" in source_of(original):
            # Lists, because a call may have the same comment twice.
            before, after = (
                [node.value for node in m.findall(call, m.Comment()) if isinstance(node, cst.Comment)]
                for call in (original, new)
            )
            for comment in after:
                before.remove(comment)
            self._marks[-1] += before
        return new

    @override
    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        if id(original_node) not in self._regions.to_decorate:
            return updated_node
        self.roots.add("phalanx")
        self._change(
            original_node, "tf.GradientTape", "@phalanx.function", "a tape records only in a compiled function"
        )
        # The last decorator is applied first, so that the others, such as a timer, wrap the compiled function.
        decorator = cst.Decorator(cst.parse_expression("phalanx.function"))
        return updated_node.with_changes(decorators=[*updated_node.decorators, decorator])


def _without_index(node: cst.BaseExpression) -> cst.BaseExpression:
    return node.value if isinstance(node, cst.Subscript) else node


def _target_of(row: Row, new: cst.BaseExpression) -> str:
    if row.kind != "name" and isinstance(new, cst.Call) and dotted(new.func):
        return dotted(new.func)
    return _PLACE.sub(r"\1", row.target)


def _marked(statement: CSTNodeT, marks: Sequence[str]) -> CSTNodeT:
    """Returns a statement with comments above it that are not there yet."""
    lines: Sequence[cst.EmptyLine] = getattr(statement, "leading_lines", ())
    # A second run of the command meets the marks of the first.
    present = {line.comment.value for line in lines if line.comment}
    new = [cst.EmptyLine(comment=cst.Comment(mark)) for mark in dict.fromkeys(marks) if mark not in present]
    return statement.with_changes(leading_lines=[*lines, *new])
