"""A module's tests stand where the module stands, and the names of tests say what holds."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SOURCES = TESTS.parent / "src" / "phalanx"
UNIT_TESTS = sorted((TESTS / "unit").rglob("test_*.py"))


def module_of(path):
    """Returns the module or package that a file of unit tests is about."""
    relative = path.relative_to(TESTS / "unit")
    module = SOURCES / relative.with_name(relative.name.removeprefix("test_"))
    return module if module.is_file() else module.with_suffix("") / "__init__.py"


def names_of_tests(path):
    """Returns the names of the functions, and of the methods of classes of tests, that pytest would run."""
    for node in ast.parse(path.read_text()).body:
        holders = [node] if isinstance(node, ast.FunctionDef) else []
        if isinstance(node, ast.ClassDef) and (node.name.startswith("Test") or path.name == "laws.py"):
            holders = [method for method in node.body if isinstance(method, ast.FunctionDef)]
        yield from (f.name for f in holders if f.name.startswith("test_"))


@pytest.mark.parametrize("path", UNIT_TESTS, ids=lambda path: str(path.relative_to(TESTS)))
def test_unit_tests_mirror_the_modules(path):
    """`tests/unit/<room>/test_<module>.py` has its `src/phalanx/<room>/<module>.py`."""
    assert module_of(path).is_file(), f"there is no {module_of(path).relative_to(SOURCES.parent)}"


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_names_have_three_words(path):
    """A failed test is shown by its name alone: one or two words do not say what must hold."""
    assert [name for name in names_of_tests(path) if len(name.split("_")) < 4] == []
