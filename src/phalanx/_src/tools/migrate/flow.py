# SPDX-License-Identifier: Apache-2.0
"""Python control flow in a compiled function that may depend on a tensor, which TensorFlow's autograph rewrites."""

from collections.abc import Callable
from typing import final

import libcst as cst
from typing_extensions import override

from phalanx._src.tools.migrate.names import dotted

_STATIC = {
    "tf.executing_eagerly",
    "tf.is_tensor",
    "tf.distribute.in_cross_replica_context",
    "tf.distribute.has_strategy",
}


@final
class TensorNames(cst.CSTVisitor):
    """Collects the names in a function that may be tensors: its parameters, and results of TensorFlow.

    Args:
      path: returns the name in TensorFlow that an expression stands for.
    """

    def __init__(self, path: Callable[[cst.BaseExpression], str]) -> None:
        super().__init__()
        self._path = path
        self.parameters: set[str] = set()
        self.results: set[str] = set()

    @override
    def visit_Param(self, node: cst.Param) -> None:
        is_flag = node.default is not None or node.name.value in {"self", "cls", "training", "mode"}
        if not is_flag:
            self.parameters.add(node.name.value)

    @override
    def visit_Assign(self, node: cst.Assign) -> None:
        if has_result(node.value, self._path, self.results):
            self.results |= {dotted(target.target) for target in node.targets} - {""}


def has_result(node: cst.BaseExpression, path: Callable[[cst.BaseExpression], str], results: set[str]) -> bool:
    """Whether an expression contains a result of TensorFlow."""
    search = _Search(path, results)
    node.visit(search)
    return search.has_result


def may_be_tensor(test: cst.BaseExpression, names: TensorNames, path: Callable[[cst.BaseExpression], str]) -> bool:
    """Whether a condition may be a tensor."""
    if isinstance(test, cst.BooleanOperation):
        return any(may_be_tensor(side, names, path) for side in (test.left, test.right))
    if isinstance(test, cst.UnaryOperation):
        return may_be_tensor(test.expression, names, path)
    if isinstance(test, cst.Comparison):
        sides = [test.left, *(target.comparator for target in test.comparisons)]
        operators = [target.operator for target in test.comparisons]
        if all(isinstance(operator, cst.Is | cst.IsNot | cst.In | cst.NotIn) for operator in operators):
            return False
        if any(isinstance(side, cst.BaseString) for side in sides):
            return False
        compared = names.results | names.parameters
        return any(has_result(side, path, compared) for side in sides)
    return has_result(test, path, names.results)


@final
class _Search(cst.CSTVisitor):
    def __init__(self, path: Callable[[cst.BaseExpression], str], results: set[str]) -> None:
        super().__init__()
        self._path, self._results = path, results
        self.has_result = False

    @override
    def visit_Call(self, node: cst.Call) -> bool:
        path = self._path(node.func)
        self.has_result |= bool(path) and path not in _STATIC and not path.startswith(("tf.keras", "tf.data"))
        return dotted(node.func) not in {"isinstance", "len", "hasattr", "getattr"} and path not in _STATIC

    @override
    def visit_Attribute(self, node: cst.Attribute) -> bool:
        # Shapes and dtypes are known when a function is traced.
        return node.attr.value not in {"shape", "dtype", "ndim"}

    @override
    def visit_Name(self, node: cst.Name) -> None:
        self.has_result |= node.value in self._results
