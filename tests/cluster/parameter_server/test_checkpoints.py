"""Law 4 for two processes and for parameter servers with divided variables: with one device, and with every other strategy."""

import functools
import itertools
import json
from pathlib import Path

import pytest
from checkpoint_training import (
    MODELS,
    STRATEGIES,
    ServersTraining,
    Training,
    assert_goes_on,
    assert_state,
    assert_values,
    depends_on_replicas,
)
from processes import DIVIDED
from strategy_table import ROWS

PROCESSES, SERVERS = OURS = ("two_processes", "servers")
PAIRS = [pair for pair in itertools.product([*STRATEGIES, *OURS], repeat=2) if {*pair} & {*OURS}]
"""With those of tests/contract/test_law4_checkpoints.py, all pairs of ten strategies."""

EACH = {(PROCESSES, "normalized"), (SERVERS, "shared")}
"""One model for each of the two: with statistics of replicas, and with variables that are divided between servers."""
COVER = {
    (PROCESSES, SERVERS, "normalized"),
    (SERVERS, PROCESSES, "normalized"),
    (PROCESSES, PROCESSES, "normalized"),
    (SERVERS, SERVERS, "shared"),
}
"""What one device has to do with both follows from the two tests above, and what other strategies have from the law of one process."""


class InProcesses:
    """The training in two workers, which must agree."""

    def __init__(self, cluster, name):
        self._cluster, self._name = cluster, name

    def save(self, path):
        return self._both("save_checkpoint", path=path)

    def load(self, saved, *, by_hand=False):
        return self._both("load_checkpoint", saved=saved, by_hand=by_hand)

    def _both(self, task, **kwargs):
        first, second = self._cluster.call(task, deadline_s=300, name=self._name, **kwargs)
        assert not isinstance(first, str), first
        assert first.losses == second.losses
        return first


@pytest.fixture(scope="module")
def runs(cluster_of, shared_strategies):
    """Returns a function that returns the training of a strategy and model, with `save` and `load`."""

    @functools.cache
    def make(row, name):
        if row == PROCESSES:
            return InProcesses(cluster_of(2, 1), name)
        return ServersTraining(shared_strategies(**DIVIDED), name) if row == SERVERS else Training(ROWS[row](), name)

    yield make
    make.cache_clear()


@pytest.fixture(scope="module")
def saved(tmp_path_factory, runs):
    """Returns a checkpoint of a strategy and model, and how its training went on."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return functools.cache(lambda row, name: runs(row, name).save(str(folder / f"{row}-{name}")))


def contents_of(path):
    """All that a file notes but the names that Keras has given, and names, dtypes and bits of arrays but those of replicas."""
    data = Path(f"{path}.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    notes = json.loads(header.pop("__metadata__")["notes"])
    arrays = {name: data[start:][slice(*x.pop("data_offsets"))] for name, x in header.items()}
    of_all = [{k: v for k, v in x.items() if not k.endswith("@replicas")} for x in (header, arrays, notes["sums"])]
    return of_all, [*of_all[0]], [*notes["names"]], [notes[key] for key in ("values", "aliases", "dtypes")]


@pytest.mark.cover(["row", "name"], EACH)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("row", OURS)
def test_file_is_that_of_one_device(saved, runs, row, name, tmp_path):
    """One device that has the same values writes the same, to the last bit."""
    ours, alone = saved(row, name), runs("one_device", name)
    alone.put(ours.values, ours.position)
    alone.checkpoint.write(tmp_path / "alone")
    alone.checkpoint.sync()
    assert contents_of(ours.path) == contents_of(tmp_path / "alone")


@pytest.mark.cover(["row", "name"], EACH)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("row", OURS)
def test_file_of_one_device_is_loaded(saved, runs, row, name):
    """The values have the same bits, and the training goes on as from values that are assigned one by one."""
    first, run = saved("one_device", name), runs(row, name)
    loaded = run.load(first)
    assert_state(first, loaded, is_exact=True)
    if (row, name) == (SERVERS, "normalized"):
        return  # The masks of a scheduled step depend on the number of steps that were scheduled before.
    by_hand = run.load(first, by_hand=True)
    assert loaded.losses == by_hand.losses
    assert_values(loaded.after, by_hand.after, is_exact=True)
    if name != "normalized":
        assert_goes_on(first, loaded, first, is_exact=False)


@pytest.mark.cover(["saved_under", "loaded", "name"], COVER)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("saved_under", "loaded"), PAIRS)
def test_every_strategy_loads_what_any_saved(saved, runs, saved_under, loaded, name):
    """With the same bits if the strategy is the same."""
    first, run = saved(saved_under, name), runs(loaded, name)
    if name == "normalized" and SERVERS in (saved_under, loaded):
        assert_state(first, run.load(first))
        return
    replicas = {PROCESSES: 2, SERVERS: 1}.get(loaded) or run.strategy.num_replicas_in_sync
    undisturbed = run.load(first, by_hand=True) if depends_on_replicas(name, first, replicas) else first
    assert_goes_on(first, run.load(first), undisturbed, is_exact=saved_under == loaded)


def test_processes_learn_what_failed_in_another(cluster_of, tmp_path):
    """Different calls, a path that only one can read, and a disk error of the chief."""
    (tmp_path / "file").write_text("")
    first, second = cluster_of(2, 1).call("failing_checkpoints", folder=str(tmp_path), deadline_s=300)
    for told in (first, second):
        assert "the processes made different calls" in told[0]
        assert "HINT: the same call with the same path in all processes" in told[0]
        assert "the processes made different calls" in told[1]
        assert "there is no such file" in told[2]
    assert "rank 1: Checkpoint.restore(None)" in second[4]
    assert "there is no such file" in first[4]
    assert "the file cannot be written" in first[3]
    assert "failed in other processes. rank 0:" in second[3]
    assert "the file cannot be written" in second[3]
