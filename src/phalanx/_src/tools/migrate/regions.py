# SPDX-License-Identifier: Apache-2.0
"""Functions that run in TensorFlow, because a `tf.data` dataset calls them, and functions that are compiled."""

from collections.abc import Iterator, Mapping
from typing import final

import libcst as cst
from typing_extensions import override

from phalanx._src.tools.migrate.names import UsedNames, dotted
from phalanx._src.tools.migrate.walk import walk

Function = cst.FunctionDef | cst.Lambda

_OF_DATASETS = {"map", "filter", "flat_map", "interleave", "apply", "take_while", "group_by_window", "map_with_options"}
_COMPILED_BY = {"run", "experimental_run_v2", "run_steps", "schedule"}
_COMPILED_METHODS = {"call", "train_step", "test_step", "predict_step", "compute_loss"}
# Their effects would occur once, in the trace, or they need the value of a tensor, which a trace does not have.
_IMPURE_CALLS = {"print", "append", "extend", "numpy", "float", "int", "input", "open", "write", "update", "add"}


@final
class Regions(cst.CSTVisitor):
    """Visits a module once, and knows its functions then.

    Args:
      names: the uses of TensorFlow.
      parents: the parent of each node.
    """

    def __init__(self, names: UsedNames, parents: Mapping[cst.CSTNode, cst.CSTNode]) -> None:
        super().__init__()
        self._names, self._parents = names, parents
        self._methods: dict[str, list[cst.CSTNode]] = {}
        self._callees: dict[int, list[cst.BaseExpression]] = {}
        self._stack: list[Function] = []
        self._of_data: list[cst.BaseExpression] = []
        self._of_programs: list[cst.BaseExpression] = []
        self._tapes: list[tuple[cst.FunctionDef | None, cst.With]] = []
        self._compiled_roots: list[cst.CSTNode] = []
        self.in_tensorflow: set[int] = set()
        """Functions, and calls, whose names of TensorFlow stay."""
        self.compiled: set[int] = set()
        """Functions that Phalanx traces."""
        self.to_decorate: set[int] = set()
        """Functions that contain a tape and nothing else that has to happen in Python."""
        self.bare_tapes: set[int] = set()
        """`with` statements with a tape that no compiled function contains."""

    def path(self, node: cst.BaseExpression) -> str:
        """Returns the name in TensorFlow that an expression stands for, or an empty string."""
        reference = self._names.reference(node)
        return reference.path if reference else ""

    @override
    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._stack.append(node)
        if isinstance(self._parents.get(self._parents[node]), cst.ClassDef):
            self._methods.setdefault(node.name.value, []).append(node)
            if node.name.value in _COMPILED_METHODS:
                self._compiled_roots.append(node)
        for decorator in node.decorators:
            expression = decorator.decorator
            function = expression.func if isinstance(expression, cst.Call) else expression
            if self.path(function) in {"tf.function", "tf.compat.v1.function"} or dotted(function).endswith(
                ".function"
            ):
                self._compiled_roots.append(node)

    @override
    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:
        self._stack.pop()

    @override
    def visit_Lambda(self, node: cst.Lambda) -> None:
        self._stack.append(node)

    @override
    def leave_Lambda(self, original_node: cst.Lambda) -> None:
        self._stack.pop()

    @override
    def visit_With(self, node: cst.With) -> None:
        for item in node.items:
            if isinstance(item.item, cst.Call) and self.path(item.item.func) == "tf.GradientTape":
                outer = next((f for f in reversed(self._stack) if isinstance(f, cst.FunctionDef)), None)
                self._tapes.append((outer, node))

    @override
    def visit_Call(self, node: cst.Call) -> None:
        if self._stack:
            self._callees.setdefault(id(self._stack[-1]), []).append(node.func)
        path, values = self.path(node.func), [arg.value for arg in node.args]
        if path.startswith("tf.data.") or path in {"tf.numpy_function", "tf.py_function"}:
            self.in_tensorflow.add(id(node))
            self._of_data += values
        elif path == "tf.function":
            self._of_programs += values[:1]
        elif not path and isinstance(node.func, cst.Attribute) and values:
            method = node.func.attr.value
            # The class of the object is unknown, so the name of the method decides. `jax.tree.map` is not a method.
            if method in _OF_DATASETS and not self._is_of_module(node.func):
                self._of_data += values
            elif method in _COMPILED_BY:
                self._of_programs += values[:1]

    def _is_of_module(self, func: cst.Attribute) -> bool:
        root = dotted(func.value).partition(".")[0]
        return bool(root) and any(self._names.assigned.get(root, ()))

    @override
    def leave_Module(self, original_node: cst.Module) -> None:
        # At the end, because a dataset may use a function that is defined further down.
        self.in_tensorflow |= self._closure(self._of_data, [])
        self.compiled |= self._closure(self._of_programs, self._compiled_roots)
        for function, statement in self._tapes:
            inside = function is not None and id(function) in self.compiled | self.in_tensorflow
            if function is not None and not inside and _is_pure(function):
                self.to_decorate.add(id(function))
            elif not inside:
                self.bare_tapes.add(id(statement))
        # What a decorated function calls is traced with it, so that control flow there is looked at too.
        self.compiled |= self._closure([], [f for f, _ in self._tapes if f is not None and id(f) in self.to_decorate])

    def _functions(self, expression: cst.BaseExpression) -> Iterator[cst.CSTNode]:
        """Yields the functions of this module that an expression may stand for."""
        if isinstance(expression, cst.Lambda):
            yield expression
        elif (
            isinstance(expression, cst.Call)
            and dotted(expression.func).rpartition(".")[2] == "partial"
            or isinstance(expression, cst.Call)
            and self.path(expression.func) == "tf.function"
        ):
            yield from (function for arg in expression.args[:1] for function in self._functions(arg.value))
        elif isinstance(expression, cst.Name):
            yield from self._names.definitions.get(id(expression), [])
        elif isinstance(expression, cst.Attribute) and dotted(expression.value) in {"self", "cls"}:
            # Of all classes: the class of `self` may inherit the method from any of them.
            yield from self._methods.get(expression.attr.value, [])

    def _closure(self, expressions: list[cst.BaseExpression], roots: list[cst.CSTNode]) -> set[int]:
        """Returns the ids of functions and of all functions of this module that they call."""
        pending = [*roots, *(function for expression in expressions for function in self._functions(expression))]
        closure: set[int] = set()
        while pending:
            function = pending.pop()
            if id(function) not in closure and isinstance(function, cst.FunctionDef | cst.Lambda):
                closure.add(id(function))
                pending += (f for callee in self._callees.get(id(function), []) for f in self._functions(callee))
        return closure


def _is_pure(function: cst.FunctionDef) -> bool:
    """Whether a function does nothing in Python that a traced function would do only once."""
    visitor = _SideEffects()
    walk(function.body, visitor)
    return visitor.are_absent


@final
class _SideEffects(cst.CSTVisitor):
    """Looks for what a traced function would do only once."""

    def __init__(self) -> None:
        super().__init__()
        self.are_absent = True

    def _note(self, node: cst.CSTNode) -> bool:
        self.are_absent = False
        return False

    visit_Global = _note
    visit_Nonlocal = _note
    visit_Yield = _note

    @override
    def visit_Call(self, node: cst.Call) -> None:
        name = node.func.attr.value if isinstance(node.func, cst.Attribute) else dotted(node.func)
        self.are_absent &= name not in _IMPURE_CALLS

    @override
    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
        # `self.step = 1` and `losses[i] = x` outlive the call. A local name does not.
        self.are_absent &= not isinstance(node.target, cst.Attribute | cst.Subscript)

    @override
    def visit_AugAssign(self, node: cst.AugAssign) -> None:
        self.are_absent &= not isinstance(node.target, cst.Attribute | cst.Subscript)

    @override
    def visit_Attribute(self, node: cst.Attribute) -> None:
        # Numbers from NumPy or from Python would be the same in every step.
        self.are_absent &= dotted(node) not in {"np.random", "numpy.random"} and dotted(node.value) != "random"
