"""The calls of `Checkpoint`: where they may stand, and what fails in the background."""

import keras
import numpy as np
import pytest
from tests import forks

import phalanx
from phalanx.errors import CheckpointError, ContextError, InvalidArgumentError
from phalanx.train import Checkpoint, CheckpointOptions


def test_counter_numbers_the_saves(tmp_path):
    """It is restored too, so that numbers go on. `write` does not count."""
    step = keras.Variable(3)
    checkpoint = Checkpoint(step=step)
    assert checkpoint.save(tmp_path / "c") == str(tmp_path / "c-1")
    assert checkpoint.save(tmp_path / "c") == str(tmp_path / "c-2")
    assert checkpoint.write(tmp_path / "d") == str(tmp_path / "d")
    fresh = Checkpoint(step=keras.Variable(0))
    fresh.restore(tmp_path / "c-2").assert_consumed()
    assert (int(fresh.step), int(fresh.save_counter)) == (3, 2)
    other = Checkpoint(step=keras.Variable(0))
    other.read(tmp_path / "c-2.safetensors").assert_existing_objects_matched()
    assert (int(other.step), int(other.save_counter)) == (3, 2)


def test_values_are_those_of_the_call(tmp_path):
    """What changes while the file is written is not in it."""
    variable, array = keras.Variable(np.zeros(1000)), np.zeros(1000)
    checkpoint = Checkpoint(variable=variable, array=array)
    path = checkpoint.write(tmp_path / "c")
    variable.assign(np.ones(1000))
    array[:] = 1
    checkpoint.read(path)
    assert variable.numpy().sum() == array.sum() == 0


def test_steps_during_a_save_do_not_change_it(tmp_path):
    """They consume the arrays of the variables, which the file must not share."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        variables = [keras.Variable(np.zeros((200, 200)), aggregation="mean", trainable=False) for _ in range(20)]

    def step():
        for variable in variables:
            variable.assign_add(np.ones((200, 200)))

    checkpoint = Checkpoint(variables=variables)
    for _ in range(5):
        strategy.run(step)
        checkpoint.save(tmp_path / "c")
    for number in range(1, 6):
        checkpoint.restore(tmp_path / f"c-{number}")
        assert {float(v.numpy().mean()) for v in variables} == {number}


@pytest.mark.parametrize("call", ["save", "write", "restore", "read"])
def test_calls_in_a_step_are_refused(tmp_path, call):
    """In a replica function and in a traced function."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    checkpoint = Checkpoint(step=keras.Variable(0))
    checkpoint.save(tmp_path / "c")
    checkpoint.sync()

    def step():
        getattr(checkpoint, call)(tmp_path / "c-1")

    for run in (lambda: strategy.run(step), phalanx.function(step)):
        with pytest.raises(
            ContextError, match=rf"Checkpoint.{call}\(.*\) in a replica function.*\nHINT: call it between two steps"
        ):
            run()


def test_calls_within_a_call_are_refused(tmp_path):
    """The state of an object must not change while it is saved."""

    class Restores:
        def get_state(self):
            checkpoint.restore(tmp_path / "a-1")

        def set_state(self, state):
            pass

    Checkpoint(step=keras.Variable(0)).save(tmp_path / "a")
    checkpoint = Checkpoint(own=Restores())
    with pytest.raises(CheckpointError, match=r"restore\(.*\) while another checkpoint is saved or restored"):
        checkpoint.save(tmp_path / "b")
    assert int(checkpoint.save_counter) == 0


def test_error_in_the_background_is_raised_by_the_next_step(tmp_path):
    """Or by the next call; once, with the name of the file."""
    strategy = phalanx.OneDeviceStrategy("cpu:0")
    (tmp_path / "file").write_text("")
    checkpoint = Checkpoint(step=keras.Variable(0))

    def fail():
        checkpoint.save(tmp_path / "file" / "c")
        phalanx._src.checkpoint.background._writing.join()

    fail()
    with pytest.raises(CheckpointError, match=r"file/c-1.safetensors: the file cannot be written"):
        strategy.run(lambda: 1.0)
    strategy.run(lambda: 1.0)
    for call in (checkpoint.sync, lambda: checkpoint.save(tmp_path / "d"), lambda: checkpoint.restore(tmp_path / "d")):
        fail()
        with pytest.raises(CheckpointError, match=r"file/c-\d.safetensors: the file cannot be written"):
            call()
    with pytest.raises(CheckpointError, match="cannot be written"):
        checkpoint.write(tmp_path / "file" / "c", CheckpointOptions(enable_async=False))


def test_last_save_that_fails_ends_the_program_with_an_error(tmp_path, run_python):
    """Nothing comes after it that could raise the error."""
    (tmp_path / "file").write_text("")
    code = (
        "import os, phalanx, keras\n"
        "exits = os._exit\n"
        "os._exit = lambda status: (print('ends with', status, flush=True), exits(0))\n"
        f"phalanx.train.Checkpoint(step=keras.Variable(1)).write({str(tmp_path / 'file' / 'c')!r})\n"
    )
    assert run_python(code, forks.run).startswith("ends with 1\nCheckpointError: a checkpoint as ")


@pytest.mark.parametrize("name", ["save", "sync", "save_counter"])
def test_names_of_methods_are_refused(name):
    """They would hide the method."""
    with pytest.raises(
        InvalidArgumentError, match=rf"Checkpoint\({name}=...\): is the name of a method.*\nHINT: Checkpoint\(my_{name}"
    ):
        Checkpoint(**{name: keras.Variable(1)})


@pytest.mark.parametrize(("name", "hint"), [("_weights", "weights"), ("_path", "path"), ("__", "objects")])
def test_private_names_are_refused(name, hint):
    """Attributes with such names are not saved, and some belong to the checkpoint itself."""
    with pytest.raises(
        InvalidArgumentError, match=rf"Checkpoint\({name}=...\): .*underscore.*\nHINT: Checkpoint\({hint}="
    ):
        Checkpoint(**{name: keras.Variable(1)})


def test_wrong_arguments_are_refused(tmp_path):
    """Paths, options and flags."""
    checkpoint = Checkpoint(step=keras.Variable(0))
    for call in (checkpoint.save, checkpoint.write, checkpoint.restore, checkpoint.read):
        with pytest.raises(InvalidArgumentError, match="=3"):
            call(3)
        with pytest.raises(InvalidArgumentError, match=r"options=1: must be CheckpointOptions or None."):
            call(tmp_path / "c", 1)
    with pytest.raises(InvalidArgumentError, match="enable_async=1"):
        CheckpointOptions(enable_async=1)


def test_error_in_the_background_is_raised_at_the_end_of_fit(tmp_path):
    """A callback saves at the end of the last epoch. `fit` waits for the file."""
    with phalanx.OneDeviceStrategy("cpu:0").scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    (tmp_path / "file").write_text("no folder")
    checkpoint = Checkpoint(model=model)
    saving = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: checkpoint.save(tmp_path / "file" / "c"))
    with pytest.raises(CheckpointError, match="file/c-1.safetensors"):
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=[saving])
