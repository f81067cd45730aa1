"""Measures what the tests protect: applies small faults to a copy of the sources, one at a time, and runs tests on each.

`make mutants` or `python -m tests.mutants` runs the faults of mutants_table.py, and for each one the tests that its entry
names, up to the first that fails. A line per fault says which test noticed it and after how many seconds, or SURVIVED.

    python -m tests.mutants --sample 10             # ten faults at random
    python -m tests.mutants --only checkpoint       # faults whose entry has that word
    python -m tests.mutants --all-tests             # faults that survive their own tests meet all other tests too
    python -m tests.mutants --suite ../old-checkout # runs the tests of another checkout on the sources of this one

Tests that take longer than the bound are ended, and have noticed the fault. At the end, the tests that noticed a fault
run again without one: a test that fails in any case notices nothing. The exit code is 0 if each fault is noticed, 1 if
one survives, and 2 if an entry does not fit the sources or a test fails without a fault.
"""

import argparse
import ast
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.mutants_table import FAULTS, Fault

ROOT = Path(__file__).parents[1]
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", ".hypothesis", ".*_cache", "build", "out", "results", ".peers")
_PRINT_PATH = "import phalanx, subprocess, sys; print(phalanx.__file__, flush=True)"
_PRINT_PATHS = f"{_PRINT_PATH}; subprocess.run([sys.executable, '-c', {_PRINT_PATH!r}], check=True)"
_NOT_THE_TABLE = "--ignore=tests/contract/test_mutants.py"  # It would notice every fault.
_HOW = re.compile(r"^(hang|exit code -?\d+) in ")


class DoesNotFitError(Exception):
    """An entry of the table, or a test that it names, does not fit the sources."""


def faulty_source(sources: Path, fault: Fault) -> tuple[Path, str]:
    """Returns the module of a fault, and its text with the fault.

    Raises:
        DoesNotFitError: The text is not exactly once in one function of that name, or the result cannot be parsed.
    """
    module, name = fault.function.split(":")
    times, found = 0, (sources, "")
    for path in [*sources.rglob(f"{module}.py"), *sources.rglob(f"{module}/__init__.py")]:
        lines = path.read_text().splitlines(keepends=True)
        for node in _definitions("".join(lines), name):
            definition = "".join(lines[node.lineno - 1 : node.end_lineno])
            if fault.text in definition:
                changed = definition.replace(fault.text, fault.replacement)
                times += definition.count(fault.text)
                found = path, "".join([*lines[: node.lineno - 1], changed, *lines[node.end_lineno :]])
    if times != 1:
        raise DoesNotFitError(f"{fault.name}: {fault.function} has {fault.text!r} {times} times")
    try:
        ast.parse(found[1])
    except SyntaxError as error:
        raise DoesNotFitError(f"{fault.name}: the result cannot be parsed: {error}") from error
    return found


def _definitions(text: str, name: str) -> list[ast.FunctionDef | ast.ClassDef]:
    nodes: list[ast.AST] = [ast.parse(text)]
    for part in name.split("."):
        nodes = [child for node in nodes for child in ast.walk(node) if getattr(child, "name", None) == part]
    return [node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]


def tests_of(fault: Fault, suite: Path) -> list[str]:
    """Returns the paths of a fault's tests. Another checkout may lack some of them, but not all.

    Raises:
        DoesNotFitError: A path does not exist.
    """
    paths = [f"tests/{path}" for path in fault.tests.split()]
    existing = [path for path in paths if (suite / path).exists()]
    if not existing or (suite == ROOT and existing != paths):
        raise DoesNotFitError(f"{fault.name}: not all of {paths} exist")
    return existing


class Copy:
    """A copy of a checkout with the sources of this one, which have at most one fault at a time."""

    def __init__(self, folder: Path, suite: Path) -> None:
        shutil.copytree(suite, folder, ignore=_LEFT_OUT)
        shutil.rmtree(folder / "src")
        self._folder, self._sources = folder, Path(shutil.copytree(ROOT / "src", folder / "src"))
        # Most faults leave most programs as they are, and these have been compiled before.
        programs = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "programs")}
        limits = {f"JAX_PERSISTENT_CACHE_MIN_{name}": "-1" for name in ("COMPILE_TIME_SECS", "ENTRY_SIZE_BYTES")}
        self._environment = {**os.environ, **programs, **limits, "PYTHONPATH": str(self._sources)}
        command = [sys.executable, "-c", _PRINT_PATHS]
        imported = subprocess.check_output(command, cwd=folder, env=self._environment, text=True).split()
        if imported != [str(self._sources / "phalanx" / "__init__.py")] * 2:
            raise DoesNotFitError(f"Python imports {imported} instead of the copy in {self._sources}")

    @contextmanager
    def with_fault(self, fault: Fault) -> Iterator[None]:
        """Applies a fault to the sources, and removes it."""
        path, text = faulty_source(self._sources, fault)
        original, status = path.read_text(), path.stat()
        path.write_text(text)
        try:
            yield
        finally:
            path.write_text(original)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def failures(self, arguments: Sequence[str], bound_s: float) -> list[str]:
        """Runs pytest, and returns the tests that fail, or the one that ends the process or does not end in time."""
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", _NOT_THE_TABLE, *arguments]
        with (self._folder / "output.txt").open("w") as output:
            process = subprocess.Popen(
                command, cwd=self._folder, env=self._environment, stdout=output, stderr=output, start_new_session=True
            )
            code = _exit_code(process, bound_s)
        text = Path(output.name).read_text(errors="replace")
        if code in (4, 5):  # A wrong path, or no tests.
            raise DoesNotFitError(f"{' '.join(command)}:\n{text[-2000:]}")
        if code in (0, 1, 2):
            return re.findall(r"^(?:FAILED|ERROR) (\S+?\.py.*?)(?: - .*)?$", text, re.MULTILINE) if code else []
        started = re.findall(r"^(\S+\.py::.*?)(?: (?:PASSED|SKIPPED|FAILED|ERROR).*)?$", text, re.MULTILINE)
        return [f"{'hang' if code is None else f'exit code {code}'} in {(started or arguments)[-1].strip()}"]


def _exit_code(process: subprocess.Popen[bytes], bound_s: float) -> int | None:
    try:
        return process.wait(bound_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)  # pytest ends its fixtures.
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def measure(faults: Sequence[Fault], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs the tests on each fault, and returns a record for each, with the tests that noticed it."""
    suite, copies = options.suite.resolve(), queue.Queue[Copy]()

    def noticed(fault: Fault) -> dict[str, Any]:
        copy, start = copies.get(), time.monotonic()
        with copy.with_fault(fault):
            failures = copy.failures(["-x", "-n", "0", *tests_of(fault, suite)], options.bound)
            if not failures and options.all_tests:
                failures = copy.failures(["-x", "-n", "3", "--dist", "loadscope"], 20 * options.bound)
        copies.put(copy)
        seconds = round(time.monotonic() - start)
        print(f"{seconds:6} s  {fault.name}: {failures[0] if failures else 'SURVIVED'}", flush=True)
        return {"name": fault.name, "function": fault.function, "noticed_by": failures[:1], "seconds": seconds}

    for fault in faults:
        faulty_source(ROOT / "src", fault)
        tests_of(fault, suite)
    with tempfile.TemporaryDirectory(prefix="phalanx-mutants-", ignore_cleanup_errors=True) as folder:
        for i in range(options.jobs):
            copies.put(Copy(Path(folder, str(i)), suite))
        with ThreadPoolExecutor(options.jobs) as pool:
            outcomes = list(pool.map(noticed, faults))
        tests = sorted({_HOW.sub("", test) for outcome in outcomes for test in outcome["noticed_by"]})
        failing = copies.get().failures(["-n", "0", *tests], 20 * options.bound) if tests else []
    if failing:
        raise DoesNotFitError(f"these tests fail without a fault too: {failing}")
    return outcomes


def main() -> int:
    """Reads the command line, measures, and prints a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, help="run so many faults, chosen at random")
    parser.add_argument("--seed", type=int, help="of the choice")
    parser.add_argument("--only", default="", metavar="WORD", help="run the faults whose entry has that word")
    parser.add_argument("--all-tests", action="store_true", help="run all tests on faults that survive their own")
    parser.add_argument("--suite", type=Path, default=ROOT, help="the checkout whose tests run")
    parser.add_argument("--jobs", type=int, default=2, help="how many faults run at a time")
    parser.add_argument("--bound", type=float, default=300, help="seconds until the tests of a fault are ended")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if options.only in str(fault)]
    if not faults:
        parser.error(f"no entry has the word {options.only!r}")
    if options.sample is not None:
        faults = random.Random(options.seed).sample(faults, min(options.sample, len(faults)))
    try:
        outcomes = measure(faults, options)
    except DoesNotFitError as error:
        parser.exit(2, f"{error}\n")
    if options.json:
        options.json.write_text(json.dumps(outcomes, indent=1))
    survivors = [outcome["name"] for outcome in outcomes if not outcome["noticed_by"]]
    print(f"{len(outcomes) - len(survivors)} of {len(outcomes)} faults were noticed. Survivors: {survivors}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
