"""Datasets of other libraries. Those that are not installed are skipped; `make test-sources` installs them."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest


def pytest_generate_tests(metafunc):
    """Runs a law for each row of the table of its class."""
    if "source" in metafunc.fixturenames:
        table = metafunc.cls.SOURCES
        metafunc.parametrize("source", table.values(), ids=table.keys())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a source finds, or leaves, its files."""
    return tmp_path_factory.mktemp("rows")
