# SPDX-License-Identifier: Apache-2.0
"""Statements that mean something else in Phalanx, above all control flow over tensors, which TensorFlow's autograph rewrites."""

from collections.abc import Callable
from typing import final

import libcst as cst
from typing_extensions import override

from phalanx._src.tools.migrate.names import UsedNames, aliases_of, dotted
from phalanx._src.tools.migrate.regions import Regions
from phalanx._src.tools.migrate.walk import walk

_OTHER_LIBRARIES = {"tensorflow_addons", "tensorflow_hub", "tensorflow_probability", "tensorflow_text", "tf_agents"}

_STATIC = {
    "tf.executing_eagerly",
    "tf.is_tensor",
    "tf.distribute.in_cross_replica_context",
    "tf.distribute.has_strategy",
}


_OF_PYTHON = {"getattr", "hasattr", "isinstance", "len"}
"""Functions whose results are no tensors, whatever they take."""


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
        # A parameter with a default, or with one of these names, is mostly an option of Python and no tensor.
        is_flag = node.default is not None or node.name.value in {"self", "cls", "training", "mode"}
        if not is_flag:
            self.parameters.add(node.name.value)

    @override
    def visit_Assign(self, node: cst.Assign) -> None:
        if has_result(node.value, self._path, self.results) or self._is_of_tensors(node.value):
            self.results |= {dotted(target.target) for target in node.targets} - {""}

    def _is_of_tensors(self, value: cst.BaseExpression) -> bool:
        """Whether a function that is not known, such as a model or `strategy.reduce`, computes a value from tensors."""
        if not isinstance(value, cst.Call) or dotted(value.func) in _OF_PYTHON:
            return False
        tensors = self.parameters | self.results
        return any(has_result(argument.value, self._path, tensors) for argument in value.args)


def has_result(node: cst.BaseExpression, path: Callable[[cst.BaseExpression], str], results: set[str]) -> bool:
    """Whether an expression contains a result of TensorFlow."""
    search = _Search(path, results)
    walk(node, search)
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
        # `x is None` and `mode in modes` are tests of Python values.
        if all(isinstance(operator, cst.Is | cst.IsNot | cst.In | cst.NotIn) for operator in operators):
            return False
        if any(isinstance(side, cst.BaseString) for side in sides):
            return False
        compared = names.results | names.parameters
        return any(has_result(side, path, compared) for side in sides)
    # Not the parameters: a bare one, as in `if is_training:`, is a flag more often than a tensor.
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
        # Most names of tf.keras and tf.data make layers, models and datasets, which are not tensors.
        self.has_result |= bool(path) and path not in _STATIC and not path.startswith(("tf.keras", "tf.data"))
        return dotted(node.func) not in _OF_PYTHON and path not in _STATIC

    @override
    def visit_Attribute(self, node: cst.Attribute) -> bool:
        # Shapes and dtypes are known when a function is traced.
        return node.attr.value not in {"shape", "dtype", "ndim"}

    @override
    def visit_Name(self, node: cst.Name) -> None:
        self.has_result |= node.value in self._results


@final
class ControlFlow(cst.CSTVisitor):
    """Visits a module once, and knows the statements that a person must look at.

    Args:
      names: the uses of TensorFlow.
      regions: the functions of the module.
    """

    def __init__(self, names: UsedNames, regions: Regions) -> None:
        super().__init__()
        self._regions = regions
        self._has_strategy = any(path.startswith("tf.distribute.") for path in names.paths())
        self._functions: list[TensorNames] = []
        self._depth_in_tensorflow = 0
        self.looks: dict[int, list[tuple[str, str]]] = {}
        """For each such node, its name in the report and the reason."""
        self.loops: set[int] = set()
        """Calls of `tf.range` that may be a `range` of Python."""

    @override
    def on_visit(self, node: cst.CSTNode) -> bool:
        self._depth_in_tensorflow += id(node) in self._regions.in_tensorflow
        if id(node) in self._regions.compiled:
            tensors = TensorNames(self._regions.path)
            walk(node, tensors)
            self._functions.append(tensors)
        return super().on_visit(node)

    @override
    def on_leave(self, original_node: cst.CSTNode) -> None:
        super().on_leave(original_node)
        self._depth_in_tensorflow -= id(original_node) in self._regions.in_tensorflow
        if id(original_node) in self._regions.compiled:
            self._functions.pop()

    def _look(self, node: cst.CSTNode, name: str, reason: str) -> None:
        self.looks.setdefault(id(node), []).append((name, reason))

    @override
    def visit_Import(self, node: cst.Import) -> None:
        self._look_at_import(node)

    @override
    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:
        self._look_at_import(node)

    def _look_at_import(self, node: cst.Import | cst.ImportFrom) -> None:
        for library in {qualified.partition(".")[0] for _, _, qualified in aliases_of(node)} & _OTHER_LIBRARIES:
            self._look(node, library, "it needs TensorFlow, and has no counterpart in Phalanx.")

    @override
    def visit_For(self, node: cst.For) -> None:
        if self._depth_in_tensorflow:
            return
        names, path = self._functions[-1] if self._functions else None, self._regions.path
        if isinstance(node.iter, cst.Call) and path(node.iter.func) == "tf.range":
            values = [arg.value for arg in node.iter.args]
            if names and any(has_result(value, path, names.results | names.parameters) for value in values):
                self._look(node, "for", "over a number that may be a tensor. HINT: phalanx.while_loop, or range(n)")
            elif all(arg.keyword is None for arg in node.iter.args):  # Python's `range` takes no keywords.
                self.loops.add(id(node.iter))
        elif names and isinstance(node.iter, cst.Name) and _is_dataset(node.iter.value, names):
            self._look(node, "for", "a loop over a dataset cannot be compiled. HINT: put the loop around the function")

    @override
    def visit_If(self, node: cst.If) -> None:
        self._look_at_test(node, "if", node.test, "HINT: phalanx.cond(test, true_fn, false_fn), or keras.ops.where")

    @override
    def visit_IfExp(self, node: cst.IfExp) -> None:
        self._look_at_test(node, "if", node.test, "HINT: keras.ops.where(test, x, y)")

    @override
    def visit_While(self, node: cst.While) -> None:
        self._look_at_test(node, "while", node.test, "HINT: phalanx.while_loop(cond, body, init)")

    @override
    def visit_Assert(self, node: cst.Assert) -> None:
        self._look_at_test(node, "assert", node.test, "HINT: remove it, or assert outside the function")

    def _look_at_test(self, node: cst.CSTNode, word: str, test: cst.BaseExpression, hint: str) -> None:
        is_compiled = self._functions and not self._depth_in_tensorflow
        if is_compiled and may_be_tensor(test, self._functions[-1], self._regions.path):
            self._look(node, word, f"the condition may be a tensor, in a compiled function. {hint}")

    @override
    def visit_Call(self, node: cst.Call) -> None:
        """Keras 3 takes no other name for a file of weights, and says so when training ends."""
        is_save = isinstance(node.func, cst.Attribute) and node.func.attr.value == "save_weights"
        file = node.args[0].value if node.args else None
        if is_save and isinstance(file, cst.SimpleString) and not file.raw_value.endswith(".weights.h5"):
            self._look(node, ".save_weights()", 'the name of the file must end with ".weights.h5" in Keras 3')

    @override
    def visit_With(self, node: cst.With) -> None:
        if id(node) in self._regions.bare_tapes:
            hint = "HINT: put the step into a function with @phalanx.function, without side effects in Python"
            self._look(node, "tf.GradientTape", f"a tape records only in a compiled function. {hint}")

    @override
    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        methods = {f.name.value for f in node.body.body if isinstance(f, cst.FunctionDef)}
        if methods & {"train_step", "test_step"} and not self._has_strategy:
            hint = 'HINT: create the model in `with phalanx.OneDeviceStrategy("cpu:0").scope():`'
            self._look(node, "train_step", f"your own steps need a strategy. {hint}")
        for function in node.body.body:
            if isinstance(function, cst.FunctionDef) and function.name.value == "train_step":
                sums = _GlobalSums(self._regions.path)
                walk(function, sums)
                for divided in sums.divided:
                    hint = "HINT: phalanx.nn.compute_average_loss(per_example), or keras.ops.mean for keras.ops.sum"
                    why = "in fit, a train_step computes the mean over the rows of its replica, not a sum over the global batch."
                    self._look(divided, "train_step", f"{why} {hint}")


@final
class _GlobalSums(cst.CSTVisitor):
    """Collects the operations in a function that divide a sum by the size of a batch."""

    def __init__(self, path: Callable[[cst.BaseExpression], str]) -> None:
        super().__init__()
        self._path, self._names = path, set[str]()
        self.divided: list[cst.CSTNode] = []

    @override
    def visit_Assign(self, node: cst.Assign) -> None:
        if self._is_sum(node.value):
            self._names |= {dotted(target.target) for target in node.targets} - {""}

    @override
    def visit_BinaryOperation(self, node: cst.BinaryOperation) -> None:
        is_quotient = isinstance(node.operator, cst.Divide) and self._is_sum(node.left) and _is_size(node.right)
        sides = (node.left, node.right), (node.right, node.left)
        is_product = isinstance(node.operator, cst.Multiply)
        if is_quotient or is_product and any(self._is_sum(one) and _is_inverse(other) for one, other in sides):
            self.divided.append(node)

    @override
    def visit_AugAssign(self, node: cst.AugAssign) -> None:
        divides = isinstance(node.operator, cst.DivideAssign) and _is_size(node.value)
        multiplies = isinstance(node.operator, cst.MultiplyAssign) and _is_inverse(node.value)
        if (divides or multiplies) and self._is_sum(node.target):
            self.divided.append(node)

    def _is_sum(self, node: cst.BaseExpression) -> bool:
        is_call = isinstance(node, cst.Call) and self._path(node.func) in {"tf.reduce_sum", "tf.math.reduce_sum"}
        return is_call or dotted(node) in self._names


def _is_size(node: cst.BaseExpression) -> bool:
    """Whether an expression is a number of rows that does not come from a batch, or such a number as a float."""
    # `float(batch)`, or `tf.cast(batch, tf.float32)`.
    if isinstance(node, cst.Call) and len(node.args) in (1, 2):
        return _is_size(node.args[0].value)
    return "batch" in dotted(node).rpartition(".")[2].lower()


def _is_inverse(node: cst.BaseExpression) -> bool:
    if not isinstance(node, cst.BinaryOperation) or not isinstance(node.operator, cst.Divide):
        return False
    return isinstance(node.left, cst.BaseNumber) and _is_size(node.right)


def _is_dataset(name: str, names: TensorNames) -> bool:
    """Whether the name of a parameter says that it is a dataset. A loop over a list of tensors is unrolled."""
    return name in names.parameters and any(word in name.lower() for word in ("iter", "data", "ds"))
