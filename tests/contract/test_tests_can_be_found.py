"""A module's tests stand where the module stands, and the names of tests say what holds."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
SOURCES = TESTS.parent / "src" / "phalanx"
FILES = sorted(TESTS.rglob("*.py"))
UNIT_TESTS = sorted((TESTS / "unit").rglob("test_*.py"))


def module_of(path):
    """Returns the module or package that a file of unit tests is about: of the engine, or of what stands on it."""
    relative = path.relative_to(TESTS / "unit")
    modules = [
        folder / relative.with_name(relative.name.removeprefix("test_")) for folder in (SOURCES / "_src", SOURCES)
    ]
    files = [file for module in modules for file in (module, module.with_suffix("") / "__init__.py")]
    return next((file for file in files if file.is_file()), files[0])


def names_of_tests(path):
    """Returns the names of the functions, and of the methods of classes of tests, that pytest would run."""
    for node in ast.parse(path.read_text()).body:
        holders = [node] if isinstance(node, ast.FunctionDef) else []
        if isinstance(node, ast.ClassDef) and (node.name.startswith("Test") or path.name == "laws.py"):
            holders = [method for method in node.body if isinstance(method, ast.FunctionDef)]
        yield from (f.name for f in holders if f.name.startswith("test_"))


def test_unit_tests_mirror_the_modules():
    """`tests/unit/<room>/test_<module>.py` has its `<room>/<module>.py` in `src/phalanx/_src`, or in `src/phalanx`."""
    assert [str(path) for path in UNIT_TESTS if not module_of(path).is_file()] == []


def test_names_have_three_words():
    """A failed test is shown by its name alone: one or two words do not say what must hold."""
    names = [f"{path}: {name}" for path in FILES for name in names_of_tests(path) if len(name.split("_")) < 4]
    assert names == []


def seconds_of_sleeps(path):
    """Returns the line and the seconds of each `sleep` in a file, also in the scripts that it holds as text."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for seconds in re.findall(r"sleep\(([\d_.]+)\)", line):
            yield f"{path}:{number}", float(seconds)


def test_nothing_sleeps_for_long():
    """A test waits for a condition. A process that sleeps for a minute or more does not wait: it is there to be killed."""
    assert [where for path in FILES for where, seconds in seconds_of_sleeps(path) if 1 < seconds < 60] == []


def marks_of_exhaustive_tests(path):
    """Yields the name of each test that only `make test-all` runs, or of its file, and what its mark says."""
    for instead, name in re.findall(r'exhaustive\("(.*?)"\)\n(?:@.*\n|[ )].*\n)*(?:def (\w+))?', path.read_text()):
        yield name or path.name, instead


def test_companions_run_in_make_test():
    """A mark names what shows the faults of its test, and that is no test which only `make test-all` runs."""
    marks = [mark for path in FILES for mark in marks_of_exhaustive_tests(path)]
    names = {name for name, _ in marks}
    assert len(names) > 40
    assert [mark for mark in marks if names & set(re.findall(r"test_\w+(?:\.py)?", mark[1]))] == []
