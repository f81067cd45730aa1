"""Every law takes `strategy`, which goes through the whole table."""

import pytest
from strategy_table import ROWS


def pytest_addoption(parser):
    """Known where `tests/contract` is named on the command line."""
    parser.addoption("--full", action="store_true", help="the whole table of fit instead of a part that covers it")


@pytest.fixture(params=ROWS)
def strategy(request):
    """One row of the table, made anew."""
    return ROWS[request.param]()
