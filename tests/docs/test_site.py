"""The site builds without a warning, has every public name and page, and loads nothing from elsewhere."""

import functools
import importlib.util
import inspect
import os
import re
import runpy
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import phalanx

ROOT = Path(__file__).parents[2]
NAMES = runpy.run_path(str(ROOT / "docs/public_names.py"))["public_names"]()
DEADLINE_S = 600  # On a busy machine; alone, it takes less than a tenth of it.


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built as `make docs` does."""
    if importlib.util.find_spec("sphinx") is None:
        pytest.skip('Sphinx is not installed: pip install ".[docs]"')
    folder = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "sphinx",
            "-q",
            "-W",
            "--keep-going",
            "-d",
            folder / "doctrees",
            ROOT / "docs",
            folder / "html",
        ],
        env={**os.environ, "PYTHONWARNINGS": "default"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "html"


def objects_of(site):
    """Returns the names in the inventory that other projects link to."""
    data = (site / "objects.inv").read_bytes()
    header = b"".join(data.splitlines(keepends=True)[:4])
    lines = zlib.decompress(data[len(header) :]).decode().splitlines()
    return {name for name, kind, *_ in map(str.split, lines) if kind.startswith("py:")}


@pytest.mark.exhaustive("make docs")
def test_every_public_name_is_in_the_reference(site):
    """Each name of each public `__all__`, and each of `phalanx.nn`, `testing` and `errors`, has an entry of its own."""
    assert not sorted({*NAMES} - objects_of(site))


@pytest.mark.exhaustive("make docs")
def test_every_page_is_in_the_site(site):
    """Each Markdown page below docs has become a page. (That it is in a table of contents is what the build checks.)"""
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")}
    assert pages <= {page.relative_to(site) for page in site.rglob("*.html")}


@pytest.mark.exhaustive("make docs")
def test_nothing_is_loaded_from_elsewhere(site):
    """Scripts, styles, fonts and images are files of the site."""
    loaded = re.compile(
        r"""<(?:script|img|iframe)\b[^>]*\bsrc="(?:https?:)?//|<link\b[^>]*\bhref="(?:https?:)?//|@import|url\(["']?(?:https?:)?//"""
    )
    files = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert not [
        f"{file.name}: {found[0]}" for file in files if (found := loaded.search(file.read_text(encoding="utf-8")))
    ]


def test_every_all_is_public():
    """Each module that has an `__all__` is reached from `phalanx.__all__`: the reference has no blind spot."""
    modules = {value.__name__ for value in NAMES.values() if inspect.ismodule(value)} | {"phalanx.api"}
    source = ROOT / "src"
    for file in source.rglob("*.py"):
        if re.search(r"^__all__ = ", file.read_text(encoding="utf-8"), re.MULTILINE):
            module = ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
            assert module in modules


def test_names_that_refer_to_another_are_the_same():
    """ "The same class as" is true, for each of the names that are described once."""
    pattern = r"^\.\. py:\w+:: (\w+)\n   :module: (\S+)\n\n   The same \w+ as `(\S+)`\.$"
    pairs = [
        (f"{module}.{name}", other)
        for page in (ROOT / "docs/api").glob("*.md")
        for name, module, other in re.findall(pattern, page.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert len(pairs) > 10
    assert all(NAMES[one] is NAMES[other] for one, other in pairs)


def test_hooks_of_a_strategy():
    """The hooks on the page are those that the class names. Each exists, and may be overridden."""
    page = (ROOT / "docs/extend.md").read_text(encoding="utf-8")
    table = page.partition("## Public hooks")[2].partition("\n## ")[0]
    hooks = re.findall(r"^\| `(\w+)", table, re.MULTILINE)
    (named,) = re.findall(r"must override .*?\n\n", inspect.getdoc(phalanx.Strategy), re.DOTALL)
    assert {*hooks} == {*re.findall(r"`(\w+)`", named)}
    for hook in hooks:
        member = inspect.getattr_static(phalanx.Strategy, hook)
        function = functools.reduce(lambda found, name: getattr(found, name, found), ["fget"], member)
        assert not getattr(function, "__final__", False), hook
