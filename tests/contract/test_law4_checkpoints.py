"""Law 4: a checkpoint saved under any strategy loads under any other, and training goes on as if nothing had happened.

Two more rows, several processes and parameter servers, are in tests/cluster/parameter_server/test_checkpoints.py.
"""

import functools
import os

import pytest
from checkpoint_training import MODELS, STRATEGIES, Training, assert_goes_on, depends_on_replicas
from strategy_table import ROWS


@functools.cache
def training(row, name):
    """One training per row and model, which all pairs share."""
    return Training(ROWS[row](), name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns a checkpoint of a row and model, and how its training went on."""
    folder = tmp_path_factory.mktemp("checkpoints")
    yield functools.cache(lambda row, name: training(row, name).save(os.path.join(folder, f"{row}-{name}")))
    training.cache_clear()


LAST = STRATEGIES[-1]
# A star: each loads what it saved itself, and what the last one saved, or the last one loads it. Each with one of the models.
COVER = {
    (*pair, list(MODELS)[(i + 2) % len(MODELS)])
    for i, s in enumerate(STRATEGIES)
    for pair in ((s, s), (s, LAST) if i % 2 else (LAST, s))
}


@pytest.mark.cover(["saved_under", "loaded", "name"], COVER)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("loaded", STRATEGIES)
@pytest.mark.parametrize("saved_under", STRATEGIES)
def test_every_strategy_loads_what_any_saved(saved, saved_under, loaded, name):
    """With the same bits if the strategy is the same."""
    first, run = saved(saved_under, name), training(loaded, name)
    undisturbed = first
    if depends_on_replicas(name, first, run.strategy.num_replicas_in_sync):
        undisturbed = run.load(first, by_hand=True)
    assert_goes_on(first, run.load(first), undisturbed, is_exact=saved_under == loaded)
