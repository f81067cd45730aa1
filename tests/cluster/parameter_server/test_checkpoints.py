"""Law 4 for two processes and for parameter servers with divided variables: with each other, and with every other strategy."""

import functools
import os

import pytest
from checkpoint_training import (
    MODELS,
    STRATEGIES,
    ServersTraining,
    Training,
    assert_goes_on,
    assert_state,
    depends_on_replicas,
)
from strategy_table import ROWS

import phalanx

PROCESSES, SERVERS = "two_processes", "servers"
PAIRS = [
    *((PROCESSES, other) for other in STRATEGIES),
    *((other, PROCESSES) for other in STRATEGIES),
    *((SERVERS, other) for other in STRATEGIES),
    *((other, SERVERS) for other in STRATEGIES),
    *((a, b) for a in (PROCESSES, SERVERS) for b in (PROCESSES, SERVERS)),
]
"""With those of tests/contract/test_law4_checkpoints.py, all pairs of ten strategies."""


def partitioner(shape, dtype):
    """Divides what has many rows."""
    return [2 if len(shape) > 1 and shape[0] > 4 else 1, *(1 for _ in shape[1:])]


@pytest.fixture(scope="module")
def runs(cluster_of):
    """Returns a function that returns the training of a strategy and model, with `save` and `load`."""
    strategy = phalanx.ParameterServerStrategy(workers=1, ps=2, variable_partitioner=partitioner)

    class InProcesses:
        """The training in two workers, which must agree."""

        def __init__(self, name):
            self.name = name

        def save(self, path):
            """What the first one has seen."""
            return self._both("save_checkpoint", path=path)

        def load(self, saved, *, by_hand=False):
            """What the first one has seen."""
            return self._both("load_checkpoint", saved=saved, by_hand=by_hand)

        def _both(self, task, **kwargs):
            first, second = cluster_of(2, 1).call(task, deadline_s=120, name=self.name, **kwargs)
            assert not isinstance(first, str), first
            assert first.losses == second.losses
            return first

    @functools.cache
    def make(row, name):
        if row == PROCESSES:
            return InProcesses(name)
        return ServersTraining(strategy, name) if row == SERVERS else Training(ROWS[row](), name)

    yield make
    make.cache_clear()
    strategy.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory, runs):
    """Returns a checkpoint of a strategy and model, and how its training went on."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return functools.cache(lambda row, name: runs(row, name).save(os.path.join(folder, f"{row}-{name}")))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("saved_under", "loaded"), PAIRS)
def test_every_strategy_loads_what_any_saved(saved, runs, saved_under, loaded, name):
    """With the same bits if the strategy is the same."""
    first, run = saved(saved_under, name), runs(loaded, name)
    if name == "normalized" and SERVERS in (saved_under, loaded):
        # The masks of a scheduled step depend on the number of steps that were scheduled before, so only the state is compared.
        assert_state(first, run.load(first))
        return
    replicas = {PROCESSES: 2, SERVERS: 1}.get(loaded) or run.strategy.num_replicas_in_sync
    undisturbed = run.load(first, by_hand=True) if depends_on_replicas(name, first, replicas) else first
    assert_goes_on(first, run.load(first), undisturbed, is_exact=saved_under == loaded)


def test_processes_learn_what_failed_in_another(cluster_of, tmp_path):
    """Different calls, a path that only one can read, and a disk error of the chief."""
    (tmp_path / "file").write_text("")
    first, second = cluster_of(2, 1).call("failing_checkpoints", folder=str(tmp_path))
    for told in (first, second):
        assert "the processes made different calls" in told[0]
        assert "HINT: the same call with the same path in all processes" in told[0]
        assert "the processes made different calls" in told[1]
        assert "there is no such file" in told[2]
    assert "the file cannot be written" in first[3]
    assert "failed in other processes. rank 0:" in second[3]
    assert "the file cannot be written" in second[3]
