"""Misspelt names of public modules."""

import importlib
import pkgutil
import re

import pytest

import phalanx

MODULES = [
    module.name
    for module in pkgutil.walk_packages(phalanx.__path__, "phalanx.")
    # phalanx.typing is below phalanx.errors, and has one name.
    if not re.search(r"\._|\.errors\.|\.api$|\.typing$", module.name)
]
PUBLIC = [name for name in MODULES if hasattr(importlib.import_module(name), "__all__")]


@pytest.mark.parametrize("module", PUBLIC)
def test_misspelt_name_suggests_the_nearest(module):
    """In every public module, as in `phalanx` itself."""
    name = importlib.import_module(module).__all__[0]
    wrong = name + "x"
    with pytest.raises(AttributeError, match=rf"^module '{module}' has no attribute '{wrong}'\nHINT: {module}.{name}$"):
        getattr(importlib.import_module(module), wrong)


def test_names_that_resemble_nothing():
    """No hint is better than a wrong one; and Python asks for names of its own."""
    with pytest.raises(AttributeError, match="^module 'phalanx.train' has no attribute 'xyzzy'$"):
        _ = phalanx.train.xyzzy
    with pytest.raises(AttributeError, match="^module 'phalanx.train' has no attribute '__al__'$"):
        phalanx.train.__al__  # noqa: B018
