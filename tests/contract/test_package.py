"""What a user installs: the wheel has everything, tells its types, and has the command line."""

import email
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest
import yaml
from tests.docs.test_pages import blocks, program_of

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = "https://example.com/owner/phalanx"
SCRIPT = """\
import numpy as np
import phalanx

strategy = phalanx.MirroredStrategy(["cpu:0"])
reveal_type(strategy)
with strategy.scope() as current:
    reveal_type(current)
reveal_type(phalanx.get_strategy())
dataset = strategy.experimental_distribute_dataset(np.zeros((4, 2)), batch_size=2)
reveal_type(iter(dataset))
"""


def test_release_runs_nothing_with_the_right_to_publish():
    """The job that may publish takes what another one has built. Nobody can replace the actions: each is named by its commit."""
    workflows = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    jobs = [job for workflow in workflows.values() for job in workflow["jobs"].values()]
    used = [step["uses"] for job in jobs for step in job["steps"] if "uses" in step]
    assert [name for name in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name)] == []
    (publishing,) = [job for job in jobs if "id-token" in job.get("permissions", {})]
    assert not any("run" in step for step in publishing["steps"])


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of a new environment with the wheel in it; what Phalanx needs comes from this environment."""
    folder = tmp_path_factory.mktemp("package")
    run = lambda *command: subprocess.run(command, cwd=folder, timeout=300, check=True, capture_output=True)  # noqa: E731
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_REPOSITORY", f"{REPOSITORY}/")
        run(*pip, "wheel", "--no-deps", "--wheel-dir", folder, str(ROOT))
    (wheel,) = folder.glob("phalanx-*.whl")
    venv.create(folder / "env")
    new = folder / "env/bin/python"
    run(*pip, "--python", str(new), "install", "--no-compile", "--no-deps", str(wheel))
    (packages,) = folder.glob("env/lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return new


def output_of(python, *arguments, **environment):
    """Returns what a Python process prints, without what PYTHONPATH names."""
    found = subprocess.run(
        [python, "-I", *arguments],
        cwd=python.parent,
        env=os.environ | environment,
        timeout=300,
        check=False,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_wheel_imports_in_a_new_environment(python):
    """What is imported is the wheel, not these sources."""
    where = output_of(python, "-c", "import phalanx; phalanx.MirroredStrategy; print(phalanx.__file__)")
    assert str(python.parents[1]) in where


def test_wheel_has_the_command_line(python):
    """`python -m phalanx` is the command `phalanx`, with the version of the wheel."""
    version = f"version {PROJECT['version']}\n"
    assert output_of(python, "-m", "phalanx", "--version") == f"python -m phalanx, {version}"
    command = output_of(
        python, "-c", "import os, sys; os.execv(sys.argv[1], sys.argv[1:])", python.with_name("phalanx"), "--version"
    )
    assert command == f"phalanx, {version}"
    assert "doctor" in output_of(python, "-m", "phalanx", "--help")


@pytest.mark.exhaustive("tests/docs/test_pages.py: the same program, and test_wheel_imports_in_a_new_environment")
def test_wheel_runs_the_programs_of_the_readme(python, tmp_path):
    """As the README says that they print."""
    (tmp_path / "readme.py").write_text(program_of("README.md"), encoding="utf-8")
    printed = output_of(python, tmp_path / "readme.py", PHALANX_CPU_DEVICES="2", JAX_PLATFORMS="cpu")
    for _, expected in blocks("README.md", "text"):
        assert expected in printed
        printed = printed.partition(expected)[2]


def test_wheel_tells_an_index_what_it_is(python):
    """Licence, versions of Python, extras, what it needs, and the README as its page. Its links lead to files of the tagged commit."""
    (file,) = python.parents[1].glob("lib/python*/site-packages/phalanx-*.dist-info/METADATA")
    metadata = email.message_from_string(file.read_text(encoding="utf-8"))
    assert (metadata["Version"], metadata["License-Expression"]) == (PROJECT["version"], "Apache-2.0")
    assert metadata["License-File"] == "LICENSE"
    assert metadata.get_all("Classifier") == PROJECT["classifiers"]
    assert metadata.get_all("Provides-Extra") == sorted(PROJECT["optional-dependencies"])
    needed = [text for text in metadata.get_all("Requires-Dist") if "extra ==" not in text]
    assert {re.split(r"[<>]", text)[0] for text in needed} == {
        re.split(r"[<>]", text)[0] for text in PROJECT["dependencies"]
    }
    assert metadata["Description-Content-Type"] == "text/markdown"
    page, tag = metadata.get_payload(), f"v{PROJECT['version']}"
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)#]+)", page)
    links += [("", text.split(", ")[1]) for text in metadata.get_all("Project-URL") if f"/{tag}/" in text]
    assert len(links) > 20
    for mark, address in links:
        folder = f"{REPOSITORY}/{'raw' if mark else 'blob'}/{tag}/"
        assert address.startswith(folder)
        assert (ROOT / address.removeprefix(folder)).is_file(), address
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert page.replace(f"{REPOSITORY}/raw/{tag}/", "").replace(f"{REPOSITORY}/blob/{tag}/", "") == readme


def test_image_gets_the_files_that_the_wheel_needs():
    """What the Dockerfile copies exists, and `.dockerignore` sends it: nothing but what is marked by `!`."""
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    files = {name for names in copied for name in names.split()}
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {name.removeprefix("!") for name in ignored if name.startswith("!")} == files
    assert all((ROOT / name).exists() for name in files)
    assert files > {PROJECT["license-files"][0], "README.md", "hatch_build.py", "pyproject.toml", "src"}


def test_devcontainer_installs_by_the_makefile():
    """Its command is a target of the Makefile, and its Python one of the classifiers."""
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    make, *targets = container["postCreateCommand"].split()
    subprocess.run([make, "--dry-run", *targets], cwd=ROOT, timeout=60, check=True, capture_output=True)
    version = container["image"].rpartition(":")[2]
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]


def test_versions_and_extras_are_the_same_everywhere():
    """Changelog, citation and the page about the installation."""
    assert f"version: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {PROJECT['version']} - " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `\[(\w+)\]`", page, re.MULTILINE)) == {*PROJECT["optional-dependencies"]} - {
        "docs",
        "test",
    }
    for text in PROJECT["dependencies"]:
        assert f"`{text}`" in page
    # pip only warns of an extra that does not exist.
    paths = [ROOT / "README.md", ROOT / "Makefile", *ROOT.glob("docs/**/*.md"), *ROOT.glob(".github/**/*.yml")]
    named = [
        re.findall(r"pip.* install\b.*[\".]\.?(?:phalanx|whl)?\[([a-z,]+)]", path.read_text(encoding="utf-8"))
        for path in paths
    ]
    extras = {extra for texts in named for text in texts for extra in text.split(",")}
    assert {"demo", "migrate", "ps", "test"} <= extras <= PROJECT["optional-dependencies"].keys()


@pytest.mark.exhaustive("make check, which checks types of the whole package")
def test_type_checker_sees_the_strategy(python, tmp_path):
    """mypy knows the types of a user's script, for the package has the marker `py.typed`."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ["-m", "mypy", "--python-executable", str(python), "--cache-dir", str(tmp_path / "cache"), "script.py"]
    found = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, timeout=300, check=False, capture_output=True, text=True
    )
    revealed = [
        line.partition('Revealed type is "')[2].rstrip('"') for line in found.stdout.splitlines() if "Revealed" in line
    ]
    assert revealed == [
        "phalanx._src.strategies.mirrored.MirroredStrategy",
        "phalanx._src.strategies.mirrored.MirroredStrategy",
        "phalanx._src.strategies.base.Strategy",
        "phalanx._src.input.iterator.DistributedIterator",
    ], found.stdout


def test_design_names_the_packages():
    """All of them, in the order in which they import each other."""
    text = (ROOT / "DESIGN.md").read_text(encoding="utf-8")
    table = re.findall(
        r"^\| `(\w+)` \|", text[text.index("| package |") : text.index("## State of the process")], re.MULTILINE
    )
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (layers,) = [c["layers"] for c in contracts if c.get("containers") == ["phalanx._src"]]
    packages = {path.parent.name for path in (ROOT / "src/phalanx/_src").glob("*/__init__.py")}
    assert table == [layer for layer in layers if layer in packages]
    assert set(table) == packages


def test_tour_leads_to_files():
    """Every file that the tour of CONTRIBUTING.md names exists: in the engine, or below the project's folder."""
    tour = (ROOT / "CONTRIBUTING.md").read_text().split("## A tour in ten questions")[1].split("\n## ")[0]
    files = re.findall(r"`([a-z_/]+\.py)`", tour)
    assert len(files) > 10
    assert [f for f in files if not any((ROOT / room / f).exists() for room in ("src/phalanx/_src", "."))] == []
