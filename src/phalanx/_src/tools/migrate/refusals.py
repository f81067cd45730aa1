# SPDX-License-Identifier: Apache-2.0
"""Programs that cannot be migrated, because their names of TensorFlow are not in the source or are those of sessions."""

from typing import final

import libcst as cst
from typing_extensions import override

from phalanx._src.tools.migrate.calls import source_of
from phalanx._src.tools.migrate.names import RefusedError, UsedNames, dotted

_SESSIONS = {
    "Graph", "InteractiveSession", "Session", "disable_eager_execution", "disable_v2_behavior",
    "get_default_graph", "get_variable", "global_variables_initializer", "placeholder", "reset_default_graph",
    "variable_scope",
}  # fmt: skip


@final
class Refusals(cst.CSTVisitor):
    """Raises at the first reason why a program cannot be migrated.

    Args:
      names: the uses of TensorFlow.

    Raises:
      RefusedError: there is such a reason.
    """

    def __init__(self, names: UsedNames) -> None:
        super().__init__()
        self._names = names

    @override
    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:
        if isinstance(node.names, cst.ImportStar) and dotted(node.module).partition(".")[0] == "tensorflow":
            raise RefusedError(node, f"write the names instead of `{source_of(node)}`.")

    @override
    def visit_Call(self, node: cst.Call) -> None:
        name, values = dotted(node.func), [arg.value for arg in node.args]
        if name in {"eval", "exec"} and self._names.bindings:
            raise RefusedError(node, f"`{name}` may use names that are not in the source.")
        reference = self._names.reference(values[0]) if values else None
        is_hidden = len(values) > 1 and not isinstance(values[1], cst.SimpleString)
        if name in {"getattr", "setattr", "hasattr"} and reference is not None and is_hidden:
            raise RefusedError(
                node, f"`{source_of(node)}` uses a name that is not in the source. Write {reference.path}.name."
            )
        # In the text of the call, because the name may be a keyword argument or a part of an expression.
        if name.rpartition(".")[2] in {"__import__", "import_module"} and "tensorflow" in source_of(node):
            raise RefusedError(node, f"write `import tensorflow as tf` instead of `{source_of(node)}`.")

    @override
    def visit_Attribute(self, node: cst.Attribute) -> None:
        self._look_at(node)

    @override
    def visit_Name(self, node: cst.Name) -> None:
        self._look_at(node)

    def _look_at(self, node: cst.Name | cst.Attribute) -> None:
        reference = self._names.reference(node)
        if reference is not None:
            head, _, last = reference.path.rpartition(".")
            if last in _SESSIONS and head in {"tf", "tf.compat.v1"}:
                raise RefusedError(
                    node,
                    f"{reference.path} belongs to sessions of TensorFlow 1. Run the program in TensorFlow 2 first: "
                    "https://www.tensorflow.org/guide/migrate",
                )
