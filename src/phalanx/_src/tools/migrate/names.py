# SPDX-License-Identifier: Apache-2.0
"""Names of a file that stand for names of TensorFlow, under any alias."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import final

import libcst as cst
from libcst.metadata import Assignment, BaseAssignment, ImportAssignment, Scope

from phalanx._src.tools.migrate.table import NameTable

Chain = cst.Name | cst.Attribute

_THE_SAME_IN_1 = tuple(f"tf.compat.v1.{name}" for name in ("config", "data", "distribute", "io", "keras"))
"""Modules of TensorFlow 1 whose names are also those of TensorFlow 2."""


@final
class RefusedError(Exception):
    """A file that cannot be migrated, and is left as it is.

    Args:
      node: where the reason stands.
      text: the reason, and what to write.
    """

    def __init__(self, node: cst.CSTNode, text: str) -> None:
        super().__init__(text)
        self.node, self.text = node, text


@final
@dataclass(frozen=True)
class Binding:
    """A local name that stands for a name of TensorFlow.

    Attributes:
      local: the local name.
      path: the name in TensorFlow, which begins with `tf`.
      target: what the local name stands for after the migration. Empty if all its uses are replaced.
      statement: the import, or the assignment, that binds it.
    """

    local: str
    path: str
    target: str
    statement: cst.CSTNode


@final
@dataclass(frozen=True)
class Reference:
    """A use of a name of TensorFlow.

    Attributes:
      path: the name in TensorFlow.
      binding: the local name with which it begins.
    """

    path: str
    binding: Binding

    def is_spelled(self, target: str) -> bool:
        """Whether the program names `target` already, because the import of the binding changes."""
        suffix = self.path.removeprefix(self.binding.path)
        return bool(self.binding.target) and self.binding.target + suffix == target


def dotted(node: cst.BaseExpression | None) -> str:
    """Returns the text of a chain of names. Empty if `node` is something else."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        head = dotted(node.value)
        return head and f"{head}.{node.attr.value}"
    return ""


def path_in_tensorflow(name: str) -> str:
    """Returns a qualified name as the table has it. Empty if it is not a name of TensorFlow."""
    if name == "tensorflow":
        return "tf"
    if not name.startswith("tensorflow."):
        return ""
    path = "tf." + name.removeprefix("tensorflow.")
    for prefix in ("tf.compat.v2", "tf._api.v2.v2", *_THE_SAME_IN_1):
        if path == prefix or path.startswith(prefix + "."):
            plain = prefix.replace("tf.compat.v1", "tf") if prefix in _THE_SAME_IN_1 else "tf"
            return plain + path.removeprefix(prefix)
    return path


def aliases_of(statement: cst.Import | cst.ImportFrom) -> Iterator[tuple[cst.ImportAlias, str, str]]:
    """Yields each alias of an import with its local name and its qualified name."""
    # A relative import is one of the program's own modules, even `from .tensorflow import x`.
    if isinstance(statement.names, cst.ImportStar) or (isinstance(statement, cst.ImportFrom) and statement.relative):
        return
    module = dotted(statement.module) if isinstance(statement, cst.ImportFrom) else ""
    for alias in statement.names:
        name = dotted(alias.name)
        local = dotted(alias.asname.name) if alias.asname and isinstance(alias.asname.name, cst.Name) else ""
        if module:
            yield alias, local or name, f"{module}.{name}"
        elif local:
            yield alias, local, name
        else:
            # `import a.b` binds `a`.
            head = name.partition(".")[0]
            yield alias, head, head


@final
class UsedNames:
    """The uses of TensorFlow in a module.

    Args:
      scopes: the scope of each node.
      parents: the parent of each node.
      table: the table of names.

    Raises:
      RefusedError: a local name stands for TensorFlow and for something else.
    """

    def __init__(
        self, scopes: Mapping[cst.CSTNode, Scope | None], parents: Mapping[cst.CSTNode, cst.CSTNode], table: NameTable
    ) -> None:
        self._scopes, self._parents, self._table = scopes, parents, table
        self.references: dict[int, Reference] = {}
        """For each use, by the id of its node, what it stands for."""
        self._seen: set[int] = set()
        self.bindings: dict[tuple[int, str], Binding] = {}
        self.assigned: dict[str, set[str]] = {}
        """For each local name, the qualified names of its imports; an empty string if it is assigned otherwise."""
        self.definitions: dict[int, list[cst.CSTNode]] = {}
        """For each use of a name, the functions and classes that it may stand for."""
        pending: list[tuple[BaseAssignment, Binding]] = []
        # The scopes are objects, so a set of them has no order.
        for scope in dict.fromkeys(scope for scope in scopes.values() if scope is not None):
            for assignment in scope.assignments:
                pending += self._look_at(assignment)
        while pending:
            assignment, binding = pending.pop()
            for access in assignment.references:
                # An alias may have aliases: `keras = tf.keras`, and then `layers = keras.layers`.
                pending += self._refer(access.node, access.referents, binding)

    def reference(self, node: cst.CSTNode) -> Reference | None:
        """Returns the TensorFlow name of a chain of names, or None."""
        return self.references.get(id(node))

    def paths(self) -> set[str]:
        """Returns all names of TensorFlow that the module uses."""
        return {reference.path for reference in self.references.values()}

    def _look_at(self, assignment: BaseAssignment) -> list[tuple[BaseAssignment, Binding]]:
        if not isinstance(assignment, Assignment):
            return []
        # The assignment of `import a.b` has the name `a.b`, but binds `a`.
        name = assignment.name.partition(".")[0]
        if not isinstance(assignment, ImportAssignment):
            self.assigned.setdefault(name, set()).add("")
            if isinstance(assignment.node, cst.FunctionDef | cst.ClassDef):
                for access in assignment.references:
                    self.definitions.setdefault(id(access.node), []).append(assignment.node)
            return []
        statement = assignment.node
        if not isinstance(statement, cst.Import | cst.ImportFrom):
            return []
        pairs: list[tuple[BaseAssignment, Binding]] = []
        for _, local, qualified in aliases_of(statement):
            # libcst has one assignment per alias, but the node of each is the statement with all of them.
            if local == name:
                self.assigned.setdefault(name, set()).add(qualified)
                if path := path_in_tensorflow(qualified):
                    pairs.append((assignment, self._bind(statement, local, path)))
        return pairs

    def _bind(self, statement: cst.CSTNode, local: str, path: str) -> Binding:
        rows = self._table.rows(path)
        target = rows[0].target if rows and rows[0].kind == "name" else ""
        # `jnp` and `np` are not modules, so `from jnp import sin` would fail.
        is_moved = target.rpartition(".")[2] == path.rpartition(".")[2] and not target.startswith(("jnp.", "np."))
        binding = Binding(local, path, target if is_moved else "", statement)
        return self.bindings.setdefault((id(statement), local), binding)

    def _refer(
        self, node: cst.CSTNode, referents: Collection[BaseAssignment], binding: Binding
    ) -> list[tuple[BaseAssignment, Binding]]:
        # After `import a.b`, libcst's access is the chain `a.b`. The walk below begins at its first name.
        while isinstance(node, cst.Attribute):
            node = node.value
        if not isinstance(node, cst.Name) or node not in self._parents or id(node) in self._seen:
            return []
        self._seen.add(id(node))
        self._require_one(node, referents, binding)
        chain: Chain = node
        self.references[id(chain)] = Reference(binding.path, binding)
        while isinstance(parent := self._parents[chain], cst.Attribute) and parent.value is chain:
            # Only the longest chain counts: `tf.keras` in the middle of `tf.keras.Model` is not to be replaced.
            del self.references[id(chain)]
            path = f"{binding.path}.{dotted(parent).removeprefix(node.value + '.')}"
            chain = parent
            self.references[id(chain)] = Reference(path_in_tensorflow(path.replace("tf", "tensorflow", 1)), binding)
        return self._alias(chain)

    def _require_one(self, node: cst.Name, referents: Collection[BaseAssignment], binding: Binding) -> None:
        for referent in referents:
            statement = referent.node if isinstance(referent, Assignment) else None
            imports = aliases_of(statement) if isinstance(statement, cst.Import | cst.ImportFrom) else ()
            paths = {path_in_tensorflow(qualified) for _, local, qualified in imports if local == node.value}
            # `try` and `except ImportError` may import the same module in two ways.
            if statement is not binding.statement and paths != {binding.path}:
                raise RefusedError(node, f"`{node.value}` is {binding.path} and something else. Use two names.")

    def _alias(self, chain: Chain) -> list[tuple[BaseAssignment, Binding]]:
        """Follows `layers = tf.keras.layers`, if nothing else is assigned to the name."""
        parent = self._parents[chain]
        if not (isinstance(parent, cst.Assign) and parent.value is chain and len(parent.targets) == 1):
            return []
        target, path = parent.targets[0].target, self.references[id(chain)].path
        scope = self._scopes.get(target)
        if not isinstance(target, cst.Name) or scope is None:
            return []
        rows, _ = self._table.find(path)
        assignments = [x for x in scope.assignments[target.value] if isinstance(x, Assignment) and x.scope is scope]
        # Other kinds of rows replace, mark or keep the value right here, so the alias itself needs no change.
        if len(assignments) != 1 or (rows and rows[0].kind != "name"):
            return []
        return [(assignments[0], self._bind(target, target.value, path))]
