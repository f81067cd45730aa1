"""Fixtures."""

import gc

import pytest


@pytest.fixture(autouse=True)
def collected(clean_slate):
    """The threads with which Grain reads ahead end once its iterators are collected."""
    yield
    gc.collect()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Shows the logs of the workers with a failed test."""
    report = yield
    if report.failed and "workers" in item.funcargs:
        report.sections.append(("workers", item.funcargs["workers"].logs()))
    return report
