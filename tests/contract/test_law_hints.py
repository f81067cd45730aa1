"""Law 5, for hints: what they show exists, and an argument that is replaced by what its error shows is accepted."""

import ast
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from bad_groups import GROUPS, answers
from bad_values import Hung, answer

import phalanx
from phalanx import errors

SOURCES = Path(phalanx.__file__).parent
NAMESPACE = {
    **vars(phalanx.experimental),
    **{name: getattr(phalanx, name) for name in (*phalanx.__all__, *phalanx._ROOMS)},
    "phalanx": phalanx,
    "keras": keras,
    "jax": jax,
    "jnp": jnp,
    "np": np,
}


def texts_of(node):
    """Returns the texts that an expression of a hint may be, with `X` for what is put into them."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return ["".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)]
    if isinstance(node, ast.IfExp):
        return [*texts_of(node.body), *texts_of(node.orelse)]
    return []


def hints():
    """Returns the hints of all errors, with their places."""
    found = []
    for file in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in errors.__all__ and len(node.args) == 3:
                place = f"{file.relative_to(SOURCES)}:{node.lineno}"
                found += [(place, text) for text in texts_of(node.args[2])]
    return found


def unknown_names(text):
    """Returns the dotted names of modules that a text shows, and that do not exist."""
    unknown = []
    for name in re.findall(r"\b(?:phalanx|keras|jax|jnp|np)(?:\.[A-Za-z_]\w*)+", text):
        value = NAMESPACE[name.partition(".")[0]]
        for attribute in name.split(".")[1:]:
            value = getattr(value, attribute, None)
        if value is None and "X" not in name:
            unknown.append(name)
    return unknown


def unknown_arguments(text):
    """Returns the keywords in the calls of a text that what is called does not take."""
    try:
        tree = ast.parse(text.split("; ")[0].strip())
    except SyntaxError:
        return []
    unknown = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.keywords):
        try:
            parameters = inspect.signature(eval(ast.unparse(call.func), NAMESPACE.copy())).parameters
        except (NameError, AttributeError, TypeError, ValueError):
            continue  # A variable of the user, or a function without a signature.
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            unknown += [
                f"{ast.unparse(call.func)}({k.arg}=)" for k in call.keywords if k.arg and k.arg not in parameters
            ]
    return unknown


def test_hints_show_what_exists():
    """Names of modules, and the arguments of what they call."""
    all_hints = hints()
    assert len(all_hints) > 500
    wrong = [(place, name) for place, text in all_hints for name in unknown_names(text) + unknown_arguments(text)]
    assert not wrong, "\n".join(map(str, wrong))


OTHERS = {
    "MirroredStrategy(layout)": "it needs a model axis, too",
    "TPUStrategy(local_updates)": "the strategy of the case has a layout, which excludes it",
    "TPUClusterResolver(tpu)": "it needs a TPU",
    "CheckpointManager(checkpoint_interval)": "it needs a step_counter, too",
    "scan(length)": "the rows of the case have another length",
    "value_and_grad(has_aux)": "the function of the case returns no tuple",
}
"""Arguments that depend on others, or on the machine."""


def shown_value(hint, parameter):
    """Returns a function that returns the value that a hint shows for an argument; None if it shows none that can be computed."""
    shown = re.search(rf"\b{parameter}=(.*?)(?:[;,]? or .*|, for .*|, \w+=.*|; .*)?$", hint, re.DOTALL)
    if shown is None or "..." in shown[1]:
        return None
    try:
        code = compile(shown[1], "a hint", "eval")
        eval(code, NAMESPACE.copy())
    except (SyntaxError, NameError):
        return None  # Words, or a variable of the user.
    return lambda: eval(code, NAMESPACE.copy())


def is_about(error, parameter):
    """Whether an error is one of Phalanx about an argument. test_law_bad_values.py looks for others."""
    return isinstance(error, errors.PhalanxError) and f"{parameter}=" in error.asked


def followed(case, parameter, error):
    """Returns the error that is left after the hints of an error were followed, twice at most; None if there is none."""
    for _ in range(2):
        make = shown_value(error.hint, parameter)
        if make is None:
            return error
        error = answer(case, parameter, make())
        assert not isinstance(error, Hung)
        if not is_about(error, parameter):
            return None
    return error


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.cover(["group"], {group for group in GROUPS if not group.endswith("_x1")})
def test_hints_can_be_followed(group):
    """An argument with the value that the hint shows is accepted, perhaps after a second hint."""
    wrong = []
    cases = GROUPS[group]()
    given = {(name, p, e.hint): e for (name, p, _), e in answers(group).items() if is_about(e, p)}
    for (name, parameter, hint), error in given.items():
        if f"{name}({parameter})" in OTHERS or shown_value(hint, parameter) is None:
            continue
        if (left := followed(cases[name], parameter, error)) is not None:
            wrong.append(f"{name}({hint}): {left!r:.300}")
    assert not wrong, "\n".join(wrong)
