# SPDX-License-Identifier: Apache-2.0
"""Walks that only look at a module. The visits of libcst make each node again, and take ten times as long."""

import dataclasses
import functools
from collections.abc import Iterator

import libcst as cst

_OF_LAYOUT = ("Whitespace", "EmptyLine", "Paren", "Comma", "Semicolon", "Colon", "Dot]")


@functools.cache
def _fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    """Returns the fields of a kind of node that may hold other nodes, but for its layout."""
    # The layout holds no names, and is more than half of all nodes.
    return tuple(
        field.name
        for field in dataclasses.fields(kind)
        if field.type not in {str, bool} and not any(word in str(field.type) for word in _OF_LAYOUT)
    )


def children(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yields the children of a node, but for its layout."""
    for name in _fields(type(node)):
        value = getattr(node, name)
        if isinstance(value, cst.CSTNode):
            yield value
        elif isinstance(value, list | tuple):
            for item in value:
                if isinstance(item, cst.CSTNode):
                    yield item


def walk(node: cst.CSTNode, visitor: cst.CSTVisitor) -> None:
    """Shows a node and what it contains to a visitor, as `node.visit(visitor)` does."""
    if visitor.on_visit(node):
        for child in children(node):
            walk(child, visitor)
    visitor.on_leave(node)


def parents_of(module: cst.Module) -> dict[cst.CSTNode, cst.CSTNode]:
    """Returns the parent of each node."""
    parents: dict[cst.CSTNode, cst.CSTNode] = {}
    pending: list[cst.CSTNode] = [module]
    while pending:
        parent = pending.pop()
        for child in children(parent):
            parents[child] = parent
            pending.append(child)
    return parents
