"""Counts what makes the sources of Phalanx hard to read, and fails if a count is above its limit.

`python -m tests.structure` prints a table, and what is counted with `--names`. A change that lowers a count lowers its limit too.
"""

import argparse
import ast
import io
import itertools
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src" / "phalanx"
PRONOUNS = {"found", "own", "given", "kept", "told", "heard", "asked", "brought", "handed", "wanted", "others", "mine"}
"""Names that do not say of what they are the value."""
MUTABLE = {
    "bytearray",
    "count",
    "defaultdict",
    "deque",
    "dict",
    "list",
    "local",
    "set",
    "Counter",
    "Event",
    "Lock",
    "OrderedDict",
    "RLock",
}
MUTABLE |= {"WeakKeyDictionary", "WeakSet", "WeakValueDictionary"}
"""Functions whose results change."""

TWICE_IN_TENSORFLOW = {"MultiWorkerMirroredStrategy", "RunConfig", "TPUStrategy"}

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Sources:
    """All modules, parsed."""

    def __init__(self) -> None:
        self.texts = {path.relative_to(SOURCES): path.read_text() for path in sorted(SOURCES.rglob("*.py"))}
        self.trees = {path: ast.parse(text) for path, text in self.texts.items()}

    def nodes(self, *kinds: type) -> Iterator[tuple[Path, ast.AST]]:
        """Yields the nodes of some types, with the modules in which they are."""
        for path, tree in self.trees.items():
            yield from ((path, node) for node in ast.walk(tree) if isinstance(node, kinds))

    def lines(self) -> Iterator[tuple[Path, str]]:
        """Yields all lines."""
        for path, text in self.texts.items():
            yield from ((path, line) for line in text.splitlines())


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [x for target in node.targets for x in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr | ast.For) else []


def names_of_the_root(sources: Sources) -> list[str]:
    """The modules and packages that `ls src/phalanx` shows."""
    return [path.name for path in SOURCES.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]


def mutable_names(sources: Sources) -> list[str]:
    """Names of modules whose values change, or are rebound by a function."""
    found = []
    for path, tree in sources.trees.items():
        rebound = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
        for node in tree.body:
            value = getattr(node, "value", None)
            called = value.func if isinstance(value, ast.Call) else None
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            is_mutable = isinstance(value, ast.List | ast.Dict | ast.Set) or name in MUTABLE
            for target in _targets(node):
                if isinstance(target, ast.Name) and not target.id.strip("_").isupper() and target.id != "__all__":
                    found += [f"{path}: {target.id}"] * (is_mutable or target.id in rebound)
    return found


def _methods(node: ast.ClassDef) -> list[str]:
    return [x.name for x in node.body if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)]


def classes_of_many_methods(sources: Sources) -> list[str]:
    """More than 20."""
    return [f"{path}: {c.name} {len(_methods(c))}" for path, c in sources.nodes(ast.ClassDef) if len(_methods(c)) > 20]


def classes_of_many_fields(sources: Sources) -> list[str]:
    """More than 15 attributes that its methods set."""
    found = []
    for path, node in sources.nodes(ast.ClassDef):
        fields = {
            target.attr
            for statement in ast.walk(node)
            for target in _targets(statement)
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
        }
        found += [f"{path}: {node.name} {len(fields)}"] * (len(fields) > 15)
    return found


def class_names_used_twice(sources: Sources) -> list[str]:
    """The same name for two classes, but for those that tf.distribute and tf.estimator have twice."""
    names = Counter(node.name for _, node in sources.nodes(ast.ClassDef))
    return [name for name, times in names.items() if times > 1 and name not in TWICE_IN_TENSORFLOW]


def pronouns(sources: Sources) -> list[str]:
    """Assignments to names that say nothing."""
    kinds = (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.For)
    targets = [(path, t) for path, node in sources.nodes(*kinds) for t in _targets(node)]
    return [
        f"{path}:{t.lineno} {t.id}" for path, t in targets if isinstance(t, ast.Name) and t.id.strip("_") in PRONOUNS
    ]


def attributes_on_objects_of_keras(sources: Sources) -> list[str]:
    """Attributes that Phalanx writes on the objects of others."""
    return sorted({name for _, line in sources.lines() for name in re.findall(r"\b_phalanx_\w+", line)})


def lines_with_any(sources: Sources) -> list[str]:
    """Arguments and results of unknown types."""
    return [f"{path}: {line.strip()}" for path, line in sources.lines() if re.search(r": Any\b|-> Any\b", line)]


def _statements(tree: ast.Module, text: str) -> list[tuple[int, str]]:
    """Returns the lines of a module, with their numbers, that say what to do: no imports, signatures, docstrings and comments."""
    declarations: set[int] = set()
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            declarations |= set(range(node.lineno, (node.end_lineno or 0) + 1))
        elif isinstance(node, _Definition):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            declarations |= set(range(first, node.body[0].lineno))
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if number not in declarations]
    return [(number, line) for number, line in lines if re.search(r"\w", line) and not line.startswith("#")]


def clone_pairs(sources: Sources) -> list[str]:
    """Two places with the same six lines of statements, or more."""
    places: dict[tuple[str, ...], list[tuple[Path, int]]] = defaultdict(list)
    for path, tree in sources.trees.items():
        lines = _statements(tree, sources.texts[path])
        for first in range(len(lines) - 5):
            places[tuple(line for _, line in lines[first : first + 6])].append((path, lines[first][0]))
    pairs = [pair for same in places.values() for pair in itertools.combinations(same, 2)]
    return [f"{a}:{i} ~ {b}:{j}" for (a, i), (b, j) in pairs if a != b or abs(i - j) > 5]


def missing_comments(sources: Sources) -> list[str]:
    """One for each comment that is missing to five in 100 lines of code."""
    code, comments = 0, 0
    for path, tree in sources.trees.items():
        docs = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | _Definition) and ast.get_docstring(node, clean=False) is not None:
                docs |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        lines = set()
        for token in tokenize.generate_tokens(io.StringIO(sources.texts[path]).readline):
            if token.type == tokenize.COMMENT:
                comments += token.start[0] > 1  # The first line is the licence.
            elif token.string.strip():
                lines |= set(range(token.start[0], token.end[0] + 1))
        code += len(lines - docs)
    return ["a comment"] * (code // 20 - comments)


def all_lines(sources: Sources) -> list[str]:
    """Of all sources."""
    return ["a line" for _ in sources.lines()]


LIMITS: dict[Callable[[Sources], list[str]], tuple[int, int]] = {
    names_of_the_root: (20, 20),
    mutable_names: (20, 20),
    classes_of_many_methods: (6, 6),
    classes_of_many_fields: (0, 0),
    class_names_used_twice: (0, 0),
    pronouns: (1, 40),
    attributes_on_objects_of_keras: (0, 0),
    clone_pairs: (1, 20),
    lines_with_any: (295, 300),
    missing_comments: (0, 0),
    all_lines: (78_245, 55_500),
}
"""For each count, the limit of today and the goal."""


def main() -> int:
    """Prints the table. Returns 1 if a count is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", metavar="COUNT", help="print what one of the counts has counted")
    options = parser.parse_args()
    sources, too_many = Sources(), 0
    for count, (limit, goal) in LIMITS.items():
        counted = count(sources)
        if options.names == count.__name__:
            print(*counted, sep="\n")
        too_many += len(counted) > limit
        mark = "  TOO MANY" if len(counted) > limit else ""
        print(f"{len(counted):7,}  limit {limit:7,}  goal {goal:7,}  {count.__name__.replace('_', ' ')}{mark}")
    return too_many > 0


if __name__ == "__main__":
    sys.exit(main())
