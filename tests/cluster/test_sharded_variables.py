"""Variables that no process holds whole: checkpoints for any number of processes, bytes, and reads of one process alone."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sharding

import phalanx

SAVED = [((2, 1), 1), ((4, 1), 1), ((4, 1), 2)]
LOADED = [((2, 1), 1), ((2, 1), 2), ((2, 2), 4), ((4, 1), 1)]


@pytest.fixture(scope="module")
def saved(cluster_of, tmp_path_factory):
    """A function that returns the path of a checkpoint, and the losses of the training that has saved it."""
    kept = {}

    def save(size, devices):
        if (size, devices) not in kept:
            path = str(tmp_path_factory.mktemp("sharded") / "ckpt")
            losses = cluster_of(*size).call("save_shards", path=path, devices_per_replica=devices)
            assert isinstance(losses[0], list), losses[0]
            kept[size, devices] = f"{path}-1", losses[0]
        return kept[size, devices]

    return save


@pytest.mark.cover(["source", "target"], {(((2, 1), 1), ((2, 1), 2))})
@pytest.mark.parametrize("source", SAVED, ids=str)
@pytest.mark.parametrize("target", LOADED, ids=str)
def test_any_layout_loads_what_any_saved(cluster_of, saved, source, target):
    """The next losses are those of the training that has saved."""
    path, losses = saved(*source)
    size, devices = target
    got = cluster_of(*size).call("load_shards", path=path, devices_per_replica=devices)
    np.testing.assert_allclose(got, [losses] * size[0], rtol=1e-5)


@pytest.mark.exhaustive("test_one_device_loads_what_processes_saved")
def test_whole_variables_load_shards(cluster_of, saved):
    """Processes that hold all variables whole."""
    path, losses = saved((2, 1), 1)
    np.testing.assert_allclose(cluster_of(2, 1).call("load_whole", path=path), [losses] * 2, rtol=1e-5)


def test_one_device_loads_what_processes_saved(saved):
    """In a process without a cluster."""
    path, losses = saved((2, 1), 1)
    trained = sharding.Trained(phalanx.OneDeviceStrategy("cpu:0"), 2)
    trained.checkpoint.restore(path).assert_existing_objects_matched()
    np.testing.assert_allclose(trained.losses(), losses, rtol=1e-5)


def test_slots_that_do_not_exist_yet_get_their_shards(cluster_of, tmp_path):
    """The momentum of the first step, 0.2, counts half in the second one."""
    for first, second in cluster_of(2, 1).call("restore_before_slots", path=str(tmp_path / "slots")):
        np.testing.assert_allclose(first, np.full((4, 2), 0.8), rtol=1e-6)
        np.testing.assert_allclose(second, np.full((4, 2), 0.5), rtol=1e-6)


def test_arrays_of_jax_that_span_processes(cluster_of, tmp_path):
    """They are saved and restored as variables are: each process writes and reads its shards."""
    path = tmp_path / "arrays"
    assert cluster_of(2, 1).call("move_arrays", path=str(path)) == [[[0.0, 1.0]], [[2.0, 3.0]]]
    np.testing.assert_array_equal(phalanx.train.load_variable(path, "params/w"), np.arange(4.0))


def test_shards_of_the_process_before(cluster_of):
    """Each device gets the shard of one device of the process before, and the numbers of all processes have their order."""
    first, second = cluster_of(2, 2).call("move_to_neighbour")
    assert first == [[[4, 5], [6, 7]], [[0, 7], [1, 7]]]
    assert second == [[[0, 1], [2, 3]], [[0, 7], [1, 7]]]


@pytest.mark.cover(["size"], {(2, 1)})
@pytest.mark.parametrize("size", [(2, 1), (4, 1)])
def test_no_process_holds_a_whole_variable(cluster_of, tmp_path, size):
    """Created, trained, saved and loaded: each process has its part, and little else."""
    for parts in cluster_of(*size).call("bytes_of_large_model", folder=str(tmp_path)):
        assert max(parts.values()) < 1.2 / size[0], parts


def test_optax_updates_the_shards_of_each_process(cluster_of):
    """As a loop of Optax on one device: the gradients are clipped by their norm over both processes."""
    tx, w = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1)), jnp.ones((6, 4))
    state = tx.init(w)
    for rows in (sharding.X[:16], sharding.X[16:19]):
        updates, state = tx.update(jax.grad(lambda w, x: ((x @ w) ** 2).mean())(w, rows), state, w)
        w = optax.apply_updates(w, updates)
    for *rows, num_bytes in cluster_of(2, 1).call("train_with_optax"):
        np.testing.assert_allclose(rows, w, rtol=1e-5, atol=1e-6)
        assert num_bytes == [6 * 4 * 4 / 2] * 3


def test_reads_that_not_all_processes_make(cluster_of):
    """One process is told so although the others are in a step, and each of them if they read different variables."""
    (alone, *first), second = cluster_of(2, 1).call("read_alone")
    assert "ContextError: variable 'sequential" in alone
    assert "no process holds all of it" in alone
    assert "HINT: make this call on every process" in alone
    assert "the program is a read of variable 'sequential" in alone
    assert "on rank 0 and a step of fit or run on rank 1" in alone
    for text in (*first, *second):
        assert text.count("a read of variable 'sequential") == 2
        assert " by call() (" in text


@pytest.mark.parametrize("is_sharded", [False, True])
def test_all_processes_save_and_the_chief_writes(cluster_of, tmp_path, is_sharded):
    """The file is complete when the call returns, in each process. Others write what they alone save, if they have all of it."""
    (*wrong, alone, written), others = cluster_of(2, 1).call("save_in_all", folder=str(tmp_path), is_sharded=is_sharded)
    assert (wrong, others) == ([], [] if is_sharded else [str(tmp_path / "1" / "w.weights.h5")])
    assert alone.startswith("ContextError: variable 'sequential") if is_sharded else alone == "no error"
    assert written == str(tmp_path / "0" / "w.weights.h5")


def test_writers_of_one_process_are_refused(cluster_of, tmp_path):
    """Before the first step, on all processes."""
    for reply in cluster_of(2, 1).call("refuse_what_reads_alone", folder=str(tmp_path)):
        assert reply.startswith("InvalidArgumentError: keras.callbacks.ModelCheckpoint with layout=")
        assert "HINT: phalanx.keras.ModelCheckpoint(folder)" in reply


def test_eager_steps_are_refused(cluster_of):
    """Outside of a program, no process can read a variable of which it has a part."""
    for reply in cluster_of(2, 1).call("refuse_eager_steps"):
        assert reply.startswith(
            "InvalidArgumentError: RunOptions(eager=True), or run_eagerly=True in Keras: no process has"
        )
        assert "HINT: phalanx.OneDeviceStrategy(...) to debug a step" in reply


def test_processes_sum_without_the_reduce_scatter_of_gloo(cluster_of):
    """It is wrong for three processes, and slower than other exchanges for two."""
    assert cluster_of(2, 1).call("exchanges_of_step") == [["all_to_all"]] * 2


def test_different_first_values_of_one_shard(cluster_of):
    """They are found before the first step."""
    found = (
        r"DivergenceError: the variable 'variable\w*' of a layout on 2 processes: the processes have given it different"
    )
    for reply in cluster_of(2, 2).call("first_values_differ"):
        assert re.match(found, reply)


def test_shards_in_a_store(cluster_of, tmp_path):
    """Each process copies its pieces there, and reads those that it needs."""
    path = f"store://{tmp_path}/run/ckpt"
    losses = cluster_of(2, 1).call("save_shards", path=path)
    assert isinstance(losses[0], list), losses[0]
    np.testing.assert_allclose(cluster_of(2, 1).call("load_shards", path=f"{path}-1"), losses, rtol=1e-5)
    assert len(list((tmp_path / "run" / "ckpt-1.shards").iterdir())) == 2
