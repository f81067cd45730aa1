"""Every law takes `strategy`, which goes through the whole table."""

import pytest
from strategy_table import ROWS


@pytest.fixture(params=ROWS)
def strategy(request):
    """One row of the table, made anew."""
    return ROWS[request.param]()
