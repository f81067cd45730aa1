"""Hooks that save checkpoints and summaries."""

import threading

import numpy as np
import pytest
from event_files import written
from one_weight import made, rows, saved
from refusals import refusals, refused

import phalanx.estimator as estimator
from phalanx import summary
from phalanx.errors import InvalidArgumentError

test_arguments_that_are_refused = refusals(
    InvalidArgumentError,
    (lambda: estimator.CheckpointSaverHook(3, 1), ["checkpoint_dir=3", "must be a path"]),
    (lambda: estimator.CheckpointSaverHook("a"), ["every_secs=None and", "exactly one"]),
    (lambda: estimator.CheckpointSaverHook("a", 1, 1), ["every_secs=1 and", "exactly one"]),
    (lambda: estimator.CheckpointSaverHook("a", 1, saver=3), ["saver=3", "must be a Saver"]),
    (lambda: estimator.CheckpointSaverHook("a", 1, checkpoint_basename=3), ["checkpoint_basename=3", "a path"]),
    (lambda: estimator.CheckpointSaverHook("a", 1, scaffold=3), ["scaffold=3", "the variables of the graph"]),
    (lambda: estimator.CheckpointSaverHook("a", 1, listeners=3), ["a saving listener=3", "must be a"]),
    (lambda: estimator.CheckpointSaverHook("a", 1, listeners=["b"]), ["a saving listener='b'", "must be a"]),
    (lambda: estimator.SummarySaverHook(1), ["summary_op=None", "a dict from tags"]),
    (lambda: estimator.SummarySaverHook(1, summary_op={"a": "b"}), ["without a writer", "a writer or a folder"]),
    (lambda: estimator.SummarySaverHook(1, output_dir=3, summary_op={"a": "b"}), ["output_dir=3", "must be a path"]),
    (
        lambda: estimator.SummarySaverHook(1, output_dir="a", summary_op={"a": "b"}, scaffold=3),
        ["scaffold=3", "has no summaries"],
    ),
    (lambda: estimator.SummarySaverHook(output_dir="a", summary_op={"a": "b"}), ["every_secs=None and", "exactly one"]),
)


def test_hook_of_the_user_saves_alone(tmp_path):
    """It replaces that of the Estimator, and writes into its own folder, under its own name."""
    hook = estimator.CheckpointSaverHook(str(tmp_path / "own"), save_steps=2, checkpoint_basename="mine")
    made(tmp_path / "model").train(rows(3), [hook])
    assert saved(tmp_path / "own", "mine") == [0, 2, 3]
    assert saved(tmp_path / "model") == []


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"save_checkpoints_secs": 1000}, [0, 4]),
        ({"save_checkpoints_steps": 1, "keep_checkpoint_max": 2}, [3, 4]),
        ({"save_checkpoints_steps": 1, "keep_checkpoint_max": None}, [0, 1, 2, 3, 4]),
        ({"save_checkpoints_steps": 1, "keep_checkpoint_max": 0}, [0, 1, 2, 3, 4]),
    ],
)
def test_checkpoints_that_are_left(options, wanted, tmp_path):
    """A long time saves at the beginning and at the end alone. None or 0 keeps all checkpoints."""
    made(tmp_path, **options).train(rows(4))
    assert saved(tmp_path) == wanted


def test_listener_ends_the_training(tmp_path):
    """If `after_save` returns True; the base class does nothing."""

    class Ends(estimator.CheckpointSaverListener):
        def after_save(self, session, global_step_value):
            return global_step_value == 2

    model = made(tmp_path, save_checkpoints_steps=1)
    assert model.train(rows(9), saving_listeners=[Ends()]).get_variable_value("global_step") == 2
    base = estimator.CheckpointSaverListener()
    assert base.begin() is base.before_save(None, 0) is base.after_save(None, 0) is base.end(None, 0) is None


def test_summaries_go_to_a_writer(tmp_path):
    """The writer of the user is used, and the values are those of the steps. A fetch that is not known is an error."""
    writer = summary.create_file_writer(str(tmp_path / "own"))
    hook = estimator.SummarySaverHook(save_secs=0, summary_writer=writer, summary_op={"a": "loss", "b": "weight"})
    made(tmp_path / "model").train(rows(2), [hook])
    found = written(tmp_path / "own")
    np.testing.assert_allclose([value for _, value in found["a"]], [2.5, 0.625], rtol=1e-6)
    np.testing.assert_allclose([value for _, value in found["b"]], [1.5, 1.75], rtol=1e-6)
    writer.close()
    hook = estimator.SummarySaverHook(1, output_dir=str(tmp_path / "own"), summary_op={"a": "nothing"})
    with refused(InvalidArgumentError, ["fetches='nothing'"]):
        made(tmp_path / "model").train(rows(1), [hook])


def test_training_that_fails_has_written_its_checkpoint(tmp_path):
    """The error arrives after the last checkpoint, so that a training in the same folder finds it whole."""

    def failing():
        yield from rows(2)()
        raise OSError("the disk is gone")

    model = made(tmp_path, save_checkpoints_steps=1)
    with pytest.raises(OSError, match="the disk is gone"):
        model.train(failing)
    assert not [t for t in threading.enumerate() if t.name.startswith("phalanx-checkpoint")]
    assert model.get_variable_value("global_step") == 1
