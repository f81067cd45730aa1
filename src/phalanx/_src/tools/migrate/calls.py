# SPDX-License-Identifier: Apache-2.0
"""Calls with the arguments of TensorFlow, as calls with the arguments of their targets."""

import ast
import functools
import re
from collections.abc import Mapping, Sequence
from typing import final

import libcst as cst
from typing_extensions import override

from phalanx._src.tools.migrate.table import Argument, Row

_PLACE = re.compile(r"\{(\w+)(?:=([^}]*))?\}")
_ATOMS = (cst.Name, cst.Attribute, cst.Call, cst.Subscript, cst.BaseNumber, cst.BaseString, cst.List, cst.Dict, cst.Set)
_NO_SPACE = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))


@final
class MismatchError(Exception):
    """A call whose arguments do not fit a row of the table. The text says why."""


def source_of(node: cst.CSTNode) -> str:
    """Returns the source of a node."""
    return cst.Module([]).code_for_node(node)


def migrated(
    rows: Sequence[Row], call: cst.Call, func: cst.BaseExpression | None = None
) -> tuple[Row, cst.BaseExpression]:
    """Returns the row that fits a call of TensorFlow, and the call of its target.

    Args:
      rows: the rows of the name that is called.
      call: the call.
      func: how the program spells the target already. None to spell it out.

    Raises:
      MismatchError: no row fits the arguments.
    """
    reasons = []
    for row in rows:
        try:
            bound = _bound(row, call.args)
        except MismatchError as e:
            reasons.append(str(e))
            continue
        if row.kind == "none":
            reasons.append(row.note)
            continue
        if row.kind == "name":
            target = func or cst.parse_expression(row.target)
            # The call is changed and not built, so that its comments and line breaks remain.
            return row, call.with_changes(func=target, args=_arguments(row, call.args, bound))
        receiver = {"self": cst.Arg(call.func.value)} if isinstance(call.func, cst.Attribute) else {}
        return row, _filled(row.target, {**receiver, **{argument.name: arg for argument, arg in bound}})
    raise MismatchError(reasons[-1])


_Bound = list[tuple[Argument, cst.Arg]]


def _bound(row: Row, args: Sequence[cst.Arg]) -> _Bound:
    """Returns each argument that the call passes and the row knows."""
    by_name = {argument.name: argument for argument in row.arguments}
    places = [argument for argument in row.arguments if not argument.name.startswith("*")]
    variadic = next((argument for argument in row.arguments if argument.name.startswith("*")), None)
    if variadic is not None:
        places = list(row.arguments[: row.arguments.index(variadic)])
    bound: _Bound = []
    position = 0
    for arg in args:
        if arg.star == "**" or (arg.star and variadic is None):
            if row.is_open and not row.arguments:
                continue
            raise MismatchError(f"write the arguments of `{source_of(arg).strip(', ')}` one by one")
        if arg.keyword is not None:
            argument = by_name.get(arg.keyword.value)
            if argument is None and not row.is_open:
                raise MismatchError(f"the argument `{arg.keyword.value}` has no counterpart")
        elif row.is_open:
            argument = None
        elif position < len(places) and not arg.star:
            argument, position = places[position], position + 1
        else:
            argument = variadic
            if argument is None:
                raise MismatchError(f"it takes at most {len(places)} positional arguments")
        if argument is not None:
            _check(argument, arg)
            bound.append((argument, arg))
    missing = {argument.name for argument in row.arguments if argument.is_required} - {a.name for a, _ in bound}
    if missing:
        raise MismatchError(f"it has no counterpart without `{'`, `'.join(sorted(missing))}`")
    return bound


def _check(argument: Argument, arg: cst.Arg) -> None:
    if argument.is_refused and not _is_none(arg.value):
        raise MismatchError(f"the argument `{argument.name}` has no counterpart")
    if argument.value is not None and _literal(source_of(arg.value)) != _literal(argument.value):
        raise MismatchError(f"the argument `{argument.name}` has no counterpart unless it is {argument.value}")


def _is_none(node: cst.BaseExpression) -> bool:
    return isinstance(node, cst.Name) and node.value == "None"


def _literal(text: str) -> object:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    # With the type, because `1 == True` in Python.
    return (type(value).__name__, value)


def _arguments(row: Row, args: Sequence[cst.Arg], bound: _Bound) -> list[cst.Arg]:
    """Returns the arguments for the target."""
    of = {id(arg): argument for argument, arg in bound}
    leading = {argument.name for argument in row.arguments[: row.leading]}
    changed: list[cst.Arg] = []
    is_spread = True
    for arg in args:
        argument = of.get(id(arg))
        if argument is None or argument.name.startswith("*"):
            changed.append(arg)
        elif argument.target == "" or argument.is_refused:
            # Arguments behind a dropped one would move forward, so they are passed by keyword.
            is_spread = False
            continue
        elif (
            arg.keyword is None
            and argument.name in leading
            and is_spread
            or arg.keyword is not None
            and arg.keyword.value == argument.target
        ):
            changed.append(arg)
        else:
            equal = _NO_SPACE if arg.keyword is None else arg.equal
            changed.append(arg.with_changes(keyword=cst.Name(argument.target), equal=equal))
    if args and changed and of.get(id(args[-1])) is not None and len(changed) < len(args):
        # What follows the last argument (a comma, a line break) stays behind the last one.
        changed[-1] = changed[-1].with_changes(comma=args[-1].comma, whitespace_after_arg=args[-1].whitespace_after_arg)
    return changed


@functools.cache
def _template(text: str) -> cst.BaseExpression:
    return cst.parse_expression(_PLACE.sub(lambda match: f"place_{match.group(1)}", text))


def _filled(text: str, args: Mapping[str, cst.Arg]) -> cst.BaseExpression:
    """Returns the expression of a template."""
    values: dict[str, cst.BaseExpression] = {}
    places = _PLACE.findall(text)
    wrapped: list[tuple[str, cst.BaseExpression]] = []
    for name, default in places:
        if name in args:
            value = args[name].value
            if sum(place == name for place, _ in places) > 1 and not isinstance(value, cst.Name | cst.BaseNumber):
                # The template needs it twice, but it may only be computed once.
                if name not in dict(wrapped):
                    wrapped.append((name, value))
                value = cst.Name(f"_{name}")
        elif default:
            value = cst.parse_expression(default)
        else:
            raise MismatchError(f"it has no counterpart without `{name}`")
        values[name] = value
    expression = _template(text).deep_clone().visit(_Filling(values))
    assert isinstance(expression, cst.BaseExpression)
    if wrapped:
        parameters = ", ".join(f"_{name}" for name, _ in wrapped)
        function = cst.parse_expression(f"(lambda {parameters}: 0)")
        function = function.with_changes(body=expression)
        return cst.Call(function, [cst.Arg(value) for _, value in wrapped])
    return in_parentheses(expression)


def as_function(row: Row) -> cst.BaseExpression:
    """Returns the template of a row as a function of the arguments that must be passed."""
    required = [argument.name for argument in row.arguments if argument.is_required]
    # The template has TensorFlow's defaults of all other arguments.
    body = _filled(row.target, {name: cst.Arg(cst.Name(name)) for name in required})
    function = cst.ensure_type(cst.parse_expression(f"lambda {', '.join(required)}: 0"), cst.Lambda)
    return function.with_changes(body=body)


def in_parentheses(node: cst.BaseExpression) -> cst.BaseExpression:
    """Returns an expression that can stand everywhere."""
    if isinstance(node, _ATOMS) or node.lpar:
        return node
    return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


@final
class _Filling(cst.CSTTransformer):
    """Puts arguments into the places of a template."""

    def __init__(self, values: Mapping[str, cst.BaseExpression]) -> None:
        super().__init__()
        self._values = values
        self._alone: set[int] = set()

    @override
    def visit_Arg(self, node: cst.Arg) -> None:
        self._alone.add(id(node.value))

    @override
    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        value = self._values.get(original_node.value.removeprefix("place_"))
        if value is None or not original_node.value.startswith("place_"):
            return updated_node
        # A generator needs its parentheses unless it is the only argument.
        is_alone = id(original_node) in self._alone and not isinstance(value, cst.GeneratorExp)
        clone = value.deep_clone()
        return clone if is_alone else in_parentheses(clone)
