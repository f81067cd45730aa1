"""The site builds without a warning, has every public name and page, and loads nothing from elsewhere."""

import functools
import html
import importlib.util
import inspect
import os
import re
import runpy
import subprocess
import sys
import zlib
from pathlib import Path
from urllib.parse import unquote

import click
import pytest

import phalanx
from phalanx._src.tools.cli import main

ROOT = Path(__file__).parents[2]
SEARCHES = {
    "out of memory": "troubleshooting",
    "hang": "troubleshooting",
    "elastic": "recovery",
    "FSDP": "model_parallel",
    "tensor parallel": "model_parallel",
    "CUDA": "install",
    "Slurm": "clusters",
    "resume": "saving",
    "TensorBoard": "summaries",
    "loss differs": "troubleshooting",
    "No module named tensorflow": "troubleshooting",
    "Kubernetes": "clusters",
    "checkpoint": "saving",
    "mixed precision": "mixed_precision",
    "gradient accumulation": "mixed_precision",
    "PyTorch": "from_lightning",
    "Horovod": "from_horovod",
    "pmap": "from_jax",
    "shard_map": "from_jax",
    "optax": "optax_and_flax",
    "preemption": "saving",
    "SIGTERM": "stopping",
    "port in use": "troubleshooting",
    "NaN": "troubleshooting",
    "is slow": "troubleshooting",
    "only one replica": "troubleshooting",
    "GPU": "install",
    "batch size": "input",
    "shuffle": "input",
    "TF_CONFIG": "multi_worker",
    "environment variables": "environment",
    "phalanx run": "command_line",
    "exit codes": "clusters",
    "profile": "speed",
    "Jupyter": "notebooks",
    "fault tolerance": "fault_tolerance",
    "parameter server": "parameter_servers",
    "Estimator": "from_estimator",
    "MirroredStrategy": "api/strategies",
    "DiLoCo": "communication",
    "wandb": "summaries",
    "logging": "summaries",
    "deterministic": "troubleshooting",
    "ZeRO": "model_parallel",
    "multi-node": "multi_worker",
    "LoRA": "kerashub",
    "KerasHub": "kerashub",
    "fine-tune Llama": "kerashub",
    "Gemma": "kerashub",
    "remat": "kerashub",
}
"""What people search for, and the page that answers."""
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


@pytest.mark.exhaustive("make docs")
def test_search_finds_the_right_page(site):
    """The page that answers is among the first three, as the search of the site ranks them."""
    from searching import Index

    index = Index(site)
    found = {query: index.pages_for(query)[:3] for query in SEARCHES}
    assert {query: pages for query, pages in found.items() if SEARCHES[query] not in pages} == {}


@pytest.mark.exhaustive("make docs")
def test_no_link_of_the_site_is_broken(site):
    """Each link to a page, a section or a file leads there."""
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    anchors = {page: {*re.findall(r'\bid="([^"]+)"', text)} for page, text in pages.items()}
    broken = []
    for page, text in pages.items():
        for link in re.findall(r'<(?:a|img)\b[^>]*?\b(?:href|src)="([^"]+)"', text):
            path, _, anchor = html.unescape(link).partition("#")
            if ":" in path.partition("/")[0]:
                continue
            target = (page.parent / unquote(path)).resolve() if path else page
            if not target.exists() or (anchor and target in anchors and unquote(anchor) not in anchors[target]):
                broken.append(f"{page.relative_to(site)}: {link}")
    assert broken == []


@pytest.mark.exhaustive("make docs")
def test_reference_has_every_option_of_every_command(site):
    """What `phalanx COMMAND --help` shows is on the page about the command line."""
    page = html.unescape(re.sub(r"<[^>]*>", "", (site / "command_line.html").read_text(encoding="utf-8")))
    commands = [main]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
        for parameter in command.params:
            if isinstance(parameter, click.Option) and command is not main:
                assert {*parameter.opts} <= {*re.findall(r"(?<!\S)--?[\w-]+", page)}, parameter.opts


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


def test_every_member_of_a_strategy_is_in_the_reference():
    """Those that programs use come first, so the page lists them one by one."""
    page = (ROOT / "docs/api/strategies.md").read_text(encoding="utf-8")
    first = re.search(r"autoclass:: phalanx\.Strategy\n\n((?:   .*\n|\n)+)", page)[1]
    listed = re.findall(
        r"::(?: phalanx\.Strategy\.| )(\w+)$", first + page.partition("## For authors")[2], re.MULTILINE
    )
    assert sorted(listed) == sorted(name for name in dir(phalanx.Strategy) if not name.startswith("_"))


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
