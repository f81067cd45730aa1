"""Every law takes `strategy`, which goes through the whole table."""

import jax
import pytest
from strategy_table import ROWS


@pytest.fixture(params=ROWS)
def strategy(request):
    """One row of the table, made anew."""
    return ROWS[request.param]()


@pytest.fixture
def whole_tracebacks():
    """JAX looks at the file of each frame of an error, which takes most of the time of thousands of errors."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", before)
