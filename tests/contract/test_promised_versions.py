"""The versions that `make test-oldest` installs are the lowest ones that pyproject.toml promises."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]


def test_oldest_versions_are_the_lower_bounds():
    """Each dependency, and each of an extra that a user may ask for, has its lower bound in the file, and no other."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [project["optional-dependencies"][name] for name in ("data", "ps", "tensorboard")]
    required = [Requirement(text) for texts in (project["dependencies"], *extras) for text in texts]
    promised = {
        requirement.name: Version(bound.version)
        for requirement in required
        for bound in requirement.specifier
        if bound.operator == ">="
    }
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pinned = dict(re.fullmatch(r"(\S+)==(\S+)", line).groups() for line in lines if not line.startswith("#"))
    assert {name: Version(version) for name, version in pinned.items()} == promised
    assert promised.keys() == {requirement.name for requirement in required}
